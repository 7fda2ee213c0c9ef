"""How far each part of a capture or a restore is, from progress messages.

Messages may be lost, repeated or late; a part never goes back. Its final size is that of the
committed manifest.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from typing import NamedTuple

from snapshot_api import figures
from snapshot_shared.ids import OrderId, verb_of
from snapshot_shared.orders import Progress
from snapshotctl.domain import formats

MAX_EARLY = 1000
"""How many messages are kept before the object is known."""

VERBS = {
    "dump": "capture",
    "save": "capture",
    "load": "restore",
    "place": "restore",
    "restore": "restore",
    "verify": "verify",
}
WHOLE = "artifact"
"""The one part of a verification, whose messages count all parts together."""


class PartProgress(NamedTuple):
    """One part: bytes done and in all, and when it was seen first and last (monotonic s)."""

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
        """Its rate and how long it will take, where that was seen, and whether it is complete."""
        speed = figures.speed(self.done, self.total, self.seconds)
        return ", ".join(filter(None, (speed, "in the manifest" if self.is_final else "")))

    def line(self) -> str:
        """Return one plain line, which begins with what is done."""
        if not self.total:
            return f"{self.part}: {formats.size(self.done)}, size not known yet"
        share = f"{formats.size(self.done)} of {formats.size(self.total)}"
        return f"{self.part}: {', '.join(filter(None, (share, self.note)))}"


class Board:
    """All parts of one phase. Each method returns the part when it has moved, else None."""

    def __init__(self, phase: str, owners: frozenset[str]) -> None:
        """Show the phase `capture`, `restore` or `verify` of the objects with these uids."""
        self.phase = phase
        self._owners = owners
        self.parts: dict[str, PartProgress] = {}

    def plan(self, part: str, total: int, now: float) -> PartProgress | None:
        """Add a part of the plan."""
        if part in self.parts:
            return None
        self.parts[part] = PartProgress(part, 0, total, now, now)
        return self.parts[part]

    def update(self, message: Progress, now: float) -> PartProgress | None:
        """Apply a progress message."""
        order = OrderId(message.order)
        if VERBS.get(verb_of(order)) != self.phase:
            return None
        if not any(owner in message.order for owner in self._owners):
            return None
        part = WHOLE if self.phase == "verify" else message.part
        known = self.parts.get(part)
        if known is None:
            known = PartProgress(part, -1, message.total, now, now)
        # Messages may be late or repeated; those of another try begin at 0 again.
        if known.is_final or message.done <= known.done:
            return None
        moved = known._replace(done=message.done, total=message.total, last_at=now)
        self.parts[part] = moved
        return moved

    def complete(self, part: str, size: int, now: float) -> PartProgress:
        """Apply the size of the committed manifest: nothing moves the part after that."""
        known = self.parts.get(part) or PartProgress(part, -1, size, now, now)
        last_at = known.last_at if known.done == size else now
        self.parts[part] = known._replace(done=size, total=size, last_at=last_at, is_final=True)
        return self.parts[part]


class ProgressDisplay:
    """The parts of one phase of one object, shown as soon as it is known which object that is."""

    def __init__(
        self, phase: str, show: Callable[[PartProgress], None], monotonic: Callable[[], float]
    ) -> None:
        """Show nothing until `begin`; keep the messages that come earlier."""
        self._show_part = show
        self._monotonic = monotonic
        self._phase = phase
        self._board: Board | None = None
        self._early: list[tuple[Progress, float]] = []

    async def receive(self, messages: AsyncIterator[Progress]) -> None:
        """Apply messages until cancelled."""
        async for message in messages:
            if self._board is None:
                self._early.append((message, self._monotonic()))
                del self._early[:-MAX_EARLY]
            else:
                self._show(self._board.update(message, self._monotonic()))

    def begin(self, owner: str, plan: Mapping[str, int]) -> None:
        """Show the planned parts (with their bytes) of an object, and the messages kept of them."""
        board = self._board = Board(self._phase, frozenset({owner}))
        early, self._early = self._early, []
        now = min((at for _, at in early), default=self._monotonic())
        for part, total in plan.items():
            self._show(board.plan(part, total, now))
        for message, at in early:
            self._show(board.update(message, at))

    def complete(self, part: str, size: int) -> None:
        """Show the size of a part in the committed manifest."""
        if self._board is not None:
            self._show(self._board.complete(part, size, self._monotonic()))

    def _show(self, part: PartProgress | None) -> None:
        if part is not None:
            self._show_part(part)
