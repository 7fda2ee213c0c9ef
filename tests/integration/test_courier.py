"""How a service takes orders and answers them, over a real nats-server and a real journal."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from snapshot_shared import subjects
from snapshot_shared.bus import Bus, streams
from snapshot_shared.clocks import Clocks
from snapshot_shared.codec import encode_json
from snapshot_shared.courier import Courier, OrderContext
from snapshot_shared.errors import BusUnavailable, Failure, NoSpace
from snapshot_shared.ids import NodeName, OrderId, Uid, order_id
from snapshot_shared.journal import Journal
from snapshot_shared.metrics import OFF, Metrics
from snapshot_shared.order_book import OrderBook
from snapshot_shared.orders import (
    ArtifactRef,
    DeadLetter,
    DeleteOrder,
    DumpOrder,
    Order,
    PodRef,
    ReleaseOrder,
    Report,
    RestoreOrder,
)
from snapshot_shared.runner import Runner, Step
from snapshot_shared.telemetry import Telemetry
from tests.support.builders import accepted, told
from tests.support.nats_server import running_nats_server
from tests.support.waiting import until

NODE = NodeName("node-1")
OWNER = Uid("00000000-0000-0000-0000-000000000001")
OTHER = Uid("00000000-0000-0000-0000-000000000002")
ORDER = order_id("delete", OWNER, "gen-1")
NOW = 2_000_000_000.0


def order(**changes: Any) -> DeleteOrder:
    whose: dict[str, Any] = {"order": ORDER, "attempt": 1, "node": NODE, "owner": OWNER}
    what = {"namespace": "default", "content_uid": OWNER, "generation": 1, "deadline_s": 20.0}
    return DeleteOrder(**{**whose, **what, **changes})


class Deleting:
    """A handler of delete orders that counts what it did; `table` changes its steps."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.table: Callable[[OrderContext], list[Step]] = self.good

    def good(self, _context: OrderContext) -> list[Step]:
        return [self.step("tombstone"), self.step("remove")]

    def step(self, name: str, error: BaseException | None = None, **options: Any) -> Step:
        async def run() -> None:
            self.log.append(name)
            if error:
                raise error

        async def undo() -> None:
            self.log.append(f"undo {name}")

        return Step(name, run, deadline_s=options.pop("deadline_s", 5.0), undo=undo, **options)

    async def __call__(self, _order: DeleteOrder, context: OrderContext) -> dict[str, Any]:
        await context.steps("delete", self.table(context))
        return {"bytes": 7}


class Desk:
    """A bus with its reports and dead letters, and couriers to start and stop."""

    def __init__(self, bus: Bus, folder: Path, metrics: Metrics = OFF) -> None:
        self.bus = bus
        self.folder = folder
        self.metrics = metrics
        self.handler = Deleting()

    @asynccontextmanager
    async def courier(self) -> AsyncIterator[Courier]:
        metrics = self.metrics
        journal = Journal.open(self.folder, wall=lambda: NOW, metrics=metrics)
        telemetry = Telemetry("snap-agent", NODE, "0", metrics=metrics)
        clocks = Clocks(asyncio.get_running_loop().time, lambda: NOW, "boot")
        courier = Courier(
            OrderBook(node=NODE, service="agent", journal=journal, clocks=clocks, metrics=metrics),
            self.bus,
            telemetry=telemetry,
            runner=Runner(journal, telemetry, metrics=metrics),
            handlers={DeleteOrder: self.handler, DumpOrder: self.handler},
        )
        task = asyncio.create_task(courier.serve())
        try:
            yield courier
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await courier.book.drain()
            journal.close()

    async def send(self, value: Order | bytes) -> None:
        data = value if isinstance(value, bytes) else encode_json(value)
        name = ORDER if isinstance(value, bytes) else value.order
        await self.bus.publish(subjects.order(NODE, "agent", OrderId(name)), data)

    async def answered(self, value: Order | bytes, until: str = "deleted") -> list[Report]:
        """Send an order, and collect the reports up to and with one of this kind."""
        await self.send(value)
        return await self.reports(until)

    async def reports(self, until: str = "deleted") -> list[Report]:
        """Collect reports up to and with one of this kind."""
        found: list[Report] = []
        try:
            async with asyncio.timeout(10):
                source = self.bus.consume("REPORTS", "test", "snap.report.>")
                async for delivery in source:
                    await delivery.ack()
                    found.append(msgspec.json.decode(delivery.data, type=Report))
                    if found[-1].kind == until:
                        break
                await source.aclose()  # type: ignore[attr-defined]
        except TimeoutError:
            kinds = [report.kind for report in found]
            raise AssertionError(f"no {until} in {kinds}; done: {self.handler.log}") from None
        return found

    async def failure(self, until: str = "failed") -> Failure:
        """Return why the order of the next report of this kind has failed."""
        found = (await self.reports(until))[-1].failure
        assert found is not None
        return found


@asynccontextmanager
async def desk_at(url: str, folder: Path) -> AsyncIterator[Desk]:
    bus = await Bus(url, "test").connect()
    await bus.ensure_assets()
    yield Desk(bus, folder / "journal")
    await bus.close()


@pytest.fixture
async def desk(nats_url: str, tmp_path: Path) -> AsyncIterator[Desk]:
    async with desk_at(nats_url, tmp_path) as found:
        yield found


def kinds(reports: list[Report]) -> list[str]:
    return [report.kind for report in reports]


async def test_a_good_order_after_poison_of_the_same_id_and_attempt_is_heard_of(desk: Desk) -> None:
    async with desk.courier():
        assert kinds(await desk.answered(order(node="node-2"), "rejected")) == ["rejected"]
        assert kinds(await desk.answered(order())) == ["accepted", "deleted"]


async def test_whoever_guesses_the_number_of_a_report_cannot_keep_it_from_being_stored(
    desk: Desk,
) -> None:
    elsewhere = subjects.report(NodeName("node-2"), OrderId(ORDER), "accepted")
    guess = encode_json(told(order=ORDER, node="node-2"))
    await desk.bus.publish(elsewhere, guess, message_id=f"{ORDER}.1.1")
    async with desk.courier():
        found = await desk.answered(order())
    assert [(report.node, report.kind) for report in found] == [
        ("node-2", "accepted"),
        (NODE, "accepted"),
        (NODE, "deleted"),
    ]


@pytest.mark.parametrize(
    "poison",
    [
        b"\x00\xff noise",
        b"{}",
        b"[" * 100_000,
        encode_json({"type": "snapback.v1.unknown_order"}),
        encode_json(order(node="node-2")),
        encode_json(order(schema=99)),
        encode_json(order(owner=OTHER)),
        encode_json(order(not_after=NOW - 1)),
    ],
    ids=["noise", "empty", "deep", "type", "node", "schema", "owner", "late"],
)
async def test_a_poison_order_is_rejected_kept_and_the_next_is_served(
    desk: Desk, poison: bytes
) -> None:
    good = order_id("delete", OWNER, "gen-2")
    async with desk.courier():
        await desk.send(poison)
        found = await desk.answered(order(order=good, generation=2))
    assert kinds(found) == ["rejected", "accepted", "deleted"]
    assert found[0].failure is not None
    assert found[0].failure.reason
    (letter,) = await desk.bus.replay(subjects.DEAD, "snap.dead.>")
    kept = msgspec.json.decode(letter.data, type=DeadLetter)
    assert kept.payload == poison[:65536]
    assert kept.failure == found[0].failure


async def test_an_order_that_is_older_than_the_orders_on_record_is_carried_out_if_it_only_cleans(
    desk: Desk,
) -> None:
    # For this node it is 2033, and the server has stored both orders today.
    dump = DumpOrder(
        order=order_id("dump", OWNER),
        attempt=1,
        node=NODE,
        owner=OWNER,
        pod=PodRef(namespace="default", name="one", uid=OTHER, container="main"),
        content_uid=OWNER,
        vector=[],
        deadline_s=20.0,
    )
    async with desk.courier():
        await desk.send(dump)
        failure = await desk.failure()
        assert (failure.reason, failure.values["now"]) == ("OutcomeUnknown", NOW)
        assert kinds(await desk.answered(dump, "failed")) == ["failed"]
        assert desk.handler.log == []
        assert kinds(await desk.answered(order())) == ["accepted", "deleted"]


async def test_an_order_that_reaches_into_another_namespace_is_rejected(desk: Desk) -> None:
    name = order_id("release", OWNER)
    pod = PodRef(namespace="victim", name="worker", uid=OWNER)
    common: dict[str, Any] = {"order": name, "attempt": 1, "node": NODE, "owner": OWNER}
    stolen = ArtifactRef(
        namespace="default", content_uid=OWNER, generation=1, root_digest="sha256:" + "0" * 64
    )
    async with desk.courier():
        for value in (
            RestoreOrder(**common, deadline_s=9.0, artifact=stolen, pod=pod),
            ReleaseOrder(**common, deadline_s=9.0, content_uid=OTHER, pod=pod),
        ):
            await desk.send(value)
            failure = await desk.failure("rejected")
            assert "reaches beyond its owner" in failure.message, failure


async def test_an_order_of_an_unknown_version_is_rejected_naming_both_and_so_is_its_repeat(
    desk: Desk,
) -> None:
    async with desk.courier():
        await desk.send(order(schema=2))
        first = await desk.failure("rejected")
    async with desk.courier() as upgraded:
        upgraded.schemas = (1, 2)
        await desk.send(order(schema=2))
        assert await desk.failure("rejected") == first
    async with desk.courier():
        unknown = encode_json({"type": "snapback.v2.move_order", "attempt": 3, "schema": 2})
        (found,) = await desk.answered(unknown, "rejected")
    assert (first.reason, first.retryable) == ("UnsupportedVersion", True)
    assert first.values == {"found": 2, "supported": [1]}
    assert found.attempt == 3
    assert found.failure is not None
    assert found.failure.values == first.values
    assert desk.handler.log == []


async def test_what_a_newer_build_accepted_and_this_one_cannot_read_ends_by_name(
    desk: Desk,
) -> None:
    journal = Journal.open(desk.folder, wall=lambda: NOW)
    for number, fields in ((1, {"schema": 2}), (2, {"type": "snapback.v1.move_order"})):
        name = order_id("delete", OWNER, f"gen-{number}")
        document = {**msgspec.to_builtins(order(order=name, generation=number)), **fields}
        payload = msgspec.Raw(encode_json(document))
        await journal.append(accepted(order=name, payload=payload, boot_id="boot", wall=NOW))
    journal.close()
    async with desk.courier():
        found = [*await desk.reports("failed"), *await desk.reports("failed")]
    messages = [report.failure.message for report in found if report.failure is not None]
    assert "has schema 2, agent on node-1 reads 1" in messages[0]
    assert "snapback.v1.move_order" in messages[1]
    assert desk.handler.log == []


async def test_a_repeat_is_answered_from_the_record_and_does_nothing_again(desk: Desk) -> None:
    async with desk.courier():
        for _ in range(2):
            found = await desk.answered(order())
            facts = [(report.kind, report.n, report.bytes) for report in found]
            assert facts == [("accepted", 1, 0), ("deleted", 2, 7)]
    assert desk.handler.log == ["tombstone", "remove"]


async def test_a_lower_attempt_than_the_known_one_is_rejected_with_the_known_one(
    desk: Desk,
) -> None:
    async with desk.courier():
        await desk.answered(order(attempt=7))
        (first,) = await desk.answered(order(attempt=1), "rejected")
        (again,) = await desk.answered(order(attempt=1), "rejected")
    assert first.attempt == 1
    assert first.failure is not None
    assert (first.failure.reason, first.failure.values) == ("Superseded", {"attempt": 7})
    assert again == first
    assert desk.handler.log == ["tombstone", "remove"]
    assert await desk.bus.replay(subjects.DEAD, "snap.dead.>") == []


async def test_a_refusal_that_cannot_be_published_is_made_when_the_order_comes_again(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams, "ACK_WAIT_S", 1.0)
    async with desk.courier():
        await desk.answered(order(attempt=7))
        await desk.bus.client.jetstream().delete_stream(subjects.REPORTS)
        await desk.send(order(attempt=1))
        await asyncio.sleep(0.5)
        await desk.bus.ensure_assets()
        assert (await desk.failure("rejected")).reason == "Superseded"


async def test_a_higher_attempt_is_carried_out_and_not_answered_for_the_lower(desk: Desk) -> None:
    async with desk.courier():
        await desk.answered(order(attempt=1))
        found = await desk.answered(order(attempt=2))
    assert [(report.kind, report.attempt) for report in found] == [("accepted", 2), ("deleted", 2)]
    assert desk.handler.log == ["tombstone", "remove"] * 2


async def test_an_order_that_has_ended_does_not_end_otherwise(desk: Desk) -> None:
    async with desk.courier() as courier:
        await desk.answered(order())
        (entry,) = courier.book.journal.ledger.entries.values()
        await courier.book.report(entry, "failed")
        other = order_id("delete", OWNER, "gen-2")
        found = await desk.answered(order(order=other))
    assert [(report.order, report.kind) for report in found] == [
        (other, "accepted"),
        (other, "deleted"),
    ]


async def test_a_failed_step_undoes_the_begun_ones_newest_first_and_names_the_reason(
    desk: Desk,
) -> None:
    handler = desk.handler
    full = NoSpace("no space", needed=2, free=1)
    handler.table = lambda _: [handler.step("tombstone"), handler.step("remove", full)]
    async with desk.courier():
        await desk.send(order())
        failure = await desk.failure()
    assert handler.log == ["tombstone", "remove", "undo remove", "undo tombstone"]
    assert (failure.reason, failure.values) == ("NoSpace", {"needed": 2, "free": 1})


@pytest.mark.parametrize(("of_step", "of_order"), [(0.05, 20.0), (60.0, 0.2)])
async def test_a_step_that_never_ends_fails_by_name_at_its_deadline_or_that_of_its_order(
    desk: Desk, of_step: float, of_order: float
) -> None:
    handler = desk.handler
    hangs = Step("remove", asyncio.Event().wait, deadline_s=of_step)
    handler.table = lambda _: [handler.step("tombstone"), hangs]
    async with desk.courier():
        await desk.send(order(deadline_s=of_order))
        failure = await desk.failure()
    assert (failure.reason, failure.values["step"]) == ("DeadlineExceeded", "remove")
    assert handler.log[-1] == "undo tombstone"


async def test_a_service_that_ends_within_a_replayable_step_runs_it_again(desk: Desk) -> None:
    blocked = asyncio.Event()
    handler = desk.handler

    async def hang() -> None:
        blocked.set()
        await asyncio.Event().wait()

    handler.table = lambda _: [handler.step("tombstone"), Step("remove", hang, deadline_s=60.0)]
    await _crash_while(desk, blocked)
    handler.table = handler.good
    async with desk.courier():
        await desk.reports()
    assert handler.log[-2:] == ["tombstone", "remove"]


async def test_a_step_that_must_not_run_twice_ends_as_outcome_unknown(desk: Desk) -> None:
    blocked = asyncio.Event()
    handler = desk.handler

    def table(context: OrderContext) -> list[Step]:
        async def hang() -> None:
            await context.note("no-replay", value=True)
            handler.log.append("began")
            blocked.set()
            await asyncio.Event().wait()

        return [handler.step("tombstone"), Step("remove", hang, deadline_s=60.0)]

    handler.table = table
    await _crash_while(desk, blocked)
    async with desk.courier():
        assert (await desk.failure()).reason == "OutcomeUnknown"
    assert handler.log.count("began") == 1


async def test_a_report_that_could_not_be_published_is_published_before_the_next(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish, lost = desk.bus.publish, list[str]()

    async def losing(subject: str, payload: bytes, **options: Any) -> int:
        if subject.startswith("snap.report.") and not lost:
            lost.append(subject)
            raise BusUnavailable("no answer")
        return await publish(subject, payload, **options)

    monkeypatch.setattr(desk.bus, "publish", losing)
    async with desk.courier():
        assert kinds(await desk.answered(order())) == ["accepted", "deleted"]


async def test_reports_that_a_wiped_server_forgot_are_told_again_after_the_reconnection(
    tmp_path: Path,
) -> None:
    async with (
        running_nats_server(tmp_path / "one") as server,
        desk_at(server.url, tmp_path) as desk,
        desk.courier(),
    ):
        await desk.answered(order())
        again = desk.bus.reconnections()
        server.kill()
        shutil.rmtree(tmp_path / "one")
        await server.start_async()
        async with asyncio.timeout(10):
            await again.wait()
        await desk.bus.ensure_assets()
        assert kinds(await desk.reports()) == ["accepted", "deleted"]
    assert desk.handler.log == ["tombstone", "remove"]


async def test_life_signs_that_a_deleted_stream_took_along_are_told_again_unasked(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("snapshot_shared.courier.LIFE_SIGNS_EVERY_S", 0.2)
    async with desk.courier() as courier:
        await desk.answered(order())
        (entry,) = courier.book.journal.ledger.entries.values()
        await courier.book.report(entry, "exited", exit_code=1)
        await desk.reports("exited")
        await desk.bus.client.jetstream().delete_stream(subjects.REPORTS)
        await desk.bus.ensure_assets()
        assert kinds(await desk.reports("exited")) == ["exited"]


async def test_what_is_told_again_is_written_down_no_more(desk: Desk) -> None:
    async with desk.courier() as courier:
        await desk.answered(order())
        for _ in range(3):
            courier.book.queue_since(NOW - 1)
            await until(lambda: len(courier.book.outbox) == 0, "the retelling")
        assert [report.attempt for report in await desk.answered(order(attempt=2))] == [2, 2]
        await courier.book.drain()
        written = (desk.folder / "journal").read_bytes()
    assert written.count(b'"delivered"') == 4


async def _crash_while(desk: Desk, blocked: asyncio.Event) -> None:
    """Take an order and vanish as SIGKILL would leave it: only what is on disk remains."""
    async with desk.courier():
        await desk.answered(order(), "accepted")
        async with asyncio.timeout(10):
            await blocked.wait()
        snapshot = (desk.folder / "journal").read_bytes()
    (desk.folder / "journal").write_bytes(snapshot)
