"""Files that appear, by inotify."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
from collections.abc import AsyncIterator
from pathlib import Path

# The masks of linux/inotify.h, which the standard library does not have.
_MODIFY = 0x2
_CLOSE_WRITE = 0x8
_MOVED_TO = 0x80
_CREATE = 0x100
_DELETE = 0x200
_DELETE_SELF = 0x400
_ONLYDIR = 0x1000000
_CHANGES = _CLOSE_WRITE | _MOVED_TO | _CREATE | _DELETE_SELF
_BUFFER = 64 * 1024

_libc = ctypes.CDLL(None, use_errno=True)


class Folder:
    """The changes of one folder."""

    def __init__(self, fd: int) -> None:
        """Use the inotify descriptor `fd`; `watching` makes one."""
        self._fd = fd
        self._changed = asyncio.Event()

    def _read(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._fd, _BUFFER)
        self._changed.set()

    async def wait(self) -> None:
        """Return once something has changed since the last call."""
        await self._changed.wait()
        self._changed.clear()


@contextlib.asynccontextmanager
async def watching(folder: Path, *, writes: bool = False) -> AsyncIterator[Folder]:
    """Watch a folder for the length of the block. FileNotFoundError when there is none.

    With `writes` every write to one of its files counts as a change, and the end of one, too.
    """
    mask = _CHANGES | _ONLYDIR | (_MODIFY | _DELETE if writes else 0)
    fd = _libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
    if fd < 0:
        raise _error(folder)
    loop = asyncio.get_running_loop()
    try:
        if _libc.inotify_add_watch(fd, os.fsencode(folder), mask) < 0:
            raise _error(folder)
        found = Folder(fd)
        loop.add_reader(fd, found._read)  # noqa: SLF001 - the reader belongs to the folder
        try:
            yield found
        finally:
            loop.remove_reader(fd)
    finally:
        os.close(fd)


async def appears(path: Path) -> None:
    """Return once `path` exists; its folders need not exist yet."""
    while not path.exists():
        folder = next(parent for parent in path.parents if parent.is_dir())
        following = folder / path.relative_to(folder).parts[0]
        with contextlib.suppress(FileNotFoundError):
            async with watching(folder) as changes:
                # What appeared before the watch was set makes no event.
                while folder.is_dir() and not following.exists():
                    await changes.wait()


def _error(folder: Path) -> OSError:
    code = ctypes.get_errno()
    return OSError(code, os.strerror(code), str(folder))
