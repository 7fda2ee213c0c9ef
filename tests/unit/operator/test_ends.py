"""Why a capture or a restore ends before it is done: its pod has ended or is gone."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from snapshot_operator.core import capture, ordering, restore
from snapshot_operator.core.capture import ContentView
from snapshot_operator.core.conditions import timestamp
from snapshot_operator.core.plan import SetStatus
from snapshot_operator.core.restore import RestoreView, restore_for
from snapshot_shared.manifests import parse
from snapshot_shared.objects.kubernetes import ContainerStatus, Pod
from snapshot_shared.objects.meta import ObjectMeta, OrderStatus
from snapshot_shared.objects.snapback import (
    CHECKPOINT_ID,
    ContentSource,
    PodSource,
    SnapshotContent,
    SnapshotContentSpec,
    SnapshotContentStatus,
    SnapshotRef,
    SnapshotRestore,
)
from snapshot_shared.orders import AbortOrder, PartResult, Report, order_in
from snapshot_shared.transitions import Capture, Restore
from tests.support.objects import restore_document
from tests.support.operator_world import DIGEST
from tests.unit.tables import each

UID = "00000000-0000-4000-8000-000000000001"
NOW = 1000.0
PART = PartResult(part="process", bytes=1, digest=DIGEST)


def content(state: Capture, *orders: OrderStatus) -> SnapshotContent:
    """A content in its first attempt, created just now."""
    pod = PodSource(name="worker", uid=UID)
    return SnapshotContent(
        metadata=ObjectMeta(name="c", uid=UID, creation_timestamp=timestamp(NOW)),
        spec=SnapshotContentSpec(
            snapshot_ref=SnapshotRef(namespace="default", name="s", uid=UID),
            source=ContentSource(namespace="default", pod_ref=pod, node_name="node-1"),
        ),
        status=SnapshotContentStatus(capture=state, attempt=1, orders=list(orders)),
    )


def dump(kind: str, **fields: Any) -> OrderStatus:
    (order,) = ordering.stage(content(Capture.STAGING), [], {}, "", NOW)
    report = Report(
        order=order.order,
        attempt=1,
        n=1,
        kind=kind,
        node="node-1",
        service="agent",
        at=NOW,
        **fields,  # type: ignore[arg-type]
    )
    return msgspec.structs.replace(order, state=kind, final=report)


def pod(phase: str, **status: Any) -> Pod:
    found = parse(restore_document())
    assert isinstance(found, Pod)
    return msgspec.structs.replace(
        found, status=msgspec.structs.replace(found.status, phase=phase, **status)
    )


def reason(state: Capture, source: Pod | None, *orders: OrderStatus) -> str:
    found = capture.end_of(ContentView(content(state, *orders), None, source=source), NOW)
    return found.reason if found is not None else ""


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
    ],
)
def test_a_capture_ends_with_its_worker_while_the_process_is_needed(
    state: Capture, source: Pod | None, expected: str
) -> None:
    assert reason(state, source) == expected


def beside(code: int | None, phase: str = "Running", **labels: str) -> Pod:
    """A pod whose worker runs, beside a container that has ended with a code, if it has."""
    state: Any = "running" if code is None else "terminated"
    rows = [
        ContainerStatus(name="main", state="running"),
        ContainerStatus(name="side", state=state, exit_code=code),
    ]
    found = pod(phase, container_statuses=rows)
    return msgspec.structs.replace(
        found, metadata=msgspec.structs.replace(found.metadata, labels=labels)
    )


@each("state", [Capture.PENDING, Capture.PREPARING, Capture.STAGING])
@each(
    ("source", "expected"),
    [
        (beside(None), ""),
        (beside(0), ""),
        (beside(3), "CheckpointContainerFailed"),
        (beside(3, "Failed"), "SourceExited"),
        (beside(3, "Unknown"), ""),
    ],
)
def test_a_capture_ends_when_a_container_beside_the_worker_fails(
    state: Capture, source: Pod, expected: str
) -> None:
    assert reason(state, source) == expected


@pytest.mark.parametrize(
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
    value = content(Capture.STAGING)
    value = msgspec.structs.replace(
        value, spec=msgspec.structs.replace(value.spec, source_policy=source_policy)
    )
    view = ContentView(value, None, source=beside(3, **labels))
    (write,) = capture.step(view, NOW).writes
    assert isinstance(write, SetStatus)
    assert isinstance(write.new, SnapshotContent)
    (abort,) = write.new.status.orders
    order = order_in(abort.payload)
    assert isinstance(order, AbortOrder)
    assert order.on_failure == expected
    assert "container side of pod" in order.why


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
    value = restore_for(worker)
    value = msgspec.structs.replace(
        value, status=msgspec.structs.replace(value.status, state=state)
    )
    (write,) = restore.reconcile(RestoreView(value, worker), NOW).writes
    assert isinstance(write, SetStatus)
    assert isinstance(write.new, SnapshotRestore)
    failure = write.new.status.failure
    assert failure is not None
    assert (failure.reason, failure.message) == (expected, message)
