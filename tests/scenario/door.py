"""What keeps the clients of a GPU memory service from taking more than their share.

The turns and the shares are the product's own. Each piece of work keeps the server's process busy.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

from gms.adapters.turns import Turns
from gms.domain.sessions import Peer
from gms.domain.shares import Shares, TooManySessions
from tests.scenario.loop import CURRENT

if TYPE_CHECKING:
    from collections.abc import Hashable

    from tests.scenario.loop import Process
    from tests.scenario.world import World

HOSTILE = "hostile"
"""The pod of the clients that take more than their share."""
LIMITS = {"all": 64, "user": 48, "pod": 24, "process": 12}
PIECE_S, TURN_S = 0.0002, 0.001
PIECES_A_TURN = round(TURN_S / PIECE_S)


class Door:
    """What is between the clients of a server and its sessions, and what must hold there."""

    def __init__(self, world: World, process: Process) -> None:
        self._world = world
        self._process = process
        self._shares = Shares(LIMITS, "clients")
        self._turns = Turns(TURN_S, lambda: self.pieces * PIECE_S)
        self.pieces = 0
        """How many pieces of work there have been."""
        self._turn = self._in_turn = 0
        self._waiting: Counter[Hashable] = Counter()

    @contextlib.contextmanager
    def entering(self, peer: Peer) -> Iterator[None]:
        """Count a client in, unless it is refused within the block."""
        try:
            self._shares.check(peer)
            self._shares.add(peer)
            try:
                yield
            except BaseException:
                self._shares.remove(peer)
                raise
        except TooManySessions as error:
            if peer.pod != HOSTILE:
                self._world.rules.fail("lost", f"{CURRENT.get()} was refused {peer}: {error}")
            else:
                self._world.refused += 1
            raise

    def leave(self, peer: Peer) -> None:
        """Count a client out."""
        self._shares.remove(peer)

    async def turn(self, owner: Hashable) -> None:
        """Wait until a client may have its next piece of work done.

        An owner that asks for one waits for no more than what is left of a turn and one piece of
        each owner that waits already; and one turn of the loop has no more pieces than two budgets.
        """
        asked_at, ahead = self.pieces, len(+self._waiting)
        is_first = not self._waiting[owner]
        self._waiting[owner] += 1
        try:
            await self._turns.take(owner)
        finally:
            self._waiting[owner] -= 1
        others = self.pieces - asked_at
        if is_first and others > PIECES_A_TURN + ahead + 1:
            self._world.rules.fail("lost", f"{owner} waited while others did {others} pieces")
        self.pieces += 1
        self._process.use(PIECE_S)
        turn = self._world.loop.turns
        self._in_turn = self._in_turn + 1 if turn == self._turn else 1
        self._turn = turn
        if self._in_turn > 2 * PIECES_A_TURN:
            self._world.rules.fail("lost", f"{self._in_turn} pieces in one turn of the loop")
