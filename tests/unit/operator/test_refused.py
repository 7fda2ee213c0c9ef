"""What the store does not accept changes the plan only where it is what the plan creates."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from snapshot_operator.core.conditions import timestamp
from snapshot_operator.local.store import SqliteStore
from snapshot_shared.errors import InvalidManifest, Refused, SnapbackError
from snapshot_shared.objects.kinds import AnyObject
from snapshot_shared.objects.kubernetes import Job
from snapshot_shared.objects.meta import condition
from snapshot_shared.objects.snapback import DynamoCheckpoint
from tests.support.objects import checkpoint_document, presence
from tests.support.operator_world import World

QUOTA = "jobs.batch is forbidden: exceeded quota: jobs"


class Refusing:
    """The `Store` port over another one, which takes no Job, or no status that names one."""

    def __init__(self, *, job: SnapbackError | None = None, status: bool = False) -> None:
        self.clock: Callable[[], float] = lambda: 0.0
        self._store = SqliteStore(None, timestamp=lambda: timestamp(self.clock())).open()
        self.job, self.status = job, status

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    async def create(self, value: AnyObject) -> AnyObject:
        if self.job is not None and isinstance(value, Job):
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
    row = condition(found.status.conditions, "Failed")
    assert row is not None
    assert (row.status, row.reason) == ("True", "PodTemplateInvalid")


async def test_a_job_that_is_not_taken_now_is_said_and_made_later() -> None:
    store = Refusing(job=Refused(QUOTA))
    world, found = await applied(store)
    row = condition(found.status.conditions, "Ready")
    assert row is not None
    assert (row.status, row.reason, row.message) == ("False", "Refused", QUOTA)
    assert (found.status.phase, found.status.message) == ("Creating", QUOTA)
    await world.advance(60.0)
    assert await world.get("DynamoCheckpoint", "llm") == found
    store.job = None
    await world.advance(60.0)
    await world.answer_all()
    assert (await world.get("DynamoCheckpoint", "llm")).status.phase == "Ready"


async def test_a_checkpoint_whose_job_is_never_taken_fails_with_what_the_server_said() -> None:
    store = Refusing(job=Refused(QUOTA))
    world, found = await applied(store)
    limit = found.spec.job.active_deadline_seconds
    await world.advance(limit - 1.0)
    assert (await world.get("DynamoCheckpoint", "llm")).status.phase == "Creating"
    await world.advance(2.0)
    found = await world.get("DynamoCheckpoint", "llm")
    row = condition(found.status.conditions, "Failed")
    assert row is not None
    assert (found.status.phase, row.reason) == ("Failed", "DeadlineExceeded")
    assert QUOTA in row.message


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
    row = condition(found.status.conditions, "Failed")
    assert row is not None
    assert (found.status.phase, row.reason) == ("Failed", "DeadlineExceeded")
    assert "admission webhook denied the request" in row.message


async def test_the_time_of_a_job_that_is_not_taken_counts_from_the_first_refusal() -> None:
    store = Refusing()
    world, owner = await applied(store)
    limit = owner.spec.job.active_deadline_seconds

    async def other() -> tuple[str, str]:
        found = await world.get("DynamoCheckpoint", "other")
        row = condition(found.status.conditions, "Ready")
        return found.status.phase, row.reason if row is not None else ""

    await world.apply(checkpoint_document("other", model="example/llm"))
    await world.advance(20.0)
    assert await other() == ("Creating", "SharesIdentity")
    store.job = Refused(QUOTA)
    await world.cluster.delete(await world.get("DynamoCheckpoint", "llm"))
    await world.settle()
    await world.answer_all()
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
