"""Where clients of the lease socket connect: the socket in a folder that one server owns."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
import socket
from collections.abc import Callable
from pathlib import Path

from snapback_client.frames import LEASE_SOCKET
from snapback_client.wire import close_all
from snapshot_shared.errors import AlreadyExists

log = logging.getLogger(__name__)

_BACKLOG = 512

ACCEPT_AGAIN_S = 1.0
"""The rest after a connection that could be neither accepted nor refused, in seconds."""


class LeaseListener:
    """Accepts clients at `<folder>/gms.sock` until it is closed."""

    def __init__(
        self, folder: Path, accepted: Callable[[socket.socket], None], group: int | None
    ) -> None:
        """Call `accepted` with each connection; members of `group` may connect, too."""
        self._path = folder / LEASE_SOCKET
        self._accepted = accepted
        self._group = group
        self._listener: socket.socket | None = None
        self._lock = -1
        self._spare = -1

    def start(self) -> None:
        """Bind and begin to accept. AlreadyExists when another server owns the folder."""
        self._lock = _lock_folder(self._path.parent)
        with contextlib.suppress(FileNotFoundError):
            # The lock on the folder is held, so a socket in it is of a server that has ended.
            self._path.unlink()
        listener = socket.socket(
            socket.AF_UNIX,
            socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK,
        )
        listener.bind(str(self._path))
        if self._group is not None:
            os.chown(self._path, -1, self._group)
        self._path.chmod(0o600 if self._group is None else 0o660)
        # To a full backlog connect() of a socket with a timeout fails with EAGAIN at once.
        listener.listen(_BACKLOG)
        self._listener = listener
        self._keep_spare()
        self._listen()

    def stop_accepting(self) -> None:
        """Forget the socket. The folder is still owned."""
        if self._listener is not None:
            asyncio.get_running_loop().remove_reader(self._listener.fileno())
            self._listener.close()
            self._listener = None
            with contextlib.suppress(FileNotFoundError):
                self._path.unlink()

    def close(self) -> None:
        """Leave the folder to other servers."""
        self.stop_accepting()
        close_all([fd for fd in (self._spare, self._lock) if fd >= 0])
        self._spare = self._lock = -1

    def _listen(self) -> None:
        if self._listener is not None:
            asyncio.get_running_loop().add_reader(self._listener.fileno(), self._accept)

    def _accept(self) -> None:
        assert self._listener is not None  # noqa: S101 - the reader is removed before it is None
        try:
            sock, _ = self._listener.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return
        except OSError as error:
            self._refuse_one(error)
            return
        self._keep_spare()
        self._accepted(sock)

    def _refuse_one(self, error: OSError) -> None:
        """Accept and close one connection, which would otherwise keep the listener readable."""
        log.error("a client could not be accepted: %s", error)
        if self._listener is None:
            return
        if self._spare < 0:
            loop = asyncio.get_running_loop()
            loop.remove_reader(self._listener.fileno())
            loop.call_later(ACCEPT_AGAIN_S, self._listen)
            return
        # Out of descriptors (EMFILE): one is kept free to accept the connection and close it. As
        # soon as it is closed, another thread may have its number.
        spare, self._spare = self._spare, -1
        os.close(spare)
        with contextlib.suppress(OSError):
            self._listener.accept()[0].close()
        self._keep_spare()

    def _keep_spare(self) -> None:
        """Have a descriptor to close, if there is one."""
        if self._spare < 0:
            with contextlib.suppress(OSError):
                self._spare = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)


def _lock_folder(folder: Path) -> int:
    # flock on the folder and not on a file in it: nothing is left behind, however a server ends.
    lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        raise AlreadyExists(
            f"another GPU memory service serves {folder}",
            next_step="stop it, or give this one a socket folder of its own",
            folder=str(folder),
        ) from None
    return lock
