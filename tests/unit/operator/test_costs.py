"""What work costs, no more beside many objects than beside few, and what is counted of it."""

from __future__ import annotations

import pytest

from snapshot_operator.core.census import census
from snapshot_shared.codec import encode_json
from snapshot_shared.errors import Failure
from tests.support.objects import checkpoint_document, presence, restore_document
from tests.support.operator_world import World, world_of

RECONCILES_A_CAPTURE = 60
"""A checkpoint from apply to Ready with two devices, all its objects together."""


async def reconciles(world: World, count: int) -> float:
    """Return the decisions a checkpoint, when some are captured at once."""
    before = world.manager.reconciles
    for number in range(count):
        await world.capture(f"llm-{before}-{number}")
    return (world.manager.reconciles - before) / count


async def test_a_capture_takes_a_constant_number_of_decisions() -> None:
    one = await reconciles(await world_of(1), 1)
    many = await reconciles(await world_of(20), 20)
    assert one <= RECONCILES_A_CAPTURE
    assert many <= RECONCILES_A_CAPTURE


async def test_one_more_checkpoint_beside_many_that_wait_costs_what_it_costs_beside_few() -> None:
    costs = []
    for waiting in (5, 100):
        world = await world_of(1)
        for number in range(waiting + 1):
            await world.apply(checkpoint_document(f"llm-{number}"))
        before = world.manager.reconciles
        await world.apply(checkpoint_document("one-more"))
        costs.append(world.manager.reconciles - before)
    few, many = costs
    # Two changes of what an object waits for may be seen as one.
    assert many <= few + 2


async def test_only_the_first_that_waits_for_room_is_woken_when_there_is_some() -> None:
    world = await world_of(1)
    for number in range(50):
        await world.apply(checkpoint_document(f"llm-{number}"))
    before = world.manager.reconciles
    await world.join(presence("node-2"))
    woken = world.manager.reconciles - before
    assert len(world.open("run")) == 2
    assert woken <= 12


async def test_a_second_look_at_everything_writes_nothing(world: World) -> None:
    await world.perform(restore_document(node="node-2"))
    versions = [value.metadata.resource_version for value in await world.everything()]
    await world.advance(60.0)
    assert [v.metadata.resource_version for v in await world.everything()] == versions


async def sizes_after(world: World, kind: str, name: str, times: int, verb: str) -> int:
    """Fail an order of an object many times; the bytes of the object then."""
    for _ in range(times):
        for order in world.open(verb):
            await world.fail(order, "DeviceBusy")
        await world.advance(601.0)
    return len(encode_json(await world.get(kind, name)))


@pytest.mark.parametrize("verb", ["delete", "stop"])
async def test_an_object_whose_cleaning_fails_a_hundred_times_is_no_larger_than_after_ten(
    verb: str,
) -> None:
    world = await world_of(1, captured=True)
    kind = "SnapshotContent" if verb == "delete" else "Pod"
    name = world.cluster.page(kind)[0].metadata.name
    await world.delete("DynamoCheckpoint", "llm")
    ten = await sizes_after(world, kind, name, 10, verb)
    hundred = await sizes_after(world, kind, name, 90, verb)
    assert hundred <= ten + 16


async def test_an_artifact_that_is_verified_a_hundred_times_is_no_larger_than_after_ten() -> None:
    world = await world_of(1, captured=True)

    async def size_after(times: int) -> int:
        for _ in range(times):
            await world.verify("Snapshot")
            await world.answer_all()
        return len(encode_json(await world.content()))

    ten = await size_after(10)
    assert await size_after(90) <= ten + 64


DAMAGE = Failure(reason="ArtifactCorrupt", message="chunk 3", values={"part": "gpu-0"})


async def test_objects_are_counted_by_kind_and_phase(world: World) -> None:
    found = census(await world.everything())
    assert found.objects[("DynamoCheckpoint", "Ready")] == 1
    assert found.objects[("Snapshot", "Ready")] == 1
    assert found.objects[("SnapshotContent", "Ready")] == 1
    assert found.objects[("Job", "Running")] == 1
    assert found.objects[("Pod", "Running")] == 1
    assert "Node" not in {kind for kind, _ in found.objects}


async def test_nodes_are_counted_by_state_and_no_state_is_left_out(world: World) -> None:
    assert census(await world.everything()).nodes == {
        ("ready",): 2,
        ("not-ready",): 0,
        ("lost",): 0,
    }
    del world.present["node-2"]
    await world.see(absent_s=40.0)
    assert census(await world.everything()).nodes[("not-ready",)] == 1
    await world.see(absent_s=100.0)
    assert census(await world.everything()).nodes == {
        ("ready",): 1,
        ("not-ready",): 0,
        ("lost",): 1,
    }


async def test_a_reader_counts_while_it_restores_and_damage_until_it_is_lifted(
    world: World,
) -> None:
    assert census(await world.everything()).readers == 0
    await world.apply(restore_document())
    found = census(await world.everything())
    assert (found.readers, found.quarantined) == (1, 0)
    await world.report(world.open("load")[0], "failed", failure=DAMAGE)
    await world.answer_all()
    found = census(await world.everything())
    assert (found.readers, found.quarantined) == (0, 1)
