"""The story of an object in plain words: what was asked, where it stands, what to do."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from snapshot_shared.errors import Failure
from snapshot_shared.ids import NodeName
from snapshot_shared.objects import (
    RESTORE_FROM,
    AnyObject,
    ArtifactSource,
    Condition,
    DynamoCheckpoint,
    Job,
    Node,
    OrderStatus,
    Pod,
    Snapshot,
    SnapshotContent,
    SnapshotRestore,
    condition,
    gpus_wanted,
    is_true,
    kind_of,
)
from snapshot_shared.orders import Presence, Progress
from snapshot_shared.reasons import REASONS
from snapshot_shared.transitions import Capture, Restore
from snapshotctl.domain import formats
from snapshotctl.domain.history import stamp
from snapshotctl.domain.kin import Kin, reference
from snapshotctl.domain.waiting import failure_of

Word = Literal["fine", "under way", "waiting", "unknown", "failed", "going"]

_HEADLINES: dict[Word, str] = {
    "fine": "is well",
    "under way": "is under way",
    "waiting": "waits",
    "unknown": "may or may not run",
    "failed": "has failed",
    "going": "is being deleted",
}
_BETWEEN = (Capture.PREPARING, Capture.STAGING, Capture.SEALING, Capture.ABORTING)
"""Where a capture goes on by itself, also while no order is out."""
_RESTORING = (Restore.LOADING, Restore.COMMITTING, Restore.RESTORING, Restore.DROPPING)
"""The same of a restore."""

_ABSENT = "it does not run, it hangs, or its network is down"
_PLACES = re.compile(
    r"(?:\b(pod|job|dynamocheckpoint|snapshot|snapcontent|node|KIND)([ /]))?\bNAME\b"
)
_KINDS = {"snapcontent": "snapshotcontent"}


class Standing(NamedTuple):
    """How an object stands, why, and since when (seconds since the epoch).

    `order` is the unanswered order that everything waits for, if there is one. `values` are the
    facts of a failure: needed and found.
    """

    word: Word
    since: float | None
    reason: str
    message: str
    next_step: str = ""
    values: Mapping[str, Any] = {}
    order: OrderStatus | None = None


def asked(value: AnyObject) -> str:
    """Say in one sentence what somebody wanted with an object."""
    match value:
        case DynamoCheckpoint():
            job = value.spec.job
            gpus = gpus_wanted(job.pod_template_spec.spec)
            after = "goes on" if job.source_policy == "Resume" else "ends"
            return (
                f"start a worker of {value.spec.identity.model} on {_gpus(gpus)}, capture it once "
                f"it is warm; then it {after}"
            )
        case Snapshot():
            source = value.spec.source.pod_ref
            after = "goes on" if value.spec.source_policy == "Resume" else "ends"
            if source is None:
                return f"import {_artifact(value.spec.source.artifact)}"
            return f"capture container {source.containers[0]} of pod {source.name}; then it {after}"
        case SnapshotContent():
            origin, owner = value.spec.source, value.spec.snapshot_ref
            pod, end = origin.pod_ref, f"for snapshot {owner.namespace}/{owner.name}"
            if pod is None:
                return f"import {_artifact(origin.artifact)} {end}"
            return f"capture pod {origin.namespace}/{pod.name} on {origin.node_name} {end}"
        case Pod():
            wanted = value.metadata.annotations.get(RESTORE_FROM)
            what = f"restore a worker from {wanted}" if wanted else "run a worker"
            return f"{what} on {_gpus(gpus_wanted(value.spec))}{_where(value)}"
        case SnapshotRestore():
            target = value.spec.pod_ref
            return f"restore container {target.container} of pod {target.name} from " + (
                value.spec.source
            )
        case Job():
            return "run one pod to its end"
        case Node():
            gpus = len(value.status.devices)
            return f"serve {_gpus(gpus)}" + ("; no new pods" if value.spec.unschedulable else "")


def _artifact(source: ArtifactSource | None) -> str:
    return f"artifact {source.content_uid}/gen-{source.generation}" if source else "an artifact"


def _gpus(count: int) -> str:
    return "1 GPU" if count == 1 else f"{count} GPUs"


def _where(pod: Pod) -> str:
    if pod.spec.node_name:
        return f" of {pod.spec.node_name}"
    selector = ", ".join(f"{key}={value}" for key, value in pod.spec.node_selector.items())
    return f" of a node with {selector}" if selector else ""


def standing(kin: Kin) -> Standing:
    """Say how the root of a story stands."""
    root = kin.root
    if isinstance(root, Node):
        return _node(kin)
    order = next(iter(_unanswered(kin)), None)
    if root.metadata.deletion_timestamp:
        return _going(root, order)
    if failure_of(root):
        return _failed(kin)
    if isinstance(root, Pod) and root.status.phase == "Unknown":
        return Standing("unknown", None, root.status.reason, root.status.message, order=order)
    if quarantine := _quarantine(root):
        return quarantine
    held = _main_condition(root)
    if held is not None and held.status == "True":
        return Standing(
            "fine", formats.instant(held.last_transition_time), held.reason, held.message
        )
    if isinstance(root, Pod) and root.status.phase == "Succeeded":
        return Standing("fine", None, root.status.reason, root.status.message)
    return _open(kin, held, order)


def _unanswered(kin: Kin) -> list[OrderStatus]:
    """List the orders that are still owed an answer, the oldest first."""
    return [item for _, item in kin.orders if item.final is None and item.state != "lost"]


def _node(kin: Kin) -> Standing:
    root = kin.root
    held = condition(root.status.conditions, "Ready")
    order = next(iter(_unanswered(kin)), None)
    if held is None:
        return Standing("waiting", None, "PresenceMissing", "nothing was heard of it yet")
    since = formats.instant(held.last_transition_time)
    word: Word = "fine" if held.status == "True" else "failed"
    return Standing(word, since, held.reason, held.message, order=order)


def _main_condition(value: AnyObject) -> Condition | None:
    kind = "Complete" if isinstance(value, Job) else "Ready"
    return condition(value.status.conditions, kind)


def _quarantine(value: AnyObject) -> Standing | None:
    """An artifact that was captured and found damaged later."""
    ready = condition(value.status.conditions, "Ready")
    is_captured = (isinstance(value, DynamoCheckpoint) and value.status.phase == "Ready") or (
        isinstance(value, Snapshot | SnapshotContent)
        and ready is not None
        and ready.message.startswith("quarantined: ")
    )
    if not is_captured or ready is None or ready.status != "False":
        return None
    since = formats.instant(ready.last_transition_time)
    return Standing("failed", since, ready.reason, ready.message)


def _failed(kin: Kin) -> Standing:
    """Take the failure with the most to tell: the value that the service reported, if it is kept.

    The conditions repeat its reason all the way up from the object where it happened.
    """
    root = kin.root
    held = condition(root.status.conditions, "Failed") or condition(root.status.conditions, "Ready")
    reason, message, since = _told(root, held)
    failure = next((f for f in _failures(kin) if not reason or f.reason == reason), None)
    if failure is None:
        plain, _, step = message.partition(". Next: ")
        return Standing("failed", since, reason, plain, step)
    return Standing(
        "failed", since, failure.reason, failure.message, failure.next_step, failure.values
    )


def _told(root: AnyObject, held: Condition | None) -> tuple[str, str, float | None]:
    since = formats.instant(held.last_transition_time) if held else None
    if isinstance(root, Pod) and root.status.reason and (not held or held.type != "Failed"):
        return root.status.reason, root.status.message, since
    if held is None:
        return "", failure_of(root), since
    return held.reason, held.message, since


def _failures(kin: Kin) -> Iterable[Failure]:
    for value in kin.members:
        if isinstance(value, SnapshotContent | SnapshotRestore) and value.status.failure:
            yield value.status.failure
    for _, item in kin.orders:
        if item.final is not None and item.final.failure is not None:
            yield item.final.failure


def _going(root: AnyObject, order: OrderStatus | None) -> Standing:
    held = condition(root.status.conditions, "Deleting")
    since = formats.instant(root.metadata.deletion_timestamp or "")
    if held is not None:
        return Standing("going", since, held.reason, held.message, order=order)
    return Standing("going", since, "", "it is being deleted", order=order)


def _open(kin: Kin, held: Condition | None, order: OrderStatus | None) -> Standing:
    """Neither done nor failed: an order is out, or something has to come first."""
    reason, message, since = "", "nothing was begun yet", None
    for found in (_waits(kin), _restore_waits(kin), held):
        if found is not None:
            reason, message = found.reason, found.message
            since = formats.instant(found.last_transition_time)
            break
    if order is not None:
        ordered_at = order.ordered_at.timestamp()
        return Standing("under way", ordered_at, reason, message, order=order)
    return Standing("under way" if _is_begun(kin) else "waiting", since, reason, message)


def _is_begun(kin: Kin) -> bool:
    """Whether the capture or the restore of a story goes on by itself."""
    if isinstance(kin.root, Pod | SnapshotRestore):
        return kin.restore is not None and kin.restore.status.state in _RESTORING
    return kin.content is not None and kin.content.status.capture in _BETWEEN


def _restore_waits(kin: Kin) -> Condition | None:
    """Return what the restore of a pod says of itself while it is not done."""
    held = _main_condition(kin.restore) if kin.restore is not None else None
    return held if held is not None and held.status != "True" else None


def _waits(kin: Kin) -> Condition | None:
    """What the pod of the story waits for, when no node was found for it."""
    for value in kin.members:
        if isinstance(value, Pod):
            held = condition(value.status.conditions, "PodScheduled")
            if held is not None and held.status == "False":
                return held
    return None


def headline(kin: Kin, found: Standing) -> str:
    """Say in one line how it stands."""
    head = _HEADLINES[found.word]
    if found.word == "failed" and isinstance(kin.root, Node):
        head = "is lost" if is_true(kin.root.status.conditions, "Lost") else "is not there"
    elif found.word == "failed" and not failure_of(kin.root):
        head = "is damaged"
    why = f": {found.reason}" if found.reason else ""
    return f"{reference(kin.root)} {head}{why}"


def now_lines(
    kin: Kin,
    found: Standing,
    presence: Mapping[NodeName, Presence],
    progress: Progress | None,
    silent: Sequence[str],
    now: float,
) -> list[str]:
    """Say where it stands now and since when; where it is stuck, on what.

    `silent` are the services (`agent@node-1`) that were asked just now and did not answer.
    """
    lines = []
    if found.message:
        lines.append(formats.plain(found.message))
    lines += [f"{name}: {formats.plain(str(value))}" for name, value in found.values.items()]
    if found.since is not None and found.order is None:
        lines.append(f"since {stamp(found.since)[:19]}Z, {formats.age(now - found.since)} ago")
    if found.order is not None:
        lines += _stuck(found.order, progress, now)
        lines += [] if isinstance(kin.root, Node) else [_heard(found.order.node, presence, now)]
    if isinstance(kin.root, Node):
        lines += _of_node(kin, presence, now)
    return lines + [f"{name} does not answer: {_ABSENT}" for name in silent]


def _stuck(order: OrderStatus, progress: Progress | None, now: float) -> list[str]:
    where = f"{order.service}@{order.node}"
    taken = "has not accepted it" if order.state == "ordered" else f"said {order.state}"
    left = order.deadline.timestamp() - now
    limit = f"its deadline is in {formats.age(left)}" if left > 0 else "its deadline has passed"
    lines = [
        f"waits for {where} to end {order.order} (attempt {order.attempt})",
        f"ordered {formats.age(now - order.ordered_at.timestamp())} ago; {where} {taken}; {limit}",
    ]
    if progress is not None and progress.attempt == order.attempt:
        done = formats.size(progress.done)
        share = f"{done} of {formats.size(progress.total)}" if progress.total else done
        lines.append(
            f"last heard {formats.age(now - progress.at)} ago: {progress.part}, step "
            f"{progress.step}, {share}"
        )
    return lines


def _heard(node: str, presence: Mapping[NodeName, Presence], now: float) -> str:
    seen = presence.get(NodeName(node))
    if seen is None:
        return f"nothing is heard of {node}: its agent does not run, or its network is down"
    return f"{node} was heard of {formats.age(now - seen.at)} ago"


def _of_node(kin: Kin, presence: Mapping[NodeName, Presence], now: float) -> list[str]:
    pods = [v for v in kin.members if isinstance(v, Pod) and v.status.node_name]
    unfinished = ("Pending", "Running", "Unknown")
    running = [pod.metadata.name for pod in pods if pod.status.phase in unfinished]
    waiting = _unanswered(kin)
    names = ", ".join(sorted(running)) or "none"
    orders = ", ".join(f"{item.order} ({item.state})" for item in waiting) or "none"
    return [
        _heard(kin.root.metadata.name, presence, now),
        f"{len(running)} pods there: {names}",
        f"{len(waiting)} orders not answered: {orders}",
    ]


def asked_services(kin: Kin, found: Standing) -> list[tuple[str, str]]:
    """Name the services that everything waits for, each by node and kind; of a node both."""
    if isinstance(kin.root, Node):
        return [(kin.root.metadata.name, "agent"), (kin.root.metadata.name, "gms")]
    return [(found.order.node, found.order.service)] if found.order is not None else []


def advice(kin: Kin, found: Standing, silent: Sequence[str] = ()) -> list[str]:
    """Say what to do: what the failure itself says, then what its reason always says.

    A service that does not answer comes before all that.
    """
    if silent:
        again = f"snapshotctl sim restart {silent[0].partition('@')[2]}"
        return [f"Start {' and '.join(silent)} again; in a local cluster: `{again}`."]
    lines = [formats.plain(found.next_step)] if found.next_step else []
    if reason := REASONS.get(found.reason):
        fix = filled(reason.fix, kin)
        lines += [fix] if fix not in lines else []
    if not lines:
        lines.append("Nothing is to be done." if found.word == "fine" else "Wait for it.")
    return lines


def filled(text: str, kin: Kin) -> str:
    """Put the names of a story where a fix has NAME, POD or NODE, so that it can be pasted."""
    names = {kind_of(value).name.lower(): value.metadata.name for value in reversed(kin.members)}
    root = kin.root.metadata.name
    nodes = [item.node for _, item in kin.orders]

    def place(match: re.Match[str]) -> str:
        kind, between = match[1], match[2]
        if kind is None:
            return root
        if kind == "KIND":
            return f"{kind_of(kin.root).name.lower()}{between}{root}"
        name = names.get(_KINDS.get(kind, kind))
        return f"{kind}{between}{name or 'NAME'}"

    if source := _source(kin.root):
        text = re.sub(r"\b(artifacts show|restore|verify) NAME\b", rf"\1 {source}", text)
    text = _PLACES.sub(place, text)
    pod = names.get("pod")
    text = re.sub(r"\bPOD\b", pod, text) if pod else text
    return re.sub(r"\bNODE\b", nodes[-1], text) if nodes else text


def _source(root: AnyObject) -> str:
    """Return what the root of a story is restored from, or an empty string."""
    if isinstance(root, SnapshotRestore):
        return root.spec.source
    return root.metadata.annotations.get(RESTORE_FROM, "") if isinstance(root, Pod) else ""


def order_ids(kin: Kin) -> Sequence[str]:
    """Give the ids under which logs and traces speak of a story."""
    found = [value.metadata.uid for value in kin.told if not isinstance(value, Node)]
    return [uid for uid in found if uid]
