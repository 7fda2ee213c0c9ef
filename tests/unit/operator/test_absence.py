"""What is missing from memory may only be late: nothing ends, goes or is forgotten for that."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from snapshot_operator.core import fold
from snapshot_shared.objects.kinds import KINDS, AnyObject
from snapshot_shared.objects.kubernetes import Pod
from snapshot_shared.objects.meta import is_true
from snapshot_shared.objects.snapback import DynamoCheckpoint, SnapshotContent
from snapshot_shared.views import orders_of
from tests.support.blind_store import BlindStore
from tests.support.objects import checkpoint_document, presence, restore_document
from tests.support.operator_world import World, world_of
from tests.unit.tables import each


async def warming_up(world: World) -> None:
    await world.apply(checkpoint_document())


async def capturing(world: World) -> None:
    await world.apply(checkpoint_document())
    await world.answer_well(world.open("run")[0])


async def staging(world: World) -> None:
    await capturing(world)
    await world.answer_well(world.open("prepare")[0])


async def captured(world: World) -> None:
    await world.apply(checkpoint_document())
    await world.answer_all()


async def loading(world: World) -> None:
    await captured(world)
    await world.apply(restore_document(node="node-2"))
    await world.answer_well(world.open("run")[0])


async def restored(world: World) -> None:
    await loading(world)
    await world.answer_all()


async def deleting(world: World) -> None:
    """A reader keeps the artifact of a checkpoint that is being deleted."""
    await loading(world)
    await world.cluster.delete(await world.get("DynamoCheckpoint", "llm"))
    await world.settle()


async def sharing(world: World) -> None:
    """Two checkpoints share the artifact of another, and one is restored from."""
    await captured(world)
    for name in ("second", "third"):
        await world.apply(checkpoint_document(name, model="example/llm"))
    await world.apply(restore_document("second", node="node-2"))
    await world.answer_all()


STAGES = (warming_up, capturing, staging, captured, loading, restored, deleting, sharing)


@each("hidden", sorted(KINDS))
@each("stage", STAGES)
async def test_an_operator_that_does_not_see_a_kind_yet_ends_nothing(
    stage: Any, hidden: str
) -> None:
    first = await world_of(2)
    await stage(first)
    before = {value.metadata.uid: shown(value) for value in await first.everything()}
    blind = BlindStore(first.store, {hidden})
    second = World(store=blind)
    second.now = first.now + 1
    await second.advance(1.0)
    await second.advance(5.0)
    after = {}
    for kind in KINDS:
        for value in await first.store.list(kind):
            after[value.metadata.uid] = shown(value)
    assert after.keys() == before.keys()
    assert after == before


def shown(value: AnyObject) -> dict[str, Any]:
    """Return of an object what cannot be taken back."""
    status: Any = value.status
    return {
        "object": f"{type(value).__name__} {value.metadata.name}",
        "ready": isinstance(value, DynamoCheckpoint) and value.status.phase == "Ready",
        "goes": value.metadata.deletion_timestamp,
        "finalizers": value.metadata.finalizers,
        "failed": is_true(status.conditions, "Failed")
        or (isinstance(value, Pod) and value.status.phase == "Failed"),
        "state": str(getattr(status, "capture", getattr(status, "state", ""))),
        "lost": sum(item.state == fold.LOST for item in orders_of(value)),
        "orders": sorted((item.order, item.attempt) for item in orders_of(value)),
        "readers": value.status.readers if isinstance(value, SnapshotContent) else [],
    }


async def test_an_absence_that_is_real_is_acted_upon_after_one_live_read() -> None:
    world = await world_of(1)
    await world.apply(checkpoint_document())
    job = await world.get("Job", "llm")
    await world.store.remove_finalizer(job, job.metadata.finalizers[0])
    await world.store.delete(await world.get("Job", "llm"))
    await world.settle()
    found = await world.get("DynamoCheckpoint", "llm")
    assert (found.status.phase, found.status.conditions[0].reason) == ("Failed", "JobDeleted")


async def test_a_pod_a_snapshot_of_it_and_a_restore_may_be_applied_together_in_any_order() -> None:
    world = await world_of(2)
    snapshot = {
        "apiVersion": "nvidia.com/v1alpha1",
        "kind": "Snapshot",
        "metadata": {"name": "web"},
        "spec": {"source": {"podRef": {"name": "worker"}}},
    }
    worker = restore_document(name="worker")
    del worker["metadata"]["annotations"]
    await world.apply(restore_document(name="copy", source="web"), snapshot, worker)
    await world.answer_all()
    assert is_true((await world.get("Snapshot", "web")).status.conditions, "Ready")
    assert (await world.restore("copy")).status.state == "Restored"


@pytest.mark.parametrize("kind", ["Job", "Snapshot"])
async def test_a_name_is_not_taken_by_what_is_gone_from_the_store(kind: str) -> None:
    """That it was deleted is seen late, and a conflict would be the end of the checkpoint."""
    store = BlindStore(World().store, hidden=())
    world = World(store=store)
    await world.join(presence("node-1"), presence("node-2"))
    await world.apply(checkpoint_document("first"))
    await world.answer_all()
    child: Any = await world.get(kind, "first")
    stranger = replace(child.metadata, name="llm", owner_references=[], uid="", finalizers=[])
    await world.cluster.create(replace(child, metadata=stranger))
    await world.settle()
    there = await world.get(kind, "llm")
    store.hidden = {kind}
    await store.delete(await store.remove_finalizer(there, there.metadata.finalizers[0]))
    assert await store.read(kind, "default", "llm") is None
    await world.apply(checkpoint_document())
    await world.advance(1.0)
    await world.answer_all()
    found = await world.get("DynamoCheckpoint", "llm")
    assert is_true(found.status.conditions, "Ready")
