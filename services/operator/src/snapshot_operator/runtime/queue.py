"""Which objects are to be decided about next: each by one worker at a time, many side by side."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from snapshot_operator.runtime.cluster import Key

FIRST_RETRY_S = 0.02
MAX_RETRY_S = 30.0


class WorkQueue:
    """Keys in the order in which they were added; one that is added twice stands in it once.

    A key that is added while a worker has it comes again when that is done.
    """

    def __init__(self, jitter: Callable[[], float]) -> None:
        """`jitter` returns a random number from 0 to 1."""
        self._jitter = jitter
        self._waiting: dict[Key, None] = {}
        self._busy: set[Key] = set()
        self._again: set[Key] = set()
        self._timers: dict[Key, asyncio.TimerHandle] = {}
        self._failures: dict[Key, int] = {}
        self.filled = asyncio.Event()

    def __len__(self) -> int:
        """Return how many keys wait."""
        return len(self._waiting)

    def add(self, key: Key) -> None:
        """Have a key decided about soon."""
        if key in self._busy:
            self._again.add(key)
            return
        self._waiting.setdefault(key)
        self.filled.set()

    def take(self) -> Key | None:
        """Return the next key, which the caller has until `done`; None when none waits."""
        if not self._waiting:
            self.filled.clear()
            return None
        key = next(iter(self._waiting))
        del self._waiting[key]
        self._busy.add(key)
        if (timer := self._timers.pop(key, None)) is not None:
            timer.cancel()
        return key

    def done(self, key: Key, *, after_s: float | None = None) -> None:
        """Release a key that went well; it is due again after a time."""
        self._failures.pop(key, None)
        self._release(key, after_s)

    def failed(self, key: Key) -> None:
        """Release a key that is tried again, after a time that grows with each failure."""
        count = self._failures[key] = self._failures.get(key, 0) + 1
        longest = min(FIRST_RETRY_S * 2 ** min(count - 1, 16), MAX_RETRY_S)
        # Those that failed together do not come again together.
        self._release(key, longest * (0.5 + self._jitter() / 2))

    def _release(self, key: Key, after_s: float | None) -> None:
        self._busy.discard(key)
        is_wanted = key in self._again
        self._again.discard(key)
        if is_wanted and key not in self._failures:
            self.add(key)
        elif after_s is not None:
            loop = asyncio.get_running_loop()
            self._timers[key] = loop.call_later(after_s, self._due, key)

    def _due(self, key: Key) -> None:
        self._timers.pop(key, None)
        self.add(key)

    def close(self) -> None:
        """Forget all timers."""
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()
