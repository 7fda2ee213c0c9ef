"""Control directories: files put in place by rename, and watched by one inotify instance.

Single files are read and written in the event loop: they are on a disk of the node, have a few
hundred bytes and are not made durable, because they mean nothing after the end of the worker. Trees
may have any size, so they are removed in threads.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

from asyncinotify import Inotify, Mask

from snapshot_agent.domain import control
from snapshot_agent.domain.control import Access, ContainerPaths
from snapshot_shared.errors import ArtifactCorrupt, ArtifactMissing, ControlFolderBroken
from snapshot_shared.files import (
    open_dir,
    open_own,
    opened,
    own_by,
    read_bounded,
    remove_tree,
    take_lock,
    write_replacing,
)
from snapshot_shared.tasks import in_thread

_CHANGES = Mask.MOVED_TO | Mask.CLOSE_WRITE | Mask.ONLYDIR | Mask.DONT_FOLLOW
_GONE = (ArtifactMissing, FileNotFoundError)


class ControlDirectories:
    """The `ControlDirectory` port."""

    def __init__(self) -> None:
        """Watch no directory before the first `appears`; call `close` at the end."""
        self._inotify: Inotify | None = None
        self._pump: asyncio.Task[None] | None = None
        self._waits: dict[Path, set[asyncio.Event]] = {}

    def create(self, where: ContainerPaths) -> None:
        (where.control / control.STATE).mkdir(mode=0o700, parents=True, exist_ok=True)
        with opened_control(where) as folder, opened(open_dir(folder, [control.STATE])) as state:
            for directory in (folder, state):
                hand_over(directory, where.access, where.access.folder_mode)

    def put(self, where: ContainerPaths, name: str, data: bytes) -> None:
        with workers_own(), contextlib.suppress(*_GONE), opened_control(where) as directory:
            access = where.access
            owner = (access.uid, access.gid)
            write_replacing(
                directory, name, data, mode=access.file_mode, owner=owner, durable=False
            )

    def get(self, where: ContainerPaths, name: str) -> bytes | None:
        try:
            with opened_control(where) as directory:
                return read_bounded(directory, name, control.MAX_BODY_BYTES)
        except (ArtifactCorrupt, ArtifactMissing, FileNotFoundError):
            return None

    def remove(self, where: ContainerPaths, name: str) -> None:
        # A worker may have put a folder in its place; the next capture clears it.
        with (
            workers_own(),
            contextlib.suppress(*_GONE, IsADirectoryError),
            opened_control(where) as directory,
        ):
            os.unlink(name, dir_fd=directory)

    async def clear(self, where: ContainerPaths, *names: str) -> None:
        await in_thread(_clear, where, names)

    async def appears(
        self, where: ContainerPaths, name: str, accepts: Callable[[bytes], bool]
    ) -> None:
        with self._following(where.control) as changed:
            while True:
                changed.clear()
                data = self.get(where, name)
                if data is not None and accepts(data):
                    return
                await changed.wait()

    @contextlib.contextmanager
    def _following(self, where: Path) -> Iterator[asyncio.Event]:
        """Yield an event that is set at every change of a directory."""
        # One instance for all waits: by default a user may have only 128.
        if self._inotify is None:
            self._inotify = Inotify()
            self._pump = asyncio.create_task(self._deliver(self._inotify), name="inotify")
        try:
            watch = self._inotify.add_watch(where, _CHANGES)
        except (FileNotFoundError, NotADirectoryError) as error:
            raise ControlFolderBroken(f"{where} is no folder any more") from error
        changed = asyncio.Event()
        waits = self._waits.setdefault(where, set())
        waits.add(changed)
        try:
            yield changed
        finally:
            waits.discard(changed)
            if not waits:
                del self._waits[where]
                with contextlib.suppress(OSError, ValueError):
                    # Fails when the directory itself has been removed.
                    self._inotify.rm_watch(watch)

    async def _deliver(self, inotify: Inotify) -> None:
        async for event in inotify:
            # After an overflow the kernel has dropped events of unknown directories.
            if event.mask & Mask.Q_OVERFLOW:
                for waits in self._waits.values():
                    _wake(waits)
            elif event.watch is not None:
                _wake(self._waits.get(event.watch.path, set()))

    async def close(self) -> None:
        """Stop watching."""
        if self._pump is not None:
            self._pump.cancel()
            await asyncio.gather(self._pump, return_exceptions=True)
        if self._inotify is not None:
            self._inotify.close()


class FileLocks:
    """The `Locks` port over flock(2)."""

    def take(self, path: Path) -> Callable[[], None] | None:
        fd = take_lock(path)
        return None if fd is None else lambda: os.close(fd)


@contextlib.contextmanager
def workers_own() -> Iterator[None]:
    """Raise ControlFolderBroken for artifact errors within a block on a worker's own files.

    A worker could otherwise have a sound artifact quarantined.
    """
    try:
        yield
    except (ArtifactCorrupt, ArtifactMissing) as error:
        raise ControlFolderBroken(error.message, **error.values) from error


def _clear(where: ContainerPaths, names: Sequence[str]) -> None:
    with workers_own(), contextlib.suppress(*_GONE), opened_control(where) as directory:
        for name in names:
            _remove(directory, name)
        if control.STATE in names:
            os.mkdir(control.STATE, 0o700, dir_fd=directory)
            with opened(open_dir(directory, [control.STATE])) as state:
                hand_over(state, where.access, where.access.folder_mode)


def opened_control(where: ContainerPaths) -> AbstractContextManager[int]:
    """Open a control directory. ArtifactCorrupt when it is a link."""
    return opened(open_own(where.control))


def hand_over(fd: int, access: Access, mode: int) -> None:
    """Set the owner that a container needs, and a mode, on an open file or directory."""
    own_by(fd, (access.uid, access.gid), mode)


def _wake(waits: set[asyncio.Event]) -> None:
    for changed in waits:
        changed.set()


def _remove(directory: int, name: str) -> None:
    try:
        mode = os.stat(name, dir_fd=directory, follow_symlinks=False).st_mode
    except FileNotFoundError:
        return
    if stat.S_ISDIR(mode):
        remove_tree(directory, name, durable=False)
    else:
        os.unlink(name, dir_fd=directory)
