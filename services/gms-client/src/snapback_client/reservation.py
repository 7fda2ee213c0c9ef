"""Address space: a reserved range into which device memory is mapped at fixed places.

The range stays reserved (no access) where nothing is mapped, so that no other mapping takes its
addresses while the client sleeps, and they mean the same bytes again when it wakes.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import os
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from msgspec import UnsetType

from snapback_client.errors import UnsupportedVersion
from snapback_client.mappings import AddressTaken, Mappings

if TYPE_CHECKING:
    from snapback_client.cuda import CudaRange

FIRST_ADDRESS = 0x2000_0000_0000
DEVICE_BYTES = 1 << 40
DOMAIN_BYTES = 1 << 39
HUGE_PAGE = 2 * 1024 * 1024
_MAP_FIXED = 0x10
_MAP_NORESERVE = 0x4000
_MAP_FIXED_NOREPLACE = 0x100000
_MADV_DONTFORK = 10
_PROT_NONE = 0
_RESERVED = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE

_FAILED = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p

_libc.mmap.argtypes = (
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
)

_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def reserve(
    kind: str | UnsetType, device: str, size: int, *, address: int | None, exact: bool = False
) -> Reservation | CudaRange:
    """Reserve addresses for the memory of a device of this kind, which has this uuid.

    A CUDA device may give another address than the one that is asked for, unless it is `exact`.
    AddressTaken; CudaUnavailable says what this process lacks; UnsupportedVersion for a kind that
    is not known here.
    """
    match kind:
        case "simulated" | UnsetType():
            return Reservation(size, address=address)
        case "cuda":
            # Only here: an engine or a transfer on a simulated device has no such library.
            from snapback_client.cuda import CudaDriver, CudaRange  # noqa: PLC0415

            return CudaRange(CudaDriver(), device, size, address=address, exact=exact)
        case _:
            raise UnsupportedVersion(
                f"{device} is a device of the kind {kind!r}, whose memory this client cannot map",
                found=kind,
                expected=["simulated", "cuda"],
            )


class Reservation:
    """The range for simulated devices, whose memory is mapped by the kernel."""

    kind = "simulated"

    def __init__(self, size: int, *, address: int | None = None) -> None:
        """Reserve `size` bytes at `address`, or at any huge page. AddressTaken."""
        self.address = _reserved(size) if address is None else _reserved_at(address, size)
        self.size = size
        self._mappings = Mappings(size)

    def map(self, fd: int, offset: int, size: int, *, writable: bool) -> int:
        """Map the whole of a descriptor at `offset` of the range and return the address."""
        self._mappings.add(offset, size)
        prot = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        try:
            at = _mmap(self.address + offset, size, prot, mmap.MAP_SHARED | _MAP_FIXED, fd)
        except OSError:
            self._mappings.remove(offset)
            raise
        # A fork of the engine must not keep memory mapped that the service counts as released.
        _check(_libc.madvise(at, size, _MADV_DONTFORK))
        return at

    def map_all(self, places: Iterable[tuple[int, int, int]], *, writable: bool) -> None:
        """Map each descriptor at an offset: (descriptor, offset, size)."""
        for fd, offset, size in places:
            self.map(fd, offset, size, writable=writable)

    def protect(self, offset: int, size: int, *, writable: bool) -> None:
        """Change what the process may do with mappings that stand one after another."""
        prot = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        _check(_libc.mprotect(self.address + offset, size, prot))

    def unmap(self, offset: int = 0, size: int | None = None) -> None:
        """Remove mappings and keep their addresses reserved; the whole range by default."""
        length = self.size if size is None else size
        gone = self._mappings.within(offset, length)
        # One mmap over everything: munmap for each of thousands of mappings takes far longer, and
        # would leave the addresses free for a moment.
        _mmap(self.address + offset, length, _PROT_NONE, _RESERVED | _MAP_FIXED, -1)
        for at, _ in reversed(gone):
            self._mappings.remove(at)

    def clear(self, offset: int, size: int) -> None:
        """Do nothing: new memory of a simulated device is zero."""

    def array(self, offset: int, shape: Sequence[int], dtype: Any) -> Any:
        """Return the numpy array at a place of the range."""
        # The transfer programs use no arrays, and every restore waits for them.
        import numpy as np  # noqa: PLC0415

        size = math.prod(shape) * np.dtype(dtype).itemsize
        return np.ndarray(tuple(shape), dtype, buffer=self.view(offset, size))

    def view(self, offset: int, size: int) -> memoryview:
        """Return the bytes of a mapping. Using them after `unmap` ends the process (SIGSEGV)."""
        return memoryview((ctypes.c_ubyte * size).from_address(self.address + offset))

    def release(self) -> None:
        """Release the addresses."""
        if self.size:
            _check(_libc.munmap(self.address, self.size))
            self.size = 0


def address_of(ordinal: int, *, is_kv: bool) -> int:
    """Return the stable address of a device's range: the same in every process for one ordinal."""
    return FIRST_ADDRESS + ordinal * DEVICE_BYTES + (DOMAIN_BYTES if is_kv else 0)


def _reserved(size: int) -> int:
    """Reserve addresses from the beginning of a huge page on: its mappings begin at one, too."""
    found = _mmap(0, size + HUGE_PAGE, _PROT_NONE, _RESERVED, -1)
    # mmap aligns to ordinary pages only, so the ends are cut off.
    before = -found % HUGE_PAGE
    if before:
        _check(_libc.munmap(found, before))
    _check(_libc.munmap(found + before + size, HUGE_PAGE - before))
    return found + before


def _reserved_at(address: int, size: int) -> int:
    try:
        found = _mmap(address, size, _PROT_NONE, _RESERVED | _MAP_FIXED_NOREPLACE, -1)
    except FileExistsError:
        raise _taken(address, size) from None
    if found != address:
        # Linux before 4.17 does not know the flag and takes the address for a hint.
        _check(_libc.munmap(found, size))
        raise _taken(address, size)
    return found


def _mmap(address: int, size: int, prot: int, flags: int, fd: int) -> int:
    found = _libc.mmap(address, size, prot, flags, fd, 0)
    if found is None or found == _FAILED:
        code = ctypes.get_errno()
        raise OSError(code, f"mmap of {size} bytes at {address:#x}: {os.strerror(code)}")
    return int(found)


def _check(result: int) -> None:
    if result != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


def _taken(address: int, size: int) -> AddressTaken:
    return AddressTaken(
        f"{size} bytes at {address:#x} are in use in this process", address=address, size=size
    )
