"""How far each part of a capture or a restore is, from lossy messages.

Messages may be lost, repeated or late; a part never goes back. What the committed manifest says
is the last word on its size.
"""

from __future__ import annotations

from typing import NamedTuple

from snapshot_shared.ids import OrderId, verb_of
from snapshot_shared.orders import Progress
from snapshotctl.domain import formats

VERBS = {"dump": "capture", "save": "capture", "load": "restore", "restore": "restore"}


class PartProgress(NamedTuple):
    """One part: bytes done and in all, and when we heard of it first and last (monotonic s)."""

    part: str
    done: int
    total: int
    first_at: float
    last_at: float
    is_final: bool = False

    @property
    def seconds(self) -> float:
        """How long it has been under way."""
        return self.last_at - self.first_at

    @property
    def note(self) -> str:
        """How fast it goes or went, where that was seen, and whether it is done."""
        speed = formats.rate(self.done, self.seconds)
        if not self.is_final:
            return speed
        return "in the manifest" if speed == "-" else f"{speed}, in the manifest"

    def line(self) -> str:
        """Write as one plain line whose first number are the bytes done."""
        if not self.total:
            return f"{self.part}: {self.done} bytes (size not known yet)"
        share = f"{formats.size(self.done)} of {formats.size(self.total)}"
        return f"{self.part}: {self.done} of {self.total} bytes ({share}, {self.note})"


class Board:
    """All parts of one phase. Each method gives the part when it has moved, else None."""

    def __init__(self, phase: str, owners: frozenset[str]) -> None:
        """Follow a phase (`capture` or `restore`) of the objects with these uids."""
        self.phase = phase
        self._owners = owners
        self.parts: dict[str, PartProgress] = {}

    def planned(self, part: str, total: int, now: float) -> PartProgress | None:
        """Take note of a part of the plan."""
        if part in self.parts:
            return None
        self.parts[part] = PartProgress(part, 0, total, now, now)
        return self.parts[part]

    def heard(self, message: Progress, now: float) -> PartProgress | None:
        """Take note of a progress message."""
        order = OrderId(message.order)
        if VERBS.get(verb_of(order)) != self.phase:
            return None
        if not any(owner in message.order for owner in self._owners):
            return None
        known = self.parts.get(message.part)
        if known is None:
            known = PartProgress(message.part, -1, message.total, now, now)
        if known.is_final or message.done <= known.done:
            return None
        moved = known._replace(done=message.done, total=message.total, last_at=now)
        self.parts[message.part] = moved
        return moved

    def settled(self, part: str, size: int, now: float) -> PartProgress:
        """Take the size that the committed manifest gives: nothing moves the part any more."""
        known = self.parts.get(part) or PartProgress(part, -1, size, now, now)
        last_at = known.last_at if known.done == size else now
        self.parts[part] = known._replace(done=size, total=size, last_at=last_at, is_final=True)
        return self.parts[part]
