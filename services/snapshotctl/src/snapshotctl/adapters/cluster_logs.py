"""The logs of a local cluster: of its services, and of the workers on its nodes."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import NamedTuple

from snapshot_shared.errors import NotFound, SnapbackError
from snapshot_shared.files import names_in, open_dir, open_regular, open_root, opened, read_end
from snapshotctl.adapters import inotify
from snapshotctl.domain.cluster import ClusterPaths, ClusterRecord

TAIL_BYTES = 4 * 1024 * 1024
"""How much of the end of a log is read."""

WORKER_LINES = 8
BLOCK_BYTES = 64 * 1024
LOOK_AGAIN_S = 5.0
"""How long a change of a log may be missed, in seconds."""


class LogFile(NamedTuple):
    """One log: of a program, or of a container below the folder of its pod.

    A worker may have put anything in the place of what is below `folder`.
    """

    name: str
    folder: Path
    parts: tuple[str, ...]

    def open(self) -> int:
        """Return a descriptor of it. NotFound where it is no plain file."""
        try:
            with (
                opened(open_root(self.folder)) as root,
                opened(open_dir(root, self.parts[:-1])) as place,
            ):
                return open_regular(place, self.parts[-1])
        except (OSError, SnapbackError) as error:
            raise NotFound(
                f"the log of {self.name} cannot be read: {error}",
                next_step=f"look at {self.folder.joinpath(*self.parts)}",
            ) from error


class ClusterLogs:
    """The logs of one local cluster."""

    def __init__(self, record: ClusterRecord) -> None:
        """Use the paths of `record`."""
        self._paths = ClusterPaths(Path(record.state_dir), Path(record.socket_dir))

    @property
    def folder(self) -> str:
        """Where they are, for people."""
        return str(self._paths.logs)

    def lines(self) -> list[tuple[str, str]]:
        """Return the last lines of every service, each with the name of its program."""
        return [
            (log.stem, line)
            for log in sorted(self._paths.logs.glob("*.log"))
            if log.stem != "nats-server"
            for line in _tail(log.parent, log.name)
        ]

    def programs(self) -> list[str]:
        """Return the names of the programs that have a log, sorted."""
        return sorted(log.stem for log in self._paths.logs.glob("*.log"))

    def program(self, name: str) -> LogFile:
        """Return the log of a program."""
        log = self._paths.log(name)
        return LogFile(name, log.parent, (log.name,))

    def containers(self, node: str, pod_uid: str) -> list[LogFile]:
        """Return the logs of the containers of a pod that have started on this machine."""
        folder = self._paths.node(node, "agent") / "pods" / pod_uid
        try:
            with opened(open_root(folder)) as pod:
                names = sorted(names_in(pod))
        except OSError:
            return []
        return [
            LogFile(name, folder, (name, "log"))
            for name in names
            # If its program is missing, a container has a folder and no log.
            if os.path.lexists(folder / name / "log")
        ]

    def worker(self, node: str, pod_uid: str) -> list[tuple[str, str]]:
        """Return the last lines that a pod's containers wrote, each with the container."""
        return [
            (log.name, line)
            for log in self.containers(node, pod_uid)
            for line in _tail(log.folder, *log.parts)[-WORKER_LINES:]
        ]


async def lines_of(
    logs: Sequence[LogFile], tail: int | None, *, follow: bool
) -> AsyncIterator[tuple[str, str]]:
    """Yield the last lines of logs, or all with None, each with its log; the logs one by one.

    With `follow` yield what is written from then on as well, until all are deleted. NotFound.
    """
    async with contextlib.AsyncExitStack() as stack:
        readers = []
        for log in logs:
            reader = _Reader(log.name, stack.enter_context(opened(log.open())))
            reader.begin(tail)
            readers.append(reader)
        changes = []
        for log in logs if follow else ():
            folder = log.folder.joinpath(*log.parts[:-1])
            changes.append(await stack.enter_async_context(inotify.watching(folder, writes=True)))
        while True:
            ended = [reader for reader in readers if not follow or reader.is_deleted()]
            for reader in readers:
                for line in reader.lines(to_the_end=reader in ended):
                    yield reader.name, line
            readers = [reader for reader in readers if reader not in ended]
            if not readers:
                return
            waiters = [asyncio.ensure_future(change.wait()) for change in changes]
            try:
                await asyncio.wait(
                    waiters, timeout=LOOK_AGAIN_S, return_when=asyncio.FIRST_COMPLETED
                )
            finally:
                for waiter in waiters:
                    waiter.cancel()


class _Reader:
    """The lines of a file that grows."""

    def __init__(self, name: str, fd: int) -> None:
        self.name = name
        self._fd = fd
        self._at = 0
        self._rest = b""

    def is_deleted(self) -> bool:
        """Whether the file has no name any more: it was deleted."""
        return os.fstat(self._fd).st_nlink == 0

    def begin(self, tail: int | None) -> None:
        """Go to the beginning of the last `tail` lines, or of the file."""
        first = self._after_the_hole()
        if tail is None:
            self._at = first
            return
        size = at = os.fstat(self._fd).st_size
        found = -1 if self._ends_whole(size) else 0
        while at > first and found < tail:
            length = min(BLOCK_BYTES, at - first)
            at -= length
            block = os.pread(self._fd, length, at)
            place = len(block)
            while found < tail and (place := block.rfind(b"\n", 0, place)) >= 0:
                found += 1
            if found == tail:
                self._at = at + place + 1
                return
        self._at = size if tail == 0 else first

    def _after_the_hole(self) -> int:
        """Return where the first whole line begins: an agent frees the beginning of a long log."""
        try:
            first = os.lseek(self._fd, 0, os.SEEK_DATA)
        except OSError:
            return 0  # An empty file has no data.
        if first == 0:
            return 0
        end = os.pread(self._fd, BLOCK_BYTES, first).find(b"\n")
        return first + end + 1

    def _ends_whole(self, size: int) -> bool:
        return size > 0 and os.pread(self._fd, 1, size - 1) == b"\n"

    def lines(self, *, to_the_end: bool) -> list[str]:
        """Return the lines that are there; one without an end only with `to_the_end`."""
        if os.fstat(self._fd).st_size < self._at:
            self._at, self._rest = 0, b""
        pieces = [self._rest]
        while piece := os.pread(self._fd, BLOCK_BYTES, self._at):
            self._at += len(piece)
            pieces.append(piece)
        *whole, self._rest = b"".join(pieces).split(b"\n")
        if to_the_end and self._rest:
            whole.append(self._rest)
        return [line.decode("utf-8", "replace") for line in whole]


def _tail(folder: Path, *parts: str) -> list[str]:
    """Return the last lines of a file beneath a folder; none of what is no plain file."""
    try:
        with opened(open_root(folder)) as root, opened(open_dir(root, parts[:-1])) as place:
            return read_end(place, parts[-1], TAIL_BYTES).decode("utf-8", "replace").splitlines()
    except (OSError, SnapbackError):
        return []
