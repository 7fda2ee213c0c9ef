"""The lease socket: the server's half of the protocol.

A connected socket is a session and its lock; its end frees both. One task serves one client. What
a client sends can only cost that client its connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import socket
from collections.abc import Callable, Coroutine, Generator, Hashable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from gms.adapters.admission import Admission, LeasePolicy, peer_of
from gms.adapters.hangups import Hangups
from gms.adapters.lease_listener import LeaseListener
from gms.adapters.turns import Turns
from gms.domain.sessions import Peer, Session
from gms.ports import Answer, Message, Sessions
from snapback_client.frames import (
    FIRST_VERSION,
    LEASE_PROTOCOL,
    AllocateMany,
    Attach,
    Detach,
    Done,
    ErrorReply,
    FreeMany,
    ListAllocations,
    MetadataGet,
    MetadataPut,
    Request,
    decode_request,
    encode_frame,
    negotiated,
    offered_in,
)
from snapback_client.wire import Inbox, close_all, prepare, send
from snapshot_shared import instruments
from snapshot_shared.errors import (
    DeadlineExceeded,
    InvalidMessage,
    SnapbackError,
    failure_of,
)
from snapshot_shared.metrics import OFF, Metrics
from snapshot_shared.tasks import writable

log = logging.getLogger(__name__)

_SO_PEERPIDFD = 77

_AT_ONCE = (FreeMany, ListAllocations, MetadataGet, MetadataPut)
"""Requests whose answers wait for nothing and carry no descriptors."""

T = TypeVar("T")

AtOnce = Callable[[Request], Answer]
"""Answers one of those."""


class _ClientGone(Exception):
    """The other end closed the connection."""


class LeaseServer:
    """Listens in a folder until it is closed."""

    def __init__(
        self,
        folder: Path,
        sessions: Sessions,
        policy: LeasePolicy | None = None,
        metrics: Metrics = OFF,
    ) -> None:
        """Prepare to serve `<folder>/gms.sock`."""
        self._sessions = sessions
        self._policy = policy or LeasePolicy()
        self._listener = LeaseListener(folder, self.adopt, self._policy.group)
        self._admission = Admission(self._policy)
        self._clients: set[asyncio.Task[None]] = set()
        self._lingering: dict[int, Session] = {}
        self._common = _Common(self._policy, Inbox(), Hangups(), Turns(self._policy.turn_s))
        self._metrics = metrics

    def start(self) -> None:
        """Bind and begin to accept. AlreadyExists when another server owns the folder."""
        self._listener.start()
        self._common.hangups.start()

    async def close(self) -> None:
        """Stop accepting, end every session, forget the socket."""
        self._listener.stop_accepting()
        for client in list(self._clients):
            client.cancel()
        await asyncio.gather(*self._clients, return_exceptions=True)
        self._common.hangups.close()
        for pidfd in list(self._lingering):
            self._stop_watching(pidfd)
        self._listener.close()

    def adopt(self, sock: socket.socket) -> None:
        """Serve a client that has connected. It may have sent its first frame."""
        sock.settimeout(0)
        task = asyncio.get_running_loop().create_task(self._serve(sock), name="lease")
        self._clients.add(task)
        task.add_done_callback(self._clients.discard)
        # A task that is cancelled before its first step runs nothing of itself.
        task.add_done_callback(lambda _: sock.close())

    async def _serve(self, sock: socket.socket) -> None:
        process = _Process(self._policy)
        connection = _Connection(sock, process, self._common)
        try:
            prepare(sock)
            peer = process.of(sock)
            self._admission.enter(sock, peer)
            try:
                await self._session(connection, peer, process)
            finally:
                if not process.is_watched:
                    self._admission.leave(peer)
        except _ClientGone:
            pass
        except SnapbackError as error:
            self._metrics.add(instruments.CLIENTS_REFUSED, error.reason)
            await connection.try_send(error)
        except Exception as error:
            log.exception("a lease session failed")
            await connection.try_send(error)
        finally:
            connection.close()
            process.close()

    async def _session(self, connection: _Connection, peer: Peer, process: _Process) -> None:
        request = await connection.handshake()
        session = await connection.while_connected(self._sessions.attach(request, peer))
        unmapped = False
        try:
            with connection.ending_with_process():
                await connection.send(Message(await self._sessions.describe(session)))
                unmapped = await self._answer_all(connection, session)
        finally:
            if self._sessions.end(session, unmapped=unmapped):
                self._watch(session, process)
        await connection.send(Message(Done()))

    async def _answer_all(self, connection: _Connection, session: Session) -> bool:
        """Answer requests until Detach."""
        at_once = functools.partial(self._sessions.call, session)
        while True:
            try:
                request = await connection.request(at_once)
                if isinstance(request, Detach):
                    return True
                answer = await self._answer(connection, session, request)
                with contextlib.closing(answer):
                    for message in answer:
                        await (connection.turn() if message is None else connection.send(message))
            except SnapbackError as error:
                await connection.send(Message(ErrorReply.of(error.to_failure())))

    async def _answer(
        self, connection: _Connection, session: Session, request: Request | Answer
    ) -> Answer:
        if isinstance(request, Generator):
            return request
        if isinstance(request, AllocateMany):
            return await connection.while_connected(self._sessions.allocate(session, request))
        return self._sessions.call(session, request)

    def _watch(self, session: Session, process: _Process) -> None:
        """Wait for the end of a process that may still have memory mapped."""
        pidfd = process.take()
        if pidfd < 0:
            # The process had ended before its pidfd could be opened.
            self._sessions.process_ended(session)
            return
        process.is_watched = True
        self._lingering[pidfd] = session
        asyncio.get_running_loop().add_reader(pidfd, self._process_ended, pidfd)

    def _process_ended(self, pidfd: int) -> None:
        session = self._stop_watching(pidfd)
        self._sessions.process_ended(session)

    def _stop_watching(self, pidfd: int) -> Session:
        asyncio.get_running_loop().remove_reader(pidfd)
        os.close(pidfd)
        session = self._lingering.pop(pidfd)
        self._admission.leave(session.peer)
        return session


@dataclass(frozen=True, slots=True)
class _Common:
    """What the connections of a server share."""

    policy: LeasePolicy
    inbox: Inbox
    hangups: Hangups
    turns: Turns


class _Process:
    """A pidfd of the peer, until it is taken or closed."""

    def __init__(self, policy: LeasePolicy) -> None:
        self.is_watched = False
        self.owner: Hashable = None
        self.pidfd = -1
        self._policy = policy

    def of(self, sock: socket.socket) -> Peer:
        """Open a pidfd of the peer."""
        peer = peer_of(sock, self._policy)
        try:
            # Names the very process that connected, where the kernel (6.5) can; pids are reused.
            self.pidfd = sock.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD)
        except OSError:
            with contextlib.suppress(OSError):
                self.pidfd = os.pidfd_open(peer.pid)
        self.owner = peer.owner
        return replace(peer, has_pidfd=self.pidfd >= 0)

    def take(self) -> int:
        """Return the pidfd, which the caller closes; -1 when the process was gone already."""
        pidfd, self.pidfd = self.pidfd, -1
        return pidfd

    def close(self) -> None:
        """Close what was not taken."""
        if self.pidfd >= 0:
            os.close(self.take())


class _Connection:
    """One client's socket: whole frames in, whole messages out, each wait bounded or watched."""

    def __init__(self, sock: socket.socket, process: _Process, common: _Common) -> None:
        self._socket = sock
        self._process = process
        self._common = common
        self._loop = asyncio.get_running_loop()
        self._is_reading = False
        self._waiting: asyncio.Future[Request | Answer | None] | None = None
        self._at_once: AtOnce | None = None
        self._versions = common.policy.versions
        self._version = FIRST_VERSION

    async def handshake(self) -> Attach:
        """Wait for the first frame, which must be Attach."""
        budget = self._common.policy.handshake_s
        try:
            async with asyncio.timeout(budget):
                request = await self.request()
        except TimeoutError:
            raise DeadlineExceeded(
                f"no Attach came within {budget} s", step="handshake", budget_s=budget
            ) from None
        if not isinstance(request, Attach):
            raise InvalidMessage(f"the first frame must be Attach, not {type(request).__name__}")
        self._version = negotiated(offered_in(request), self._versions, LEASE_PROTOCOL)
        self._versions = (self._version, self._version)
        return request

    @contextlib.contextmanager
    def ending_with_process(self) -> Iterator[None]:
        """Hang up when the process that connected ends: a fork of it keeps the socket open."""
        if self._process.pidfd < 0:
            yield
            return
        self._loop.add_reader(self._process.pidfd, self._hang_up)
        try:
            yield
        finally:
            self._loop.remove_reader(self._process.pidfd)

    def _hang_up(self) -> None:
        self._loop.remove_reader(self._process.pidfd)
        # What the process had sent is still read.
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    async def request(self, at_once: AtOnce | None = None) -> Request | Answer:
        """Wait for a frame. InvalidMessage, UnsupportedVersion; the next frame can be read.

        Meanwhile `at_once` answers those that wait for nothing. What could not be sent of such an
        answer is returned in place of a request.
        """
        while True:
            await self.turn()
            try:
                return self._receive()
            except BlockingIOError:
                found = await self._readable(at_once)
            if found is not None:
                return found

    def _receive(self) -> Request:
        """Return the next frame. BlockingIOError without one."""
        try:
            data, descriptors = self._common.inbox.receive(self._socket)
        except BlockingIOError:
            raise
        except OSError as error:
            raise _ClientGone from error
        close_all(descriptors)
        if not data:
            raise _ClientGone
        if descriptors:
            raise InvalidMessage("a request carries no descriptors")
        return decode_request(data, self._versions)

    async def _readable(self, at_once: AtOnce | None) -> Request | Answer | None:
        """Wait until a frame can be read, or is read already, or for the rest of an answer."""
        self._waiting, self._at_once = self._loop.create_future(), at_once
        # It stays registered from one frame to the next: to change that takes two system calls.
        if not self._is_reading:
            self._loop.add_reader(self._socket.fileno(), self._handle_readable)
            self._is_reading = True
        try:
            return await self._waiting
        finally:
            self._waiting = None

    def _handle_readable(self) -> None:
        waiting = self._waiting
        if waiting is None or waiting.done():
            # While no frame is waited for, it would be called in every turn of the loop.
            self._stop_reading()
        elif self._at_once is None or not self._common.turns.is_free():
            waiting.set_result(None)
        else:
            try:
                found = self._answered(self._at_once)
            except BlockingIOError:
                return
            except Exception as error:  # noqa: BLE001 - raised where the frame is waited for
                waiting.set_exception(error)
                return
            if found is not None:
                waiting.set_result(found)

    def _answered(self, at_once: AtOnce) -> Request | Answer | None:
        """Read a frame and answer it, as far as that waits for nothing; return what is left."""
        request = self._receive()
        if not isinstance(request, _AT_ONCE):
            return request
        answer = at_once(request)
        for message in answer:
            if not (self._common.turns.is_free() if message is None else self._sent(message)):
                return _from(message, answer)
        return None

    def _sent(self, message: Message) -> bool:
        """Send a message without descriptors. False when the client has to read others first."""
        try:
            send(self._socket, encode_frame(message.frame, self._version))
        except BlockingIOError:
            return False
        except OSError as error:
            raise _ClientGone from error
        return True

    def _stop_reading(self) -> None:
        if self._is_reading:
            self._loop.remove_reader(self._socket.fileno())
            self._is_reading = False

    def close(self) -> None:
        """Close the socket."""
        self._stop_reading()
        self._socket.close()

    async def turn(self) -> None:
        """Wait until this client may have its next piece of work done."""
        await self._common.turns.take(self._process.owner)

    async def send(self, message: Message) -> None:
        """Send a message and close its descriptors. A client that does not read is dropped."""
        try:
            data = encode_frame(message.frame, self._version)
            while True:
                try:
                    return send(self._socket, data, message.descriptors)
                except BlockingIOError:
                    async with asyncio.timeout(self._common.policy.send_s):
                        await writable(self._socket.fileno())
        except (OSError, TimeoutError) as error:
            raise _ClientGone from error
        finally:
            message.close()

    async def try_send(self, error: BaseException) -> None:
        """Send the client the error that ends its connection, if it still reads."""
        with contextlib.suppress(_ClientGone):
            await self.send(Message(ErrorReply.of(failure_of(error))))

    async def while_connected(self, work: Coroutine[Any, Any, T]) -> T:
        """Await a coroutine, and cancel it when the client hangs up."""
        task = self._loop.create_task(work)
        gone = self._common.hangups.of(self._socket.fileno(), self._process.pidfd)
        hangup = self._loop.create_task(gone)
        try:
            await asyncio.wait((task, hangup), return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
            raise _ClientGone
        finally:
            for pending in (hangup, task):
                pending.cancel()
            await asyncio.gather(hangup, task, return_exceptions=True)


def _from(first: Message | None, answer: Answer) -> Answer:
    yield first
    yield from answer
