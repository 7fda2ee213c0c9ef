"""Transfer plans: every byte has one place, and reading agrees with writing."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from gms.domain.layout import structure_hash
from gms.domain.transfer import (
    CHUNK_BYTES,
    PADDING,
    PAGE,
    ChunkPlan,
    Piece,
    check_fits,
    check_loadable,
    cut_chunk,
    place,
    plan_files,
    runs_of,
    shard_length,
    shard_name,
    spread,
    without_memory,
)
from snapback_client.frames import AllocationInfo
from snapshot_shared.artifact import (
    MAX_CHUNK_BYTES,
    AllocationEntry,
    Extent,
    FileEntry,
    PartManifest,
    SavedLayout,
    check_part_manifest,
)
from snapshot_shared.errors import (
    ArtifactCorrupt,
    DeviceTooSmall,
    Incompatible,
    InvalidInput,
)
from tests.support import builders

UID = "00000000-0000-0000-0000-000000000001"
CHUNK = 2 * PAGE

sizes_of_allocations = st.lists(st.integers(1, 9 * PAGE), min_size=1, max_size=12)
shards = st.integers(1, 6).map(lambda pages: pages * PAGE)


def _infos(sizes: list[int]) -> list[AllocationInfo]:
    return [
        AllocationInfo(id=f"a{slot}", size=size, aligned=size, tag="", slot=slot)
        for slot, size in enumerate(sizes)
    ]


def _manifest(sizes: list[int], *, shard_bytes: int = 4 * PAGE) -> PartManifest:
    entries, files = place(_infos(sizes), shard_bytes=shard_bytes)
    shape = structure_hash([(e.id, e.size, e.tag) for e in entries], [])
    source = builders.layout(structure_hash=shape, bytes=sum(sizes))
    return PartManifest(
        kind="gms",
        part="gpu-0",
        namespace="default",
        content_uid=UID,
        generation=1,
        order=f"save-{UID}-gpu-0",
        bytes=sum(files),
        files=[
            FileEntry(
                name=shard_name(i),
                size=size,
                chunk_bytes=CHUNK,
                chunks=["0" * 32] * -(-size // CHUNK),
            )
            for i, size in enumerate(files)
        ],
        layout=SavedLayout(source=source, allocations=entries),
    )


@given(sizes_of_allocations, shards)
def test_every_byte_of_every_allocation_has_exactly_one_place(
    sizes: list[int], shard_bytes: int
) -> None:
    entries, files = place(_infos(sizes), shard_bytes=shard_bytes)
    seen: set[tuple[int, int]] = set()
    for entry in entries:
        covered = 0
        for extent in entry.extents:
            assert extent.offset == covered
            assert extent.file_offset % PAGE == 0
            assert extent.file_offset + extent.size <= files[extent.file] <= shard_bytes
            places = {(extent.file, extent.file_offset + i) for i in range(0, extent.size, PAGE)}
            assert not places & seen
            seen |= places
            covered += extent.size
        assert covered == entry.size


@given(sizes_of_allocations, shards)
def test_a_placed_layout_makes_a_manifest_that_passes_its_own_check(
    sizes: list[int], shard_bytes: int
) -> None:
    manifest = _manifest(sizes, shard_bytes=shard_bytes)
    check_part_manifest(manifest)
    assert manifest.layout is not None
    wanted = manifest.layout.source.structure_hash
    assert check_loadable(manifest, layout_id="l", wanted_hash=wanted) == manifest.layout


@given(sizes_of_allocations, shards, st.integers(1, 5))
def test_chunks_cover_their_file_and_carry_each_allocation_to_its_place(
    sizes: list[int], shard_bytes: int, pages: int
) -> None:
    entries, files = place(_infos(sizes), shard_bytes=shard_bytes)
    plans = plan_files(entries, files, chunk_bytes=[pages * PAGE] * len(files))
    for file, plan in enumerate(plans):
        at = 0
        for index, chunk in enumerate(plan.chunks):
            assert (chunk.file, chunk.index, chunk.offset) == (file, index, at)
            assert chunk.size == sum(piece.size for piece in chunk.pieces)
            assert chunk.size == pages * PAGE or index == len(plan.chunks) - 1
            for piece in chunk.pieces:
                if piece.allocation != PADDING:
                    assert _stands_at(entries[piece.allocation], file, at, piece.offset, piece.size)
                at += piece.size
        assert at == plan.size == files[file]


def test_what_a_file_holds_beside_its_allocations_is_padding() -> None:
    entries, _ = place(_infos([PAGE, PAGE]), shard_bytes=4 * PAGE)
    apart = [_moved(entries[0], PAGE), _moved(entries[1], 3 * PAGE)]
    (plan,) = plan_files(apart, [6 * PAGE])
    pieces = [piece for chunk in plan.chunks for piece in chunk.pieces]
    assert pieces == [
        Piece(PADDING, 0, PAGE),
        Piece(0, 0, PAGE),
        Piece(PADDING, 0, PAGE),
        Piece(1, 0, PAGE),
        Piece(PADDING, 0, 2 * PAGE),
    ]


def _moved(entry: AllocationEntry, to: int) -> AllocationEntry:
    (extent,) = entry.extents
    return replace(entry, extents=[replace(extent, file=0, file_offset=to)])


def _stands_at(entry: AllocationEntry, file: int, at: int, offset: int, size: int) -> bool:
    return any(
        extent.file == file
        and extent.file_offset - extent.offset == at - offset
        and extent.offset <= offset
        and offset + size <= extent.offset + extent.size
        for extent in entry.extents
    )


@given(size=st.integers(1, 40), limit=st.integers(1, 9))
def test_requests_cover_a_chunk_in_order_with_the_same_pieces(size: int, limit: int) -> None:
    pieces = (Piece(0, 3, size), Piece(PADDING, 0, 2), Piece(1, 0, 7))
    chunk = ChunkPlan(2, 5, 1000, size + 9, pieces)
    found = cut_chunk(chunk, limit)
    assert [each.offset for each in found] == list(range(1000, 1000 + chunk.size, limit))
    assert {each.file for each in found} == {2}
    assert all(0 < each.size <= limit for each in found)
    assert bytes_of(pieces) == [byte for each in found for byte in bytes_of(each.pieces)]


def bytes_of(pieces: Sequence[Piece]) -> list[tuple[int, int]]:
    return [(p.allocation, p.offset + at) for p in pieces for at in range(p.size)]


@pytest.mark.parametrize("size", [0, 100, PAGE + 1])
def test_a_shard_is_whole_pages(size: int) -> None:
    with pytest.raises(InvalidInput):
        place(_infos([1]), shard_bytes=size)


def test_another_structure_than_the_one_asked_for_is_refused_with_both() -> None:
    with pytest.raises(Incompatible) as caught:
        check_loadable(_manifest([5]), layout_id="l", wanted_hash="other")
    assert caught.value.values["expected"] == "other"
    manifest = _manifest([5])
    assert manifest.layout is not None
    shape = manifest.layout.source.structure_hash
    with pytest.raises(Incompatible):
        check_loadable(manifest, layout_id="m", wanted_hash=shape)


def _changed(manifest: PartManifest, **layout: object) -> PartManifest:

    return replace(manifest, layout=replace(manifest.layout, **layout))


def test_a_manifest_whose_layout_is_not_what_its_hash_says_is_refused() -> None:
    manifest = _manifest([5, 6])
    assert manifest.layout is not None
    shape = manifest.layout.source.structure_hash
    renamed = [
        AllocationEntry(id="x", slot=e.slot, size=e.size, extents=e.extents)
        for e in manifest.layout.allocations
    ]
    for allocations in (renamed, manifest.layout.allocations[::-1]):
        with pytest.raises(ArtifactCorrupt):
            check_loadable(
                _changed(manifest, allocations=allocations), layout_id="l", wanted_hash=shape
            )


def test_a_manifest_cannot_ask_for_endless_padding_or_endless_chunks() -> None:
    manifest = _manifest([5])
    assert manifest.layout is not None
    shape = manifest.layout.source.structure_hash

    long_file = FileEntry(name="f", size=2**40, chunk_bytes=2**20, chunks=["0" * 32])
    padded = replace(manifest, bytes=2**40, files=[long_file])
    with pytest.raises(ArtifactCorrupt, match="longer than the layout"):
        check_loadable(padded, layout_id="l", wanted_hash=shape)
    most = FileEntry(name="f", size=PAGE + 5, chunk_bytes=MAX_CHUNK_BYTES, chunks=["0" * 32])
    full = replace(manifest, bytes=PAGE + 5, files=[most])
    assert check_loadable(full, layout_id="l", wanted_hash=shape) == manifest.layout
    with pytest.raises(ArtifactCorrupt, match="longer than the layout"):
        check_loadable(replace(full, bytes=PAGE + 6), layout_id="l", wanted_hash=shape)
    big = FileEntry(name="f", size=5, chunk_bytes=MAX_CHUNK_BYTES + 1, chunks=["0" * 32])
    with pytest.raises(ArtifactCorrupt, match="chunks of"):
        check_loadable(replace(manifest, files=[big]), layout_id="l", wanted_hash=shape)


def test_a_process_part_is_not_loaded_into_a_device() -> None:

    with pytest.raises(ArtifactCorrupt):
        check_loadable(replace(_manifest([5]), kind="process"), layout_id="l", wanted_hash="")


def test_a_device_that_can_never_hold_the_layout_is_named() -> None:
    with pytest.raises(DeviceTooSmall) as small:
        check_fits([5, 5], granularity=4, capacity=15)
    assert small.value.values == {"needed": 16, "capacity": 15}
    assert check_fits([5, 5], granularity=4, capacity=16) == 16


def test_extents_that_go_over_a_shard_boundary_are_split() -> None:
    entries, files = place(_infos([3 * PAGE + 1]), shard_bytes=2 * PAGE)
    assert entries[0].extents == [
        Extent(file=0, file_offset=0, offset=0, size=2 * PAGE),
        Extent(file=1, file_offset=0, offset=2 * PAGE, size=PAGE + 1),
    ]
    assert files == [2 * PAGE, PAGE + 1]


@pytest.mark.parametrize(
    ("limit", "expected"), [(1, [1] * 9), (CHUNK, [1] * 9), (3 * CHUNK, [3, 3, 3]), (10**9, [9])]
)
def test_runs_are_as_long_as_a_window_allows(limit: int, expected: list[int]) -> None:
    info = AllocationInfo(id="a", size=9 * CHUNK, aligned=9 * CHUNK, tag="", slot=0)
    entries, lengths = place([info], shard_bytes=9 * CHUNK)
    (plan,) = plan_files(entries, lengths, chunk_bytes=[CHUNK])
    runs = runs_of(plan.chunks, limit)
    assert [len(run) for run in runs] == expected
    assert [chunk for run in runs for chunk in run] == list(plan.chunks)


def test_a_chunk_that_fits_the_buffer_is_one_piece_of_work_with_number_0() -> None:
    info = AllocationInfo(id="a", size=3 * CHUNK, aligned=3 * CHUNK, tag="", slot=0)
    entries, lengths = place([info], shard_bytes=3 * CHUNK)
    (plan,) = plan_files(entries, lengths, chunk_bytes=[CHUNK])
    for chunk in plan.chunks:
        (cut,) = cut_chunk(chunk, CHUNK)
        assert (cut.index, cut.offset, cut.pieces) == (0, chunk.offset, chunk.pieces)


def test_a_file_that_is_only_read_has_its_chunks_and_no_allocation() -> None:
    entries, files = place(_infos([3 * PAGE]), shard_bytes=4 * PAGE)
    (plan,) = plan_files(entries, files, chunk_bytes=[CHUNK])
    bare = without_memory(plan)
    assert [(c.offset, c.size) for c in bare.chunks] == [(c.offset, c.size) for c in plan.chunks]
    assert [chunk.pieces for chunk in bare.chunks] == [
        (Piece(PADDING, 0, CHUNK),),
        (Piece(PADDING, 0, PAGE),),
    ]


def test_shards_are_as_long_as_they_may_be_where_they_have_one_place() -> None:
    assert shard_length([10 * CHUNK], 1, 4 * CHUNK) == 4 * CHUNK
    assert shard_length([], 1, 4 * CHUNK) == 4 * CHUNK


@given(
    st.lists(st.integers(1, 9 * CHUNK_BYTES), min_size=1, max_size=20),
    st.integers(2, 6),
    st.sampled_from([PAGE, CHUNK_BYTES, 32 * CHUNK_BYTES]),
)
def test_several_places_get_shards_of_one_length_and_as_many_each(
    sizes: list[int], places: int, longest: int
) -> None:
    length = shard_length(sizes, places, longest)
    assert length <= longest
    total = sum(-(-size // PAGE) * PAGE for size in sizes)
    if longest >= CHUNK_BYTES:
        assert length % CHUNK_BYTES == 0
        files, fewest = -(-total // length), -(-total // longest)
        assert files <= max(places, fewest + places)


def test_a_part_that_is_shorter_than_a_shard_is_spread_too() -> None:
    size = 6 * CHUNK_BYTES
    _, sizes = place(_infos([size]), shard_bytes=shard_length([size], 3, 10 * size))
    assert sizes == [2 * CHUNK_BYTES] * 3
    assert shard_length([PAGE], 3, size) == CHUNK_BYTES


def test_files_go_where_the_fewest_bytes_are_and_first_into_the_artifact_root() -> None:
    assert spread([4, 4, 4, 4], []) == ["", "", "", ""]
    assert spread([4, 4, 4, 4], ["a", "b"]) == ["", "a", "b", ""]
    assert spread([9, 1, 1, 1], ["a"]) == ["", "a", "a", "a"]
    assert spread([], ["a"]) == []


@given(st.lists(st.integers(1, 2**40), max_size=60), st.integers(0, 8))
def test_no_folder_gets_more_than_its_share_and_one_file(sizes: list[int], roots: int) -> None:
    names = [f"s{number}" for number in range(roots)]
    filled = dict.fromkeys(["", *names], 0)
    for size, name in zip(sizes, spread(sizes, names), strict=True):
        filled[name] += size
    assert max(filled.values()) - min(filled.values()) <= max(sizes, default=0)


def test_a_plan_says_in_which_stripe_root_each_file_is() -> None:
    entries, sizes = place(_infos([3 * PAGE]), shard_bytes=PAGE)
    plans = plan_files(entries, sizes, stripes=spread(sizes, ["a"]))
    assert [plan.stripe for plan in plans] == ["", "a", ""]
    assert {plan.stripe for plan in plan_files(entries, sizes)} == {""}
