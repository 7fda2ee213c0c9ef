"""What the client computes: which tensor stands where, and the numbers of devices."""

from __future__ import annotations

import contextlib
import itertools
import mmap
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from snapback_client import dlpack
from snapback_client.devices import count_of, names_of, ordinal_of
from snapback_client.errors import LayoutError
from snapback_client.mappings import AddressTaken, Mappings, neighbours
from snapback_client.reservation import HUGE_PAGE, Reservation
from snapback_client.tensors import (
    ALIGNMENT,
    PREFIX,
    Segment,
    View,
    extent,
    holding,
    next_segment,
    next_segments,
    pack,
    pieces,
    place_tensors,
    reaches,
    read_tensors,
    unused,
)
from snapback_client.torch import tensor_of
from snapback_client.torch_devices import live_blocks
from snapshot_shared.errors import InvalidInput, InvalidMessage
from tests.unit.tables import each

SEGMENTS = [Segment("segment-000001", 0x9000, 0x1000), Segment("segment-000000", 0x1000, 0x2000)]
SIZES = {segment.name: segment.size for segment in SEGMENTS}


def view(address: int, shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int = 4) -> View:
    return View(address, shape, strides, "float32", itemsize)


def test_segments_are_numbered_in_the_order_in_which_they_are_taken() -> None:
    assert next_segment([]) == "segment-000000"
    assert next_segment(["w", "segment-000000", "segment-000007"]) == "segment-000008"
    assert next_segments(["segment-000001"], 2) == ["segment-000002", "segment-000003"]


@each(
    ("shape", "strides", "expected"),
    [
        ((), (), 4),
        ((3, 5), (5, 1), 60),
        ((3, 5), (1, 3), 60),
        ((2, 2), (100, 1), 408),
        ((0, 9), (9, 1), 0),
        ((9, 0), (9, 1), 0),
        ((0, 2), (100, 1), 0),
    ],
)
def test_the_extent_of_a_tensor_reaches_from_its_first_to_its_last_element(
    shape: tuple[int, ...], strides: tuple[int, ...], expected: int
) -> None:
    assert extent(shape, strides, 4) == expected


def test_tensors_are_found_in_their_segments_and_read_again() -> None:
    tensors = {
        "embedding": view(0x1000, (32, 64), (64, 1)),
        "embedding.T": view(0x1000, (64, 32), (1, 64)),
        "bias": view(0x9000 + 0xFFC, (), ()),
        "empty": view(0, (0, 4), (4, 1)),
    }
    places = read_tensors(SIZES, place_tensors(SEGMENTS, tensors))
    assert {name: (p.segment, p.offset) for name, p in places.items()} == {
        "embedding": ("segment-000000", 0),
        "embedding.T": ("segment-000000", 0),
        "bias": ("segment-000001", 0xFFC),
        "empty": ("segment-000000", 0),
    }
    assert places["embedding.T"].strides == [1, 64]
    assert places["bias"].dtype == "float32"


def test_every_tensor_that_stands_outside_is_named() -> None:
    tensors = {
        "good": view(0x1000, (4,), (1,)),
        "before": view(0xFF0, (4,), (1,)),
        "across": view(0x1000 + 0x1FF8, (4,), (1,)),
        "after": view(0xA000, (1,), (1,)),
    }
    with pytest.raises(InvalidInput) as caught:
        place_tensors(SEGMENTS, tensors)
    assert caught.value.values["found"] == ["before", "across", "after"]
    with pytest.raises(InvalidInput):
        place_tensors([], {"empty": view(0, (0,), (1,))})


@pytest.mark.parametrize(
    "change",
    [
        {"allocation": "segment-000009"},
        {"offset": 0x1FFC},
        {"offset": 2},
        {"value": b"\x80"},
        {"value": b"garbage"},
    ],
)
def test_what_another_process_wrote_is_not_believed(change: dict[str, object]) -> None:
    (item,) = place_tensors(SEGMENTS, {"w": view(0x1000, (2, 2), (2, 1))})
    with pytest.raises(InvalidMessage):
        read_tensors(SIZES, [replace(item, **change)])


def test_an_empty_tensor_needs_a_segment_that_is_there_too() -> None:
    items = place_tensors(SEGMENTS, {"empty": view(0, (0,), (1,))})
    assert list(read_tensors(SIZES, items)) == ["empty"]
    with pytest.raises(InvalidMessage, match="segment-000000"):
        read_tensors({}, items)
    assert holding(reaches(SEGMENTS), view(0x1000, (0,), (1,))) is None
    assert holding([], view(0x1000, (1,), (1,))) is None


@given(
    st.lists(st.tuples(st.integers(0, 0x2F00), st.lists(st.integers(0, 6), max_size=3)), max_size=8)
)
def test_a_tensor_is_placed_exactly_when_all_of_it_stands_in_one_segment(
    found: list[tuple[int, list[int]]],
) -> None:
    for start, shape in found:
        strides = [1] * len(shape)
        one = view(0x1000 + 4 * start, tuple(shape), tuple(strides))
        size = extent(shape, strides, 4)
        stands = not size or any(
            s.address <= one.address and one.address + size <= s.address + s.size for s in SEGMENTS
        )
        if stands:
            (item,) = place_tensors(SEGMENTS, {"t": one})
            place = read_tensors(SIZES, [item])["t"]
            assert item.key == PREFIX + "t"
            assert (place.shape, place.strides, place.size) == (shape, strides, size)
        else:
            with pytest.raises(InvalidInput):
                place_tensors(SEGMENTS, {"t": one})


@each(
    ("size", "expected"),
    [
        (1, [10]),
        (10, [10]),
        (11, [10, 10]),
        (40_960, [10] * 4096),
        (40_961, [20] * 2049),
        (10_000_000, [2450] * 4082),
    ],
)
def test_a_reserve_is_cut_into_equal_pieces_of_whole_granules_of_which_there_are_not_too_many(
    size: int, expected: list[int]
) -> None:
    assert pieces(size, 10) == expected


def test_segments_that_follow_one_another_hold_a_tensor_together() -> None:
    run = [Segment("b", 0x2000, 0x1000), Segment("a", 0x1000, 0x1000), Segment("c", 0x9000, 0x100)]
    assert reaches(run) == [
        Segment("a", 0x1000, 0x2000),
        Segment("b", 0x2000, 0x1000),
        Segment("c", 0x9000, 0x100),
    ]
    (item,) = place_tensors(run, {"w": view(0x1800, (0x300,), (1,))})
    assert (item.allocation, item.offset) == ("a", 0x800)
    behind = {segment.name: segment.size for segment in reaches(run)}
    assert read_tensors(behind, [item])["w"].segment == "a"
    with pytest.raises(InvalidMessage, match="'a'"):
        read_tensors({**behind, "a": 0x1000}, [item])
    with pytest.raises(InvalidInput):
        place_tensors([run[1], run[2]], {"w": view(0x1800, (0x300,), (1,))})


RANGES = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 30)), max_size=6)


@given(st.lists(st.integers(1, 9), max_size=8), RANGES)
def test_a_segment_is_unused_exactly_when_no_byte_of_it_is_live(
    sizes: list[int], live: list[tuple[int, int]]
) -> None:
    segments = [
        Segment(str(number), sum(sizes[:number]), size) for number, size in enumerate(sizes)
    ]
    alive = {byte for at, size in live for byte in range(at, at + size)}
    assert unused(segments, live) == [
        segment
        for segment in segments
        if alive.isdisjoint(range(segment.address, segment.address + segment.size))
    ]


@given(st.lists(st.tuples(st.integers(0, 3000), st.integers(0, 700)), max_size=8))
def test_tensors_are_packed_apart_unless_they_share_memory(found: list[tuple[int, int]]) -> None:
    views = {
        str(number): view(4 * start, (length,), (1,))
        for number, (start, length) in enumerate(found)
    }
    packed, size = pack(views)
    names = [name for each in packed for name in each.names]
    assert sorted(names) == sorted(name for name in views if views[name].size)
    ends = 0
    for part in packed:
        assert ends <= part.offset
        assert part.offset % ALIGNMENT == part.address % 16
        ends = part.offset + part.size
        covered = set()
        for name in part.names:
            inside = views[name].address - part.address
            assert 0 <= inside <= inside + views[name].size <= part.size
            covered |= set(range(inside, inside + views[name].size))
        assert len(covered) == part.size, "nothing between them is copied"
    assert size == ends
    for one, other in itertools.combinations(packed, 2):
        assert one.address + one.size <= other.address or (
            other.address + other.size <= one.address
        )


PAGE = mmap.PAGESIZE


@pytest.mark.parametrize("first", [0, 3 * PAGE])
def test_places_may_be_used_again_in_any_order(first: int) -> None:
    mappings = Mappings(16 * PAGE)
    for at, pages in ((first, 2), (6 * PAGE, 1), (9 * PAGE, 3)):
        mappings.add(at, pages * PAGE)
    assert [at for at, _ in mappings.within(0, 16 * PAGE)] == [first, 6 * PAGE, 9 * PAGE]
    mappings.remove(6 * PAGE)
    mappings.add(5 * PAGE, 4 * PAGE)
    with pytest.raises(LayoutError):
        mappings.within(6 * PAGE, PAGE)
    assert mappings.within(12 * PAGE, 4 * PAGE) == []


@pytest.mark.parametrize("pages", [1, 512, 513])
def test_a_reservation_for_a_simulated_device_begins_at_a_huge_page(pages: int) -> None:
    size = pages * PAGE
    with contextlib.ExitStack() as stack:
        found = [Reservation(size) for _ in range(3)]
        for each in found:
            stack.callback(each.release)
        assert [each.address % HUGE_PAGE for each in found] == [0, 0, 0]
        # The addresses are taken.
        for each in found:
            with pytest.raises(AddressTaken):
                Reservation(PAGE, address=each.address + size - PAGE)


@pytest.mark.parametrize(
    ("places", "joined"),
    [
        ([], []),
        ([(4, 4)], [(4, 4)]),
        ([(8, 2), (0, 4), (4, 4)], [(0, 10)]),
        ([(0, 4), (5, 1), (6, 2), (9, 1)], [(0, 4), (5, 3), (9, 1)]),
    ],
)
def test_places_that_touch_are_joined(
    places: list[tuple[int, int]], joined: list[tuple[int, int]]
) -> None:
    assert neighbours(places) == joined


@each(
    ("cuda", "visible", "expected"),
    [
        (["GPU-aaaa", "GPU-bbbb"], [], 1),
        ([], ["GPU-aaaa", "GPU-bbbb"], 1),
        (["GPU-bbbb"], ["GPU-aaaa", "GPU-bbbb"], 0),
        ([], ["2", "3"], 1),
        ([], ["GPU-a", "GPU-b"], 1),
        ([], ["GPU-aaaa"], 3),
        ([], [], 3),
    ],
)
def test_a_device_has_the_number_of_its_name_here_or_else_its_index(
    cuda: list[str], visible: list[str], expected: int
) -> None:
    assert ordinal_of("GPU-bbbb", 3, cuda=cuda, visible=visible) == expected


@pytest.mark.parametrize("visible", [["2", "3"], ["GPU-a", "GPU-b"]])
def test_the_number_of_a_device_stands_for_it_again(visible: list[str]) -> None:
    number = ordinal_of("GPU-bbbb", 3, cuda=[], visible=visible)
    assert names_of(number, cuda=[], visible=visible) == [visible[1]]


@pytest.mark.parametrize(
    ("cuda", "visible", "expected"),
    [
        ([], [], 1),
        ([], ["GPU-a", "GPU-b"], 2),
        (["GPU-a", "GPU-b", "GPU-c"], [], 3),
        (["GPU-b"], ["GPU-a", "GPU-b"], 1),
        (["GPU-real", "GPU-other"], ["GPU-simulated"], 1),
    ],
)
def test_a_process_has_as_many_devices_as_both_cuda_and_its_environment_name(
    cuda: list[str], visible: list[str], expected: int
) -> None:
    assert count_of(cuda=cuda, visible=visible) == expected


def test_blocks_stand_one_behind_the_other_and_all_but_inactive_ones_are_in_use() -> None:
    snapshot = [
        {
            "address": 0x1000,
            "total_size": 0x400,
            "blocks": [
                {"size": 0x100, "state": "active_allocated"},
                {"size": 0x200, "state": "inactive"},
                {"size": 0x100, "state": "active_pending_free"},
            ],
        },
        {"address": 0x9000, "total_size": 0x100, "blocks": [{"size": 0x100, "state": "inactive"}]},
        {"address": 0x5000, "total_size": 0, "blocks": []},
    ]
    assert live_blocks(snapshot) == [(0x1000, 0x100), (0x1300, 0x100)]
    assert live_blocks([]) == []


WHOLE = np.arange(12, dtype="i8").reshape(3, 4)


@pytest.mark.parametrize(
    "array",
    [WHOLE[:, ::2], WHOLE.T, WHOLE[:, :2], WHOLE[::-1], WHOLE.astype(">i8")],
)
def test_an_array_whose_bytes_alone_do_not_say_its_values_makes_no_tensor(array: Any) -> None:
    with pytest.raises(InvalidInput, match="of shape") as refused:
        tensor_of(array)
    assert refused.value.next_step == "take the array of the pool itself, and slice the tensor"


class Shared:
    """What a library is given: the memory of a numpy array, by a capsule of ours."""

    def __init__(self, array: Any, *, writable: bool = True) -> None:
        self._array, self._writable = array, writable

    def __dlpack_device__(self) -> tuple[int, int]:
        return dlpack.CPU, 0

    def __dlpack__(self, *, max_version: tuple[int, int] | None = None, **_: Any) -> Any:
        return dlpack.to_dlpack(
            self._array.ctypes.data,
            self._array.shape,
            self._array.dtype,
            device=self.__dlpack_device__(),
            writable=self._writable,
            max_version=max_version,
        )


class Older(Shared):
    """The same for a library that knows no versions."""

    def __dlpack__(self, **_: Any) -> Any:
        return super().__dlpack__()


@each("kind", [Shared, Older])
@each("dtype", ["i1", "u2", "i8", "f2", "f4", "f8", "c8", "?"])
@each("shape", [(), (3,), (2, 3, 4), (0, 5)])
def test_a_library_has_the_same_elements_in_the_same_memory(
    kind: type[Shared], dtype: str, shape: tuple[int, ...]
) -> None:
    array = np.arange(int(np.prod(shape)), dtype="i8").reshape(shape).astype(dtype)
    found = np.from_dlpack(kind(array))
    assert (found.shape, found.dtype) == (array.shape, array.dtype)
    assert (found == array).all()
    if array.size:
        array.reshape(-1)[-1] = 77
        assert found.reshape(-1)[-1] == array.reshape(-1)[-1]
        assert np.shares_memory(found, array) or found.ctypes.data == array.ctypes.data


def test_what_is_read_only_stays_so() -> None:
    array = np.arange(4)
    assert not np.from_dlpack(Shared(array, writable=False)).flags.writeable
    assert np.from_dlpack(Shared(array)).flags.writeable
    with pytest.raises(BufferError, match="read-only"):
        np.from_dlpack(Older(array, writable=False))


@pytest.mark.parametrize("dtype", [">f4", "M8[s]", "S3", "V2"])
def test_a_type_that_dlpack_does_not_have_is_refused_by_its_name(dtype: str) -> None:
    with pytest.raises(BufferError, match="no type"):
        Shared(np.zeros(2, dtype)).__dlpack__()


def test_a_capsule_that_no_library_takes_is_freed_with_it() -> None:
    array = np.arange(1)
    before = memory_kib()
    for _ in range(10):
        # Shape and strides of each take 4.8 MB.
        dlpack.to_dlpack(
            array.ctypes.data, [1] * 300_000, array.dtype, device=(dlpack.CPU, 0), writable=True
        )
    assert memory_kib() - before < 20_000


def memory_kib() -> int:
    (line,) = [
        line for line in Path("/proc/self/status").read_text().splitlines() if "VmRSS" in line
    ]
    return int(line.split()[1])
