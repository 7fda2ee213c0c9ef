"""Turns the lossy progress messages of all orders into parts on the screen."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping

from snapshot_shared.orders import Progress
from snapshotctl.domain.progress import Board, PartProgress
from snapshotctl.ports import Parts


class Following:
    """One phase of one object, as soon as it is known which object that is."""

    def __init__(self, phase: str, parts: Parts, monotonic: Callable[[], float]) -> None:
        """Listen at once; show from `begin` on."""
        self._parts = parts
        self._monotonic = monotonic
        self._phase = phase
        self._board: Board | None = None
        self._early: list[tuple[Progress, float]] = []

    async def listen(self, messages: AsyncIterator[Progress]) -> None:
        """Take messages, for ever."""
        async for message in messages:
            if self._board is None:
                self._early.append((message, self._monotonic()))
                del self._early[:-1000]
            else:
                self._show(self._board.heard(message, self._monotonic()))

    def begin(self, owner: str, plan: Mapping[str, int]) -> None:
        """Show the planned parts (with their bytes) of an object, and what was heard of them."""
        board = self._board = Board(self._phase, frozenset({owner}))
        early, self._early = self._early, []
        now = min((at for _, at in early), default=self._monotonic())
        for part, total in plan.items():
            self._show(board.planned(part, total, now))
        for message, at in early:
            self._show(board.heard(message, at))

    def settled(self, part: str, size: int) -> None:
        """Show what the committed manifest says of a part."""
        if self._board is not None:
            self._show(self._board.settled(part, size, self._monotonic()))

    def _show(self, part: PartProgress | None) -> None:
        if part is not None:
            self._parts.show(part)
