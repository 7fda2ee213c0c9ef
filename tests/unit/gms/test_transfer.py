"""Transfer plans: every byte has one place. Parts are compared, and notes of saves read."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from pathlib import PurePath

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from gms.adapters.striping import in_folders
from gms.domain.layout import structure_hash
from gms.domain.parts import Difference, chunk_sizes, difference, place_of
from gms.domain.resume import ChunksNote, KeyNote, SaveNote, read_notes
from gms.domain.transfer import (
    CHUNK_BYTES,
    PADDING,
    PAGE,
    ChunkPlan,
    FilePlan,
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
from gms.ports import Advance, Moved
from snapback_client.frames import AllocationInfo
from snapshot_shared import artifact, errors
from snapshot_shared.artifact import MAX_CHUNK_BYTES
from snapshot_shared.codec import encode_json
from tests.support import builders
from tests.support.builders import UID
from tests.unit.tables import each

CHUNK = 2 * PAGE

sizes_of_allocations = st.lists(st.integers(1, 9 * PAGE), min_size=1, max_size=12)
shards = st.integers(1, 6).map(lambda pages: pages * PAGE)


def _infos(sizes: list[int]) -> list[AllocationInfo]:
    return [
        AllocationInfo(id=f"a{slot}", size=size, aligned=size, tag="", slot=slot)
        for slot, size in enumerate(sizes)
    ]


def _manifest(sizes: list[int], *, shard_bytes: int = 4 * PAGE) -> artifact.PartManifest:
    entries, lengths = place(_infos(sizes), shard_bytes=shard_bytes)
    shape = structure_hash([(e.id, e.size, e.tag) for e in entries], [])
    source = builders.layout(structure_hash=shape, bytes=sum(sizes))
    files = [
        _file(size, CHUNK, ["0" * 32] * -(-size // CHUNK), shard_name(index))
        for index, size in enumerate(lengths)
    ]
    layout = artifact.SavedLayout(source=source, allocations=entries)
    return builders.part_manifest(*files, part="gpu-0", layout=layout)


def one_file(size: int) -> FilePlan:
    """Return the plan of a file that holds one allocation."""
    entries, sizes = place(_infos([size]), shard_bytes=size)
    (plan,) = plan_files(entries, sizes, chunk_bytes=[CHUNK])
    return plan


def _file(size: int, chunk_bytes: int, chunks: list[str], name: str = "f") -> artifact.FileEntry:
    return artifact.FileEntry(name=name, size=size, chunk_bytes=chunk_bytes, chunks=chunks)


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
    artifact.check_part_manifest(manifest)
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
    apart = [standing("a0", PAGE, PAGE), standing("a1", 3 * PAGE, PAGE, slot=1)]
    (plan,) = plan_files(apart, [6 * PAGE])
    pieces = [piece for chunk in plan.chunks for piece in chunk.pieces]
    assert pieces == [
        Piece(PADDING, 0, PAGE),
        Piece(0, 0, PAGE),
        Piece(PADDING, 0, PAGE),
        Piece(1, 0, PAGE),
        Piece(PADDING, 0, 2 * PAGE),
    ]


def _stands_at(entry: artifact.AllocationEntry, file: int, at: int, offset: int, size: int) -> bool:
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
    with pytest.raises(errors.InvalidInput):
        place(_infos([1]), shard_bytes=size)


MANIFEST = _manifest([5, 6])
assert MANIFEST.layout is not None
SAVED = MANIFEST.layout
RENAMED = [replace(entry, id=f"x{entry.slot}") for entry in SAVED.allocations]
FULL = 2 * PAGE + 11
"""So long a file may be with two allocations of 11 bytes: a page of padding each."""


def loadable(manifest: artifact.PartManifest, **asked: str) -> artifact.SavedLayout:
    wanted = {"layout_id": "l", "wanted_hash": SAVED.source.structure_hash}
    return check_loadable(manifest, **wanted | asked)


def with_file(size: int, chunk_bytes: int) -> artifact.PartManifest:
    return replace(MANIFEST, bytes=size, files=[_file(size, chunk_bytes, ["0" * 32])])


def with_allocations(allocations: list[artifact.AllocationEntry]) -> artifact.PartManifest:
    return replace(MANIFEST, layout=replace(SAVED, allocations=allocations))


@each(
    ("manifest", "asked", "error", "said"),
    [
        (MANIFEST, {"wanted_hash": "other"}, errors.Incompatible, "other"),
        (MANIFEST, {"layout_id": "m"}, errors.Incompatible, "layout id"),
        (replace(MANIFEST, kind="process"), {}, errors.ArtifactCorrupt, "holds no GPU memory"),
        (with_allocations(RENAMED), {}, errors.ArtifactCorrupt, "not that of its layout"),
        (with_allocations(SAVED.allocations[::-1]), {}, errors.ArtifactCorrupt, "in order"),
        # Endless padding, and endless chunks.
        (with_file(2**40, 2**20), {}, errors.ArtifactCorrupt, "longer than the layout"),
        (
            with_file(FULL + 1, MAX_CHUNK_BYTES),
            {},
            errors.ArtifactCorrupt,
            "longer than the layout",
        ),
        (with_file(11, MAX_CHUNK_BYTES + 1), {}, errors.ArtifactCorrupt, "chunks of"),
    ],
)
def test_a_manifest_that_is_not_what_was_asked_for_or_contradicts_itself_is_refused(
    manifest: artifact.PartManifest, asked: dict[str, str], error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=said):
        loadable(manifest, **asked)


def test_a_file_may_have_a_page_of_padding_for_each_allocation() -> None:
    assert loadable(with_file(FULL, MAX_CHUNK_BYTES)) == SAVED


def test_a_device_that_can_never_hold_the_layout_is_named() -> None:
    with pytest.raises(errors.DeviceTooSmall) as small:
        check_fits([5, 5], granularity=4, capacity=15)
    assert small.value.values == {"needed": 16, "capacity": 15}
    assert check_fits([5, 5], granularity=4, capacity=16) == 16


@pytest.mark.parametrize(
    ("limit", "expected"), [(1, [1] * 9), (CHUNK, [1] * 9), (3 * CHUNK, [3, 3, 3]), (10**9, [9])]
)
def test_runs_are_as_long_as_a_window_allows(limit: int, expected: list[int]) -> None:
    chunks = one_file(9 * CHUNK).chunks
    runs = runs_of(chunks, limit)
    assert [len(run) for run in runs] == expected
    assert [chunk for run in runs for chunk in run] == list(chunks)


def test_a_chunk_that_fits_the_buffer_is_one_piece_of_work_with_number_0() -> None:
    for chunk in one_file(3 * CHUNK).chunks:
        (cut,) = cut_chunk(chunk, CHUNK)
        assert (cut.index, cut.offset, cut.pieces) == (0, chunk.offset, chunk.pieces)


def test_a_file_that_is_only_read_has_its_chunks_and_no_allocation() -> None:
    plan = one_file(3 * PAGE)
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


def standing(name: str, at: int, size: int, slot: int = 0) -> artifact.AllocationEntry:
    """An allocation that is in one piece in the first file."""
    extents = [artifact.Extent(file=0, file_offset=at, offset=0, size=size)]
    return artifact.AllocationEntry(id=name, slot=slot, size=size, extents=extents)


def part(
    *allocations: tuple[str, int, int], digests: Sequence[str], last: int = PAGE
) -> artifact.PartManifest:
    """A part of one file; allocations are (id, first page, pages)."""
    entries = [
        standing(name, first * PAGE, pages * PAGE, slot)
        for slot, (name, first, pages) in enumerate(allocations)
    ]
    size = (len(digests) - 1) * PAGE + last
    file = _file(size, PAGE, [digest * 32 for digest in digests])
    layout = artifact.SavedLayout(source=builders.layout(), allocations=entries)
    return builders.part_manifest(file, part="gpu-0", layout=layout)


def with_metadata(manifest: artifact.PartManifest, **values: bytes) -> artifact.PartManifest:
    assert manifest.layout is not None
    items = [
        artifact.MetadataEntry(key=key, allocation="a", offset=0, value=value)
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
    def one(digests: str) -> artifact.PartManifest:
        found = part(digests=digests)
        assert found.layout is not None
        return replace(
            found, layout=replace(found.layout, allocations=[standing("a", offset, size)])
        )

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
    with pytest.raises(errors.InvalidInput, match="not the path of a part"):
        place_of(PurePath(path))


LAYOUT = builders.layout(bytes=9)
SAVE = SaveNote(
    order="save-11111111-2222-3333-4444-555555555555-gpu-0",
    generation=1,
    fence_token="t",
    layout=LAYOUT,
    backend="posix-direct",
    shard_bytes=8192,
    chunk_bytes=4096,
)
D1, D2 = "a" * 32, "b" * 32
NOTED = (
    SAVE,
    ChunksNote(chunks=[("s0", 0, D1), ("s1", 3, D1)]),
    ChunksNote(chunks=[("s0", 1, D2)]),
)
LINES = [encode_json(note) + b"\n" for note in NOTED]
NOTES = b"".join(LINES)


def test_what_is_noted_is_read_again() -> None:
    assert read_notes(NOTES, SAVE)[:2] == ({"s0": {0: D1, 1: D2}, "s1": {3: D1}}, len(NOTES))


@pytest.mark.parametrize("cut", [1, 5, len(LINES[2]) - 1])
def test_a_torn_end_counts_for_nothing(cut: int) -> None:
    whole = len(LINES[0]) + len(LINES[1])
    assert read_notes(NOTES[: whole + cut], SAVE)[:2] == ({"s0": {0: D1}, "s1": {3: D1}}, whole)


@pytest.mark.parametrize("noise", [b"\0" * 40 + b"\n", b"\xff\n", b"{}\n", LINES[0]])
def test_nothing_after_a_line_that_is_no_note_counts(noise: bytes) -> None:
    data = LINES[0] + noise + LINES[1]
    assert read_notes(data, SAVE)[:2] == ({}, len(LINES[0]))


@each(
    "change",
    [
        {"fence_token": "u"},
        {"fence_token": None},
        {"generation": 2},
        {"backend": "posix-buffered"},
        {"chunk_bytes": 8192},
        {"layout": replace(LAYOUT, incarnation="j")},
        {"layout": replace(LAYOUT, generation=2)},
        {"layout": replace(LAYOUT, structure_hash="g")},
    ],
)
def test_notes_of_another_save_count_for_nothing(change: dict[str, object]) -> None:
    assert read_notes(NOTES, replace(SAVE, **change))[:2] == ({}, 0)


def test_no_notes_are_those_of_no_save() -> None:
    assert read_notes(b"", SAVE)[:2] == ({}, 0)
    assert read_notes(b"".join(LINES[1:]), SAVE)[:2] == ({}, 0)


def test_the_key_of_an_encrypted_save_and_what_its_chunks_have_is_noted_too() -> None:
    key = artifact.Encryption(key="k", data_key=b"wrapped")
    save = replace(SAVE, encrypted=True)
    notes = (
        save,
        KeyNote(encryption=key),
        ChunksNote(chunks=[("s0", 0, D1), ("s0", 1, D2)], tags=[b"1" * 28, b"2" * 28]),
    )
    data = b"".join(encode_json(note) + b"\n" for note in notes)
    found = read_notes(data, save)
    assert found == ({"s0": {0: D1, 1: D2}}, len(data), {"s0": {0: b"1" * 28, 1: b"2" * 28}}, key)
    assert read_notes(data, SAVE) == ({}, 0, {}, None), "it would go on with what is not encrypted"


PLANS = [FilePlan(f"shard-{n}", 1, 1, (), stripe) for n, stripe in enumerate(["", "a", "a"])]
FOLDERS = {"": 10, "a": 11}


class DiskFailed(Exception):
    """What the disk of one folder answers."""


def test_every_folder_gets_its_files_and_its_share_of_the_threads() -> None:
    calls = []
    sizes = []

    def move(folder: int, indices: Sequence[int], threads: int, advance: Advance) -> Moved:
        calls.append((folder, list(indices), threads))
        advance(folder)
        return Moved(files=[], bytes=len(indices), backend="some")

    assert in_folders(FOLDERS, PLANS, 4, move, sizes.append).bytes == 3
    assert sorted(calls) == [(10, [0], 2), (11, [1, 2], 2)]
    assert sorted(sizes) == [10, 11]


@pytest.mark.parametrize("is_wrapped", [False, True])
def test_an_error_in_one_folder_ends_the_others_at_their_next_chunk(is_wrapped: bool) -> None:
    failed = threading.Event()
    chunks = []

    def move(folder: int, indices: Sequence[int], threads: int, advance: Advance) -> Moved:
        if folder == FOLDERS["a"]:
            failed.set()
            raise DiskFailed("no more")
        assert failed.wait(30)
        try:
            # The other thread has yet to note its error when this one is first here.
            for number in range(3000):
                advance(number)
                time.sleep(0.01)
        except DiskFailed as error:
            if is_wrapped:
                raise RuntimeError("a backend with errors of its own") from error
            raise
        return Moved(files=[], bytes=1, backend="some")

    with pytest.raises(DiskFailed, match="no more"):
        in_folders(FOLDERS, PLANS, 2, move, chunks.append)
    assert len(chunks) < 3000


def test_an_error_of_the_progress_is_raised_as_it_is() -> None:
    def refuse(size: int) -> None:
        raise DiskFailed(str(size))

    def move(folder: int, indices: Sequence[int], threads: int, advance: Advance) -> Moved:
        advance(folder)
        raise AssertionError("the error was not raised")

    with pytest.raises(DiskFailed, match=r"10|11"):
        in_folders(FOLDERS, PLANS, 2, move, refuse)
