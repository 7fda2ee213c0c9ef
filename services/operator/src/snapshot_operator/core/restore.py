"""Decides for one SnapshotRestore: from the annotation of a pod to a worker that serves again.

The states are `transitions.RESTORE`. The pod is observed, whatever runs it: it is started in
standby, waits while its devices are loaded, and goes on when its process part is in place. No
attempt begins before the content has registered this restore as a reader.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

from msgspec.structs import replace

from snapshot_api import revisions
from snapshot_api.facts import FINISHED, Pod
from snapshot_api.kinds import KINDS, AnyObject
from snapshot_api.meta import (
    TRACEPARENT,
    Condition,
    ObjectMeta,
    OrderStatus,
    OwnerReference,
    condition,
    time_of,
)
from snapshot_api.v1alpha1.checkpoint import DynamoCheckpoint
from snapshot_api.v1alpha1.content import Committed, SnapshotContent
from snapshot_api.v1alpha1.restore import (
    RestoreTarget,
    SnapshotRestore,
    SnapshotRestoreSpec,
    SnapshotRestoreStatus,
    restore_name,
)
from snapshot_api.v1alpha1.snapshot import Snapshot
from snapshot_api.views import is_answered
from snapshot_api.well_known import RESTORE_DRIVER, STANDBY_VARIABLES
from snapshot_operator.core import backpressure, conditions, fold, ordering, quarantine
from snapshot_operator.core.capture import capture_span, container_failure
from snapshot_operator.core.content import content_behind
from snapshot_operator.core.nodes import known, node, without_agent
from snapshot_operator.core.owning import serves
from snapshot_operator.core.plan import (
    FINALIZER,
    NOTHING,
    Adopt,
    Finalize,
    Plan,
    Reader,
    is_adopted,
    owing_plan,
)
from snapshot_operator.core.restore_request import mismatch, request_in
from snapshot_shared.errors import Failure
from snapshot_shared.orders import PLACEHOLDER_DRIVERS, DeviceRef
from snapshot_shared.spans import derived_context, derived_trace, parse_traceparent
from snapshot_shared.transitions import RESTORE, Capture, Restore, RestoreEvent

MAX_RETRIES = 2
LONGEST_S = sum(fold.RESTS_S[:MAX_RETRIES]) + (1 + MAX_RETRIES) * sum(
    ordering.BUDGET_S[verb] + fold.ANSWER_GRACE_S for verb in ("load", "commit", "restore", "drop")
)
"""How long a restore may take that waits for nothing, with all its attempts, in seconds."""
ABSENT_S = 3600.0
"""How long a pod that has a place waits for a source that does not exist, in seconds."""
RESTORED = "nvidia.com/Restored"
"""The condition of a pod that says how its restore ended."""


class RestoreView(NamedTuple):
    """What a decision about a restore reads.

    `pod` is the incarnation that is restored into. `content` is what this restore has named, or
    what its source leads to; `missing` says why there is none yet, and `refusal` why there never
    will be. With `is_absent` nothing has the name of the source. `known` are the nodes with
    unanswered orders that have a Node object. `no_agent` says why no agent can restore the pod
    where it is or will be, if none can; `can_place`, whether that of its node carries out `place`.
    """

    restore: SnapshotRestore
    pod: Pod | None
    content: SnapshotContent | None = None
    missing: str = ""
    refusal: Failure | None = None
    is_absent: bool = False
    known: frozenset[str] = frozenset()
    is_full: bool = False
    no_agent: str = ""
    can_place: bool = False


def source_of(pod: Pod) -> str:
    """Return what the pod's annotation names to be restored from, or nothing."""
    return request_in(pod.metadata.annotations).source


def restore_for(pod: Pod) -> SnapshotRestore:
    """Return the restore that a pod asks for by its annotation."""
    kind = KINDS["Pod"]
    request = request_in(pod.metadata.annotations)
    trace = pod.metadata.annotations.get(TRACEPARENT)
    owner = OwnerReference(
        api_version=kind.api_version, kind="Pod", name=pod.metadata.name, uid=pod.metadata.uid
    )
    return SnapshotRestore(
        metadata=ObjectMeta(
            name=restore_name(pod.metadata.uid),
            namespace=pod.metadata.namespace,
            finalizers=[FINALIZER],
            owner_references=[owner],
            annotations={TRACEPARENT: trace} if trace else {},
        ),
        spec=SnapshotRestoreSpec(
            pod_ref=RestoreTarget(
                name=pod.metadata.name,
                uid=pod.metadata.uid,
                container=request.container or pod.spec.containers[0].name,
            ),
            source=request.source,
        ),
    )


def revisions_key(namespace: str | None, name: str) -> str:
    """Return the value of the index "revisions" under which those of a name are."""
    return f"{namespace}/{name}"


def gather(reader: Reader, restore: SnapshotRestore) -> RestoreView:
    """Read what a decision about a restore depends on."""
    status, target = restore.status, restore.spec.pod_ref
    unanswered = [item.node for item in status.orders if not is_answered(item)]
    nodes = known(reader, unanswered)
    is_over = status.state is Restore.RESTORED or fold.find(status.orders, "abort")
    if is_over and not restore.metadata.deletion_timestamp:
        return RestoreView(restore, None, known=nodes)
    found = reader.get("Pod", restore.metadata.namespace, target.name, target.uid)
    pod = found if isinstance(found, Pod) else None
    if status.state is Restore.FAILED and not restore.metadata.deletion_timestamp:
        return RestoreView(restore, pod, known=nodes)
    if status.content_name:
        named = reader.get("SnapshotContent", None, status.content_name)
        view = RestoreView(restore, pod, named if serves(named, restore) else None)
    else:
        view = _resolved(reader, restore, pod)
    if status.state is Restore.PENDING:
        view = view._replace(is_full=reader.is_full, no_agent=without_agent(reader, pod))
    if status.state is Restore.LOADING:
        home = node(reader, status.node_name)
        view = view._replace(can_place=home is not None and "place" in home.status.verbs)
    return view._replace(known=nodes)


def _resolved(reader: Reader, restore: SnapshotRestore, pod: Pod | None) -> RestoreView:
    """Find what the source of a restore leads to: a content, a reason to wait, or a refusal."""
    name, space = restore.spec.source, restore.metadata.namespace
    snapshot = reader.get("Snapshot", space, name)
    checkpoint = reader.get("DynamoCheckpoint", space, name)
    if snapshot is None and checkpoint is None:
        found = reader.by_index("revisions", revisions_key(space, name))
        snapshot = revisions.newest(found, name)
        name = snapshot.metadata.name if snapshot is not None else name
    source = snapshot or checkpoint
    content = content_behind(reader.get, source) if source is not None else None
    view = RestoreView(restore, pod, content)
    if wrong := _wrong(pod, (snapshot, checkpoint), content):
        return view._replace(refusal=wrong)
    failure = _failure_of(snapshot) or _failure_of(checkpoint)
    if content is not None and content.status.failure is not None:
        failure = failure or content.status.failure.message
    if failure and (content is None or content.status.capture is Capture.FAILED):
        return view._replace(
            refusal=Failure(
                reason="SnapshotFailed",
                message=f"{name} failed: {failure}",
                next_step="take a new snapshot or start the worker cold",
            )
        )
    holds_place = pod is not None and pod.status.node_name and restore.status.source_lost
    if content is None and holds_place and not _may_be_captured(snapshot, checkpoint):
        # The pod would hold its devices for what is not coming back.
        return view._replace(
            refusal=Failure(
                reason="SnapshotGone",
                message=f"what was captured as {name} is deleted",
                next_step="name another snapshot or start the worker cold",
            )
        )
    if snapshot is None and checkpoint is None:
        return view._replace(missing=f"no snapshot or checkpoint is called {name}", is_absent=True)
    if content is None:
        return view._replace(missing=f"{name} has no content yet")
    if content.metadata.deletion_timestamp:
        return view._replace(missing=f"{name} is being deleted")
    if content.status.committed is None:
        return view._replace(missing=f"{name} is not captured yet")
    return view._replace(refusal=quarantine.refusal(content, name))


def _wrong(
    pod: Pod | None, found: tuple[AnyObject | None, ...], content: SnapshotContent | None
) -> Failure | None:
    """Return why a source is not the one that the annotations of the pod name."""
    if pod is None:
        return None
    sources = [each for each in found if isinstance(each, Snapshot | DynamoCheckpoint)]
    return mismatch(request_in(pod.metadata.annotations), sources, content)


def _may_be_captured(snapshot: AnyObject | None, checkpoint: AnyObject | None) -> bool:
    """Whether a source that has no content now may get one."""
    ended = ("Ready", "Terminating")
    is_open = isinstance(checkpoint, DynamoCheckpoint) and checkpoint.status.phase not in ended
    return snapshot is not None or is_open


def _failure_of(value: AnyObject | None) -> str:
    if not isinstance(value, Snapshot | DynamoCheckpoint):
        return ""
    found = condition(value.status.conditions, "Failed")
    return found.message if found is not None and found.status == "True" else ""


def restoration_span(restore: SnapshotRestore) -> str:
    """Return the traceparent of the span over one whole restore."""
    parent = parse_traceparent(restore.metadata.annotations.get(TRACEPARENT, ""))
    uid = restore.metadata.uid
    trace_id = parent.trace_id if parent else derived_trace(uid)
    return derived_context(trace_id, "restoration", uid, "1").traceparent


def has_found_damage(restore: SnapshotRestore) -> bool:
    """Whether a restore has found the artifact damaged."""
    return quarantine.damage_in(restore.status.orders) is not None


def is_reading(restore: SnapshotRestore) -> bool:
    """Whether a restore may still load, or hold what it has loaded hidden."""
    return restore.status.state not in RESTORE.terminal() or any(
        not is_answered(item) for item in restore.status.orders
    )


def reconcile(view: RestoreView, now: float) -> Plan:
    """Return the next step of a restore. Same input, same plan."""
    restore = view.restore
    status = restore.status
    if not is_adopted(restore):
        return NOTHING if restore.metadata.deletion_timestamp else Plan((Adopt(restore),))
    settled = fold.mark_lost(status.orders, now, view.known)
    if settled != status.orders:
        return owing_plan(restore, replace(status, orders=settled), now)
    again = ordering.renewed(status.orders, now)
    if again is not None:
        return owing_plan(restore, replace(status, orders=again), now)
    if status.state in RESTORE.terminal():
        return _ended(view, now)
    if status.state is Restore.DROPPING:
        return _dropping(view, now)
    if end := next((found for check in _ENDS if (found := check(view, now))), None):
        return _fail(restore, end, now)
    return _STEPS[status.state](view, now)


# Why a restore ends before it is done: the first of these that holds.


def _deleted(view: RestoreView, _now: float) -> Failure | None:
    is_going = view.pod is None or view.pod.metadata.deletion_timestamp
    if not is_going and not view.restore.metadata.deletion_timestamp:
        return None
    return Failure(reason="Deleted", message="the pod was deleted during its restore")


def _order_failed(view: RestoreView, now: float) -> Failure | None:
    # What waits to begin again has the orders of the attempt that failed until it does.
    if view.restore.status.state is Restore.PENDING:
        return None
    return fold.failure_in(_attempted(view.restore), now)


def _pod_ended(view: RestoreView, _now: float) -> Failure | None:
    if view.pod is None or view.pod.status.phase not in FINISHED:
        return None
    # A failure of the pod itself, such as a node that can never hold the artifact, is its reason.
    reason = view.pod.status.reason
    is_own = reason and reason not in ("Completed", "ContainerExited")
    return Failure(
        reason=reason if is_own else "SourceExited",
        message=view.pod.status.message
        if is_own
        else f"the waiting worker ended during the restore: {view.pod.status.message}",
        next_step="" if is_own else "look at the worker's log",
    )


def _container_ended(view: RestoreView, _now: float) -> Failure | None:
    """Return that a container has ended for good while others of its pod run."""
    pod, name = view.pod, view.restore.spec.pod_ref.container
    if pod is None or pod.status.phase != "Running":
        return None
    rows = (each for each in pod.status.container_statuses if each.name == name)
    worker = next(rows, None)
    if worker is None or worker.state != "terminated":
        # Another container may end well, and in any way once the order `restore` is out: the worker
        # may serve by then.
        is_ordered = view.restore.status.state is Restore.RESTORING
        return None if is_ordered else container_failure(pod)
    return Failure(
        reason="SourceExited",
        message=f"the waiting worker ended during the restore: container {name} of pod "
        f"{pod.metadata.name} ended with exit code {worker.exit_code}",
        values={"container": name, "exit_code": worker.exit_code},
        next_step="look at the worker's log",
    )


def _not_in_standby(view: RestoreView, _now: float) -> Failure | None:
    """Return why nothing may be restored into a container that does its work already."""
    pod, name = view.pod, view.restore.spec.pod_ref.container
    if pod is None:
        return None
    is_there = any(container.name == name for container in pod.spec.containers)
    if is_there and name not in pod.status.cold_containers:
        return _no_placeholder(view, pod)
    without = f"was started without {STANDBY_VARIABLES[0]}=1 and starts cold"
    return Failure(
        reason="NotInStandby",
        message=f"the container {name} {without if is_there else 'is none of the pod'}",
        next_step="let it serve as it is, or delete the pod and create it again while the "
        "operator's webhook for pods answers",
    )


def _no_placeholder(view: RestoreView, pod: Pod) -> Failure | None:
    """Return why a process cannot be brought into a container that runs one of its own."""
    committed = view.content.status.committed if view.content is not None else None
    name, source = view.restore.spec.pod_ref.container, view.restore.spec.source
    if committed is None or committed.driver not in PLACEHOLDER_DRIVERS:
        return None
    if name not in pod.status.worker_containers:
        return None
    return Failure(
        reason="NotInStandby",
        message=f"the container {name} runs a worker of its own, and the driver "
        f"{committed.driver}, with which {source} was captured, brings the process itself",
        next_step="delete the pod and create it again, now that its source is there; one that is "
        f"created first needs the annotation {RESTORE_DRIVER}: {committed.driver}",
    )


def _refused(view: RestoreView, _now: float) -> Failure | None:
    return view.refusal if view.restore.status.state is Restore.PENDING else None


_ENDS: tuple[Callable[[RestoreView, float], Failure | None], ...] = (
    _deleted,
    _order_failed,
    _pod_ended,
    _container_ended,
    _not_in_standby,
    _refused,
)


def _attempted(restore: SnapshotRestore) -> list[OrderStatus]:
    """Return the orders of the current attempt that do its work."""
    status = restore.status
    return [
        item
        for item in status.orders
        if item.attempt == status.attempt and item.verb in ("load", "commit", "place", "restore")
    ]


def _fail(restore: SnapshotRestore, failure: Failure, now: float) -> Plan:
    """End the attempt: forget what was loaded, hidden or committed, on every device."""
    status = restore.status
    loads = fold.find(status.orders, "load", status.attempt)
    orders = ordering.drop(restore, loads, status.traceparent, now)
    failed = _moved(status, RestoreEvent.FAILED, *orders, failure=failure)
    if failed.state is Restore.FAILED:
        failed = replace(failed, conditions=_unrestored(restore, failure, now))
    return owing_plan(restore, failed, now)


def _moved(
    status: SnapshotRestoreStatus, event: RestoreEvent, *orders: OrderStatus, **changes: object
) -> SnapshotRestoreStatus:
    state = RESTORE.next(status.state, event)
    return replace(status, state=state, orders=[*status.orders, *orders], **changes)


def _pending(view: RestoreView, now: float) -> Plan:
    """Name a content, wait for the pod to be placed, then to be registered as a reader.

    One that has no place yet is no reader: it may wait without limit, and would keep the artifact.
    """
    restore, status, content = view.restore, view.restore.status, view.content
    if not status.content_name:
        if content is None or view.missing:
            return _waits_for_source(view, now)
        placed = view.pod.status.node_name if view.pod is not None and not view.no_agent else ""
        named = replace(
            status, content_name=content.metadata.name, node_name=placed, absent_since=None
        )
        return owing_plan(restore, named, now)
    is_registered = content is not None and restore.metadata.uid in content.status.readers
    if not is_registered and (again := _unreadable(view, now)) is not None:
        return again
    pod = view.pod
    if view.no_agent:
        return _waits(restore, "NoAgentOnNode", view.no_agent, now)
    if pod is None or not pod.status.node_name:
        return _waits(restore, "WaitingForPod", "the pod is not placed on a node yet", now)
    if status.node_name != pod.status.node_name:
        return owing_plan(restore, replace(status, node_name=pod.status.node_name), now)
    committed = content.status.committed if content is not None else None
    if content is None or committed is None or not is_registered:
        message = f"{status.content_name} has not registered this restore as a reader yet"
        return _waits(restore, "WaitingForSnapshot", message, now)
    if pod.status.memory_server == "starting":
        message = "the memory server of the pod has not started yet"
        return _waits(restore, "WaitingForMemoryServer", message, now)
    if view.is_full:
        return _waits(restore, backpressure.REASON, backpressure.MESSAGE, now)
    return _begin(restore, pod, content, committed, now)


def _unreadable(view: RestoreView, now: float) -> Plan | None:
    """Look for another content where this one takes no readers; None where it may."""
    restore, content = view.restore, view.content
    # A content that is named is captured, unless it is another one of the same name.
    if content is None or content.metadata.deletion_timestamp or not content.status.committed:
        lost = replace(restore.status, content_name="", source_lost=True)
        return owing_plan(restore, lost, now)
    if refusal := quarantine.refusal(content, restore.spec.source):
        return _fail(restore, refusal, now)
    return None


def _begin(
    restore: SnapshotRestore, pod: Pod, content: SnapshotContent, committed: Committed, now: float
) -> Plan:
    """Begin an attempt, after the rest that follows another one."""
    status = restore.status
    if now < (at := fold.rested_at(_attempted(restore))):
        return owing_plan(restore, status, now, wake_at=at)
    artifact = ordering.artifact_ref(content, committed)
    attempt = max([status.attempt, *(item.attempt for item in status.orders)]) + 1
    trace = restoration_span(restore)
    begun = replace(
        status,
        attempt=attempt,
        artifact=artifact,
        driver=committed.driver,
        node_name=pod.status.node_name,
        devices=_devices(pod, committed),
        started_at=status.started_at or time_of(now),
        traceparent=trace,
        capture_traceparent=capture_span(content, committed.generation),
        failure=None,
        orders=[item for item in status.orders if not is_answered(item)],
    )
    loads = ordering.load(replace(restore, status=begun), artifact, committed, trace, now)
    message = f"attempt {attempt} is under way"
    rows = conditions.pending(status.conditions, restore, now, "Restoring", message)
    return owing_plan(restore, _moved(begun, RestoreEvent.BEGIN, *loads, conditions=rows), now)


def _devices(pod: Pod, committed: Committed) -> list[DeviceRef]:
    """Return the devices to restore on; those of a memory server by their parts."""
    if pod.status.memory_server == "none":
        return pod.status.devices
    ordinals = [
        entry.ordinal for entry in committed.vector if entry.layout and entry.ordinal is not None
    ]
    return [DeviceRef(ordinal=ordinal, uuid=f"gpu-{ordinal}") for ordinal in ordinals]


def _waits_for_source(view: RestoreView, now: float) -> Plan:
    """Wait for the source, for ABSENT_S at most if it does not exist and the pod has a place.

    The pod holds its devices meanwhile. A misspelt name would keep them. A checkpoint that is
    deleted and applied again is absent for a moment, so the time counts from its absence.
    """
    restore, until = view.restore, math.inf
    since = (restore.status.absent_since or time_of(now)) if view.is_absent else None
    placed = condition(view.pod.status.conditions, "PodScheduled") if view.pod else None
    if since is not None and placed is not None and placed.status == "True":
        placed_at = conditions.seconds(placed.last_transition_time)
        until = max(placed_at, since.timestamp()) + ABSENT_S
    if now < until:
        at = until if until < math.inf else None
        status = replace(restore.status, absent_since=since)
        return _waits(restore, "WaitingForSnapshot", view.missing, now, status=status, wake_at=at)
    failure = Failure(
        reason="SnapshotNotFound",
        message=f"{view.missing}; the pod has waited for it for {ABSENT_S / 60:.0f} minutes",
        next_step="name a snapshot of the namespace, or make it before its pods",
    )
    return _fail(restore, failure, now)


def _waits(
    restore: SnapshotRestore,
    reason: str,
    message: str,
    now: float,
    *,
    status: SnapshotRestoreStatus | None = None,
    wake_at: float | None = None,
) -> Plan:
    """Say why the restore waits, in its status or in `status`, which the caller has made of it."""
    rows = conditions.pending(restore.status.conditions, restore, now, reason, message)
    changed = replace(status or restore.status, conditions=rows)
    return owing_plan(restore, changed, now, wake_at=wake_at)


def _loading(view: RestoreView, now: float) -> Plan:
    restore, status = view.restore, view.restore.status
    loads = fold.find(status.orders, "load", status.attempt)
    is_placing = bool(fold.find(status.orders, "place", status.attempt))
    if loads and not is_placing and status.artifact is not None and _may_place(view):
        order = ordering.place(restore, status.artifact, status.traceparent, now)
        return owing_plan(restore, replace(status, orders=[*status.orders, order]), now)
    if not all(fold.succeeded(item) for item in loads):
        return owing_plan(restore, status, now)
    commits = ordering.commit(restore, loads, status.traceparent, now)
    committing = _moved(status, RestoreEvent.LOADED, *commits)
    # Without devices there is nothing to publish: one write takes both steps.
    return _committing(view._replace(restore=replace(restore, status=committing)), now, restore)


def _committing(view: RestoreView, now: float, stored: SnapshotRestore | None = None) -> Plan:
    restore, status = stored or view.restore, view.restore.status
    owed = [
        *fold.find(status.orders, "commit", status.attempt),
        *fold.find(status.orders, "place", status.attempt),
    ]
    is_ready = all(fold.succeeded(item) for item in owed) and _is_standing_by(view)
    if not is_ready or status.artifact is None:
        return owing_plan(restore, status, now)
    order = ordering.restore(view.restore, status.artifact, status.traceparent, now)
    return owing_plan(restore, _moved(status, RestoreEvent.COMMITTED, order), now)


def _may_place(view: RestoreView) -> bool:
    """Whether the process can be brought into its place while the devices are loaded."""
    is_brought = view.restore.status.driver in PLACEHOLDER_DRIVERS
    return is_brought and view.can_place and _is_standing_by(view)


def _is_standing_by(view: RestoreView) -> bool:
    """Whether the worker is up and waits to be restored, and the others are up or have ended."""
    found = view.pod.status.container_statuses if view.pod is not None else []
    states = {container.name: container.state for container in found}
    worker = states.get(view.restore.spec.pod_ref.container)
    return worker == "running" and "waiting" not in states.values()


def _restoring(view: RestoreView, now: float) -> Plan:
    restore, status = view.restore, view.restore.status
    orders = fold.find(status.orders, "restore", status.attempt)
    if not all(fold.succeeded(item) for item in orders):
        return owing_plan(restore, status, now)
    # A content has the name of a uid. The name of its snapshot says which revision it was.
    ref = view.content.spec.snapshot_ref if view.content is not None else None
    message = f"restored from {f'snapshot/{ref.name}' if ref else status.content_name}"
    rows = conditions.ready(status.conditions, restore, now, "Restored", message)
    return owing_plan(restore, _moved(status, RestoreEvent.RESTORED, conditions=rows), now)


_STEPS: dict[Restore, Callable[[RestoreView, float], Plan]] = {
    Restore.PENDING: _pending,
    Restore.LOADING: _loading,
    Restore.COMMITTING: _committing,
    Restore.RESTORING: _restoring,
}


def _dropping(view: RestoreView, now: float) -> Plan:
    """Wait until nothing loads or is placed and all is dropped, then try again or give up."""
    restore, status = view.restore, view.restore.status
    owed = [
        item
        for item in status.orders
        if item.verb in ("load", "place", "drop")
        and not is_answered(item)
        and not fold.is_late(item, now)
    ]
    if owed:
        return owing_plan(restore, status, now)
    failure = status.failure or Failure(reason="RestoreFailed", message="the restore failed")
    if _may_retry(view, failure, now):
        known = max((fold.superseding(item) for item in status.orders), default=0)
        again = _moved(
            status,
            RestoreEvent.RETRY,
            attempt=max(status.attempt, known),
            retries=status.retries + 1,
            conditions=conditions.pending(
                status.conditions, restore, now, "Retrying", failure.message
            ),
        )
        return owing_plan(restore, again, now)
    rows = _unrestored(restore, failure, now)
    return owing_plan(restore, _moved(status, RestoreEvent.DROPPED, conditions=rows), now)


def _may_retry(view: RestoreView, failure: Failure, now: float) -> bool:
    """Only what failed without touching the worker, and is dropped everywhere, is tried again.

    A process in its place waits for the next attempt as well as for this one.
    """
    status = view.restore.status
    was_touched = any(item.verb == "restore" for item in _attempted(view.restore))
    is_dropped = all(is_answered(item) for item in status.orders)
    is_wanted = not any(check(view, now) for check in (_deleted, _pod_ended, _container_ended))
    may = failure.retryable or any(fold.superseding(item) for item in status.orders)
    return may and is_wanted and is_dropped and not was_touched and status.retries < MAX_RETRIES


def _unrestored(restore: SnapshotRestore, failure: Failure, now: float) -> list[Condition]:
    return conditions.failed(restore.status.conditions, restore, now, failure)


def _ended(view: RestoreView, now: float) -> Plan:
    """Keep what is owed; let a deleted restore go once its content has taken it off the readers."""
    restore = view.restore
    if _waits_in_vain(view, now):
        return _give_up(view, now)
    if restore.metadata.deletion_timestamp is None or is_reading(restore):
        return owing_plan(restore, restore.status, now)
    content = view.content
    if content is not None and restore.metadata.uid in content.status.readers:
        return owing_plan(restore, restore.status, now)
    return Plan((Finalize(restore),))


def _waits_in_vain(view: RestoreView, now: float) -> bool:
    """Whether the worker of a restore that failed is up, and still waits for it.

    A pod that runs by orders is ended by the one who gives them; one of a kubelet goes on.
    """
    pod, status = view.pod, view.restore.status
    if status.state is not Restore.FAILED or fold.find(status.orders, "abort"):
        return False
    if pod is None or pod.status.orders or not _is_standing_by(view):
        return False
    # A pod that is deleted is ended; one whose restore alone is deleted waits on.
    if pod.metadata.deletion_timestamp:
        return False
    checks = (_pod_ended, _not_in_standby)
    return bool(pod.status.node_name) and not any(check(view, now) for check in checks)


def _give_up(view: RestoreView, now: float) -> Plan:
    """Have the agent say so to the worker, which ends or starts cold."""
    restore, pod = view.restore, view.pod
    failure, trace = restore.status.failure, restoration_span(restore)
    node, why = pod.status.node_name if pod else "", failure.message if failure else ""
    order = ordering.abort_restore(restore, node, why, trace, now)
    return owing_plan(restore, replace(restore.status, orders=[*restore.status.orders, order]), now)
