"""Transfer plans: which bytes of which allocation stand where in which file of a part.

Allocations are packed one after another into shard files, each beginning on a page so that direct
I/O stays possible; one that does not fit goes on in the next shard. The plan of a load is made
from the manifest by the same function, so that writing and reading cannot disagree.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import msgspec

from gms.domain.layout import structure_hash
from snapback_client.frames import AllocationInfo, MetadataItem, aligned
from snapshot_shared import units
from snapshot_shared.artifact import (
    MAX_CHUNK_BYTES,
    AllocationEntry,
    Extent,
    FileEntry,
    PartManifest,
    SavedLayout,
)
from snapshot_shared.artifact import MetadataEntry as SavedMetadata
from snapshot_shared.errors import (
    ArtifactCorrupt,
    DeviceTooSmall,
    Incompatible,
    InvalidInput,
)

PAGE = 4096
CHUNK_BYTES = 8 * 1024 * 1024
SHARD_BYTES = 256 * 1024 * 1024
"""The longest shard. A later save shares whole ones, so long ones are seldom shared."""

ENCRYPTED_SHARD_BYTES = 32 * 1024 * 1024
"""The longest shard that is encrypted: all of it is in memory at once."""

PADDING = -1
"""The allocation of a piece that belongs to none: zeros between allocations."""


class Piece(msgspec.Struct, frozen=True, gc=False):
    """`size` bytes at `offset` of the allocation with this index.

    A layout of many small allocations has one for each, and one is made in a fifth of the time of
    a frozen dataclass.
    """

    allocation: int
    offset: int
    size: int


@dataclass(frozen=True, slots=True)
class ChunkPlan:
    """One chunk of a file: it begins at `offset` and consists of these pieces in order."""

    file: int
    index: int
    offset: int
    size: int
    pieces: tuple[Piece, ...]


@dataclass(frozen=True, slots=True)
class FilePlan:
    """One shard file, in the folder of the part or, if it is named, in that of a stripe root."""

    name: str
    size: int
    chunk_bytes: int
    chunks: tuple[ChunkPlan, ...]
    stripe: str = ""


def place(
    allocations: Sequence[AllocationInfo], *, shard_bytes: int = SHARD_BYTES
) -> tuple[list[AllocationEntry], list[int]]:
    """Return every allocation with its extents, and the sizes of the shard files in bytes."""
    if shard_bytes < PAGE or shard_bytes % PAGE:
        raise InvalidInput(f"shard size {shard_bytes} is no multiple of {PAGE}", size=shard_bytes)
    entries: list[AllocationEntry] = []
    sizes: list[int] = []
    for info in allocations:
        extents = _extents(info.size, sizes, shard_bytes)
        entries.append(
            AllocationEntry(
                id=info.id, slot=info.slot, size=info.size, tag=info.tag, extents=extents
            )
        )
    return entries, sizes


def plan_files(
    allocations: Sequence[AllocationEntry],
    sizes: Sequence[int],
    *,
    names: Sequence[str] | None = None,
    chunk_bytes: Sequence[int] | None = None,
    stripes: Sequence[str] | None = None,
) -> list[FilePlan]:
    """Cut files into chunks of pieces. The extents must lie inside the files without overlap."""
    rows: list[list[tuple[int, int, int, int]]] = [[] for _ in sizes]
    for index, entry in enumerate(allocations):
        for extent in entry.extents:
            rows[extent.file].append((extent.file_offset, index, extent.offset, extent.size))
    plans: list[FilePlan] = []
    for file, size in enumerate(sizes):
        chunk = CHUNK_BYTES if chunk_bytes is None else chunk_bytes[file]
        name = shard_name(file) if names is None else names[file]
        chunks = _chunks(file, chunk, _filled(sorted(rows[file]), size))
        stripe = "" if stripes is None else stripes[file]
        plans.append(FilePlan(name, size, chunk, tuple(chunks), stripe))
    return plans


def shard_length(sizes: Iterable[int], places: int, longest: int) -> int:
    """Return how long shards of allocations of these sizes are, in bytes, at most `longest`.

    Over several places they are of one length, in whole chunks, and as many in each.
    """
    if places == 1:
        return longest
    each = -(-sum(aligned(size, PAGE) for size in sizes) // places)
    files = max(1, -(-each // longest))
    return min(longest, aligned(max(1, -(-each // files)), CHUNK_BYTES))


def spread(sizes: Sequence[int], stripes: Sequence[str]) -> list[str]:
    """Return where each file of these sizes goes: to a stripe root, or "" the artifact root.

    Each goes where the fewest bytes are so far, the artifact root first and then in this order.
    """
    filled = dict.fromkeys(["", *stripes], 0)
    places: list[str] = []
    for size in sizes:
        place = min(filled, key=lambda each: filled[each])
        filled[place] += size
        places.append(place)
    return places


def all_chunks(plans: Sequence[FilePlan]) -> Iterator[tuple[int, ChunkPlan]]:
    """Yield every chunk with the index of its file among these plans."""
    return ((file, chunk) for file, plan in enumerate(plans) for chunk in plan.chunks)


def longest_chunk(plans: Sequence[FilePlan]) -> int:
    """Return the bytes of the longest chunk, 0 without any."""
    return max((chunk.size for plan in plans for chunk in plan.chunks), default=0)


def cut_chunk(chunk: ChunkPlan, size: int) -> list[ChunkPlan]:
    """Cut a chunk into requests of at most `size` bytes, in order and numbered from 0."""
    if chunk.size <= size:
        return [replace(chunk, index=0)]
    cut = _chunks(chunk.file, size, chunk.pieces)
    return [replace(request, offset=chunk.offset + request.offset) for request in cut]


def without_memory(plan: FilePlan) -> FilePlan:
    """Return the same file with padding only: it is read and verified, and fills no memory."""
    chunks = [replace(c, pieces=(Piece(PADDING, 0, c.size),)) for c in plan.chunks]
    return replace(plan, chunks=tuple(chunks))


def runs_of(chunks: Sequence[ChunkPlan], limit: int) -> list[list[ChunkPlan]]:
    """Cut the chunks of a file into runs of at most `limit` bytes each, or of one longer chunk."""
    runs: list[list[ChunkPlan]] = []
    for chunk in chunks:
        if runs and sum(one.size for one in runs[-1]) + chunk.size <= limit:
            runs[-1].append(chunk)
        else:
            runs.append([chunk])
    return runs


def in_one(chunks: Sequence[ChunkPlan]) -> tuple[ChunkPlan, ...]:
    """Return the same chunks, with their bytes one after another in a single buffer."""
    first = chunks[0].offset if chunks else 0
    return tuple(
        replace(chunk, pieces=(Piece(0, chunk.offset - first, chunk.size),)) for chunk in chunks
    )


def shard_name(index: int) -> str:
    """Name a shard file."""
    return f"shard-{index:04d}.bin"


def metadata_of(saved: Sequence[SavedMetadata]) -> list[MetadataItem]:
    """Return saved metadata as metadata of a session."""
    return [
        MetadataItem(key=m.key, allocation=m.allocation, offset=m.offset, value=m.value)
        for m in saved
    ]


def saved_metadata(items: Sequence[MetadataItem]) -> list[SavedMetadata]:
    """Return metadata of a session as metadata of a manifest."""
    return [
        SavedMetadata(key=m.key, allocation=m.allocation, offset=m.offset, value=m.value)
        for m in items
    ]


def check_chunks(files: Sequence[FileEntry]) -> None:
    """Refuse chunks that would take too much memory. ArtifactCorrupt."""
    for entry in files:
        if entry.chunk_bytes > MAX_CHUNK_BYTES:
            raise ArtifactCorrupt(
                f"{entry.name} has chunks of {entry.chunk_bytes} bytes",
                file=entry.name,
                found=entry.chunk_bytes,
                limit=MAX_CHUNK_BYTES,
            )


def check_loadable(manifest: PartManifest, *, layout_id: str, wanted_hash: str) -> SavedLayout:
    """Return the layout of a checked manifest, its allocations in the order of their slots.

    ArtifactCorrupt when it contradicts itself, Incompatible when it is not the layout asked for.
    """
    layout = manifest.layout
    if manifest.kind != "gms" or layout is None:
        raise ArtifactCorrupt(f"part {manifest.part} holds no GPU memory", part=manifest.part)
    check_chunks(manifest.files)
    extents = [extent for entry in layout.allocations for extent in entry.extents]
    padding = manifest.bytes - sum(extent.size for extent in extents)
    if padding > PAGE * len(extents):
        raise ArtifactCorrupt("the files are longer than the layout", padding=padding)
    slots = [entry.slot for entry in layout.allocations]
    if slots != list(range(len(slots))):
        raise ArtifactCorrupt("the slots of the layout are not 0, 1, 2 … in order", field="slot")
    rows = [(entry.id, entry.size, entry.tag) for entry in layout.allocations]
    shape = structure_hash(rows, metadata_of(layout.metadata))
    if shape != layout.source.structure_hash:
        raise ArtifactCorrupt(
            "the structure hash of the manifest is not that of its layout",
            expected=layout.source.structure_hash,
            found=shape,
        )
    _require_same("layout id", layout_id, layout.source.layout_id)
    _require_same("structure hash", wanted_hash, shape)
    return layout


def check_fits(sizes: Sequence[int], *, granularity: int, capacity: int) -> int:
    """Return the device bytes that allocations of these sizes need.

    DeviceTooSmall when they can never fit. Whether they fit now is found out by allocating them,
    which waits for memory that others hold.
    """
    needed = sum(aligned(size, granularity) for size in sizes)
    if needed > capacity:
        wanted, there = units.sizes(needed, capacity)
        raise DeviceTooSmall(
            f"the layout needs {wanted}, the device has {there}",
            needed=needed,
            capacity=capacity,
        )
    return needed


def _extents(size: int, sizes: list[int], shard_bytes: int) -> list[Extent]:
    extents: list[Extent] = []
    offset = 0
    while offset < size:
        start = aligned(sizes[-1], PAGE) if sizes else shard_bytes
        if start >= shard_bytes:
            sizes.append(0)
            start = 0
        take = min(size - offset, shard_bytes - start)
        extents.append(Extent(file=len(sizes) - 1, file_offset=start, offset=offset, size=take))
        sizes[-1] = start + take
        offset += take
    return extents


def _filled(rows: Sequence[tuple[int, int, int, int]], size: int) -> list[Piece]:
    """Return the pieces of a whole file, with padding where no allocation stands."""
    pieces: list[Piece] = []
    at = 0
    for start, allocation, offset, length in rows:
        if start > at:
            pieces.append(Piece(PADDING, 0, start - at))
        pieces.append(Piece(allocation, offset, length))
        at = start + length
    if size > at:
        pieces.append(Piece(PADDING, 0, size - at))
    return pieces


def _chunks(file: int, chunk_bytes: int, pieces: Sequence[Piece]) -> list[ChunkPlan]:
    chunks: list[ChunkPlan] = []
    current: list[Piece] = []
    room = chunk_bytes
    for piece in pieces:
        done = 0
        while done < piece.size:
            take = min(piece.size - done, room)
            current.append(Piece(piece.allocation, piece.offset + done, take))
            done += take
            room -= take
            if room == 0:
                chunks.append(_chunk(file, len(chunks), chunk_bytes, current))
                current, room = [], chunk_bytes
    if current:
        chunks.append(_chunk(file, len(chunks), chunk_bytes, current))
    return chunks


def _chunk(file: int, index: int, chunk_bytes: int, pieces: Sequence[Piece]) -> ChunkPlan:
    size = sum(piece.size for piece in pieces)
    return ChunkPlan(file, index, index * chunk_bytes, size, tuple(pieces))


def _require_same(what: str, expected: str, found: str) -> None:
    if expected != found:
        raise Incompatible(
            f"the artifact holds another {what}: {found}, wanted {expected}",
            expected=expected,
            found=found,
        )
