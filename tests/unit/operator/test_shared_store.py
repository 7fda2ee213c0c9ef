"""Two operators on one store: what one writes, the other sees, and neither decides on old news."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from snapshot_operator.adapters.sqlite import SqliteCluster
from snapshot_operator.controller import Controller, Interpreter
from snapshot_operator.handlers import fold_one_presence
from snapshot_shared.errors import AlreadyExists, Conflict, NoSpace, StoreBusy
from snapshot_shared.telemetry import Telemetry
from tests.support.objects import checkpoint, presence
from tests.support.operator_world import MemoryOrders

NOW = "2026-01-01T00:00:00Z"


class Pair:
    """Two operators' views of one store. `meanwhile` runs when the first asks for the time."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.meanwhile: Any = lambda: None
        self.first = SqliteCluster(path, timestamp=self._now, busy_s=0.1)
        self.second = SqliteCluster(path, timestamp=lambda: NOW, busy_s=0.1)

    def _now(self) -> str:
        self.meanwhile()
        return NOW


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    made = Pair(tmp_path / "objects.sqlite")
    yield made
    made.first.close()
    made.second.close()


def said(value: Any, message: str) -> Any:
    return replace(value, status=replace(value.status, message=message))


async def test_what_one_writes_the_other_reads(pair: Pair) -> None:
    stored = await pair.first.create(checkpoint())
    assert await pair.second.by_uid(stored.metadata.uid) == stored
    changed = await pair.second.update_status(said(stored, "second"))
    assert await pair.first.by_uid(stored.metadata.uid) == changed


async def test_versions_are_never_given_twice(pair: Pair) -> None:
    one = await pair.first.create(checkpoint("one"))
    two = await pair.second.create(checkpoint("two"))
    assert int(two.metadata.resource_version) > int(one.metadata.resource_version)


async def test_a_decision_made_before_the_other_wrote_anything_is_a_conflict(pair: Pair) -> None:
    mine = await pair.first.create(checkpoint("mine"))
    as_of = pair.first.as_of()
    await pair.second.create(checkpoint("theirs"))
    with pytest.raises(Conflict):
        await pair.first.update_status(said(mine, "placed"), as_of=as_of)
    again = await pair.first.update_status(said(mine, "placed"), as_of=pair.first.as_of())
    assert again.status.message == "placed"  # type: ignore[union-attr]


async def test_no_write_of_an_old_decision_is_made(pair: Pair) -> None:
    kept = checkpoint("kept")
    kept = replace(kept, metadata=replace(kept.metadata, finalizers=["test/keep"]))
    mine = await pair.first.create(kept)
    as_of = pair.first.as_of()
    await pair.second.create(checkpoint("theirs"))
    with pytest.raises(Conflict):
        await pair.first.create(checkpoint("child"), as_of=as_of)
    with pytest.raises(Conflict):
        await pair.first.delete(mine, as_of=as_of)
    with pytest.raises(Conflict):
        await pair.first.remove_finalizer(mine, "test/keep", as_of=as_of)
    names = [value.metadata.name for value in await pair.second.list("DynamoCheckpoint")]
    assert names == ["kept", "theirs"]
    assert await pair.second.by_uid(mine.metadata.uid) == mine


async def test_our_own_writes_do_not_make_a_decision_old(pair: Pair) -> None:
    mine = await pair.first.create(checkpoint("mine"))
    as_of = pair.first.as_of()
    await pair.first.create(checkpoint("another"))
    await pair.first.update_status(said(mine, "placed"), as_of=as_of)


async def test_a_store_knows_whether_somebody_else_wrote(pair: Pair) -> None:
    as_of = pair.first.as_of()
    await pair.first.create(checkpoint("mine"))
    assert not pair.first.others_since(as_of)
    await pair.second.create(checkpoint("theirs"))
    assert pair.first.others_since(as_of)
    assert not pair.first.others_since(pair.first.as_of())


async def test_marking_for_deletion_keeps_what_the_other_wrote_meanwhile(pair: Pair) -> None:
    value: Any = checkpoint()
    kept = replace(value, metadata=replace(value.metadata, finalizers=["test/keep"]))
    stored = await pair.first.update_status(said(await pair.first.create(kept), "mine"))
    other = sqlite3.connect(pair.path, isolation_level=None)

    def write() -> None:
        row = other.execute("SELECT body FROM objects").fetchone()[0]
        other.execute("UPDATE objects SET body=?", (row.replace(b"mine", b"theirs"),))

    pair.meanwhile = write
    await pair.first.delete(stored)
    other.close()
    found: Any = await pair.first.by_uid(stored.metadata.uid)
    assert (found.status.message, found.metadata.deletion_timestamp) == ("theirs", NOW)


async def test_a_store_whose_writer_was_paused_is_a_conflict_and_not_a_hang(pair: Pair) -> None:
    stored = await pair.first.create(checkpoint())
    other = sqlite3.connect(pair.path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(Conflict, match="another operator"):
        await pair.first.update_status(said(stored, "mine"))
    assert await pair.first.by_uid(stored.metadata.uid) == stored
    other.execute("ROLLBACK")
    other.close()
    await pair.first.update_status(said(stored, "mine"))


def test_an_operator_that_starts_while_the_store_is_held_says_so(pair: Pair) -> None:
    other = sqlite3.connect(pair.path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(StoreBusy):
        SqliteCluster(pair.path, timestamp=lambda: NOW, busy_s=0.1)
    other.close()


async def test_a_store_without_room_says_so_and_goes_on_when_there_is_some(pair: Pair) -> None:
    stored = await pair.first.create(checkpoint())
    database = pair.first._db
    (pages,) = database.execute("PRAGMA page_count").fetchone()
    database.execute(f"PRAGMA max_page_count={pages}")
    fillers = [pair.first.create(checkpoint(f"filler-{number}")) for number in range(100)]
    done = await asyncio.gather(*fillers, return_exceptions=True)
    assert isinstance(done[-1], NoSpace)
    with pytest.raises(NoSpace):
        await pair.first.update_status(said(stored, "x" * 10_000))
    await fold_one_presence(pair.first, presence("node-1"), 0.0)
    assert await pair.second.get("Node", None, "node-1") is None
    assert await pair.second.by_uid(stored.metadata.uid) == stored
    database.execute("PRAGMA max_page_count=1000000")
    await pair.first.update_status(said(stored, "x" * 10_000))
    await fold_one_presence(pair.first, presence("node-1"), 1.0)
    assert await pair.second.get("Node", None, "node-1") is not None


async def test_a_node_that_the_other_created_first_is_no_error(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    await fold_one_presence(pair.second, presence("node-1"), 0.0)

    async def not_yet(*_: object) -> None:
        return None

    monkeypatch.setattr(pair.first, "get", not_yet)
    with pytest.raises(AlreadyExists):
        await pair.first.create((await pair.second.list("Node"))[0])
    await fold_one_presence(pair.first, presence("node-1"), 1.0)


async def test_an_operator_whose_store_is_held_goes_on_when_it_is_free(pair: Pair) -> None:
    await pair.first.create(checkpoint())
    telemetry = Telemetry("snap-operator", "operator", "0")
    orders = MemoryOrders()
    interpreter = Interpreter(pair.first, orders, telemetry, lambda: 0.0)
    controller = Controller(pair.first, orders, interpreter, lambda: 0.0)
    other = sqlite3.connect(pair.path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    running = asyncio.ensure_future(controller.run())
    try:
        # The loop itself must not be held up: this comes back although the store does not.
        await asyncio.sleep(0.3)
        assert await pair.second.list("Job") == []
        other.execute("ROLLBACK")
        async with asyncio.timeout(10.0):
            while not await pair.second.list("Job"):  # noqa: ASYNC110 - nothing tells of it
                await asyncio.sleep(0.05)
    finally:
        other.close()
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
