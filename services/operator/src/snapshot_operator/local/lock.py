"""One operator on a host is the active one: the one that holds a lock of the kernel.

The kernel lets the lock go when its holder ends, however it ends; so the next one takes over at
once, and a holder that is only stopped keeps it.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
import threading
from collections.abc import AsyncIterator
from pathlib import Path

log = logging.getLogger(__name__)


class FileLock:
    """The `Leadership` port over flock(2)."""

    def __init__(self, path: Path) -> None:
        """Use a file that is made when it is missing, and never removed."""
        self._path = path

    @contextlib.asynccontextmanager
    async def held(self) -> AsyncIterator[asyncio.Event]:
        """Wait for the lock and hold it for the length of the block; it cannot be lost."""
        descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                log.info("another operator is active: this one stands by")
                await _locked(descriptor)
            log.info("this operator is the active one")
            yield asyncio.Event()
        finally:
            os.close(descriptor)


async def _locked(descriptor: int) -> None:
    """Wait in a thread, which has a descriptor of its own: flock cannot be interrupted there."""
    loop, done = asyncio.get_running_loop(), asyncio.Event()
    own = os.dup(descriptor)

    def wait() -> None:
        try:
            fcntl.flock(own, fcntl.LOCK_EX)
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(done.set)
        finally:
            os.close(own)

    # A daemon: the process ends although it waits, and the lock with the process.
    threading.Thread(target=wait, name="operator-lock", daemon=True).start()
    await done.wait()
