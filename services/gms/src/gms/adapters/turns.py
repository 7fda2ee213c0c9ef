"""How the clients of a socket share the event loop."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Hashable


class Turns:
    """Schedules pieces of work over the turns of the event loop.

    All clients together work for `budget_s` in one turn. What is left waits: one piece a turn, from
    each owner in its turn, so that many clients of one owner get no more than one of another.
    """

    def __init__(self, budget_s: float, clock: Callable[[], float] = time.perf_counter) -> None:
        """Allow so many seconds a turn."""
        self._budget_s = budget_s
        self._clock = clock
        self._ends: float | None = None
        self._waiting: dict[Hashable, deque[asyncio.Future[None]]] = {}

    async def take(self, owner: Hashable) -> None:
        """Wait until one more piece of work may be done."""
        if self.is_free():
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(owner, deque()).append(turn)
        await turn

    def is_free(self) -> bool:
        """Whether one more piece of work may be done at once."""
        return self._has_time() and not self._waiting

    def _has_time(self) -> bool:
        if self._ends is None:
            self._ends = self._clock() + self._budget_s
            asyncio.get_running_loop().call_soon(self._next_turn)
        return self._clock() < self._ends

    def _next_turn(self) -> None:
        self._ends = None
        if self._waiting:
            # It runs before the next one is woken, so its owner is back in the queue by then.
            self._wake()
            self._has_time()

    def _wake(self) -> None:
        """Wake the next one that is not cancelled."""
        while self._waiting:
            owner = next(iter(self._waiting))
            queue = self._waiting.pop(owner)
            turn = queue.popleft()
            if queue:
                self._waiting[owner] = queue
            if not turn.done():
                turn.set_result(None)
                return
