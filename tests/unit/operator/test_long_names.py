"""Objects whose names are as long as Kubernetes lets them be."""

from __future__ import annotations

import pytest

from snapshot_operator.core.checkpoint import job_name
from snapshot_shared.ids import check_name
from tests.support.objects import checkpoint, checkpoint_document, restore_document
from tests.support.operator_world import world_of

LONGEST = f"{'a' * 62}.{'b' * 190}"


@pytest.mark.parametrize("name", ["llm", "a" * 63, "a.b"])
def test_the_job_of_a_checkpoint_has_its_name_where_a_label_can_have_it(name: str) -> None:
    assert job_name(checkpoint(name)) == name


@pytest.mark.parametrize(
    "name", ["a" * 64, LONGEST, f"{'a' * 45}.{'b' * 20}", f"{'a' * 44}--{'b' * 20}"]
)
def test_the_job_of_a_longer_one_has_a_name_of_63_characters_at_most(name: str) -> None:
    found = job_name(checkpoint(name))
    assert len(check_name(found)) <= 63
    assert found[:40] == name[:40]
    assert ".-" not in found
    assert found == job_name(checkpoint(name))
    assert found != job_name(checkpoint(name[:-1] + "c"))


async def test_a_checkpoint_and_a_pod_of_the_longest_names_are_captured_and_restored() -> None:
    world = await world_of(2)
    await world.apply(checkpoint_document(LONGEST))
    await world.answer_all()
    found = await world.get("DynamoCheckpoint", LONGEST)
    assert found.status.phase == "Ready"
    pod = f"{'p' * 62}.{'q' * 190}"
    await world.apply(restore_document(LONGEST, pod))
    await world.answer_all()
    restored = await world.restore(pod)
    assert restored.status.phase == "Restored"
