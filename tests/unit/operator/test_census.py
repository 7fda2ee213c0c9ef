"""What the operator counts for its metrics."""

from __future__ import annotations

from snapshot_operator.core.census import census
from snapshot_shared.errors import Failure
from tests.support.objects import restore_document
from tests.support.operator_world import World

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
