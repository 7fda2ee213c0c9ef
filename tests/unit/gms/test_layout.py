"""Layouts: what their structure hash covers, and what they refuse."""

from __future__ import annotations

import hashlib
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gms.domain.layout import PIECE, Allocation, Layout, structure_hash
from gms.domain.metadata import ENTRY_BYTES, weight
from snapback_client import frames
from snapshot_shared.errors import LayoutConflict, NotFound
from tests.unit.tables import each


def item(
    key: str, allocation: str = "a", *, offset: int = 0, value: bytes = b""
) -> frames.MetadataItem:
    return frames.MetadataItem(key=key, allocation=allocation, offset=offset, value=value)


def _layout(*rows: tuple[str, int, str]) -> Layout:
    layout = Layout()
    for handle, (name, size, tag) in enumerate(rows):
        layout.add(Allocation(name, size, frames.aligned(size, 4096), tag, handle))
    return layout


@each("count", [0, 1, 15, 16, PIECE - 1, PIECE, PIECE + 1, 2**16 - 1, 2**16])
def test_the_structure_hash_is_that_of_the_encoded_shape(count: int) -> None:
    rows = [(f"a{number}", number + 1, "tag"[number % 4 :]) for number in range(count)]
    items = [item(f"k{n:06}", f"a{n}", offset=n, value=b"%d" % n) for n in range(count)]
    body = [
        1,
        [[slot, *row] for slot, row in enumerate(rows)],
        [[each.key, each.allocation, each.offset, each.value] for each in items],
    ]
    assert structure_hash(rows, items) == hashlib.sha256(msgspec.msgpack.encode(body)).hexdigest()


def test_freeing_closes_the_gap_so_that_a_rebuilt_layout_has_the_same_hash() -> None:
    layout = _layout(("a", 1, ""), ("b", 2, ""), ("c", 3, ""))
    layout.remove(["b"])
    assert hash_of(layout) == hash_of(_layout(("a", 1, ""), ("c", 3, "")))
    assert [info.slot for info in layout.infos()] == [0, 1]


def test_freeing_something_unknown_frees_nothing() -> None:
    layout = _layout(("a", 10, ""))
    with pytest.raises(NotFound):
        layout.remove(["a", "x"])
    assert list(layout.allocations) == ["a"]


@pytest.mark.parametrize("ids", [["a"], ["x", "x"]])
def test_an_allocation_id_is_used_once(ids: list[str]) -> None:
    with pytest.raises(LayoutConflict):
        _layout(("a", 10, "")).check_new([frames.AllocationSpec(id=each, size=1) for each in ids])


def test_a_layout_has_a_limit_of_allocations() -> None:
    specs = [frames.AllocationSpec(id=f"a{i}", size=1) for i in range(frames.MAX_ALLOCATIONS + 1)]
    Layout().check_new(specs[1:])
    with pytest.raises(LayoutConflict) as caught:
        Layout().check_new(specs)
    assert caught.value.values["limit"] == frames.MAX_ALLOCATIONS


def test_metadata_must_point_into_its_allocation() -> None:
    layout = _layout(("a", 10, ""))
    layout.put([item("last", offset=9)])
    with pytest.raises(LayoutConflict):
        layout.put([item("past", offset=10)])


def test_an_entry_of_metadata_weighs_its_key_its_allocation_its_value_and_a_constant() -> None:
    name = "a" * 1000
    layout = _layout((name, 10, ""))

    def entry(count: int, size: int) -> frames.MetadataItem:
        return item(f"k{count:04}", name, value=bytes(size))

    each = len("k0000") + len(name) + ENTRY_BYTES
    full = [entry(number, 65536) for number in range(frames.MAX_METADATA_BYTES // (65536 + each))]
    left = frames.MAX_METADATA_BYTES - len(full) * (65536 + each) - each
    layout.put([*full, entry(9999, left)])
    with pytest.raises(LayoutConflict):
        layout.put([entry(9998, 0), entry(9999, left + 1)])
    assert len(layout.get(None)) == len(full) + 1, "what breaks the limit has changed something"


@given(st.integers(1, 2**50), st.sampled_from([1, 4096, 2 * 1024 * 1024]))
def test_alignment_rounds_up_to_the_next_granule(size: int, granularity: int) -> None:
    found = frames.aligned(size, granularity)
    assert found % granularity == 0
    assert 0 <= found - size < granularity


class Seen(str):
    """A key that counts how often it is looked at."""

    __slots__ = ()
    looks = 0

    def __lt__(self, other: str) -> bool:
        Seen.looks += 1
        return str.__lt__(self, other)

    def startswith(self, *prefix: Any) -> bool:
        Seen.looks += 1
        return str.startswith(self, *prefix)


def test_reading_some_metadata_costs_what_is_read_and_not_what_is_there() -> None:
    layout = _layout(("a", 1, ""))
    layout.put([item(Seen(f"{n % 100:02}-{n}")) for n in range(10_000)])
    Seen.looks = 0
    assert [found.key for found in layout.get(None, "42-1")] == sorted(
        f"42-{n}" for n in range(42, 10_000, 100) if str(n).startswith("1")
    )
    assert Seen.looks < 200


def test_one_more_entry_of_metadata_is_weighed_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    weighed: list[frames.MetadataItem] = []

    def counted(entry: frames.MetadataItem) -> int:
        weighed.append(entry)
        return weight(entry)

    monkeypatch.setattr("gms.domain.metadata.weight", counted)
    layout = _layout(("a", 1, ""))
    for number in range(1000):
        layout.put([item(f"k{number}")])
    assert len(weighed) == 1000


def test_metadata_is_what_was_put_last_about_what_is_left() -> None:
    layout = _layout(("a", 8, ""), ("b", 8, ""))
    kept, moved = item("k2", "b", value=b"1"), item("k3", "b", offset=1, value=b"22")
    layout.put([item("k1", value=b"1"), kept, item("k3", value=b"1")])
    layout.put([moved])
    layout.remove(["a"])
    assert layout.get(None) == [kept, moved]
    layout.remove(["b"])
    assert layout.get(None) == []
    # What is gone weighs nothing.
    layout.add(Allocation("c", 8, 8, "", 1))
    size = frames.MAX_METADATA_BYTES // 64
    entries = [item(f"{n:02}", "c", value=bytes(65_536 - 67)) for n in range(64)]
    assert sum(map(weight, entries)) == 64 * size == frames.MAX_METADATA_BYTES
    layout.put(entries)


def hash_of(layout: Layout) -> str:
    work = layout.hashing()
    while True:
        try:
            next(work)
        except StopIteration as end:
            return str(end.value)


def test_a_layout_has_the_hash_of_its_allocations_and_metadata() -> None:
    layout = _layout(("a", 1, ""), ("b", 2, "t"))
    items = [item("z"), item("y")]
    layout.put(items)
    assert hash_of(layout) == structure_hash([("a", 1, ""), ("b", 2, "t")], items)


def test_a_layout_counts_the_bytes_of_its_allocations() -> None:
    layout = _layout(("a", 1, ""), ("b", 2, ""), ("c", 3, ""))
    whole = layout.charged
    layout.remove(["b"])
    assert (layout.bytes, layout.charged) == (4, whole - whole // 3)
