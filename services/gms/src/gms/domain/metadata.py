"""Metadata of a layout by key. The cost of a call depends on its own entries alone."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence

from snapback_client.frames import MAX_METADATA_BYTES, MetadataItem
from snapshot_shared.errors import LayoutConflict

ENTRY_BYTES = 64
"""What an entry counts for beside its strings."""


class Metadata:
    """Entries by key, sorted, and how much they weigh."""

    def __init__(self) -> None:
        """Start empty."""
        self._items: dict[str, MetadataItem] = {}
        self._keys: list[str] = []
        self._about: dict[str, set[str]] = {}
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._keys)

    def __iter__(self) -> Iterator[MetadataItem]:
        return (self._items[key] for key in self._keys)

    def put(self, entries: Iterable[MetadataItem]) -> None:
        """Add or replace entries, all or none. LayoutConflict."""
        fresh = {entry.key: entry for entry in entries}
        old = [self._items[key] for key in fresh if key in self._items]
        size = self._bytes + sum(map(weight, fresh.values())) - sum(map(weight, old))
        if size > MAX_METADATA_BYTES:
            raise LayoutConflict(
                f"{size} bytes of metadata are over the limit of {MAX_METADATA_BYTES}",
                size=size,
                limit=MAX_METADATA_BYTES,
            )
        for entry in old:
            self._about[entry.allocation].discard(entry.key)
        if added := fresh.keys() - self._items.keys():
            self._keys = sorted([*self._keys, *added])
        self._items |= fresh
        for entry in fresh.values():
            self._about.setdefault(entry.allocation, set()).add(entry.key)
        self._bytes = size

    def get(self, keys: Sequence[str] | None = None, prefix: str = "") -> list[MetadataItem]:
        """Return the entries with these keys, or all, sorted by key. Missing ones are absent.

        Of these only those whose key begins with `prefix`.
        """
        if keys is not None:
            wanted = self._items.keys() & set(keys)
            return [self._items[key] for key in sorted(wanted) if key.startswith(prefix)]
        begin = bisect_left(self._keys, prefix)
        end = bisect_left(self._keys, 1, begin, key=lambda key: not key.startswith(prefix))
        return [self._items[key] for key in self._keys[begin:end]]

    def forget(self, allocations: Iterable[str]) -> None:
        """Remove the metadata of these allocations."""
        gone = {key for each in allocations for key in self._about.pop(each, ())}
        if gone:
            self._bytes -= sum(weight(self._items.pop(key)) for key in gone)
            self._keys = [key for key in self._keys if key not in gone]


def weight(entry: MetadataItem) -> int:
    """Return the bytes that an entry counts for."""
    return len(entry.key.encode()) + len(entry.allocation) + len(entry.value) + ENTRY_BYTES
