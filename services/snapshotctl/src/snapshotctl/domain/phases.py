"""The phases of a capture or a restore as they are known from the store: what began, what ended."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from snapshot_shared.objects import AnyObject, OrderStatus, Pod, SnapshotContent, condition
from snapshot_shared.orders import TERMINAL
from snapshotctl.domain import formats
from snapshotctl.domain.history import FORGET_ATTEMPT, clock
from snapshotctl.domain.kin import Kin

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
    """List the phases of a story in the order in which they began."""
    found = [_order(item) for _, item in kin.orders]
    warming = (_warming(value) for value in kin.told if isinstance(value, Pod))
    found += [phase for phase in warming if phase is not None]
    return sorted(found, key=lambda phase: phase.began)


def _order(item: OrderStatus) -> Phase:
    part = item.order.partition("-")[2][37:]
    name = f"{_NAMES.get(item.verb, item.verb)} {part}".rstrip()
    again = f" (attempt {item.attempt})" if 1 < item.attempt < FORGET_ATTEMPT else ""
    failure = item.final.failure if item.final else None
    is_lost = item.state == "lost"
    why = f"{failure.reason}: {failure.message}" if failure else "NodeLost" if is_lost else ""
    is_well = item.final is not None and item.final.kind == TERMINAL[item.verb]
    ended = item.ended_at if item.final is not None or is_lost else 0.0
    if not is_well and not why and item.final is not None and item.final.kind == "exited":
        why = item.final.message or "the worker ended"
    where = f"{item.service}@{item.node}"
    return Phase((item.order, item.attempt), name + again, where, item.ordered_at, ended, why)


def _warming(pod: Pod) -> Phase | None:
    """From the start of the processes to the word that a capture may begin."""
    run = next((item for item in pod.status.orders if item.verb == "run"), None)
    if run is None or not run.ended_at or pod.status.restore is not None:
        return None
    held = condition(pod.status.conditions, "Ready")
    since = formats.instant(held.last_transition_time) if held and held.status == "True" else None
    ended = max(since, run.ended_at) if since is not None else 0.0
    why = ""
    if pod.status.phase == "Failed":
        at = formats.instant(held.last_transition_time) if held else None
        ended, why = max(at or 0.0, run.ended_at), pod.status.message or pod.status.reason
    return Phase(
        (pod.metadata.uid, 0), WARM, f"on {pod.status.node_name}", run.ended_at, ended, why
    )


def planned(members: Sequence[AnyObject]) -> tuple[str, dict[str, int]] | None:
    """Give the uid of the object whose parts move, and their bytes by part, once they are fixed."""
    for value in members:
        if isinstance(value, Pod) and value.status.restore is not None:
            loads = [item for item in value.status.orders if item.verb == "load"]
            parts = {item.payload["part"]: item.payload.get("bytes", 0) for item in loads}
            return (value.metadata.uid, parts) if loads else None
        if isinstance(value, SnapshotContent) and value.status.vector:
            plan = {e.part: e.layout.bytes if e.layout else 0 for e in value.status.vector}
            return value.metadata.uid, plan
    return None


def settled_parts(members: Sequence[AnyObject]) -> dict[str, int]:
    """Give the bytes of the parts that are whole: staged in a capture, loaded in a restore."""
    restoring = any(isinstance(v, Pod) and v.status.restore is not None for v in members)
    verbs = ("load", "restore") if restoring else ("dump", "save")
    found = {}
    for value in members:
        for item in value.status.orders if isinstance(value, Pod | SnapshotContent) else ():
            final = item.final
            if item.verb not in verbs or final is None or final.failure is not None:
                continue
            name = final.part.part if final.part else item.payload.get("part", "process")
            found[name] = final.part.bytes if final.part else final.bytes
    return found
