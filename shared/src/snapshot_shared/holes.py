"""What Python lacks of fallocate(2): holes in a file, and blocks for all of it."""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Iterable

_KEEP_SIZE, _PUNCH_HOLE = 0x01, 0x02

_libc = ctypes.CDLL(None, use_errno=True)


def preallocate(descriptors: Iterable[int]) -> None:
    """Allocate the blocks of whole files. OSError without room for them."""
    # Direct writes to allocated blocks run in parallel; each that allocates locks the inode.
    for descriptor in descriptors:
        _fallocate(descriptor, 0, 0, os.fstat(descriptor).st_size)


def punch_hole(descriptor: int, offset: int, size: int) -> None:
    """Release the blocks of a part of a file, which then reads as zeros."""
    _fallocate(descriptor, _PUNCH_HOLE | _KEEP_SIZE, offset, size)


def _fallocate(descriptor: int, mode: int, offset: int, size: int) -> None:
    # A file system without fallocate is slower or fuller, and no less right. ENOSPC is raised.
    if _libc.fallocate(descriptor, mode, ctypes.c_long(offset), ctypes.c_long(size)) != 0:
        code = ctypes.get_errno()
        if code in (errno.ENOSPC, errno.EDQUOT):
            raise OSError(code, os.strerror(code))
