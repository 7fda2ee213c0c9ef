"""Pulling messages ahead of their use, as many as a window has room for."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

T = TypeVar("T")

BATCH = 64
"""How many messages may be asked for, or have come and wait to be used."""


class Pull(Generic[T]):
    """The window of one consumer: what is asked for, and what has come.

    Nothing here asks a server by itself: `ask` does, and `take`, `lapse`, `forget` and `fail` hand
    in what came of it.
    """

    def __init__(self, ask: Callable[[int], Awaitable[None]]) -> None:
        """Ask by calling `ask` with the number of messages that there is room for."""
        self._ask = ask
        self._asked = 0
        self._held: list[T] = []
        self._error: Exception | None = None
        self._stirred = asyncio.Event()

    def take(self, message: T) -> None:
        """Hold a message that came."""
        self._held.append(message)
        self.lapse(1)

    def lapse(self, count: int) -> None:
        """Count messages as asked for no more."""
        self._asked = max(self._asked - count, 0)
        self._stirred.set()

    def forget(self) -> None:
        """Count nothing as asked for: the server has forgotten, or was not reached."""
        self._asked = 0
        self._stirred.set()

    def fail(self, error: Exception) -> None:
        """Have `batch` raise an error after the messages that have come."""
        self._error = error
        self._stirred.set()

    def rest(self) -> list[T]:
        """Return what has come and was not used, and hold it no more."""
        held, self._held = self._held, []
        return held

    async def batch(self, within_s: float) -> list[T]:
        """Return the messages that have come, after the first of them has.

        More are asked for when no more than half of the window is. The result is empty when
        something else has happened, or nothing within so many seconds: what was asked for has
        expired then.
        """
        await self._ask_again()
        self._stirred.clear()
        if not self._held and self._error is None:
            try:
                async with asyncio.timeout(within_s):
                    await self._stirred.wait()
            except TimeoutError:
                self.forget()
        if self._error is not None and not self._held:
            raise self._error
        return self.rest()

    async def _ask_again(self) -> None:
        taken = self._asked + len(self._held)
        if self._error is None and taken <= BATCH // 2:
            self._asked += BATCH - taken
            await self._ask(BATCH - taken)
