"""Parts are found by their path, and two of them compared by their manifests alone."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import PurePath

import pytest
from msgspec.structs import replace

from gms.domain.parts import Difference, chunk_sizes, difference, place_of
from snapshot_shared.artifact import (
    AllocationEntry,
    Extent,
    FileEntry,
    MetadataEntry,
    PartManifest,
    SavedLayout,
)
from snapshot_shared.errors import InvalidInput
from snapshot_shared.orders import LayoutRef

UID = "00000000-0000-4000-8000-000000000001"
SOURCE = LayoutRef(
    device="GPU-1", incarnation="i", generation=1, layout_id="l", structure_hash="h", bytes=1
)
PAGE = 4096


def part(
    *allocations: tuple[str, int, int], digests: Sequence[str], last: int = PAGE
) -> PartManifest:
    """A part of one file; allocations are (id, first page, pages)."""
    size = (len(digests) - 1) * PAGE + last
    entries = [
        AllocationEntry(
            id=name,
            slot=slot,
            size=pages * PAGE,
            extents=[Extent(file=0, file_offset=first * PAGE, offset=0, size=pages * PAGE)],
        )
        for slot, (name, first, pages) in enumerate(allocations)
    ]
    chunks = [digest * 32 for digest in digests]
    return PartManifest(
        kind="gms",
        part="gpu-0",
        namespace="default",
        content_uid=UID,
        generation=1,
        order=f"save-{UID}-gpu-0",
        bytes=size,
        files=[FileEntry(name="shard-0", size=size, chunk_bytes=PAGE, chunks=chunks)],
        layout=SavedLayout(source=SOURCE, allocations=entries),
    )


def with_metadata(manifest: PartManifest, **values: bytes) -> PartManifest:
    assert manifest.layout is not None
    items = [
        MetadataEntry(key=key, allocation="a", offset=0, value=value)
        for key, value in values.items()
    ]
    return replace(manifest, layout=replace(manifest.layout, metadata=items))


OLD = part(("a", 0, 2), ("b", 2, 1), ("c", 3, 1), digests="0123")
SAME = Difference(
    equal=True,
    same_bytes=4 * PAGE,
    changed_bytes=0,
    added=[],
    removed=[],
    resized=[],
    changed=[],
    metadata=[],
)


def test_equal_parts_are_equal() -> None:
    assert difference(OLD, OLD) == SAME


@pytest.mark.parametrize(
    ("digests", "changed"),
    [("4123", ["a"]), ("0423", ["a"]), ("0143", ["b"]), ("4444", ["a", "b", "c"])],
)
def test_an_allocation_has_changed_when_a_chunk_of_it_has(digests: str, changed: list[str]) -> None:
    found = difference(OLD, part(("a", 0, 2), ("b", 2, 1), ("c", 3, 1), digests=digests))
    moved = digests.count("4") * PAGE
    assert found == replace(
        SAME, equal=False, same_bytes=4 * PAGE - moved, changed_bytes=moved, changed=changed
    )


@pytest.mark.parametrize(
    ("offset", "size", "touched"),
    [
        (0, PAGE, "1000"),
        (0, PAGE + 1, "1100"),
        (PAGE - 1, 2, "1100"),
        (PAGE, 1, "0100"),
        (2 * PAGE - 1, PAGE + 2, "0111"),
    ],
)
def test_an_allocation_has_every_chunk_that_holds_a_byte_of_it_and_no_other(
    offset: int, size: int, touched: str
) -> None:
    def one(digests: str) -> PartManifest:
        found = part(digests=digests)
        assert found.layout is not None
        extents = [Extent(file=0, file_offset=offset, offset=0, size=size)]
        entry = AllocationEntry(id="a", slot=0, size=size, extents=extents)
        return replace(found, layout=replace(found.layout, allocations=[entry]))

    changed = [difference(one("0123"), one(d)).changed for d in ("4123", "0423", "0143", "0124")]
    assert changed == [["a"] * int(has) for has in touched]


def test_allocations_come_go_and_grow() -> None:
    found = difference(OLD, part(("a", 0, 1), ("b", 2, 1), ("d", 3, 1), digests="0123"))
    assert found == replace(SAME, equal=False, added=["d"], removed=["c"], resized=["a"])


def test_metadata_is_compared_by_key() -> None:
    old = with_metadata(OLD, same=b"1", other=b"1", gone=b"1")
    new = with_metadata(OLD, same=b"1", other=b"2", new=b"1")
    found = difference(old, new)
    assert found == replace(SAME, equal=False, metadata=["gone", "new", "other"])


def test_a_last_chunk_of_another_length_is_another_chunk() -> None:
    found = difference(OLD, part(("a", 0, 2), ("b", 2, 1), digests="0123", last=100))
    assert (found.same_bytes, found.changed_bytes) == (3 * PAGE, 100)


def test_parts_without_a_layout_are_compared_by_their_chunks() -> None:
    bare = replace(OLD, layout=None)
    assert difference(bare, bare) == SAME


def test_the_last_chunk_of_a_file_is_what_is_left() -> None:
    entry = replace(OLD.files[0], size=2 * PAGE + 1)
    assert list(chunk_sizes(entry)) == [(0, PAGE), (PAGE, PAGE), (2 * PAGE, 1)]


def test_a_path_names_the_place_of_a_part() -> None:
    place = place_of(PurePath(f"/srv/store/default/{UID}/gen-12/gpu-3"))
    assert (place.root, place.namespace, place.content_uid) == ("/srv/store", "default", UID)
    assert (place.attempt, place.part) == (12, "gpu-3")


@pytest.mark.parametrize(
    "path",
    [
        "/",
        "/gpu-3",
        f"/default/{UID}/gen-0/gpu-3",
        f"/default/{UID}/gen-01/gpu-3",
        f"/A b/{UID}/gen-1/gpu-3",
    ],
)
def test_another_path_is_none_of_a_part(path: str) -> None:
    with pytest.raises(InvalidInput, match="not the path of a part"):
        place_of(PurePath(path))
