"""Which tensor stands in which segment, as values."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from snapback_client.frames import MetadataItem
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
    fields = {"key": item.key, "allocation": item.allocation, "offset": item.offset}
    changed = MetadataItem(**{**fields, "value": item.value, **change})  # type: ignore[arg-type]
    with pytest.raises(InvalidMessage):
        read_tensors(SIZES, [changed])


def test_an_empty_tensor_needs_a_segment_that_is_there_too() -> None:
    items = place_tensors(SEGMENTS, {"empty": view(0, (0,), (1,))})
    assert list(read_tensors(SIZES, items)) == ["empty"]
    with pytest.raises(InvalidMessage, match="segment-000000"):
        read_tensors({}, items)


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


def test_an_empty_tensor_stands_nowhere() -> None:
    assert holding(reaches(SEGMENTS), view(0x1000, (0,), (1,))) is None
    assert holding([], view(0x1000, (1,), (1,))) is None


RANGES = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 30)), max_size=6)


@given(st.lists(st.integers(1, 9), max_size=8), RANGES)
def test_a_segment_is_unused_exactly_when_no_byte_of_it_is_live(
    sizes: list[int], live: list[tuple[int, int]]
) -> None:
    segments = [
        Segment(str(number), sum(sizes[:number]), size) for number, size in enumerate(sizes)
    ]
    alive = {byte for at, size in live for byte in range(at, at + size)}
    expected = [
        segment
        for segment in segments
        if alive.isdisjoint(range(segment.address, segment.address + segment.size))
    ]
    assert unused(segments, live) == expected


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
    for one in packed:
        for other in packed:
            if one is not other:
                assert one.address + one.size <= other.address or (
                    other.address + other.size <= one.address
                )
