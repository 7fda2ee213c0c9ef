"""File locks: one holder among all processes of the node, freed by the kernel when it ends."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from snapshot_shared.files import take_lock


class FileLocks:
    """The `Locks` port over flock(2)."""

    def take(self, path: Path) -> Callable[[], None] | None:
        fd = take_lock(path)
        return None if fd is None else lambda: os.close(fd)
