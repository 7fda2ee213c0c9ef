"""What people on call ask for: cordon a node, abort a capture, have an order sent again."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from snapshot_api.facts import Pod
from snapshot_api.meta import is_true
from snapshot_api.well_known import ABORT, CAPTURE_ON_DRAIN, VERIFY
from snapshot_operator.core.interventions import MAX_REQUESTED
from snapshot_operator.core.quarantine import asked
from snapshot_operator.local.scheduler import Waiting, place
from snapshot_shared.api import AbortRequest, CordonRequest, HealthRequest, RequeueRequest
from snapshot_shared.transitions import Capture
from tests.support.builders import content, with_meta
from tests.support.objects import checkpoint_document, pod_document, presence
from tests.support.operator_world import World, payload, row_of, world_of


@pytest.fixture
async def world() -> World:
    return await world_of(1)


async def cordon(world: World, node: str, *, unschedulable: bool = True) -> Any:
    return await world.ask("cordon", CordonRequest(node=node, unschedulable=unschedulable))


async def abort(world: World, kind: str = "dckpt", name: str = "llm") -> Any:
    return await world.ask("abort", AbortRequest(kind=kind, name=name, by="ann@desk"))


async def requeue(world: World, order: str) -> Any:
    return await world.ask("requeue", RequeueRequest(order=order))


async def prepared(world: World) -> None:
    await world.apply(checkpoint_document())
    await world.answer("run")


# Cordon.


async def test_a_cordoned_node_gets_no_new_pod_until_it_is_uncordoned(world: World) -> None:
    assert (await cordon(world, "node-1")).changed
    await world.apply(pod_document("restored"))
    assert not world.open("run")
    pod = await world.get("Pod", "restored")
    assert (pod.status.reason, pod.status.message) == ("Unschedulable", "node-1 is cordoned")
    assert (await cordon(world, "node-1", unschedulable=False)).changed
    assert world.open("run")


async def test_the_scheduler_passes_a_cordoned_node_by_for_one_that_is_not(world: World) -> None:
    await world.join(presence("node-2"))
    await cordon(world, "node-1")
    await world.apply(checkpoint_document())
    assert [order.node for order in world.open("run")] == ["node-2"]


async def test_the_scheduler_tells_a_cordoned_node_from_one_that_is_not_ready(world: World) -> None:
    await cordon(world, "node-1")
    nodes: Any = world.cluster.page("Node")
    pod = msgspec.convert(pod_document(), Pod)
    assert place(pod, nodes, {}) == Waiting("Unschedulable", "node-1 is cordoned")
    await world.silence(40.0)
    nodes = world.cluster.page("Node")
    assert place(pod, nodes, {}) == Waiting("Unschedulable", "node-1 is not ready")


async def test_a_node_is_lost_after_ninety_seconds_and_not_before(world: World) -> None:
    await world.silence(89.0)
    assert not is_true((await world.get("Node", "node-1")).status.conditions, "Lost")
    await world.see(absent_s=91.0)
    assert is_true((await world.get("Node", "node-1")).status.conditions, "Lost")


async def test_cordoning_twice_changes_nothing_and_presence_does_not_undo_it(world: World) -> None:
    await cordon(world, "node-1")
    before = await world.get("Node", "node-1")
    again = await cordon(world, "node-1")
    assert (again.node, again.changed) == ("node-1", False)
    assert await world.get("Node", "node-1") == before
    await world.join(presence("node-1", gpus=4))
    await world.see(absent_s=0.0)
    node = await world.get("Node", "node-1")
    assert node.spec.unschedulable
    assert len(node.status.devices) == 4


async def test_a_node_that_is_not_there_cannot_be_cordoned(world: World) -> None:
    answer = await cordon(world, "node-9")
    assert answer.failure.reason == "NotFound"
    assert "snapshotctl get nodes" in answer.failure.next_step
    assert (await cordon(world, "Node_9")).failure.reason == "InvalidName"


async def test_a_capture_that_runs_goes_on_on_a_cordoned_node(world: World) -> None:
    await prepared(world)
    assert world.open("prepare")
    await cordon(world, "node-1")
    await world.answer_all()
    assert (await world.get("DynamoCheckpoint", "llm")).status.phase == "Ready"


async def test_a_capture_that_has_not_begun_waits_with_a_reason(world: World) -> None:
    await world.apply(checkpoint_document())
    await cordon(world, "node-1")
    await world.answer("run")
    assert not world.open("prepare")
    assert (await world.row("Snapshot")).reason == "NodeCordoned"
    await cordon(world, "node-1", unschedulable=False)
    assert world.open("prepare")


async def test_a_pod_that_is_captured_on_drain_is_captured_on_a_cordoned_node(world: World) -> None:
    document = checkpoint_document()
    template = document["spec"]["job"]["podTemplateSpec"]
    template["metadata"] = {"labels": {CAPTURE_ON_DRAIN: "true"}}
    await world.apply(document)
    await cordon(world, "node-1")
    await world.answer("run")
    assert world.open("prepare")


async def test_a_verification_goes_to_a_node_that_is_not_cordoned(world: World) -> None:
    await world.capture()
    await cordon(world, "node-1")
    await world.verify("Snapshot")
    assert not world.open("verify")
    await world.join(presence("node-2"))
    assert [order.node for order in world.open("verify")] == ["node-2"]


async def test_a_cordoned_node_still_cleans_up(world: World) -> None:
    await world.capture()
    await cordon(world, "node-1")
    await world.remove("DynamoCheckpoint", "llm")
    assert not world.cluster.page("SnapshotContent")


# Abort.


@pytest.mark.parametrize("kind", ["dckpt", "snapshot"])
async def test_an_aborted_capture_ends_failed_and_says_who_wanted_it(
    world: World, kind: str
) -> None:
    await prepared(world)
    await world.answer("prepare")
    assert (await abort(world, kind)).capture == "Staging"
    assert sorted(order.service for order in world.open("abort")) == ["agent", "gms"]
    await world.answer_all()
    content = (await world.content()).status
    assert (content.capture, content.failure.reason) == (Capture.FAILED, "Aborted")
    assert "delete" in {order.verb for order in world.orders.history}
    found = await world.get("DynamoCheckpoint", "llm")
    failed = row_of(found, "Failed")
    assert (found.status.phase, failed.reason) == ("Failed", "Aborted")
    assert "ann@desk" in failed.message


async def test_a_capture_that_has_not_begun_is_aborted_without_an_order(world: World) -> None:
    await world.apply(checkpoint_document())
    await cordon(world, "node-1")
    await world.answer("run")
    assert (await abort(world)).capture == "Pending"
    assert (await world.content()).status.capture is Capture.FAILED
    assert not world.open("abort")
    assert not world.open("prepare")


async def test_a_capture_that_would_be_tried_again_is_not_when_it_was_aborted(world: World) -> None:
    await prepared(world)
    await world.fail(world.open("prepare")[0], "QuiesceTimeout", retryable=True)
    assert (await abort(world)).capture == "Aborting"
    await world.answer("abort")
    found = (await world.content()).status
    assert (found.capture, found.attempt) == (Capture.FAILED, 1)
    assert found.failure.reason == "Aborted"


async def test_asking_twice_to_abort_keeps_who_asked_first(world: World) -> None:
    await prepared(world)
    await abort(world)
    request = AbortRequest(kind="dckpt", name="llm", by="bob@desk")
    assert (await world.ask("abort", request)).failure is None
    assert (await world.content()).metadata.annotations[ABORT] == "ann@desk"
    assert len(world.open("abort")) == 2


async def test_a_committed_capture_is_not_aborted(world: World) -> None:
    await world.capture()
    answer = await abort(world)
    assert answer.failure.reason == "NotEligible"
    assert "generation 1 is committed" in answer.failure.message
    assert "snapshotctl delete" in answer.failure.next_step
    assert is_true((await world.content()).status.conditions, "Ready")


async def test_what_has_no_capture_under_way_is_not_aborted(world: World) -> None:
    assert (await abort(world)).failure.reason == "NotFound"
    await world.apply(checkpoint_document())
    early = await abort(world)
    assert early.failure.reason == "NotEligible"
    assert early.failure.next_step == "to give it up: snapshotctl delete dckpt llm"
    await world.answer("run")
    pod = await abort(world, "pod", payload(world.open("prepare")[0])["pod"]["name"])
    assert "snapshotctl delete po" in pod.failure.next_step
    await world.fail(world.open("prepare")[0], "GateClosed")
    await world.answer_all()
    assert "failed already: GateClosed" in (await abort(world)).failure.message


# Requeue.


async def test_an_order_that_is_awaited_is_published_again_as_the_operator_has_it(
    world: World,
) -> None:
    await world.apply(checkpoint_document())
    (run,) = world.open("run")
    world.orders.stream.clear()
    answer = await requeue(world, run.order)
    assert (answer.attempt, answer.node, answer.service) == (1, "node-1", "agent")
    assert world.orders.stream[run.order] == run


async def test_an_order_that_is_answered_or_unknown_is_not_published_again(world: World) -> None:
    await world.apply(checkpoint_document())
    (run,) = world.open("run")
    await world.fail(run, "SpawnFailed")
    world.orders.history.clear()
    answered = await requeue(world, run.order)
    assert answered.failure.reason == "NotEligible"
    assert "ended failed (SpawnFailed" in answered.failure.message
    assert f"snapshotctl orders show {run.order}" in answered.failure.next_step
    never = await requeue(world, run.order.replace("run-", "prepare-"))
    assert "has never ordered" in never.failure.message
    gone = await requeue(world, "dump-00000000-0000-0000-0000-000000000001")
    assert "is gone" in gone.failure.message
    assert (await requeue(world, "nonsense")).failure.reason == "InvalidName"
    assert not world.orders.history


async def test_the_operator_tells_when_it_swept(world: World) -> None:
    assert (await world.ask("health", HealthRequest())).swept_at is None
    await world.sweep.once()
    health = await world.ask("health", HealthRequest())
    assert health.swept_at == world.now
    assert health.version


def test_of_an_annotation_of_any_length_the_beginning_is_kept() -> None:
    long = with_meta(content(), annotations={VERIFY: "v" * 200_000})
    found = asked(long)
    assert found.status.verify_request == "v" * MAX_REQUESTED
    assert found.status.verifications == 1
    # It is obeyed once.
    assert asked(found) is found
