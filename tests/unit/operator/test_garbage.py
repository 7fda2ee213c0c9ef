"""What is left of an owner that is gone, as a slow operator can leave it."""

from __future__ import annotations

from snapshot_operator.core.restore import restore_for
from snapshot_operator.local import garbage
from snapshot_operator.local.store import SqliteStore
from tests.support.blind_store import BlindStore
from tests.support.objects import checkpoint_document, presence, restore_document
from tests.support.operator_world import World, world_of


async def test_a_restore_made_by_an_operator_that_missed_the_end_of_its_pod_is_deleted() -> None:
    world = await world_of(1)
    await world.apply(restore_document(source="to-come"))
    pod = await world.get("Pod", "restored")
    await world.cluster.delete(pod)
    await world.answer_all()
    await world.settle()
    assert await world.get("Pod", "restored") is None
    await world.cluster.create(restore_for(pod))
    await world.settle()

    await garbage.collect(world.cluster)

    await world.settle()
    assert not world.cluster.all("SnapshotRestore")


async def test_an_object_is_kept_whose_owner_is_only_not_seen_yet() -> None:
    store = SqliteStore(None, timestamp=lambda: "2026-01-01T00:00:00Z").open()
    before = World(store=store)
    await before.join(presence("node-1"))
    await before.apply(restore_document(source="to-come"), checkpoint_document())
    late = World(store=BlindStore(store, ["Pod", "DynamoCheckpoint"]))
    await late.cluster.sync()
    owned = [value for value in await late.everything() if value.metadata.owner_references]
    assert {type(value).__name__ for value in owned} == {"SnapshotRestore", "Job"}

    await garbage.collect(late.cluster)

    assert not any(value.metadata.deletion_timestamp for value in await late.everything())
