"""A session with GMS over its lease socket: the client's half of the protocol.

Needs only the standard library and msgspec, because engines and transfer programs start with it.
The open socket is the lock: it is held as long as the `Lease` is open.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import weakref
from collections.abc import Iterator, Sequence
from typing import NoReturn, TypeVar

from msgspec import UNSET
from msgspec.structs import replace

from snapback_client.errors import (
    ConnectionLost,
    Forbidden,
    GmsUnavailable,
    InvalidMessage,
    NotEligible,
    NotFound,
    SnapbackError,
    TimedOut,
    for_python,
)
from snapback_client.forks import check_owner
from snapback_client.frames import (
    LEASE_SOCKET,
    PROTOCOL_VERSIONS,
    Access,
    Allocated,
    AllocateMany,
    AllocationInfo,
    Allocations,
    AllocationSpec,
    Attach,
    Attached,
    Commit,
    Committed,
    Detach,
    Done,
    ErrorReply,
    Exported,
    ExportMany,
    FreeMany,
    GenerationRef,
    ListAllocations,
    Metadata,
    MetadataGet,
    MetadataItem,
    MetadataPut,
    Reply,
    Request,
    Versions,
    batches,
    cost_of_allocation,
    cost_of_metadata,
    decode_reply,
    encode_frame,
    error_of,
)
from snapback_client.wire import Inbox, close_all, pinned, prepare, send

_NOT_STARTED = (errno.ENOENT, errno.ECONNREFUSED, errno.EAGAIN)

CALL_S = 120.0
"""How long an answer may take once the lock is held, in seconds. Making memory takes time."""

GRACE_S = 5.0
"""How much longer than the deadline we wait for the server's own answer to it, in seconds."""

R = TypeVar("R", bound=Reply)
P = TypeVar("P", Allocated, Allocations, Metadata)


class Lease:
    """A granted session. One call at a time; any error of the connection ends it.

    In a fork of the process every call is NotEligible, and its copy of the socket is closed.
    """

    def __init__(self, sock: socket.socket, versions: Versions) -> None:
        """Use `Lease.attach`."""
        self._owner = os.getpid()
        self._socket = sock
        self._versions = versions
        _leases.add(self)
        self._inbox = Inbox()
        self._attached: Attached | None = None

    @classmethod
    def attach(
        cls, socket_dir: str, request: Attach, versions: Versions = PROTOCOL_VERSIONS
    ) -> Lease:
        """Connect and wait for the lock.

        DeadlineExceeded, GenerationMismatch, Fenced, GmsUnavailable. `versions` are offered to the
        server; UnsupportedVersion when it speaks none of them.
        """
        path = os.path.join(socket_dir, LEASE_SOCKET)  # noqa: PTH118 - pathlib costs import time
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
        try:
            prepare(sock)
            sock.settimeout(GRACE_S)
            _connect(sock, path)
            lease = cls(sock, versions)
            offer = replace(request, versions=versions)
            lease._attached = lease._call(offer, Attached, timeout=request.deadline_s + GRACE_S)
            lease._versions = (lease.version, lease.version)
        except BaseException:
            sock.close()
            raise
        return lease

    @property
    def attached(self) -> Attached:
        """The reply that granted the lock."""
        if self._attached is None:
            raise NotEligible("the lock is not granted yet")
        return self._attached

    @property
    def version(self) -> int:
        """The version of the protocol that this session speaks."""
        return self.attached.v

    def allocate(
        self, specs: Sequence[AllocationSpec], *, wait_s: float = 0.0
    ) -> list[AllocationInfo]:
        """Make allocations, all or none. OutOfDeviceMemory, LayoutConflict."""
        made: list[AllocationInfo] = []
        try:
            for batch in batches(specs, cost=cost_of_allocation):
                if not batch:
                    # No allocations are one empty batch, which the service refuses.
                    continue
                request = AllocateMany(allocations=batch, wait_s=wait_s)
                for part in self._parts(request, Allocated, CALL_S + wait_s):
                    made += part.allocations
        except BaseException:
            # Batches before the one that failed: the caller is promised all or none.
            with contextlib.suppress(Exception):
                self.free([info.id for info in made])
            raise
        return made

    def free(self, ids: Sequence[str]) -> None:
        """Free allocations of the layout being written, which are not mapped any more."""
        for batch in batches(ids, cost=len):
            if batch:
                self._call(FreeMany(ids=batch), Done)

    def export(
        self, ids: Sequence[str], access: Access
    ) -> Iterator[list[tuple[AllocationInfo, int]]]:
        """Yield (allocation, descriptor) in runs; descriptors are closed with the next run.

        Only one run is open at a time, so the number of descriptors stays small.
        """
        for batch in batches(ids, cost=len):
            if batch:
                self._send(ExportMany(ids=batch, access=access))
                yield from self._exported()

    def _exported(self) -> Iterator[list[tuple[AllocationInfo, int]]]:
        is_last = False
        try:
            while not is_last:
                reply, descriptors = self._receive(CALL_S)
                is_last = not isinstance(reply, Exported) or reply.part >= reply.parts
                try:
                    run = _expect(reply, Exported).allocations
                    if len(run) != len(descriptors):
                        raise InvalidMessage("allocations and descriptors differ in number")
                    yield list(zip(run, descriptors, strict=True))
                finally:
                    close_all(descriptors)
        finally:
            # After an early stop the rest must not be taken for the next reply. Where an error of
            # the connection has closed it nothing comes, and that error is the one to raise.
            with contextlib.suppress(SnapbackError):
                while not is_last:
                    reply, descriptors = self._receive(CALL_S)
                    close_all(descriptors)
                    is_last = not isinstance(reply, Exported) or reply.part >= reply.parts

    def put_metadata(self, entries: Sequence[MetadataItem]) -> None:
        """Add or replace metadata of the layout being written."""
        for batch in batches(entries, cost=cost_of_metadata):
            if batch:
                self._call(MetadataPut(entries=batch), Done)

    def metadata(self, prefix: str = "") -> list[MetadataItem]:
        """Read metadata of the layout whose keys begin with `prefix`, sorted by key."""
        parts = self._parts(MetadataGet(prefix=prefix or UNSET), Metadata)
        return [entry for part in parts for entry in part.entries]

    def allocations(self) -> list[AllocationInfo]:
        """List the layout in the order of its slots."""
        parts = self._parts(ListAllocations(), Allocations)
        return [info for part in parts for info in part.allocations]

    def commit(
        self,
        *,
        if_match: GenerationRef | None,
        hidden: bool = False,
        layout_id: str | None = None,
    ) -> Committed:
        """Publish the layout being written; afterwards the session reads it."""
        request = Commit(if_match=if_match, hidden=hidden, layout_id=layout_id)
        return self._call(request, Committed)

    def detach(self) -> None:
        """Report that nothing is mapped any more, and end the session."""
        try:
            self._call(Detach(), Done)
        finally:
            self.close()

    def close(self) -> None:
        """Close the socket only: what was imported stays charged until the process ends."""
        self._socket.close()

    def _parts(self, request: Request, kind: type[P], timeout: float = CALL_S) -> Iterator[P]:
        self._send(request)
        while True:
            reply, descriptors = self._receive(timeout)
            close_all(descriptors)
            part = _expect(reply, kind)
            yield part
            if part.part >= part.parts:
                return

    def _call(self, request: Request, kind: type[R], *, timeout: float = CALL_S) -> R:
        self._send(request)
        reply, descriptors = self._receive(timeout)
        close_all(descriptors)
        return _expect(reply, kind)

    def _send(self, request: Request) -> None:
        check_owner(self._owner, "the session")
        try:
            # A server that does not read must not block the engine indefinitely.
            self._socket.settimeout(CALL_S)
            send(self._socket, encode_frame(request, self._versions[0]))
        except (BrokenPipeError, ConnectionResetError) as error:
            self._explain(error)
        except OSError as error:
            self.close()
            raise _lost(error) from error

    def _explain(self, error: OSError) -> NoReturn:
        """Raise the error that the server sent before it closed the connection, if any."""
        reply: Reply | None = None
        with contextlib.suppress(OSError, InvalidMessage):
            data, descriptors = self._inbox.receive(self._socket)
            close_all(descriptors)
            reply = decode_reply(data, self._versions) if data else None
        self.close()
        if isinstance(reply, ErrorReply):
            raise for_python(error_of(reply.to_failure())) from error
        raise _lost(error) from error

    def _receive(self, timeout: float) -> tuple[Reply, list[int]]:
        """Return an answer and its descriptors. Any error closes the connection."""
        try:
            self._socket.settimeout(timeout)
            data, descriptors = self._inbox.receive(self._socket)
        except TimeoutError:
            self.close()
            raise TimedOut(
                f"the GPU memory service did not answer in {timeout:.1f} s", budget_s=timeout
            ) from None
        except ConnectionResetError as error:
            # The kernel reports the reset before what was received earlier.
            self._explain(error)
        except OSError as error:
            self.close()
            raise _lost(error) from error
        except BaseException:
            # What is left of the answer would be taken for the next one.
            self.close()
            raise
        if not data:
            close_all(descriptors)
            self.close()
            raise _lost(None)
        try:
            return decode_reply(data, self._versions), descriptors
        except BaseException:
            close_all(descriptors)
            self.close()
            raise


_leases: weakref.WeakSet[Lease] = weakref.WeakSet()


def _close_inherited() -> None:
    # The service sees the end of a process that it has no pidfd of by its socket alone, which an
    # inherited copy would keep open.
    for lease in _leases:
        lease.close()


os.register_at_fork(after_in_child=_close_inherited)


def _connect(sock: socket.socket, path: str) -> None:
    try:
        with pinned(path) as short:
            sock.connect(short)
    except PermissionError as error:
        raise Forbidden(f"this process may not use {path}", path=path) from error
    except OSError as error:
        # Another error, as of a path that is too long, does not pass when a service is started.
        kind = GmsUnavailable if error.errno in _NOT_STARTED else NotFound
        raise kind(
            f"no GPU memory service answers at {path}: {error.strerror or error}",
            next_step="start gms, or set GMS_SOCKET_DIR to the folder of its sockets",
            path=path,
        ) from error


def _expect(reply: Reply, kind: type[R]) -> R:
    if isinstance(reply, ErrorReply):
        raise for_python(error_of(reply.to_failure()))
    if not isinstance(reply, kind):
        raise InvalidMessage(f"the answer is {type(reply).__name__}, not {kind.__name__}")
    return reply


def _lost(error: OSError | None) -> SnapbackError:
    why = "closed the connection" if error is None else f"is gone: {error.strerror or error}"
    return ConnectionLost(f"the GPU memory service {why}")
