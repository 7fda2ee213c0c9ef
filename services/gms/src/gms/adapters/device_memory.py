"""The memory of a claimed device: a pod asks for it, the node's GMS makes it.

As with a GPU, memory belongs to the device and not to the process that asked: the node's GMS is
charged for it, and counts it over all processes that have the device. What a connection has made
is released when the connection ends. A client that loses the connection keeps its memory, and
hands it over when it connects again, so that the device of a restarted GMS counts it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import threading
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from gms.adapters.simulated import MemfdDevice, simulated_info
from gms.domain.claims import DEVICE_FILE, MAX_DEVICES, MEMORY_SOCKET, ClaimableDevice
from snapback_client.wire import Inbox, close_all, send
from snapshot_shared.codec import decode_json, decode_msgpack, encode_msgpack, encode_pretty
from snapshot_shared.errors import (
    DeviceError,
    Failure,
    InvalidInput,
    InvalidMessage,
    OutOfDeviceMemory,
    RemoteFailure,
    SnapbackError,
    UnknownDevice,
    failure_of,
)
from snapshot_shared.files import open_root, opened, read_bounded, write_replacing
from snapshot_shared.tasks import any_set, end_all, in_thread, readable

log = logging.getLogger(__name__)

ANSWER_S = 120.0
"""How long the node's GMS may take to make memory, in seconds: the host clears every page."""
LOOK_S = 1.0
"""How long the node's GMS may take to say how much is free, in seconds."""
MAX_CONNECTIONS = 16
"""How many processes may use one device of a claim at a time."""
MAX_FILE_BYTES = 4096
ACCEPT_AGAIN_S = 1.0
_KIND = socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC


class Create(msgspec.Struct, frozen=True, tag="create"):
    """Make memory; it comes beside the answer."""

    size: Annotated[int, Meta(ge=1, le=2**50)]


class Adopt(msgspec.Struct, frozen=True, tag="adopt"):
    """Count the memory beside this message, which an earlier connection has made."""


class Release(msgspec.Struct, frozen=True, tag="release"):
    """Release memory."""

    id: int


class Look(msgspec.Struct, frozen=True, tag="look"):
    """Say how much is free."""


class Made(msgspec.Struct, frozen=True, tag="made"):
    """The name of memory in this connection; 0 after a release."""

    id: int = 0


class Free(msgspec.Struct, frozen=True, tag="free"):
    """The bytes that are free now."""

    size: int


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """Nothing was done."""

    failure: Failure


class DeviceFile(msgspec.Struct, frozen=True, kw_only=True):
    """What a container reads of its device; sizes are bytes."""

    uuid: Annotated[str, Meta(min_length=1, max_length=64)]
    product: Annotated[str, Meta(min_length=1, max_length=64)]
    capacity: Annotated[int, Meta(ge=1, le=2**50)]
    granularity: Annotated[int, Meta(ge=4096, le=2**30)]


class DeviceSockets:
    """Serves the memory of devices on a socket for each folder that is opened."""

    def __init__(self, devices: Mapping[str, MemfdDevice]) -> None:
        """Serve devices by their uuids."""
        self._devices = devices
        self._served: dict[Path, asyncio.Task[None]] = {}
        self._inbox = Inbox()

    async def serve(self, folder: Path, device: ClaimableDevice) -> None:
        """Describe a device in a folder and serve its memory there. A repeat does nothing."""
        if (earlier := self._served.get(folder)) is not None and not earlier.done():
            return
        found = self._devices[device.uuid]
        listener = await in_thread(_listen, folder, found)
        serving = asyncio.create_task(self._serve(listener, found), name="device-memory")
        # A task that is cancelled before its first step runs nothing of itself.
        serving.add_done_callback(lambda _: listener.close())
        self._served[folder] = serving

    async def close(self, below: Path) -> None:
        """End the sockets in and below a folder; memory in use stays its users'."""
        ending = [folder for folder in self._served if folder.is_relative_to(below)]
        await end_all(*(self._served.pop(folder) for folder in ending))

    async def aclose(self) -> None:
        """End all."""
        await self.close(Path("/"))

    async def _serve(self, listener: socket.socket, device: MemfdDevice) -> None:
        loop = asyncio.get_running_loop()
        clients: set[asyncio.Task[None]] = set()
        try:
            while True:
                try:
                    sock, _ = await loop.sock_accept(listener)
                except OSError as error:
                    log.warning("a client of device memory could not be accepted: %s", error)
                    # The connection is still there; what was missing may come back.
                    await any_set(ACCEPT_AGAIN_S)
                    continue
                if len(clients) >= MAX_CONNECTIONS:
                    sock.close()
                    continue
                serving = _Client(sock, device, self._inbox).serve()
                client = loop.create_task(serving, name="device-memory-client")
                clients.add(client)
                client.add_done_callback(clients.discard)
                client.add_done_callback(partial(_close, sock))
        finally:
            listener.close()
            await end_all(*clients)


def _close(sock: socket.socket, _: asyncio.Task[None]) -> None:
    sock.close()


def _listen(folder: Path, device: MemfdDevice) -> socket.socket:
    folder.mkdir(mode=0o755, parents=True, exist_ok=True)
    # Readable for every user of a pod that the folder is mounted into; the umask is not.
    folder.chmod(0o755)
    info = device.info
    described = DeviceFile(
        uuid=info.uuid,
        product=info.product,
        capacity=info.capacity,
        granularity=info.granularity,
    )
    listener = socket.socket(socket.AF_UNIX, _KIND | socket.SOCK_NONBLOCK)
    try:
        with opened(open_root(folder)) as directory:
            write_replacing(directory, DEVICE_FILE, encode_pretty(described), mode=0o644)
            with contextlib.suppress(FileNotFoundError):
                os.unlink(MEMORY_SOCKET, dir_fd=directory)
            # Through the descriptor: a path below the kubelet's folder is longer than the 107
            # bytes of an address.
            listener.bind(f"/proc/self/fd/{directory}/{MEMORY_SOCKET}")
        (folder / MEMORY_SOCKET).chmod(0o666)
        listener.listen(MAX_CONNECTIONS)
    except BaseException:
        listener.close()
        raise
    return listener


class _Client:
    """One connection and what it has made: names of ours to handles of the device."""

    def __init__(self, sock: socket.socket, device: MemfdDevice, inbox: Inbox) -> None:
        self._socket = sock
        self._device = device
        self._inbox = inbox
        self._made: dict[int, int] = {}
        self._last = 0

    async def serve(self) -> None:
        """Answer until the other end hangs up, then release what is left."""
        self._socket.settimeout(0)
        try:
            while await self._answer_one():
                pass
        except OSError as error:
            log.info("a client of device memory is gone: %s", error)
        except SnapbackError as error:
            log.warning("a client of device memory is refused: %s", error)
        finally:
            self._socket.close()
            await in_thread(self._release_all)

    async def _answer_one(self) -> bool:
        await readable(self._socket.fileno())
        try:
            data, descriptors = self._inbox.receive(self._socket)
        except BlockingIOError:
            return True
        if not data:
            return False
        answer: Made | Free | Refused
        beside: tuple[int, ...] = ()
        try:
            request = decode_msgpack(data, _REQUEST)
            answer = await in_thread(self._carry_out, request, descriptors)
            if isinstance(request, Create) and isinstance(answer, Made):
                beside = (self._made[answer.id],)
        except SnapbackError as error:
            answer = Refused(failure_of(error))
        finally:
            close_all(descriptors)
        # A client has one request under way, so its buffer has room for the answer.
        send(self._socket, encode_msgpack(answer), beside)
        return True

    def _carry_out(
        self, request: Create | Adopt | Release | Look, descriptors: list[int]
    ) -> Made | Free:
        match request:
            case Create(size):
                return self._named(self._device.create(size))
            case Look():
                return Free(self._device.free())
            case Adopt():
                if len(descriptors) != 1:
                    raise InvalidMessage(f"{len(descriptors)} descriptors came, not 1")
                self._device.adopt(descriptors[0])
                return self._named(descriptors.pop())
            case Release(name):
                handle = self._made.pop(name, None)
                if handle is None:
                    raise InvalidInput(f"nothing was made with the name {name}")
                self._device.release(handle)
                return Made()

    def _named(self, handle: int) -> Made:
        self._last += 1
        self._made[self._last] = handle
        return Made(self._last)

    def _release_all(self) -> None:
        while self._made:
            self._device.release(self._made.popitem()[1])


_REQUEST: Any = Create | Adopt | Release | Look
_REPLY: Any = Made | Refused
_SAID: Any = Free | Refused


class ClaimedMemory:
    """Memory of a claimed device, made by the node's GMS and kept by this process."""

    def __init__(self, path: Path, *, answer_s: float = ANSWER_S) -> None:
        """Use the socket `path`, when memory is asked for."""
        self._path = path
        self._answer_s = answer_s
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        self._inbox = Inbox()
        # Descriptors of ours to the names that they have in the connection.
        self._names: dict[int, int] = {}

    def free(self) -> int | None:
        """Return the bytes that are free on the device; None when the node's GMS does not say it.

        An older one cannot, and one that is busy or hangs is not waited for.
        """
        # In a connection of its own: the other may be waiting for memory that the host clears.
        try:
            with self._dialled(LOOK_S) as sock:
                send(sock, encode_msgpack(Look()))
                said = decode_msgpack(sock.recv(MAX_FILE_BYTES), _SAID)
        except (OSError, SnapbackError):
            return None
        return said.size if isinstance(said, Free) else None

    def create(self, size: int) -> int:
        with self._lock:
            name, (handle,) = self._create(Create(size))
            self._names[handle] = name
            return handle

    def release(self, handle: int) -> None:
        with self._lock:
            name = self._names.pop(handle)
            os.close(handle)
            # Without a connection the node's GMS has released it already.
            with contextlib.suppress(SnapbackError):
                if self._socket is not None:
                    self._exchange(self._socket, Release(name))

    def close(self) -> None:
        """End the connection, which releases everything."""
        with self._lock:
            self._hang_up()

    def _create(self, request: Create) -> tuple[int, list[int]]:
        if self._socket is not None:
            # GMS may have started again: then the old connection is broken.
            with contextlib.suppress(_Disconnected):
                return self._exchange(self._socket, request)
        return self._exchange(self._connected(), request)

    def _connected(self) -> socket.socket:
        """Connect, and hand over what earlier connections have made."""
        try:
            sock = self._socket = self._dialled(self._answer_s)
            for handle in self._names:
                self._names[handle] = self._exchange(sock, Adopt(), (handle,))[0]
        except OSError as error:
            self._hang_up()
            raise self._disconnected(error) from error
        except SnapbackError:
            # Of a connection that does not count all memory none is created.
            self._hang_up()
            raise
        return sock

    def _dialled(self, timeout_s: float) -> socket.socket:
        sock = socket.socket(socket.AF_UNIX, _KIND)
        try:
            sock.settimeout(timeout_s)
            with opened(open_root(self._path.parent)) as directory:
                sock.connect(f"/proc/self/fd/{directory}/{self._path.name}")
        except BaseException:
            sock.close()
            raise
        return sock

    def _exchange(
        self, sock: socket.socket, request: Create | Adopt | Release, beside: tuple[int, ...] = ()
    ) -> tuple[int, list[int]]:
        """Send and receive. _Disconnected, and what the other end answers."""
        descriptors: list[int] = []
        try:
            send(sock, encode_msgpack(request), beside)
            data, descriptors = self._inbox.receive(sock)
            if not data:
                raise InvalidMessage("it hung up")
            reply = decode_msgpack(data, _REPLY)
            wanted = int(isinstance(request, Create) and isinstance(reply, Made))
            if len(descriptors) != wanted:
                raise InvalidMessage(f"{len(descriptors)} descriptors came, not {wanted}")
        except (OSError, InvalidMessage) as error:
            # What was made has no name here: it is released with the connection.
            close_all(descriptors)
            self._hang_up()
            raise self._disconnected(error) from error
        if isinstance(reply, Refused):
            raise _error_of(reply.failure)
        return reply.id, descriptors

    def _hang_up(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _disconnected(self, error: object) -> _Disconnected:
        return _Disconnected(
            f"the memory of the device cannot be had from {self._path}: {error}",
            next_step="look whether the GPU memory service of the node runs",
        )


class _Disconnected(DeviceError):
    """The node's GMS does not answer."""

    reason = DeviceError.reason
    retryable = True


def _error_of(failure: Failure) -> SnapbackError:
    if failure.reason == OutOfDeviceMemory.reason:
        return OutOfDeviceMemory(failure.message, next_step=failure.next_step, **failure.values)
    return RemoteFailure(failure)


class ClaimedDevice(MemfdDevice):
    """A simulated device of a claim, in memory of the node's GMS."""

    def __init__(self, folder: Path, ordinal: int) -> None:
        """Read what a folder says of a device; its number in this process is `ordinal`."""
        with opened(open_root(folder)) as directory:
            data = read_bounded(directory, DEVICE_FILE, MAX_FILE_BYTES)
        found = decode_json(data, DeviceFile)
        info = simulated_info(found.uuid, ordinal, found.product, found.capacity, found.granularity)
        self._source = ClaimedMemory(folder / MEMORY_SOCKET)
        super().__init__(replace(info, is_shared=True), self._source)

    def free(self) -> int:
        said = self._source.free()
        return super().free() if said is None else said

    def close(self) -> None:
        super().close()
        self._source.close()


def claimed_devices(folder: Path) -> list[ClaimedDevice]:
    """Open the devices of this container, in the order of their numbers. UnknownDevice."""
    names = [each.name for each in folder.iterdir()] if folder.is_dir() else []
    numbers = sorted(int(name) for name in names if name.isascii() and name.isdigit())
    if not 0 < len(numbers) <= MAX_DEVICES:
        raise UnknownDevice(
            f"there are {len(numbers)} simulated devices in {folder}",
            next_step="name the claim of the pod in resources.claims of this container",
        )
    return [ClaimedDevice(folder / str(number), number) for number in numbers]
