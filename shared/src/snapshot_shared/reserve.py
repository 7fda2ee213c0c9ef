"""Room on a disk that is kept for deletions.

A deletion is written to the store before its artifact is removed, so a full disk would refuse the
deletion that makes room. A file of 8 MiB takes room beside the store. It is removed if the write
of a deletion finds none.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

RESERVE_BYTES = 8 * 1024 * 1024


class Reserve:
    """A file that takes room until it is given up."""

    def __init__(self, path: Path) -> None:
        """Use a file; `keep` makes it."""
        self._path = path
        self._is_kept = False

    def keep(self) -> None:
        """Take the room, unless it is taken or there is none."""
        if self._is_kept:
            return
        with contextlib.suppress(OSError):
            descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                os.posix_fallocate(descriptor, 0, RESERVE_BYTES)
                self._is_kept = True
            finally:
                os.close(descriptor)
                if not self._is_kept:
                    # A part of it would take the last room, and be of no use.
                    self._path.unlink(missing_ok=True)

    def give_up(self) -> bool:
        """Give the room back; return whether there was any."""
        was_kept, self._is_kept = self._is_kept, False
        with contextlib.suppress(OSError):
            self._path.unlink(missing_ok=True)
        return was_kept
