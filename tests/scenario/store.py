"""The object store as one operator sees it: over a network, and later than it is written.

Every kind is followed for itself, as the caches of the Kubernetes API are: an operator reads its
own writes at once, and those of others up to `Settings.stale_s` later, several as one.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict, deque
from typing import TYPE_CHECKING, NamedTuple

from snapshot_operator.ports import Change, Listener
from snapshot_shared.errors import Conflict, StoreBusy
from snapshot_shared.objects import AnyObject, kind_of

if TYPE_CHECKING:
    from tests.scenario.loop import Process
    from tests.scenario.world import World

READS_THAT_TAKE_TIME = 0.1
REMEMBERED = 64
"""How many writes an operator that starts may not have heard of."""

_Key = tuple[str, str]


class Written(NamedTuple):
    """One write: what it made of what was there before, in which version, and when."""

    change: Change
    value: AnyObject
    before: AnyObject | None
    version: int
    at: float

    @property
    def kind(self) -> str:
        return kind_of(self.value).name

    @property
    def key(self) -> _Key:
        return _key(self.value)


class History:
    """What a store has told: its objects by kind, and its last writes."""

    def __init__(self) -> None:
        self.last: deque[Written] = deque(maxlen=REMEMBERED)
        self.now: defaultdict[str, dict[_Key, AnyObject]] = defaultdict(dict)

    def written(self, change: Change, value: AnyObject, version: int, at: float) -> Written:
        """Remember a write."""
        known, key = self.now[kind_of(value).name], _key(value)
        written = Written(change, value, known.pop(key, None), version, at)
        if change != "DELETED":
            known[key] = value
        self.last.append(written)
        return written


class StoreView:
    """The `Cluster` port as one operator sees it: it reads what the store has told.

    So reading costs nothing; `World.everything` compares that with what is really stored.
    """

    def __init__(self, world: World, process: Process) -> None:
        self._world = world
        self._process = process
        self._listeners: list[Listener] = []
        self._now = world.history.now
        self._others = world.store.as_of()
        self._hidden: dict[str, dict[_Key, Written]] = {}
        """By kind, the first write of each object that is not seen yet."""
        self._news: dict[str, dict[_Key, Written]] = {}
        """By kind, the last write of each object that is not seen yet."""
        self._since: dict[str, int] = {}
        """By kind, the version as of which it is seen, where that is not the newest."""
        self._has_shown = asyncio.Event()
        if self._is_late:
            first = world.loop.now - world.rng.random() * world.settings.stale_s
            for written in world.history.last:
                if written.at > first:
                    self._hide(written)

    @property
    def _is_late(self) -> bool:
        return bool(self._world.settings.stale_s) and not self._world.is_healed

    def subscribe(self, listener: Listener) -> None:
        self._listeners.append(listener)

    def stored(self, written: Written, writer: Process | None) -> None:
        """Take note of a write: of its own at once; of those of others late, or not at all."""
        if writer is self._process:
            self._show(written.kind)
            self._tell(written)
            return
        self._others = written.version
        if self._is_late:
            self._hide(written)

    def _hide(self, written: Written) -> None:
        world, kind = self._world, written.kind
        if kind not in self._since:
            self._since[kind] = written.version - 1
            late_s = world.rng.random() ** 2 * world.settings.stale_s
            world.loop.in_world(late_s, self._show, kind)
        self._hidden.setdefault(kind, {}).setdefault(written.key, written)
        self._news.setdefault(kind, {})[written.key] = written

    def _show(self, kind: str) -> None:
        """Catch up with what was written to the objects of a kind."""
        self._since.pop(kind, None)
        self._has_shown.set()
        self._hidden.pop(kind, None)
        for written in self._news.pop(kind, {}).values():
            if self._process.is_alive:
                self._tell(written)

    def _tell(self, written: Written) -> None:
        for listener in self._listeners:
            listener(written.change, written.value)

    def catch_up_at_once(self) -> None:
        """See everything."""
        for kind in list(self._since):
            self._show(kind)

    def as_of(self) -> int:
        return min(self._since.values(), default=self._world.store.as_of())

    def others_since(self, as_of: int) -> bool:
        return self._others > as_of

    async def _look(self) -> None:
        """Reading takes no time worth a turn of the loop, most of the time."""
        if self._world.rng.random() < READS_THAT_TAKE_TIME:
            await self._delay()

    async def _delay(self) -> None:
        world = self._world
        await asyncio.sleep(world.rng.random() * 0.002)
        if not world.is_healed and world.rng.random() < world.settings.store_errors:
            raise StoreBusy("another operator writes")

    async def get(self, kind: str, namespace: str | None, name: str) -> AnyObject | None:
        await self._look()
        hidden = self._hidden.get(kind, {}).get((namespace or "", name))
        if hidden is not None:
            return hidden.before
        return self._now[kind].get((namespace or "", name))

    async def by_uid(self, uid: str) -> AnyObject | None:
        await self._look()
        for kind in self._now:
            for value in self._seen(kind).values():
                if value.metadata.uid == uid:
                    return value
        return None

    async def list(
        self, kind: str, namespace: str | None = None, *, after: str = "", limit: int = 100_000
    ) -> list[AnyObject]:
        await self._look()
        found = {
            "/".join(key): value
            for key, value in self._seen(kind).items()
            if namespace in (None, key[0])
        }
        return [found[name] for name in sorted(found) if name > after][:limit]

    def _seen(self, kind: str) -> dict[_Key, AnyObject]:
        """Give the objects of a kind as they are seen."""
        if kind not in self._hidden:
            return self._now[kind]
        seen = dict(self._now[kind])
        for key, written in self._hidden[kind].items():
            seen.pop(key, None)
            if written.before is not None:
                seen[key] = written.before
        return seen

    async def catch_up(self) -> None:
        newest = self._world.store.as_of()
        while self.as_of() < newest:
            self._has_shown.clear()
            await self._has_shown.wait()

    def _check(self, as_of: int | None) -> None:
        if as_of is not None and self._others > as_of:
            raise Conflict("another operator wrote since this was decided")

    async def create(self, value: AnyObject, *, as_of: int | None = None) -> AnyObject:
        await self._delay()
        self._check(as_of)
        return await self._world.store.create(value)

    async def update_status(self, value: AnyObject, *, as_of: int | None = None) -> AnyObject:
        await self._delay()
        self._check(as_of)
        world = self._world
        if not world.is_healed and world.rng.random() < world.settings.conflicts:
            raise Conflict("somebody else wrote first")
        return await self._world.store.update_status(value)

    async def update_spec(self, value: AnyObject, *, as_of: int | None = None) -> AnyObject:
        await self._delay()
        self._check(as_of)
        return await self._world.store.update_spec(value)

    async def delete(self, value: AnyObject, *, as_of: int | None = None) -> bool:
        await self._delay()
        self._check(as_of)
        return await self._world.store.delete(value)

    async def remove_finalizer(
        self, value: AnyObject, finalizer: str, *, as_of: int | None = None
    ) -> None:
        await self._delay()
        self._check(as_of)
        await self._world.store.remove_finalizer(value, finalizer)


def _key(value: AnyObject) -> _Key:
    return value.metadata.namespace or "", value.metadata.name
