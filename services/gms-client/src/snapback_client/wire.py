"""One lease-socket message: bytes, and descriptors beside them. Both ends use it.

A message that was cut, or whose descriptors were cut, is refused and every descriptor that did
arrive is closed.
"""

from __future__ import annotations

import array
import contextlib
import errno
import os
import resource
import socket
import stat
from collections.abc import Iterator, Sequence

from snapback_client.codec import MAX_FRAME_BYTES
from snapback_client.errors import InvalidMessage, TooManyOpenFiles
from snapback_client.frames import DESCRIPTORS_PER_MESSAGE

_ITEM = array.array("i").itemsize
_ANCILLARY_BYTES = socket.CMSG_SPACE(DESCRIPTORS_PER_MESSAGE * _ITEM)
_SEND_BUFFER = 1024 * 1024


@contextlib.contextmanager
def pinned(path: str | os.PathLike[str]) -> Iterator[str]:
    """Yield a short path to a unix socket: to this one, whatever is put in its place meanwhile.

    OSError where there is none; a link is none. The folder of the socket is trusted.
    """
    fd = os.open(path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        if not stat.S_ISSOCK(os.fstat(fd).st_mode):
            raise OSError(errno.ENOTSOCK, os.strerror(errno.ENOTSOCK), os.fspath(path))
        yield f"/proc/self/fd/{fd}"
    finally:
        os.close(fd)


class Inbox:
    """Receives messages into one reused buffer."""

    def __init__(self) -> None:
        """Allocate the buffer, one byte longer than a frame to detect longer ones."""
        self._buffer = bytearray(MAX_FRAME_BYTES + 1)

    def receive(self, sock: socket.socket) -> tuple[bytes, list[int]]:
        """Return one message and its descriptors; no bytes when the peer has hung up.

        BlockingIOError and TimeoutError as the socket raises them. InvalidMessage; that is
        TooManyOpenFiles where this process had no descriptor left for one that was sent.
        """
        # Without CLOEXEC a program that another thread starts would inherit the descriptors.
        size, ancillary, flags, _ = sock.recvmsg_into(
            [self._buffer], _ANCILLARY_BYTES, socket.MSG_CMSG_CLOEXEC
        )
        descriptors = _descriptors(ancillary)
        if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC) or size > MAX_FRAME_BYTES:
            close_all(descriptors)
            raise _cut(size, len(descriptors))
        return bytes(memoryview(self._buffer)[:size]), descriptors


def send(sock: socket.socket, data: bytes, descriptors: Sequence[int] = ()) -> None:
    """Send one message. BlockingIOError when the other end does not keep up."""
    ancillary = []
    if descriptors:
        rights = array.array("i", descriptors)
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)]
    # A closed peer is then EPIPE and not SIGPIPE, which would end an engine.
    sock.sendmsg([data], ancillary, socket.MSG_NOSIGNAL)


def prepare(sock: socket.socket) -> None:
    """Enlarge the send buffer to the largest frame, as far as the kernel allows."""
    with contextlib.suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER)


def close_all(descriptors: Sequence[int]) -> None:
    """Close descriptors."""
    for descriptor in descriptors:
        os.close(descriptor)


def _cut(size: int, arrived: int) -> InvalidMessage:
    """Return why a message of `size` bytes, with descriptors that arrived, is not whole."""
    if size > MAX_FRAME_BYTES:
        return InvalidMessage(f"a message is over the limit of {MAX_FRAME_BYTES} bytes")
    if arrived >= DESCRIPTORS_PER_MESSAGE:
        return InvalidMessage(
            f"a message has more than {DESCRIPTORS_PER_MESSAGE} descriptors beside it"
        )
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return TooManyOpenFiles(
        f"only {arrived} of the descriptors beside a message could be opened: this process may "
        f"have {limit} files open at a time",
        arrived=arrived,
        limit=limit,
    )


def _descriptors(ancillary: Sequence[tuple[int, int, bytes]]) -> list[int]:
    found = array.array("i")
    for level, kind, data in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            found.frombytes(data[: len(data) - len(data) % _ITEM])
    return found.tolist()
