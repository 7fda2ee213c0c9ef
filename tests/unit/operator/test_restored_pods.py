"""What a pod of a cluster that asks for a restore gets, and what is said at it."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from snapshot_operator.core import fold, ordering
from snapshot_operator.core import restore as restores
from snapshot_operator.core.plan import NOTHING, Create, SetStatus
from snapshot_operator.core.restore import RESTORED, RestoreView, restore_for
from snapshot_operator.kube.controllers import PodView, reconcile
from snapshot_shared.errors import Failure
from snapshot_shared.objects.kubernetes import (
    Container,
    ContainerStatus,
    Pod,
    PodSpec,
    PodStatus,
)
from snapshot_shared.objects.meta import Condition, ObjectMeta
from snapshot_shared.objects.snapback import SnapshotRestore
from snapshot_shared.orders import ArtifactRef
from snapshot_shared.transitions import Restore
from tests.support import builders
from tests.support.operator_world import DIGEST, payload

POD_UID = "00000000-0000-0000-0000-00000000000a"
DAMAGED = Failure(reason="ArtifactCorrupt", message="a chunk differs")


def pod(*conditions: Condition, phase: Any = "Running", **annotations: str) -> Pod:
    wanted = annotations or {"nvidia.com/restore-from": "llm"}
    return Pod(
        metadata=ObjectMeta(
            name="p", namespace="team", uid=POD_UID, annotations=wanted, generation=3
        ),
        spec=PodSpec(containers=[Container(name="main")]),
        status=PodStatus(phase=phase, node_name="node-1", conditions=list(conditions)),
    )


def restore(state: Restore, failure: Failure | None = None) -> SnapshotRestore:
    made = restore_for(pod())
    return replace(made, status=replace(made.status, state=state, failure=failure))


def restored(status: Any, reason: str) -> Condition:
    return Condition(type=RESTORED, status=status, reason=reason)


def test_a_pod_that_asks_for_a_restore_gets_one() -> None:
    (write,) = reconcile(PodView(pod()), 0.0).writes
    assert isinstance(write, Create)


@pytest.mark.parametrize(
    "found",
    [
        pod(other="x"),
        pod(phase="Succeeded"),
        pod(phase="Failed"),
        pod(restored("True", "RestoreSucceeded")),
        pod(restored("False", "ArtifactCorrupt")),
    ],
)
def test_one_that_asks_for_none_has_ended_or_had_its_restore_gets_none(found: Pod) -> None:
    assert reconcile(PodView(found), 0.0) == NOTHING


@pytest.mark.parametrize(
    ("made", "status", "reason"),
    [
        (restore(Restore.RESTORED), "True", "RestoreSucceeded"),
        (restore(Restore.FAILED, DAMAGED), "False", "ArtifactCorrupt"),
    ],
)
def test_the_end_of_a_restore_is_said_at_the_pod_once(
    made: SnapshotRestore, status: str, reason: str
) -> None:
    (write,) = reconcile(PodView(pod(), made), 0.0).writes
    assert isinstance(write, SetStatus)
    (row,) = write.new.status.conditions  # type: ignore[union-attr]
    assert (row.type, row.status, row.reason) == (RESTORED, status, reason)
    stored = pod(restored(status, reason))
    assert reconcile(PodView(stored, made), 9.0) == NOTHING


def test_a_restore_that_the_api_server_refuses_is_said_at_the_pod_with_its_message() -> None:
    (made,) = reconcile(PodView(pod()), 0.0).writes
    assert isinstance(made, Create)
    assert made.refused is not None
    message = "spec.source: Invalid value"
    (write,) = made.refused(Failure(reason="InvalidManifest", message=message)).writes
    assert isinstance(write, SetStatus)
    (row,) = write.new.status.conditions  # type: ignore[union-attr]
    assert (row.status, row.reason, row.message) == ("False", "InvalidManifest", message)


UP = [ContainerStatus(name="main", state="running")]
UID = "0f0e0d0c-0000-0000-0000-000000000000"


def failed() -> SnapshotRestore:
    found = restore(Restore.FAILED, DAMAGED)
    return replace(found, metadata=replace(found.metadata, uid=UID))


def waiting(**status: Any) -> Pod:
    found = pod()
    return replace(found, status=replace(found.status, container_statuses=UP, **status))


def test_a_worker_that_waits_for_a_restore_that_has_failed_is_given_up_once() -> None:
    (write,) = restores.reconcile(RestoreView(failed(), waiting()), 0.0).writes
    assert isinstance(write, SetStatus)
    (order,) = write.new.status.orders  # type: ignore[union-attr]
    said = payload(order)
    assert (order.verb, order.node, order.attempt) == ("abort", "node-1", 1)
    assert (said["pod"]["uid"], said["why"]) == (POD_UID, DAMAGED.message)
    again = replace(failed(), status=write.new.status)  # type: ignore[arg-type]
    later = restores.reconcile(RestoreView(again, waiting(), known=frozenset({"node-1"})), 1.0)
    assert later.writes == ()


def test_a_worker_whose_failed_restore_is_deleted_is_given_up_before_that_goes() -> None:
    found = failed()
    gone = replace(
        found, metadata=replace(found.metadata, deletion_timestamp="2026-01-01T00:00:00Z")
    )
    (write,) = restores.reconcile(RestoreView(gone, waiting()), 0.0).writes
    assert isinstance(write, SetStatus)
    (order,) = write.new.status.orders  # type: ignore[union-attr]
    assert order.verb == "abort"


def deleted(found: Pod) -> Pod:
    metadata = replace(found.metadata, deletion_timestamp="2026-01-01T00:00:00Z")
    return replace(found, metadata=metadata)


@pytest.mark.parametrize(
    "found",
    [
        pytest.param(pod(), id="not up yet"),
        pytest.param(deleted(waiting()), id="it is deleted"),
        pytest.param(waiting(cold_containers=["main"]), id="it works already"),
        pytest.param(waiting(phase="Failed"), id="it has ended"),
        pytest.param(
            waiting(orders=[ordering.stop(waiting(), "", 0.0)]), id="it runs by orders, and ends"
        ),
        None,
    ],
)
def test_one_that_does_not_wait_or_is_ended_otherwise_is_left_alone(found: Pod | None) -> None:
    plan = restores.reconcile(RestoreView(failed(), found), 0.0)
    assert all(not write.new.status.orders for write in plan.writes)  # type: ignore[union-attr]


def beside(worker: ContainerStatus, helper: ContainerStatus) -> Pod:
    """A pod that runs, with a container beside its worker."""
    found = pod()
    found = replace(
        found, spec=PodSpec(containers=[Container(name="main"), Container(name="side")])
    )
    return replace(found, status=replace(found.status, container_statuses=[worker, helper]))


def row(name: str, code: int | None = None) -> ContainerStatus:
    """A container that runs, or has ended for good with a code."""
    if code is None:
        return ContainerStatus(name=name, state="running")
    return ContainerStatus(name=name, state="terminated", exit_code=code)


def committing() -> SnapshotRestore:
    """A restore whose devices are loaded, and that waits for its pod alone."""
    found = restore(Restore.COMMITTING)
    artifact = ArtifactRef(namespace="team", content_uid=UID, generation=1, root_digest=DIGEST)
    status = replace(found.status, attempt=1, node_name="node-1", artifact=artifact)
    return replace(found, metadata=replace(found.metadata, uid=UID), status=status)


def test_a_helper_that_has_done_its_work_does_not_hold_a_restore_up() -> None:
    view = RestoreView(committing(), beside(row("main"), row("side", 0)))
    (write,) = restores.reconcile(view, 0.0).writes
    assert isinstance(write, SetStatus)
    status: Any = write.new.status
    assert (status.state, [order.verb for order in status.orders]) == (
        Restore.RESTORING,
        ["restore"],
    )


def test_a_restore_waits_for_a_helper_that_is_not_up_yet() -> None:
    view = RestoreView(committing(), beside(row("main"), ContainerStatus(name="side")))
    assert all(not write.new.status.orders for write in restores.reconcile(view, 0.0).writes)  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("worker", "helper", "reason"),
    [
        pytest.param(None, 3, "CheckpointContainerFailed", id="the helper failed"),
        pytest.param(0, None, "SourceExited", id="the worker ended"),
        pytest.param(3, None, "SourceExited", id="the worker failed"),
    ],
)
def test_a_restore_ends_with_a_container_of_its_pod_that_is_not_started_again(
    worker: int | None, helper: int | None, reason: str
) -> None:
    found = beside(row("main", worker), row("side", helper))
    (write,) = restores.reconcile(RestoreView(committing(), found), 0.0).writes
    assert isinstance(write, SetStatus)
    status: Any = write.new.status
    assert (status.state, status.failure.reason) == (Restore.DROPPING, reason)


def restoring() -> SnapshotRestore:
    """A restore whose pod was told to bring its worker back."""
    found = committing()
    view = RestoreView(found, beside(row("main"), row("side")))
    (write,) = restores.reconcile(view, 0.0).writes
    return replace(found, status=write.new.status)  # type: ignore[union-attr, arg-type]


def succeeded(found: SnapshotRestore) -> SnapshotRestore:
    """The same restore once its worker has come back."""
    (order,) = found.status.orders
    report = builders.told(
        order=order.order,
        attempt=order.attempt,
        kind="restored",
        node=order.node,
        service=order.service,
        at=1.0,
    )
    orders = fold.fold_all(found.status.orders, [report], 1.0)
    return replace(found, status=replace(found.status, orders=orders))


def test_a_helper_that_fails_beside_a_worker_that_is_being_restored_ends_nothing() -> None:
    found = beside(row("main"), row("side", 3))
    view = RestoreView(restoring(), found, known=frozenset({"node-1"}))
    assert restores.reconcile(view, 1.0).writes == ()


@pytest.mark.parametrize("helper", [None, 3], ids=["up", "failed"])
def test_a_restore_whose_worker_is_back_is_done_whatever_its_helper_does(
    helper: int | None,
) -> None:
    view = RestoreView(succeeded(restoring()), beside(row("main"), row("side", helper)))
    (write,) = restores.reconcile(view, 1.0).writes
    assert isinstance(write, SetStatus)
    assert write.new.status.state is Restore.RESTORED  # type: ignore[union-attr]


def test_a_restore_ends_with_its_worker_while_that_is_being_restored() -> None:
    found = beside(row("main", 3), row("side"))
    view = RestoreView(restoring(), found, known=frozenset({"node-1"}))
    (write,) = restores.reconcile(view, 1.0).writes
    assert isinstance(write, SetStatus)
    status: Any = write.new.status
    assert (status.state, status.failure.reason) == (Restore.DROPPING, "SourceExited")


@pytest.mark.parametrize(
    ("worker", "state"), [(None, Restore.PENDING), (0, Restore.FAILED)], ids=["up", "ended"]
)
def test_a_restore_is_tried_again_only_while_its_worker_is_up(
    worker: int | None, state: Restore
) -> None:
    retryable = Failure(reason="Unavailable", message="the memory server went", retryable=True)
    dropped = committing()
    status = replace(dropped.status, state=Restore.DROPPING, failure=retryable)
    view = RestoreView(replace(dropped, status=status), beside(row("main", worker), row("side")))
    (write,) = restores.reconcile(view, 0.0).writes
    assert isinstance(write, SetStatus)
    assert write.new.status.state is state  # type: ignore[union-attr]


def test_a_worker_whose_restore_failed_is_given_up_beside_a_helper_that_has_failed() -> None:
    view = RestoreView(failed(), beside(row("main"), row("side", 3)))
    (write,) = restores.reconcile(view, 0.0).writes
    assert isinstance(write, SetStatus)
    (order,) = write.new.status.orders  # type: ignore[union-attr]
    assert order.verb == "abort"
