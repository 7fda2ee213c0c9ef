"""What a store does not take: its file is held, its disk is full, or the API server refuses."""

from __future__ import annotations

import ast
import asyncio
import contextlib
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import snapshot_operator
from snapshot_api.facts import Job
from snapshot_api.kinds import AnyObject
from snapshot_api.meta import condition
from snapshot_api.v1alpha1.checkpoint import DynamoCheckpoint
from snapshot_api.v1alpha1.content import SnapshotContent
from snapshot_api.v1alpha1.snapshot import Snapshot
from snapshot_operator.core.conditions import timestamp
from snapshot_operator.local.store import SqliteStore
from snapshot_operator.runtime.presence import fold_one_presence
from snapshot_shared.errors import (
    Conflict,
    InvalidManifest,
    NoSpace,
    Refused,
    SnapbackError,
    StorageFailed,
    StoreBusy,
)
from snapshot_shared.tasks import end_all
from tests.support.builders import with_status
from tests.support.objects import checkpoint, checkpoint_document, presence
from tests.support.operator_world import World, row_of
from tests.support.waiting import until

NOW = "2026-01-01T00:00:00Z"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "objects.sqlite"


@pytest.fixture
def store(path: Path) -> Iterator[SqliteStore]:
    made = SqliteStore(path, timestamp=lambda: NOW, busy_s=0.1).open()
    yield made
    made.close()


@contextlib.contextmanager
def held(path: Path) -> Iterator[None]:
    """Have another process write to the file, and not end it, meanwhile."""
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        yield
        other.execute("ROLLBACK")


async def test_a_write_to_a_held_store_is_refused_in_time_and_is_no_conflict(
    path: Path, store: SqliteStore
) -> None:
    stored = await store.create(checkpoint())
    with held(path):
        with pytest.raises(StoreBusy) as refused:
            await store.update_status(with_status(stored, message="mine"))
        assert not isinstance(refused.value, Conflict)
        assert await store.find(stored.metadata.uid) == stored
    await store.update_status(with_status(stored, message="mine"))


def test_a_write_is_on_the_disk_before_it_returns(store: SqliteStore) -> None:
    full = 2
    assert store._db.execute("PRAGMA synchronous").fetchone() == (full,)


def test_a_held_store_cannot_be_opened(path: Path, store: SqliteStore) -> None:
    with held(path), pytest.raises(StoreBusy):
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
        await world.cluster.update_status(with_status(stored, message="x" * 10_000))
    await fold_one_presence(world.cluster, presence("node-1"), 0.0)
    assert world.cluster.get("Node", None, "node-1") is None
    assert world.cluster.by_uid(stored.metadata.uid) == stored
    database.execute("PRAGMA max_page_count=1000000")
    await world.cluster.update_status(with_status(stored, message="x" * 10_000))
    await fold_one_presence(world.cluster, presence("node-1"), 1.0)
    assert world.cluster.get("Node", None, "node-1") is not None


async def test_work_waits_while_the_store_is_held_and_goes_on_when_it_is_free(
    path: Path, store: SqliteStore
) -> None:
    world = World(store=store)
    await world.apply(checkpoint_document())

    def phase() -> str:
        found: Any = world.cluster.get("DynamoCheckpoint", "default", "llm")
        return str(found.status.phase)

    job = await world.get("Job", "llm")
    running = asyncio.ensure_future(world.manager.run())
    try:
        with held(path), pytest.raises(StoreBusy):
            await world.cluster.delete(job)
        await world.cluster.delete(job)
        await until(lambda: phase() == "Failed", phase, within_s=10.0)
    finally:
        await end_all(running)


async def test_a_store_with_a_damaged_page_is_refused_with_what_to_do(path: Path) -> None:
    store = SqliteStore(path, timestamp=lambda: NOW).open()
    for number in range(100):
        await store.create(checkpoint(f"llm-{number}"))
    store.close()
    data = bytearray(path.read_bytes())
    # The first page has the schema; the others are read when objects are.
    data[8192:] = b"\xff" * (len(data) - 8192)
    path.write_bytes(data)
    with pytest.raises(StorageFailed, match="is damaged") as refused:
        await SqliteStore(path, timestamp=lambda: NOW).open().list("DynamoCheckpoint")
    assert "restore the file from a copy" in refused.value.next_step


QUOTA = "jobs.batch is forbidden: exceeded quota: jobs"


class Refusing:
    """The `Store` port over another one, which takes no Job, or no status that names one.

    `job` is the error for each object of the kind `kind`.
    """

    def __init__(
        self, *, job: SnapbackError | None = None, status: bool = False, kind: type = Job
    ) -> None:
        self.kind = kind
        self.clock: Callable[[], float] = lambda: 0.0
        self._store = SqliteStore(None, timestamp=lambda: timestamp(self.clock())).open()
        self.job, self.status = job, status

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    async def create(self, value: AnyObject) -> AnyObject:
        if self.job is not None and isinstance(value, self.kind):
            raise self.job
        return await self._store.create(value)

    async def update_status(self, value: AnyObject) -> AnyObject:
        if self.status and isinstance(value, DynamoCheckpoint) and value.status.job_name:
            raise InvalidManifest("status: no")
        return await self._store.update_status(value)


async def applied(store: Refusing) -> tuple[World, DynamoCheckpoint]:
    world = World(store=store)
    store.clock = world.clock
    await world.join(presence("node-1"))
    await world.apply(checkpoint_document())
    return world, await world.get("DynamoCheckpoint", "llm")


async def test_a_job_that_is_refused_fails_its_checkpoint() -> None:
    _, found = await applied(Refusing(job=InvalidManifest("spec.template: no")))
    row = row_of(found, "Failed")
    assert (row.status, row.reason) == ("True", "PodTemplateInvalid")


async def test_a_job_that_is_not_taken_now_is_said_and_made_later() -> None:
    store = Refusing(job=Refused(QUOTA))
    world, found = await applied(store)
    row = row_of(found)
    assert (row.status, row.reason, row.message) == ("False", "Refused", QUOTA)
    assert (found.status.phase, found.status.message) == ("Creating", QUOTA)
    await world.advance(60.0)
    assert await world.get("DynamoCheckpoint", "llm") == found
    store.job = None
    await world.advance(60.0)
    await world.answer_all()
    assert (await world.get("DynamoCheckpoint", "llm")).status.phase == "Ready"


@pytest.mark.parametrize("error", [Refused, InvalidManifest])
@pytest.mark.parametrize("kind", [Snapshot, SnapshotContent])
async def test_each_object_of_a_capture_that_is_not_taken_now_is_said_and_made_later(
    kind: type, error: type[SnapbackError]
) -> None:
    store = Refusing(job=error(QUOTA), kind=kind)
    world, _ = await applied(store)
    await world.answer_all()
    asks = "DynamoCheckpoint" if kind is Snapshot else "Snapshot"
    row = row_of(await world.get(asks, "llm"))
    assert (row.status, row.reason, row.message) == ("False", "Refused", QUOTA)
    store.job = None
    await world.advance(60.0)
    await world.answer_all()
    assert (await world.get("DynamoCheckpoint", "llm")).status.phase == "Ready"


def test_each_object_that_is_made_says_so_if_it_is_refused() -> None:
    """In a cluster, where a quota or a webhook may refuse any of them."""
    package = Path(snapshot_operator.__file__).parent
    bare = [
        f"{file.name}:{node.lineno}"
        for folder in ("core", "kube")
        for file in sorted((package / folder).glob("*.py"))
        for node in ast.walk(ast.parse(file.read_text("utf-8")))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "Create"
        and "waits" not in {each.arg for each in node.keywords}
    ]
    assert bare == []


async def test_a_job_that_may_be_made_again_while_the_operator_is_away_is_made() -> None:
    store = Refusing(job=Refused(QUOTA))
    world, found = await applied(store)
    store.job = None
    await world.advance(found.spec.job.active_deadline_seconds + 60.0)
    await world.answer_all()
    assert (await world.get("DynamoCheckpoint", "llm")).status.phase == "Ready"


async def test_a_checkpoint_whose_job_is_never_taken_fails_with_what_the_server_says_last() -> None:
    store = Refusing(job=Refused(QUOTA))
    world, found = await applied(store)
    store.job = Refused("admission webhook denied the request")
    await world.advance(found.spec.job.active_deadline_seconds + 60.0)
    found = await world.get("DynamoCheckpoint", "llm")
    row = row_of(found, "Failed")
    assert (found.status.phase, row.reason) == ("Failed", "DeadlineExceeded")
    assert "admission webhook denied the request" in row.message


async def test_the_time_of_a_job_that_is_not_taken_counts_from_the_first_refusal() -> None:
    store = Refusing()
    world, owner = await applied(store)
    limit = owner.spec.job.active_deadline_seconds

    async def other() -> tuple[str, str]:
        found = await world.get("DynamoCheckpoint", "other")
        return found.status.phase, row_of(found).reason

    await world.apply(checkpoint_document("other", model="example/llm"))
    await world.advance(20.0)
    assert await other() == ("Creating", "SharesIdentity")
    store.job = Refused(QUOTA)
    await world.remove("DynamoCheckpoint", "llm")
    assert await other() == ("Creating", "Refused")
    await world.advance(limit - 10.0)
    assert await other() == ("Creating", "Refused")
    await world.advance(20.0)
    assert await other() == ("Failed", "DeadlineExceeded")


async def test_a_status_that_is_refused_fails_nothing_and_is_written_later() -> None:
    store = Refusing(status=True)
    world, found = await applied(store)
    assert condition(found.status.conditions, "Failed") is None
    store.status = False
    await world.advance(1.0)
    await world.answer_all()
    assert (await world.get("DynamoCheckpoint", "llm")).status.phase == "Ready"
