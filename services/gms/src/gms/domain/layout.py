"""Layouts: the allocations and metadata that are published, read, saved and loaded as one.

A layout's structure hash names its shape (order, ids, sizes, tags, metadata) and not its bytes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import msgspec

from gms.domain.metadata import Metadata
from snapback_client.frames import (
    MAX_ALLOCATIONS,
    AllocationInfo,
    AllocationSpec,
    GenerationRef,
    MetadataItem,
)
from snapshot_shared.errors import LayoutConflict, NotFound
from snapshot_shared.orders import LayoutRef

_ENCODER = msgspec.msgpack.Encoder()


@dataclass(eq=False, slots=True)
class Allocation:
    """One piece of device memory. `importers` are the sessions that it was exported to."""

    id: str
    size: int
    aligned: int
    tag: str
    handle: int
    importers: set[int] = field(default_factory=set)


@dataclass(eq=False, slots=True)
class Layout:
    """Allocations in the order of their slots, and metadata. `ref` is set when committed."""

    allocations: dict[str, Allocation] = field(default_factory=dict)
    metadata: Metadata = field(default_factory=Metadata)
    ref: LayoutRef | None = None
    _slots: dict[str, int] | None = None

    def check_new(self, specs: Sequence[AllocationSpec]) -> None:
        """Refuse allocations whose ids are taken or that are too many. LayoutConflict."""
        seen: set[str] = set()
        for spec in specs:
            if spec.id in self.allocations or spec.id in seen:
                raise LayoutConflict(f"allocation {spec.id!r} exists already", id=spec.id)
            seen.add(spec.id)
        total = len(self.allocations) + len(specs)
        if total > MAX_ALLOCATIONS:
            raise LayoutConflict(
                f"{total} allocations are over the limit of {MAX_ALLOCATIONS} for one layout",
                count=total,
                limit=MAX_ALLOCATIONS,
            )

    def add(self, allocation: Allocation) -> None:
        """Append an allocation."""
        if self._slots is not None:
            self._slots[allocation.id] = len(self.allocations)
        self.allocations[allocation.id] = allocation

    def find(self, ids: Iterable[str]) -> list[Allocation]:
        """Give the allocations with these ids. NotFound names the first that is missing."""
        try:
            return [self.allocations[each] for each in ids]
        except KeyError as error:
            raise NotFound(f"no allocation {error.args[0]!r}", id=error.args[0]) from None

    def remove(self, ids: Iterable[str]) -> list[Allocation]:
        """Take allocations and the metadata about them out. NotFound before any is taken."""
        taken = self.find(dict.fromkeys(ids))
        for allocation in taken:
            del self.allocations[allocation.id]
        self._slots = None
        self.metadata.forget(allocation.id for allocation in taken)
        return taken

    def put(self, entries: Sequence[MetadataItem]) -> None:
        """Add or replace metadata, all or none. NotFound or LayoutConflict."""
        for entry, allocation in zip(
            entries, self.find(entry.allocation for entry in entries), strict=True
        ):
            if entry.offset >= allocation.size:
                raise LayoutConflict(
                    f"metadata {entry.key!r} points past the end of {allocation.id!r}",
                    offset=entry.offset,
                    size=allocation.size,
                )
        self.metadata.put(entries)

    def get(self, keys: Sequence[str] | None, prefix: str = "") -> list[MetadataItem]:
        """Give the entries with these keys, or all, sorted by key. Missing ones are absent.

        Of these only those whose key begins with `prefix`.
        """
        return self.metadata.get(keys, prefix)

    def infos(self, allocations: Iterable[Allocation] | None = None) -> Iterator[AllocationInfo]:
        """Describe allocations with their slots; all in order by default."""
        if self._slots is None:
            self._slots = {each: slot for slot, each in enumerate(self.allocations)}
        slots = self._slots
        for a in list(self.allocations.values()) if allocations is None else allocations:
            yield AllocationInfo(
                id=a.id, size=a.size, aligned=a.aligned, tag=a.tag, slot=slots[a.id]
            )

    @property
    def bytes(self) -> int:
        """Bytes asked for, without alignment: what a save writes and a load reads."""
        return sum(a.size for a in self.allocations.values())

    @property
    def charged(self) -> int:
        """Bytes of device memory that the layout takes."""
        return sum(a.aligned for a in self.allocations.values())

    def structure_hash(self) -> str:
        """Hash the shape of this layout."""
        rows = [(a.id, a.size, a.tag) for a in self.allocations.values()]
        return structure_hash(rows, self.metadata.get())

    @property
    def generation(self) -> GenerationRef | None:
        """The generation that this layout is, None while it is not committed."""
        if self.ref is None:
            return None
        return GenerationRef(incarnation=self.ref.incarnation, generation=self.ref.generation)


def structure_hash(
    allocations: Iterable[tuple[str, int, str]], metadata: Iterable[MetadataItem]
) -> str:
    """Hash (id, size, tag) in the order of slots, and metadata sorted by key. Hex SHA-256.

    The msgpack of nested lists says where each field ends, so no two shapes share an encoding.
    """
    body = [
        1,
        [[slot, *row] for slot, row in enumerate(allocations)],
        [
            [m.key, m.allocation, m.offset, m.value]
            for m in sorted(metadata, key=lambda item: item.key)
        ],
    ]
    return hashlib.sha256(_ENCODER.encode(body)).hexdigest()


def aligned(size: int, granularity: int) -> int:
    """Round up to whole granules."""
    return -(-size // granularity) * granularity
