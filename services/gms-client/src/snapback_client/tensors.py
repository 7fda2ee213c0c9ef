"""Tensors in segments: which tensor stands where, as values.

A library that allocates for itself takes few long pieces of memory and puts many tensors into each.
Segments whose addresses follow one another may hold a tensor together.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

import msgspec
from msgspec import Meta

from snapback_client.codec import decode_msgpack, encode_msgpack
from snapback_client.errors import InvalidInput, InvalidMessage
from snapback_client.frames import Bytes, MetadataItem

PREFIX = "tensor:"
"""What the keys of tensors in the metadata store begin with; the rest is the name."""

ALIGNMENT = 512
"""Where tensors may begin, in bytes from the beginning of a segment; PyTorch aligns as much."""

_MOST_PIECES = 4096
_WIDEST_ITEM = 16
_SEGMENT = "segment-"

Dimensions = Annotated[list[Bytes], Meta(max_length=32)]


@dataclass(frozen=True, slots=True)
class Segment:
    """A piece of memory of `size` bytes."""

    name: str
    address: int
    size: int


@dataclass(frozen=True, slots=True)
class View:
    """A tensor as its library has it. Strides are elements, `itemsize` bytes."""

    address: int
    shape: Sequence[int]
    strides: Sequence[int]
    dtype: str
    itemsize: int

    @property
    def size(self) -> int:
        """How many bytes there are from its first element to its last."""
        return extent(self.shape, self.strides, self.itemsize)


class TensorPlace(msgspec.Struct, frozen=True, kw_only=True):
    """Where a tensor stands: `offset` bytes into its segment. Strides are elements."""

    segment: str
    offset: Bytes
    shape: Dimensions
    strides: Dimensions
    dtype: Annotated[str, Meta(pattern=r"^[a-z][a-z0-9_]{0,31}\Z")]
    itemsize: Annotated[int, Meta(ge=1, le=64)]

    @property
    def size(self) -> int:
        """How many bytes there are from its first element to its last."""
        return extent(self.shape, self.strides, self.itemsize)


class _Stored(msgspec.Struct, frozen=True, kw_only=True):
    """What the metadata store keeps beside segment and offset."""

    shape: Dimensions
    strides: Dimensions
    dtype: Annotated[str, Meta(pattern=r"^[a-z][a-z0-9_]{0,31}\Z")]
    itemsize: Annotated[int, Meta(ge=1, le=64)]


def next_segment(names: Iterable[str]) -> str:
    """Name one more segment: the first has number 0, and no number is used twice in a row."""
    return next_segments(names, 1)[0]


def next_segments(names: Iterable[str], count: int) -> list[str]:
    """Name `count` more segments, in the order of their numbers."""
    taken = [int(name.removeprefix(_SEGMENT)) for name in names if name.startswith(_SEGMENT)]
    first = max(taken, default=-1) + 1
    return [f"{_SEGMENT}{number:06d}" for number in range(first, first + count)]


def pieces(size: int, granularity: int) -> list[int]:
    """Cut at least `size` bytes into equal pieces of whole granules, so that each can be freed."""
    granules = -(-size // granularity)
    each = -(-granules // _MOST_PIECES)
    return [each * granularity] * -(-granules // each)


def reaches(segments: Iterable[Segment]) -> list[Segment]:
    """Return segments sorted by address, each as long as memory goes on behind it."""
    found: list[Segment] = []
    for segment in sorted(segments, key=lambda each: each.address, reverse=True):
        size = segment.size
        if found and found[-1].address == segment.address + size:
            size += found[-1].size
        found.append(Segment(segment.name, segment.address, size))
    return found[::-1]


def holding(segments: Sequence[Segment], view: View) -> Segment | None:
    """Return the segment in which all of a tensor stands, of those that `reaches` returned.

    None for an empty tensor, too.
    """
    place = bisect.bisect_right(segments, view.address, key=lambda each: each.address) - 1
    if place < 0 or not view.size:
        return None
    segment = segments[place]
    ends = segment.address + segment.size
    return segment if view.address + view.size <= ends else None


def unused(segments: Iterable[Segment], live: Iterable[tuple[int, int]]) -> list[Segment]:
    """Return the segments that touch none of the `live` ranges: addresses and bytes."""
    ranges = sorted((at, at + size) for at, size in live if size)
    starts = [start for start, _ in ranges]
    # The furthest end of all ranges up to each, for one may lie within another.
    ends = list(itertools.accumulate((end for _, end in ranges), max))
    found = []
    for segment in segments:
        before = bisect.bisect_left(starts, segment.address + segment.size)
        if not before or ends[before - 1] <= segment.address:
            found.append(segment)
    return found


@dataclass(frozen=True, slots=True)
class Packed:
    """Bytes from `address` on that are copied to `offset`: tensors which overlap, by name."""

    address: int
    size: int
    offset: int
    names: tuple[str, ...]


def pack(views: Mapping[str, View]) -> tuple[list[Packed], int]:
    """Return how to lay tensors close together, and how many bytes that takes.

    Tensors that share memory share it afterwards. Empty ones are left out.
    """
    found: list[Packed] = []
    end = 0
    for start, stop, names in _overlapping(views):
        # Elements stay as aligned as they are.
        offset = -(-end // ALIGNMENT) * ALIGNMENT + start % _WIDEST_ITEM
        found.append(Packed(start, stop - start, offset, names))
        end = offset + stop - start
    return found, end


def _overlapping(views: Mapping[str, View]) -> list[tuple[int, int, tuple[str, ...]]]:
    found: list[tuple[int, int, tuple[str, ...]]] = []
    for name, view in sorted(views.items(), key=lambda each: each[1].address):
        start, stop = view.address, view.address + view.size
        if start == stop:
            continue
        if found and start < found[-1][1]:
            first, last, names = found[-1]
            found[-1] = (first, max(last, stop), (*names, name))
        else:
            found.append((start, stop, (name,)))
    return found


def extent(shape: Sequence[int], strides: Sequence[int], itemsize: int) -> int:
    """Return the number of bytes from the first element to the last."""
    if 0 in shape:
        return 0
    pairs = zip(shape, strides, strict=True)
    return (1 + sum((length - 1) * stride for length, stride in pairs)) * itemsize


def place_tensors(
    segments: Iterable[Segment], tensors: Mapping[str, View], *, prefix: str = PREFIX
) -> list[MetadataItem]:
    """Return metadata that places tensors in segments. InvalidInput names those outside."""
    known = reaches(segments)
    items: list[MetadataItem] = []
    outside: list[str] = []
    for name, view in tensors.items():
        segment = holding(known, view)
        if segment is None and known and not view.size:
            # Nothing of it has to stand anywhere.
            segment = known[0]
        if segment is None:
            outside.append(name)
            continue
        stored = _Stored(
            shape=list(view.shape),
            strides=list(view.strides),
            dtype=view.dtype,
            itemsize=view.itemsize,
        )
        items.append(
            MetadataItem(
                key=prefix + name,
                allocation=segment.name,
                offset=view.address - segment.address if view.size else 0,
                value=encode_msgpack(stored),
            )
        )
    if outside:
        raise InvalidInput(
            f"{len(outside)} tensors do not stand in the pool: {', '.join(outside[:8])}",
            next_step="allocate them in the pool, or leave them out of the commit",
            found=outside,
        )
    return items


def read_tensors(
    sizes: Mapping[str, int], items: Iterable[MetadataItem], *, prefix: str = PREFIX
) -> dict[str, TensorPlace]:
    """Read where tensors stand, by name. InvalidMessage.

    `sizes` are the bytes that follow one another from the beginning of each segment on.
    """
    places: dict[str, TensorPlace] = {}
    for item in items:
        stored = decode_msgpack(item.value, _Stored)
        name = item.key.removeprefix(prefix)
        if len(stored.shape) != len(stored.strides):
            raise InvalidMessage(f"tensor {name!r} has shape {stored.shape} and other strides")
        place = TensorPlace(
            segment=item.allocation,
            offset=item.offset,
            shape=stored.shape,
            strides=stored.strides,
            dtype=stored.dtype,
            itemsize=stored.itemsize,
        )
        size = sizes.get(place.segment)
        if size is None or place.offset % place.itemsize or place.offset + place.size > size:
            raise InvalidMessage(f"tensor {name!r} does not stand in {place.segment!r}")
        places[name] = place
    return places
