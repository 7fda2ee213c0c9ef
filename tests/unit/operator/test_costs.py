"""What a capture, a change and a failure cost: no more beside many objects than beside few."""

from __future__ import annotations

import pytest

from snapshot_shared.api import VerifyRequest
from snapshot_shared.codec import encode_json
from tests.support.objects import checkpoint_document, presence, restore_document
from tests.support.operator_world import World

RECONCILES_A_CAPTURE = 60
"""A checkpoint from apply to Ready with two devices, all its objects together."""


async def with_nodes(count: int) -> World:
    world = World()
    await world.join(*(presence(f"node-{number}") for number in range(count)))
    return world


async def reconciles(world: World, count: int) -> float:
    """Return the decisions a checkpoint, when some are captured at once."""
    before = world.manager.reconciles
    for number in range(count):
        await world.apply(checkpoint_document(f"llm-{before}-{number}"))
    await world.answer_all()
    return (world.manager.reconciles - before) / count


async def test_a_capture_takes_a_constant_number_of_decisions() -> None:
    one = await reconciles(await with_nodes(1), 1)
    many = await reconciles(await with_nodes(20), 20)
    assert one <= RECONCILES_A_CAPTURE
    assert many <= RECONCILES_A_CAPTURE


async def test_one_more_checkpoint_beside_many_that_wait_costs_what_it_costs_beside_few() -> None:
    costs = []
    for waiting in (5, 100):
        world = await with_nodes(1)
        for number in range(waiting + 1):
            await world.apply(checkpoint_document(f"llm-{number}"))
        before = world.manager.reconciles
        await world.apply(checkpoint_document("one-more"))
        costs.append(world.manager.reconciles - before)
    few, many = costs
    # Two changes of what an object waits for may be seen as one.
    assert many <= few + 2


async def test_only_the_first_that_waits_for_room_is_woken_when_there_is_some() -> None:
    world = await with_nodes(1)
    for number in range(50):
        await world.apply(checkpoint_document(f"llm-{number}"))
    before = world.manager.reconciles
    await world.join(presence("node-2"))
    woken = world.manager.reconciles - before
    assert len(world.open("run")) == 2
    assert woken <= 12


async def test_a_second_look_at_everything_writes_nothing() -> None:
    world = await with_nodes(2)
    await world.apply(checkpoint_document())
    await world.answer_all()
    await world.apply(restore_document(node="node-1"))
    await world.answer_all()
    versions = [value.metadata.resource_version for value in await world.everything()]
    world.manager.resync()
    await world.settle()
    assert [v.metadata.resource_version for v in await world.everything()] == versions


async def sizes_after(world: World, kind: str, name: str, times: int, verb: str) -> int:
    """Fail an order of an object many times; the bytes of the object then."""
    for _ in range(times):
        for order in world.open(verb):
            await world.fail(order, "DeviceBusy")
        await world.advance(601.0)
    found = world.cluster.get(kind, None if kind == "SnapshotContent" else "default", name)
    return len(encode_json(found))


@pytest.mark.parametrize("verb", ["delete", "stop"])
async def test_an_object_whose_cleaning_fails_a_hundred_times_is_no_larger_than_after_ten(
    verb: str,
) -> None:
    world = await with_nodes(1)
    await world.apply(checkpoint_document())
    await world.answer_all()
    name = (await world.content()).metadata.name
    kind = "SnapshotContent" if verb == "delete" else "Pod"
    name = name if verb == "delete" else world.cluster.page("Pod")[0].metadata.name
    await world.cluster.delete(await world.get("DynamoCheckpoint", "llm"))
    await world.settle()
    ten = await sizes_after(world, kind, name, 10, verb)
    hundred = await sizes_after(world, kind, name, 90, verb)
    assert hundred <= ten + 16


async def test_an_artifact_that_is_verified_a_hundred_times_is_no_larger_than_after_ten() -> None:
    world = await with_nodes(1)
    await world.apply(checkpoint_document())
    await world.answer_all()

    async def size_after(times: int) -> int:
        for _ in range(times):
            await world.api.verify(VerifyRequest(kind="Snapshot", name="llm"))
            await world.settle()
            await world.answer_all()
        return len(encode_json(await world.content()))

    ten = await size_after(10)
    assert await size_after(90) <= ten + 64
