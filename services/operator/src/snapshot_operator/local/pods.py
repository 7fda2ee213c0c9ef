"""Decides for one Pod of the local cluster, as scheduler and kubelet do for those of Kubernetes.

It places the pod, has its containers run as local processes by orders to the node's agent, and
gives its devices back when it has ended. A pod with the annotation `nvidia.com/restore-from` gets
a SnapshotRestore and starts in standby; what becomes of that is decided in `core.restore`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, get_args

from msgspec.structs import replace

from snapshot_api.facts import FINISHED, ContainerStatus, Node, Pod, PodStatus
from snapshot_api.meta import TRACEPARENT, Condition, OrderStatus, condition, is_true
from snapshot_api.v1alpha1.content import SnapshotContent
from snapshot_api.v1alpha1.restore import SnapshotRestore, restore_name
from snapshot_api.views import is_answered
from snapshot_api.well_known import CAPTURE_DRIVER
from snapshot_operator.core import backpressure, conditions, fold, ordering
from snapshot_operator.core.nodes import all_nodes, is_silent, node
from snapshot_operator.core.owning import serves
from snapshot_operator.core.plan import (
    NOTHING,
    Adopt,
    Create,
    Delete,
    Finalize,
    Plan,
    Reader,
    SetStatus,
    is_adopted,
    owing_plan,
)
from snapshot_operator.core.restore import (
    RESTORED,
    is_reading,
    restoration_span,
    restore_for,
    source_of,
)
from snapshot_operator.local.scheduler import Placement, Waiting, admits, place, shape
from snapshot_shared.errors import Failure
from snapshot_shared.orders import DeviceRef, Driver, DropOrder, order_in
from snapshot_shared.transitions import RESTORE, Restore


class PodView(NamedTuple):
    """What a decision about a pod reads.

    `nodes` are those that the pod admits, and `used` the device uuids in use on each, while it is
    to be placed and the first of its shape to be; `home` is its node once it has one. `content`
    is what its restore has named.
    """

    pod: Pod
    restore: SnapshotRestore | None = None
    content: SnapshotContent | None = None
    home: Node | None = None
    nodes: Sequence[Node] = ()
    used: Mapping[str, set[str]] = {}
    is_first: bool = True
    is_full: bool = False


def gather(reader: Reader, pod: Pod) -> PodView:
    """Read what a decision about a pod depends on."""
    restore, content = _restore(reader, pod)
    view = PodView(pod, restore, content)
    if pod.status.node_name:
        return view._replace(home=node(reader, pod.status.node_name))
    if pod.metadata.deletion_timestamp or pod.status.phase in FINISHED:
        return view
    if not reader.is_first("unplaced", shape(pod), pod):
        return view._replace(is_first=False)
    nodes = [found for found in all_nodes(reader) if admits(pod, found)]
    used = {found.metadata.name: _used(reader, found.metadata.name) for found in nodes}
    return view._replace(nodes=nodes, used=used, is_full=reader.is_full)


def _restore(reader: Reader, pod: Pod) -> tuple[SnapshotRestore | None, SnapshotContent | None]:
    if not source_of(pod):
        return None, None
    found = reader.get("SnapshotRestore", pod.metadata.namespace, restore_name(pod.metadata.uid))
    if not isinstance(found, SnapshotRestore):
        return None, None
    if not found.status.content_name or pod.status.node_name:
        return found, None
    content = reader.get("SnapshotContent", None, found.status.content_name)
    return found, content if serves(content, found) else None


def _used(reader: Reader, name: str) -> set[str]:
    return {
        device.uuid
        for pod in reader.by_index("holders", name)
        if isinstance(pod, Pod)
        for device in pod.status.devices
    }


def reconcile(view: PodView, now: float) -> Plan:
    """Return the next step of a pod. Same input, same plan."""
    pod, status = view.pod, view.pod.status
    if not pod.metadata.deletion_timestamp and (made := _made(view)) is not None:
        return made
    on = frozenset({status.node_name}) if view.home is not None else frozenset()
    settled = fold.mark_lost(status.orders, now, on)
    if settled != status.orders:
        return owing_plan(pod, replace(status, orders=settled), now)
    again = ordering.renewed(status.orders, now)
    if again is not None:
        return owing_plan(pod, replace(status, orders=again), now)
    if pod.metadata.deletion_timestamp:
        return _deletion(view, now)
    if status.phase in FINISHED:
        return _freeing(view, now)
    if failure := next((found for check in _ENDS if (found := check(view, now))), None):
        return _fail(pod, failure, now)
    return _running(view, now) if status.node_name else _schedule(view, now)


def _made(view: PodView) -> Plan | None:
    """Put on what has to be there before anything is done for a pod."""
    pod = view.pod
    if not is_adopted(pod):
        return Plan((Adopt(pod),))
    if source_of(pod) and view.restore is None and not pod.status.node_name:
        is_over = pod.status.phase in FINISHED
        return None if is_over else Plan((Create(restore_for(pod)),))
    return None


def _trace(view: PodView) -> str:
    """Return the span that a pod's orders belong to: that of its restore, if it has one."""
    own = view.pod.metadata.annotations.get(TRACEPARENT, "")
    asked = restoration_span(view.restore) if view.restore is not None else own
    return view.pod.status.traceparent or asked


# Why a pod ends although its containers have not: the first of these that holds.


def _restore_failed(view: PodView, _now: float) -> Failure | None:
    if view.restore is None or view.restore.status.state is not Restore.FAILED:
        return None
    return view.restore.status.failure or Failure(reason="RestoreFailed", message="it failed")


def _node_gone(view: PodView, _now: float) -> Failure | None:
    name = view.pod.status.node_name
    if not name or view.home is not None:
        return None
    return Failure(
        reason="NodeLost",
        message=f"node {name}, on which the pod ran, was deleted",
        values={"node": name},
        next_step="restore the worker on another node",
    )


def _run_failed(view: PodView, now: float) -> Failure | None:
    """A run that is late on a silent node is not over: the node may return with the worker."""
    runs = fold.find(view.pod.status.orders, "run")
    if is_silent(view.home):
        runs = [item for item in runs if is_answered(item)]
    return fold.failure_in(runs, now)


def _too_long(view: PodView, now: float) -> Failure | None:
    at = _active_until(view.pod)
    if at is None or now < at:
        return None
    limit = view.pod.spec.active_deadline_seconds
    return Failure(
        reason="DeadlineExceeded",
        message=f"the pod was active for longer than activeDeadlineSeconds ({limit})",
        values={"limit_s": limit},
        next_step="raise the deadline or look at the worker's log",
    )


_ENDS: tuple[Callable[[PodView, float], Failure | None], ...] = (
    _restore_failed,
    _node_gone,
    _run_failed,
    _too_long,
)


def _active_until(pod: Pod) -> float | None:
    limit = pod.spec.active_deadline_seconds
    runs = fold.find(pod.status.orders, "run")
    return runs[0].ordered_at.timestamp() + limit if limit is not None and runs else None


def _fail(pod: Pod, failure: Failure, now: float) -> Plan:
    """End a pod for good; what it owes is ordered by the next decision."""
    rows = conditions.failed(pod.status.conditions, pod, now, failure)
    status = replace(
        pod.status,
        phase="Failed",
        reason=failure.reason,
        message=failure.message,
        container_statuses=_unready(pod.status),
        conditions=_with_restored(rows, pod, now, failure),
    )
    return owing_plan(pod, status, now)


def _with_restored(
    rows: list[Condition], pod: Pod, now: float, failure: Failure | None
) -> list[Condition]:
    """Set how the restore of a pod ended, if it asked for one."""
    if not source_of(pod):
        return rows
    row = (RESTORED, True, "RestoreSucceeded", "")
    if failure is not None:
        row = (RESTORED, False, failure.reason, failure.message)
    return conditions.with_conditions(rows, pod, now, row)


# Placing.


def _schedule(view: PodView, now: float) -> Plan:
    pod = view.pod
    content = view.content if source_of(pod) else None
    if source_of(pod) and (content is None or content.status.committed is None):
        return _wait(pod, "WaitingForSnapshot", _restore_wait(view), now)
    if not view.is_first:
        reason, message = "Unschedulable", "an older pod that needs the same waits for room"
        return _wait(pod, reason, message, now, is_kept=True)
    answer = place(pod, view.nodes, view.used, content)
    if isinstance(answer, Failure):
        return _fail(pod, answer, now)
    if isinstance(answer, Waiting):
        return _wait(pod, answer.reason, answer.message, now)
    if view.is_full:
        return _wait(pod, backpressure.REASON, backpressure.MESSAGE, now)
    return _placed(view, answer, now)


def _restore_wait(view: PodView) -> str:
    rows = view.restore.status.conditions if view.restore is not None else []
    found = condition(rows, "Ready")
    return found.message if found is not None else f"{source_of(view.pod)} is looked for"


def _wait(pod: Pod, reason: str, message: str, now: float, *, is_kept: bool = False) -> Plan:
    """Return the status with what a pod waits for; an equal message is kept."""
    if is_kept and pod.status.reason:
        return NOTHING
    waiting = conditions.with_conditions(
        pod.status.conditions, pod, now, ("PodScheduled", False, reason, message)
    )
    return owing_plan(
        pod, replace(pod.status, conditions=waiting, reason=reason, message=message), now
    )


def places(plan: Plan) -> bool:
    """Whether a plan gives devices to a pod."""
    return any(
        isinstance(write, SetStatus)
        and isinstance(write.old, Pod)
        and isinstance(write.new, Pod)
        and write.old.status.node_name != write.new.status.node_name
        for write in plan.writes
    )


def _placed(view: PodView, placement: Placement, now: float) -> Plan:
    pod = view.pod
    status = replace(
        pod.status,
        node_name=placement.node,
        devices=placement.devices,
        reason="",
        message="",
        traceparent=_trace(view),
        container_statuses=[ContainerStatus(name=c.name) for c in pod.spec.containers],
        conditions=conditions.with_conditions(
            pod.status.conditions,
            pod,
            now,
            ("PodScheduled", True, "Scheduled", f"on {placement.node}"),
            ("Ready", False, "Starting", "the containers are being started"),
        ),
    )
    placed = replace(pod, status=status)
    run = ordering.run(placed, view.restore, _driver(view), now)
    return owing_plan(pod, replace(status, orders=[run]), now)


def _driver(view: PodView) -> Driver:
    """Return the driver with which a pod is restored, or else captured."""
    if view.content is not None and view.content.status.committed is not None:
        return view.content.status.committed.driver
    named = view.pod.metadata.annotations.get(CAPTURE_DRIVER)
    return next((each for each in get_args(Driver) if each == named), "cooperative")


# Running.


def _running(view: PodView, now: float) -> Plan:
    pod = view.pod
    status = _followed(view, now)
    if is_silent(view.home) and status.phase not in FINISHED:
        message = f"node {pod.status.node_name} is silent: its worker may well run"
        status = _unknown(pod, status, message, now)
    return owing_plan(pod, status, now, wake_at=_active_until(pod))


def _unknown(pod: Pod, status: PodStatus, message: str, now: float) -> PodStatus:
    rows = status.conditions
    if is_true(rows, "Ready"):
        rows = conditions.with_truth(rows, pod, now, "Ready", "Unknown", "NodeSilent", message)
    return replace(
        status,
        phase="Unknown",
        reason="NodeSilent",
        message=message,
        container_statuses=_unready(status),
        conditions=rows,
    )


def _unready(status: PodStatus) -> list[ContainerStatus]:
    """Return the containers of a pod that does not serve; a node that returns has them ready."""
    return [replace(found, ready=False) for found in status.container_statuses]


def _followed(view: PodView, now: float) -> PodStatus:
    """Return the status after what the run order, and the restore, say of the containers."""
    pod, status = view.pod, view.pod.status
    runs = fold.find(status.orders, "run")
    if not runs:
        return status
    run = runs[0]
    if run.state == "exited" and run.final is not None:
        return _exited(pod, run, now)
    if run.state not in ("started", "ready"):
        return replace(status, phase="Pending") if status.phase == "Unknown" else status
    is_restored = view.restore is not None and view.restore.status.state is Restore.RESTORED
    is_ready = is_restored if source_of(pod) else run.state == "ready"
    up = replace(
        status,
        phase="Running",
        reason="",
        message="",
        container_statuses=[
            replace(
                found,
                state="running",
                ready=is_ready,
                started_at=found.started_at or conditions.timestamp(now),
            )
            for found in status.container_statuses
        ],
    )
    if not is_ready and source_of(pod):
        return up
    if not is_ready:
        message = (
            "the worker runs and has not said that it is ready: it calls Worker.ready() once it is "
            "warm, or writes ready-for-snapshot"
        )
        row = ("Ready", False, "WorkerStarting", message)
        return replace(up, conditions=conditions.with_conditions(up.conditions, pod, now, row))
    if not is_restored or view.restore is None:
        row = ("Ready", True, "WorkerReady", "ready for a snapshot")
        return replace(up, conditions=conditions.with_conditions(up.conditions, pod, now, row))
    ready = condition(view.restore.status.conditions, "Ready")
    row = ("Ready", True, "Restored", ready.message if ready is not None else "restored")
    rows = conditions.with_conditions(up.conditions, pod, now, row)
    return replace(up, conditions=_with_restored(rows, pod, now, None))


def _exited(pod: Pod, run: OrderStatus, now: float) -> PodStatus:
    """Return the status after the containers have ended; each keeps its own exit code."""
    final = run.final
    code = final.exit_code if final is not None else None
    codes = final.exit_codes if final is not None else {}
    shown = "unknown" if code is None else str(code)
    message = (final.message if final else "") or f"the container ended with exit code {shown}"
    status = pod.status
    return replace(
        status,
        phase="Succeeded" if code == 0 else "Failed",
        reason="Completed" if code == 0 else "ContainerExited",
        message=message,
        container_statuses=[
            replace(
                found,
                state="terminated",
                ready=False,
                exit_code=codes.get(found.name) if codes else code,
            )
            for found in status.container_statuses
        ],
        conditions=conditions.with_conditions(
            status.conditions, pod, now, ("Ready", False, "ContainerExited", f"exit {shown}")
        ),
    )


# Ending.


def holds_devices(pod: Pod) -> bool:
    """Whether the pod's devices may still hold its memory."""
    return any(not _is_forgotten(pod, device) for device in pod.status.devices)


def _is_forgotten(pod: Pod, device: DeviceRef) -> bool:
    return any(fold.is_done(item) for item in _forgets(pod, device))


def _forgets(pod: Pod, device: DeviceRef) -> list[OrderStatus]:
    found = []
    for item in fold.find(pod.status.orders, "drop"):
        order = order_in(item.payload)
        if isinstance(order, DropOrder) and order.device == device.uuid:
            found.append(item)
    return found


def _freeing(view: PodView, now: float) -> Plan:
    """A finished pod gives back its devices: stop what may run, then forget its memory."""
    pod = view.pod
    status = replace(pod.status, orders=[*pod.status.orders, *_end_orders(view, now)])
    return owing_plan(pod, status, now)


def _has_stopped(pod: Pod) -> bool:
    stops = fold.find(pod.status.orders, "stop")
    return not fold.find(pod.status.orders, "run") or any(fold.is_done(item) for item in stops)


def _end_orders(view: PodView, now: float) -> list[OrderStatus]:
    """Return the next orders that end a pod.

    First the stop, until it has succeeded; then, when no restore loads there any more, for each
    device the drop. What fails is given again: the devices are not given away before.
    """
    pod, trace = view.pod, _trace(view)
    if not pod.status.node_name:
        return []
    if not _has_stopped(pod):
        has_stop = fold.find(pod.status.orders, "stop")
        return [] if has_stop else [ordering.stop(pod, trace, now)]
    if view.restore is not None and is_reading(view.restore):
        return []
    return [
        ordering.forget(pod, device, trace, now)
        for device in pod.status.devices
        if not _forgets(pod, device)
    ]


def _deletion(view: PodView, now: float) -> Plan:
    """End a pod. It stays until its processes have ended and its devices are free."""
    pod, restore = view.pod, view.restore
    owed = _end_orders(view, now)
    if owed:
        return owing_plan(pod, replace(pod.status, orders=[*pod.status.orders, *owed]), now)
    if not _has_stopped(pod) or holds_devices(pod):
        return owing_plan(pod, pod.status, now)
    if restore is not None:
        is_going = (
            restore.metadata.deletion_timestamp or restore.status.state not in RESTORE.terminal()
        )
        return Plan() if is_going else Plan((Delete(restore),))
    return Plan((Finalize(pod),))
