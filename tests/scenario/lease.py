"""Which operator of a simulated world is the active one.

A file lock goes with its holder's process, and a holder that is stopped keeps it. A lease has to be
renewed: whoever is stopped or cut off for too long loses it, and learns that when it looks again.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.scenario.loop import Process
    from tests.scenario.world import World

LASTS_S = 15.0
"""How long a lease is held without a renewal, in seconds."""
RENEW_S = 4.0
GIVE_UP_S = 10.0
"""How long its holder goes on without a renewal that succeeded, in seconds."""
ENDING_S = 0.01
"""How long a write may take that was under way when the loss was noticed, in seconds."""
LOOK_S = 0.5
"""The longest time that a look at the lease takes, in seconds."""


class Lease:
    """The lock or the lease of one world. It is no process: whoever holds it may end."""

    def __init__(self, world: World) -> None:
        """`Settings.lease` decides which of the two it is."""
        self._world = world
        self.is_file = world.settings.lease == "file"
        self.holder: Process | None = None
        self.active: dict[Process, int] = {}
        """The processes that work as the active one, each with the number of its term."""
        self._noticed: dict[Process, float] = {}
        self._terms = 0
        self._renewed_at = 0.0
        self._waiting: dict[Process, asyncio.Future[None]] = {}

    def take(self, process: Process) -> bool:
        """Give a process the lease if it is free."""
        if not self._is_free:
            return False
        self.holder, self._renewed_at = process, self._world.loop.now
        self._terms += 1
        self.active[process] = self._terms
        process.at_exit(self, lambda: self._ended(process))
        self._world.note(f"{process} is the active operator")
        return True

    @property
    def _is_free(self) -> bool:
        if self.holder is None:
            return True
        return not self.is_file and self._world.loop.now >= self._expires_at

    @property
    def _expires_at(self) -> float:
        return self._renewed_at + LASTS_S

    def renew(self, process: Process) -> bool:
        """Renew the lease; False when another has it."""
        if self.holder is not process:
            return False
        self._renewed_at = self._world.loop.now
        return True

    def is_noticed(self, process: Process) -> bool:
        """Whether a process has had the time to end its work since it learned of its loss."""
        at = self._noticed.get(process)
        return at is not None and self._world.loop.now > at + ENDING_S

    def notice(self, process: Process) -> None:
        """Note that a process has learned that the lease is lost."""
        self._noticed[process] = self._world.loop.now
        self._world.note(f"{process} has lost the lease")

    def leave(self, process: Process) -> None:
        """Note that a process does not work as the active one any more."""
        self.active.pop(process, None)

    def _ended(self, process: Process) -> None:
        self.leave(process)
        if self.is_file and self.holder is process:
            self.holder = None
            for future in self._waiting.values():
                if not future.done():
                    future.set_result(None)

    async def is_free_again(self, process: Process) -> None:
        """Wait until the lease may be free."""
        if not self.is_file:
            await asyncio.sleep(max(self._expires_at - self._world.loop.now, 0.0))
            return
        future = self._waiting[process] = asyncio.get_running_loop().create_future()
        process.at_exit(future, lambda: self._waiting.pop(process, None))
        await future


class Candidate:
    """The `Leadership` port of one operator process."""

    def __init__(self, world: World, process: Process) -> None:
        """Stand for the lease of a world."""
        self._world = world
        self._lease = world.lease
        self._process = process

    @contextlib.asynccontextmanager
    async def held(self) -> AsyncIterator[asyncio.Event]:
        """Wait for the lease; the event is set when it was lost, or cannot be renewed."""
        lease, process, lost = self._lease, self._process, asyncio.Event()
        while self._is_apart or not lease.take(process):
            await lease.is_free_again(process)
            await self._look()
        keeping = asyncio.ensure_future(self._keep(lost))
        try:
            yield lost
        finally:
            keeping.cancel()
            lease.leave(process)

    @property
    def _is_apart(self) -> bool:
        return self._process.name in self._world.apart

    async def _look(self) -> None:
        await asyncio.sleep(self._world.rng.random() * LOOK_S)

    async def _keep(self, lost: asyncio.Event) -> None:
        if self._lease.is_file:
            return
        renewed_at = asked_at = self._world.loop.now
        while asked_at - renewed_at < GIVE_UP_S:
            await asyncio.sleep(RENEW_S)
            asked_at = self._world.loop.now
            await self._look()
            if self._is_apart:
                continue
            if not self._lease.renew(self._process):
                break
            renewed_at = asked_at
        self._lease.notice(self._process)
        lost.set()
