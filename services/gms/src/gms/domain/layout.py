"""Layouts: the allocations and metadata that are published, read, saved and loaded as one.

A layout's structure hash names its shape (order, ids, sizes, tags, metadata) and not its bytes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice

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

PIECE = 512
"""How many allocations are worked on before other clients have their turn: about 0.5 ms."""


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
    """Allocations in the order of their slots, and metadata. `ref` is set when committed.

    `bytes` are those asked for, without alignment: what a save writes and a load reads. `charged`
    are the bytes of device memory that the layout takes.
    """

    allocations: dict[str, Allocation] = field(default_factory=dict)
    metadata: Metadata = field(default_factory=Metadata)
    ref: LayoutRef | None = None
    bytes: int = 0
    charged: int = 0
    _slots: dict[str, int] | None = None

    def check_new(self, specs: Sequence[AllocationSpec]) -> None:
        """Refuse allocations whose ids are taken or that are too many. LayoutConflict."""
        seen: set[str] = set()
        for spec in specs:
            if spec.id in self.allocations or spec.id in seen:
                raise LayoutConflict(
                    f"allocation {spec.id!r} exists already",
                    next_step="give the array another name, or allocate it with overwrite=True",
                    id=spec.id,
                )
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
        self.bytes += allocation.size
        self.charged += allocation.aligned

    def find(self, ids: Iterable[str]) -> list[Allocation]:
        """Return the allocations with these ids. NotFound names the first that is missing."""
        try:
            return [self.allocations[each] for each in ids]
        except KeyError as error:
            raise NotFound(f"no allocation {error.args[0]!r}", id=error.args[0]) from None

    def remove(self, ids: Iterable[str]) -> list[Allocation]:
        """Remove and return allocations, and their metadata. NotFound before any is removed."""
        taken = self.find(dict.fromkeys(ids))
        for allocation in taken:
            del self.allocations[allocation.id]
            self.bytes -= allocation.size
            self.charged -= allocation.aligned
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
        """Return the entries with these keys, or all, sorted by key. Missing ones are absent.

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

    def hashing(self) -> Generator[None, None, str]:
        """Return the structure hash; yield between pieces of the work."""
        rows = ((a.id, a.size, a.tag) for a in self.allocations.values())
        return hash_pieces(rows, len(self.allocations), iter(self.metadata), len(self.metadata))

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
    rows, items = list(allocations), sorted(metadata, key=lambda item: item.key)
    work = hash_pieces(rows, len(rows), items, len(items))
    while True:
        try:
            next(work)
        except StopIteration as end:
            return str(end.value)


def hash_pieces(
    rows: Iterable[tuple[str, int, str]], count: int, items: Iterable[MetadataItem], entries: int
) -> Generator[None, None, str]:
    """Return the hash of `count` rows and `entries` items; yield after each `PIECE` of them.

    The bytes are those of `[1, [[slot, *row], ...], [[key, allocation, offset, value], ...]]`.
    """
    state = hashlib.sha256(_array(3) + _ENCODER.encode(1))
    slots = ([slot, *row] for slot, row in enumerate(rows))
    fields = ([m.key, m.allocation, m.offset, m.value] for m in items)
    for each, size in ((slots, count), (fields, entries)):
        state.update(_array(size))
        while piece := list(islice(each, PIECE)):
            # Encoded as an array of its own, whose header is left out.
            state.update(_ENCODER.encode(piece)[len(_array(len(piece))) :])
            yield
    return state.hexdigest()


def _array(size: int) -> bytes:
    """Return the header of an array of msgpack."""
    if size < 16:
        return bytes([0x90 | size])
    return b"\xdc" + size.to_bytes(2) if size < 2**16 else b"\xdd" + size.to_bytes(4)
