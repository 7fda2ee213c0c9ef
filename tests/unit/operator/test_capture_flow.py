"""A checkpoint from apply to Ready, and every way in which it can end otherwise."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from snapshot_api.facts import Pod
from snapshot_api.meta import condition, is_true
from snapshot_operator.core.capture import ContentView, _vector_failure
from snapshot_operator.core.checkpoint import SLOW_S
from snapshot_operator.core.content import gather, reconcile
from snapshot_operator.runtime.cluster import Tracker
from snapshot_shared.errors import AgentSilent, HoldDeadline, Superseded
from snapshot_shared.metrics import Metrics
from snapshot_shared.orders import PartResult, VectorEntry
from snapshot_shared.transitions import Capture
from tests.support import builders
from tests.support.builders import with_meta, with_spec, with_status
from tests.support.objects import checkpoint_document, presence, snapshot_document
from tests.support.operator_world import DIGEST, World, payload, row_of, world_of, written


@pytest.fixture
async def world() -> World:
    return await world_of(1)


async def capturing(world: World, *answered: str, **job: Any) -> None:
    """Bring a checkpoint to where `prepare` is out, and on until these verbs are answered."""
    await world.apply(checkpoint_document(**job))
    await world.answer("run", *answered)


async def test_a_checkpoint_becomes_ready_when_every_order_is_answered_well(world: World) -> None:
    await world.capture()
    found = await world.get("DynamoCheckpoint", "llm")
    assert (found.status.phase, found.status.bytes) == ("Ready", 2058)
    ready = row_of(found)
    assert (ready.status, ready.message) == ("True", "generation 1, 2.01 KiB")


@pytest.mark.parametrize(("policy", "within_s"), [("Resume", 4.0), ("Terminate", 1800.0)])
async def test_a_worker_that_is_to_end_waits_for_its_artifact_and_not_for_seconds(
    world: World, policy: str, within_s: float
) -> None:
    await capturing(world, "prepare", sourcePolicy=policy)
    assert payload(world.open("dump")[0])["release_within_s"] == within_s


async def test_the_plan_is_fixed_before_any_part_is_ordered(world: World) -> None:
    await capturing(world)
    (prepare,) = world.open("prepare")
    assert not world.open("save")
    await world.answer_well(prepare)
    content = await world.content()
    assert [entry.part for entry in content.status.vector] == ["process", "gpu-0", "gpu-1"]
    assert {order.verb for order in world.open()} == {"dump", "save"}


async def test_a_worker_that_goes_on_is_released_once_its_part_is_staged_and_saves_read(
    world: World,
) -> None:
    await capturing(world, "prepare", "dump")
    assert not world.open("release")
    for save in world.open("save"):
        await world.report(save, "leased")
    assert world.open("release")
    assert len(world.open("save")) == 2


@pytest.mark.parametrize("order", [("release", "seal"), ("seal", "release")])
async def test_the_pause_of_a_worker_is_measured_once_whatever_is_answered_first(
    order: tuple[str, str],
) -> None:
    metrics = Metrics("snap-operator", "operator", "0", scraped=True)
    world = World(metrics=metrics)
    await world.join(presence("node-1"))
    await capturing(world, "prepare", "dump")
    saves = world.open("save")
    for save in saves:
        await world.report(save, "leased")
    (release,) = world.open("release")
    for save in saves:
        await world.answer_well(save)
    (seal,) = world.open("seal")
    for verb in order:
        if verb == "seal":
            await world.answer_well(seal)
        else:
            await world.report(release, paused_s=0.25)
    found = (await world.content()).status
    assert (found.capture, found.paused_seconds) == (Capture.READY, 0.25)
    await world.advance(60.0)
    text = metrics.text().decode()
    assert "snapback_capture_pause_duration_seconds_count 1.0" in text
    assert "snapback_capture_pause_duration_seconds_sum 0.25" in text


async def test_a_worker_that_ends_is_released_only_after_ready_is_stored(world: World) -> None:
    await capturing(world, "prepare", "dump", "save", sourcePolicy="Terminate")
    assert not world.open("release")
    await world.answer("seal")
    assert (await world.content()).status.capture is Capture.READY
    assert world.open("release")


@pytest.mark.parametrize(
    ("parts", "is_planned"),
    [
        (["process", "gpu-0"], True),
        (["process", "gpu-0", "gpu-1", "gpu-2"], True),
        (["process"], False),
        (["process", "gpu-1"], False),
        (["gpu-0"], False),
    ],
)
async def test_the_devices_of_a_memory_server_are_those_that_it_says_from_the_first_on(
    world: World, parts: list[str], *, is_planned: bool
) -> None:
    await capturing(world)
    content = await world.content()
    source = replace(content.spec.source, devices=[], memory_server=True)
    content = with_spec(content, source=source)
    assert (_vector_failure(content, parts) is None) == is_planned


@pytest.mark.parametrize(
    ("parts", "is_planned"),
    [
        (["process", "gpu-0"], True),
        (["process"], True),
        (["gpu-0"], False),
        (["process", "gpu-7"], False),
        (["process", "process"], False),
    ],
)
async def test_a_driver_that_brings_devices_needs_no_part_for_each(
    world: World, parts: list[str], *, is_planned: bool
) -> None:
    await capturing(world)
    content = with_spec(await world.content(), driver="criu+cuda")
    assert (_vector_failure(content, parts) is None) == is_planned


async def test_a_part_missing_from_the_vector_fails_the_capture(world: World) -> None:
    await capturing(world)
    await world.report(world.open("prepare")[0], vector=[VectorEntry(part="process")])
    await world.answer_all()
    assert (await world.get("DynamoCheckpoint", "llm")).status.phase == "Failed"
    assert (await world.content()).status.failure.reason == "PlanMismatch"


async def test_a_retryable_failure_before_the_freeze_is_tried_again_at_most_three_times(
    world: World,
) -> None:
    await capturing(world)
    for attempt, rest in ((1, 1.0), (2, 5.0), (3, 30.0), (4, None)):
        # An attempt keeps no order of the one before it.
        orders = (await world.content()).status.orders
        assert [(item.verb, item.attempt) for item in orders] == [("prepare", attempt)]
        await world.fail(world.open("prepare")[0], "QuiesceTimeout", retryable=True)
        await world.answer("abort")
        assert not world.open("prepare")
        if rest is not None:
            await world.advance(rest - 0.1)
            assert not world.open("prepare")
            await world.advance(0.2)
    content = await world.content()
    assert (content.status.capture, content.status.attempt) == (Capture.FAILED, 4)


async def test_an_attempt_that_took_longer_than_its_rest_is_followed_at_once(world: World) -> None:
    await capturing(world)
    world.now += 2.0
    await world.fail(world.open("prepare")[0], "QuiesceTimeout", retryable=True)
    await world.answer("abort")
    assert [order.attempt for order in world.open("prepare")] == [2]


@pytest.mark.parametrize(
    ("reason", "fails"),
    [("NoGuard", "prepare"), ("NodeBusy", "prepare"), ("ServiceStopped", "save")],
)
async def test_a_node_whose_services_are_stopped_and_started_ends_no_capture(
    world: World, reason: str, fails: str
) -> None:
    await capturing(world)
    for _ in range(8):
        await world.advance(31.0)
        if fails != "prepare":
            await world.answer("prepare", "dump")
        for order in world.open(fails):
            await world.fail(order, reason, retryable=True)
        await world.answer("abort")
    assert (await world.content()).status.retries == 0
    await world.advance(31.0)
    await world.answer_all()
    content = await world.content()
    assert (content.status.capture, content.status.attempt) == (Capture.READY, 9)


async def test_a_node_that_never_gets_ready_ends_a_capture_at_its_deadline(world: World) -> None:
    await capturing(world)
    await world.fail(world.open("prepare")[0], "NoGuard", retryable=True)
    await world.answer("abort")
    await world.advance(4000.0)
    await world.answer_all()
    content = await world.content()
    assert (content.status.capture, content.status.attempt) == (Capture.FAILED, 1)


async def test_no_attempt_begins_while_an_abort_that_was_given_again_is_not_answered(
    world: World,
) -> None:
    await capturing(world)
    (prepare,) = world.open("prepare")
    await world.fail(prepare, "QuiesceTimeout", retryable=True)
    aborts = world.open("abort")
    await world.answer_well(aborts[0])
    await world.advance(max(abort.deadline.timestamp() for abort in aborts) - world.now)
    assert world.open("abort")[-1].attempt == 2
    content = await world.content()
    assert (content.status.capture, content.status.attempt) == (Capture.FAILED, 1)
    assert not world.open("prepare")


@pytest.mark.parametrize(("more", "end"), [(0, Capture.READY), (1, Capture.FAILED)])
async def test_an_artifact_is_no_larger_than_its_limit(
    world: World, more: int, end: Capture
) -> None:
    await capturing(world, "prepare")
    most = 2**50 - 2 * 1024
    part = PartResult(part="process", bytes=most + more, digest=DIGEST)
    await world.report(world.open("dump")[0], part=part)
    await world.answer_all()
    assert (await world.content()).status.capture is end


async def test_a_failure_after_the_freeze_is_never_tried_again(world: World) -> None:
    await capturing(world, "prepare")
    await world.fail(world.open("dump")[0], "NoSpace", retryable=True)
    await world.answer_all()
    await world.advance(60.0)
    await world.answer_all()
    content = await world.content()
    assert (content.status.capture, content.status.attempt) == (Capture.FAILED, 1)


async def test_a_capture_whose_agent_stood_still_within_its_dump_is_tried_again(
    world: World,
) -> None:
    await capturing(world, "prepare")
    await world.fail(world.open("dump")[0], AgentSilent.reason, retryable=True)
    await world.answer_all()
    await world.advance(1.0)
    await world.answer_all()
    content = await world.content()
    assert (content.status.capture, content.status.attempt) == (Capture.READY, 2)
    assert content.status.retries == 1


@pytest.mark.parametrize("late", ["dump", "save"])
async def test_a_capture_whose_worker_was_let_go_before_its_dump_is_tried_again(
    world: World, late: str
) -> None:
    await capturing(world, "prepare")
    await world.fail(world.open(late)[0], HoldDeadline.reason, retryable=True)
    if late == "save":
        # The end of the attempt comes before it.
        await world.fail(world.open("dump")[0], Superseded.reason)
    await world.answer_all()
    await world.advance(1.0)
    await world.answer_all()
    content = await world.content()
    assert (content.status.capture, content.status.attempt) == (Capture.READY, 2)
    # What the first attempt has saved is of no use to anyone.
    assert content.status.generations == [2]


async def test_a_failed_capture_aborts_at_agent_and_gms_and_removes_its_generation(
    world: World,
) -> None:
    await capturing(world, "prepare")
    await world.fail(world.open("save")[0], "DeviceError")
    assert sorted(order.service for order in world.open("abort")) == ["agent", "gms"]
    assert not world.open("delete")
    await world.answer("dump", "save", "abort")
    (delete,) = world.open("delete")
    assert payload(delete)["generation"] == 1
    await world.answer_all()
    assert is_true((await world.content()).status.conditions, "Failed")


async def test_an_answer_that_never_comes_ends_in_a_reason_after_the_deadline(world: World) -> None:
    await capturing(world)
    for _ in range(3):
        await world.advance(320.0)
        for abort in world.open("abort"):
            await world.answer_well(abort)
    found = (await world.content()).status
    assert (found.capture, found.failure.reason) == (Capture.FAILED, "AgentUnresponsive")


async def test_a_worker_that_exits_before_it_is_ready_fails_the_checkpoint_with_its_code(
    world: World,
) -> None:
    await world.apply(checkpoint_document())
    (run,) = world.open("run")
    await world.report(run)
    await world.report(run, "exited", exit_code=3)
    await world.answer_all()
    found = await world.get("DynamoCheckpoint", "llm")
    assert found.status.phase == "Failed"
    assert "exit code 3" in found.status.message


async def test_each_container_keeps_its_own_exit_code_and_one_that_is_not_known_has_none(
    world: World,
) -> None:
    document = checkpoint_document()
    spec = document["spec"]["job"]["podTemplateSpec"]["spec"]
    spec["containers"] += [{"name": name, "command": ["beside"]} for name in ("left", "right")]
    await world.apply(document)
    (run,) = world.open("run")
    await world.report(run)
    await world.report(run, "exited", exit_code=3, exit_codes={"main": 3, "left": 143})
    (pod,) = world.cluster.page("Pod")
    codes = {found.name: found.exit_code for found in pod.status.container_statuses}
    assert codes == {"main": 3, "left": 143, "right": None}


async def test_a_checkpoint_says_what_its_worker_waits_for() -> None:
    world = World()
    await world.apply(checkpoint_document())
    assert (await world.row("DynamoCheckpoint")).reason == "NoSuchNode"
    await world.join(presence("node-1"))
    assert (await world.row("DynamoCheckpoint")).reason == "WorkerStarting"
    await world.silence(100.0)
    assert (await world.row("DynamoCheckpoint")).reason == "NodeSilent"


async def test_a_pod_on_a_silent_or_a_deleted_node_has_no_container_ready(world: World) -> None:
    async def shown() -> tuple[str, list[bool]]:
        [pod] = [found for found in await world.everything() if isinstance(found, Pod)]
        return pod.status.phase, [each.ready for each in pod.status.container_statuses]

    await world.capture()
    assert await shown() == ("Running", [True])
    node = world.present.pop("node-1")
    await world.see(absent_s=100.0)
    assert await shown() == ("Unknown", [False])
    await world.join(node)
    assert await shown() == ("Running", [True])
    world.present.pop("node-1")
    await world.delete("Node", "node-1")
    assert await shown() == ("Failed", [False])


async def test_a_checkpoint_names_the_container_and_the_file_that_it_has_waited_for_long(
    world: World,
) -> None:
    await world.apply(checkpoint_document())
    (run,) = world.open("run")
    await world.report(run)
    await world.advance(SLOW_S - 1.0)
    assert (await world.row("DynamoCheckpoint")).reason == "WorkerStarting"
    await world.advance(1.0)
    late = await world.row("DynamoCheckpoint")
    assert late.reason == "WorkerNotReady"
    for word in ("container main", "$SNAPSHOT_CONTROL_DIR", "ready-for-snapshot", "Next: "):
        assert word in late.message
    await world.answer_well(run)
    await world.answer_all()
    assert (await world.row("DynamoCheckpoint")).reason == "Captured"


async def test_a_worker_that_never_becomes_ready_fails_at_the_deadline_and_is_ended(
    world: World,
) -> None:
    await world.apply(checkpoint_document(activeDeadlineSeconds=100))
    await world.report(world.open("run")[0])
    await world.advance(99.0)
    assert (await world.get("DynamoCheckpoint", "llm")).status.phase == "Creating"
    await world.advance(1.0)
    found = await world.get("DynamoCheckpoint", "llm")
    assert (found.status.phase, found.status.conditions[0].reason) == ("Failed", "DeadlineExceeded")
    assert world.open("stop")
    await world.answer_all()
    assert not world.cluster.page("Pod")


async def test_a_silent_node_fails_no_capture_and_goes_on_with_it_when_it_returns(
    world: World,
) -> None:
    await capturing(world)
    await world.silence(95.0)
    await world.advance(0.0)
    assert (await world.content()).status.capture is Capture.PREPARING
    assert world.cluster.page("Pod")[0].status.phase == "Unknown"
    await world.join(presence("node-1"))
    assert world.cluster.page("Pod")[0].status.phase == "Running"
    await world.answer_all()
    assert (await world.content()).status.capture is Capture.READY


async def test_a_capture_on_a_node_that_is_deleted_ends_and_owes_it_nothing(world: World) -> None:
    await capturing(world)
    await world.silence(95.0)
    await world.delete("Node", "node-1")
    found = (await world.content()).status
    assert (found.capture, found.failure.reason) == (Capture.FAILED, "NodeLost")
    assert found.obligations == []


async def test_deleting_a_checkpoint_removes_its_artifact_its_worker_and_its_children(
    world: World,
) -> None:
    await world.capture()
    await world.delete("DynamoCheckpoint", "llm")
    assert {order.verb for order in world.open()} == {"delete", "stop"}
    await world.answer_all()
    kinds = [type(value).__name__ for value in await world.everything()]
    assert kinds == ["Node"]


async def test_the_sweep_looks_behind_the_subject_of_an_order_that_nobody_has_accepted(
    world: World,
) -> None:
    await capturing(world)
    (prepare,) = world.open("prepare")
    world.orders.stream[prepare.order] = replace(prepare, attempt=0)
    await world.sweep.once()
    assert world.orders.stream[prepare.order].attempt == prepare.attempt


async def test_a_snapshot_deleted_while_it_waits_goes_and_lets_the_next_one_run(
    world: World,
) -> None:
    await capturing(world)
    pod = world.cluster.page("Pod")[0]
    for name in ("second", "third"):
        world.now += 5
        await world.apply(snapshot_document(name, pod.metadata.name))
    await world.remove("Snapshot", "second")
    names = [value.metadata.name for value in world.cluster.page("Snapshot")]
    assert names == ["llm", "third"]
    assert is_true((await world.get("Snapshot", "third")).status.conditions, "Ready")


async def test_a_capture_that_is_deleted_while_it_runs_is_waited_for_until_it_has_ended(
    world: World,
) -> None:
    await capturing(world)
    (first,) = world.open("prepare")
    pod = world.cluster.page("Pod")[0]
    world.now += 5
    await world.apply(snapshot_document("second", pod.metadata.name))
    await world.cluster.delete(await world.get("Snapshot", "llm"))
    await world.advance(1.0)
    await world.advance(1.0)
    assert world.open("abort")
    assert world.open("prepare") == [first]
    await world.answer_all()
    assert is_true((await world.get("Snapshot", "second")).status.conditions, "Ready")


async def test_snapshots_of_one_second_never_run_at_once(world: World) -> None:
    await world.capture()
    pod = world.cluster.page("Pod")[0]
    names = [f"s{index}" for index in range(6)]
    await world.apply(*[snapshot_document(name, pod.metadata.name) for name in names])
    for _ in names:
        (prepare,) = world.open("prepare")
        await world.answer_well(prepare)
        while others := [order for order in world.open() if order.verb != "prepare"]:
            assert not world.open("prepare")
            for order in others:
                await world.answer_well(order)
    contents = world.cluster.page("SnapshotContent")
    assert {content.status.capture for content in contents} == {Capture.READY}


async def test_a_capture_that_has_begun_is_waited_for_by_one_that_comes_before_it_by_name(
    world: World,
) -> None:
    await capturing(world)
    pod = world.cluster.page("Pod")[0]
    uids = (f"00000000-0000-0000-0000-{number:012}" for number in range(99, 0, -1))
    world.store._new_uid = lambda: next(uids)
    await world.answer_all()
    for name in ("second", "third", "fourth"):
        await world.apply(snapshot_document(name, pod.metadata.name))
    assert len(world.open("prepare")) == 1


async def test_what_a_failed_capture_wrote_stays_until_its_worker_was_let_go(world: World) -> None:
    await capturing(world, "prepare", "dump")
    first, second = world.open("save")
    for save in (first, second):
        await world.report(save, "leased")
    await world.fail(world.open("release")[0], "NoSpace")
    await world.advance(30.0)
    (release,) = world.open("release")
    await world.fail(first, "NoSpace")
    for order in [second, *world.open("abort")]:
        await world.answer_well(order)
    assert (await world.content()).status.capture is Capture.FAILED
    assert not world.open("delete")
    await world.answer_well(release)
    assert world.open("delete")


async def deletion_waits(world: World) -> tuple[str, str]:
    """Return reason and message of the condition Deleting while it is False."""
    found = condition((await world.content()).status.conditions, "Deleting")
    return (found.reason, found.message) if found and found.status == "False" else ("", "")


@pytest.mark.parametrize("deleted_at", [None, "1970-01-12T13:46:40Z"])
async def test_a_worker_that_is_held_is_let_go_first_even_if_its_content_is_deleted_by_then(
    world: World, deleted_at: str | None
) -> None:
    await world.capture(sourcePolicy="Terminate")
    found = await world.content()
    kept = [item for item in found.status.orders if item.verb != "release"]
    held = with_meta(with_status(found, orders=kept), deletion_timestamp=deleted_at)
    new = written(reconcile(ContentView(held, None), world.now))
    assert [item.verb for item in new.status.orders[len(kept) :]] == ["release"]


async def test_an_artifact_stays_until_its_worker_was_let_go(world: World) -> None:
    await capturing(world, "prepare", "dump", "save", "seal")
    (release,) = world.open("release")
    await world.delete("DynamoCheckpoint", "llm")
    assert await deletion_waits(world) == ("CleaningOwed", "waits for release on node-1")
    assert not world.open("delete")
    await world.answer_well(release)
    assert world.open("delete")
    await world.answer_all()
    assert not world.cluster.page("SnapshotContent")


async def test_an_artifact_stays_while_no_node_can_remove_it(world: World) -> None:
    await world.capture()
    here = dict(world.present)
    await world.silence(95.0)
    await world.delete("DynamoCheckpoint", "llm")
    message = "no node is ready to remove the artifact"
    assert await deletion_waits(world) == ("NoNode", message)
    await world.join(*here.values())
    await world.answer_all()
    assert not world.cluster.page("SnapshotContent")


async def test_a_content_that_is_deleted_between_two_attempts_is_removed_by_a_node(
    world: World,
) -> None:
    await capturing(world, "prepare")
    content = await world.content()
    assert content.status.generations == [1]
    pending = with_status(content, capture=Capture.PENDING, orders=[])
    deleted = with_meta(pending, deletion_timestamp="2026-01-01T00:00:00Z")
    plan = reconcile(gather(Tracker(world.cluster, is_full=False), deleted), world.now)
    assert [order.verb for order in written(plan).status.orders] == ["delete"]


async def next_look(world: World) -> float | None:
    """Return when the content is decided about again, which changes nothing now."""
    view = gather(Tracker(world.cluster, is_full=False), await world.content())
    plan = reconcile(view, world.now)
    assert not plan.writes
    return plan.wake_at


@pytest.mark.parametrize("is_answered", [True, False])
async def test_a_delete_that_is_due_waits_for_a_node_and_for_no_time(
    world: World, *, is_answered: bool
) -> None:
    await world.capture()
    await world.delete("DynamoCheckpoint", "llm")
    (order,) = world.open("delete")
    if is_answered:
        await world.fail(order, "DeviceBusy")
        assert await deletion_waits(world) == ("DeleteFailed", "DeviceBusy happened")
        assert await next_look(world) == world.now + 30.0
    else:
        assert await next_look(world) == order.deadline.timestamp()
    here = dict(world.present)
    await world.silence(95.0)
    await world.advance(1000.0)
    assert (await deletion_waits(world))[0] == "NoNode"
    assert await next_look(world) is None
    await world.join(*here.values())
    again = world.open("delete")[-1]
    assert (again.attempt, again.tries) == (2, 2)


async def test_a_release_that_failed_is_ordered_again_until_the_worker_goes_on(
    world: World,
) -> None:
    await capturing(world, "prepare", "dump", "save")
    await world.fail(world.open("release")[0], "NoSpace")
    await world.answer("seal")
    assert not world.open("release")
    await world.advance(30.0)
    (again,) = world.open("release")
    assert again.attempt == 2
    await world.answer_well(again)
    assert (await world.content()).status.obligations == []
    await world.advance(600.0)
    assert not world.open()


async def test_the_sweep_withdraws_what_nobody_waits_for_any_more(world: World) -> None:
    await capturing(world)
    (prepare,) = world.open("prepare")
    await world.answer_well(prepare)
    world.orders.stream[prepare.order] = prepare
    await world.sweep.once()
    assert prepare.order not in world.orders.stream


async def snapshot_again(world: World, name: str) -> list[Any]:
    """Capture the first worker once more; give the parents that its saves name."""
    world.now += 5
    await world.apply(snapshot_document(name, world.cluster.page("Pod")[0].metadata.name))
    await world.answer("prepare")
    return [payload(order)["parent"] for order in world.open("save")]


async def test_saves_name_the_last_artifact_of_the_same_worker_as_their_parent(
    world: World,
) -> None:
    await capturing(world, "prepare")
    assert [payload(order)["parent"] for order in world.open("save")] == [None, None]
    await world.answer_all()
    first = await world.content()
    parents = await snapshot_again(world, "second")
    assert [parent["content_uid"] for parent in parents] == [first.metadata.uid] * 2
    assert parents[0]["generation"] == first.status.committed.generation
    assert parents[0]["root_digest"] == first.status.committed.root_digest
    await world.answer_all()
    (second,) = [c for c in world.cluster.page("SnapshotContent") if c != first]
    parents = await snapshot_again(world, "third")
    assert [parent["content_uid"] for parent in parents] == [second.metadata.uid] * 2


async def test_the_artifact_of_the_same_worker_is_a_nearer_parent_than_a_newer_one(
    world: World,
) -> None:
    await world.capture()
    first = await world.content()
    await world.join(presence("node-2"))
    world.now += 5
    await world.capture("other")
    parents = await snapshot_again(world, "second")
    assert [parent["content_uid"] for parent in parents] == [first.metadata.uid] * 2


async def test_a_damaged_artifact_or_one_that_is_going_is_nobodys_parent(world: World) -> None:
    await world.capture()
    content = await world.content()
    rows = [*content.status.conditions, builders.row("Quarantined", "True", "x")]
    await world.cluster.update_status(with_status(content, conditions=rows))
    assert await snapshot_again(world, "second") == [None, None]
