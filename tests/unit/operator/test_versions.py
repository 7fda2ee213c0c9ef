"""Nodes of another version: they are ordered nothing that they cannot read, and told so by name."""

from __future__ import annotations

from msgspec.structs import replace

from snapshot_shared.objects.meta import condition
from tests.support.objects import checkpoint_document, presence
from tests.support.operator_world import World, world_of

BOTH = "node-1 cannot be ordered anything: it knows message schemas [2], the operator knows [1]"


async def test_no_pod_goes_to_a_node_with_no_version_in_common() -> None:
    world = World()
    await world.join(replace(presence("node-1"), schemas=[2]))
    await world.apply(checkpoint_document())
    found = await world.get("DynamoCheckpoint", "llm")
    assert BOTH in found.status.message
    assert world.open() == []
    await world.join(replace(presence("node-2"), schemas=[1, 2]))
    assert [order.node for order in world.open("run")] == ["node-2"]


async def test_a_capture_waits_until_its_node_has_a_version_in_common() -> None:
    world = await world_of(1)
    await world.apply(checkpoint_document())
    (run,) = world.open("run")
    await world.report(run, "started")
    await world.join(replace(presence("node-1"), schemas=[2]))
    await world.report(run, "ready")
    assert world.open("prepare") == []
    found = await world.get("Snapshot", "llm")
    (content,) = world.cluster.page("SnapshotContent")
    waits = condition(content.status.conditions, "Ready")  # type: ignore[union-attr]
    assert waits is not None
    assert (waits.reason, waits.message) == ("UnsupportedVersion", BOTH)
    assert found.status.bound_snapshot_content_name == content.metadata.name
    await world.join(presence("node-1"))
    assert len(world.open("prepare")) == 1


async def test_an_order_that_its_node_cannot_read_is_tried_again_before_the_freeze() -> None:
    world = await world_of(1)
    await world.apply(checkpoint_document())
    await world.answer_well(world.open("run")[0])
    (prepare,) = world.open("prepare")
    await world.report(prepare, "prepared", schema=2)
    (content,) = world.cluster.page("SnapshotContent")
    failure = content.status.failure  # type: ignore[union-attr]
    assert failure is not None
    assert (failure.reason, failure.retryable) == ("UnsupportedVersion", True)
    assert failure.values == {"found": 2, "supported": [1]}
    for abort in world.open("abort"):
        await world.report(abort)
    assert [order.attempt for order in world.open("prepare")] == [2]
