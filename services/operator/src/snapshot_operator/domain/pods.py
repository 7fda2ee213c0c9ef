"""Decides for one Pod of the local cluster: placing, running, restoring into it, ending it.

A pod with the annotation `nvidia.com/restore-from` is started in standby while its devices are
loaded; the states of that are `transitions.RESTORE`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from msgspec.structs import replace

from snapshot_operator.domain import backpressure, conditions, fold, ordering, quarantine
from snapshot_operator.domain.nodes import lost_nodes
from snapshot_operator.domain.plan import (
    NOTHING,
    Finalize,
    Plan,
    SetStatus,
    Write,
    status_plan,
)
from snapshot_operator.domain.scheduler import Placement, Waiting, place
from snapshot_shared.errors import Failure
from snapshot_shared.objects import (
    RESTORE_FROM,
    TRACEPARENT,
    ContainerStatus,
    Node,
    OrderStatus,
    Pod,
    PodStatus,
    RestoreStatus,
    SnapshotContent,
)
from snapshot_shared.orders import DeviceRef, VectorEntry
from snapshot_shared.spans import derived_context, derived_trace, parse_traceparent
from snapshot_shared.transitions import RESTORE, Capture, Restore, RestoreEvent

FINISHED = ("Succeeded", "Failed")
_FAILING = (Restore.LOADING, Restore.COMMITTING, Restore.RESTORING)


class Source(NamedTuple):
    """What `restore-from` resolved to: the content, or why there is none (yet)."""

    content: SnapshotContent | None
    waiting: str = ""
    failure: Failure | None = None


class PodView(NamedTuple):
    """What a decision about a pod looks at. `used` gives device uuids in use by node.

    While `is_full` no pod is placed: the stream of orders has room only for what cleans up.
    """

    pod: Pod
    nodes: Sequence[Node]
    used: Mapping[str, set[str]]
    source: Source | None
    is_full: bool = False


def reconcile_pod(view: PodView, now: float) -> Plan:
    """Give the next step of a pod. Same input, same plan."""
    if told := _tells_of_damage(view, now):
        return told
    if settled := _settled_by_loss(view, now):
        return settled
    pod = view.pod
    if pod.metadata.deletion_timestamp:
        return _deletion(view, now)
    if pod.status.phase in FINISHED and not _is_restoring(pod):
        return _freeing(view, now)
    if not pod.status.node_name:
        return _schedule(view, now)
    if _is_restoring(pod):
        return _restoring(view, now)
    return _running(view, now)


def _is_restoring(pod: Pod) -> bool:
    restore = pod.status.restore
    return restore is not None and restore.state in (*_FAILING, Restore.DROPPING)


def _tells_of_damage(view: PodView, now: float) -> Plan | None:
    """Put the artifact in quarantine, once, when this pod's restore found it damaged."""
    pod, restore = view.pod, view.pod.status.restore
    if restore is None or restore.damaged:
        return None
    item = quarantine.damage_in(pod.status.orders)
    if item is None:
        return None
    content = view.source.content if view.source else None
    marked: list[Write] = []
    if content is not None:
        finder = f"pod {pod.metadata.namespace}/{pod.metadata.name}"
        status = quarantine.quarantined(content, item, finder, now)
        marked.append(SetStatus(content, replace(content, status=status)))
    told = replace(pod.status, restore=replace(restore, damaged=True))
    return _plan(pod, told, now, *marked)


def _settled_by_loss(view: PodView, now: float) -> Plan | None:
    """Settle what a lost node cannot answer any more; None when nothing changes."""
    pod = view.pod
    node = pod.status.node_name
    known = {found.metadata.name for found in view.nodes}
    is_lost = bool(node) and (node in lost_nodes(view.nodes) or node not in known)
    if not is_lost:
        return None
    orders = fold.mark_lost(pod.status.orders, now, lost={node}, known=known)
    if orders != pod.status.orders:
        return _plan(pod, replace(pod.status, orders=orders), now)
    if pod.status.phase in FINISHED or pod.metadata.deletion_timestamp or _is_restoring(pod):
        return None
    failure = Failure(
        reason="NodeLost",
        message=f"node {node} was lost while the pod ran there",
        values={"node": node},
        next_step="restore the worker on another node",
    )
    return _fail(view, failure, now)


def restoration_span(pod: Pod) -> str:
    """Give the traceparent of the span over one whole restore."""
    parent = parse_traceparent(pod.metadata.annotations.get(TRACEPARENT, ""))
    uid = pod.metadata.uid
    trace_id = parent.trace_id if parent else derived_trace(uid)
    return derived_context(trace_id, "restoration", uid, "1").traceparent


def _trace(pod: Pod) -> str:
    if pod.status.restore is not None:
        return pod.status.restore.traceparent
    return pod.metadata.annotations.get(TRACEPARENT, "")


def _plan(
    pod: Pod, status: PodStatus, now: float, *before: Write, wake_at: float | None = None
) -> Plan:
    obligations = sorted({item.verb for item in status.orders if not fold.is_answered(item)})
    times = [at for at in (wake_at, fold.next_deadline(status.orders, now)) if at is not None]
    new = replace(pod, status=replace(status, obligations=obligations))
    return status_plan(pod, new, *before, wake_at=min(times, default=None))


def _fail(view: PodView, failure: Failure, now: float) -> Plan:
    """End a pod for good; what it owes is ordered by the next look."""
    pod = view.pod
    status = replace(
        pod.status,
        phase="Failed",
        reason=failure.reason,
        message=failure.message,
        conditions=conditions.failed(pod.status.conditions, pod, now, failure),
    )
    if status.restore is not None and status.restore.state is not Restore.FAILED:
        status = replace(status, restore=replace(status.restore, failure=failure))
    return _plan(pod, status, now)


def _schedule(view: PodView, now: float) -> Plan:
    pod = view.pod
    vector: list[VectorEntry] = []
    if view.source is not None:
        if view.source.failure is not None:
            return _fail(view, view.source.failure, now)
        content = view.source.content
        if not _is_usable(content) or content is None or content.status.committed is None:
            return _wait(pod, "WaitingForSnapshot", view.source.waiting, now)
        name = restore_source(pod) or content.metadata.name
        if refusal := quarantine.refusal(content, name):
            return _fail(view, refusal, now)
        vector = content.status.committed.vector
    answer = place(pod, view.nodes, view.used, vector)
    if isinstance(answer, Failure):
        return _fail(view, answer, now)
    if isinstance(answer, Waiting):
        return _wait(pod, answer.reason, answer.message, now)
    if view.is_full:
        return _wait(pod, backpressure.REASON, backpressure.MESSAGE, now)
    return _placed(view, answer, now)


def _is_usable(content: SnapshotContent | None) -> bool:
    return content is not None and not content.metadata.deletion_timestamp


def _wait(pod: Pod, reason: str, message: str, now: float) -> Plan:
    waiting = conditions.with_conditions(
        pod.status.conditions, pod, now, ("PodScheduled", False, reason, message)
    )
    return _plan(pod, replace(pod.status, conditions=waiting, reason=reason, message=message), now)


def _placed(view: PodView, placement: Placement, now: float) -> Plan:
    pod = view.pod
    status = replace(
        pod.status,
        node_name=placement.node,
        devices=placement.devices,
        reason="",
        message="",
        traceparent=pod.metadata.annotations.get(TRACEPARENT, ""),
        container_statuses=[ContainerStatus(name=c.name) for c in pod.spec.containers],
        conditions=conditions.with_conditions(
            pod.status.conditions,
            pod,
            now,
            ("PodScheduled", True, "Scheduled", f"on {placement.node}"),
            ("Ready", False, "Starting", "the containers are being started"),
        ),
    )
    content = view.source.content if view.source else None
    if content is None or content.status.committed is None:
        placed = replace(pod, status=status)
        run = ordering.run(placed, standby=False, trace=_trace(placed), now=now)
        return _plan(pod, replace(status, orders=[run]), now)
    return _begin_restore(pod, status, content, now)


def _begin_restore(pod: Pod, status: PodStatus, content: SnapshotContent, now: float) -> Plan:
    """Register the reader, then start the standby worker and all loads together."""
    committed = content.status.committed
    if committed is None:
        return NOTHING
    trace = restoration_span(pod)
    artifact = ordering.artifact_ref(content, committed)
    restore = RestoreStatus(
        state=RESTORE.next(Restore.PENDING, RestoreEvent.BEGIN),
        attempt=1,
        content_name=content.metadata.name,
        artifact=artifact,
        started_at=now,
        traceparent=trace,
    )
    placed = replace(pod, status=replace(status, restore=restore, traceparent=trace))
    orders = [
        ordering.run(placed, standby=True, trace=trace, now=now),
        *ordering.load(placed, content, artifact, trace, now),
    ]
    return _plan(pod, replace(placed.status, orders=orders), now, *_registered(pod, content))


def _registered(pod: Pod, content: SnapshotContent) -> list[Write]:
    uid = pod.metadata.uid
    if uid in content.status.readers:
        return []
    readers = [*content.status.readers, uid]
    return [SetStatus(content, replace(content, status=replace(content.status, readers=readers)))]


def _unregistered(view: PodView) -> list[Write]:
    content = view.source.content if view.source else None
    uid = view.pod.metadata.uid
    if content is None or uid not in content.status.readers:
        return []
    readers = [reader for reader in content.status.readers if reader != uid]
    return [SetStatus(content, replace(content, status=replace(content.status, readers=readers)))]


def _process_changes(pod: Pod, now: float) -> PodStatus:
    """Fold what the run order says into the pod's phase and containers."""
    status = pod.status
    runs = fold.find(status.orders, "run")
    if not runs:
        return status
    run = runs[0]
    exited = run.final if run.state == "exited" else None
    if exited is not None:
        code = exited.exit_code
        phase = "Succeeded" if code == 0 else "Failed"
        shown = "unknown" if code is None else str(code)
        return replace(
            status,
            phase=phase,
            reason="Completed" if code == 0 else "ContainerExited",
            message=exited.message or f"the container ended with exit code {shown}",
            container_statuses=[
                replace(found, state="terminated", ready=False, exit_code=code)
                for found in status.container_statuses
            ],
            conditions=conditions.with_conditions(
                status.conditions, pod, now, ("Ready", False, "ContainerExited", f"exit {shown}")
            ),
        )
    is_ready = run.state == "ready" and status.restore is None
    if run.state not in ("started", "ready"):
        return status
    changed = replace(
        status,
        phase="Running",
        container_statuses=[
            replace(found, state="running", ready=is_ready or found.ready)
            for found in status.container_statuses
        ],
    )
    if not is_ready:
        return changed
    return replace(
        changed,
        conditions=conditions.with_conditions(
            status.conditions, pod, now, ("Ready", True, "WorkerReady", "ready for a snapshot")
        ),
    )


def _running(view: PodView, now: float) -> Plan:
    pod = view.pod
    runs = fold.find(pod.status.orders, "run")
    if runs and (failure := fold.failure_in(runs, now)):
        return _fail(view, failure, now)
    status = _process_changes(pod, now)
    limit = pod.spec.active_deadline_seconds
    wake_at = None
    if limit is not None and runs:
        wake_at = runs[0].ordered_at + limit
        if now >= wake_at and status.phase not in FINISHED:
            return _fail(view, _too_long(limit), now)
    done = _unregistered(view) if status.restore is not None else []
    return _plan(pod, status, now, *done, wake_at=wake_at)


def _too_long(limit: int) -> Failure:
    return Failure(
        reason="DeadlineExceeded",
        message=f"the pod was active for longer than activeDeadlineSeconds ({limit})",
        values={"limit_s": limit},
        next_step="raise the deadline or look at the worker's log",
    )


def _restoring(view: PodView, now: float) -> Plan:
    pod = view.pod
    restore = pod.status.restore
    if restore is None:
        return NOTHING
    if restore.state is Restore.DROPPING:
        return _dropping(view, restore, now)
    status = _process_changes(pod, now)
    if failure := _restore_failure(status, now):
        return _drop(view, status, restore, failure, now)
    match restore.state:
        case Restore.LOADING:
            return _loading(pod, status, restore, now)
        case Restore.COMMITTING:
            return _committing(pod, status, restore, now)
        case Restore.RESTORING:
            return _awaiting(view, status, restore, now)
        case _:
            return NOTHING


def _restore_failure(status: PodStatus, now: float) -> Failure | None:
    orders = [item for item in status.orders if item.verb in ("run", "load", "commit", "restore")]
    if failure := fold.failure_in(orders, now):
        return failure
    if status.phase in FINISHED:
        return Failure(
            reason="SourceExited",
            message=f"the waiting worker ended during the restore: {status.message}",
            next_step="look at the worker's log",
        )
    return None


def _with(
    status: PodStatus,
    restore: RestoreStatus,
    event: RestoreEvent,
    *orders: OrderStatus,
    failure: Failure | None = None,
) -> PodStatus:
    moved = replace(restore, state=RESTORE.next(restore.state, event), failure=failure)
    return replace(status, restore=moved, orders=[*status.orders, *orders])


def _loading(pod: Pod, status: PodStatus, restore: RestoreStatus, now: float) -> Plan:
    loads = fold.find(status.orders, "load", restore.attempt)
    if not all(fold.succeeded(item) for item in loads):
        return _plan(pod, status, now)
    orders = ordering.commit(pod, loads, restore.traceparent, now)
    moved = _with(status, restore, RestoreEvent.LOADED, *orders)
    if orders:
        return _plan(pod, moved, now)
    return _committing(pod, moved, moved.restore or restore, now)


def _committing(pod: Pod, status: PodStatus, restore: RestoreStatus, now: float) -> Plan:
    commits = fold.find(status.orders, "commit", restore.attempt)
    runs = fold.find(status.orders, "run")
    is_up = all(fold.succeeded(item) for item in (*commits, *runs))
    if not is_up or restore.artifact is None:
        return _plan(pod, status, now)
    order = ordering.restore(pod, restore.artifact, restore.traceparent, now)
    return _plan(pod, _with(status, restore, RestoreEvent.COMMITTED, order), now)


def _awaiting(view: PodView, status: PodStatus, restore: RestoreStatus, now: float) -> Plan:
    pod = view.pod
    orders = fold.find(status.orders, "restore", restore.attempt)
    if not all(fold.succeeded(item) for item in orders):
        return _plan(pod, status, now)
    ready = conditions.with_conditions(
        status.conditions,
        pod,
        now,
        ("Ready", True, "Restored", f"restored from {restore.content_name}"),
        ("nvidia.com/Restored", True, "RestoreSucceeded", ""),
    )
    serving = [replace(found, ready=True) for found in status.container_statuses]
    done = _with(status, restore, RestoreEvent.RESTORED)
    done = replace(done, conditions=ready, container_statuses=serving)
    return _plan(pod, done, now, *_unregistered(view))


def _drop(
    view: PodView, status: PodStatus, restore: RestoreStatus, failure: Failure, now: float
) -> Plan:
    """Undo a restore: forget what was loaded everywhere, and end the waiting worker."""
    pod = view.pod
    loads = fold.find(status.orders, "load", restore.attempt)
    orders = [
        *ordering.drop(pod, loads, restore.traceparent, now),
        ordering.stop(pod, restore.traceparent, now),
    ]
    return _plan(pod, _with(status, restore, RestoreEvent.FAILED, *orders, failure=failure), now)


def _dropping(view: PodView, restore: RestoreStatus, now: float) -> Plan:
    pod = view.pod
    lost = lost_nodes(view.nodes)
    owed = [
        item
        for item in pod.status.orders
        if item.verb in ("load", "drop", "stop")
        and not fold.is_answered(item)
        and item.node not in lost
        and now < item.deadline
    ]
    if owed:
        return Plan(wake_at=fold.next_deadline(owed, now))
    failure = restore.failure or Failure(reason="RestoreFailed", message="the restore failed")
    status = _with(pod.status, restore, RestoreEvent.DROPPED, failure=failure)
    rows = conditions.failed(status.conditions, pod, now, failure)
    rows = conditions.with_conditions(
        rows, pod, now, ("nvidia.com/Restored", False, failure.reason, failure.message)
    )
    status = replace(
        status, phase="Failed", reason=failure.reason, message=failure.message, conditions=rows
    )
    return _plan(pod, status, now, *_unregistered(view))


def holds_devices(pod: Pod) -> bool:
    """Say whether the pod's devices may still hold its memory."""
    return any(not _is_forgotten(pod, device) for device in pod.status.devices)


def _forgets(pod: Pod, device: DeviceRef) -> list[OrderStatus]:
    return [
        item
        for item in pod.status.orders
        if item.verb == "drop"
        and item.attempt >= ordering.FORGET_ATTEMPT
        and item.payload["device"] == device.uuid
    ]


def _is_forgotten(pod: Pod, device: DeviceRef) -> bool:
    return any(_is_over(item) for item in _forgets(pod, device))


def _is_over(item: OrderStatus) -> bool:
    """Say whether a cleaning order has done its work, or its node is gone for good."""
    return fold.succeeded(item) or item.state == fold.LOST


def _freeing(view: PodView, now: float) -> Plan:
    """A finished pod gives back its devices: stop what may run, then forget its memory."""
    pod = view.pod
    if not pod.status.node_name:
        return _plan(pod, pod.status, now, *_unregistered(view))
    owed, wake_at = _end_orders(pod, now)
    status = replace(pod.status, orders=[*pod.status.orders, *owed])
    return _plan(pod, status, now, *_unregistered(view), wake_at=wake_at)


def _end_orders(pod: Pod, now: float) -> tuple[list[OrderStatus], float | None]:
    """Give the next orders that end a pod, and when to look again.

    First the stop, until it has succeeded; then for each device the drop. What fails rests and
    is tried again: the devices are not given away before.
    """
    trace = _trace(pod)
    stops = fold.find(pod.status.orders, "stop")
    if fold.find(pod.status.orders, "run") and not any(_is_over(item) for item in stops):
        attempt = fold.retry_attempt(stops, now)
        if attempt is not None:
            return [ordering.stop(pod, trace, now, attempt=attempt)], None
        return [], _rest(stops)
    owed: list[OrderStatus] = []
    rests: list[float] = []
    for device in pod.status.devices:
        if _is_forgotten(pod, device):
            continue
        forgets = _forgets(pod, device)
        attempt = fold.retry_attempt(forgets, now)
        if attempt is not None:
            attempt = max(attempt, ordering.FORGET_ATTEMPT)
            owed.append(ordering.forget(pod, device, trace, now, attempt=attempt))
        elif (rest := _rest(forgets)) is not None:
            rests.append(rest)
    return owed, min(rests, default=None)


def _rest(orders: list[OrderStatus]) -> float | None:
    last = max(orders, key=lambda item: item.attempt)
    return fold.retry_at(orders) if fold.is_answered(last) else None


def _deletion(view: PodView, now: float) -> Plan:
    """End a pod. It stays until its processes have ended and its devices are free."""
    pod = view.pod
    restore = pod.status.restore
    if restore is not None and restore.state in _FAILING:
        failure = Failure(reason="Deleted", message="the pod was deleted during its restore")
        return _drop(view, pod.status, restore, failure, now)
    if restore is not None and restore.state is Restore.DROPPING:
        return _dropping(view, restore, now)
    if not pod.status.node_name:
        return Plan((*_unregistered(view), Finalize(pod)))
    owed, wake_at = _end_orders(pod, now)
    stops = fold.find(pod.status.orders, "stop")
    is_ended = not fold.find(pod.status.orders, "run") or any(_is_over(item) for item in stops)
    if is_ended and not owed and not holds_devices(pod):
        return Plan((*_unregistered(view), Finalize(pod)))
    status = replace(pod.status, orders=[*pod.status.orders, *owed])
    return _plan(pod, status, now, *_unregistered(view), wake_at=wake_at)


def resolve(
    name: str, content: SnapshotContent | None, *, exists: bool, failure: str = ""
) -> Source:
    """Judge what `restore-from` names: usable, not yet, or never.

    `failure` says why the snapshot or checkpoint itself failed, if it did.
    """
    if content is not None and content.status.failure is not None:
        failure = failure or content.status.failure.message
    if failure and (content is None or content.status.capture is Capture.FAILED):
        refusal = Failure(
            reason="SnapshotFailed",
            message=f"{name} failed: {failure}",
            next_step="take a new snapshot or start the worker cold",
        )
        return Source(content, failure=refusal)
    if not exists:
        return Source(content, waiting=f"no snapshot or checkpoint is called {name}")
    if content is None:
        return Source(None, waiting=f"{name} has no content yet")
    if content.metadata.deletion_timestamp:
        return Source(content, waiting=f"{name} is being deleted")
    return Source(content, waiting=f"{name} is not captured yet")


def restore_source(pod: Pod) -> str | None:
    """Give the name in the pod's `restore-from` annotation."""
    return pod.metadata.annotations.get(RESTORE_FROM)
