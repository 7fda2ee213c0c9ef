"""Linux calls that transfers need and Python has no function for, and whole reads and writes."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
from collections.abc import Callable, Sequence

from gms.domain.transfer import ChunkPlan
from snapshot_shared.errors import ArtifactCorrupt

# Half of what the kernel takes: the rest goes in the next call.
_IOV_MAX = 512
_CACHESTAT = 451
_MADV_POPULATE_WRITE = 23

_PAGEMAP_ENTRY_BYTES = 8
_PAGEMAP_PRESENT = b"\x80"
"""The last byte of an entry of /proc/self/pagemap is at least this for a page in memory."""

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def is_mapped(address: int) -> bool:
    """Whether the page at an address of this process is mapped, so that it needs no fault."""
    # Not by `os`, which the tests of crashes replace: this is no file of an artifact.
    with contextlib.suppress(OSError), open("/proc/self/pagemap", "rb", 0) as pages:  # noqa: PTH123 - pathlib costs import time
        pages.seek(address // mmap.PAGESIZE * _PAGEMAP_ENTRY_BYTES)
        return bool(pages.read(_PAGEMAP_ENTRY_BYTES)[-1:] >= _PAGEMAP_PRESENT)
    return False


def populate(address: int, size: int) -> None:
    """Map the pages of a range for writing in one call (Linux 5.14); elsewhere they fault later."""
    before = address % mmap.PAGESIZE
    _libc.madvise(address - before, size + before, _MADV_POPULATE_WRITE)


def bypass_cache(descriptor: int) -> bool:
    """Turn on direct I/O. Return False where the file system does not have it."""
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | os.O_DIRECT)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
            raise
        return False
    return True


def write_at(
    descriptor: int, pieces: Sequence[memoryview], offset: int, bypassing: set[int]
) -> None:
    """Write all pieces, one after another. OSError."""
    size = sum(map(len, pieces))
    _transfer(os.pwritev, descriptor, pieces, offset, size, bypassing)


def read_at(
    descriptor: int, pieces: Sequence[memoryview], chunk: ChunkPlan, bypassing: set[int]
) -> None:
    """Read a chunk into pieces that are at least as long. ArtifactCorrupt when it is cut off."""
    _transfer(os.preadv, descriptor, pieces, chunk.offset, chunk.size, bypassing)


def _transfer(
    call: Callable[[int, Sequence[memoryview], int], int],
    descriptor: int,
    pieces: Sequence[memoryview],
    offset: int,
    size: int,
    bypassing: set[int],
) -> None:
    """Read or write `size` bytes at an offset, however many calls the kernel makes of it."""
    pending = list(pieces)
    end = offset + size
    while offset < end:
        try:
            done = call(descriptor, pending[:_IOV_MAX], offset)
        except OSError as error:
            if error.errno != errno.EINVAL or descriptor not in bypassing:
                raise
            # The file system accepts the flag and refuses the request, or a short request before
            # left an offset that is not aligned.
            bypassing.discard(descriptor)
            flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
            fcntl.fcntl(descriptor, fcntl.F_SETFL, flags & ~os.O_DIRECT)
            continue
        if done <= 0:
            raise ArtifactCorrupt("a part file ends before its manifest says", offset=offset)
        offset += done
        while pending and done >= len(pending[0]):
            done -= len(pending.pop(0))
        if done:
            pending[0] = pending[0][done:]


class _Range(ctypes.Structure):
    _fields_ = (("offset", ctypes.c_uint64), ("length", ctypes.c_uint64))


def is_resident(descriptor: int, chunk: ChunkPlan) -> bool:
    """Whether the page cache has all of a chunk; False where the kernel (before 6.5) cannot say."""
    return resident_bytes(descriptor, chunk.offset, chunk.size) >= chunk.size


def resident_bytes(descriptor: int, offset: int, size: int) -> int:
    """Return how much of a part of a file the page cache has, in whole pages; 0 as above."""
    wanted = _Range(offset, size)
    counts = (ctypes.c_uint64 * 5)()
    number = ctypes.c_long(_CACHESTAT)
    if _libc.syscall(number, descriptor, ctypes.byref(wanted), ctypes.byref(counts), 0) != 0:
        return 0
    return int(counts[0]) * mmap.PAGESIZE
