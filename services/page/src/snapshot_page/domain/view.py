"""The sections of the page, as values: objects, presence and progress in, plain data out.

An object is reduced to an `Entry` when it changes, so that a view of thousands costs little. What
is shown is what the mirror shows: metadata, identity and status, never a spec with its environment.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any

import msgspec
from msgspec.structs import replace

from snapshot_api import figures, views
from snapshot_api.facts import Node, Pod
from snapshot_api.kinds import AnyObject, kind_of
from snapshot_api.meta import TRACEPARENT, Condition, OrderStatus, condition, is_true
from snapshot_api.v1alpha1.checkpoint import DynamoCheckpoint
from snapshot_api.v1alpha1.content import Committed, SnapshotContent, SnapshotContentStatus
from snapshot_api.v1alpha1.restore import SnapshotRestore
from snapshot_api.views import State
from snapshot_page.domain.timeline import figure, run_of, started_at
from snapshot_shared import subjects
from snapshot_shared.errors import Aborted, Failure
from snapshot_shared.frames import DeviceStatus, StatusReply
from snapshot_shared.orders import DeadLetter, DeviceRef, Presence, PresenceDevice, Progress
from snapshot_shared.spans import parse_traceparent
from snapshot_shared.transitions import Capture

MAX_OBJECTS = 200
MAX_ARTIFACTS = 100
MAX_NODES = 200
MAX_PROBLEMS = 20
MAX_RUNS = 20
"""How many of each are shown; the page says how many more there are."""

MAX_OWNERS = 8
"""A chain of owners that is longer goes in a circle."""

DEAD_SHOWN_S = 86400.0
"""How long a dead letter counts as a problem, in seconds; the stream keeps it longer."""

SHOWN_KINDS = ("DynamoCheckpoint", "Snapshot", "SnapshotContent", "Pod", "SnapshotRestore")
SLOT_VERBS = frozenset({"dump", "verify"})
"""The orders that take one of the slots of their agent."""

NEXT = ". Next: "
"""Separates what happened from what to do, in the message of a condition."""


class GmsAnswer(StatusReply, frozen=True, kw_only=True):
    """The answer of a GPU memory service to a request for its status."""

    version: str = ""


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """An object, reduced to what a view needs.

    `owners` are the uids of what led to it, `open` its unanswered orders. Times are seconds since
    the epoch.
    """

    value: AnyObject
    key: str
    kind: str
    phase: str
    state: State
    reason: str = ""
    message: str = ""
    next: str = ""
    created: float | None = None
    since: float | None = None
    owners: tuple[str, ...] = ()
    trace: str = ""
    open: tuple[OrderStatus, ...] = ()

    @property
    def name(self) -> str:
        """The name of the object."""
        return self.value.metadata.name

    @property
    def title(self) -> str:
        """The name that people gave: of an object with a uid in its name, that of its subject."""
        match self.value:
            case SnapshotContent(spec=spec):
                return spec.snapshot_ref.name
            case SnapshotRestore(spec=spec):
                return spec.pod_ref.name
            case _:
                return self.name

    @property
    def uid(self) -> str:
        """The uid of the object."""
        return self.value.metadata.uid

    @property
    def row(self) -> dict[str, Any]:
        """What both the row of an object and its details show."""
        return {
            "key": self.key,
            "kind": self.kind,
            "namespace": self.value.metadata.namespace or "",
            "name": self.name,
            "title": self.title,
            "phase": self.phase,
            "state": self.state,
            "reason": self.reason,
            "message": self.message,
            "created": self.created,
        }


class Facts(msgspec.Struct, kw_only=True):
    """All that a view is made of.

    `gms` has None for a service that did not answer. `dead` has, by subject, how many dead letters
    there are and the newest. `paused` are durables of the stream of orders. `bus` and `operator`
    say why NATS or the operator cannot be used.
    `marks` counts the messages about an owner's uid or a trace. `now` is seconds since the epoch.
    """

    entries: dict[str, Entry] = {}
    presence: dict[str, Presence] = {}
    gms: dict[str, GmsAnswer | None] = {}
    progress: dict[str, Progress] = {}
    dead: dict[str, tuple[int, DeadLetter]] = {}
    marks: dict[str, int] = {}
    paused: frozenset[str] = frozenset()
    bus: str = ""
    operator: str = ""
    context: str = ""
    now: float = 0.0


LedTo = Mapping[str, Sequence[Entry]]
"""Entries by the uid of their owner."""


# One object.


def key_of(kind: str, namespace: str | None, name: str) -> str:
    """Return the key of an object in the page's addresses; `kind` is the plural of its kind."""
    return f"{kind}/{namespace or '-'}/{name}"


def entry_of(value: AnyObject, restore: SnapshotRestore | None = None) -> Entry:
    """Return the entry of an object; `restore` is that of a pod, of which it has the phase."""
    meta, kind = value.metadata, kind_of(value)
    found, how = views.phase(value, restore), views.state(value, restore)
    shown = views.phase_holder(value, restore)
    row, failure = _decisive(shown), _failure(shown)
    message, _, following = (row.message if row else "").partition(NEXT)
    reason = failure.reason if failure else (row.reason if row else "")
    # A content has no namespaced owner: it names the uid of its snapshot instead.
    bound = (value.spec.snapshot_ref.uid,) if isinstance(value, SnapshotContent) else ()
    return Entry(
        value=value,
        key=key_of(kind.plural, meta.namespace, meta.name),
        kind=kind.name,
        phase=f"Ready ({reason})" if (how, found) == ("bad", "Ready") else found,
        state=how,
        reason=reason,
        message=failure.message if failure else message,
        next=(failure.next_step if failure else "") or following,
        created=_instant(meta.creation_timestamp),
        since=_instant(row.last_transition_time) if row else None,
        owners=tuple(owner.uid for owner in meta.owner_references) + bound,
        trace=_trace_of(value),
        open=tuple(order for order in views.orders_of(value) if not views.is_answered(order)),
    )


def _trace_of(value: AnyObject) -> str:
    """Return the id of the trace that an object belongs to; empty when there is none."""
    candidates = [value.metadata.annotations.get(TRACEPARENT, "")]
    if isinstance(value, Pod | SnapshotContent | SnapshotRestore):
        candidates.insert(0, value.status.traceparent)
    contexts = (parse_traceparent(candidate) for candidate in candidates)
    return next((context.trace_id for context in contexts if context), "")


def _instant(text: str) -> float | None:
    """Return a time of Kubernetes as seconds since the epoch."""
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        return None
    return moment.timestamp() if moment.tzinfo else None


def _decisive(value: AnyObject) -> Condition | None:
    """Return the condition that explains most of how an object is."""
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


# The whole view.


def sections(facts: Facts) -> dict[str, Any]:
    """Return the sections of the page, each of which is sent when it changes."""
    entries = sorted(facts.entries.values(), key=_rank)
    led_to = by_owner(entries)
    nodes = sorted((e for e in entries if isinstance(e.value, Node)), key=lambda e: e.name)
    shown = _grouped([e for e in entries if e.kind in SHOWN_KINDS], entries)
    contents = [(e, e.value) for e in entries if isinstance(e.value, SnapshotContent)]
    held = [(e, value, kept) for e, value in contents if (kept := value.status.committed)]
    restores = [e.value for e in entries if isinstance(e.value, SnapshotRestore)]
    readers = {r.metadata.uid: f"{r.metadata.namespace}/{r.spec.pod_ref.name}" for r in restores}
    found = problems(entries, facts)
    begun = [(at, e.value) for e in entries if (at := started_at(e.value)) is not None]
    begun.sort(key=lambda pair: pair[0], reverse=True)
    runs = runs_of(value for _, value in begun[:MAX_RUNS])
    known = {entry.uid: entry for entry in entries}
    products = {d.uuid: d.product for e in nodes for d in _node_of(e).status.devices}

    def words(entry: Entry) -> str:
        return _words(_root(entry, known), led_to, products)

    under_way: dict[str, list[OrderStatus]] = {}
    for order in (order for entry in entries for order in entry.open):
        under_way.setdefault(order.node, []).append(order)
    return {
        "problems": {"rows": found[:MAX_PROBLEMS], "all": len(found)},
        "nodes": {
            "rows": [_node_row(e, under_way.get(e.name, []), facts) for e in nodes[:MAX_NODES]],
            "all": len(nodes),
        },
        "objects": {
            "rows": [
                _object_row(entry, led_to, facts, is_below=is_below)
                | ({} if is_below else {"words": words(entry)})
                for entry, is_below in shown[:MAX_OBJECTS]
            ],
            "all": len(shown),
        },
        "artifacts": {
            "rows": [
                _artifact_row(*row, readers) | {"words": words(row[0])}
                for row in held[:MAX_ARTIFACTS]
            ],
            "all": len(held),
            "bytes": sum(kept.bytes for *_, kept in held),
        },
        "runs": {
            "rows": [
                {name: value for name, value in run.items() if name != "steps"}
                | {"words": words(facts.entries[run["key"]])}
                for run in runs
            ],
            "all": len(begun),
        },
        "about": {"follow": _followed(entries, led_to), "commands": commands(facts.context)},
    }


_ORDER: dict[State, int] = {"busy": 0, "bad": 1, "waiting": 2, "ok": 3, "off": 4}


def _rank(entry: Entry) -> tuple[int, float, str]:
    """Order what is under way first, then what failed, the newest first."""
    return _ORDER[entry.state], -(entry.created or 0.0), entry.key


def _grouped(shown: Sequence[Entry], entries: Iterable[Entry]) -> list[tuple[Entry, bool]]:
    """Return each object before what it led to, each with whether it is below another."""
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
    for _ in range(MAX_OWNERS):
        owner = next((known[uid] for uid in entry.owners if uid in known), None)
        if owner is None:
            break
        entry = owner
    return entry


def runs_of(values: Iterable[AnyObject]) -> list[dict[str, Any]]:
    """Return the captures and restores among some objects, each with its key, the newest first."""
    found = []
    for value in values:
        if (run := run_of(value)) is not None:
            meta = value.metadata
            found.append(run | {"key": key_of(kind_of(value).plural, meta.namespace, meta.name)})
    return sorted(found, key=lambda run: (-run["at"], run["key"]))


def _words(entry: Entry, led_to: LedTo, products: Mapping[str, str]) -> str:
    """Return what a search finds an object and all that it led to by: models, nodes, GPUs."""
    found = (word for one in family(entry, led_to) for word in _words_of(one.value, products))
    return " ".join(dict.fromkeys(filter(None, found)))


def _words_of(value: AnyObject, products: Mapping[str, str]) -> Iterable[str]:
    devices: Sequence[DeviceRef] = ()
    match value:
        case DynamoCheckpoint(spec=spec):
            yield from (spec.identity.model, spec.identity.backend_framework)
        case Pod(status=status):
            yield status.node_name
            devices = status.devices
        case SnapshotContent(spec=spec):
            yield spec.source.node_name or ""
            devices = spec.source.devices
        case SnapshotRestore(status=status):
            yield status.node_name
            devices = status.devices
        case _:
            return
    for device in devices:
        yield from (device.uuid, products.get(device.uuid, ""))


def _followed(entries: Sequence[Entry], led_to: LedTo) -> str:
    """Return the key to show by default: of the newest capture or restore, one under way first."""
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


def working(entry: Entry, led_to: LedTo) -> list[OrderStatus]:
    """Return the orders that are under way for an object, the oldest first."""
    orders = [order for one in family(entry, led_to) for order in one.open]
    return sorted(orders, key=lambda order: (order.ordered_at, order.order))


def revision(entry: Entry, facts: Facts, led_to: LedTo) -> str:
    """Return a name of the state of an object's details: another name, other details.

    What follows the `/` changes with progress alone.
    """
    marks = facts.marks
    found = family(entry, led_to)
    versions = [f"{one.value.metadata.resource_version}.{marks.get(one.uid, 0)}" for one in found]
    moves = sum(marks.get(progress_mark(one.uid), 0) for one in found)
    trace = traced(entry, led_to).trace
    return f"{'-'.join(versions)}-{marks.get(trace, 0)}/{moves}"


def without_progress(found: str) -> str:
    """Return the part of a revision that orders, reports and spans change."""
    return found.partition("/")[0]


def progress_mark(uid: str) -> str:
    """Return the mark that counts the progress of what an owner ordered."""
    return f"{uid}/progress"


def _object_row(entry: Entry, led_to: LedTo, facts: Facts, *, is_below: bool) -> dict[str, Any]:
    row = entry.row | {"rev": revision(entry, facts, led_to), "below": is_below}
    if is_below:
        return row
    values = [one.value for one in family(entry, led_to)]
    row["figure"] = "; ".join(text for value in values if (text := figure(value)))
    if orders := working(entry, led_to):
        row["step"] = _step(orders, values, facts)
    return row


def _step(
    orders: Sequence[OrderStatus], values: Sequence[AnyObject], facts: Facts
) -> dict[str, Any]:
    """Return what is being done now.

    `done` and `total` are bytes, `speed` is their rate and what is left; absent where none move.
    """
    received = facts.progress
    moving = [(order, last) for order in orders if (last := views.received_for(order, received))]
    if not moving:
        order = orders[-1]
        what = f"{order.verb} on {order.node}"
        return {"what": what, "since": order.ordered_at.timestamp()}
    order, last = moving[-1]
    if last.awaits:
        what = f"{order.verb} on {order.node} waits: {last.awaits}"
        return {"what": what, "since": order.ordered_at.timestamp()}
    parts = views.progress(values, received)
    what = f"{len(moving)} parts" if len(moving) > 1 else last.part
    since = moving[0][0].ordered_at.timestamp()
    done, total = sum(part.done for part in parts), sum(part.total for part in parts)
    return {
        "what": f"{order.verb} {what}: {last.step} on {order.node}",
        "since": since,
        "done": done,
        "total": total,
        "speed": figures.speed(done, total, max(each.at for _, each in moving) - since),
    }


def _node_row(entry: Entry, orders: Sequence[OrderStatus], facts: Facts) -> dict[str, Any]:
    status = _node_of(entry).status
    seen = facts.presence.get(entry.name)
    answer = facts.gms.get(entry.name)
    devices = {device.uuid: device for device in answer.devices} if answer else {}
    return {
        "key": entry.key,
        "name": entry.name,
        "phase": entry.phase,
        "state": entry.state,
        "message": entry.message if entry.state == "bad" else "",
        "held": [each.message for each in views.held_back(entry.name, facts.paused)],
        "seen": seen.at if seen else None,
        "agent": status.version,
        "gms": answer.version if answer else None,
        "free": seen.free_bytes if seen else None,
        "slots": status.slots,
        "busy": sum(order.verb in SLOT_VERBS for order in orders),
        "gpus": [_gpu(device, devices.get(device.uuid)) for device in status.devices],
    }


def _node_of(entry: Entry) -> Node:
    assert isinstance(entry.value, Node)  # noqa: S101 - only nodes are given
    return entry.value


def _gpu(device: PresenceDevice, now: DeviceStatus | None) -> dict[str, Any]:
    found: dict[str, Any] = {
        "index": device.index,
        "uuid": device.uuid,
        "product": device.product,
        "capacity": device.capacity_bytes,
    }
    if now is not None:
        found |= {
            "used": now.used,
            "sessions": sum(len(domain.sessions) for domain in now.domains),
            "waiting": sum(len(domain.waiting) for domain in now.domains),
            "fence": now.fence.phase if now.fence else "",
            "loads": len(now.loads),
        }
    return found


def _artifact_row(
    entry: Entry, content: SnapshotContent, committed: Committed, readers: Mapping[str, str]
) -> dict[str, Any]:
    """Return the row of an artifact; `readers` are the restored pods by the uids of restores."""
    status, reference = content.status, content.spec.snapshot_ref
    verdict, message = _verdict(status)
    return {
        "key": entry.key,
        "name": entry.name,
        "snapshot": f"{reference.namespace}/{reference.name}",
        "size": committed.bytes,
        "figure": figure(content),
        "generation": committed.generation,
        "parts": len(committed.parts),
        "readers": [readers.get(uid, uid) for uid in status.readers],
        "verdict": verdict,
        "message": message.partition(NEXT)[0],
        "created": entry.created,
    }


def _verdict(status: SnapshotContentStatus) -> tuple[str, str]:
    """Return whether a committed artifact is known to be whole, and the message about that."""
    rows = {row.type: row.message for row in status.conditions if row.status == "True"}
    if "Quarantined" in rows:
        return "Quarantined", rows["Quarantined"]
    if status.verified < status.verifications:
        return "Verifying", ""
    return ("Verified", rows["Verified"]) if "Verified" in rows else ("Committed", "")


# What is wrong.


def problems(entries: Sequence[Entry], facts: Facts) -> list[dict[str, Any]]:
    """Return what needs attention, the gravest first, each with what to do next."""
    found: list[dict[str, Any]] = []
    if facts.bus:
        following = "start nats-server, or look at its log; nothing is lost meanwhile"
        found.append(_problem("bus", "NATS", "BusUnavailable", facts.bus, following))
    if facts.operator and not facts.bus:
        following = "start the operator, or look at its log; what is shown may be out of date"
        found.append(_problem("operator", "Operator", "BusUnavailable", facts.operator, following))
    found += [_node_problem(e) for e in entries if isinstance(e.value, Node) and e.state == "bad"]
    for entry in entries:
        if isinstance(entry.value, Node):
            held = views.held_back(entry.name, facts.paused)
            found += [_held_problem(entry, each) for each in held]
    found += [_object_problem(e) for e in _failed(entries)]
    return found + [
        _dead_problem(count, message)
        for count, message in facts.dead.values()
        if facts.now - message.at <= DEAD_SHOWN_S
    ]


def _failed(entries: Sequence[Entry]) -> Iterable[Entry]:
    """Return what failed; of an object and those that it led to, the one a user made.

    A capture that a user has aborted needs no attention.
    """
    bad = [e for e in entries if e.state == "bad" and not isinstance(e.value, Node)]
    uids = {e.uid for e in bad}
    shown = (e for e in bad if e.kind in SHOWN_KINDS and e.reason != Aborted.__name__)
    return [e for e in shown if not set(e.owners) & uids]


def _problem(key: str, what: str, reason: str, message: str, following: str) -> dict[str, Any]:
    return {"key": key, "what": what, "reason": reason, "message": message, "next": following}


def _node_problem(entry: Entry) -> dict[str, Any]:
    words = "its pods are Unknown" if entry.phase == "Lost" else "nothing new is placed on it"
    return _problem(
        entry.key,
        f"Node {entry.name} is {entry.phase}",
        entry.reason,
        f"{entry.message or 'no presence'}; {words}",
        f"start the agent of {entry.name} again, or look at its log",
    ) | {"since": entry.since}


def _held_problem(entry: Entry, held: views.HeldBack) -> dict[str, Any]:
    return _problem(
        f"{entry.key}/{held.service}",
        f"Node {entry.name} gets no orders",
        "OrdersPaused",
        held.message,
        held.next_step,
    )


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


def _dead_problem(count: int, newest: DeadLetter) -> dict[str, Any]:
    messages = f"{count} dead letters" if count > 1 else "A dead letter"
    return _problem(
        f"dead-{newest.node}",
        f"{messages} on {newest.node}, the newest for its {newest.service}",
        newest.failure.reason,
        f"{newest.subject}: {newest.failure.message}",
        newest.failure.next_step
        or "find out who sent it; the operator publishes its own orders again",
    ) | {"since": newest.at}


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
    meta, plural = entry.value.metadata, entry.key.partition("/")[0]
    place = f" -n {meta.namespace}" if meta.namespace not in (None, "default") else ""
    key = subjects.object_key(plural, meta.namespace, meta.name)
    get = f"{ours} get {entry.kind.lower()} {meta.name}{place}"
    stream = f"{nats} stream view {subjects.SPANS} --subject '{subjects.spans_of(entry.trace)}'"
    trace = f"{ours} trace {entry.kind.lower()}/{meta.name}{place}"
    return {
        "object": [f"{nats} kv get {subjects.OBJECTS_BUCKET} {key}", f"{get} -o yaml"],
        "flow": [f"{nats} sub 'snap.report.>'", get],
        "trace": [stream, trace] if entry.trace else [],
    }


def _programs(context: str) -> tuple[str, str]:
    if not context:
        return "nats", "snapshotctl"
    return f"nats --context {context}", f"NATS_CONTEXT={context} snapshotctl"
