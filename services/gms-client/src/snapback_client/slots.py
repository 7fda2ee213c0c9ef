"""Where the arrays of a pool stand, as values: in the metadata store and in a saved state.

All of it may come from another process, so types, sizes and places are checked when it is read.
"""

from __future__ import annotations

import importlib
import math
import operator
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from msgspec import Meta

from snapback_client.codec import decode_json, decode_msgpack, encode_json, encode_msgpack
from snapback_client.errors import (
    InvalidMessage,
    InvalidValue,
    NoDeviceMemory,
    UnsupportedVersion,
)
from snapback_client.frames import (
    ALLOCATION_PATTERN,
    MAX_ALLOCATIONS,
    AllocationId,
    AllocationInfo,
    AllocationSize,
    Bytes,
    MemoryDomain,
    MetadataItem,
    ShortText,
)
from snapback_client.mappings import AddressRange
from snapback_client.reservation import DOMAIN_BYTES

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import DTypeLike

STATE_VERSION = 1
MAX_STATE_BYTES = 64 * 1024 * 1024
MAX_ORDINAL = 63
_PAGE = 4096
_LOWEST, _HIGHEST = 1 << 30, 1 << 57
"""Where a range may stand: above what programs load, in the widest address space that there is."""

RAW = {
    "bfloat16": "uint16",
    "float8_e3m4": "uint8",
    "float8_e4m3": "uint8",
    "float8_e4m3b11fnuz": "uint8",
    "float8_e4m3fn": "uint8",
    "float8_e4m3fnuz": "uint8",
    "float8_e5m2": "uint8",
    "float8_e5m2fnuz": "uint8",
    "float8_e8m0fnu": "uint8",
}
"""Types that numpy has with the package ml_dtypes alone, and integers of their width.

An array of these integers would take floats, and cast them, so there is no array without the
package.
"""

MAX_DIMENSIONS = 32
Dimensions = Annotated[list[Bytes], Meta(max_length=MAX_DIMENSIONS)]


class Slot(msgspec.Struct, frozen=True, kw_only=True):
    """One array. `at` is its offset in the pool's range, `aligned` the bytes mapped there."""

    name: AllocationId
    shape: Dimensions
    dtype: ShortText
    at: Bytes
    size: AllocationSize
    aligned: AllocationSize

    def array(self, at: AddressRange) -> Any:
        """Return the array over its place."""
        return at.array(self.at, self.shape, dtype_of(self.dtype))


class _Descriptor(msgspec.Struct, frozen=True, kw_only=True):
    """What the metadata store keeps of an array."""

    shape: Dimensions
    dtype: ShortText
    at: Bytes


class PoolState(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="snapback.v1.gms_pool"
):
    """What another process needs to have the same arrays at the same addresses."""

    version: int = STATE_VERSION
    domain: MemoryDomain
    ordinal: Annotated[int, Meta(ge=0, le=MAX_ORDINAL)]
    address: Annotated[int, Meta(ge=_LOWEST, lt=_HIGHEST)]
    reserved: Annotated[int, Meta(ge=_PAGE, le=DOMAIN_BYTES)]
    layout_id: ShortText
    structure_hash: ShortText
    slots: Annotated[list[Slot], Meta(max_length=MAX_ALLOCATIONS)]
    device_kind: ShortText = "simulated"


def new_slots(
    arrays: Mapping[str, tuple[int | Sequence[int], DTypeLike]], *, start: int, granularity: int
) -> tuple[list[Slot], int]:
    """Return new arrays, one after another from `start`, and their end.

    InvalidInput, NoDeviceMemory.
    """
    slots: list[Slot] = []
    at = start
    for name, (shape, dtype) in arrays.items():
        if not isinstance(name, str):
            raise InvalidValue(
                f"the name of an array must be a str, {name!r} is of type {type(name).__name__}",
                next_step="give the name first, then the shape and the dtype",
                found=repr(name)[:80],
            )
        if re.fullmatch(ALLOCATION_PATTERN, name) is None:
            raise InvalidValue(
                f"the name of an array {name[:80]!r} must match {ALLOCATION_PATTERN}",
                next_step="use letters, digits and _ . : / + @ -, at most 128, and begin with one "
                "of the first three",
                name=name[:80],
            )
        kind, written = _written(dtype)
        dimensions = _dimensions(name, shape)
        size = max(1, math.prod(dimensions) * kind.itemsize)
        if size > DOMAIN_BYTES:
            raise NoDeviceMemory(
                f"with array {name!r} of {size} bytes the arrays of this pool would take more than "
                f"the {DOMAIN_BYTES} bytes that a pool has addresses for",
                next_step="use a smaller shape",
                needed=size,
                capacity=DOMAIN_BYTES,
            )
        aligned = -(-size // granularity) * granularity
        slots.append(
            Slot(name=name, shape=dimensions, dtype=written, at=at, size=size, aligned=aligned)
        )
        at += aligned
    return slots, at


def _dimensions(name: str, shape: int | Sequence[int]) -> list[int]:
    """Return a shape as a list of ints. InvalidValue."""
    try:
        found = [
            operator.index(each) for each in (shape if isinstance(shape, Iterable) else [shape])
        ]
    except TypeError:
        raise InvalidValue(
            f"the shape of array {name!r} is {shape!r}, which is no int and no sequence of ints",
            next_step="use whole numbers from 0 on, at most 32 of them",
            name=name,
            shape=repr(shape)[:80],
        ) from None
    # An empty array takes no bytes, whatever its other dimensions are.
    fits = min(found, default=0) >= 0 and (all(found) or max(found) <= DOMAIN_BYTES)
    if not fits or len(found) > MAX_DIMENSIONS:
        raise InvalidValue(
            f"the shape of array {name!r} has a dimension that is negative or too large, or more "
            f"than {MAX_DIMENSIONS}: {found[: MAX_DIMENSIONS + 1]}",
            next_step="use whole numbers from 0 on, at most 32 of them",
            name=name,
        )
    return found


def first_place(slots: Iterable[Slot], size: int) -> int:
    """Return the lowest offset from which `size` bytes stand clear of the arrays."""
    at = 0
    for slot in sorted(slots, key=lambda each: each.at):
        if slot.at - at >= size:
            break
        at = slot.at + slot.aligned
    return at


def metadata_of(slots: Iterable[Slot]) -> list[MetadataItem]:
    """Describe arrays for the metadata store."""
    return [
        MetadataItem(
            key=slot.name,
            allocation=slot.name,
            offset=0,
            value=encode_msgpack(_Descriptor(shape=slot.shape, dtype=slot.dtype, at=slot.at)),
        )
        for slot in slots
    ]


def slots_of(allocations: Sequence[AllocationInfo], metadata: Sequence[MetadataItem]) -> list[Slot]:
    """Read the arrays of a committed layout; what is no array of ours is left out."""
    infos = {info.id: info for info in allocations}
    slots: list[Slot] = []
    for item in metadata:
        info = infos.get(item.allocation)
        if info is None or item.key != item.allocation:
            continue
        found = decode_msgpack(item.value, _Descriptor)
        slots.append(
            Slot(
                name=info.id,
                shape=found.shape,
                dtype=found.dtype,
                at=found.at,
                size=info.size,
                aligned=info.aligned,
            )
        )
    slots.sort(key=lambda slot: infos[slot.name].slot)
    _check(slots, DOMAIN_BYTES)
    return slots


def write_state(state: PoolState) -> bytes:
    """Encode a pool's state as JSON."""
    return encode_json(state)


def read_state(data: bytes) -> PoolState:
    """Decode and check a pool's state. InvalidMessage, UnsupportedVersion."""
    state = decode_json(data, PoolState, limit=MAX_STATE_BYTES)
    if state.version != STATE_VERSION:
        raise UnsupportedVersion(
            f"version {state.version} of a pool's state is not known here, {STATE_VERSION} is",
            version=state.version,
            supported=STATE_VERSION,
        )
    if state.address % _PAGE or state.reserved % _PAGE:
        raise InvalidMessage("a pool's addresses must be whole pages", address=state.address)
    _check(state.slots, state.reserved)
    return state


def _check(slots: Sequence[Slot], reserved: int) -> None:
    end = 0
    for slot in sorted(slots, key=lambda each: each.at):
        if slot.at < end or slot.at % _PAGE or slot.aligned % _PAGE or slot.size > slot.aligned:
            raise InvalidMessage(f"array {slot.name!r} overlaps another or is misplaced")
        end = slot.at + slot.aligned
        try:
            needed = math.prod(slot.shape) * _plain(_raw_dtype(slot.dtype)).itemsize
        except (TypeError, InvalidValue) as error:
            raise InvalidMessage(f"array {slot.name!r} has no plain dtype: {error}") from error
        if needed > slot.size:
            raise InvalidMessage(f"array {slot.name!r} is larger than its memory")
    if end > reserved:
        raise InvalidMessage(f"arrays end at {end}, only {reserved} bytes are reserved")
    if len({slot.name for slot in slots}) != len(slots):
        raise InvalidMessage("two arrays have one name")


def _plain(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Refuse types that hold Python objects or fields: their bytes mean nothing elsewhere."""
    if dtype.hasobject or dtype.fields is not None or dtype.itemsize == 0:
        raise InvalidValue(
            f"dtype {dtype} cannot live in shared memory",
            next_step="use numbers, or raw bytes as uint8",
            dtype=str(dtype),
        )
    return dtype


def dtype_of(name: str) -> np.dtype[Any]:
    """Return the dtype that is written as `name`. TypeError for a name that is none.

    A type in RAW is that of the package ml_dtypes. InvalidValue if it is not installed.
    """
    # Not above: every service imports this package for its errors, and numpy takes long.
    import numpy as np  # noqa: PLC0415

    if name not in RAW:
        return np.dtype(name)
    try:
        kind: Any = getattr(importlib.import_module("ml_dtypes"), name)
    except (ImportError, AttributeError):
        raise InvalidValue(
            f"numpy has no {name} without a package ml_dtypes that knows it",
            next_step=f"pip install --upgrade ml_dtypes; or keep the bits as {RAW[name]}",
            dtype=name,
        ) from None
    found: np.dtype[Any] = np.dtype(kind)
    return found


def _raw_dtype(name: str) -> np.dtype[Any]:
    """Return a dtype of the same width, which needs no package. TypeError."""
    import numpy as np  # noqa: PLC0415 - as above

    return np.dtype(RAW.get(name, name))


def _written(dtype: DTypeLike) -> tuple[np.dtype[Any], str]:
    """Return a dtype, and how it is written. InvalidValue where it has no plain bytes."""
    import numpy as np  # noqa: PLC0415 - as above

    try:
        found = dtype_of(dtype) if isinstance(dtype, str) else np.dtype(dtype)
    except TypeError as error:
        raise InvalidValue(
            f"dtype {dtype!r} is not known: {error}",
            next_step="use one of numpy, or bfloat16 or a float8 of ml_dtypes",
            dtype=str(dtype),
        ) from error
    # Those of ml_dtypes are written as bytes of no type by numpy.
    return _plain(found), found.name if found.name in RAW else found.str
