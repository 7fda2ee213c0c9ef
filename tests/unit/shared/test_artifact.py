"""A part manifest whose numbers cannot be true is refused before anything is read."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from snapshot_shared.artifact import (
    AllocationEntry,
    Encryption,
    Extent,
    FileEncryption,
    MetadataEntry,
    PartManifest,
    SavedLayout,
    SavedObjects,
    check_part_manifest,
    generation_of,
    generation_path,
    part_path,
)
from snapshot_shared.codec import decode_json, encode_json
from snapshot_shared.errors import ArtifactCorrupt, InvalidMessage, InvalidName
from tests.support import builders
from tests.support.builders import UID
from tests.unit.tables import each


def extent(**more: int) -> Extent:
    """Return the extent of the first of two allocations in one file."""
    return Extent(**{"file": 0, "file_offset": 0, "offset": 0, "size": 4096, **more})


def laid_out(*sizes: int, overlap: int = 0) -> SavedLayout:
    """Allocations of these sizes in one file, the last a little before its place."""
    starts = [sum(sizes[:index]) for index in range(len(sizes))]
    starts[-1] -= overlap
    allocations = [
        AllocationEntry(
            id=f"w{index}",
            slot=index,
            size=size,
            extents=[extent(file_offset=start, size=size)],
        )
        for index, (size, start) in enumerate(zip(sizes, starts, strict=True))
    ]
    return SavedLayout(source=builders.layout(bytes=8192), allocations=allocations)


def manifest(**changes: Any) -> PartManifest:
    file = builders.file_entry(size=8192, chunks=["0" * 32] * 2)
    return builders.part_manifest(
        file, **{"part": "gpu-0", "layout": laid_out(4096, 4096), **changes}
    )


def test_each_chunk_of_an_encrypted_layout_has_a_tag_and_no_other_chunk_has_one() -> None:
    (plain,) = manifest().files
    tagged = [replace(plain, encryption=FileEncryption([bytes(28)] * 2))]
    key = Encryption(key="k", data_key=b"")
    assert check_part_manifest(manifest(files=tagged, encryption=key)).encryption == key
    short = [replace(plain, encryption=FileEncryption([bytes(28)]))]
    for bad in (
        manifest(files=tagged),
        manifest(encryption=key),
        manifest(files=short, encryption=key),
        manifest(files=tagged, encryption=key, kind="process"),
    ):
        with pytest.raises(ArtifactCorrupt, match=r"files\.shard-0: tags"):
            check_part_manifest(bad)


def with_extents(*extents: Extent) -> PartManifest:
    base: Any = manifest()
    first = replace(base.layout.allocations[0], extents=list(extents))
    layout = replace(base.layout, allocations=[first, base.layout.allocations[1]])
    return replace(base, layout=layout)


@each(
    "bad",
    [
        manifest(version=2),
        manifest(bytes=8193),
        manifest(files=manifest().files * 2, bytes=16384),
        manifest(files=[replace(manifest().files[0], chunks=["0" * 32])]),
        manifest(files=[replace(manifest().files[0], name="part.json")]),
        with_extents(),
        with_extents(extent(file=1)),
        with_extents(extent(file_offset=8000)),
        with_extents(extent(file_offset=2048)),
        with_extents(extent(offset=1, size=4095)),
        with_extents(extent(size=4095)),
    ],
)
def test_numbers_that_cannot_be_true_are_refused(bad: PartManifest) -> None:
    with pytest.raises(ArtifactCorrupt):
        check_part_manifest(bad)


def in_sizes(*sizes: int, overlap: int = 0) -> PartManifest:
    """A part of one file with allocations of these sizes."""
    chunks = ["0" * 32] * (sum(sizes) // 4096)
    file = builders.file_entry(size=sum(sizes), chunks=chunks)
    return builders.part_manifest(file, part="gpu-0", layout=laid_out(*sizes, overlap=overlap))


def test_extents_may_touch_whatever_their_sizes_are_and_may_not_overlap_by_a_byte() -> None:
    for sizes in ((8192, 4096), (4096, 8192), (4096, 4096, 12288)):
        check_part_manifest(in_sizes(*sizes))
        with pytest.raises(ArtifactCorrupt, match=rf"overlap \(found {sum(sizes[:-1]) - 1}\)"):
            check_part_manifest(in_sizes(*sizes, overlap=1))


def test_an_extent_ends_with_its_file_at_the_latest() -> None:
    with pytest.raises(ArtifactCorrupt, match="past the end of its file"):
        check_part_manifest(in_sizes(4096, 4096, overlap=-1))


def test_metadata_about_an_unknown_allocation_is_refused() -> None:
    base: Any = manifest()
    entry = MetadataEntry(key="k", allocation="none", offset=0, value=b"")
    with pytest.raises(ArtifactCorrupt, match=r"metadata\.k"):
        check_part_manifest(replace(base, layout=replace(base.layout, metadata=[entry])))


@each(
    ("field", "value"),
    [
        ("size", 2**63),
        ("size", -1),
        ("name", "../x"),
        ("name", "/etc/passwd"),
        ("name", "a/b"),
        ("chunk_bytes", 1),
        ("chunks", ["zz"]),
    ],
)
def test_a_hostile_file_entry_does_not_even_decode(field: str, value: Any) -> None:
    document = msgspec.to_builtins(manifest())
    document["files"][0][field] = value
    with pytest.raises(InvalidMessage, match=rf"files\[0\]\.{field}"):
        decode_json(encode_json(document), PartManifest)


@each("part", ["", "..", "gpu-", "gpu-0/..", "process/../x", "GPU-0"])
def test_a_part_has_one_of_the_known_names(part: str) -> None:
    with pytest.raises(InvalidName):
        part_path("default", UID, 1, part)


@each(
    ("folder", "number"),
    [
        ("gen-1", 1),
        ("gen-1000000", 1_000_000),
        ("gen-1000001", None),
        ("gen-0", None),
        ("gen-01", None),
        ("gen-", None),
        ("gen-x", None),
        ("1", None),
    ],
)
def test_a_generation_has_one_name(folder: str, number: int | None) -> None:
    assert generation_of("default", UID, folder) == number
    assert generation_of("A b", UID, folder) is None


@pytest.mark.parametrize("generation", [0, -1, 1_000_001, True])
def test_a_generation_that_no_attempt_can_have_makes_no_path(generation: int) -> None:
    with pytest.raises(InvalidName, match="1 to 1000000") as caught:
        generation_path("default", UID, generation)
    assert repr(generation) in caught.value.message


def test_objects_of_a_part_have_its_own_path_for_prefix() -> None:
    own = SavedObjects(prefix=f"default/{UID}/gen-1/gpu-0")
    assert check_part_manifest(manifest(objects=own)).objects == own
    with pytest.raises(ArtifactCorrupt, match="prefix"):
        check_part_manifest(manifest(objects=replace(own, prefix=f"default/{UID}/gen-2/gpu-0")))
