"""The objects as this operator sees them: read from memory, written through to the store.

Memory is filled from the store once and follows its events. It holds this operator's own writes at
once, never goes back, and may otherwise be late, each object by its own time.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from snapshot_api.facts import Pod
from snapshot_api.kinds import KINDS, AnyObject
from snapshot_operator.core.controllers import Index
from snapshot_operator.ports import Change, Document, Event, Store
from snapshot_shared.errors import StoreBusy

MAX_REMEMBERED = 10_000
"""How many deleted uids are remembered, so that a late event cannot bring one back."""

FOUND_TOGETHER = 64
"""How many uids are looked for in the store at a time."""

GARBAGE_EVERY = 10_000
"""After how many new containers, less those freed, cycles are looked for."""


class Key(NamedTuple):
    """Which object: its kind, namespace (empty for cluster-scoped ones) and name."""

    kind: str
    namespace: str
    name: str


Interest = tuple[str, ...]
"""What a decision has read: an object by its key, a uid, or a value of an index."""

Watcher = Callable[[AnyObject | None, AnyObject | None], None]
"""Gets an object before and after a change; None where it was or is not there."""


def key_of(value: AnyObject) -> Key:
    """Return the key of an object."""
    return Key(type(value).__name__, value.metadata.namespace or "", value.metadata.name)


class Cluster:
    """Reads from memory, writes to the store."""

    def __init__(self, store: Store, indexes: Iterable[Index]) -> None:
        """Use a store; nothing is read before `sync`."""
        self._store = store
        self._objects: dict[str, dict[Key, AnyObject]] = {kind: {} for kind in KINDS}
        self._by_uid: dict[str, AnyObject] = {}
        self._gone: OrderedDict[str, None] = OrderedDict()
        self._indexes: dict[str, list[Index]] = {kind: [] for kind in KINDS}
        self._buckets: dict[str, dict[str, dict[Key, None]]] = {}
        self._index_kinds: dict[str, str] = {}
        for index in indexes:
            self._indexes[index.kind].append(index)
            self._buckets[index.name] = {}
            self._index_kinds[index.name] = index.kind
        self._values: dict[str, list[tuple[str, ...]]] = {}
        """By uid, the values under which an object stands, for each index of its kind."""
        self._watchers: list[Watcher] = []
        self._touched: Callable[[set[Interest], set[Key]], None] | None = None

    async def sync(self) -> None:
        """Fill memory from the store, and follow its events from here on."""
        self._store.subscribe(self._take)
        # What is read stays. Looking for garbage in it takes longer than reading it, each time.
        gc.disable()
        try:
            for kind in KINDS:
                for value in await self._store.list(kind):
                    self._apply("ADDED", value)
        finally:
            gc.enable()
        gc.freeze()
        # An object is freed when a later version takes its place: it is a tree, with no cycles. The
        # default, a look after 700 new ones, takes as long as decoding them and finds nothing.
        gc.set_threshold(GARBAGE_EVERY)

    def subscribe(self, watcher: Watcher) -> None:
        """Report every change of an object as it becomes visible here."""
        self._watchers.append(watcher)

    def on_touch(self, touched: Callable[[set[Interest], set[Key]], None]) -> None:
        """Report with each change the interests it touches, and who became first of a queue."""
        self._touched = touched

    # What is read.

    def get(self, kind: str, namespace: str | None, name: str) -> AnyObject | None:
        """Return an object."""
        return self._objects[kind].get(Key(kind, namespace or "", name))

    def at(self, key: Key) -> AnyObject | None:
        """Return the object of a key."""
        return self._objects[key.kind].get(key)

    def by_uid(self, uid: str) -> AnyObject | None:
        """Return the object with a uid."""
        return self._by_uid.get(uid)

    def all(self, kind: str) -> Sequence[AnyObject]:
        """Return the objects of a kind, in no order."""
        return list(self._objects[kind].values())

    def count(self, kind: str) -> int:
        """Return the number of objects of a kind."""
        return len(self._objects[kind])

    def page(
        self, kind: str, namespace: str | None = None, *, after: str = "", limit: int = 100_000
    ) -> list[AnyObject]:
        """Return objects of a kind in the order of `namespace/name`, those after one only."""
        found = sorted(
            (
                key
                for key in self._objects[kind]
                if namespace in (None, key.namespace) and f"{key.namespace}/{key.name}" > after
            ),
            key=lambda key: f"{key.namespace}/{key.name}",
        )
        return [self._objects[kind][key] for key in found[:limit]]

    def by_index(self, index: str, value: str) -> list[AnyObject]:
        """Return the objects under a value of an index, in the order in which they came."""
        objects = self._objects[self._index_kinds[index]]
        return [objects[key] for key in self._buckets[index].get(value, ())]

    def first(self, index: str, value: str) -> Key | None:
        """Return the first of a queue."""
        return next(iter(self._buckets[index].get(value, ())), None)

    # What is written. Each write is visible here when it returns.

    async def create(self, value: AnyObject) -> AnyObject:
        """Store a new object. AlreadyExists when the name is taken."""
        return self._written(await self._store.create(value))

    async def create_document(self, document: Document) -> None:
        """Store a new object. AlreadyExists when the name is taken."""
        stored = await self._store.create_document(document)
        if stored is not None:
            self._written(stored)

    async def update_status(self, value: AnyObject) -> AnyObject:
        """Replace the status. Conflict, NotFound."""
        return self._written(await self._store.update_status(value))

    async def update_spec(self, value: AnyObject) -> AnyObject:
        """Replace the spec. Conflict, NotFound."""
        return self._written(await self._store.update_spec(value))

    async def annotate(self, value: AnyObject, key: str, text: str) -> AnyObject:
        """Set an annotation. Conflict, NotFound."""
        return self._written(await self._store.annotate(value, key, text))

    async def label(self, value: AnyObject, key: str, text: str | None) -> AnyObject:
        """Set a label, or remove it without a text. Conflict, NotFound."""
        return self._written(await self._store.label(value, key, text))

    async def add_finalizer(self, value: AnyObject, finalizer: str) -> AnyObject:
        """Put a finalizer on. Conflict, NotFound."""
        return self._written(await self._store.add_finalizer(value, finalizer))

    async def remove_finalizer(self, value: AnyObject, finalizer: str) -> None:
        """Take a finalizer off; a deleted object without finalizers is gone. Conflict, NotFound."""
        self._left(value, await self._store.remove_finalizer(value, finalizer))

    async def delete(self, value: AnyObject) -> bool:
        """Mark this incarnation for deletion; whether it is gone at once."""
        left = await self._store.delete(value)
        self._left(value, left)
        return left is None

    # What is read from the store itself.

    async def confirm_gone(self, key: Key, uid: str = "") -> bool:
        """Whether no object has this key, nor any the uid if one is given, in the store itself.

        What is found instead is visible here from then on.
        """
        before = self.at(key)
        found = await self._store.read(key.kind, key.namespace or None, key.name)
        if found is not None:
            self._written(found)
        elif before is not None and self.at(key) is before:
            self._apply("DELETED", before)
        # What has come while the store was read is not denied by that.
        now = found or self.at(key)
        return now is None or (bool(uid) and now.metadata.uid != uid)

    async def look(self, kind: str, namespace: str | None, name: str) -> AnyObject | None:
        """Return an object, of the store itself if memory has none; it is visible here then."""
        key = Key(kind, namespace or "", name)
        if self.at(key) is None:
            await self.confirm_gone(key)
        return self.at(key)

    async def find(self, uid: str) -> AnyObject | None:
        """Return the object with a uid as the store has it; it is visible here from then on."""
        found = await self._store.find(uid)
        return self._written(found) if found is not None else None

    async def find_all(
        self, uids: Iterable[str], *, skips_busy: bool = False
    ) -> dict[str, AnyObject | None]:
        """Return the objects with some uids as the store has them.

        What is asked together may cost a store one search. StoreBusy when one cannot be read; with
        `skips_busy` that one is missing from the answer instead.
        """
        found: dict[str, AnyObject | None] = {}

        async def look(uid: str) -> None:
            with contextlib.suppress(StoreBusy) if skips_busy else contextlib.nullcontext():
                found[uid] = await self.find(uid)

        wanted = list(dict.fromkeys(uids))
        for start in range(0, len(wanted), FOUND_TOGETHER):
            await asyncio.gather(*(look(uid) for uid in wanted[start : start + FOUND_TOGETHER]))
        return found

    async def spec_of(self, pod: Pod) -> dict[str, Any] | None:
        """Return the whole spec of a pod as the store has it; None if the pod is gone."""
        return await self._store.spec_of(pod)

    async def read_document(self, named: Document) -> Document | None:
        """Return the whole object of the kind and name of a document, as the store has it."""
        return await self._store.read_document(named)

    async def refresh(self, value: AnyObject) -> None:
        """Read an object again from the store."""
        await self.confirm_gone(key_of(value))

    # How memory follows.

    def _take(self, event: Event) -> None:
        self._apply(event.change, event.value)

    def _written(self, value: AnyObject) -> AnyObject:
        self._apply("MODIFIED", value)
        return value

    def _left(self, before: AnyObject, after: AnyObject | None) -> None:
        if after is not None:
            self._apply("MODIFIED", after)
        else:
            self._apply("DELETED", before)

    def _apply(self, change: Change, value: AnyObject) -> None:
        """Take one change; what is older than what is known, or of an object gone, is ignored."""
        uid = value.metadata.uid
        known = self._by_uid.get(uid)
        if change == "DELETED":
            self._remember_gone(uid)
            if known is not None:
                self._put(known, None)
            return
        if uid in self._gone:
            return
        if known is None:
            namesake = self.at(key_of(value))
            if namesake is not None and not _is_newer(value, namesake):
                return
            if namesake is not None:
                self._remember_gone(namesake.metadata.uid)
                self._put(namesake, None)
        elif not _is_newer(value, known):
            return
        self._put(known, value)

    def _remember_gone(self, uid: str) -> None:
        self._gone[uid] = None
        if len(self._gone) > MAX_REMEMBERED:
            self._gone.popitem(last=False)

    def _put(self, old: AnyObject | None, new: AnyObject | None) -> None:
        value = new or old
        if value is None:
            return
        key, uid = key_of(value), value.metadata.uid
        if new is None:
            self._objects[key.kind].pop(key, None)
            self._by_uid.pop(uid, None)
        else:
            self._objects[key.kind][key] = new
            self._by_uid[uid] = new
        interests: set[Interest] = {key, (uid,)}
        firsts = self._reindex(key, uid, new, interests)
        for watcher in self._watchers:
            watcher(old, new)
        if self._touched is not None:
            self._touched(interests, firsts)

    def _reindex(
        self, key: Key, uid: str, new: AnyObject | None, interests: set[Interest]
    ) -> set[Key]:
        """Put an object under its values; give the first of each queue that has lost its first."""
        indexes = self._indexes[key.kind]
        before = self._values.get(uid) or [()] * len(indexes)
        after = [() if new is None else tuple(index.keys(new)) for index in indexes]
        firsts: set[Key] = set()
        for index, olds, news in zip(indexes, before, after, strict=True):
            if olds != news:
                firsts.update(self._move(index, key, olds, news, interests))
            elif index.by_change:
                interests.update((index.name, value) for value in news)
        if new is None:
            self._values.pop(uid, None)
        elif after != before:
            self._values[uid] = after
        return firsts

    def _move(
        self,
        index: Index,
        key: Key,
        olds: tuple[str, ...],
        news: tuple[str, ...],
        interests: set[Interest],
    ) -> Iterator[Key]:
        buckets = self._buckets[index.name]
        for value in olds:
            if value in news:
                continue
            interests.add((index.name, value))
            was_first = index.is_queue and next(iter(buckets[value])) == key
            del buckets[value][key]
            if not buckets[value]:
                del buckets[value]
            elif was_first:
                yield next(iter(buckets[value]))
        for value in news:
            if value not in olds:
                interests.add((index.name, value))
                buckets.setdefault(value, {})[key] = None


def _is_newer(value: AnyObject, than: AnyObject) -> bool:
    """Whether an object is a later version; resource versions are ordered, in Kubernetes too."""
    return int(value.metadata.resource_version) > int(than.metadata.resource_version)


class Tracker:
    """The `Reader` of one decision: records what was read, and what was found absent."""

    def __init__(self, cluster: Cluster, *, is_full: bool) -> None:
        """Read from a cluster."""
        self._cluster = cluster
        self._is_full = is_full
        self.interests: set[Interest] = set()
        self.absent: list[tuple[Key, str]] = []
        self.absent_uids: list[str] = []

    def get(self, kind: str, namespace: str | None, name: str, uid: str = "") -> AnyObject | None:
        """Return an object, if it has the uid when one is given."""
        key = Key(kind, namespace or "", name)
        self.interests.add(key)
        found = self._cluster.at(key)
        if found is None or (uid and found.metadata.uid != uid):
            self.absent.append((key, uid))
            return None
        return found

    def by_uid(self, uid: str) -> AnyObject | None:
        """Return the object with a uid."""
        self.interests.add((uid,))
        found = self._cluster.by_uid(uid)
        if found is None:
            self.absent_uids.append(uid)
        return found

    def by_index(self, index: str, value: str) -> list[AnyObject]:
        """Return the objects under a value of an index."""
        self.interests.add((index, value))
        return self._cluster.by_index(index, value)

    def peek_index(self, index: str, value: str) -> list[AnyObject]:
        """Return the objects under a value of an index; their changes wake nothing."""
        return self._cluster.by_index(index, value)

    def is_first(self, index: str, value: str, me: AnyObject) -> bool:
        """Whether an object is the first of a queue."""
        return self._cluster.first(index, value) == key_of(me)

    @property
    def is_full(self) -> bool:
        """Whether the stream of orders has no room for new work."""
        self.interests.add(FULL)
        return self._is_full


FULL: Interest = ("", "full")
"""Touched when there is room for new work again."""
