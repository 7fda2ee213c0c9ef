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
from snapshot_shared import subjects
from snapshot_shared.errors import Failure
from snapshot_shared.frames import DeviceStatus, StatusReply
from snapshot_shared.objects import (
    TRACEPARENT,
    AnyObject,
    Condition,
    DynamoCheckpoint,
    Job,
    Kind,
    Node,
    Pod,
    Snapshot,
    SnapshotContent,
    condition,
    is_true,
    kind_of,
)
from snapshot_shared.orders import DeadLetter, Presence, Progress
from snapshot_shared.spans import parse_traceparent
from snapshot_shared.transitions import Capture, Restore

MOST_OBJECTS = 200
MOST_ARTIFACTS = 100
MOST_NODES = 200
MOST_PROBLEMS = 20
"""How many of each are shown; the page says how many more there are."""

MOST_OWNERS = 8
"""A chain of owners that is longer goes in a circle."""

LETTER_SHOWN_S = 86400.0
"""How long a dead letter counts as a problem, in seconds; the stream keeps it longer."""

SHOWN_KINDS = ("DynamoCheckpoint", "Snapshot", "SnapshotContent", "Pod")
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
    """One object, reduced to what a view needs. `links` are the keys of what it led to."""

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
    links: tuple[str, ...] = ()
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


# One object.


def key_of(kind: Kind, namespace: str | None, name: str) -> str:
    """Name an object as the addresses of the page do: `<plural>/<namespace or ->/<name>`."""
    return f"{kind.plural}/{namespace or '-'}/{name}"


def entry_of(value: AnyObject) -> Entry:
    """Reduce an object."""
    meta, kind = value.metadata, kind_of(value)
    phase, state = _phase(value)
    told = _telling(value)
    failure = _failure(value)
    message, _, following = (told.message if told else "").partition(NEXT)
    reason = failure.reason if failure else (told.reason if told else "")
    if state == "bad" and phase == "Ready":
        phase = f"Ready ({reason})"
    return Entry(
        key=key_of(kind, meta.namespace, meta.name),
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
        since=instant(told.last_transition_time) if told else None,
        owners=tuple(owner.uid for owner in meta.owner_references) + _bound(value),
        links=tuple(_links(value)),
        trace=trace_of(value),
        open=tuple(_open(value)),
        parts=tuple(_parts(value)),
        artifact=_artifact(value) if isinstance(value, SnapshotContent) else None,
        node=_node_facts(value) if isinstance(value, Node) else None,
    )


def trace_of(value: AnyObject) -> str:
    """Give the id of the trace that an object belongs to; empty when there is none."""
    candidates = [value.metadata.annotations.get(TRACEPARENT, "")]
    if isinstance(value, Pod | SnapshotContent):
        candidates.insert(0, value.status.traceparent)
    if isinstance(value, Pod) and value.status.restore is not None:
        candidates.insert(0, value.status.restore.traceparent)
    contexts = (parse_traceparent(candidate) for candidate in candidates)
    return next((context.trace_id for context in contexts if context), "")


def instant(text: str) -> float | None:
    """Read a time of Kubernetes as seconds since the epoch."""
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
        case Pod():
            return _pod_phase(value)
        case Job():
            failed, done = value.status.failed, value.status.succeeded
            phase = "Failed" if failed else "Succeeded" if done else "Running"
            return phase, "bad" if failed else "off" if done else "ok"
        case Node():
            return _node_phase(value)


_ENDS: dict[str, State] = {"Failed": "bad", "Ready": "ok", "Pending": "waiting"}


def _by_conditions(rows: list[Condition], phase: str) -> State:
    found = condition(rows, "Ready")
    if is_true(rows, "Failed") or is_true(rows, "Quarantined"):
        return "bad"
    if phase == "Ready" and found is not None and found.status == "False":
        return "bad"
    return _ENDS.get(phase, "busy")


def _pod_phase(pod: Pod) -> tuple[str, State]:
    restore, phase = pod.status.restore, pod.status.phase
    if phase == "Failed":
        return phase, "bad"
    if phase == "Succeeded":
        return phase, "off"
    if restore is not None and restore.state not in (Restore.RESTORED, Restore.FAILED):
        waits = restore.state is Restore.PENDING
        return ("Restoring" if waits else restore.state.value), "waiting" if waits else "busy"
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
    """Give the condition that says most of how an object is."""
    rows = value.status.conditions
    for name in ("Quarantined", "Lost", "Failed"):
        if is_true(rows, name):
            return condition(rows, name)
    return condition(rows, "Ready") or (rows[0] if rows else None)


def _failure(value: AnyObject) -> Failure | None:
    match value:
        case SnapshotContent():
            return value.status.failure if value.status.capture is Capture.FAILED else None
        case Pod() if value.status.restore is not None:
            return value.status.restore.failure
        case _:
            return None


def _bound(value: AnyObject) -> tuple[str, ...]:
    return (value.spec.snapshot_ref.uid,) if isinstance(value, SnapshotContent) else ()


def _links(value: AnyObject) -> Iterable[str]:
    space = value.metadata.namespace or "-"
    match value:
        case DynamoCheckpoint():
            found = [("jobs", space, value.status.job_name)]
            found += [("snapshots", space, value.status.snapshot_name)]
            found += [("snapshotcontents", "-", value.status.content_name)]
        case Snapshot():
            content = value.status.bound_snapshot_content_name or ""
            found = [("snapshotcontents", "-", content)]
        case Job():
            found = [("pods", space, value.status.pod_name)]
        case _:
            found = []
    return ["/".join(words) for words in found if words[2]]


def _open(value: AnyObject) -> Iterable[OpenOrder]:
    for item in orders_of(value):
        if not fold.is_answered(item):
            yield OpenOrder(item.order, item.verb, item.attempt, item.node, item.ordered_at)


def _parts(value: AnyObject) -> Iterable[PartOrder]:
    orders = [item for item in orders_of(value) if item.verb in ("save", "load")]
    last = max((item.attempt for item in orders), default=0)
    for item in orders:
        if item.attempt == last:
            layout = item.payload.get("layout") or item.payload
            yield PartOrder(item.order, int(layout.get("bytes", 0)), fold.is_answered(item))


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
    """Give the parts of the page, each of which is sent when it changes."""
    entries = sorted(facts.entries.values(), key=_rank)
    by_key = {entry.key: entry for entry in entries}
    nodes = sorted((e for e in entries if e.node is not None), key=lambda e: e.name)
    shown = _grouped([e for e in entries if e.kind in SHOWN_KINDS], facts.entries.values())
    held = [e for e in entries if e.artifact is not None]
    found = problems(entries, facts)
    under_way = _by_node(entries)
    names = {e.uid: f"{e.namespace}/{e.name}" for e in entries if e.kind == "Pod"}
    return {
        "problems": {"rows": found[:MOST_PROBLEMS], "all": len(found)},
        "nodes": {
            "rows": [_node_row(e, under_way.get(e.name, []), facts) for e in nodes[:MOST_NODES]],
            "all": len(nodes),
        },
        "objects": {
            "rows": [
                _object_row(entry, by_key, facts, is_led_to=is_led_to)
                for entry, is_led_to in shown[:MOST_OBJECTS]
            ],
            "all": len(shown),
        },
        "artifacts": {
            "rows": [_artifact_row(e, names) for e in held[:MOST_ARTIFACTS]],
            "all": len(held),
            "bytes": sum(e.artifact.size for e in held if e.artifact),
        },
        "about": {"follow": _followed(entries, by_key), "commands": commands(facts.context)},
    }


_ORDER: dict[State, int] = {"busy": 0, "bad": 1, "waiting": 2, "ok": 3, "off": 4}


def _rank(entry: Entry) -> tuple[int, float, str]:
    """Order what is under way first, then what failed, the newest first."""
    return _ORDER[entry.state], -(entry.created or 0.0), entry.key


def _grouped(shown: Sequence[Entry], entries: Iterable[Entry]) -> list[tuple[Entry, bool]]:
    """Put behind each object what it led to; tell which of them stand so."""
    known = {entry.uid: entry for entry in entries}
    led_to: dict[str, list[Entry]] = {}
    for entry in shown:
        led_to.setdefault(_root(entry, known).uid, []).append(entry)
    found = []
    for uid, group in led_to.items():
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


def _followed(entries: Sequence[Entry], by_key: Mapping[str, Entry]) -> str:
    """Name what to show unasked: the newest capture or restore, one under way before all others."""
    known = {entry.uid for entry in entries}
    kinds = ("DynamoCheckpoint", "Pod", "Snapshot")
    tops = [e for e in entries if e.kind in kinds and not set(e.owners) & known]
    tops.sort(key=lambda e: (not working(e, by_key), -(e.created or 0.0), e.key))
    return tops[0].key if tops else ""


def family(entry: Entry, by_key: Mapping[str, Entry]) -> list[Entry]:
    """Give an object and all that it led to, each once."""
    found: dict[str, Entry] = {}
    waiting = [entry]
    while waiting:
        one = waiting.pop()
        if one.key not in found:
            found[one.key] = one
            waiting += [by_key[key] for key in one.links if key in by_key]
    return list(found.values())


def traced(entry: Entry, by_key: Mapping[str, Entry]) -> Entry:
    """Give an entry with a trace: its own, or else that of what it led to."""
    found = (one.trace for one in family(entry, by_key) if one.trace)
    return replace(entry, trace=next(found, ""))


def working(entry: Entry, by_key: Mapping[str, Entry]) -> list[OpenOrder]:
    """Give the orders that are under way for an object, the oldest first."""
    orders = [order for one in family(entry, by_key) for order in one.open]
    return sorted(orders, key=lambda order: (order.since, order.order))


def revision(entry: Entry, facts: Facts, by_key: Mapping[str, Entry]) -> str:
    """Name the state of an object's details: another name, other details.

    What follows the `/` changes with progress alone.
    """
    marks = facts.marks
    found = family(entry, by_key)
    heard_of = [f"{one.version}.{marks.get(one.uid, 0)}" for one in found]
    progress = sum(marks.get(moved(one.uid), 0) for one in found)
    trace = traced(entry, by_key).trace
    return f"{'-'.join(heard_of)}-{marks.get(trace, 0)}/{progress}"


def told(found: str) -> str:
    """Give the part of a revision that orders, reports and spans change."""
    return found.partition("/")[0]


def moved(uid: str) -> str:
    """Name the mark that counts the progress of what an owner ordered."""
    return f"{uid}/progress"


def _object_row(
    entry: Entry, by_key: Mapping[str, Entry], facts: Facts, *, is_led_to: bool
) -> dict[str, Any]:
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
        "rev": revision(entry, facts, by_key),
        "below": is_led_to,
    }
    parts = [part for one in family(entry, by_key) for part in one.parts]
    if not is_led_to and (step := step_of(working(entry, by_key), parts, facts.progress)):
        row["step"] = step
    return row


def step_of(
    orders: Sequence[OpenOrder], parts: Sequence[PartOrder], progress: Mapping[str, Progress]
) -> dict[str, Any] | None:
    """Say what is being done now. `done` and `total` are bytes, absent where nobody counts.

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
    """Give the last progress of this attempt of an order."""
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
    """List what somebody should look at, the gravest first, each with what to do next."""
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
    """Give what failed; of an object and those that it led to, what a person made."""
    bad = [e for e in entries if e.state == "bad" and e.node is None]
    uids = {e.uid for e in bad}
    return [e for e in bad if not set(e.owners) & uids and e.kind in SHOWN_KINDS]


def _problem(key: str, what: str, reason: str, message: str, following: str) -> dict[str, Any]:
    return {"key": key, "what": what, "reason": reason, "message": message, "next": following}


def _node_problem(entry: Entry) -> dict[str, Any]:
    lost = entry.phase == "Lost"
    words = "its orders fail at their deadlines" if lost else "nothing new is placed on it"
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
        or "find out who sent it; the operator publishes again what it wants",
    ) | {"since": letter.at}


# How to see the same without the page.


def commands(context: str) -> dict[str, list[str]]:
    """Give for each panel the two commands that show the same."""
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
    """Give the commands that show one object, its orders and its trace."""
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
