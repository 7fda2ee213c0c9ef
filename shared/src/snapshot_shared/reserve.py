"""Room on a disk that is kept for deletions.

A deletion is written down before the artifact is removed, in the store of a local cluster and in
the journal of its node, so a full disk would refuse the deletion that makes room. A file takes room
beside each of them. It is removed if the write of a deletion finds none.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


class Reserve:
    """A file that takes room until it is given up."""

    def __init__(self, path: Path, size: int) -> None:
        """Use a file of `size` bytes; `keep` makes it."""
        self._path = path
        self._size = size
        self.is_kept = False

    def keep(self) -> None:
        """Take the room, unless it is taken or there is none."""
        if self.is_kept:
            return
        with contextlib.suppress(OSError):
            descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                os.posix_fallocate(descriptor, 0, self._size)
                self.is_kept = True
            finally:
                os.close(descriptor)
                if not self.is_kept:
                    # A part of it would take the last room, and be of no use.
                    os.unlink(self._path)

    def give_up(self) -> bool:
        """Give the room back; return whether there was any."""
        was_kept, self.is_kept = self.is_kept, False
        with contextlib.suppress(OSError):
            os.unlink(self._path)
        return was_kept
