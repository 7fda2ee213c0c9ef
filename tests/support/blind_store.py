"""A store whose caches lag: some kinds are missing from lists and events, live reads are true."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from snapshot_api.kinds import AnyObject, kind_of
from snapshot_operator.local.store import SqliteStore
from snapshot_operator.ports import Event


class BlindStore:
    """The `Store` port over another one; of the kinds in `hidden` nothing is told by itself."""

    def __init__(self, store: SqliteStore, hidden: Collection[str]) -> None:
        self._store = store
        self.hidden = set(hidden)
        self._held: list[Event] = []
        self._listeners: list[Callable[[Event], None]] = []
        self.live_reads = 0
        store.subscribe(self._take)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    async def list(self, kind: str) -> list[AnyObject]:
        return [] if kind in self.hidden else await self._store.list(kind)

    async def read(self, kind: str, namespace: str | None, name: str) -> AnyObject | None:
        self.live_reads += 1
        return await self._store.read(kind, namespace, name)

    async def find(self, uid: str) -> AnyObject | None:
        self.live_reads += 1
        return await self._store.find(uid)

    def subscribe(self, listener: Callable[[Event], None]) -> None:
        self._listeners.append(listener)

    def _take(self, event: Event) -> None:
        if kind_of(event.value).name in self.hidden:
            self._held.append(event)
            return
        for listener in self._listeners:
            listener(event)

    async def show(self) -> None:
        """Report what was held back, and what was there before."""
        hidden, self.hidden = self.hidden, set()
        for kind in sorted(hidden):
            for value in await self._store.list(kind):
                self._held.append(Event("MODIFIED", value))
        held, self._held = self._held, []
        for event in held:
            for listener in self._listeners:
                listener(event)
