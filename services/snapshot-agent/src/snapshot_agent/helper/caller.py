"""The connection of an agent, as the child that carries out its request has it."""

from __future__ import annotations

import contextlib
import signal
import socket
from collections.abc import Sequence

from snapshot_agent.domain.helping import MAX_MESSAGE_BYTES, Begun, Progress, Reply, Request
from snapshot_shared.codec import decode_json, encode_json

MAX_DESCRIPTORS = 4


class Caller:
    """One connection. It is readable when the agent has closed it."""

    def __init__(self, sock: socket.socket) -> None:
        """Use a connection that was accepted. SIGTERM asks for the end of the work."""
        self._sock = sock
        self.is_stopped = False
        # A poll under way is not ended by a handler in Python; the byte in this pair does that.
        self._alarm, alarm = socket.socketpair()
        self._ends: Sequence[socket.socket] = (sock, self._alarm)
        alarm.setblocking(False)  # noqa: FBT003 - its only form
        self._kept = alarm
        signal.set_wakeup_fd(alarm.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGTERM, self._stop)

    def _stop(self, *_: object) -> None:
        self.is_stopped = True

    def heed_no_stop(self) -> None:
        """Go on after SIGTERM; the agent may still end the work."""
        # SIG_IGN would be inherited by CRIU.
        self._ends = self._ends[:1]

    @property
    def sources(self) -> Sequence[int]:
        """The descriptors that are readable when the work has to end."""
        return [end.fileno() for end in self._ends]

    def receive(self) -> tuple[Request, list[int]]:
        """Return the request and the descriptors that came with it. InvalidMessage."""
        data, fds, _, _ = socket.recv_fds(self._sock, MAX_MESSAGE_BYTES, MAX_DESCRIPTORS)
        request: Request = decode_json(data, Request, limit=MAX_MESSAGE_BYTES)  # type: ignore[arg-type]
        return request, fds

    def send(self, reply: Reply) -> None:
        """Send a reply; an agent that is gone is no error."""
        with contextlib.suppress(OSError):
            self._sock.send(encode_json(reply))

    def begin(self, step: str) -> None:
        """Say that a step of `CRIU_STEPS` begins."""
        self.send(Begun(step=step))

    def progress(self, done: int, total: int) -> None:
        """Report progress."""
        self.send(Progress(done=done, total=total))
