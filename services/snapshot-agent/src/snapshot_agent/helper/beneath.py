"""Open, walk and empty trees of files that others have made.

No link is followed and no mount is entered. A tree may be deeper than calls can nest or than a
process may have descriptors, so that a walk has one open folder at a time.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import itertools
import os
import stat
from collections.abc import Collection, Iterable, Iterator
from pathlib import PurePosixPath
from typing import NamedTuple

from snapshot_shared.errors import NotEligible, SourceExited
from snapshot_shared.files import open_dir, opened

LIMIT_ENTRIES = 1_000_000
"""How many names a walk may find, as many of which are in memory at once."""

# It has the same number on every architecture.
_SYS_OPENAT2 = 437
_RESOLVE_NO_XDEV = 0x01
_RESOLVE_NO_MAGICLINKS = 0x02
_RESOLVE_NO_SYMLINKS = 0x04
_RESOLVE_BENEATH = 0x08
_RESOLVE = _RESOLVE_NO_XDEV | _RESOLVE_NO_MAGICLINKS | _RESOLVE_NO_SYMLINKS | _RESOLVE_BENEATH

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NOATIME


class _OpenHow(ctypes.Structure):
    _fields_ = (
        ("flags", ctypes.c_uint64),
        ("mode", ctypes.c_uint64),
        ("resolve", ctypes.c_uint64),
    )


_syscall = ctypes.CDLL(None, use_errno=True).syscall
_syscall.argtypes = (
    ctypes.c_long,
    ctypes.c_int,
    ctypes.c_char_p,
    ctypes.POINTER(_OpenHow),
    ctypes.c_size_t,
)
_syscall.restype = ctypes.c_long


class Found(NamedTuple):
    """One thing in a tree: `name` in the open directory `folder`, `path` from the top."""

    folder: int
    name: str
    path: str
    status: os.stat_result
    is_left: bool
    """Whether it is a folder of which everything in it has been walked."""


class _Folder(NamedTuple):
    name: str
    path: str
    status: os.stat_result
    names: list[str]


def open_beneath(folder: int, path: str, flags: int) -> int:
    """Open what exists below a directory descriptor; the caller closes it.

    OSError: ELOOP when any part of the path is a link, EXDEV when it leads out of the folder or
    into another mount.
    """
    how = _OpenHow(flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0, _RESOLVE)
    while True:
        found = int(_syscall(_SYS_OPENAT2, folder, os.fsencode(path), how, ctypes.sizeof(how)))
        if found >= 0:
            return found
        number = ctypes.get_errno()
        if number != errno.EINTR:
            raise OSError(number, os.strerror(number), path)


def check_kernel() -> None:
    """NotEligible when this process cannot open files as `open_beneath` does.

    There is no other way that keeps to one mount and is safe with what others may change.
    """
    try:
        with opened(os.open("/", os.O_PATH | os.O_CLOEXEC)) as root:
            os.close(open_beneath(root, ".", os.O_PATH))
    except OSError as error:
        raise NotEligible(
            f"openat2 cannot be called on this node ({error.strerror}, Linux {os.uname().release})",
            next_step="use Linux 5.6 or later, and let the container helper have the seccomp "
            "profile Unconfined",
            expected="openat2",
            found=error.strerror,
        ) from error


def open_inside(pid: int, path: str) -> int:
    """Open a folder as a process has it, with no link on its way. SourceExited."""
    try:
        found = os.open(f"/proc/{pid}/root", os.O_PATH | os.O_CLOEXEC)
    except (FileNotFoundError, ProcessLookupError) as error:
        raise SourceExited(f"process {pid} has ended", pid=pid) from error
    with opened(found) as root:
        return open_dir(root, PurePosixPath(path).parts[1:], foreign=True)


def open_folder(folder: int, path: str) -> int:
    """Open a directory below another one to list it, as `open_beneath` does."""
    return open_beneath(folder, path, _FOLDER)


def walk(
    top: int, leave_out: Collection[str], limit_entries: int = LIMIT_ENTRIES
) -> Iterator[Found]:
    """Yield everything below a directory, by name, but the paths left out and what is below them.

    A folder comes before what is in it, and once more after that. What is yielded is good until
    the next step. OSError: ESTALE when a folder was moved meanwhile, E2BIG when there is more.
    """
    current = open_folder(top, ".")
    try:
        trail = [_folder(current, "", "", limit_entries)]
        left = limit_entries - len(trail[0].names)
        while trail:
            here = trail[-1]
            if here.names:
                name = here.names.pop()
                path = f"{here.path}/{name}" if here.path else name
                if path in leave_out:
                    continue
                status = os.stat(name, dir_fd=current, follow_symlinks=False)
                yield Found(current, name, path, status, is_left=False)
                if stat.S_ISDIR(status.st_mode):
                    current = _closing(current, open_folder(current, name))
                    trail.append(_folder(current, name, path, left))
                    left -= len(trail[-1].names)
            else:
                trail.pop()
                if trail:
                    current = _closing(current, os.open("..", _FOLDER, dir_fd=current))
                    if not os.path.samestat(os.fstat(current), trail[-1].status):
                        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), here.path)
                    yield Found(current, here.name, here.path, here.status, is_left=True)
    finally:
        os.close(current)


def _folder(fd: int, name: str, path: str, limit: int) -> _Folder:
    with os.scandir(fd) as found:
        names = [entry.name for entry in itertools.islice(found, limit + 1)]
    if len(names) > limit:
        raise OSError(errno.E2BIG, "there are too many files")
    return _Folder(name, path, os.fstat(fd), sorted(names, reverse=True))


def _closing(old: int, new: int) -> int:
    os.close(old)
    return new


def lies_above(path: str, others: Iterable[str]) -> bool:
    """Whether any of the others lies below a path."""
    return any(other.startswith(f"{path}/") for other in others)


def empty(folder: int, keep: Collection[str]) -> None:
    """Remove what is in a directory, but the paths to keep and the folders that they lie in."""
    for found in walk(folder, keep):
        if not stat.S_ISDIR(found.status.st_mode):
            os.unlink(found.name, dir_fd=found.folder)
        elif found.is_left and not lies_above(found.path, keep):
            os.rmdir(found.name, dir_fd=found.folder)


def status_of(folder: int, name: str) -> os.stat_result | None:
    """Return what a name in a directory is; None when nothing has it."""
    with contextlib.suppress(FileNotFoundError):
        return os.stat(name, dir_fd=folder, follow_symlinks=False)
    return None


def remove(folder: int, name: str) -> None:
    """Remove what has a name in a directory, whatever it is. Absent is success."""
    status = status_of(folder, name)
    if status is None:
        return
    if stat.S_ISDIR(status.st_mode):
        with opened(open_folder(folder, name)) as fd:
            empty(fd, ())
        os.rmdir(name, dir_fd=folder)
    else:
        os.unlink(name, dir_fd=folder)
