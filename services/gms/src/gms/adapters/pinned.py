"""Page-locked memory of the host, for the buffers of the transfer backend `pinned-host`.

A disk and a GPU both move bytes to and from it without a page being looked for, and it is never
swapped out. `RLIMIT_MEMLOCK` bounds it for processes without CAP_IPC_LOCK.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import resource
from pathlib import Path

from gms.adapters.buffers import buffer_pages
from snapshot_shared.errors import SnapbackError

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mlock.argtypes = (ctypes.c_void_p, ctypes.c_size_t)


class MemoryLockRefused(SnapbackError):
    """The kernel locks no more memory; `values`: size, locked, limit (bytes)."""

    default_next_step = (
        "raise the limit for GMS (`ulimit -l`, LimitMEMLOCK= of systemd, --ulimit memlock of "
        "docker), or set SNAPBACK_TRANSFER_BACKEND=posix-direct"
    )


def page_locked(size: int) -> mmap.mmap:
    """Map `size` bytes and lock them until the mapping goes. MemoryLockRefused."""
    pages = buffer_pages(size)
    if not (_lock(pages) or (_raise_limit() and _lock(pages))):
        code = ctypes.get_errno()
        limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
        locked = _locked_bytes()
        raise MemoryLockRefused(
            f"{size} more bytes cannot be locked in memory: {os.strerror(code)}; RLIMIT_MEMLOCK is "
            f"{limit} bytes, {locked} are locked, and each thread needs one chunk",
            size=size,
            locked=locked,
            limit=limit,
        )
    return pages


def _lock(pages: mmap.mmap) -> bool:
    address = ctypes.addressof(ctypes.c_ubyte.from_buffer(pages))
    return bool(_libc.mlock(address, len(pages)) == 0)


def _raise_limit() -> bool:
    """Raise the soft limit to the hard one. Return False when it is there already."""
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == hard:
        return False
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (hard, hard))
    return True


def _locked_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmLck:"))
