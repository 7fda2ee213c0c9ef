"""Tensors in segments: which tensor stands where, as values.

A library that allocates for itself takes few long pieces of memory and puts many tensors into each.
"""

from __future__ import annotations

import bisect
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
    taken = [int(name.removeprefix(_SEGMENT)) for name in names if name.startswith(_SEGMENT)]
    return f"{_SEGMENT}{max(taken, default=-1) + 1:06d}"


def extent(shape: Sequence[int], strides: Sequence[int], itemsize: int) -> int:
    """Return the number of bytes from the first element to the last."""
    if 0 in shape:
        return 0
    pairs = zip(shape, strides, strict=True)
    return (1 + sum((length - 1) * stride for length, stride in pairs)) * itemsize


def place_tensors(segments: Iterable[Segment], tensors: Mapping[str, View]) -> list[MetadataItem]:
    """Return metadata that places tensors in segments. InvalidInput names those outside."""
    known = sorted(segments, key=lambda segment: segment.address)
    starts = [segment.address for segment in known]
    items: list[MetadataItem] = []
    outside: list[str] = []
    for name, view in tensors.items():
        size = extent(view.shape, view.strides, view.itemsize)
        place = bisect.bisect_right(starts, view.address) - 1
        segment = known[place] if place >= 0 else None
        if segment is None or view.address + size > segment.address + segment.size:
            if size:
                outside.append(name)
                continue
            # Nothing of it has to stand anywhere.
            segment = known[0] if known else None
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
                key=PREFIX + name,
                allocation=segment.name,
                offset=view.address - segment.address if size else 0,
                value=encode_msgpack(stored),
            )
        )
    if outside:
        raise InvalidInput(
            f"{len(outside)} tensors do not stand in the pool: {', '.join(outside[:8])}",
            next_step="allocate them inside `allocating()`, or leave them out of the commit",
            found=outside,
        )
    return items


def read_tensors(sizes: Mapping[str, int], items: Iterable[MetadataItem]) -> dict[str, TensorPlace]:
    """Read where tensors stand, by name, in segments of these sizes. InvalidMessage."""
    places: dict[str, TensorPlace] = {}
    for item in items:
        stored = decode_msgpack(item.value, _Stored)
        name = item.key.removeprefix(PREFIX)
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
