"""File locks: one holder among all processes of the node, freed by the kernel when it ends."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable
from pathlib import Path


class FileLocks:
    """The `Locks` port over flock(2)."""

    def take(self, path: Path) -> Callable[[], None] | None:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            return None
        return lambda: os.close(fd)
