"""What a pod of a cluster that asks for a restore gets, and what is said at it."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from snapshot_api.facts import Container, ContainerStatus, Pod
from snapshot_api.meta import Condition
from snapshot_api.v1alpha1.restore import SnapshotRestore
from snapshot_operator.core import fold, ordering
from snapshot_operator.core import restore as restores
from snapshot_operator.core.plan import NOTHING, Create
from snapshot_operator.core.restore import RESTORED, RestoreView, restore_for
from snapshot_operator.kube.controllers import PodView, reconcile
from snapshot_shared.errors import Failure
from snapshot_shared.orders import ArtifactRef
from snapshot_shared.transitions import Restore
from tests.support import builders
from tests.support.builders import with_meta, with_spec, with_status
from tests.support.operator_world import DIGEST, payload, written
from tests.unit.tables import each

UID = "0f0e0d0c-0000-0000-0000-000000000000"
DAMAGED = Failure(reason="ArtifactCorrupt", message="a chunk differs")
NODES = frozenset({"node-1"})


def pod(*conditions: Condition, phase: str = "Running") -> Pod:
    rows = list(conditions)
    return builders.pod(source="llm", phase=phase, node_name="node-1", conditions=rows)


def restore(state: Restore, failure: Failure | None = None, **status: Any) -> SnapshotRestore:
    made = with_meta(restore_for(pod()), uid=UID)
    return with_status(made, state=state, failure=failure, **status)


def restored(status: Any, reason: str) -> Condition:
    return builders.row(RESTORED, status, reason)


def created(found: Pod) -> Create:
    """Return the write that makes the restore of a pod."""
    (write,) = reconcile(PodView(found), 0.0).writes
    assert isinstance(write, Create)
    return write


QUOTA = Failure(reason="Refused", message="exceeded quota: restores")


def test_a_restore_that_is_not_taken_now_is_said_at_the_pod_and_made_later() -> None:
    waits = created(pod()).waits
    assert waits is not None
    found = written(waits(QUOTA))
    (row,) = found.status.conditions
    assert (row.type, row.status, row.reason) == (RESTORED, "False", "Refused")
    assert row.message == QUOTA.message
    assert created(found)


@each(
    "found",
    [
        with_meta(pod(), annotations={"other": "x"}),
        pod(phase="Succeeded"),
        pod(phase="Failed"),
        pod(restored("True", "RestoreSucceeded")),
        pod(restored("False", "ArtifactCorrupt")),
    ],
)
def test_one_that_asks_for_none_has_ended_or_had_its_restore_gets_none(found: Pod) -> None:
    assert reconcile(PodView(found), 0.0) == NOTHING


@each(
    ("made", "status", "reason"),
    [
        (restore(Restore.RESTORED), "True", "RestoreSucceeded"),
        (restore(Restore.FAILED, DAMAGED), "False", "ArtifactCorrupt"),
    ],
)
def test_the_end_of_a_restore_is_said_at_the_pod_once(
    made: SnapshotRestore, status: str, reason: str
) -> None:
    (row,) = written(reconcile(PodView(pod(), made), 0.0)).status.conditions
    assert (row.type, row.status, row.reason) == (RESTORED, status, reason)
    stored = pod(restored(status, reason))
    assert reconcile(PodView(stored, made), 9.0) == NOTHING


def pending(reason: str) -> SnapshotRestore:
    return restore(Restore.PENDING, conditions=[builders.row("Ready", "False", reason, "it waits")])


def test_a_long_wait_is_said_at_the_pod_and_what_follows_it() -> None:
    for reason in ("WaitingForSnapshot", "NoAgentOnNode"):
        found = written(reconcile(PodView(pod(), pending(reason)), 0.0))
        (row,) = found.status.conditions
        assert (row.type, row.status, row.reason) == (RESTORED, "Unknown", reason)
        assert row.message == "it waits"
        assert reconcile(PodView(found, pending(reason)), 9.0) == NOTHING
        # Nothing has touched its worker, so a restore that was deleted is made again.
        assert created(found)
        (row,) = written(reconcile(PodView(found, pending("Restoring")), 0.0)).status.conditions
        assert (row.status, row.reason) == ("Unknown", "Restoring")
    assert reconcile(PodView(pod(), pending("WaitingForPod")), 0.0) == NOTHING
    named = with_status(pending("WaitingForSnapshot"), content_name="c")
    assert reconcile(PodView(pod(), named), 0.0) == NOTHING
    assert reconcile(PodView(pod(), restore(Restore.PENDING)), 0.0) == NOTHING


def test_a_restore_that_the_api_server_refuses_is_said_at_the_pod_with_its_message() -> None:
    refused = created(pod()).refused
    assert refused is not None
    refusal = Failure(reason="InvalidManifest", message="spec.source: Invalid value")
    (row,) = written(refused(refusal)).status.conditions
    assert (row.status, row.reason, row.message) == ("False", refusal.reason, refusal.message)


def container(name: str, code: int | None = None) -> ContainerStatus:
    """A container that runs, or has ended for good with a code."""
    state: Any = "running" if code is None else "terminated"
    return ContainerStatus(name=name, state=state, exit_code=code)


def waiting(**status: Any) -> Pod:
    """A pod whose worker is up."""
    return with_status(pod(), **{"container_statuses": [container("main")], **status})


def beside(worker: int | None, helper: int | ContainerStatus | None) -> Pod:
    """A pod with a container beside its worker; both run, or have ended with these codes."""
    side = helper if isinstance(helper, ContainerStatus) else container("side", helper)
    found = waiting(container_statuses=[container("main", worker), side])
    return with_spec(found, containers=[Container(name="main"), Container(name="side")])


def committing(state: Restore = Restore.COMMITTING, **status: Any) -> SnapshotRestore:
    """A restore whose devices are loaded, and that waits for its pod alone."""
    artifact = ArtifactRef(namespace="default", content_uid=UID, generation=1, root_digest=DIGEST)
    fields = {"attempt": 1, "node_name": "node-1", "artifact": artifact, **status}
    return restore(state, **fields)


FAILED = restore(Restore.FAILED, DAMAGED)
DELETED = {"deletion_timestamp": "2026-01-01T00:00:00Z"}


@each(
    ("made", "found"),
    [(FAILED, waiting()), (with_meta(FAILED, **DELETED), waiting()), (FAILED, beside(None, 3))],
)
def test_a_worker_that_waits_for_a_restore_that_has_failed_is_given_up_once(
    made: SnapshotRestore, found: Pod
) -> None:
    new = written(restores.reconcile(RestoreView(made, found), 0.0))
    (order,) = new.status.orders
    said = payload(order)
    assert (order.verb, order.node, order.attempt) == ("abort", "node-1", 1)
    assert (said["pod"]["uid"], said["why"]) == (pod().metadata.uid, DAMAGED.message)
    again = replace(made, status=new.status)
    assert restores.reconcile(RestoreView(again, found, known=NODES), 1.0).writes == ()


@each(
    ("why", "made", "found"),
    [
        ("not up yet", FAILED, pod()),
        ("it is deleted", FAILED, with_meta(waiting(), **DELETED)),
        ("it works already", FAILED, waiting(cold_containers=["main"])),
        ("it has ended", FAILED, waiting(phase="Failed")),
        ("it ends by orders", FAILED, waiting(orders=[ordering.stop(waiting(), "", 0.0)])),
        ("there is none", FAILED, None),
        ("its helper is not up yet", committing(), beside(None, ContainerStatus(name="side"))),
    ],
)
def test_one_that_does_not_wait_or_is_ended_otherwise_is_left_alone(
    why: str, made: SnapshotRestore, found: Pod | None
) -> None:
    plan = restores.reconcile(RestoreView(made, found), 0.0)
    assert all(not write.new.status.orders for write in plan.writes), why  # type: ignore[union-attr]


def restoring(*, is_back: bool) -> SnapshotRestore:
    """A restore whose pod was told to bring its worker back, and whether it has."""
    new = written(restores.reconcile(RestoreView(committing(), beside(None, None)), 0.0))
    (order,) = new.status.orders
    report = builders.report(order, "restored")
    orders = fold.fold_all([order], [report], 1.0) if is_back else [order]
    return with_status(new, orders=orders)


@each(
    ("made", "worker", "helper", "state", "reason"),
    [
        # A helper that has done its work does not hold a restore up.
        (committing(), None, 0, Restore.RESTORING, None),
        (committing(), None, 3, Restore.DROPPING, "CheckpointContainerFailed"),
        (committing(), 0, None, Restore.DROPPING, "SourceExited"),
        (committing(), 3, None, Restore.DROPPING, "SourceExited"),
        # Once its worker is being restored, a helper that fails ends nothing.
        (restoring(is_back=False), 3, None, Restore.DROPPING, "SourceExited"),
        (restoring(is_back=True), None, None, Restore.RESTORED, None),
        (restoring(is_back=True), None, 3, Restore.RESTORED, None),
    ],
)
def test_a_restore_ends_with_a_container_of_its_pod_that_is_not_started_again(
    made: SnapshotRestore, worker: int | None, helper: int | None, state: Restore, reason: str
) -> None:
    view = RestoreView(made, beside(worker, helper), known=NODES)
    found = written(restores.reconcile(view, 1.0)).status
    assert (found.state, found.failure and found.failure.reason) == (state, reason)
    if state is Restore.RESTORING:
        assert [order.verb for order in found.orders] == ["restore"]


def test_a_helper_that_fails_beside_a_worker_that_is_being_restored_ends_nothing() -> None:
    view = RestoreView(restoring(is_back=False), beside(None, 3), known=NODES)
    assert restores.reconcile(view, 1.0).writes == ()


@each(("worker", "state"), [(None, Restore.PENDING), (0, Restore.FAILED)])
def test_a_restore_is_tried_again_only_while_its_worker_is_up(
    worker: int | None, state: Restore
) -> None:
    retryable = Failure(reason="Unavailable", message="the memory server went", retryable=True)
    view = RestoreView(committing(Restore.DROPPING, failure=retryable), beside(worker, None))
    assert written(restores.reconcile(view, 0.0)).status.state is state
