"""What crosses the GMS sockets: lease-socket frames, and the bodies of its gRPC calls.

A lease-socket frame is one SEQPACKET message: one msgpack map with `type` and `v`, at most
`MAX_FRAME_BYTES`, descriptors beside it. A request is answered by one reply, or by several that
number themselves (`part` of `parts`) when entries or descriptors do not fit into one message.
gRPC bodies are msgpack too. Unknown fields are ignored; another `v` is refused by name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from enum import StrEnum
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from snapshot_shared.codec import MAX_FRAME_BYTES, decode_msgpack, encode_msgpack
from snapshot_shared.errors import (
    Failure,
    InvalidMessage,
    RemoteFailure,
    SnapbackError,
    UnsupportedVersion,
)
from snapshot_shared.orders import (
    Attempt,
    Bytes,
    Digest,
    Label,
    LayoutRef,
    PartStr,
    Seconds,
    ShortText,
    Text,
    UidStr,
)

PROTOCOL_VERSION = 1
LEASE_SOCKET = "gms.sock"
GRPC_SOCKET = "gms-grpc.sock"

DESCRIPTORS_PER_MESSAGE = 128
"""Descriptors beside one message. The kernel takes 253."""

MESSAGE_BUDGET = 128 * 1024
"""Bytes that a sender puts into one message: fits a socket buffer of the kernel's default size."""

MAX_BATCH = 8192
"""Entries in one frame."""

MAX_ALLOCATIONS = 32_768
"""Allocations of one layout: every one is a mapping, and a process has about 65,000."""

MAX_METADATA_BYTES = 4 * 1024 * 1024
"""Keys and values of one layout together, so that its manifest stays within its limit."""

# Not `$`, which also matches before a final newline.
AllocationId = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.:/+@-]{0,127}\Z")]
Tag = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_.:/+@-]{0,64}\Z")]
Key = Annotated[str, Meta(min_length=1, max_length=256)]
DeviceUuid = Annotated[str, Meta(min_length=1, max_length=64)]
Token = Annotated[str, Meta(min_length=1, max_length=256)]
AllocationSize = Annotated[int, Meta(ge=1, le=2**50)]
Count = Annotated[int, Meta(ge=0)]
Wait = Annotated[float, Meta(ge=0, le=86400)]


class MemoryDomain(StrEnum):
    """Which memory of a device: `kv` is dropped at sleep and never committed."""

    WEIGHTS = "weights"
    KV = "kv"


class LockMode(StrEnum):
    """What a client asks for. RW_OR_RO is RW while nothing is committed, RO after."""

    RW = "RW"
    RO = "RO"
    RW_OR_RO = "RW_OR_RO"


class Access(StrEnum):
    """What a session was granted, and how an exported descriptor may be mapped."""

    RW = "RW"
    RO = "RO"


class GenerationRef(msgspec.Struct, frozen=True, kw_only=True):
    """One committed generation of one server process: numbers begin again when it restarts."""

    incarnation: ShortText
    generation: Annotated[int, Meta(ge=1)]


class AllocationSpec(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """An allocation to make: an id of the client's choice and bytes."""

    id: AllocationId
    size: AllocationSize
    tag: Tag = ""


class AllocationInfo(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """An allocation as it is: `aligned` bytes are mapped, `slot` is its place in the layout."""

    id: AllocationId
    size: AllocationSize
    aligned: AllocationSize
    tag: Tag
    slot: Count


class MetadataItem(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Opaque bytes about the place `offset` in an allocation."""

    key: Key
    allocation: AllocationId
    offset: Bytes
    value: Annotated[bytes, Meta(max_length=65536)]


class _Frame(msgspec.Struct, frozen=True, kw_only=True, tag_field="type"):
    v: int = PROTOCOL_VERSION


class Attach(_Frame, frozen=True, kw_only=True, tag="attach"):
    """The first frame: what the session is for. The answer comes when the lock is granted.

    `if_match` is the generation that a writer replaces, None when nothing is committed. `replace`
    frees that generation before the writer begins, for devices too small for two. `fence_token`
    makes the session the save of a fence, `load_token` a loader that builds a hidden layout.
    `incarnation` is said by a reader that comes back and waits for no layout that is lost: that of
    the server which held it, "" for one that is not known.
    """

    device: DeviceUuid
    domain: MemoryDomain
    lock: LockMode
    deadline_s: Seconds
    if_match: GenerationRef | None = None
    replace: bool = False
    fence_token: Token | None = None
    load_token: Token | None = None
    client: ShortText = ""
    traceparent: ShortText = ""
    incarnation: ShortText | msgspec.UnsetType = msgspec.UNSET


class AllocateMany(_Frame, frozen=True, kw_only=True, tag="allocate_many"):
    """Make all these allocations or none. Waits up to `wait_s` for memory that is being freed."""

    allocations: Annotated[list[AllocationSpec], Meta(min_length=1, max_length=MAX_BATCH)]
    wait_s: Wait = 0.0


class ExportMany(_Frame, frozen=True, kw_only=True, tag="export_many"):
    """Send a fresh descriptor for each id, in this order."""

    ids: Annotated[list[AllocationId], Meta(min_length=1, max_length=MAX_BATCH)]
    access: Access


class FreeMany(_Frame, frozen=True, kw_only=True, tag="free_many"):
    """Free allocations of the layout being written; the sender has unmapped them."""

    ids: Annotated[list[AllocationId], Meta(min_length=1, max_length=MAX_BATCH)]


class MetadataPut(_Frame, frozen=True, kw_only=True, tag="metadata_put"):
    """Add or replace entries of the layout being written: all or none."""

    entries: Annotated[list[MetadataItem], Meta(min_length=1, max_length=MAX_BATCH)]


class MetadataGet(_Frame, frozen=True, kw_only=True, tag="metadata_get"):
    """Read entries: those named, or all when `keys` is None; of these, those below `prefix`."""

    keys: Annotated[list[Key], Meta(max_length=MAX_BATCH)] | None = None
    prefix: Annotated[str, Meta(max_length=256)] | msgspec.UnsetType = msgspec.UNSET


class ListAllocations(_Frame, frozen=True, kw_only=True, tag="list_allocations"):
    """List the session's layout in the order of its slots."""


class Commit(_Frame, frozen=True, kw_only=True, tag="commit"):
    """Publish the layout being written; the session goes on as a reader of it.

    `if_match` as in Attach. With `hidden` the layout waits under the session's load token.
    """

    if_match: GenerationRef | None = None
    hidden: bool = False
    layout_id: ShortText | None = None


class Detach(_Frame, frozen=True, kw_only=True, tag="detach"):
    """The last frame: everything that was imported is unmapped."""


class Attached(_Frame, frozen=True, kw_only=True, tag="attached"):
    """The lock is held. `generation` 0 means that nothing is committed.

    `device_kind` says how descriptors are mapped: `simulated` (also when it is absent) or `cuda`.
    """

    session: Count
    granted: Access
    device: DeviceUuid
    index: Count
    product: ShortText
    capacity: Bytes
    free: Bytes
    granularity: Annotated[int, Meta(ge=1, le=2**40)]
    incarnation: ShortText
    generation: Count = 0
    layout_id: ShortText = ""
    structure_hash: ShortText = ""
    bytes: Bytes = 0
    device_kind: ShortText | msgspec.UnsetType = msgspec.UNSET


class Allocated(_Frame, frozen=True, kw_only=True, tag="allocated"):
    """The allocations made, in the order asked for."""

    allocations: list[AllocationInfo]
    part: Count = 1
    parts: Count = 1


class Exported(_Frame, frozen=True, kw_only=True, tag="exported"):
    """One entry for each descriptor beside this message, in the same order."""

    allocations: list[AllocationInfo]
    part: Count = 1
    parts: Count = 1


class Allocations(_Frame, frozen=True, kw_only=True, tag="allocations"):
    """The session's layout."""

    allocations: list[AllocationInfo]
    part: Count = 1
    parts: Count = 1


class Metadata(_Frame, frozen=True, kw_only=True, tag="metadata"):
    """The entries found. A key that does not exist is absent."""

    entries: list[MetadataItem]
    part: Count = 1
    parts: Count = 1


class Done(_Frame, frozen=True, kw_only=True, tag="done"):
    """FreeMany, MetadataPut or Detach is carried out."""


class Committed(_Frame, frozen=True, kw_only=True, tag="committed"):
    """The layout is published, or staged when it is `hidden` (then `generation` is 0)."""

    incarnation: ShortText
    generation: Count
    layout_id: ShortText
    structure_hash: ShortText
    bytes: Bytes
    hidden: bool = False


class ErrorReply(_Frame, frozen=True, kw_only=True, tag="error"):
    """The request was not carried out; nothing changed."""

    reason: ShortText
    message: str
    retryable: bool = False
    values: dict[str, Any] = {}
    next_step: str = ""

    @classmethod
    def of(cls, failure: Failure) -> ErrorReply:
        """Carry a failure."""
        return cls(
            reason=failure.reason,
            message=failure.message,
            retryable=failure.retryable,
            values=failure.values,
            next_step=failure.next_step,
        )

    def to_failure(self) -> Failure:
        """Return the failure."""
        return Failure(
            reason=self.reason,
            message=self.message,
            retryable=self.retryable,
            values=self.values,
            next_step=self.next_step,
        )


Request = (
    Attach
    | AllocateMany
    | ExportMany
    | FreeMany
    | MetadataPut
    | MetadataGet
    | ListAllocations
    | Commit
    | Detach
)
Reply = Attached | Allocated | Exported | Allocations | Metadata | Done | Committed | ErrorReply


GRPC_SERVICE = "snapback.gms.v1.Gms"
FAILURE_TRAILER = "snapback-failure-bin"
"""Trailing metadata of a call that failed: a msgpack `Failure`."""


def grpc_method(name: str) -> str:
    """Return the path of a gRPC method, such as `Fence`."""
    return f"/{GRPC_SERVICE}/{name}"


class FenceRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Keep every session off these devices, all or none, once the present ones have left.

    Waits at most `wait_s` for them; the fence ends by itself `deadline_s` after it was asked for.
    """

    token: Token
    devices: Annotated[list[DeviceUuid], Meta(min_length=1, max_length=64)]
    wait_s: Wait
    deadline_s: Seconds
    traceparent: ShortText = ""


class FenceReply(msgspec.Struct, frozen=True, kw_only=True):
    """The fence is held; what is committed on each device, in the order asked for."""

    vector: list[LayoutRef]


class UnfenceRequest(msgspec.Struct, frozen=True, kw_only=True):
    """End a fence, or make sure that it never begins."""

    token: Token


class UnfenceReply(msgspec.Struct, frozen=True, kw_only=True):
    """`ended` is False when no such fence was active."""

    ended: bool


class DropLayoutRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Free the committed layout of a device whose users are gone.

    With `layout_id` only that one; another is StaleLayout.
    """

    device: DeviceUuid
    layout_id: ShortText | None = None


class DropLayoutReply(msgspec.Struct, frozen=True, kw_only=True):
    """`dropped` is False when nothing was committed."""

    dropped: bool


MAX_EVENTS = 256
"""Events that a server remembers."""


class StatusRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Ask what the server holds, with the latest `events` of its history."""

    events: Annotated[int, Meta(ge=0, le=MAX_EVENTS)] | msgspec.UnsetType = msgspec.UNSET


class EventKind(StrEnum):
    """What happened to the memory of a device."""

    ATTACH = "attach"
    GRANT = "grant"
    COMMIT = "commit"
    DETACH = "detach"
    DEATH = "death"
    FENCE = "fence"
    DROP = "drop"
    REFUSAL = "refusal"


class EventRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One event. `seq` counts from 1, `at_s` is monotonic: compare it with `now_s` of Status.

    `session` is the number of the client in this server, 0 where there is none. `reason` is a word
    that says which kind of it, or the reason of the error for a refusal.
    """

    seq: int
    at_s: float
    kind: EventKind
    device: str
    domain: MemoryDomain = MemoryDomain.WEIGHTS
    session: int = 0
    client: str = ""
    pid: int = 0
    reason: str = ""
    generation: int = 0
    bytes: int = 0


class SessionStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One session. `state` is active, or lingering: the socket ended and imports may remain.

    `fence` says how the end of its process is seen: a `pidfd`, or where the kernel gave none
    the end of its socket alone (`socket-only`).
    """

    session: int
    access: Access
    client: str
    pid: int
    state: str
    fence: str | msgspec.UnsetType = msgspec.UNSET


class WaitingStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One client that waits for its lock, in the order of the queue. `why` says for what."""

    lock: LockMode
    client: str
    pid: int
    why: str | msgspec.UnsetType = msgspec.UNSET


class DomainStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One memory domain of a device."""

    domain: MemoryDomain
    lock: str
    sessions: list[SessionStatus] = []
    waiting: list[WaitingStatus] = []
    layout: LayoutRef | None = None


class FenceStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A fence as it stands on one device. The token is a capability and is not shown."""

    phase: str
    ends_in_s: float


class LoadStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A layout that was loaded and is not published yet. `bytes` are charged."""

    load_token: str
    layout_id: str
    structure_hash: str
    bytes: int


class DeviceStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One device: bytes, domains, fence and loads. `retired` bytes wait for importers to let go.

    `capabilities` are what it can do, 1 or 0 by name, and the version of its driver.
    """

    uuid: str
    index: int
    product: str
    endpoint: str
    capacity: int
    used: int
    free: int
    retired: int
    domains: list[DomainStatus]
    fence: FenceStatus | None = None
    loads: list[LoadStatus] = []
    capabilities: dict[str, int] | msgspec.UnsetType = msgspec.UNSET


class StatusReply(msgspec.Struct, frozen=True, kw_only=True):
    """The whole server. `events` are oldest first, `now_s` is the clock of their `at_s`."""

    node: str
    incarnation: str
    devices: list[DeviceStatus]
    events: list[EventRecord] | msgspec.UnsetType = msgspec.UNSET
    now_s: float | msgspec.UnsetType = msgspec.UNSET


class WatchRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Follow the history after event `after`: 0 begins with what is still remembered.

    With `status` each answer has the status as it is then, the first at once.
    """

    after: Count = 0
    status: bool = False


class WatchReply(msgspec.Struct, frozen=True, kw_only=True):
    """What happened since the last answer. `missed` events were forgotten before they were read."""

    events: list[EventRecord] = []
    missed: int = 0
    status: StatusReply | None = None


class SaveRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Write what is committed on a device as a part. Cancelling the call leaves nothing.

    The part stands in `<root>/<namespace>/<content_uid>/gen-<attempt>/<part>`. Without `root` it is
    the artifact root of the service; without `part` it is `gpu-<index of the device>`. With
    `fence_token` it is the save of that fence.
    """

    device: DeviceUuid
    content_uid: UidStr
    namespace: Label = "default"
    attempt: Attempt = 1
    part: PartStr | None = None
    root: Text | None = None
    fence_token: Token | None = None
    deadline_s: Seconds = 3600.0


class LoadRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Read a part into a device, verified. Cancelling the call leaves no layout.

    The place is named as in SaveRequest. The layout waits hidden under the load token, or is
    published at once with `publish`; then one that is committed already is left as it is.
    `if_match` is the generation that it replaces, None when nothing is committed.
    """

    device: DeviceUuid
    content_uid: UidStr
    part: PartStr
    part_digest: Digest
    layout_id: ShortText
    structure_hash: ShortText
    load_token: Token
    namespace: Label = "default"
    attempt: Attempt = 1
    root: Text | None = None
    publish: bool = False
    if_match: GenerationRef | None = None
    deadline_s: Seconds = 3600.0


class PublishRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Make the layout that a load left hidden the committed one. A repeat has no effect."""

    device: DeviceUuid
    load_token: Token


class PublishReply(msgspec.Struct, frozen=True, kw_only=True):
    """What is committed now."""

    layout: LayoutRef


class ForgetRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Free what a load left hidden, and refuse its token from now on."""

    device: DeviceUuid
    load_token: Token


class ForgetReply(msgspec.Struct, frozen=True, kw_only=True):
    """It is forgotten."""


class TransferStage(StrEnum):
    """How far a save or a load is."""

    LEASED = "leased"
    PROGRESS = "progress"
    DONE = "done"


class TransferUpdate(msgspec.Struct, frozen=True, kw_only=True):
    """One step of a save or a load: bytes done, of all. The last has stage `done`.

    Then `digest` is that of the part manifest, `path` the directory of the part, and `layout` what
    was saved or loaded (generation 0 while it is hidden). `was_there` says that the layout was
    committed already and nothing was read.
    """

    stage: TransferStage
    done: Bytes = 0
    total: Bytes = 0
    digest: str = ""
    path: str = ""
    layout: LayoutRef | None = None
    was_there: bool = False


class _Head(msgspec.Struct, frozen=True):
    v: int = PROTOCOL_VERSION


_NUMBERS_BYTES = 40
"""More than the numbers of an entry and the lengths of its texts take when they are encoded."""

E = TypeVar("E")
F = TypeVar("F", bound=Request | Reply)


def encode_frame(frame: Request | Reply) -> bytes:
    """Encode one frame. InvalidMessage when it is longer than a frame may be."""
    data = encode_msgpack(frame)
    if len(data) > MAX_FRAME_BYTES:
        raise InvalidMessage(
            f"a frame of {len(data)} bytes is over the limit of {MAX_FRAME_BYTES}",
            size=len(data),
            limit=MAX_FRAME_BYTES,
        )
    return data


def decode_request(data: bytes) -> Request:
    """Decode what a client sent. UnsupportedVersion or InvalidMessage."""
    request: Request = _decode(data, Request)
    return request


def decode_reply(data: bytes) -> Reply:
    """Decode what the server sent. UnsupportedVersion or InvalidMessage."""
    reply: Reply = _decode(data, Reply)
    return reply


def batches(
    entries: Iterable[E], *, cost: Callable[[E], int], most: int = MAX_BATCH
) -> Iterator[list[E]]:
    """Cut entries into runs of at most `most` whose costs in bytes stay in `MESSAGE_BUDGET`.

    No entries are one empty run, so that there is always a message to send.
    """
    run: list[E] = []
    used = 0
    for entry in entries:
        size = cost(entry)
        if run and (len(run) >= most or used + size > MESSAGE_BUDGET):
            yield run
            run, used = [], 0
        run.append(entry)
        used += size
    yield run


def cost_of_allocation(entry: AllocationSpec | AllocationInfo) -> int:
    """Bound the encoded bytes of an allocation from above."""
    return len(entry.id) + len(entry.tag) + _NUMBERS_BYTES


def cost_of_metadata(entry: MetadataItem) -> int:
    """Bound the encoded bytes of a metadata entry from above."""
    text = len(entry.key.encode()) + len(entry.allocation)
    return text + len(entry.value) + _NUMBERS_BYTES


def error_of(failure: Failure) -> SnapbackError:
    """Return a received failure its own class again, so that callers can catch it by name."""
    kind = _known_errors().get(failure.reason)
    if kind is None:
        return RemoteFailure(failure)
    error = kind(failure.message, next_step=failure.next_step)
    error.values = failure.values
    return error


def _known_errors() -> dict[str, type[SnapbackError]]:
    known: dict[str, type[SnapbackError]] = {}
    pending = [SnapbackError]
    while pending:
        kind = pending.pop()
        pending.extend(kind.__subclasses__())
        if kind not in (SnapbackError, RemoteFailure):
            known.setdefault(kind.reason, kind)
    return known


def _decode(data: bytes, kind: Any) -> Any:
    try:
        frame = decode_msgpack(data, kind)
    except InvalidMessage:
        # A later version may not decode at all; its number is then the more helpful answer.
        _check_version(_version_of(data))
        raise
    _check_version(frame.v)
    return frame


def _version_of(data: bytes) -> int:
    try:
        return decode_msgpack(data, _Head).v
    except InvalidMessage:
        return PROTOCOL_VERSION


def _check_version(version: int) -> None:
    if version != PROTOCOL_VERSION:
        raise UnsupportedVersion(
            f"lease-socket protocol {version} is not spoken here, {PROTOCOL_VERSION} is",
            version=version,
            supported=PROTOCOL_VERSION,
        )
