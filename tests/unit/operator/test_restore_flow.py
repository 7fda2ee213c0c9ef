"""A pod with `restore-from`: placed, loaded, committed, restored; or dropped, with a reason."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from snapshot_api.facts import ContainerStatus
from snapshot_api.meta import Condition, is_true, time_of
from snapshot_api.v1alpha1.content import SnapshotContent
from snapshot_api.v1alpha1.restore import SnapshotRestoreStatus
from snapshot_api.views import with_columns
from snapshot_operator.core import conditions
from snapshot_operator.core.fold import ANSWER_GRACE_S
from snapshot_operator.core.ordering import BUDGET_S
from snapshot_operator.core.plan import Finalize, Plan
from snapshot_operator.core.restore import ABSENT_S, RestoreView, reconcile
from snapshot_shared.transitions import Restore
from tests.support import builders
from tests.support.builders import with_meta, with_status
from tests.support.objects import (
    checkpoint_document,
    pod_document,
    presence,
    restore_document,
    snapshot_document,
)
from tests.support.operator_world import World, payload, written


async def test_a_pod_is_restored_when_every_order_is_answered_well(world: World) -> None:
    await world.perform(restore_document())
    assert (await world.restore("restored")).status.state is Restore.RESTORED
    assert is_true((await world.get("Pod", "restored")).status.conditions, "Ready")
    assert (await world.content()).status.readers == []


async def test_a_restore_is_a_trace_of_its_own_whose_span_is_linked_to_that_of_its_capture(
    world: World,
) -> None:
    await world.apply(restore_document())
    source = (await world.content()).status.traceparent
    own = (await world.restore("restored")).status.traceparent
    assert own == (await world.get("Pod", "restored")).status.traceparent
    assert own.split("-")[1] != source.split("-")[1]
    await world.answer_all()
    records = list(world.spans._telemetry._outbox.records)
    (capture,) = (record for record in records if record.name == "capture")
    (restoration,) = (record for record in records if record.name == "restoration")
    (link,) = restoration.links
    assert link.split("-")[1:3] == [capture.trace_id, capture.span_id]


async def test_the_driver_of_a_checkpoint_is_that_of_every_order_of_its_capture_and_restore(
    world: World,
) -> None:
    before = len(world.orders.history)
    await world.capture("again", driver="respawn")
    await world.join(presence("node-3"))
    await world.perform(restore_document(source="again"))
    assert (await world.restore("restored")).status.state is Restore.RESTORED
    orders = [payload(order) for order in world.orders.history[before:]]
    driven = [order for order in orders if "driver" in order]
    verbs = {"run", "prepare", "dump", "release", "restore"}
    assert {found["order"].partition("-")[0] for found in driven} == verbs
    assert {found["driver"] for found in driven} == {"respawn"}


async def test_a_pod_says_the_driver_that_it_is_captured_with(world: World) -> None:
    document = restore_document(name="plain")
    document["metadata"]["annotations"] = {"nvidia.com/capture-driver": "criu"}
    await world.join(presence("node-3"))
    await world.apply(document)
    (run,) = world.open("run")
    assert (payload(run)["driver"], payload(run)["standby"]) == ("criu", False)


async def test_the_driver_of_a_capture_is_that_of_its_abort(world: World) -> None:
    await world.apply(checkpoint_document("again", driver="respawn"))
    await world.answer("run")
    await world.advance(3601.0)
    assert {payload(order)["driver"] for order in world.open("abort")} == {"respawn"}


async def placed(world: World, ago: float = 0.0) -> None:
    """Have the pod be placed by another scheduler, `ago` seconds before now."""
    pod = await world.get("Pod", "restored")
    scheduled = Condition(
        type="PodScheduled",
        status="True",
        reason="Scheduled",
        last_transition_time=conditions.timestamp(world.now - ago),
    )
    status = {"node_name": "node-2", "conditions": [scheduled]}
    await world.cluster.update_status(with_status(pod, **status))
    await world.settle()


async def test_a_pod_with_a_place_waits_an_hour_for_a_source_that_nobody_makes(
    world: World,
) -> None:
    await world.apply(restore_document(source="misspelt"))
    await world.advance(2 * ABSENT_S)
    # Without a place it holds nothing.
    assert (await world.restore("restored")).status.state is Restore.PENDING
    await placed(world)
    await world.advance(ABSENT_S - 1.0)
    assert (await world.restore("restored")).status.state is Restore.PENDING
    await world.advance(1.0)
    found = (await world.restore("restored")).status
    assert (found.state, found.failure.reason) == (Restore.FAILED, "SnapshotNotFound")
    assert "no snapshot or checkpoint is called misspelt" in found.failure.message


async def test_a_pod_with_a_place_waits_longer_for_a_source_that_is_there(world: World) -> None:
    await world.apply(restore_document(source="misspelt"))
    await placed(world)
    value, pod = await world.restore("restored"), await world.get("Pod", "restored")
    later = world.now + 2 * ABSENT_S
    states = [
        written(
            reconcile(RestoreView(value, pod, missing="m", is_absent=absent), later)
        ).status.state
        for absent in (False, True)
    ]
    assert states == [Restore.PENDING, Restore.FAILED]


async def test_the_hour_counts_from_when_the_source_was_deleted(world: World) -> None:
    await world.apply(snapshot_document("late", "no-such-pod"))
    await world.apply(restore_document(source="late"))
    await placed(world, ago=2 * ABSENT_S)
    await world.remove("Snapshot", "late")
    await world.advance(ABSENT_S - 1.0)
    status = (await world.restore("restored")).status
    assert status.state is Restore.PENDING
    assert status.absent_since is not None
    await world.apply(snapshot_document("late", "no-such-pod"))
    assert (await world.restore("restored")).status.absent_since is None
    # A second absence has an hour of its own.
    await world.remove("Snapshot", "late")
    await world.advance(ABSENT_S - 1.0)
    assert (await world.restore("restored")).status.state is Restore.PENDING
    await world.advance(1.0)
    failure = (await world.restore("restored")).status.failure
    assert failure is not None
    assert failure.reason == "SnapshotNotFound"


@pytest.mark.parametrize("source", ["to-come", "llm"])
async def test_a_pod_waits_for_its_source_only_until_it_has_a_place(
    world: World, source: str
) -> None:
    await world.remove("Snapshot", "llm")
    assert not world.cluster.all("SnapshotContent")
    await world.apply(restore_document(source=source))
    assert (await world.restore("restored")).status.state is Restore.PENDING
    # Its source was there when it was placed, and was deleted before the restore was a reader.
    value = await world.restore("restored")
    await world.cluster.update_status(with_status(value, source_lost=True))
    await placed(world)
    found = (await world.restore("restored")).status
    assert (found.state, found.failure.reason) == (Restore.FAILED, "SnapshotGone")


@pytest.mark.parametrize(
    ("snapshots", "message"),
    [
        ([], "no snapshot or checkpoint is called to-come"),
        ([snapshot_document("to-come", "no-such-pod")], "to-come has no content yet"),
    ],
)
async def test_a_pod_that_another_scheduler_has_placed_waits_for_a_source_that_may_come_yet(
    world: World, snapshots: list[Any], message: str
) -> None:
    await world.apply(*snapshots, restore_document(source="to-come"))
    await placed(world)
    found = (await world.restore("restored")).status
    assert (found.state, found.conditions[0].message) == (Restore.PENDING, message)


async def test_a_restore_waits_for_the_memory_server_of_its_pod_and_names_devices_by_their_parts(
    world: World,
) -> None:
    committed = (await world.content()).status.committed
    await world.apply(restore_document())
    value, content = await world.restore("restored"), await world.content()
    content = with_status(content, readers=[value.metadata.uid], committed=committed)
    pending = replace(
        value, status=SnapshotRestoreStatus(content_name=content.metadata.name, node_name="node-2")
    )

    def begun(memory_server: str) -> SnapshotRestoreStatus:
        target = builders.pod("restored", node_name="node-2", memory_server=memory_server)
        view = RestoreView(with_columns(pending), target, content)
        return written(reconcile(view, world.now)).status  # type: ignore[no-any-return]

    assert begun("starting").conditions[0].reason == "WaitingForMemoryServer"
    ready = begun("ready")
    assert [device.uuid for device in ready.devices] == ["gpu-0", "gpu-1"]
    loads = [payload(order) for order in ready.orders]
    assert [load["device"] for load in loads] == ["gpu-0", "gpu-1"]
    assert [load["pod"]["name"] for load in loads] == ["restored", "restored"]


async def test_a_deleted_restore_goes_once_its_content_has_taken_it_off_the_readers(
    world: World,
) -> None:
    await world.perform(restore_document())
    value, content = await world.restore("restored"), await world.content()
    going = with_columns(with_meta(value, deletion_timestamp="2026-01-01"))
    reading = with_status(content, readers=[value.metadata.uid])
    assert reconcile(RestoreView(going, None, reading), world.now) == Plan()
    for found in (content, None):
        plan = reconcile(RestoreView(going, None, found), world.now)
        assert plan == Plan((Finalize(going),))


async def test_a_restore_looks_again_when_the_content_that_it_has_named_takes_no_readers(
    world: World,
) -> None:
    await world.apply(restore_document(node="node-2"))
    value, content = await world.restore("restored"), await world.content()
    named = replace(value, status=SnapshotRestoreStatus(content_name=content.metadata.name))
    pod = await world.get("Pod", "restored")
    bare = with_status(content, readers=[])
    going = with_meta(bare, deletion_timestamp="2026-01-01")
    young = with_status(bare, committed=None)
    for found in (going, young, None):
        status = written(reconcile(RestoreView(named, pod, found), world.now)).status
        assert status == SnapshotRestoreStatus(phase="Pending", source_lost=True)


async def test_a_restore_of_a_pod_that_is_placed_names_its_content_and_its_node_at_once(
    world: World,
) -> None:
    await world.apply(restore_document(node="node-2"))
    value, content = await world.restore("restored"), await world.content()
    new, pod = replace(value, status=SnapshotRestoreStatus()), await world.get("Pod", "restored")
    new = written(reconcile(RestoreView(new, pod, content), world.now))
    assert (new.status.content_name, new.status.node_name) == (content.metadata.name, "node-2")


async def test_the_standby_worker_starts_while_its_devices_are_loaded(world: World) -> None:
    await world.apply(restore_document(node="node-2"))
    assert sorted(order.verb for order in world.open()) == ["load", "load", "run"]
    assert payload(world.open("run")[0])["standby"] is True
    assert {order.node for order in world.open()} == {"node-2"}


async def test_nothing_is_committed_until_all_devices_are_loaded(world: World) -> None:
    await world.apply(restore_document())
    first, second = world.open("load")
    await world.answer_well(first)
    assert not world.open("commit")
    await world.answer_well(second)
    assert len(world.open("commit")) == 2


async def test_the_reader_is_registered_before_the_loads_and_keeps_the_artifact(
    world: World,
) -> None:
    await world.apply(restore_document())
    restore = await world.restore("restored")
    assert (await world.content()).status.readers == [restore.metadata.uid]
    await world.delete("DynamoCheckpoint", "llm")
    assert not world.open("delete")
    await world.answer_all()
    assert not world.cluster.page("SnapshotContent")


async def test_a_restore_that_has_no_place_yet_does_not_keep_what_is_deleted(world: World) -> None:
    for name in ("one", "two"):
        await world.perform(restore_document(name=name, node="node-2"))
    assert (await world.get("Pod", "two")).status.reason == "Unschedulable"
    await world.remove("DynamoCheckpoint", "llm")
    assert not world.cluster.page("SnapshotContent")
    pod = await world.get("Pod", "two")
    assert (pod.status.phase, pod.status.reason) == ("Pending", "WaitingForSnapshot")


async def test_nothing_is_loaded_before_the_content_has_registered_the_reader(world: World) -> None:
    with world.refusing_status(lambda value: isinstance(value, SnapshotContent)):
        await world.apply(restore_document())
    assert (await world.content()).status.readers == []
    assert not world.open("load")
    await world.advance(1.0)
    assert (await world.content()).status.readers
    assert len(world.open("load")) == 2


async def test_a_worker_is_filled_only_when_it_stands_by(world: World) -> None:
    await world.apply(restore_document(node="node-2"))
    await world.answer("load", "commit")
    running = ContainerStatus(name="main", state="running")
    for states in ([running, ContainerStatus(name="beside")], [running, running]):
        assert not world.open("restore")
        pod = await world.get("Pod", "restored")
        await world.cluster.update_status(with_status(pod, container_statuses=states))
        await world.settle()
    assert world.open("restore")


async def test_a_failed_restore_that_is_deleted_stays_while_a_load_may_still_go_on(
    world: World,
) -> None:
    await world.apply(restore_document(node="node-2"))
    first, second = world.open("load")
    await world.fail(first, "ArtifactCorrupt")
    await world.answer("drop")
    await world.advance(BUDGET_S["load"] + ANSWER_GRACE_S)
    restore = await world.restore("restored")
    assert restore.status.state is Restore.FAILED
    await world.cluster.delete(restore)
    await world.settle()
    assert await world.restore("restored") is not None
    await world.answer_well(second)
    assert await world.restore("restored") is None


async def test_a_reader_whose_object_is_gone_keeps_the_artifact_no_longer(world: World) -> None:
    await world.apply(restore_document(node="node-2"))
    restore = await world.restore("restored")
    assert (await world.content()).status.readers == [restore.metadata.uid]
    for name in restore.metadata.finalizers:
        restore = await world.store.remove_finalizer(restore, name) or restore
    await world.cluster.delete(restore)
    await world.advance(1.0)
    assert restore.metadata.uid not in (await world.content()).status.readers


@pytest.mark.parametrize(
    ("before", "verb", "then"), [((), "load", "commit"), (("load",), "commit", "restore")]
)
async def test_one_that_fails_drops_all_that_was_loaded_and_ends_the_waiting_worker(
    world: World, before: tuple[str, ...], verb: str, then: str
) -> None:
    await world.apply(restore_document())
    await world.answer("run", *before)
    first, second = world.open(verb)
    await world.answer_well(first)
    await world.fail(second, "ArtifactCorrupt")
    assert len(world.open("drop")) == 2
    assert not world.open(then)
    await world.answer_all()
    pod = await world.get("Pod", "restored")
    assert (pod.status.phase, pod.status.reason) == ("Failed", "ArtifactCorrupt")
    assert (await world.content()).status.readers == []


async def test_a_load_that_may_go_well_the_next_time_is_tried_again_twice(world: World) -> None:
    await world.apply(restore_document(node="node-2"))
    begun = (await world.restore("restored")).status.started_at
    assert begun == time_of(world.now)
    for attempt, rest in ((1, 0.0), (2, 1.0), (3, 5.0)):
        await world.advance(rest)
        first, second = world.open("load")
        assert (first.attempt, second.attempt) == (attempt, attempt)
        await world.fail(first, "DeviceBusy", retryable=True)
        await world.answer_well(second)
        await world.answer("drop")
        assert not world.open("load")
    status = (await world.restore("restored")).status
    assert (status.state, status.started_at) == (Restore.FAILED, begun)


async def test_a_node_whose_gpus_are_too_small_is_refused_with_both_values(world: World) -> None:
    await world.join(presence("small", capacity=512))
    await world.apply(restore_document(node="small"))
    pod = await world.get("Pod", "restored")
    assert (pod.status.phase, pod.status.reason) == ("Failed", "DeviceTooSmall")
    assert "needs 1 KiB on one GPU" in pod.status.message
    assert "has 512 B" in pod.status.message
    assert not world.open()


async def test_a_pod_that_asks_for_other_gpus_than_the_source_is_refused(world: World) -> None:
    await world.apply(restore_document(gpus=1))
    pod = await world.get("Pod", "restored")
    assert (pod.status.phase, pod.status.reason) == ("Failed", "Incompatible")


async def test_a_name_of_revisions_is_restored_from_the_newest_that_is_captured(
    world: World,
) -> None:
    await world.join(presence("node-3"))
    await world.apply(restore_document(source="chat", gpus=1))
    assert (await world.get("Pod", "restored")).status.reason == "WaitingForSnapshot"
    for number in (1, 2):
        await world.perform(pod_document(f"worker-{number}", gpus=1))
        await world.perform(
            snapshot_document(f"chat-{number}", f"worker-{number}", revisionOf="chat")
        )
        if number == 1:
            first = await world.restore("restored")
            assert first.status.state is Restore.RESTORED
    await world.perform(restore_document(name="again", source="chat", gpus=1))
    second = await world.restore("again")
    contents = [
        (await world.get("Snapshot", f"chat-{number}")).status.bound_snapshot_content_name
        for number in (1, 2)
    ]
    assert [first.status.content_name, second.status.content_name] == contents


async def test_two_restores_never_share_a_device(world: World) -> None:
    await world.perform(restore_document(name="one"), restore_document(name="two"))
    one, two = await world.get("Pod", "one"), await world.get("Pod", "two")
    assert one.status.phase == "Running"
    assert (two.status.phase, two.status.reason) == ("Pending", "Unschedulable")
    await world.remove("Pod", "one")
    assert (await world.restore("two")).status.state is Restore.RESTORED


async def test_devices_of_an_ended_pod_are_free_only_when_its_memory_is_forgotten(
    world: World,
) -> None:
    await world.perform(restore_document(name="one"))
    await world.apply(restore_document(name="two"))
    run = next(o for o in world.orders.history if o.verb == "run" and payload(o)["standby"])
    await world.report(run, "exited", exit_code=0)
    await world.answer("stop")
    assert len(world.open("drop")) == 2
    assert (await world.get("Pod", "two")).status.phase == "Pending"
    await world.answer_all()
    assert (await world.restore("two")).status.state is Restore.RESTORED


async def test_a_pod_whose_snapshot_failed_before_it_had_a_content_ends_with_the_cause(
    world: World,
) -> None:
    await world.apply(snapshot_document("none", "no-such-pod", deadlineSeconds=60))
    await world.advance(61.0)
    await world.apply(restore_document(source="none"))
    pod = await world.get("Pod", "restored")
    assert (pod.status.phase, pod.status.reason) == ("Failed", "SnapshotFailed")
    assert "no-such-pod" in pod.status.message


async def test_a_pod_waits_while_a_capture_is_being_aborted_and_ends_when_that_has_failed(
    world: World,
) -> None:
    await world.join(presence("node-3"))
    await world.apply(checkpoint_document("bad"))
    await world.answer("run", "prepare")
    await world.fail(world.open("dump")[0], "NoSpace")
    await world.apply(restore_document(source="bad"))
    found = (await world.restore("restored")).status
    assert (found.state, found.conditions[0].reason) == (Restore.PENDING, "WaitingForSnapshot")
    assert found.conditions[0].message == "bad is not captured yet"
    await world.answer_all()
    found = (await world.restore("restored")).status
    assert (found.state, found.failure.reason) == (Restore.FAILED, "SnapshotFailed")
    assert "NoSpace happened" in found.failure.message


async def test_a_pod_deleted_during_its_restore_drops_what_was_loaded_and_frees_the_reader(
    world: World,
) -> None:
    await world.apply(restore_document())
    first, _ = world.open("load")
    await world.answer_well(first)
    await world.remove("Pod", "restored")
    assert await world.get("Pod", "restored") is None
    assert (await world.content()).status.readers == []


async def test_devices_of_a_silent_node_are_kept_and_its_worker_serves_on_when_it_returns(
    world: World,
) -> None:
    await world.perform(restore_document(name="one", node="node-2"))
    lost = world.present.pop("node-2")
    await world.see(absent_s=100.0)
    one = await world.get("Pod", "one")
    assert (one.status.phase, one.status.reason) == ("Unknown", "NodeSilent")
    assert not is_true(one.status.conditions, "Ready")
    assert not world.open("stop")
    await world.join(lost)
    assert is_true((await world.get("Pod", "one")).status.conditions, "Ready")
    await world.apply(restore_document(name="two", node="node-2"))
    assert (await world.get("Pod", "one")).status.phase == "Running"
    assert (await world.get("Pod", "two")).status.phase == "Pending"
    assert not world.open("stop")


async def test_a_pod_whose_node_is_deleted_fails(world: World) -> None:
    await world.perform(restore_document(name="one", node="node-2"))
    world.present.pop("node-2")
    await world.see(absent_s=100.0)
    await world.delete("Node", "node-2")
    one = await world.get("Pod", "one")
    assert (one.status.phase, one.status.reason) == ("Failed", "NodeLost")
    assert one.status.obligations == []


async def test_a_stop_that_failed_is_tried_again_before_the_devices_are_given_away(
    world: World,
) -> None:
    await world.perform(restore_document(name="one"))
    await world.delete("Pod", "one")
    await world.fail(world.open("stop")[0], "Internal")
    assert not world.open("drop")
    await world.advance(31.0)
    await world.answer_all()
    assert await world.get("Pod", "one") is None
