"""What the service needs from the machine, and what its sockets need from the service."""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

from gms.domain.claims import ClaimableDevice, ClaimRef, PreparedClaim, ResourceClaim
from gms.domain.sessions import Peer, Session
from gms.domain.slices import FoundSlice
from gms.domain.tasks import LoadTask, SaveTask, TransferEvent
from gms.domain.transfer import FilePlan
from snapback_client.frames import Access, AllocateMany, Attach, Attached, Reply, Request
from snapshot_shared.artifact import FileEntry
from snapshot_shared.errors import NotFound
from snapshot_shared.frames import (
    DropLayoutReply,
    DropLayoutRequest,
    FenceReply,
    FenceRequest,
    ForgetReply,
    ForgetRequest,
    LoadRequest,
    PublishReply,
    PublishRequest,
    SaveRequest,
    StatusReply,
    StatusRequest,
    TransferUpdate,
    UnfenceReply,
    UnfenceRequest,
    WatchReply,
    WatchRequest,
)
from snapshot_shared.orders import LoadOrder, PodRef, SaveOrder
from snapshot_shared.spans import SpanKind

if TYPE_CHECKING:
    import asyncio


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceInfo:
    """One device. `capacity` and `granularity` are bytes; clients map its memory by its `kind`.

    `is_shared`: others than this service take memory of it, too. `capabilities` say by name what
    it can do (1) and cannot (0), and the version of its driver.
    """

    kind: str
    uuid: str
    index: int
    product: str
    capacity: int
    granularity: int
    capabilities: Mapping[str, int] = field(default_factory=dict)
    is_shared: bool = False


class Device(Protocol):
    """Memory of one GPU, by handles. Methods may block and may be called from any thread.

    Memory is taken from `create` until `release`; the service releases a handle only when every
    importer has let go, as the driver counts it.
    """

    @property
    def info(self) -> DeviceInfo:
        """What the device is."""
        ...

    @property
    def used(self) -> int:
        """Bytes that this service has taken now."""
        ...

    def free(self) -> int:
        """Return the bytes that can be taken now, as the device says."""
        ...

    def holders(self) -> Mapping[str, int]:
        """Return bytes by the names of other processes that hold them, as far as it is known."""
        ...

    def create(self, size: int) -> int:
        """Take `size` bytes, a multiple of the granularity. OutOfDeviceMemory.

        It is zeroed where the device is capable of `zeroed`; elsewhere clients clear it.
        """
        ...

    def export(self, handle: int, access: Access) -> int:
        """Return a fresh descriptor of the memory.

        RO ones cannot be mapped writable where the device is capable of `read-only-exports`.
        """
        ...

    def seal(self, handle: int) -> None:
        """Prevent new writable mappings, as far as the device is capable."""
        ...

    def release(self, handle: int) -> None:
        """Release memory."""
        ...

    def close(self) -> None:
        """Release everything."""
        ...


@dataclass(slots=True)
class Message:
    """One message to send. The sender closes the descriptors afterwards."""

    frame: Reply
    descriptors: list[int] = field(default_factory=list)

    def close(self) -> None:
        """Close the descriptors."""
        while self.descriptors:
            os.close(self.descriptors.pop())


Answer = Generator[Message | None, None, None]
"""The messages that answer a request, made in pieces; None where other clients have their turn.

A caller that stops early closes it before it ends the session.
"""


class Sessions(Protocol):
    """What the lease socket asks of the service."""

    async def attach(self, request: Attach, peer: Peer) -> Session:
        """Wait for the lock. Cancelled when the client is gone."""
        ...

    async def describe(self, session: Session) -> Attached:
        """Return what was granted."""
        ...

    async def allocate(self, session: Session, request: AllocateMany) -> Answer:
        """Make memory. Cancelled when the client is gone."""
        ...

    def call(self, session: Session, request: Request) -> Answer:
        """Answer any other request of a session."""
        ...

    def end(self, session: Session, *, unmapped: bool) -> bool:
        """End a session; True when its process must be watched because it may hold mappings."""
        ...

    def process_ended(self, session: Session) -> None:
        """Handle the end of the process of a session that was watched."""
        ...


class Control(Protocol):
    """What the gRPC socket asks of the service."""

    async def fence(self, request: FenceRequest) -> FenceReply:
        """Keep sessions off devices. DeadlineExceeded names those that did not leave."""
        ...

    async def unfence(self, request: UnfenceRequest) -> UnfenceReply:
        """End a fence."""
        ...

    async def drop_layout(self, request: DropLayoutRequest) -> DropLayoutReply:
        """Free a committed layout that no session uses."""
        ...

    async def publish(self, request: PublishRequest) -> PublishReply:
        """Commit a loaded layout."""
        ...

    async def forget(self, request: ForgetRequest) -> ForgetReply:
        """Free a loaded layout."""
        ...

    async def status(self, request: StatusRequest) -> StatusReply:
        """Return what the service holds."""
        ...

    def watch(self, request: WatchRequest) -> AsyncGenerator[WatchReply, None]:
        """Yield events until cancelled, with the number of those that a slow reader has missed."""
        ...


class StartedDevice(NamedTuple):
    """A process that serves a device: what it is asked by, and what is set when it has ended."""

    control: Control
    ended: asyncio.Event


class DeviceControls(Protocol):
    """The devices of a node, each of which a process of its own serves."""

    infos: Sequence[DeviceInfo]

    async def settled(self) -> None:
        """Wait for the devices that are served very soon."""
        ...

    def control(self, device: str) -> Control:
        """Return what a device is asked by. UnknownDevice, NotFound while it is not served."""
        ...

    async def started(self, device: str) -> StartedDevice:
        """Wait until a device is served."""
        ...


class PodWork(Protocol):
    """Has saves and loads carried out by a container of a pod."""

    def run(
        self, order: SaveOrder | LoadOrder, task: SaveTask | LoadTask
    ) -> AsyncGenerator[TransferEvent, None]:
        """Yield the events of the order, the last being TransferDone; the task is the same work.

        A save stands below the artifact root at the end, verified. Closing the iterator ends it.
        """
        ...


class Memory(NamedTuple):
    """A memory server: what it is asked, the folder of its sockets, and who moves its bytes.

    Without a saver or a loader of its pod, processes of this service do.
    """

    control: Control
    socket_dir: Path
    saver: PodWork | None = None
    loader: PodWork | None = None


class NoMemoryServer(NotFound):
    """A pod has no memory server on this node, or has it no more."""


FindMemory = Callable[[PodRef | None], Awaitable[Memory]]
"""Finds the memory server that has the devices of a pod. NoMemoryServer."""


class TransferControl(Protocol):
    """What the gRPC socket asks of transfers. Closing an iterator early leaves nothing."""

    def save(self, request: SaveRequest) -> AsyncGenerator[TransferUpdate, None]:
        """Write what is committed as a part; the last update is `done`."""
        ...

    def load(self, request: LoadRequest) -> AsyncGenerator[TransferUpdate, None]:
        """Read a part; the last update is `done`."""
        ...


class Transfers(Protocol):
    """Runs saves and loads, each in a process of its own."""

    def run(self, task: SaveTask | LoadTask) -> AsyncGenerator[TransferEvent, None]:
        """Yield the events of the process, the last being TransferDone.

        Its failure is raised with its own reason; closing the iterator ends the process.
        """
        ...


Buffers = Sequence[memoryview]
"""The memory of every allocation, by its index in a plan. The views are writable by type."""

Advance = Callable[[int], None]
"""Called with the bytes of each chunk that is done, in any thread; an error ends the transfer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Moved:
    """What a backend did. `bytes` went to or came from the files: zeros need not.

    `backend` names the way that was taken, which may be a simpler one than was asked for.
    `files` are the entries of what was written, with digests.
    """

    backend: str
    bytes: int
    files: list[FileEntry] = field(default_factory=list)

    @classmethod
    def of(cls, parts: Sequence[Moved]) -> Moved:
        """Return what several calls of a backend did as one. It may fall back in some of them."""
        ways = {part.backend for part in parts if part.bytes} or {part.backend for part in parts}
        return cls(
            backend="+".join(sorted(ways)),
            bytes=sum(part.bytes for part in parts),
            files=[entry for part in parts for entry in part.files],
        )


class ChunkNotes(Protocol):
    """Where a backend notes down what is on the disk, so that a killed save goes on from there."""

    every_bytes: int
    """How many bytes of chunks may be written and not noted, in one batch."""

    def written(self, name: str) -> Mapping[int, str]:
        """Return the digests of the chunks of a file that an earlier process has noted."""
        ...

    def tags(self, name: str) -> Mapping[int, bytes]:
        """Return nonce and tag of the chunks of a file that are noted and encrypted."""
        ...

    def note(self, chunks: Sequence[tuple[str, int, str]], tags: Sequence[bytes] = ()) -> None:
        """Note file, index and digest of chunks that were fsynced. From any thread.

        `tags` has the nonce and tag of each, where they are encrypted.
        """
        ...


class Copier(Protocol):
    """Copies between a host and a layout in the memory of a device; offsets are the layout's.

    What was begun is done after `flush`. One thread at a time.
    """

    @property
    def buffer(self) -> memoryview:
        """Pinned host memory, to and from which copies are fast."""
        ...

    def read(self, offset: int, into: memoryview) -> None:
        """Start to copy bytes out of the device."""
        ...

    def write(self, offset: int, source: memoryview) -> None:
        """Start to copy bytes into the device; they must not change until `flush`."""
        ...

    def flush(self) -> None:
        """Wait until every copy is done."""
        ...

    def lend(self, offset: int, use: Callable[[int, int], None]) -> None:
        """Call `use` with the address of an offset and the stream of the copies. From any thread.

        The context of the device is current meanwhile.
        """
        ...

    def close(self) -> None:
        """Wait, and release everything."""
        ...


class DeviceMemory(Protocol):
    """A layout in memory that only its device addresses, which is copied from and to."""

    def copier(self, size: int) -> Copier:
        """Return a stream of copies of its own, with a pinned buffer of `size` bytes."""
        ...


@runtime_checkable
class TransferBackend(Protocol):
    """Carries out file plans between memory and the directory of a part.

    A part may have a directory on each of several disks; calls for them come at the same time.
    Both methods take at most `threads` threads, and memory for a chunk each and 32 MiB besides.
    After an error no thread of theirs runs and no descriptor is open.
    """

    def write_files(
        self,
        directory: int,
        plans: Sequence[FilePlan],
        buffers: Buffers,
        *,
        threads: int,
        advance: Advance,
    ) -> Moved:
        """Create, fill and fsync every file; padding is zeros. NoSpace, ArtifactExists.

        The directory itself is the caller's to fsync.
        """
        ...

    def read_files(
        self,
        directory: int,
        plans: Sequence[FilePlan],
        entries: Sequence[FileEntry],
        buffers: Buffers,
        *,
        threads: int,
        advance: Advance,
    ) -> Moved:
        """Fill every buffer, and compare each chunk's digest.

        The memory of a chunk whose digest is that of zeros is zero already; any other has to be
        filled as a whole, without its padding.

        A plan may have only some chunks of its file: the others are not read.

        ArtifactCorrupt names file and chunk; ArtifactMissing. What is not a plain file of the
        planned size is not read. A process of a pod may write to the buffers meanwhile: a digest
        of bytes in a buffer says nothing of the file (DeviceError).
        """
        ...


@runtime_checkable
class ResumableBackend(TransferBackend, Protocol):
    """A backend that can go on with files which a killed process has left."""

    def write_missing(
        self,
        directory: int,
        plans: Sequence[FilePlan],
        buffers: Buffers,
        *,
        threads: int,
        advance: Advance,
        notes: ChunkNotes,
    ) -> Moved:
        """Do the same as `write_files`, except for chunks that are noted and verified.

        A noted chunk stays when memory and, read again, the file have its digest. A file with
        notes exists; one without does not.
        """
        ...


class DirectFile(Protocol):
    """A file that is read into the memory of a device. From any thread."""

    way: str
    """By what, for `Moved.backend`."""

    def read(self, offset: int, size: int, address: int, stream: int) -> None:
        """Read `size` bytes at `offset` of the file to an address of the device.

        They are there on return, or before anything that is put on `stream` afterwards. The context
        of the device is current. DeviceError.
        """
        ...


@runtime_checkable
class DirectBackend(TransferBackend, Protocol):
    """A backend that can also read into memory that only a device addresses, past the host.

    It makes no digests of that: what it has read is copied back and compared for it. Saves, and
    what cannot be read so, go through its other methods.
    """

    def direct(self, descriptor: int) -> AbstractContextManager[DirectFile]:
        """Prepare a plain file, open for reading, to be read within the block. DeviceError.

        At its end, also after an error, every stream that was used has been waited for.
        """
        ...


@runtime_checkable
class CopyingBackend(TransferBackend, Protocol):
    """A backend whose storage can copy what an older part has, instead of being sent it again."""

    def take_from(self, prefix: str, files: Sequence[FileEntry]) -> None:
        """Let later writes copy equal chunks of the part below `prefix` within the storage."""
        ...


class Tracer(Protocol):
    """Records a block as a span of a trace that came with a request."""

    def span(
        self,
        name: str,
        *,
        kind: SpanKind = "internal",
        parent: str = "",
        attributes: Mapping[str, str | int | float | bool] | None = None,
    ) -> AbstractContextManager[str]:
        """Open a span below `parent`, a traceparent."""
        ...


class ClusterApi(Protocol):
    """What a driver of devices asks of the API server.

    NotFound, Conflict, Forbidden, InvalidInput; StoreBusy for what passes.
    """

    async def has_claims(self) -> bool:
        """Whether the cluster has dynamic resource allocation."""
        ...

    async def node_uid(self, node: str) -> str:
        """Return the uid of a Node."""
        ...

    async def claim(self, namespace: str, name: str) -> ResourceClaim:
        """Return a ResourceClaim."""
        ...

    async def slices(self, node: str) -> tuple[list[FoundSlice], str]:
        """Return our ResourceSlices of a node, and the version of the list."""
        ...

    async def create_slice(self, body: Mapping[str, Any]) -> None:
        """Create a ResourceSlice."""
        ...

    async def replace_slice(self, name: str, body: Mapping[str, Any]) -> None:
        """Replace a ResourceSlice of the version that the body names."""
        ...

    async def delete_slice(self, name: str) -> None:
        """Delete a ResourceSlice; an absent one is success."""
        ...

    async def slices_changed(self, node: str, version: str) -> None:
        """Wait until our slices of a node may differ from the list of this version."""
        ...


class ClaimStore(Protocol):
    """What is on disk of prepared claims. Methods block."""

    def folder(self, uid: str) -> Path:
        """Return the folder of a claim, whose subfolders containers get."""
        ...

    def load(self) -> list[PreparedClaim]:
        """Return what an earlier run has prepared."""
        ...

    def save(self, claim: PreparedClaim) -> None:
        """Keep a claim that is to be prepared."""
        ...

    def publish(self, claim: PreparedClaim) -> None:
        """Have the container runtime find the devices of a claim."""
        ...

    def remove(self, uid: str) -> None:
        """Remove all of a claim, known or not."""
        ...


class MemorySockets(Protocol):
    """Serves the memory of devices in folders that containers get."""

    async def serve(self, folder: Path, device: ClaimableDevice) -> None:
        """Describe a device in a folder and serve its memory there. A repeat does nothing."""
        ...

    async def close(self, below: Path) -> None:
        """End the sockets in and below a folder; memory in use stays its users'."""
        ...


class ClaimService(Protocol):
    """What the kubelet asks of a driver."""

    async def prepare(self, ref: ClaimRef) -> PreparedClaim:
        """Return what a claim is given, once all of it is there."""
        ...

    async def unprepare(self, uid: str) -> None:
        """Take back all that a claim was given."""
        ...
