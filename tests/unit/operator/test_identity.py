"""Checkpoints of one identity in a namespace: one captures, the others share, or are refused."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from snapshot_api.kinds import AnyObject
from snapshot_api.meta import condition, is_true
from snapshot_api.v1alpha1.checkpoint import (
    DynamoCheckpoint,
    DynamoCheckpointStatus,
    GpuMemoryServiceSpec,
)
from snapshot_api.v1alpha1.content import SnapshotContent
from snapshot_operator.core.checkpoint import CheckpointView, reconcile
from snapshot_operator.core.owning import child_meta
from snapshot_operator.core.plan import Delete, SetStatus
from snapshot_operator.core.sharing import conflict
from snapshot_shared.api import RetentionRequest
from tests.support.builders import with_meta, with_spec
from tests.support.objects import (
    checkpoint_document,
    pod_template,
    restore_document,
    snapshot_document,
)
from tests.support.operator_world import World, world_of
from tests.unit.tables import each

MODEL = "example/shared"
UID = "00000000-0000-4000-8000-00000000abcd"


def document(name: str, *, gms: bool = True, **job: Any) -> dict[str, Any]:
    """Return a checkpoint of the identity that all have here."""
    found = checkpoint_document(name, model=MODEL, **job)
    if not gms:
        found["spec"]["gpuMemoryService"] = {"enabled": False}
    return found


@pytest.fixture
async def world() -> World:
    return await world_of(2, gpus=4)


async def apply(world: World, *names: str) -> None:
    """Apply one checkpoint after another, the first a second older than the next."""
    for name in names:
        await world.apply(document(name))
        world.now += 1


async def captured(world: World, *names: str) -> None:
    await apply(world, *names)
    await world.answer_all()


async def status(world: World, name: str) -> Any:
    return (await world.get("DynamoCheckpoint", name)).status


async def shared(world: World, name: str) -> tuple[str, str]:
    """Return the phase of a checkpoint, and with whom it shares."""
    found = await status(world, name)
    return found.phase, found.shares


async def standing(world: World, name: str) -> tuple[str, str]:
    """Return the phase of a checkpoint, and the reason of its condition Ready."""
    found = await status(world, name)
    ready = condition(found.conditions, "Ready")
    return found.phase, ready.reason if ready is not None else ""


def jobs(world: World) -> list[str]:
    return [job.metadata.name for job in world.cluster.page("Job")]


def contents(world: World) -> list[SnapshotContent]:
    return [v for v in world.cluster.page("SnapshotContent") if isinstance(v, SnapshotContent)]


async def test_a_second_checkpoint_waits_for_the_first_and_shares_its_artifact(
    world: World,
) -> None:
    await apply(world, "first", "second")
    assert jobs(world) == ["first"]
    assert await standing(world, "second") == ("Creating", "SharesIdentity")
    assert "first" in (await status(world, "second")).message
    await world.answer_all()
    mine, other = await status(world, "second"), await status(world, "first")
    assert (mine.phase, mine.shares, other.shares) == ("Ready", "first", "")
    assert is_true(mine.conditions, "Ready")
    for field in ("content_name", "snapshot_name", "bytes"):
        assert getattr(mine, field) == getattr(other, field)
    assert len(contents(world)) == 1


@pytest.mark.parametrize("order", [("a", "b", "c"), ("c", "b", "a"), ("b", "c", "a")])
async def test_of_those_that_are_applied_in_one_request_one_captures_for_all(
    world: World, order: tuple[str, ...]
) -> None:
    await world.perform(*(document(name) for name in order))
    found = [await shared(world, name) for name in ("a", "b", "c")]
    assert found == [("Ready", ""), ("Ready", "a"), ("Ready", "a")]
    assert len(contents(world)) == 1


@pytest.mark.parametrize("order", [("a", "b"), ("b", "a")])
async def test_the_one_that_has_begun_stays_the_owner_whatever_its_name(
    world: World, order: tuple[str, str]
) -> None:
    for name in order:
        await world.perform(document(name))
    first, second = order
    assert (await status(world, second)).shares == first
    assert len(contents(world)) == 1


async def test_other_identities_and_other_namespaces_share_nothing(world: World) -> None:
    elsewhere = document("first")
    elsewhere["metadata"]["namespace"] = "other"
    await world.perform(document("first"), elsewhere, checkpoint_document("unlike"))
    assert len(contents(world)) == 3


DIFFERENT: dict[str, dict[str, Any]] = {
    "spec.job.podTemplateSpec": {"podTemplateSpec": pod_template(args=["--seed", "1"])},
    "spec.job.driver": {"driver": "respawn"},
    "spec.job.targetContainerName": {"targetContainerName": "other"},
    "spec.gpuMemoryService": {"gms": False},
}


@pytest.mark.parametrize("field", DIFFERENT)
async def test_a_different_worker_of_one_identity_is_refused_with_both_names_and_the_field(
    world: World, field: str
) -> None:
    template = pod_template()
    template["spec"]["containers"].append({"name": "other", "command": ["beside"]})
    first, second = {"podTemplateSpec": template}, {"podTemplateSpec": template, **DIFFERENT[field]}
    await world.apply(document("first", **first))
    await world.apply(document("second", **second))
    assert await standing(world, "second") == ("Failed", "IdentityConflict")
    message = (await status(world, "second")).conditions[0].message
    assert all(text in message for text in ("first", "second", field, "extraParameters"))
    assert jobs(world) == ["first"]
    await world.answer_all()
    assert (await status(world, "first")).phase == "Ready"


@each(
    ("memory", "is_other"),
    [
        ({}, False),
        ({"checkpoint": {}}, False),
        ({"checkpoint": {"saver": {}}}, False),
        ({"checkpoint": {"saver": {"image": "saver:1"}}}, True),
        ({"mode": "interPod"}, True),
        ({"deviceClassName": "other"}, True),
    ],
)
def test_a_saver_of_which_nothing_is_given_is_as_good_as_none(
    memory: dict[str, Any], is_other: bool
) -> None:
    def made(name: str, **status: Any) -> DynamoCheckpoint:
        return msgspec.convert({**document(name), "status": status}, DynamoCheckpoint)

    owner, second = made("first", phase="Ready"), made("second")
    kept = msgspec.convert(memory, GpuMemoryServiceSpec)
    found = conflict(with_spec(second, gpu_memory_service=kept), owner)
    assert (found.values["field"] if found else "") == "spec.gpuMemoryService" * is_other


async def test_policies_and_deadlines_may_differ(world: World) -> None:
    second = document("second", sourcePolicy="Terminate", activeDeadlineSeconds=7, backoffLimit=2)
    second["spec"]["deletionPolicy"] = "Retain"
    await world.apply(document("first"))
    await world.perform(second)
    assert (await status(world, "second")).shares == "first"


async def test_when_the_owner_fails_the_next_oldest_captures_for_the_rest(world: World) -> None:
    await apply(world, "first", "second", "third")
    await world.fail(world.open("run")[0], "CommandNotFound")
    assert (await status(world, "first")).phase == "Failed"
    assert jobs(world) == ["first", "second"]
    assert "second" in (await status(world, "third")).message
    await world.answer_all()
    assert (await status(world, "second")).shares == ""
    assert (await status(world, "third")).shares == "second"
    assert len(contents(world)) == 1


async def test_when_the_owner_is_deleted_with_its_artifact_the_next_captures_it_again(
    world: World,
) -> None:
    await captured(world, "first", "second", "third")
    lent = (await status(world, "second")).content_name
    world.now += 10_000
    await world.delete("DynamoCheckpoint", "first")
    for name in ("second", "third"):
        found = await status(world, name)
        assert found.phase == "Creating"
        assert (found.content_name, found.bytes, found.shares) == ("", 0, "")
    await world.answer_all()
    assert await shared(world, "second") == ("Ready", "")
    assert await shared(world, "third") == ("Ready", "second")
    own = (await status(world, "second")).content_name
    assert own != lent
    assert [content.metadata.name for content in contents(world)] == [own]


async def test_a_ready_owner_whose_artifact_is_gone_owns_no_more(world: World) -> None:
    await captured(world, "first", "second")
    await world.remove("Snapshot", "first")
    await captured(world, "third")
    assert await shared(world, "second") == ("Ready", "")
    assert (await status(world, "third")).shares == "second"


async def test_deleting_a_sharer_leaves_the_artifact_and_the_owner(world: World) -> None:
    await captured(world, "first", "second")
    await world.delete("DynamoCheckpoint", "second")
    assert await world.get("DynamoCheckpoint", "second") is None
    assert not world.open()
    assert (await status(world, "first")).phase == "Ready"
    assert contents(world)[0].metadata.deletion_timestamp is None


async def test_a_snapshot_with_the_name_of_a_sharer_does_not_concern_it(world: World) -> None:
    await captured(world, "first", "second")
    await world.apply(snapshot_document("second", world.cluster.page("Pod")[0].metadata.name))
    await world.advance(1.0)
    assert await shared(world, "second") == ("Ready", "first")


async def test_damage_of_the_artifact_is_shown_by_all_that_share_it(world: World) -> None:
    await captured(world, "first", "second")
    await world.apply(restore_document("first", node="node-2"))
    await world.answer("run")
    await world.fail(world.open("load")[0], "ArtifactCorrupt")
    await world.answer_all()
    assert await standing(world, "first") == ("Ready", "ArtifactCorrupt")
    assert await standing(world, "second") == ("Ready", "ArtifactCorrupt")


async def test_a_pod_is_restored_from_a_checkpoint_that_shares(world: World) -> None:
    await apply(world, "first", "second")
    await world.apply(restore_document("second"))
    assert (await world.restore("restored")).status.content_name == ""
    await world.answer_all()
    found = (await world.restore("restored")).status
    assert found.state == "Restored"
    assert found.content_name == (await status(world, "first")).content_name


async def test_a_shared_artifact_counts_once_and_stays_while_a_sharer_is_asked_for(
    world: World,
) -> None:
    await captured(world, "first", "second")
    (found,) = (await world.api.retention(RetentionRequest())).artifacts
    assert (found.name, found.content) == ("first", contents(world)[0].metadata.name)


# What memory shows may be late, and two may begin side by side.


async def blind_to_the_first(world: World) -> World:
    """Return a second operator whose checkpoint has begun beside one that it does not see."""
    await apply(world, "first")
    second = world.another("DynamoCheckpoint")
    await apply(second, "second")
    assert jobs(second) == ["first", "second"]
    return second


async def see_all(world: World) -> None:
    await world.store.show()
    await world.settle()


async def test_two_that_began_unseen_by_each_other_end_with_one_artifact(world: World) -> None:
    second = await blind_to_the_first(world)
    await see_all(second)
    assert await standing(second, "second") == ("Creating", "SharesIdentity")
    await second.answer_all()
    assert jobs(second) == ["first"]
    assert (await status(second, "second")).shares == "first"
    assert len(contents(second)) == 1


async def test_one_that_gave_up_captures_after_its_worker_has_ended_when_the_owner_goes(
    world: World,
) -> None:
    second = await blind_to_the_first(world)
    await see_all(second)
    await second.delete("DynamoCheckpoint", "first")
    assert await standing(second, "second") == ("Creating", "WorkerEnding")
    await second.answer_all()
    assert await shared(second, "second") == ("Ready", "")


@pytest.mark.parametrize(
    ("job_name", "has_job", "gives_up"),
    [("", False, False), ("second", False, True), ("", True, True), ("second", True, True)],
)
async def test_one_that_has_begun_gives_up_its_name_for_a_worker_and_the_worker_itself(
    world: World, job_name: str, has_job: bool, gives_up: bool
) -> None:
    await apply(world, "first")
    owner = await world.get("DynamoCheckpoint", "first")
    value = replace(owner, status=DynamoCheckpointStatus(job_name=job_name))
    value = with_meta(value, name="second", uid=UID)
    first = await world.get("Job", "first")
    job = replace(first, metadata=child_meta(value, "second")) if has_job else None
    plan = reconcile(CheckpointView(value, job, owner=owner), world.now)
    assert [write.value for write in plan.writes if isinstance(write, Delete)] == [job] * has_job
    (status,) = [write.new.status for write in plan.writes if isinstance(write, SetStatus)]
    assert (status.job_name, bool(plan.relies_on)) == ("", gives_up)


async def test_one_whose_capture_is_under_way_goes_on_beside_the_owner(world: World) -> None:
    second = await blind_to_the_first(world)
    await second.answer_well(second.open("run")[1])
    assert (await status(second, "second")).snapshot_name == "second"
    await see_all(second)
    await second.answer_all()
    assert await shared(second, "first") == ("Ready", "")
    assert await shared(second, "second") == ("Ready", "")


async def test_no_worker_is_started_in_place_of_an_artifact_that_is_not_seen_yet(
    world: World,
) -> None:
    await captured(world, "first")
    late = world.another("Snapshot", "SnapshotContent")
    await apply(late, "second")
    await late.advance(1.0)
    assert jobs(late) == ["first"]
    assert (await status(late, "second")).shares == "first"


async def test_ready_is_not_taken_back_for_an_artifact_that_is_not_seen_yet(world: World) -> None:
    await captured(world, "first", "second", "third")
    late = world.another("Snapshot", "SnapshotContent")
    seen: list[str] = []

    def watch(_old: AnyObject | None, new: AnyObject | None) -> None:
        if isinstance(new, DynamoCheckpoint):
            seen.append(new.status.phase)

    late.cluster.subscribe(watch)
    await late.advance(1.0)
    await late.advance(1.0)
    assert seen == ["Ready"] * 3
    assert jobs(late) == ["first"]


async def test_a_conflict_with_an_owner_that_has_failed_unseen_refuses_nothing(
    world: World,
) -> None:
    await apply(world, "first")
    late = world.another()
    await late.sync()
    late.store.hidden.add("DynamoCheckpoint")
    await world.delete("DynamoCheckpoint", "first")
    await late.apply(document("second", podTemplateSpec=pod_template(args=["--seed", "1"])))
    assert (await status(late, "second")).phase != "Failed"
    await late.advance(1.0)
    assert (await status(late, "second")).job_name == "second"


async def test_a_checkpoint_that_stopped_between_its_job_and_its_status_owns_the_job(
    world: World,
) -> None:
    def names_its_job(value: Any) -> bool:
        return isinstance(value, DynamoCheckpoint) and bool(value.status.job_name)

    with world.refusing_status(names_its_job, ConnectionError):
        await apply(world, "first")
    assert (await status(world, "first")).job_name == ""
    await world.advance(1.0)
    assert (await status(world, "first")).job_name == "first"
    await captured(world, "a-second")
    assert (await status(world, "a-second")).shares == "first"


async def test_one_more_that_shares_costs_the_same_beside_many(world: World) -> None:
    costs = []
    for count in (2, 40):
        await apply(world, *(f"llm-{len(costs)}-{number}" for number in range(count)))
        before = world.manager.reconciles
        await apply(world, f"one-more-{count}")
        costs.append(world.manager.reconciles - before)
    assert costs[0] == costs[1]
