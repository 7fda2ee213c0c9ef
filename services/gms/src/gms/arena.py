"""Address space: a reserved range into which device memory is mapped at fixed places.

The range stays reserved (no access) where nothing is mapped, so that addresses that were handed
out stay ours while the client sleeps, and mean the same bytes again when it wakes.
"""

from __future__ import annotations

import ctypes
import mmap
import os

from snapshot_shared.errors import LayoutError

FIRST_ADDRESS = 0x2000_0000_0000
DEVICE_BYTES = 1 << 40
DOMAIN_BYTES = 1 << 39

_MAP_FIXED = 0x10
_MAP_NORESERVE = 0x4000
_MAP_FIXED_NOREPLACE = 0x100000
_MADV_DONTFORK = 10
_PROT_NONE = 0
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


class AddressTaken(LayoutError):
    """Something else in this process stands where memory has to be mapped; `values`: address."""

    default_next_step = (
        "close the pool that uses this range, or restore in a process that has none open"
    )


class Arena:
    """A reserved range of addresses. Mappings replace parts of it and give them back."""

    def __init__(self, size: int, *, address: int | None = None) -> None:
        """Reserve `size` bytes at `address`, or where the kernel likes. AddressTaken."""
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
        if address is not None:
            flags |= _MAP_FIXED_NOREPLACE
        try:
            found = _mmap(address or 0, size, _PROT_NONE, flags, -1)
        except FileExistsError:
            raise _taken(address or 0, size) from None
        if address is not None and found != address:
            # A kernel before 4.17 takes the address for a hint.
            _check(_libc.munmap(found, size))
            raise _taken(address, size)
        self.address = found
        self.size = size

    def map(self, fd: int, offset: int, size: int, *, writable: bool) -> int:
        """Map the whole of a descriptor at `offset` of the range and give the address.

        A child that is forked does not inherit it: an import must not outlive its session.
        """
        if offset < 0 or offset + size > self.size:
            raise LayoutError(
                f"{size} bytes at {offset} are outside the reserved range", size=self.size
            )
        prot = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        at = _mmap(self.address + offset, size, prot, mmap.MAP_SHARED | _MAP_FIXED, fd)
        _check(_libc.madvise(at, size, _MADV_DONTFORK))
        return at

    def protect(self, offset: int, size: int, *, writable: bool) -> None:
        """Change what the process may do with a mapping."""
        prot = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        _check(_libc.mprotect(self.address + offset, size, prot))

    def unmap(self, offset: int = 0, size: int | None = None) -> None:
        """Take mappings away and keep their addresses reserved; the whole range by default."""
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE | _MAP_FIXED
        length = self.size if size is None else size
        _mmap(self.address + offset, length, _PROT_NONE, flags, -1)

    def view(self, offset: int, size: int) -> memoryview:
        """Give the bytes of a mapping. Using them after `unmap` ends the process (SIGSEGV)."""
        return memoryview((ctypes.c_ubyte * size).from_address(self.address + offset))

    def release(self) -> None:
        """Give the addresses back."""
        if self.size:
            _check(_libc.munmap(self.address, self.size))
            self.size = 0


def address_of(ordinal: int, *, is_kv: bool) -> int:
    """Give the stable address of a device's range: the same in every process for one ordinal."""
    return FIRST_ADDRESS + ordinal * DEVICE_BYTES + (DOMAIN_BYTES if is_kv else 0)


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
