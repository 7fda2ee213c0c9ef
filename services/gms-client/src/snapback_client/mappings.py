"""A reserved range of addresses into which memory is mapped, and what is mapped where in it."""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from snapback_client.errors import LayoutError


class AddressTaken(LayoutError):
    """Something else in this process stands where memory has to be mapped; `values`: address."""

    default_next_step = (
        "close the pool that uses this range, or restore in a process that has none open"
    )


class Mappings:
    """Where something is mapped in a range, by the rules of `cuMemMap` and `cuMemUnmap`.

    A mapping stands inside the range, never over another, and goes as a whole.
    """

    def __init__(self, size: int) -> None:
        """Start with an empty range of `size` bytes."""
        self.size = size
        self._starts: list[int] = []
        self._sizes: dict[int, int] = {}

    def add(self, offset: int, size: int) -> None:
        """Add a mapping. LayoutError when it must not stand there."""
        if size <= 0 or offset < 0 or offset + size > self.size:
            raise LayoutError(
                f"{size} bytes at {offset} are outside the reserved range", size=self.size
            )
        place = bisect.bisect_left(self._starts, offset + size)
        if place:
            before = self._starts[place - 1]
            if before + self._sizes[before] > offset:
                raise LayoutError(
                    f"{size} bytes at {offset} are mapped already", offset=offset, size=size
                )
        self._starts.insert(place, offset)
        self._sizes[offset] = size

    def within(self, offset: int, size: int) -> list[tuple[int, int]]:
        """Return offset and size of each mapping in a part. LayoutError when it cuts one."""
        low = bisect.bisect_left(self._starts, offset)
        high = bisect.bisect_left(self._starts, offset + size)
        found = [(at, self._sizes[at]) for at in self._starts[low:high]]
        before = self._starts[low - 1] if low else None
        cuts = before is not None and before + self._sizes[before] > offset
        if cuts or (found and sum(found[-1]) > offset + size):
            raise LayoutError(
                f"{size} bytes at {offset} are a part of a mapping, which goes as a whole",
                offset=offset,
                size=size,
            )
        return found

    def remove(self, offset: int) -> None:
        """Remove a mapping."""
        del self._starts[bisect.bisect_left(self._starts, offset)]
        del self._sizes[offset]


def neighbours(places: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Join places (offset, size) that stand one after another, none over another."""
    joined: list[tuple[int, int]] = []
    for offset, size in sorted(places):
        if joined and sum(joined[-1]) == offset:
            joined[-1] = (joined[-1][0], joined[-1][1] + size)
        else:
            joined.append((offset, size))
    return joined


class AddressRange(Protocol):
    """A reserved range of addresses, parts of which are mapped.

    `kind` is the kind of device whose memory it maps; offsets and sizes are bytes, whole granules
    where something is mapped.
    """

    kind: str
    address: int
    size: int

    def map(self, fd: int, offset: int, size: int, *, writable: bool) -> int:
        """Map the whole of a descriptor at `offset` of the range and return the address.

        LayoutError outside the range, and where something is mapped.
        """
        ...

    def map_all(self, places: Iterable[tuple[int, int, int]], *, writable: bool) -> None:
        """Map the whole of each descriptor at an offset: (descriptor, offset, size).

        A descriptor has to be open until the next place is asked for. After an error, which may be
        that of `places`, what was mapped before it stays mapped.
        """
        ...

    def protect(self, offset: int, size: int, *, writable: bool) -> None:
        """Change what may be done with mappings that stand one after another."""
        ...

    def unmap(self, offset: int = 0, size: int | None = None) -> None:
        """Remove mappings and keep their addresses reserved; the whole range by default.

        LayoutError for a part of a mapping.
        """
        ...

    def clear(self, offset: int, size: int) -> None:
        """Fill new memory with zeros where the device does not; mappings as for `protect`."""
        ...

    def array(self, offset: int, shape: Sequence[int], dtype: Any) -> Any:
        """Return the array at a place of the range; `flags.writeable` of it can be set."""
        ...

    def release(self) -> None:
        """Release mappings and addresses."""
        ...
