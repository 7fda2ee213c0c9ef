"""The state of an object with its reasons, the phases of its work, and its parts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal, NamedTuple

from snapshot_api import views
from snapshot_api.facts import UNKNOWN_ARTIFACTS, Job, Node, Pod
from snapshot_api.kinds import AnyObject
from snapshot_api.meta import Condition, OrderStatus, condition, is_true
from snapshot_api.v1alpha1.checkpoint import DynamoCheckpoint
from snapshot_api.v1alpha1.content import SnapshotContent
from snapshot_api.v1alpha1.restore import SnapshotRestore
from snapshot_api.v1alpha1.snapshot import Snapshot
from snapshot_api.views import is_answered, part_of
from snapshot_shared.errors import Failure
from snapshot_shared.orders import LoadOrder, UnreadyDriver, order_in
from snapshot_shared.transitions import Capture, Restore
from snapshotctl.domain import formats
from snapshotctl.views.related import RelatedObjects, is_restored

Word = Literal["fine", "under way", "waiting", "unknown", "failed", "going"]

_RESTORED = "nvidia.com/Restored"
"""Condition of a Pod: how the restore into it has ended."""
_FORGET_ATTEMPT = 1000
"""From here on attempts number the ways to end a pod, not tries."""
_CAPTURING = (Capture.PREPARING, Capture.STAGING, Capture.SEALING, Capture.ABORTING)
"""States of a capture that goes on by itself, also while no order is out."""
_RESTORING = (Restore.LOADING, Restore.COMMITTING, Restore.RESTORING, Restore.DROPPING)
"""The same of a restore."""
_NAMES = {
    "run": "start the worker",
    "prepare": "prepare: quiet and fenced",
    "dump": "process part",
    "save": "save",
    "seal": "seal",
    "release": "let the worker go on",
    "load": "load",
    "commit": "commit",
    "place": "place the process",
    "restore": "restore the process",
    "verify": "verify",
    "stop": "stop the worker",
    "drop": "forget memory",
    "abort": "abort",
    "delete": "delete",
}
WARM = "the worker warms up"


def state_text(value: DynamoCheckpoint | SnapshotContent | SnapshotRestore | Pod | Node) -> str:
    """Return the state of an object in a word, with its reason where it has one."""
    if isinstance(value, Node):
        is_unknown = is_true(value.status.conditions, UNKNOWN_ARTIFACTS)
        return ",".join([views.phase(value), *([UNKNOWN_ARTIFACTS] if is_unknown else ())])
    return _with_reason(views.phase(value), _reason(value))


def unready(drivers: Iterable[UnreadyDriver]) -> list[tuple[str, str]]:
    """Return why process drivers of a node cannot be used, and the next step, once a reason.

    That a node without NVIDIA's driver cannot use `criu+cuda` is left out.
    """
    by_reason: dict[tuple[str, str], list[str]] = {}
    for each in drivers:
        if each.driver != "criu+cuda" or each.why.values.get("found") != "none":
            by_reason.setdefault((each.why.message, each.why.next_step), []).append(each.driver)
    return [
        (f"cannot use the process driver {' or '.join(names)}: {message}", step)
        for (message, step), names in by_reason.items()
    ]


def _reason(value: DynamoCheckpoint | SnapshotContent | SnapshotRestore | Pod) -> str:
    match value:
        case DynamoCheckpoint():
            return _checkpoint_reason(value)
        case SnapshotContent():
            return "Quarantined" if is_true(value.status.conditions, "Quarantined") else ""
        case SnapshotRestore():
            return value.status.failure.reason if value.status.failure else ""
        case Pod():
            return value.status.reason


def _with_reason(state: str, reason: str) -> str:
    return f"{state} ({reason})" if reason else state


def _checkpoint_reason(checkpoint: DynamoCheckpoint) -> str:
    """Return why a checkpoint failed, why its artifact may not be used, or what it shares."""
    status = checkpoint.status
    ready = condition(status.conditions, "Ready")
    is_ended = status.phase in ("Ready", "Failed")
    if is_ended and ready is not None and ready.status == "False" and ready.reason:
        return ready.reason
    return f"shares {status.shares}" if status.shares else ""


def artifact_state(content: SnapshotContent) -> str:
    """Return `quarantined`, `verified`, `not verified` or `verifying`."""
    status = content.status
    if is_true(status.conditions, "Quarantined"):
        return "quarantined"
    if status.verifications > status.verified:
        return "verifying"
    return "verified" if is_true(status.conditions, "Verified") else "not verified"


def failure_of(found: AnyObject) -> str:
    """Return why an object has failed for good, or an empty string."""
    failed = condition(found.status.conditions, "Failed")
    if failed is not None and failed.status == "True":
        return reason_of(failed)
    match found:
        case DynamoCheckpoint():
            return found.status.message or "it failed" if found.status.phase == "Failed" else ""
        case SnapshotContent():
            failure = found.status.failure
            if found.status.capture is not Capture.FAILED:
                return ""
            return str(failure) if failure else "the capture failed"
        case SnapshotRestore():
            return _restore_failure(found)
        case Pod():
            return _pod_failure(found)
        case Job():
            return "its pod failed" if found.status.failed else ""
        case Snapshot() | Node():
            return ""


def _restore_failure(found: SnapshotRestore) -> str:
    if found.status.state is not Restore.FAILED:
        return ""
    return str(found.status.failure) if found.status.failure else "the restore failed"


def _pod_failure(pod: Pod) -> str:
    restored = condition(pod.status.conditions, _RESTORED)
    if restored is not None and restored.status == "False":
        return reason_of(restored)
    if pod.status.phase == "Failed":
        return ": ".join(filter(None, (pod.status.reason, pod.status.message))) or "the pod failed"
    return ""


def reason_of(held: Condition) -> str:
    """Return the reason of a condition, with its message where it has one."""
    return f"{held.reason}: {held.message}" if held.message else held.reason


def order_state(item: OrderStatus, step: str, now: float, *, is_on_stream: bool) -> str:
    """Return the state of an order: queued, accepted, working, or answered, and how.

    `step` is the step at which it is, where that is known. `now` is seconds since the epoch.
    """
    if is_answered(item):
        failure = item.final.failure if item.final else None
        return f"answered: {_with_reason(item.state, failure.reason if failure else '')}"
    late = "" if now < formats.seconds(item.deadline) else ", late"
    if step:
        return f"working: {step}{late}"
    if item.state == "ordered":
        return ("queued" if is_on_stream else "not on the stream") + late
    return "accepted" + late


class ObjectState(NamedTuple):
    """The state of an object, its reason, and since when (seconds since the epoch).

    `order` is the unanswered order that everything waits for, if there is one. `values` are those
    of a failure: needed and found.
    """

    word: Word
    since: float | None
    reason: str
    message: str
    next_step: str = ""
    values: Mapping[str, Any] = {}
    order: OrderStatus | None = None


def object_state(related: RelatedObjects) -> ObjectState:
    """Return the state of the root of related objects."""
    root = related.root
    if isinstance(root, Node):
        return _node(related)
    order = next(iter(unanswered(related)), None)
    if root.metadata.deletion_timestamp:
        return _going(root, order)
    if failure_of(root):
        return _failed(related)
    if isinstance(root, Pod) and root.status.phase == "Unknown":
        return ObjectState("unknown", None, root.status.reason, root.status.message, order=order)
    if quarantine := _quarantine(root):
        return quarantine
    held = _main_condition(root)
    if held is not None and held.status == "True":
        return ObjectState(
            "fine", formats.instant(held.last_transition_time), held.reason, held.message
        )
    if isinstance(root, Pod) and root.status.phase == "Succeeded":
        return ObjectState("fine", None, root.status.reason, root.status.message)
    return _open(related, held, order)


def unanswered(related: RelatedObjects) -> list[OrderStatus]:
    """Return the orders that are not answered, the oldest first."""
    return [item for _, item in related.orders if not is_answered(item)]


def _node(related: RelatedObjects) -> ObjectState:
    root = related.root
    held = condition(root.status.conditions, "Ready")
    order = next(iter(unanswered(related)), None)
    if held is None:
        return ObjectState("waiting", None, "PresenceMissing", "its presence was never seen")
    since = formats.instant(held.last_transition_time)
    word: Word = "fine" if held.status == "True" else "failed"
    return ObjectState(word, since, held.reason, held.message, order=order)


def _main_condition(value: AnyObject) -> Condition | None:
    kind = "Complete" if isinstance(value, Job) else "Ready"
    return condition(value.status.conditions, kind)


def _quarantine(value: AnyObject) -> ObjectState | None:
    """Return the state of an artifact that was captured and found damaged later, or None."""
    ready = condition(value.status.conditions, "Ready")
    is_captured = (isinstance(value, DynamoCheckpoint) and value.status.phase == "Ready") or (
        isinstance(value, Snapshot | SnapshotContent)
        and ready is not None
        and ready.message.startswith("quarantined: ")
    )
    if not is_captured or ready is None or ready.status != "False":
        return None
    since = formats.instant(ready.last_transition_time)
    return ObjectState("failed", since, ready.reason, ready.message)


def _failed(related: RelatedObjects) -> ObjectState:
    """Return the failure that the service reported, if it is kept; else that of the conditions."""
    root = related.root
    held = condition(root.status.conditions, "Failed") or condition(root.status.conditions, "Ready")
    reason, message, since = _condition_failure(root, held)
    # Conditions repeat the reason from the object where it happened up to the root.
    failure = next((f for f in _failures(related) if not reason or f.reason == reason), None)
    if failure is None:
        plain, _, step = message.partition(". Next: ")
        return ObjectState("failed", since, reason, plain, step)
    return ObjectState(
        "failed", since, failure.reason, failure.message, failure.next_step, failure.values
    )


def _condition_failure(root: AnyObject, held: Condition | None) -> tuple[str, str, float | None]:
    since = formats.instant(held.last_transition_time) if held else None
    if isinstance(root, Pod) and root.status.reason and (not held or held.type != "Failed"):
        return root.status.reason, root.status.message, since
    if held is None:
        return "", failure_of(root), since
    return held.reason, held.message, since


def _failures(related: RelatedObjects) -> Iterable[Failure]:
    for value in related.members:
        if isinstance(value, SnapshotContent | SnapshotRestore) and value.status.failure:
            yield value.status.failure
    for _, item in related.orders:
        if item.final is not None and item.final.failure is not None:
            yield item.final.failure


def _going(root: AnyObject, order: OrderStatus | None) -> ObjectState:
    held = condition(root.status.conditions, "Deleting")
    since = formats.instant(root.metadata.deletion_timestamp or "")
    if held is not None:
        return ObjectState("going", since, held.reason, held.message, order=order)
    return ObjectState("going", since, "", "it is being deleted", order=order)


def _open(
    related: RelatedObjects, held: Condition | None, order: OrderStatus | None
) -> ObjectState:
    """Return the state of what is neither done nor failed."""
    reason, message, since = "", "nothing was begun yet", None
    # The most specific reason first: no node, then the restore, then the object itself.
    for found in (_waits(related), _restore_waits(related), held):
        if found is not None:
            reason, message = found.reason, found.message
            since = formats.instant(found.last_transition_time)
            break
    if order is not None:
        ordered_at = order.ordered_at.timestamp()
        return ObjectState("under way", ordered_at, reason, message, order=order)
    return ObjectState("under way" if _is_begun(related) else "waiting", since, reason, message)


def _is_begun(related: RelatedObjects) -> bool:
    """Whether the capture or the restore goes on by itself."""
    if isinstance(related.root, Pod | SnapshotRestore):
        return related.restore is not None and related.restore.status.state in _RESTORING
    return related.content is not None and related.content.status.capture in _CAPTURING


def _restore_waits(related: RelatedObjects) -> Condition | None:
    """Return the main condition of the restore of a pod while it is not true."""
    held = _main_condition(related.restore) if related.restore is not None else None
    return held if held is not None and held.status != "True" else None


def _waits(related: RelatedObjects) -> Condition | None:
    """Return why no node was found for the pod, or None."""
    for value in related.members:
        if isinstance(value, Pod):
            held = condition(value.status.conditions, "PodScheduled")
            if held is not None and held.status == "False":
                return held
    return None


class TimedPhase(NamedTuple):
    """One phase. Times are seconds since the epoch; `ended` is 0 while it goes on."""

    key: tuple[str, int]
    name: str
    where: str
    began: float
    ended: float
    failure: str = ""

    def line(self) -> str:
        """Return the phase as one line: its beginning while it goes on, else how long it took."""
        if not self.ended:
            return f"{formats.clock(self.began):<12}  {self.name:<28} {self.where}".rstrip()
        took = formats.span_time(self.ended - self.began)
        tail = f"failed: {self.failure}" if self.failure else "done"
        return formats.plain(f"{formats.clock(self.ended):<12}  {self.name:<28} {took:>8}  {tail}")


def phases(related: RelatedObjects) -> list[TimedPhase]:
    """Return the phases of a capture or a restore in the order in which they began.

    Those in which the pod of a capture was once restored are left out.
    """
    found = [_order(item) for value, item in related.orders if not _is_other(related, value)]
    pods = [v for v in related.primary if isinstance(v, Pod) and not _is_other(related, v)]
    prepares = [item for _, item in related.orders if item.verb == "prepare"]
    prepared = min((formats.seconds(item.ordered_at) for item in prepares), default=0.0)
    found += [phase for pod in pods if (phase := _warming(pod, prepared)) is not None]
    return sorted(found, key=lambda phase: phase.began)


def _is_other(related: RelatedObjects, value: AnyObject) -> bool:
    is_restore = isinstance(related.root, Pod | SnapshotRestore)
    return not is_restore and isinstance(value, Pod) and is_restored(value)


def _order(item: OrderStatus) -> TimedPhase:
    name = f"{_NAMES.get(item.verb, item.verb)} {part_of(item.order)}".rstrip()
    failure = item.final.failure if item.final else None
    is_lost = item.state == "lost"
    why = f"{failure.reason}: {failure.message}" if failure else "NodeLost" if is_lost else ""
    # That a worker has ended says nothing of its start.
    ended = formats.seconds(item.ended_at) if item.final is not None or is_lost else 0.0
    where = f"{item.service}@{item.node}"
    began = formats.seconds(item.ordered_at)
    return TimedPhase(
        (item.order, item.attempt), name + again(item.attempt), where, began, ended, why
    )


def again(attempt: int) -> str:
    """Return ` (attempt 2)` for what was tried before, or an empty string."""
    return f" (attempt {attempt})" if 1 < attempt < _FORGET_ATTEMPT else ""


def _warming(pod: Pod, prepared: float) -> TimedPhase | None:
    """Return the phase from the start of the processes until the pod is Ready.

    `prepared` is when its capture began, or 0. A worker that was captured or has ended was warm
    before; what became of it later, such as the loss of its node, says nothing of its start.
    """
    run = next((item for item in pod.status.orders if item.verb == "run"), None)
    if run is None or run.ended_at is None or is_restored(pod):
        return None
    began = run.ended_at.timestamp()
    held = condition(pod.status.conditions, "Ready")
    since = formats.instant(held.last_transition_time) if held and held.status == "True" else None
    # Conditions have whole seconds, orders have not.
    ended = max(since or prepared, began) if since is not None or prepared else 0.0
    why = ""
    if not ended and run.state == "ready":
        return None  # When it became warm is not kept.
    if not ended and pod.status.phase == "Failed":
        at = formats.instant(held.last_transition_time) if held else None
        ended, why = max(at or 0.0, began), pod.status.message or pod.status.reason
    return TimedPhase((pod.metadata.uid, 0), WARM, f"on {pod.status.node_name}", began, ended, why)


def planned_parts(related: RelatedObjects) -> tuple[str, dict[str, int]] | None:
    """Return the uid of the object whose parts move, and their bytes by part, once fixed."""
    owner = _mover(related)
    if isinstance(owner, SnapshotRestore):
        loads = [order_in(item.payload) for item in owner.status.orders if item.verb == "load"]
        parts = {load.part: load.bytes for load in loads if isinstance(load, LoadOrder)}
        return (owner.metadata.uid, parts) if parts else None
    if owner is None or not owner.status.vector:
        return None
    plan = {e.part: e.layout.bytes if e.layout else 0 for e in owner.status.vector}
    return owner.metadata.uid, plan


def complete_parts(related: RelatedObjects) -> dict[str, int]:
    """Return the bytes of each part that is complete: staged in a capture, loaded in a restore."""
    owner = _mover(related)
    verbs = ("load", "place", "restore") if isinstance(owner, SnapshotRestore) else ("dump", "save")
    found = {}
    for item in owner.status.orders if owner is not None else ():
        final = item.final
        if item.verb not in verbs or final is None or final.failure is not None:
            continue
        name = final.part.part if final.part else part_of(item.order) or "process"
        found[name] = final.part.bytes if final.part else final.bytes
    return found


def _mover(related: RelatedObjects) -> SnapshotRestore | SnapshotContent | None:
    """Return the object whose orders move parts: the restore of a pod, or else the content."""
    if isinstance(related.root, Pod | SnapshotRestore):
        return related.restore
    return related.content
