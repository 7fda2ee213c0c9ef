"""What the order book promises, without a bus."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from snapshot_shared.clocks import Clocks
from snapshot_shared.codec import encode_json
from snapshot_shared.errors import MAX_VALUES_BYTES, Incompatible, SourceExited, Superseded
from snapshot_shared.ids import NodeName, Uid, order_id
from snapshot_shared.journal import Journal
from snapshot_shared.ledger import Entry
from snapshot_shared.order_book import OrderBook, Result
from snapshot_shared.orders import ArtifactRef, DeleteOrder, Report, VerifyOrder

NODE = NodeName("node-1")
OWNER = Uid("00000000-0000-0000-0000-000000000001")
NOW = 2_000_000_000.0


OF_NODE: dict[str, Any] = {"node": NODE, "owner": OWNER, "deadline_s": 20.0}
OF_ARTIFACT: dict[str, Any] = {"namespace": "default", "content_uid": OWNER}


def order(attempt: int = 1) -> DeleteOrder:
    name = order_id("delete", OWNER)
    return DeleteOrder(order=name, attempt=attempt, generation=1, **OF_NODE, **OF_ARTIFACT)


def verify(generation: int) -> VerifyOrder:
    digest = f"sha256:{'0' * 64}"
    artifact = ArtifactRef(generation=generation, root_digest=digest, **OF_ARTIFACT)
    return VerifyOrder(order=order_id("verify", OWNER), attempt=1, artifact=artifact, **OF_NODE)


def opened(folder: Path) -> OrderBook:
    journal = Journal.open(folder, wall=lambda: NOW)
    clocks = Clocks(lambda: 0.0, lambda: NOW, "boot")
    return OrderBook(node=NODE, service="agent", journal=journal, clocks=clocks)


@pytest.fixture
async def book(tmp_path: Path) -> AsyncIterator[OrderBook]:
    book = opened(tmp_path)
    yield book
    await book.drain()
    book.journal.close()


async def accepted(book: OrderBook) -> Entry:
    """Have an order accepted, and return what the book knows of it."""
    await book.accept(order())
    (entry,) = book.journal.ledger.entries.values()
    return entry


async def deleted(_entry: Entry) -> Result:
    return {"bytes": 7}


def kinds(book: OrderBook) -> list[tuple[str, int]]:
    reports, _ = book.outbox.take(100)
    return [(report.kind, report.n) for report in reports]


async def reports_of(book: OrderBook, number: int) -> list[Report]:
    """Take so many reports out of the outbox, as they come."""
    found: list[Report] = []
    async with asyncio.timeout(5):
        while len(found) < number:
            await book.outbox.filled()
            found += book.outbox.take(100)[0]
    return found


async def test_an_order_is_known_once_it_is_accepted_and_a_repeat_has_its_reports(
    book: OrderBook,
) -> None:
    assert book.answers(order()) is None
    await book.accept(order())
    book.start(order(), deleted)
    found = await reports_of(book, 2)
    assert [(report.kind, report.n) for report in found] == [("accepted", 1), ("deleted", 2)]
    assert book.answers(order()) == found


@pytest.mark.parametrize("ends", ["cancel", "drain"])
async def test_an_order_that_is_ended_before_it_could_begin_is_reported_all_the_same(
    book: OrderBook, ends: str
) -> None:
    await book.accept(order())
    book.start(order(), deleted)
    await (book.cancel(order().order, 1) if ends == "cancel" else book.drain())
    found = [report.kind for report in await reports_of(book, 2)]
    assert found in (["accepted", "failed"], ["accepted", "deleted"])


async def test_an_order_that_the_end_of_its_service_interrupts_may_be_given_again(
    book: OrderBook,
) -> None:
    begun = asyncio.Event()

    async def endless(_entry: Entry) -> Result:
        begun.set()
        await asyncio.Event().wait()
        return {}

    await book.accept(order())
    book.start(order(), endless)
    await begun.wait()
    await book.drain()
    failure: Any = (await reports_of(book, 2))[1].failure
    assert (failure.reason, failure.retryable) == ("ServiceStopped", True)


async def test_an_order_that_must_not_be_cut_ends_before_its_service(book: OrderBook) -> None:
    begun, done = asyncio.Event(), asyncio.Event()

    async def work(entry: Entry) -> Result:
        book.uncut(entry)
        begun.set()
        await done.wait()
        return {"bytes": 7}

    await book.accept(order())
    book.start(order(), work)
    await begun.wait()
    draining = asyncio.create_task(book.drain(finish_s=60.0))
    await asyncio.sleep(0.01)
    done.set()
    await draining
    assert kinds(book) == [("accepted", 1), ("deleted", 2)]


@pytest.mark.parametrize("finish_s", [0.0, 60.0])
async def test_an_order_is_cut_when_it_may_be_or_its_time_is_over(
    book: OrderBook, finish_s: float
) -> None:
    begun = asyncio.Event()

    async def endless(entry: Entry) -> Result:
        may_be_cut = book.uncut(entry)
        begun.set()
        if finish_s:
            may_be_cut.set()
        await asyncio.Event().wait()
        return {}

    await book.accept(order())
    book.start(order(), endless)
    await begun.wait()
    await book.drain(finish_s=finish_s)
    assert kinds(book) == [("accepted", 1), ("failed", 2)]


async def test_a_third_attempt_begins_when_the_first_has_ended_although_the_second_is_given_up(
    book: OrderBook,
) -> None:
    undone, begun = asyncio.Event(), asyncio.Event()
    told: list[str] = []

    async def first(_entry: Entry) -> Result:
        try:
            await asyncio.Event().wait()
        finally:
            await undone.wait()
            told.append("first")
        return {}

    async def third(_entry: Entry) -> Result:
        told.append("third")
        begun.set()
        return {}

    for attempt, work in ((1, first), (2, deleted), (3, third)):
        await book.accept(order(attempt=attempt))
        book.start(order(attempt=attempt), work)
        for _ in range(5):
            await asyncio.sleep(0)
    assert told == []
    undone.set()
    await asyncio.wait_for(begun.wait(), 5)
    assert told == ["first", "third"]


async def test_reports_of_one_order_that_are_made_together_have_numbers_of_their_own(
    book: OrderBook,
) -> None:
    entry = await accepted(book)
    await asyncio.gather(*(book.report(entry, "leased") for _ in range(5)))
    assert kinds(book) == [("accepted", 1), *(("leased", number) for number in range(2, 7))]


async def test_of_two_ends_that_come_together_the_first_counts(book: OrderBook) -> None:
    entry = await accepted(book)
    await asyncio.gather(
        book.report(entry, "deleted", bytes=7), book.fail(entry, SourceExited("gone"))
    )
    assert kinds(book) == [("accepted", 1), ("deleted", 2)]


async def test_what_was_not_delivered_is_in_the_outbox_of_the_next_start(tmp_path: Path) -> None:
    first = opened(tmp_path)
    await first.report(await accepted(first), "deleted")
    first.delivered(first.outbox.take(1)[0])
    await first.drain()
    first.journal.close()
    second = opened(tmp_path)
    assert kinds(second) == [("deleted", 2)]
    second.journal.close()


async def test_what_is_told_again_waits_behind_what_is_new_and_but_once(book: OrderBook) -> None:
    entry = await accepted(book)
    await book.report(entry, "deleted")
    book.queue_since(NOW - 1)
    assert kinds(book) == [("accepted", 1), ("deleted", 2)]
    assert kinds(book) == []
    for _ in range(3):
        book.queue_since(NOW - 1)
    assert len(book.outbox) == 2
    await book.report(entry, "exited")
    reports, are_new = book.outbox.take(100)
    assert ([report.kind for report in reports], are_new) == (["exited"], True)
    book.outbox.put_back(reports, are_new=True)
    reports, are_new = book.outbox.take(100)
    assert ([report.kind for report in reports], are_new) == (["exited"], True)
    reports, are_new = book.outbox.take(100)
    assert ([report.kind for report in reports], are_new) == (["accepted", "deleted"], False)


async def test_a_lower_attempt_is_answered_with_the_highest_known_and_changes_nothing(
    book: OrderBook,
) -> None:
    await book.accept(order(attempt=7))
    answer: Any
    (answer,) = book.answers(order(attempt=1)) or []
    assert (answer.kind, answer.attempt) == ("rejected", 1)
    assert answer.failure == Superseded(answer.failure.message, attempt=7).to_failure()
    assert [entry.attempt for entry in book.journal.ledger.entries.values()] == [7]
    assert book.answers(order(attempt=8)) is None


async def test_a_failure_is_reported_whatever_the_length_of_its_values(book: OrderBook) -> None:
    mounts = [f"/var/lib/{number}/{'x' * 60}" for number in range(200)]
    error = Incompatible("m" * 10_000, expected=mounts, found={"a": [1]}, path="p" * 9000, errno=5)
    failure = book.refusal(order().order, 1, error).failure
    assert failure is not None
    assert (failure.reason, len(failure.message)) == ("Incompatible", 4096)
    assert len(encode_json(failure.values)) <= MAX_VALUES_BYTES
    assert failure.values["expected"] == mounts[: len(failure.values["expected"])] != []
    assert (failure.values["found"], failure.values["errno"]) == ("{'a': [1]}", 5)
    many = Incompatible("many", **{f"value-{number}": number for number in range(1000)})
    cut = book.refusal(order().order, 1, many).failure
    assert cut is not None
    assert 0 < len(encode_json(cut.values)) <= MAX_VALUES_BYTES


async def test_an_attempt_that_is_known_with_another_artifact_is_refused_as_superseded(
    book: OrderBook,
) -> None:
    known, other = verify(generation=1), verify(generation=2)
    await book.accept(known)
    assert [report.kind for report in book.answers(known) or []] == ["accepted"]
    answer: Any
    (answer,) = book.answers(other) or []
    assert (answer.kind, answer.failure.reason) == ("rejected", "Superseded")
    assert answer.failure.values == {"attempt": 1, "known": f"artifact {OWNER}/gen-1"}


def test_the_order_book_needs_no_nats() -> None:
    imported = "import sys, snapshot_shared.order_book; sys.exit('nats' in sys.modules)"
    subprocess.run([sys.executable, "-c", imported], check=True)


def test_no_service_imports_aiohttp_for_nats_and_each_can_import_it_later() -> None:
    imported = """
import sys
import gms.main, snapshot_agent.main, snapshot_operator.main
assert "nats" in sys.modules
assert "aiohttp" not in sys.modules
import aiohttp
"""
    subprocess.run([sys.executable, "-c", imported], check=True)
