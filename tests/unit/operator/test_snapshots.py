"""A snapshot of a pod: why it can never be taken, and what it waits for until its deadline."""

from __future__ import annotations

import json
from typing import Any

import pytest
from msgspec.structs import replace

from snapshot_api.facts import ContainerStatus, Pod
from snapshot_api.meta import condition, is_true
from snapshot_api.v1alpha1.content import SnapshotContent
from snapshot_api.v1alpha1.snapshot import ArtifactSource, Snapshot, SnapshotSource, SnapshotStatus
from snapshot_api.well_known import POD_SPEC
from snapshot_operator.core import checkpoint
from snapshot_operator.core.checkpoint import CheckpointView
from snapshot_operator.core.kept_spec import MAX_BYTES, kept
from snapshot_operator.core.owning import owned_by
from snapshot_operator.core.plan import Create, KeepSpec, Plan
from snapshot_operator.core.snapshot import SnapshotView, reconcile
from snapshot_operator.runtime.interpreter import Stale
from tests.support.builders import with_meta, with_spec, with_status
from tests.support.objects import pod_document, presence, snapshot_document
from tests.support.operator_world import DIGEST, World, row_of, world_of, written

UID = "00000000-0000-4000-8000-00000000abcd"


@pytest.fixture
async def world() -> World:
    """A world in which one pod runs that was captured and released."""
    return await world_of(1, captured=True)


def running(world: World) -> Pod:
    (pod,) = world.cluster.all("Pod")
    assert isinstance(pod, Pod)
    return pod


def snapshot(pod: str, **reference: Any) -> dict[str, Any]:
    found = snapshot_document("s", pod, deadlineSeconds=100)
    found["spec"]["source"]["podRef"] |= reference
    return found


async def said(world: World, row: str = "Failed") -> tuple[str, str]:
    """Reason and message of a condition that is true; nothing when it is not."""
    rows = (await world.get("Snapshot", "s")).status.conditions
    found = condition(rows, row)
    return (found.reason, found.message) if found and found.status == "True" else ("", "")


async def test_a_snapshot_of_another_incarnation_of_a_pod_is_refused_with_both(
    world: World,
) -> None:
    pod = running(world)
    await world.apply(snapshot(pod.metadata.name, uid=UID))
    reason, message = await said(world)
    assert reason == "StalePodReference"
    assert UID in message
    assert pod.metadata.uid in message


@pytest.mark.parametrize("phase", ["Succeeded", "Failed"])
async def test_a_pod_that_has_ended_is_not_captured(world: World, phase: str) -> None:
    pod = running(world)
    await world.cluster.update_status(with_status(pod, phase=phase))
    await world.settle()
    await world.apply(snapshot(pod.metadata.name))
    reason, message = await said(world)
    assert reason == "SourcePodGone"
    assert phase in message


def beside_a_failed_one(pod: Pod) -> Pod:
    """A pod of which a container has failed, as a kubelet says it, while the worker runs."""
    rows = [
        ContainerStatus(name="main", state="running"),
        ContainerStatus(name="side", state="terminated", exit_code=3),
    ]
    return with_status(pod, phase="Running", container_statuses=rows)


async def test_a_pod_beside_whose_worker_a_container_has_failed_is_not_waited_for(
    world: World,
) -> None:
    await world.apply(snapshot("later"))
    asked: Any = await world.get("Snapshot", "s")
    view = SnapshotView(asked, beside_a_failed_one(running(world)), None)
    found = row_of(written(reconcile(view, world.now)), "Failed")
    assert found.reason == "CheckpointContainerFailed"
    assert "container side of pod llm" in found.message
    assert "exit code 3" in found.message


async def test_a_checkpoint_whose_pod_never_gets_ready_without_a_failed_container_ends_it() -> None:
    world = await world_of(1, answered=())
    (run,) = world.open("run")
    await world.report(run)
    asked, job = await world.get("DynamoCheckpoint", "llm"), await world.get("Job", "llm")
    view = CheckpointView(asked, job, beside_a_failed_one(running(world)))
    plan = checkpoint.reconcile(view, world.now)
    await world.interpreter.apply(plan)
    found = await world.row("DynamoCheckpoint", type_="Failed")
    assert (found.status, found.reason) == ("True", "CheckpointContainerFailed")
    await world.settle()
    assert [order.verb for order in world.open("stop")] == ["stop"]


async def test_a_container_that_the_pod_has_not_is_named_with_those_that_it_has(
    world: World,
) -> None:
    await world.apply(snapshot(running(world).metadata.name, containers=["engine"]))
    reason, message = await said(world)
    assert reason == "InvalidTargetContainer"
    assert "engine (found main)" in message


async def test_a_pod_that_is_not_there_is_waited_for_until_the_deadline(world: World) -> None:
    await world.apply(snapshot("later"))
    await world.advance(99.0)
    assert await said(world) == ("", "")
    await world.advance(1.0)
    reason, message = await said(world)
    assert reason == "SourcePodNotFound"
    assert "no pod later in namespace default within deadlineSeconds (100)" in message


async def test_a_pod_that_never_gets_ready_is_waited_for_until_the_deadline(world: World) -> None:
    await world.join(presence("node-2"))
    await world.apply(pod_document("cold", node="node-2"), snapshot("cold"))
    (run,) = world.open("run")
    await world.report(run)
    await world.advance(99.0)
    assert await said(world) == ("", "")
    await world.advance(1.0)
    assert (await said(world))[0] == "DeadlineExceeded"


async def test_a_content_that_belongs_to_something_else_fails_the_snapshot(world: World) -> None:
    await world.apply(snapshot(running(world).metadata.name))
    other = await world.get("Snapshot", "llm")
    value = await world.get("Snapshot", "s")
    (content,) = [c for c in world.cluster.page("SnapshotContent") if owned_by(c, other)]
    failed = row_of(written(reconcile(SnapshotView(value, None, content), world.now)), "Failed")
    assert (failed.status, failed.reason) == ("True", "SnapshotContentNameConflict")


@pytest.mark.parametrize(("namespace", "space"), [("team", "team"), (None, "default")])
@pytest.mark.parametrize("is_import", [True, False])
async def test_a_content_is_bound_in_the_namespace_of_its_snapshot(
    world: World, namespace: str | None, space: str, is_import: bool
) -> None:
    value = await world.get("Snapshot", "llm")
    if is_import:
        artifact = ArtifactSource(content_uid=UID, generation=1, root_digest=DIGEST)
        value = with_spec(value, source=SnapshotSource(artifact=artifact))
    bare = with_meta(replace(value, status=SnapshotStatus()), namespace=namespace)
    plan = reconcile(SnapshotView(bare, running(world), None), world.now)
    (made,) = [write.value for write in plan.writes if isinstance(write, Create)]
    assert isinstance(made, SnapshotContent)
    assert (made.spec.source.namespace, made.spec.snapshot_ref.namespace) == (space, space)


async def test_a_snapshot_that_has_failed_stays_so_whatever_becomes_of_its_pod(
    world: World,
) -> None:
    pod = running(world)
    await world.apply(snapshot(pod.metadata.name, containers=["engine"]))
    failed = await world.get("Snapshot", "s")
    assert is_true(failed.status.conditions, "Failed")
    now = world.now + failed.spec.deadline_seconds
    for found in (pod, None):
        assert reconcile(SnapshotView(failed, found, None), now) == Plan()


async def test_a_snapshot_has_the_spec_of_its_pod_before_its_content_is_there(world: World) -> None:
    pod = running(world)
    await world.apply(snapshot(pod.metadata.name))
    found = await world.get("Snapshot", "s")
    kept = json.loads(found.metadata.annotations[POD_SPEC])
    assert [each["name"] for each in kept["containers"]] == ["main"]
    # The template of a checkpoint has it.
    (of_checkpoint,) = (each for each in world.cluster.all("Snapshot") if each.metadata.name != "s")
    assert POD_SPEC not in of_checkpoint.metadata.annotations


async def test_a_snapshot_whose_pod_goes_while_its_spec_is_read_is_not_taken(world: World) -> None:
    pod = running(world)
    (found,) = world.cluster.all("Snapshot")
    assert isinstance(found, Snapshot)
    plan = Plan((KeepSpec(found, with_meta(pod, uid=UID)),))
    with pytest.raises(Stale, match="is gone"):
        await world.interpreter.apply(plan)


def test_a_spec_is_kept_without_the_values_of_variables_unless_it_is_too_long() -> None:
    env = [{"name": "A", "value": "secret"}, {"name": "B", "valueFrom": {"fieldRef": {"a": "b"}}}]
    spec: dict[str, Any] = {
        "containers": [{"name": "main", "env": env, "args": ["x"]}, {"name": "other"}],
        "initContainers": [
            {"name": "first", "env": env, "envFrom": [{"secretRef": {"name": "s"}}]}
        ],
        "volumes": [{"name": "v"}],
    }
    found = json.loads(kept(spec))
    for name in ("containers", "initContainers"):
        spec[name][0]["env"] = [{"name": "A"}, env[1]]
    assert found == spec
    assert kept(spec | {"volumes": [{"name": "v" * MAX_BYTES}]}) == ""
