"""The lease socket of a node whose devices have a process each.

A client is handed over when it has said which device it means: its frame stays in the socket, for
the process of that device to read. From then on nothing of it is here.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Callable, Mapping
from pathlib import Path

from gms.adapters.admission import Admission, LeasePolicy, peer_of
from gms.adapters.lease_listener import LeaseListener
from snapback_client.devices import find_device
from snapback_client.frames import Attach, ErrorReply, decode_request, encode_frame
from snapback_client.wire import Inbox, send
from snapshot_shared import instruments
from snapshot_shared.codec import MAX_FRAME_BYTES
from snapshot_shared.errors import DeadlineExceeded, InvalidMessage, SnapbackError, failure_of
from snapshot_shared.metrics import OFF, Metrics
from snapshot_shared.tasks import end_all, readable

log = logging.getLogger(__name__)

_CLIENT = b"client"
_READY = b"ready"

HandOver = Callable[[str, socket.socket], None]
"""Gives a client to the process of a device, by uuid. UnknownDevice, DeviceProcessGone."""


class LeaseRouter:
    """Listens in a folder until it is closed."""

    def __init__(
        self,
        folder: Path,
        indices: Mapping[str, int],
        hand_over: HandOver,
        policy: LeasePolicy,
        metrics: Metrics = OFF,
    ) -> None:
        """Prepare to accept at `<folder>/gms.sock`; `indices` are those of the devices by uuid."""
        self._indices = indices
        self._hand_over = hand_over
        self._policy = policy
        self._metrics = metrics
        self._admission = Admission(policy)
        self._listener = LeaseListener(folder, self._accepted, policy.group)
        self._clients: set[asyncio.Task[None]] = set()

    def start(self) -> None:
        """Bind and begin to accept. AlreadyExists when another server owns the folder."""
        self._listener.start()

    async def close(self) -> None:
        """Stop accepting, and let go who has not said yet which device it means."""
        self._listener.stop_accepting()
        await end_all(*self._clients)
        self._listener.close()

    def _accepted(self, sock: socket.socket) -> None:
        task = asyncio.get_running_loop().create_task(self._route(sock), name="lease")
        self._clients.add(task)
        task.add_done_callback(self._clients.discard)
        # A task that is cancelled before its first step runs nothing of itself.
        task.add_done_callback(lambda _: sock.close())

    async def _route(self, sock: socket.socket) -> None:
        with sock:
            sock.settimeout(0)
            try:
                peer = peer_of(sock, self._policy)
                self._admission.enter(sock, peer)
                try:
                    name = await self._device(sock)
                finally:
                    self._admission.leave(peer)
                if name:
                    self._hand_over(find_device(name, self._indices) or name, sock)
            except OSError:
                # The client is gone.
                return
            except SnapbackError as error:
                self._metrics.add(instruments.CLIENTS_REFUSED, error.reason)
                with contextlib.suppress(OSError):
                    # A client whose frame is not taken sees a reset before it sees the answer.
                    sock.recv(1)
                with contextlib.suppress(OSError):
                    send(sock, encode_frame(ErrorReply.of(failure_of(error))))

    async def _device(self, sock: socket.socket) -> str:
        """Return the name of the device in the first frame, which is not taken; "" without one."""
        budget = self._policy.handshake_s
        try:
            async with asyncio.timeout(budget):
                await readable(sock.fileno())
        except TimeoutError:
            raise DeadlineExceeded(
                f"no Attach came within {budget} s", step="handshake", budget_s=budget
            ) from None
        data = sock.recv(MAX_FRAME_BYTES, socket.MSG_PEEK)
        if not data:
            return ""
        request = decode_request(data, self._policy.versions)
        if not isinstance(request, Attach):
            raise InvalidMessage(f"the first frame must be Attach, not {type(request).__name__}")
        return request.device


class Intake:
    """The other end of `hand`: in the process of a device, what is handed over to it."""

    def __init__(
        self,
        channel: socket.socket,
        accepted: Callable[[socket.socket], None],
        ended: Callable[[], None],
    ) -> None:
        """Call `accepted` with each client, and `ended` when the other process is gone."""
        self._channel = channel
        self._accepted = accepted
        self._ended = ended
        self._inbox = Inbox()

    def start(self) -> None:
        """Say that clients are served from now on."""
        self._channel.settimeout(0)
        asyncio.get_running_loop().add_reader(self._channel.fileno(), self._receive)
        with contextlib.suppress(OSError):
            send(self._channel, _READY)

    def close(self) -> None:
        """Take no more."""
        asyncio.get_running_loop().remove_reader(self._channel.fileno())
        self._channel.close()

    def _receive(self) -> None:
        try:
            data, descriptors = self._inbox.receive(self._channel)
        except BlockingIOError:
            return
        except InvalidMessage:
            # Its copy of the socket is closed with the message: the client sees a hang-up.
            log.warning(
                "a client is let go: no descriptor is left for it; see LimitNOFILE, ulimit -n"
            )
            return
        except OSError:
            data, descriptors = b"", []
        if not data:
            asyncio.get_running_loop().remove_reader(self._channel.fileno())
            self._ended()
        for descriptor in descriptors:
            self._accepted(socket.socket(fileno=descriptor))


def hand(channel: socket.socket, client: socket.socket) -> None:
    """Hand a client over; the copy here can be closed. BlockingIOError when they pile up there."""
    send(channel, _CLIENT, [client.fileno()])


async def until_ready(channel: socket.socket) -> bool:
    """Wait until the other end takes clients; False when it has ended before."""
    return bool(await asyncio.get_running_loop().sock_recv(channel, len(_READY)))
