"""Why a capture or a restore ends before it is done: its pod has ended, or its time is over."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from msgspec.structs import replace

from snapshot_api.facts import ContainerStatus, Job, JobSpec, Node, NodeSpec, Pod
from snapshot_api.meta import ObjectMeta, OrderStatus, is_true
from snapshot_api.v1alpha1.content import ContentSource, SnapshotContent
from snapshot_api.v1alpha1.snapshot import ArtifactSource, SnapshotSource
from snapshot_api.well_known import CHECKPOINT_ID
from snapshot_operator.core import capture, checkpoint, content, ordering, restore, snapshot
from snapshot_operator.core.capture import ContentView
from snapshot_operator.core.checkpoint import CheckpointView
from snapshot_operator.core.owning import child_meta
from snapshot_operator.core.plan import FINALIZER, Plan, SetStatus
from snapshot_operator.core.restore import RestoreView, restore_for
from snapshot_operator.core.snapshot import SnapshotView
from snapshot_shared.orders import SCHEMA_VERSION, AbortOrder, PartResult, order_in
from snapshot_shared.transitions import Capture, Restore
from tests.support import builders, objects
from tests.support.builders import NOW, STAMP, UID, Object, with_meta, with_spec, with_status
from tests.support.operator_world import DIGEST, row_of, written
from tests.unit.tables import each

PART = PartResult(part="process", bytes=1, digest=DIGEST)


def content_in(state: Capture, *orders: OrderStatus, **spec: Any) -> SnapshotContent:
    """A content in its first attempt, created ten seconds ago."""
    return with_spec(builders.content(capture=state, attempt=1, orders=list(orders)), **spec)


def dump(kind: str, **fields: Any) -> OrderStatus:
    (order,) = ordering.stage(content_in(Capture.STAGING), [], {}, "", NOW)
    return builders.ended(order, kind, **fields)


def pod(phase: str, **status: Any) -> Pod:
    return builders.pod(source="llm", phase=phase, **status)


def reason(state: Capture, source: Pod | None, *orders: OrderStatus) -> str:
    found = capture.end_of(ContentView(content_in(state, *orders), None, source=source), NOW)
    return found.reason if found is not None else ""


def abort_of(value: SnapshotContent, source: Pod) -> AbortOrder:
    """Return the order that ends a capture."""
    (abort,) = written(capture.step(ContentView(value, None, source=source), NOW)).status.orders
    order = order_in(abort.payload)
    assert isinstance(order, AbortOrder)
    return order


def beside(code: int | None, phase: str = "Running", **labels: str) -> Pod:
    """A pod whose worker runs, beside a container that has ended with a code, if it has."""
    state: Any = "running" if code is None else "terminated"
    rows = [
        ContainerStatus(name="main", state="running"),
        ContainerStatus(name="side", state=state, exit_code=code),
    ]
    return with_meta(pod(phase, container_statuses=rows), labels=labels)


@each("state", [Capture.PENDING, Capture.PREPARING, Capture.STAGING])
@each(
    ("source", "expected"),
    [
        (None, "SourcePodGone"),
        (pod("Running"), ""),
        (pod("Unknown"), ""),
        (pod("Succeeded"), "SourceExited"),
        (pod("Failed"), "SourceExited"),
        (pod("Failed", reason="NodeLost"), "NodeLost"),
        (beside(None), ""),
        (beside(0), ""),
        (beside(3), "CheckpointContainerFailed"),
        (beside(3, "Failed"), "SourceExited"),
        (beside(3, "Unknown"), ""),
    ],
)
def test_a_capture_ends_with_its_worker_or_a_container_beside_while_the_process_is_needed(
    state: Capture, source: Pod | None, expected: str
) -> None:
    assert reason(state, source) == expected


@each(
    ("source_policy", "labels", "expected"),
    [
        ("Terminate", {CHECKPOINT_ID: "abc"}, "Kill"),
        ("Resume", {CHECKPOINT_ID: "abc"}, "Resume"),
        ("Terminate", {}, "Resume"),
    ],
)
def test_the_neighbours_of_a_failed_container_are_ended_where_they_are_there_to_be_captured_alone(
    source_policy: Any, labels: dict[str, str], expected: str
) -> None:
    order = abort_of(content_in(Capture.STAGING, source_policy=source_policy), beside(3, **labels))
    assert order.on_failure == expected
    assert "container side of pod" in order.why


def test_a_worker_that_was_started_to_be_captured_goes_on_after_any_other_end() -> None:
    late = content_in(Capture.STAGING, source_policy="Terminate", deadline_seconds=1)
    assert abort_of(late, beside(None, **{CHECKPOINT_ID: "abc"})).on_failure == "Resume"


READY = with_status(
    Node(metadata=ObjectMeta(name="node-1")),
    conditions=[builders.row("Ready", "True", "AgentPresent")],
    schemas=[SCHEMA_VERSION],
)


def deleted(view: ContentView) -> list[str]:
    """The verbs that the deletion of a content orders."""
    going = with_meta(view.content, deletion_timestamp=STAMP, finalizers=[FINALIZER])
    here = view._replace(content=going, nodes=[READY], known=frozenset({"node-1"}))
    new = written(content.reconcile(here, NOW))
    known = {item.order for item in view.content.status.orders}
    return [item.verb for item in new.status.orders if item.order not in known]


def test_nothing_is_removed_while_an_order_may_still_write() -> None:
    (order,) = ordering.stage(content_in(Capture.STAGING), [], {}, "", NOW)
    failed = with_status(content_in(Capture.FAILED, order), generations=[1])
    assert deleted(ContentView(failed, None)) == []
    answered = with_status(failed, orders=[builders.ended(order, "failed")])
    assert deleted(ContentView(answered, None)) == ["delete"]


def test_a_content_that_is_retained_goes_without_what_failed_attempts_have_left() -> None:
    release = builders.ended(ordering.release(content_in(Capture.READY), "", NOW), "released")
    kept = with_status(
        content_in(Capture.READY, release, deletion_policy="Retain"),
        generations=[1, 2],
        committed=builders.committed(generation=2),
    )
    assert deleted(ContentView(kept, None)) == ["delete"]


def test_a_worker_may_end_once_its_process_is_staged() -> None:
    assert reason(Capture.SEALING, None) == ""
    assert reason(Capture.STAGING, None, dump("staged", part=PART)) == ""
    assert reason(Capture.STAGING, None, dump("failed")) == "SourcePodGone"


@each("state", [Restore.PENDING, Restore.LOADING, Restore.RESTORING])
@each(
    ("reason", "expected", "message"),
    [
        ("", "SourceExited", "the waiting worker ended during the restore: m"),
        ("Completed", "SourceExited", "the waiting worker ended during the restore: m"),
        ("ContainerExited", "SourceExited", "the waiting worker ended during the restore: m"),
        ("DeviceTooSmall", "DeviceTooSmall", "m"),
    ],
)
def test_a_restore_ends_with_its_pod_and_with_the_reason_of_it_where_that_says_one(
    state: Restore, reason: str, expected: str, message: str
) -> None:
    worker = pod("Failed", reason=reason, message="m")
    value = with_status(restore_for(worker), state=state)
    failure = written(restore.reconcile(RestoreView(value, worker), NOW)).status.failure
    assert (failure.reason, failure.message) == (expected, message)


LIMIT_S = 100
CREATED = NOW - 10.0
END = CREATED + LIMIT_S
ARTIFACT = ArtifactSource(content_uid=UID, generation=1, root_digest=DIGEST)


def made(value: Object, **spec: Any) -> Object:
    """Return an object as it is from when it was adopted on."""
    return with_spec(with_meta(value, finalizers=[FINALIZER]), deadline_seconds=LIMIT_S, **spec)


POD = builders.pod()
CHECKPOINT = with_meta(
    objects.checkpoint(activeDeadlineSeconds=LIMIT_S),
    uid=UID,
    creation_timestamp=STAMP,
    finalizers=[FINALIZER],
)
JOB = Job(
    metadata=replace(child_meta(CHECKPOINT, "llm"), creation_timestamp=STAMP),
    spec=JobSpec(template=CHECKPOINT.spec.job.pod_template_spec),
)
CORDONED = Node(metadata=ObjectMeta(name="node-1"), spec=NodeSpec(unschedulable=True))
NAMED = made(builders.snapshot())
IMPORT = made(builders.snapshot(), source=SnapshotSource(artifact=ARTIFACT))
CAPTURE = made(builders.content())
READING = made(builders.content(), source=ContentSource(namespace="default", artifact=ARTIFACT))


@each(
    "decide",
    [
        lambda now: snapshot.reconcile(SnapshotView(NAMED, None, None), now),
        lambda now: snapshot.reconcile(SnapshotView(NAMED, POD, None), now),
        lambda now: snapshot.reconcile(SnapshotView(IMPORT, None, None), now),
        lambda now: snapshot.reconcile(SnapshotView(IMPORT, None, None, CAPTURE), now),
        lambda now: content.reconcile(ContentView(CAPTURE, CORDONED, source=POD), now),
        lambda now: content.reconcile(ContentView(READING, None), now),
        lambda now: checkpoint.reconcile(CheckpointView(CHECKPOINT, JOB), now),
    ],
)
def test_what_waits_fails_at_the_instant_of_its_deadline_and_no_sooner(
    decide: Callable[[float], Plan],
) -> None:
    assert [has_failed(decide(at)) for at in (END - 0.001, END, END + 1.0)] == [False, True, True]


def test_a_worker_whose_containers_cannot_start_says_why_and_waits() -> None:
    pod = builders.pod(reason="PodTemplateInvalid", message="container main: no secret")
    plan = checkpoint.reconcile(CheckpointView(CHECKPOINT, JOB, pod), CREATED + 1.0)
    assert not has_failed(plan)
    (new,) = statuses(plan)
    row = row_of(new)
    assert row.reason == "PodTemplateInvalid"
    assert row.message.startswith("container main: no secret. Next: ")
    assert plan.wake_at == END


def statuses(plan: Plan) -> list[Any]:
    """Return the objects whose status a plan writes."""
    return [write.new for write in plan.writes if isinstance(write, SetStatus)]


def has_failed(plan: Plan) -> bool:
    return any(is_true(value.status.conditions, "Failed") for value in statuses(plan))
