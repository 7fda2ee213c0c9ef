"""What the page shows, as values: objects, presence and progress in, JSON for a browser out.

An object is reduced to an `Entry` when it changes, so that a view of thousands costs little. What
is shown is what the mirror shows: metadata, identity and status, never a spec with its environment.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any, Literal, NamedTuple

import msgspec
from msgspec.structs import replace

from snapshot_operator.core import fold
from snapshot_operator.core.plan import orders_of
from snapshot_operator.core.restore import ENDED
from snapshot_shared import subjects
from snapshot_shared.errors import Failure
from snapshot_shared.frames import DeviceStatus, StatusReply
from snapshot_shared.objects import (
    TRACEPARENT,
    AnyObject,
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
    is_true,
    kind_of,
)
from snapshot_shared.orders import (
    DeadLetter,
    LoadOrder,
    Presence,
    Progress,
    SaveOrder,
    order_in,
)
from snapshot_shared.spans import parse_traceparent
from snapshot_shared.transitions import Capture

MOST_OBJECTS = 200
MOST_ARTIFACTS = 100
MOST_NODES = 200
MOST_PROBLEMS = 20
"""How many of each are shown; the page says how many more there are."""

MOST_OWNERS = 8
"""A chain of owners that is longer goes in a circle."""

LETTER_SHOWN_S = 86400.0
"""How long a dead letter counts as a problem, in seconds; the stream keeps it longer."""

SHOWN_KINDS = ("DynamoCheckpoint", "Snapshot", "SnapshotContent", "Pod", "SnapshotRestore")
SLOT_VERBS = frozenset({"dump", "verify"})
"""The orders that take one of the slots of their agent."""

NEXT = ". Next: "
"""Parts what happened from what to do, in the message of a condition."""

State = Literal["ok", "busy", "waiting", "bad", "off"]


class GmsAnswer(StatusReply, frozen=True, kw_only=True):
    """What a GPU memory service answers when it is asked how it is."""

    version: str = ""


class OpenOrder(msgspec.Struct, frozen=True):
    """An order that is not answered yet; `since` is seconds since the epoch."""

    order: str
    verb: str
    attempt: int
    node: str
    since: float


class PartOrder(msgspec.Struct, frozen=True):
    """An order that moves a part of known size, in bytes, and whether it has ended."""

    order: str
    total: int
    ended: bool


class Artifact(msgspec.Struct, frozen=True):
    """A committed artifact. `state` is Quarantined, Verifying, Verified or Committed."""

    size: int
    generation: int
    parts: int
    readers: tuple[str, ...]
    state: str
    message: str
    snapshot: str


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """One object, reduced to what a view needs. `owners` are the uids of what led to it."""

    key: str
    kind: str
    namespace: str
    name: str
    uid: str
    version: str
    created: float | None
    phase: str
    state: State
    reason: str = ""
    message: str = ""
    next: str = ""
    since: float | None = None
    owners: tuple[str, ...] = ()
    trace: str = ""
    open: tuple[OpenOrder, ...] = ()
    parts: tuple[PartOrder, ...] = ()
    artifact: Artifact | None = None
    node: NodeFacts | None = None


class NodeFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What the store knows of a node."""

    version: str
    slots: int
    drivers: tuple[str, ...]
    devices: tuple[tuple[int, str, str, int], ...]


class Facts(NamedTuple):
    """All that a view is made of.

    `gms` has None for a service that did not answer. `dead` has, by node, how many dead letters
    there are and the newest. `bus` says in words why NATS cannot be used. `marks` counts what was
    heard of an owner's uid or of a trace. `now` is seconds since the epoch.
    """

    entries: Mapping[str, Entry]
    presence: Mapping[str, Presence] = {}
    gms: Mapping[str, GmsAnswer | None] = {}
    progress: Mapping[str, Progress] = {}
    dead: Mapping[str, tuple[int, DeadLetter]] = {}
    bus: str = ""
    marks: Mapping[str, int] = {}
    context: str = ""
    now: float = 0.0


LedTo = Mapping[str, Sequence[Entry]]
"""Entries by the uid of their owner."""


# One object.


def key_of(value: AnyObject) -> str:
    """Return the key of an object in the page's addresses: `<plural>/<namespace or ->/<name>`."""
    meta = value.metadata
    return f"{kind_of(value).plural}/{meta.namespace or '-'}/{meta.name}"


def entry_of(value: AnyObject, restore: SnapshotRestore | None = None) -> Entry:
    """Reduce an object. While `restore`, that of a pod, is under way, the pod is shown as it is."""
    meta, kind = value.metadata, kind_of(value)
    shown = restore if restore is not None and _is_under_way(value, restore) else value
    phase, state = _phase(shown)
    row = _telling(shown)
    failure = _failure(shown)
    message, _, following = (row.message if row else "").partition(NEXT)
    reason = failure.reason if failure else (row.reason if row else "")
    if state == "bad" and phase == "Ready":
        phase = f"Ready ({reason})"
    return Entry(
        key=key_of(value),
        kind=kind.name,
        namespace=meta.namespace or "",
        name=meta.name,
        uid=meta.uid,
        version=meta.resource_version,
        created=instant(meta.creation_timestamp),
        phase="Deleting" if meta.deletion_timestamp else phase,
        state="waiting" if meta.deletion_timestamp else state,
        reason=reason,
        message=failure.message if failure else message,
        next=(failure.next_step if failure else "") or following,
        since=instant(row.last_transition_time) if row else None,
        owners=tuple(owner.uid for owner in meta.owner_references) + _bound(value),
        trace=trace_of(value),
        open=tuple(open_order(o) for o in orders_of(value) if not fold.is_answered(o)),
        parts=tuple(_parts(value)),
        artifact=_artifact(value) if isinstance(value, SnapshotContent) else None,
        node=_node_facts(value) if isinstance(value, Node) else None,
    )


def _is_under_way(pod: AnyObject, restore: SnapshotRestore) -> bool:
    has_phase = isinstance(pod, Pod) and pod.status.phase in _POD_PHASES
    return not has_phase and restore.status.state not in ENDED


def trace_of(value: AnyObject) -> str:
    """Return the id of the trace that an object belongs to; empty when there is none."""
    candidates = [value.metadata.annotations.get(TRACEPARENT, "")]
    if isinstance(value, Pod | SnapshotContent | SnapshotRestore):
        candidates.insert(0, value.status.traceparent)
    contexts = (parse_traceparent(candidate) for candidate in candidates)
    return next((context.trace_id for context in contexts if context), "")


def instant(text: str) -> float | None:
    """Return a time of Kubernetes as seconds since the epoch."""
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        return None
    return moment.timestamp() if moment.tzinfo else None


def _phase(value: AnyObject) -> tuple[str, State]:
    match value:
        case DynamoCheckpoint():
            return value.status.phase, _by_conditions(value.status.conditions, value.status.phase)
        case Snapshot():
            rows = value.status.conditions
            bound = value.status.bound_snapshot_content_name
            ends = [name for name in ("Failed", "Ready") if is_true(rows, name)]
            captured = "Ready" if value.status.bytes else "Capturing"
            phase = ends[0] if ends else (captured if bound else "Pending")
            return phase, _by_conditions(rows, phase)
        case SnapshotContent():
            phase = value.status.capture.value
            return phase, _by_conditions(value.status.conditions, phase)
        case SnapshotRestore():
            phase = value.status.state.value
            return phase, _ENDS.get(phase, "busy")
        case Pod():
            return _pod_phase(value)
        case Job():
            failed, done = value.status.failed, value.status.succeeded
            phase = "Failed" if failed else "Succeeded" if done else "Running"
            return phase, "bad" if failed else "off" if done else "ok"
        case Node():
            return _node_phase(value)


_ENDS: dict[str, State] = {"Failed": "bad", "Ready": "ok", "Restored": "ok", "Pending": "waiting"}
_POD_PHASES: dict[str, State] = {"Failed": "bad", "Succeeded": "off", "Unknown": "waiting"}
"""The phases of a pod that are shown as they are, whatever its conditions say."""


def _by_conditions(rows: list[Condition], phase: str) -> State:
    found = condition(rows, "Ready")
    if is_true(rows, "Failed") or is_true(rows, "Quarantined"):
        return "bad"
    if phase == "Ready" and found is not None and found.status == "False":
        return "bad"
    return _ENDS.get(phase, "busy")


def _pod_phase(pod: Pod) -> tuple[str, State]:
    phase = pod.status.phase
    if phase in _POD_PHASES:
        return phase, _POD_PHASES[phase]
    if phase == "Pending":
        return phase, "waiting"
    is_ready = is_true(pod.status.conditions, "Ready")
    return ("Ready" if is_ready else "Starting"), "ok" if is_ready else "busy"


def _node_phase(node: Node) -> tuple[str, State]:
    rows = node.status.conditions
    if is_true(rows, "Lost"):
        return "Lost", "bad"
    if not is_true(rows, "Ready"):
        return "NotReady", "bad"
    if node.spec.unschedulable:
        return "SchedulingDisabled", "off"
    return "Ready", "ok"


def _telling(value: AnyObject) -> Condition | None:
    """Return the condition that says most of how an object is."""
    rows = value.status.conditions
    for name in ("Quarantined", "Lost", "Failed"):
        if is_true(rows, name):
            return condition(rows, name)
    return condition(rows, "Ready") or (rows[0] if rows else None)


def _failure(value: AnyObject) -> Failure | None:
    match value:
        case SnapshotContent():
            return value.status.failure if value.status.capture is Capture.FAILED else None
        case SnapshotRestore():
            return value.status.failure
        case Pod() if value.status.phase == "Unknown":
            return Failure(reason=value.status.reason, message=value.status.message)
        case _:
            return None


def _bound(value: AnyObject) -> tuple[str, ...]:
    return (value.spec.snapshot_ref.uid,) if isinstance(value, SnapshotContent) else ()


def open_order(item: OrderStatus) -> OpenOrder:
    """Reduce an order that is under way."""
    since = item.ordered_at.timestamp()
    return OpenOrder(item.order, item.verb, item.attempt, item.node, since)


def moved_part(item: OrderStatus) -> tuple[str, int]:
    """Return the part that an order saves or loads, and its bytes; no name when there is none."""
    if item.verb not in ("save", "load"):
        return "", 0
    match order_in(item.payload):
        case SaveOrder(part=part, layout=layout):
            return part, layout.bytes
        case LoadOrder(part=part, bytes=size):
            return part, size
        case _:
            return "", 0


def _parts(value: AnyObject) -> Iterable[PartOrder]:
    orders = [item for item in orders_of(value) if item.verb in ("save", "load")]
    last = max((item.attempt for item in orders), default=0)
    for item in orders:
        if item.attempt == last:
            yield PartOrder(item.order, moved_part(item)[1], fold.is_answered(item))


def _artifact(content: SnapshotContent) -> Artifact | None:
    status, held = content.status, content.status.committed
    if held is None:
        return None
    verified = condition(status.conditions, "Verified")
    quarantined = condition(status.conditions, "Quarantined")
    state, message = "Committed", ""
    if quarantined is not None and quarantined.status == "True":
        state, message = "Quarantined", quarantined.message
    elif status.verified < status.verifications:
        state = "Verifying"
    elif verified is not None and verified.status == "True":
        state, message = "Verified", verified.message
    reference = content.spec.snapshot_ref
    return Artifact(
        size=held.bytes,
        generation=held.generation,
        parts=len(held.parts),
        readers=tuple(status.readers),
        state=state,
        message=message.partition(NEXT)[0],
        snapshot=f"{reference.namespace}/{reference.name}",
    )


def _node_facts(node: Node) -> NodeFacts:
    status = node.status
    devices = tuple((d.index, d.uuid, d.product, d.capacity_bytes) for d in status.devices)
    return NodeFacts(
        version=status.version, slots=status.slots, drivers=tuple(status.drivers), devices=devices
    )


# The whole view.


def sections(facts: Facts) -> dict[str, Any]:
    """Return the parts of the page, each of which is sent when it changes."""
    entries = sorted(facts.entries.values(), key=_rank)
    led_to = by_owner(entries)
    nodes = sorted((e for e in entries if e.node is not None), key=lambda e: e.name)
    shown = _grouped([e for e in entries if e.kind in SHOWN_KINDS], entries)
    held = [e for e in entries if e.artifact is not None]
    found = problems(entries, facts)
    under_way = _by_node(entries)
    readers = _readers(entries)
    return {
        "problems": {"rows": found[:MOST_PROBLEMS], "all": len(found)},
        "nodes": {
            "rows": [_node_row(e, under_way.get(e.name, []), facts) for e in nodes[:MOST_NODES]],
            "all": len(nodes),
        },
        "objects": {
            "rows": [
                _object_row(entry, led_to, facts, is_below=is_below)
                for entry, is_below in shown[:MOST_OBJECTS]
            ],
            "all": len(shown),
        },
        "artifacts": {
            "rows": [_artifact_row(e, readers) for e in held[:MOST_ARTIFACTS]],
            "all": len(held),
            "bytes": sum(e.artifact.size for e in held if e.artifact),
        },
        "about": {"follow": _followed(entries, led_to), "commands": commands(facts.context)},
    }


_ORDER: dict[State, int] = {"busy": 0, "bad": 1, "waiting": 2, "ok": 3, "off": 4}


def _rank(entry: Entry) -> tuple[int, float, str]:
    """Order what is under way first, then what failed, the newest first."""
    return _ORDER[entry.state], -(entry.created or 0.0), entry.key


def _grouped(shown: Sequence[Entry], entries: Iterable[Entry]) -> list[tuple[Entry, bool]]:
    """Put behind each object what it led to, each with whether it stands so."""
    known = {entry.uid: entry for entry in entries}
    groups: dict[str, list[Entry]] = {}
    for entry in shown:
        groups.setdefault(_root(entry, known).uid, []).append(entry)
    found = []
    for uid, group in groups.items():
        first = [entry for entry in group if entry.uid == uid]
        rest = sorted(group, key=lambda entry: (SHOWN_KINDS.index(entry.kind), entry.key))
        found += [(entry, False) for entry in first]
        found += [(entry, bool(first)) for entry in rest if entry.uid != uid]
    return found


def _root(entry: Entry, known: Mapping[str, Entry]) -> Entry:
    for _ in range(MOST_OWNERS):
        owner = next((known[uid] for uid in entry.owners if uid in known), None)
        if owner is None:
            break
        entry = owner
    return entry


def _followed(entries: Sequence[Entry], led_to: LedTo) -> str:
    """Return the key to show unasked: of the newest capture or restore, one under way first."""
    known = {entry.uid for entry in entries}
    kinds = ("DynamoCheckpoint", "Pod", "Snapshot")
    tops = [e for e in entries if e.kind in kinds and not set(e.owners) & known]
    tops.sort(key=lambda e: (not working(e, led_to), -(e.created or 0.0), e.key))
    return tops[0].key if tops else ""


def by_owner(entries: Iterable[Entry]) -> LedTo:
    """Return the entries by the uids of their owners, each list in the order of the keys."""
    found: dict[str, list[Entry]] = {}
    for entry in entries:
        for uid in entry.owners:
            found.setdefault(uid, []).append(entry)
    for group in found.values():
        group.sort(key=lambda entry: entry.key)
    return found


def family(entry: Entry, led_to: LedTo) -> list[Entry]:
    """Return an object and all that it led to, each once."""
    found: dict[str, Entry] = {}
    waiting = [entry]
    while waiting:
        one = waiting.pop()
        if one.key not in found:
            found[one.key] = one
            waiting += led_to.get(one.uid, ())
    return list(found.values())


def traced(entry: Entry, led_to: LedTo) -> Entry:
    """Return an entry with a trace: its own, or else that of what it led to."""
    found = (one.trace for one in family(entry, led_to) if one.trace)
    return replace(entry, trace=next(found, ""))


def working(entry: Entry, led_to: LedTo) -> list[OpenOrder]:
    """Return the orders that are under way for an object, the oldest first."""
    orders = [order for one in family(entry, led_to) for order in one.open]
    return sorted(orders, key=lambda order: (order.since, order.order))


def revision(entry: Entry, facts: Facts, led_to: LedTo) -> str:
    """Return a name of the state of an object's details: another name, other details.

    What follows the `/` changes with progress alone.
    """
    marks = facts.marks
    found = family(entry, led_to)
    heard_of = [f"{one.version}.{marks.get(one.uid, 0)}" for one in found]
    progress = sum(marks.get(moved(one.uid), 0) for one in found)
    trace = traced(entry, led_to).trace
    return f"{'-'.join(heard_of)}-{marks.get(trace, 0)}/{progress}"


def settled(found: str) -> str:
    """Return the part of a revision that orders, reports and spans change."""
    return found.partition("/")[0]


def moved(uid: str) -> str:
    """Return the mark that counts the progress of what an owner ordered."""
    return f"{uid}/progress"


def _object_row(entry: Entry, led_to: LedTo, facts: Facts, *, is_below: bool) -> dict[str, Any]:
    row: dict[str, Any] = {
        "key": entry.key,
        "kind": entry.kind,
        "namespace": entry.namespace,
        "name": entry.name,
        "phase": entry.phase,
        "state": entry.state,
        "reason": entry.reason,
        "message": entry.message,
        "created": entry.created,
        "rev": revision(entry, facts, led_to),
        "below": is_below,
    }
    parts = [part for one in family(entry, led_to) for part in one.parts]
    if not is_below and (step := step_of(working(entry, led_to), parts, facts.progress)):
        row["step"] = step
    return row


def step_of(
    orders: Sequence[OpenOrder], parts: Sequence[PartOrder], progress: Mapping[str, Progress]
) -> dict[str, Any] | None:
    """Return what is being done now; `done` and `total` are bytes, absent where none are counted.

    A part that has ended counts whole, so that nothing goes back while others are under way.
    """
    if not orders:
        return None
    moved = [(order, found) for order in orders if (found := heard(order, progress)) is not None]
    if not moved:
        order = orders[-1]
        return {"what": f"{order.verb} on {order.node}", "since": order.since}
    order, found = moved[-1]
    counted = {part.order: part.total if part.ended else 0 for part in parts}
    counted |= {order.order: min(found.done, found.total) for order, found in moved}
    totals = {part.order: part.total for part in parts}
    totals |= {order.order: found.total for order, found in moved}
    what = f"{len(moved)} parts" if len(moved) > 1 else found.part
    return {
        "what": f"{order.verb} {what}: {found.step} on {order.node}",
        "since": moved[0][0].since,
        "done": sum(counted.values()),
        "total": sum(totals.values()),
    }


def heard(order: OpenOrder, progress: Mapping[str, Progress]) -> Progress | None:
    """Return the last progress of this attempt of an order."""
    found = progress.get(order.order)
    return found if found is not None and found.attempt == order.attempt else None


def _by_node(entries: Sequence[Entry]) -> dict[str, list[OpenOrder]]:
    found: dict[str, list[OpenOrder]] = {}
    for order in (order for entry in entries for order in entry.open):
        found.setdefault(order.node, []).append(order)
    return found


def _node_row(entry: Entry, mine: Sequence[OpenOrder], facts: Facts) -> dict[str, Any]:
    known = entry.node
    seen = facts.presence.get(entry.name)
    answer = facts.gms.get(entry.name)
    devices = {device.uuid: device for device in answer.devices} if answer else {}
    return {
        "key": entry.key,
        "name": entry.name,
        "phase": entry.phase,
        "state": entry.state,
        "message": entry.message if entry.state == "bad" else "",
        "since": entry.since,
        "heard": seen.at if seen else None,
        "agent": known.version if known else "",
        "gms": answer.version if answer else None,
        "drivers": list(known.drivers) if known else [],
        "free": seen.free_bytes if seen else None,
        "slots": known.slots if known else 0,
        "busy": sum(order.verb in SLOT_VERBS for order in mine),
        "orders": len(mine),
        "gpus": [_gpu(row, devices.get(row[1])) for row in (known.devices if known else ())],
    }


def _gpu(row: tuple[int, str, str, int], now: DeviceStatus | None) -> dict[str, Any]:
    index, uuid, product, capacity = row
    found: dict[str, Any] = {"index": index, "uuid": uuid, "product": product, "capacity": capacity}
    if now is not None:
        found |= {
            "used": now.used,
            "free": now.free,
            "sessions": sum(len(domain.sessions) for domain in now.domains),
            "waiting": sum(len(domain.waiting) for domain in now.domains),
            "fence": now.fence.phase if now.fence else "",
            "loads": len(now.loads),
        }
    return found


def _readers(entries: Sequence[Entry]) -> dict[str, str]:
    """Return by the uid of each restore the pod that it restores, as `<namespace>/<name>`."""
    pods = {e.uid: e.name for e in entries if e.kind == "Pod"}
    restores = (e for e in entries if e.kind == "SnapshotRestore")
    found = ((e, next((pods[uid] for uid in e.owners if uid in pods), e.name)) for e in restores)
    return {e.uid: f"{e.namespace}/{name}" for e, name in found}


def _artifact_row(entry: Entry, names: Mapping[str, str]) -> dict[str, Any]:
    held = entry.artifact
    assert held is not None  # noqa: S101 - only those with one are asked for
    return {
        "key": entry.key,
        "name": entry.name,
        "snapshot": held.snapshot,
        "size": held.size,
        "generation": held.generation,
        "parts": held.parts,
        "readers": [names.get(uid, uid) for uid in held.readers],
        "verdict": held.state,
        "message": held.message,
        "created": entry.created,
    }


# What is wrong.


def problems(entries: Sequence[Entry], facts: Facts) -> list[dict[str, Any]]:
    """Return what needs attention, the gravest first, each with what to do next."""
    found: list[dict[str, Any]] = []
    if facts.bus:
        found.append(
            _problem(
                "bus",
                "NATS",
                "BusUnavailable",
                facts.bus,
                "start nats-server, or look at its log; nothing is lost meanwhile",
            )
        )
    found += [_node_problem(e) for e in entries if e.node is not None and e.state == "bad"]
    found += [_object_problem(e) for e in _failed(entries)]
    recent = [
        (count, letter)
        for count, letter in facts.dead.values()
        if facts.now - letter.at <= LETTER_SHOWN_S
    ]
    return found + [_letter_problem(count, letter) for count, letter in recent]


def _failed(entries: Sequence[Entry]) -> Iterable[Entry]:
    """Return what failed; of an object and those that it led to, what a person made."""
    bad = [e for e in entries if e.state == "bad" and e.node is None]
    uids = {e.uid for e in bad}
    return [e for e in bad if not set(e.owners) & uids and e.kind in SHOWN_KINDS]


def _problem(key: str, what: str, reason: str, message: str, following: str) -> dict[str, Any]:
    return {"key": key, "what": what, "reason": reason, "message": message, "next": following}


def _node_problem(entry: Entry) -> dict[str, Any]:
    lost = entry.phase == "Lost"
    words = "its pods are Unknown" if lost else "nothing new is placed on it"
    return _problem(
        entry.key,
        f"Node {entry.name} is {entry.phase}",
        entry.reason,
        f"{entry.message or 'no presence'}; {words}",
        f"start the agent of {entry.name} again, or look at its log",
    ) | {"since": entry.since}


def _object_problem(entry: Entry) -> dict[str, Any]:
    is_damaged = entry.phase.startswith("Ready")
    what = "is damaged" if is_damaged else "failed"
    word = f"{entry.kind.lower()}/{entry.name}"
    following = (
        f"capture the worker again; snapshotctl verify {word} reads every byte once more"
        if is_damaged
        else f"see why: snapshotctl get {word} -o yaml"
    )
    return _problem(
        entry.key,
        f"{entry.kind} {entry.name} {what}",
        entry.reason,
        entry.message,
        entry.next or following,
    ) | {"since": entry.since, "open": entry.key}


def _letter_problem(count: int, letter: DeadLetter) -> dict[str, Any]:
    letters = f"{count} dead letters" if count > 1 else "A dead letter"
    return _problem(
        f"dead-{letter.node}",
        f"{letters} on {letter.node}, the newest for its {letter.service}",
        letter.failure.reason,
        f"{letter.subject}: {letter.failure.message}",
        letter.failure.next_step
        or "find out who sent it; the operator publishes its own orders again",
    ) | {"since": letter.at}


# How to see the same without the page.


def commands(context: str) -> dict[str, list[str]]:
    """Return for each panel the two commands that show the same."""
    nats, ours = _programs(context)
    return {
        "nodes": [f"{nats} kv watch {subjects.NODES_BUCKET}", f"{ours} nodes"],
        "objects": [
            f"{nats} kv watch {subjects.OBJECTS_BUCKET}",
            f"{ours} get dynamocheckpoints -A",
        ],
        "artifacts": [
            f"{nats} kv watch {subjects.OBJECTS_BUCKET} 'snapshotcontents.>'",
            f"{ours} get snapshotcontents",
        ],
        "problems": [f"{nats} stream view {subjects.DEAD}", f"{ours} get dynamocheckpoints -A"],
        "start": [f"{ours} apply -f deploy/examples/checkpoint.yaml"],
        "node": ["snapshotctl up --nodes 2"],
    }


def commands_of(entry: Entry, context: str) -> dict[str, list[str]]:
    """Return the commands that show one object, its orders and its trace."""
    nats, ours = _programs(context)
    plural, space, name = entry.key.split("/")
    place = f" -n {space}" if space not in ("-", "default") else ""
    key = subjects.object_key(plural, entry.namespace or None, name)
    word = entry.kind.lower()
    return {
        "object": [
            f"{nats} kv get {subjects.OBJECTS_BUCKET} {key}",
            f"{ours} get {word} {name}{place} -o yaml",
        ],
        "flow": [
            f"{nats} sub 'snap.report.>'",
            f"{ours} get {word} {name}{place}",
        ],
        "trace": [
            f"{nats} stream view {subjects.SPANS} --subject '{subjects.spans_of(entry.trace)}'",
            f"{ours} trace {word}/{name}{place}",
        ]
        if entry.trace
        else [],
    }


def _programs(context: str) -> tuple[str, str]:
    if not context:
        return "nats", "snapshotctl"
    return f"nats --context {context}", f"NATS_CONTEXT={context} snapshotctl"
