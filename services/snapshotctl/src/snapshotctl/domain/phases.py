"""The phases of a capture or a restore as they are known from the store: what began, what ended."""

from __future__ import annotations

from typing import NamedTuple

from snapshot_shared.objects import (
    AnyObject,
    OrderStatus,
    Pod,
    SnapshotContent,
    SnapshotRestore,
    condition,
)
from snapshot_shared.orders import TERMINAL, LoadOrder, order_in
from snapshotctl.domain import formats
from snapshotctl.domain.history import FORGET_ATTEMPT, clock
from snapshotctl.domain.kin import Kin, is_restored

_NAMES = {
    "run": "start the worker",
    "prepare": "prepare: quiet and fenced",
    "dump": "process part",
    "save": "save",
    "seal": "seal",
    "release": "let the worker go on",
    "load": "load",
    "commit": "commit",
    "restore": "restore the process",
    "verify": "verify",
    "stop": "stop the worker",
    "drop": "forget memory",
    "abort": "abort",
    "delete": "delete",
}
WARM = "the worker warms up"


class Phase(NamedTuple):
    """One phase. Times are seconds since the epoch; `ended` is 0 while it goes on."""

    key: tuple[str, int]
    name: str
    where: str
    began: float
    ended: float
    failure: str = ""

    def line(self) -> str:
        """Write the phase as one line: its beginning while it goes on, else how long it took."""
        if not self.ended:
            return f"{clock(self.began):<12}  {self.name:<28} {self.where}".rstrip()
        took = formats.span_time(self.ended - self.began)
        tail = f"failed: {self.failure}" if self.failure else "done"
        return formats.plain(f"{clock(self.ended):<12}  {self.name:<28} {took:>8}  {tail}")


def phases(kin: Kin) -> list[Phase]:
    """List the phases of a story in the order in which they began.

    How the pod of a capture was once restored is a story of its own.
    """
    found = [_order(item) for value, item in kin.orders if not _is_other(kin, value)]
    pods = [v for v in kin.told if isinstance(v, Pod) and not _is_other(kin, v)]
    found += [phase for phase in map(_warming, pods) if phase is not None]
    return sorted(found, key=lambda phase: phase.began)


def _is_other(kin: Kin, value: AnyObject) -> bool:
    is_restore = isinstance(kin.root, Pod | SnapshotRestore)
    return not is_restore and isinstance(value, Pod) and is_restored(value)


def _order(item: OrderStatus) -> Phase:
    name = f"{_NAMES.get(item.verb, item.verb)} {_part(item)}".rstrip()
    again = f" (attempt {item.attempt})" if 1 < item.attempt < FORGET_ATTEMPT else ""
    failure = item.final.failure if item.final else None
    is_lost = item.state == "lost"
    why = f"{failure.reason}: {failure.message}" if failure else "NodeLost" if is_lost else ""
    is_well = item.final is not None and item.final.kind == TERMINAL[item.verb]
    ended = formats.seconds(item.ended_at) if item.final is not None or is_lost else 0.0
    if not is_well and not why and item.final is not None and item.final.kind == "exited":
        why = item.final.message or "the worker ended"
    where = f"{item.service}@{item.node}"
    began = formats.seconds(item.ordered_at)
    return Phase((item.order, item.attempt), name + again, where, began, ended, why)


def _part(item: OrderStatus) -> str:
    """Return the part that the id of an order names, or an empty string."""
    return item.order.partition("-")[2][37:]


def _warming(pod: Pod) -> Phase | None:
    """From the start of the processes to the word that a capture may begin."""
    run = next((item for item in pod.status.orders if item.verb == "run"), None)
    if run is None or run.ended_at is None or is_restored(pod):
        return None
    began = run.ended_at.timestamp()
    held = condition(pod.status.conditions, "Ready")
    since = formats.instant(held.last_transition_time) if held and held.status == "True" else None
    ended = max(since, began) if since is not None else 0.0
    why = ""
    if pod.status.phase == "Failed":
        at = formats.instant(held.last_transition_time) if held else None
        ended, why = max(at or 0.0, began), pod.status.message or pod.status.reason
    return Phase((pod.metadata.uid, 0), WARM, f"on {pod.status.node_name}", began, ended, why)


def planned(kin: Kin) -> tuple[str, dict[str, int]] | None:
    """Give the uid of the object whose parts move, and their bytes by part, once they are fixed."""
    owner = _mover(kin)
    if isinstance(owner, SnapshotRestore):
        loads = [order_in(item.payload) for item in owner.status.orders if item.verb == "load"]
        parts = {load.part: load.bytes for load in loads if isinstance(load, LoadOrder)}
        return (owner.metadata.uid, parts) if parts else None
    if owner is None or not owner.status.vector:
        return None
    plan = {e.part: e.layout.bytes if e.layout else 0 for e in owner.status.vector}
    return owner.metadata.uid, plan


def settled_parts(kin: Kin) -> dict[str, int]:
    """Give the bytes of the parts that are whole: staged in a capture, loaded in a restore."""
    owner = _mover(kin)
    verbs = ("load", "restore") if isinstance(owner, SnapshotRestore) else ("dump", "save")
    found = {}
    for item in owner.status.orders if owner is not None else ():
        final = item.final
        if item.verb not in verbs or final is None or final.failure is not None:
            continue
        name = final.part.part if final.part else _part(item) or "process"
        found[name] = final.part.bytes if final.part else final.bytes
    return found


def _mover(kin: Kin) -> SnapshotRestore | SnapshotContent | None:
    """Return the object whose orders move parts: the restore of a pod, or else the content."""
    if isinstance(kin.root, Pod | SnapshotRestore):
        return kin.restore
    return kin.content
