"""Keeps the logs of workers that the agent starts within a limit.

A worker has its log open and writes to it without the agent. So a log is neither renamed nor
truncated: its beginning becomes a hole. The blocks are free then, and the size stays, which CRIU
compares when it restores a process with the file open.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
from collections.abc import Iterator
from pathlib import Path

from snapshot_shared.errors import SnapbackError
from snapshot_shared.files import names_in, open_dir, open_regular, open_root, opened
from snapshot_shared.holes import punch_hole

log = logging.getLogger(__name__)

LOOK_S = 5.0
"""How often logs are looked at, in seconds."""

_BLOCK = 512
"""The unit of `st_blocks`, see stat(2)."""


class WorkerLogs:
    """The logs of all containers below the folder of state of an agent."""

    def __init__(self, state_dir: Path, limit: int) -> None:
        """Let a log take `limit` bytes of the disk; 0 is without limit."""
        self._pods = state_dir / "pods"
        self._limit = limit

    def cut(self) -> None:
        """Free all but the last half of the limit of each log that takes more than the limit."""
        if not self._limit:
            return
        for fd, name in self._logs():
            found = os.fstat(fd)
            if found.st_blocks * _BLOCK > self._limit:
                size = (found.st_size - self._limit // 2) // mmap.PAGESIZE * mmap.PAGESIZE
                punch_hole(fd, 0, size)
                log.warning("%s takes more than %d bytes: its beginning is gone", name, self._limit)

    def _logs(self) -> Iterator[tuple[int, str]]:
        """Yield a descriptor of each log, and its path. A worker may have put anything there."""
        with contextlib.suppress(OSError), opened(open_root(self._pods)) as pods:
            for parts in ((pod, name) for pod in names_in(pods) for name in self._names(pods, pod)):
                with (
                    contextlib.suppress(OSError, SnapbackError),
                    opened(open_dir(pods, parts)) as folder,
                    opened(open_regular(folder, "log", writable=True)) as fd,
                ):
                    yield fd, "/".join((*parts, "log"))

    @staticmethod
    def _names(pods: int, pod: str) -> list[str]:
        with contextlib.suppress(OSError, SnapbackError), opened(open_dir(pods, (pod,))) as folder:
            return list(names_in(folder))
        return []
