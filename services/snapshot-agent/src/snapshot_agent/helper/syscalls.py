"""System calls that Python has no function for, or not in every version that is supported."""

from __future__ import annotations

import ctypes
import os
import signal

CLONE_NEWNS = 0x0002_0000
CLONE_NEWCGROUP = 0x0200_0000
CLONE_NEWPID = 0x2000_0000
CLONE_NEWNET = 0x4000_0000

MS_BIND = 1 << 12
MS_REC = 1 << 14
MS_SLAVE = 1 << 19

_AT_FDCWD = -100
_AT_RECURSIVE = 0x8000
_OPEN_TREE_CLONE = 1
_MOVE_MOUNT_F_EMPTY_PATH = 4
_PR_SET_PDEATHSIG = 1
# These have the same number on every architecture.
_SYS_OPEN_TREE = 428
_SYS_MOVE_MOUNT = 429

_libc = ctypes.CDLL(None, use_errno=True)


def _check(result: int, what: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


def setns(fd: int, kind: int) -> None:
    """Enter a namespace; that of processes is for children alone."""
    _check(_libc.setns(fd, kind), "setns")


def unshare(kind: int) -> None:
    """Enter a new namespace."""
    _check(_libc.unshare(kind), "unshare")


def mount(source: str | None, target: str, fs_type: str | None, flags: int = 0) -> None:
    """Mount a file system, or change how a mount spreads."""
    words = (os.fsencode(word) if word else None for word in (source, target, fs_type))
    _check(_libc.mount(*words, ctypes.c_ulong(flags), None), f"mount {target}")


def open_tree(path: str) -> int:
    """Return a descriptor of a copy of the mounts at and below a path."""
    flags = _OPEN_TREE_CLONE | _AT_RECURSIVE | os.O_CLOEXEC
    found = _libc.syscall(_SYS_OPEN_TREE, _AT_FDCWD, os.fsencode(path), flags)
    return _check(found, f"open_tree {path}")


def move_mount(tree: int, path: str) -> None:
    """Mount what `open_tree` has returned."""
    flags = _MOVE_MOUNT_F_EMPTY_PATH
    done = _libc.syscall(_SYS_MOVE_MOUNT, tree, b"", _AT_FDCWD, os.fsencode(path), flags)
    _check(done, f"move_mount {path}")


def end_with_parent() -> None:
    """Have the kernel kill this process when the thread that has started it ends."""
    _check(_libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0), "prctl")
