"""What the store does not accept changes the plan only where it is what the plan creates."""

from __future__ import annotations

from typing import Any

from snapshot_operator.core.conditions import timestamp
from snapshot_operator.local.store import SqliteStore
from snapshot_shared.errors import InvalidManifest
from snapshot_shared.objects.kinds import AnyObject
from snapshot_shared.objects.kubernetes import Job
from snapshot_shared.objects.meta import condition
from snapshot_shared.objects.snapback import DynamoCheckpoint
from tests.support.objects import checkpoint_document, presence
from tests.support.operator_world import World


class Refusing:
    """The `Store` port over another one, which takes no Job, or no status that names one."""

    def __init__(self, *, job: bool = False, status: bool = False) -> None:
        self._store = SqliteStore(None, timestamp=lambda: timestamp(1_000_000.0)).open()
        self.job, self.status = job, status

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    async def create(self, value: AnyObject) -> AnyObject:
        if self.job and isinstance(value, Job):
            raise InvalidManifest("spec.template: no")
        return await self._store.create(value)

    async def update_status(self, value: AnyObject) -> AnyObject:
        if self.status and isinstance(value, DynamoCheckpoint) and value.status.job_name:
            raise InvalidManifest("status: no")
        return await self._store.update_status(value)


async def applied(store: Refusing) -> tuple[World, DynamoCheckpoint]:
    world = World(store=store)
    await world.join(presence("node-1"))
    await world.apply(checkpoint_document())
    return world, await world.get("DynamoCheckpoint", "llm")


async def test_a_job_that_is_refused_fails_its_checkpoint() -> None:
    _, found = await applied(Refusing(job=True))
    row = condition(found.status.conditions, "Failed")
    assert row is not None
    assert (row.status, row.reason) == ("True", "PodTemplateInvalid")


async def test_a_status_that_is_refused_fails_nothing_and_is_written_later() -> None:
    store = Refusing(status=True)
    world, found = await applied(store)
    assert condition(found.status.conditions, "Failed") is None
    store.status = False
    await world.advance(1.0)
    await world.answer_all()
    assert (await world.get("DynamoCheckpoint", "llm")).status.phase == "Ready"
