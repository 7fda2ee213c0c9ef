"""Parts on disk, compared and found by their path, without touching a byte of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import PurePath

import msgspec

from snapshot_shared.artifact import FileEntry, PartManifest, generation_of
from snapshot_shared.errors import InvalidInput
from snapshot_shared.ids import check_part


class PartPlace(msgspec.Struct, frozen=True, kw_only=True):
    """Where a part stands: `<root>/<namespace>/<content uid>/gen-<attempt>/<part>`."""

    root: str
    namespace: str
    content_uid: str
    attempt: int
    part: str


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """What differs between two parts. Bytes are those of the second.

    `same` and `changed` count bytes by the digests of whole chunks. Allocations are named by id.
    """

    equal: bool
    same_bytes: int
    changed_bytes: int
    added: list[str]
    removed: list[str]
    resized: list[str]
    changed: list[str]
    metadata: list[str]


class PartDifference(msgspec.Struct, frozen=True, kw_only=True):
    """How a part of two generations differs. `difference` is None when only one has the part."""

    part: str
    difference: Difference | None = None
    is_in_first: bool = True

    @property
    def is_equal(self) -> bool:
        """Whether both have it, with the same bytes."""
        return self.difference is not None and self.difference.equal


def place_of(path: PurePath) -> PartPlace:
    """Read the place of a part off its absolute path. InvalidInput."""
    names = path.parts[-4:]
    if len(names) == 4:
        namespace, content_uid, folder, part = names
        attempt = generation_of(namespace, content_uid, folder)
        if attempt is not None:
            return PartPlace(
                root=str(path.parents[3]),
                namespace=namespace,
                content_uid=content_uid,
                attempt=attempt,
                part=check_part(part),
            )
    raise InvalidInput(
        f"{path} is not the path of a part",
        next_step="name a folder <root>/<namespace>/<content uid>/gen-<attempt>/gpu-<ordinal>",
        found=str(path),
    )


def difference(old: PartManifest, new: PartManifest) -> Difference:
    """Compare two parts by their manifests."""
    before, after = _chunks(old), _chunks(new)
    same = sum(size for key, (size, digest) in after.items() if before.get(key) == (size, digest))
    was, now = _allocations(old), _allocations(new)
    kept = [name for name in now if name in was]
    resized = [name for name in kept if was[name][0] != now[name][0]]
    changed = [name for name in kept if name not in resized and was[name][1] != now[name][1]]
    had, has = _metadata(old), _metadata(new)
    metadata = sorted(key for key in had.keys() | has.keys() if had.get(key) != has.get(key))
    added = [name for name in now if name not in was]
    removed = [name for name in was if name not in now]
    return Difference(
        equal=before == after and not (metadata or added or removed or resized or changed),
        same_bytes=same,
        changed_bytes=new.bytes - same,
        added=added,
        removed=removed,
        resized=resized,
        changed=changed,
        metadata=metadata,
    )


def differences(
    old: Mapping[str, PartManifest], new: Mapping[str, PartManifest]
) -> list[PartDifference]:
    """Compare the parts of two generations, which have them by their names."""
    return [
        PartDifference(
            part=name,
            difference=difference(old[name], new[name]) if name in old and name in new else None,
            is_in_first=name in old,
        )
        for name in sorted({*old, *new})
    ]


def chunk_sizes(entry: FileEntry) -> Iterator[tuple[int, int]]:
    """Return (offset, bytes) of every chunk of a file, in order."""
    for offset in range(0, entry.size, entry.chunk_bytes):
        yield offset, min(entry.chunk_bytes, entry.size - offset)


def _chunks(manifest: PartManifest) -> dict[tuple[str, int], tuple[int, str]]:
    return {
        (entry.name, offset): (size, digest)
        for entry in manifest.files
        for (offset, size), digest in zip(chunk_sizes(entry), entry.chunks, strict=True)
    }


def _allocations(manifest: PartManifest) -> dict[str, tuple[int, list[str]]]:
    """Return size and the digests of all chunks that hold a byte of it, by allocation."""
    if manifest.layout is None:
        return {}
    found: dict[str, tuple[int, list[str]]] = {}
    for allocation in manifest.layout.allocations:
        digests: list[str] = []
        for extent in allocation.extents:
            entry = manifest.files[extent.file]
            first = extent.file_offset // entry.chunk_bytes
            last = (extent.file_offset + extent.size - 1) // entry.chunk_bytes
            digests += entry.chunks[first : last + 1]
        found[allocation.id] = (allocation.size, digests)
    return found


def _metadata(manifest: PartManifest) -> dict[str, tuple[str, int, bytes]]:
    if manifest.layout is None:
        return {}
    return {
        item.key: (item.allocation, item.offset, item.value) for item in manifest.layout.metadata
    }
