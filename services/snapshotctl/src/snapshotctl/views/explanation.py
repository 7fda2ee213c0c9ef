"""What `snapshotctl explain` prints of an object: its request, its state, the next steps, logs."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from snapshot_api import figures, views
from snapshot_api.facts import Job, Node, NodeStatus, Pod, gpus_wanted
from snapshot_api.kinds import AnyObject, kind_of
from snapshot_api.meta import OrderStatus, is_true
from snapshot_api.v1alpha1.checkpoint import DynamoCheckpoint
from snapshot_api.v1alpha1.content import SnapshotContent
from snapshot_api.v1alpha1.restore import SnapshotRestore
from snapshot_api.v1alpha1.snapshot import ArtifactSource, Snapshot
from snapshot_api.well_known import RESTORE_FROM
from snapshot_shared.ids import NodeName
from snapshot_shared.orders import Presence, Progress
from snapshot_shared.reasons import REASONS
from snapshotctl.domain import formats
from snapshotctl.views.related import RelatedObjects, reference
from snapshotctl.views.state import ObjectState, Word, failure_of, unanswered, unready

_HEADLINES: dict[Word, str] = {
    "fine": "is well",
    "under way": "is under way",
    "waiting": "waits",
    "unknown": "may or may not run",
    "failed": "has failed",
    "going": "is being deleted",
}
_ABSENT = "it does not run, it hangs, or its network is down"
_PLACES = re.compile(
    r"(?:\b(pod|job|dynamocheckpoint|snapshot|snapcontent|node|KIND)([ /]))?\bNAME\b"
)
_KINDS = {"snapcontent": "snapshotcontent"}
MAX_LINES = 12
_ORDERED = re.compile(r'"order_id": ?"')
"""A line of a service in the work on an order, which names its object."""
_LOUD = ("WARNING", "ERROR", "CRITICAL")


def asked(value: AnyObject) -> str:
    """Return in one sentence what was requested with an object."""
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
            gpus = gpus_wanted(value.spec)
            # Claims and other resources may bring devices that are not counted here.
            place = " of ".join(filter(None, (_gpus(gpus) if gpus else "", _where(value))))
            return f"{what} on {place}" if place else what
        case SnapshotRestore():
            target = value.spec.pod_ref
            return f"restore container {target.container} of pod {target.name} from " + (
                value.spec.source
            )
        case Job():
            return "run one pod to its end"
        case Node():
            # In a cluster the kubelet has the devices.
            gpus = len(value.status.devices)
            what = f"serve {_gpus(gpus)}" if gpus else "run workers"
            return what + ("; no new pods" if value.spec.unschedulable else "")


def _artifact(source: ArtifactSource | None) -> str:
    return f"artifact {source.content_uid}/gen-{source.generation}" if source else "an artifact"


def _gpus(count: int) -> str:
    return formats.counted(count, "GPU")


def _where(pod: Pod) -> str:
    if pod.spec.node_name:
        return pod.spec.node_name
    selector = ", ".join(f"{key}={value}" for key, value in pod.spec.node_selector.items())
    return f"a node with {selector}" if selector else ""


def headline(related: RelatedObjects, found: ObjectState) -> str:
    """Return the state of an object in one line."""
    head = _HEADLINES[found.word]
    if found.word == "failed" and isinstance(related.root, Node):
        head = "is lost" if is_true(related.root.status.conditions, "Lost") else "is not there"
    elif found.word == "failed" and not failure_of(related.root):
        head = "is damaged"
    why = f": {found.reason}" if found.reason else ""
    return f"{reference(related.root)} {head}{why}"


def now_lines(
    related: RelatedObjects,
    found: ObjectState,
    presence: Mapping[NodeName, Presence],
    progress: Progress | None,
    silent: Sequence[str],
    now: float,
) -> list[str]:
    """Return the state of an object line by line: since when, and what it waits for.

    `silent` are the services (`agent@node-1`) that do not answer; `now` is seconds since the
    epoch.
    """
    lines = []
    if found.message:
        lines.append(formats.plain(found.message))
    lines += [f"{name}: {formats.plain(str(value))}" for name, value in found.values.items()]
    if numbers := numbers_of(related):
        lines.append(numbers)
    if found.since is not None and found.order is None:
        lines.append(
            f"since {formats.stamp(found.since)[:19]}Z, {formats.age(now - found.since)} ago"
        )
    if found.order is not None:
        lines += _stuck(found.order, progress, now)
        lines += (
            [] if isinstance(related.root, Node) else [_last_seen(found.order.node, presence, now)]
        )
    if isinstance(related.root, Node):
        lines += _of_node(related, presence, now)
    return lines + [f"{name} does not answer: {_ABSENT}" for name in silent]


def numbers_of(related: RelatedObjects) -> str:
    """Return what a capture or a restore has cost, in a sentence; empty where it is not over."""
    if isinstance(related.root, Node | Job):
        return ""
    if isinstance(related.root, Pod | SnapshotRestore):
        return figures.restore_text(related.restore.status) if related.restore else ""
    return figures.capture_text(related.content) if related.content else ""


def _stuck(order: OrderStatus, progress: Progress | None, now: float) -> list[str]:
    where = f"{order.service}@{order.node}"
    taken = "has not accepted it" if order.state == "ordered" else f"reported {order.state}"
    left = order.deadline.timestamp() - now
    limit = f"its deadline is in {formats.age(left)}" if left > 0 else "its deadline has passed"
    lines = [
        f"waits for {where} to end {order.order} (attempt {order.attempt})",
        f"ordered {formats.age(now - order.ordered_at.timestamp())} ago; {where} {taken}; {limit}",
    ]
    if progress is not None and progress.attempt == order.attempt and progress.awaits:
        lines.append(
            f"step {progress.step} waits for the worker: {formats.plain(progress.awaits)}, "
            f"{formats.age(now - progress.at)} ago"
        )
    elif progress is not None and progress.attempt == order.attempt:
        done = formats.size(progress.done)
        share = f"{done} of {formats.size(progress.total)}" if progress.total else done
        lasted = progress.at - order.ordered_at.timestamp()
        speed = figures.speed(progress.done, progress.total, lasted)
        share = ", ".join(filter(None, (share, speed)))
        lines.append(
            f"last progress {formats.age(now - progress.at)} ago: {progress.part}, step "
            f"{progress.step}, {share}"
        )
    return lines


def _last_seen(node: str, presence: Mapping[NodeName, Presence], now: float) -> str:
    seen = presence.get(NodeName(node))
    if seen is None:
        return f"{node} is silent: its agent does not run, or its network is down"
    return f"{node} was last seen {formats.age(now - seen.at)} ago"


def _of_node(
    related: RelatedObjects, presence: Mapping[NodeName, Presence], now: float
) -> list[str]:
    pods = [v for v in related.members if isinstance(v, Pod) and v.status.node_name]
    unfinished = ("Pending", "Running", "Unknown")
    running = [pod.metadata.name for pod in pods if pod.status.phase in unfinished]
    waiting = unanswered(related)
    names = ": " + ", ".join(sorted(running)) if running else ""
    orders = ": " + ", ".join(f"{i.order} ({i.state})" for i in waiting) if waiting else ""
    status = related.root.status if isinstance(related.root, Node) else NodeStatus()
    drivers = ", ".join(status.drivers) or "none"
    criu = f", CRIU {status.criu}" if status.criu else ""
    return [
        f"process drivers: {drivers}{criu}",
        *(
            f"it {formats.plain(f'{why}. Next: {step}' if step else why)}"
            for why, step in unready(status.unready)
        ),
        _last_seen(related.root.metadata.name, presence, now),
        f"{formats.counted(len(running), 'pod') if running else 'no pod'} there{names}",
        f"{formats.counted(len(waiting), 'order') if waiting else 'no order'} not answered{orders}",
    ]


def asked_services(related: RelatedObjects, found: ObjectState) -> list[tuple[str, str]]:
    """Return the services that are waited for, each as node and kind; both of a node."""
    if isinstance(related.root, Node):
        return [(related.root.metadata.name, "agent"), (related.root.metadata.name, "gms")]
    return [(found.order.node, found.order.service)] if found.order is not None else []


def held_back(asked: Iterable[tuple[str, str]], paused: Collection[str]) -> list[views.HeldBack]:
    """Return which of some services, each as node and kind, get no orders."""
    services = list(asked)
    nodes = dict.fromkeys(node for node, _ in services)
    return [
        each
        for node in nodes
        for each in views.held_back(node, paused)
        if (node, each.service) in services
    ]


def advice(
    related: RelatedObjects,
    found: ObjectState,
    silent: Sequence[str] = (),
    held: Sequence[views.HeldBack] = (),
) -> list[str]:
    """Return the next steps: that of the failure, then the fix of its reason.

    Where a service does not answer, or gets no orders, to mend that is the only one.
    """
    if silent:
        again = f"snapshotctl sim restart {silent[0].partition('@')[2]}"
        return [f"Start {' and '.join(silent)} again; in a local cluster: `{again}`."]
    if held:
        return [f"Let it get orders again: `{each.next_step}`." for each in held]
    lines = [formats.plain(found.next_step)] if found.next_step else []
    # What is not found may be a program or a file: then only its own next step fits.
    is_told = found.reason == "NotFound" and lines
    if (reason := REASONS.get(found.reason)) and not is_told:
        fix = filled(reason.fix, related)
        lines += [fix] if fix not in lines else []
    if not lines:
        lines.append("Nothing is to be done." if found.word == "fine" else "Wait for it.")
    return lines


def pointing_up(text: str, root: AnyObject) -> str:
    """Return advice of an explanation that is read already without the command that shows it."""
    name, kind = re.escape(root.metadata.name), kind_of(root).name.lower()
    shown = re.sub(rf"`snapshotctl explain (?:{kind}/)?{name}`", "the text above", text)
    return shown[:1].upper() + shown[1:]


def filled(text: str, related: RelatedObjects) -> str:
    """Return a fix with the names of related objects for NAME, POD and NODE."""
    names = {
        kind_of(value).name.lower(): value.metadata.name for value in reversed(related.members)
    }
    root = related.root.metadata.name
    nodes = [item.node for _, item in related.orders]

    def place(match: re.Match[str]) -> str:
        kind, between = match[1], match[2]
        if kind is None:
            return root
        if kind == "KIND":
            return f"{kind_of(related.root).name.lower()}{between}{root}"
        name = names.get(_KINDS.get(kind, kind))
        return f"{kind}{between}{name or 'NAME'}"

    if source := _source(related.root):
        text = re.sub(r"\b(artifacts show|restore|verify) NAME\b", rf"\1 {source}", text)
    text = _PLACES.sub(place, text)
    pod = names.get("pod")
    text = re.sub(r"\bPOD\b", pod, text) if pod else text
    return re.sub(r"\bNODE\b", nodes[-1], text) if nodes else text


def _source(root: AnyObject) -> str:
    """Return what an object is restored from, or an empty string."""
    if isinstance(root, SnapshotRestore):
        return root.spec.source
    return root.metadata.annotations.get(RESTORE_FROM, "") if isinstance(root, Pod) else ""


def order_ids(related: RelatedObjects) -> Sequence[str]:
    """Return the uids by which logs and traces name the primary objects."""
    found = [value.metadata.uid for value in related.primary if not isinstance(value, Node)]
    return [uid for uid in found if uid]


class LogLine(NamedTuple):
    """One line of a log: who wrote it, when (RFC 3339, or empty), and what."""

    program: str
    at: str
    level: str
    text: str


def parse_log_line(program: str, line: str) -> LogLine:
    """Return a line of a service, which writes JSON; anything else stays as it is."""
    try:
        found: Any = msgspec.json.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError):
        found = None
    if not isinstance(found, dict):
        # The indentation of a traceback says what belongs to what.
        indent = " " * (len(line) - len(line.lstrip(" ")))
        return LogLine(program, "", "", indent + formats.plain(line))
    text = str(found.get("message", ""))
    trouble = str(found.get("traceback", "")).rstrip().rpartition("\n")[2]
    shown = f"{text} [{trouble}]" if trouble else text
    at, level = str(found.get("at", "")), str(found.get("level", ""))
    return LogLine(program, at, level, formats.plain(shown))


def relevant_lines(
    lines: Iterable[tuple[str, str]],
    ids: Sequence[str],
    programs: Sequence[str],
    since: str,
    *,
    traces: Sequence[str] = (),
) -> list[LogLine]:
    """Return the last lines that matter, in the order of their times.

    `lines` are programs with raw lines. A line matters when it names one of the ids, or when it
    names one of the traces or is a warning or worse, of one of the programs, not older than
    `since` (RFC 3339), and not of the order of another object, where there are ids: what was
    applied together is in one trace.
    """
    chosen = []
    for program, raw in lines:
        if any(wanted in raw for wanted in ids):
            chosen.append(parse_log_line(program, raw))
            continue
        if ids and _ORDERED.search(raw):
            continue
        line = parse_log_line(program, raw)
        is_loud = program in programs and line.level in _LOUD and line.at >= since
        if is_loud or any(wanted in raw for wanted in traces):
            chosen.append(line)
    return sorted(chosen, key=lambda line: line.at)[-MAX_LINES:]
