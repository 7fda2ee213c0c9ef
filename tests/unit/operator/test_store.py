"""The object store when its file is held by another process, or its disk is full."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from snapshot_operator.local.store import SqliteStore
from snapshot_operator.runtime.presence import fold_one_presence
from snapshot_shared.errors import Conflict, NoSpace, StoreBusy
from tests.support.objects import checkpoint, checkpoint_document, presence
from tests.support.operator_world import World

NOW = "2026-01-01T00:00:00Z"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "objects.sqlite"


@pytest.fixture
def store(path: Path) -> Iterator[SqliteStore]:
    made = SqliteStore(path, timestamp=lambda: NOW, busy_s=0.1).open()
    yield made
    made.close()


@pytest.fixture
def holder(path: Path, store: SqliteStore) -> Iterator[sqlite3.Connection]:
    """Another process that writes and does not end it."""
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    yield other
    other.close()


def with_message(value: Any, message: str) -> Any:
    return replace(value, status=replace(value.status, message=message))


async def test_a_write_to_a_held_store_is_refused_in_time_and_is_no_conflict(
    path: Path, store: SqliteStore
) -> None:
    stored = await store.create(checkpoint())
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(StoreBusy) as refused:
        await store.update_status(with_message(stored, "mine"))
    assert not isinstance(refused.value, Conflict)
    assert await store.find(stored.metadata.uid) == stored
    other.execute("ROLLBACK")
    other.close()
    await store.update_status(with_message(stored, "mine"))


def test_a_write_is_on_the_disk_before_it_returns(store: SqliteStore) -> None:
    full = 2
    assert store._db.execute("PRAGMA synchronous").fetchone() == (full,)


def test_a_held_store_cannot_be_opened(path: Path, holder: sqlite3.Connection) -> None:
    with pytest.raises(StoreBusy):
        SqliteStore(path, timestamp=lambda: NOW, busy_s=0.1).open()


async def test_a_store_without_room_says_so_and_goes_on_when_there_is_some() -> None:
    world = World()
    await world.settle()
    stored = await world.cluster.create(checkpoint())
    database = world.store._db
    (pages,) = database.execute("PRAGMA page_count").fetchone()
    database.execute(f"PRAGMA max_page_count={pages}")
    fillers = [world.cluster.create(checkpoint(f"filler-{number}")) for number in range(100)]
    done = await asyncio.gather(*fillers, return_exceptions=True)
    assert isinstance(done[-1], NoSpace)
    with pytest.raises(NoSpace):
        await world.cluster.update_status(with_message(stored, "x" * 10_000))
    await fold_one_presence(world.cluster, presence("node-1"), 0.0)
    assert world.cluster.get("Node", None, "node-1") is None
    assert world.cluster.by_uid(stored.metadata.uid) == stored
    database.execute("PRAGMA max_page_count=1000000")
    await world.cluster.update_status(with_message(stored, "x" * 10_000))
    await fold_one_presence(world.cluster, presence("node-1"), 1.0)
    assert world.cluster.get("Node", None, "node-1") is not None


async def test_work_waits_while_the_store_is_held_and_goes_on_when_it_is_free(
    path: Path, store: SqliteStore
) -> None:
    world = World(store=store)
    await world.apply(checkpoint_document())
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    running = asyncio.ensure_future(world.manager.run())
    try:
        job = await world.get("Job", "llm")
        with pytest.raises(StoreBusy):
            await world.cluster.delete(job)
        other.execute("ROLLBACK")
        await world.cluster.delete(job)
        async with asyncio.timeout(10.0):
            while (await world.get("DynamoCheckpoint", "llm")).status.phase != "Failed":  # noqa: ASYNC110 - nothing says so
                await asyncio.sleep(0.05)
    finally:
        other.close()
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
