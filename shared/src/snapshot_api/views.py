"""What people see of an object: its phase, its state, its orders, and how far its parts are.

The page, the metrics and the command line share these functions, so that an object has one phase
wherever it is shown: the one in the STATUS or PHASE column of kubectl.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any, Literal, NamedTuple

import msgspec
from msgspec.structs import replace

from snapshot_api import figures
from snapshot_api.facts import CORDONED, Job, Pod
from snapshot_api.kinds import AnyObject, kind_of
from snapshot_api.meta import OrderStatus, condition, is_true
from snapshot_api.v1alpha1.checkpoint import DynamoCheckpoint
from snapshot_api.v1alpha1.content import SnapshotContent, SnapshotContentStatus
from snapshot_api.v1alpha1.restore import SnapshotRestore
from snapshot_api.v1alpha1.snapshot import Snapshot
from snapshot_api.well_known import POD_SPEC
from snapshot_shared import subjects
from snapshot_shared.codec import encode_json
from snapshot_shared.ids import NodeName
from snapshot_shared.orders import LoadOrder, Progress, SaveOrder, Service, order_in
from snapshot_shared.transitions import RESTORE
from snapshot_shared.units import size

State = Literal["ok", "busy", "waiting", "bad", "off"]
"""Well; under way; waiting for something else; failed or damaged; ended, or closed to new work."""

Ordered = SnapshotContent | SnapshotRestore | Pod
"""The kinds that have orders."""
_SERVICES: tuple[Service, ...] = ("agent", "gms")
BAD_ORDERS = ("failed", "rejected", "lost")

_STATES: dict[str, State] = {
    "Complete": "off",
    "Failed": "bad",
    "Lost": "bad",
    "NotReady": "bad",
    "Pending": "waiting",
    "Ready": "ok",
    f"Ready,{CORDONED}": "off",
    "Restored": "ok",
    "Succeeded": "off",
    "Terminating": "waiting",
    "Unknown": "waiting",
}


def phase(value: AnyObject, restore: SnapshotRestore | None = None) -> str:
    """Return the phase of an object. A pod has that of `restore`, its own, until that has ended.

    What was captured and is damaged keeps the phase Ready; its `state` is bad.
    """
    if value.metadata.deletion_timestamp:
        return "Terminating"
    holder = phase_holder(value, restore)
    return kind_of(holder).phase(holder)


def phase_holder(value: AnyObject, restore: SnapshotRestore | None = None) -> AnyObject:
    """Return the object whose phase is shown: the restore of a pod while both are under way."""
    is_over = not isinstance(value, Pod) or value.status.phase not in ("Pending", "Running")
    if restore is None or is_over or restore.status.state in RESTORE.terminal():
        return value
    return restore


def state(value: AnyObject, restore: SnapshotRestore | None = None) -> State:
    """Return in one word how an object is; `restore` is that of a pod."""
    found = phase(value, restore)
    rows = value.status.conditions
    if found != "Terminating" and any(is_true(rows, name) for name in ("Failed", "Quarantined")):
        return "bad"
    ready = condition(rows, "Ready")
    if found == "Ready" and ready is not None and ready.status == "False":
        return "bad"
    if found == "Running":
        is_ready = value.status.ready > 0 if isinstance(value, Job) else is_true(rows, "Ready")
        return "ok" if is_ready else "busy"
    return _STATES.get(found, "bad" if found.startswith("NotReady") else "busy")


# Orders and parts.


class HeldBack(NamedTuple):
    """A service of a node that gets no orders, because people have paused its durable."""

    service: Service
    message: str
    next_step: str


def held_back(node: str, paused: Collection[str]) -> list[HeldBack]:
    """Return the services of a node that get no orders; `paused` are durables of ORDERS."""
    return [
        HeldBack(
            service,
            f"{service} gets no orders: its durable {name} is paused",
            f"nats consumer resume {subjects.ORDERS} {name}",
        )
        for service in _SERVICES
        if (name := subjects.durable(NodeName(node), service)) in paused
    ]


def orders_of(value: AnyObject | None) -> list[OrderStatus]:
    """Return the orders that an object remembers; only some kinds have any."""
    return value.status.orders if isinstance(value, Ordered) else []


def is_answered(order: OrderStatus) -> bool:
    """Whether no report can change an order any more: it ended, or its node is gone."""
    return order.final is not None or order.state == "lost"


def part_of(order_id: str) -> str:
    """Return the part that the id of an order names; empty when it names none."""
    # `<verb>-<uid of 36 characters>[-<part>]`
    return order_id.partition("-")[2][37:]


class Part(NamedTuple):
    """One part of an artifact: bytes done and in all (0: not known), and the step under way."""

    part: str
    done: int
    total: int
    state: State
    step: str = ""


def progress(values: Iterable[AnyObject], received: Mapping[str, Progress]) -> list[Part]:
    """Return the parts that objects write or read together, the process part first.

    `received` is the last message of each order; one of another attempt counts as none. A part
    that is done counts whole.
    """
    parts: dict[str, Part] = {}
    orders: list[OrderStatus] = []
    for value in values:
        if isinstance(value, SnapshotContent):
            parts |= {part.part: part for part in _planned(value)}
        orders += orders_of(value)
    for order in orders:
        found = _moved(order, received)
        if found is not None:
            known = parts.get(found.part)
            parts[found.part] = found._replace(total=found.total or (known.total if known else 0))
    return sorted(parts.values(), key=lambda part: (part.part != "process", part.part))


def received_for(order: OrderStatus, received: Mapping[str, Progress]) -> Progress | None:
    """Return the last progress of this attempt of an order."""
    found = received.get(order.order)
    return found if found is not None and found.attempt == order.attempt else None


def _planned(content: SnapshotContent) -> list[Part]:
    committed = content.status.committed
    if committed is not None:
        return [Part(part.part, part.bytes, part.bytes, "ok") for part in committed.parts]
    return [
        Part(entry.part, 0, entry.layout.bytes if entry.layout else 0, "waiting")
        for entry in content.status.vector
    ]


def _moved(order: OrderStatus, received: Mapping[str, Progress]) -> Part | None:
    """Return the part that an order moves, once something is known of it."""
    match order.verb:
        case "dump" | "place" | "restore":
            part, size = "process", 0
        case "save" | "load":
            part, size = part_of(order.order), _size_in(order)
        case _:
            return None
    if order.state in BAD_ORDERS:
        return Part(part, 0, 0, "bad")
    if order.final is not None:
        size = (order.final.part.bytes if order.final.part else order.final.bytes) or size
        return Part(part, size, size, "ok")
    last = received_for(order, received)
    if last is None:
        return None
    return Part(part, min(last.done, last.total), last.total, "busy", last.step)


def _size_in(order: OrderStatus) -> int:
    match order_in(order.payload):
        case SaveOrder(layout=layout):
            return layout.bytes
        case LoadOrder(bytes=size):
            return size
        case _:
            return 0


# Columns.


def with_columns(value: AnyObject) -> AnyObject:
    """Return an object of ours with the columns of its status: phase, progress, size and times."""
    columns: dict[str, Any]
    match value:
        case DynamoCheckpoint(status=status) | Snapshot(status=status):
            columns = {"size": size(status.bytes) if status.bytes else ""}
        case SnapshotContent(status=status):
            held, times = status.committed, figures.capture_times(status)
            columns = {"size": size(held.bytes) if held else "", "progress": _done_of(value)}
            columns |= {"paused_seconds": times.paused_s, "captured_seconds": times.captured_s}
        case SnapshotRestore(status=status):
            columns = {"progress": _done_of(value)}
            columns["restored_seconds"] = figures.restored_seconds(status)
        case _:
            return value
    columns["phase"] = phase(value)
    if all(getattr(status, name) == text for name, text in columns.items()):
        return value
    changed: Any = replace(value, status=replace(status, **columns))
    return changed  # type: ignore[no-any-return]


def _done_of(value: SnapshotContent | SnapshotRestore) -> str:
    """Return how many parts of an attempt are complete, and of how many: `1/3`."""
    status = value.status
    if isinstance(status, SnapshotContentStatus) and status.committed is not None:
        total = len(status.committed.parts)
        return f"{total}/{total}"
    moving = [
        order
        for order in status.orders
        if order.verb in ("dump", "save", "load", "restore") and order.attempt == status.attempt
    ]
    # The process comes last in a restore, and has no order before.
    loads = sum(order.verb == "load" for order in moving) + 1
    total = len(status.vector) if isinstance(status, SnapshotContentStatus) else loads
    done = sum(order.final is not None and order.state not in BAD_ORDERS for order in moving)
    return f"{done}/{total}" if moving else ""


def mirrored(value: AnyObject) -> dict[str, Any]:
    """Return metadata, identity and status of an object, never the spec of a pod."""
    shown: dict[str, Any] = msgspec.json.decode(encode_json(value))
    shown["metadata"].get("annotations", {}).pop(POD_SPEC, None)
    identity = shown.pop("spec", {}).get("identity")
    return shown | ({"identity": identity} if identity else {})


MAX_READERS = 5
"""How many pods a warning names."""


def warning_of_readers(
    kind: str, namespace: str | None, name: str, restores: Iterable[SnapshotRestore]
) -> str:
    """Return a warning that names the pods that are restored from a source; empty without one.

    The source is a DynamoCheckpoint, a Snapshot or a SnapshotContent.
    """

    def reads(restore: SnapshotRestore) -> bool:
        if kind == "SnapshotContent":
            return restore.status.content_name == name
        return (restore.metadata.namespace, restore.spec.source) == (namespace, name)

    found = sorted(restore.spec.pod_ref.name for restore in restores if reads(restore))
    if not found:
        return ""
    more = f" and {len(found) - MAX_READERS} more" if len(found) > MAX_READERS else ""
    names = ", ".join(found[:MAX_READERS])
    return f"pods are restored from {name}, and wait if they are created again: {names}{more}"
