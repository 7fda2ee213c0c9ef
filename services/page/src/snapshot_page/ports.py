"""What the HTTP handlers need of a view, and the feed between the two."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from typing import Protocol


class Feed:
    """The newest value of each section. There is no queue: a slow reader misses older ones."""

    def __init__(self, life: str) -> None:
        """Begin with no section; `life` names this process, whose versions no other shares."""
        self.life = life
        self.version = 0
        self._sections: dict[str, tuple[int, bytes]] = {}
        self._changed = asyncio.Event()

    def offer(self, sections: Mapping[str, bytes]) -> None:
        """Take new values; one that is equal to the old does not count as a change."""
        old = {name: data for name, (_, data) in self._sections.items()}
        changed = {name: data for name, data in sections.items() if old.get(name) != data}
        if changed:
            self.version += 1
            self._sections |= {name: (self.version, data) for name, data in changed.items()}
            self._changed.set()
            self._changed = asyncio.Event()

    def forget(self) -> None:
        """Drop all sections."""
        self._sections.clear()

    def since(self, version: int) -> dict[str, bytes]:
        """Return the sections that changed after a version, as JSON; all of them after 0."""
        return {name: data for name, (at, data) in self._sections.items() if at > version}

    async def changed(self, version: int) -> None:
        """Wait until there is something newer than a version."""
        while self.version <= version or not self._sections:
            await self._changed.wait()


class View(Protocol):
    """A view of the cluster, which is followed only while there are readers."""

    def now(self) -> float:
        """Return the time here, in seconds since the epoch: what ages are counted from."""
        ...

    def reading(self) -> AbstractAsyncContextManager[Feed]:
        """Follow the cluster for the length of the block; the feed has a view when it begins.

        TimeoutError when there is none in time.
        """
        ...

    async def details(self, plural: str, namespace: str, name: str) -> bytes:
        """Return the details of one object as JSON, within `reading`. NotFound."""
        ...
