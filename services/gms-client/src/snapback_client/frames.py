"""What crosses the lease socket.

A frame is one SEQPACKET message: one msgpack map with `type` and `v`, at most `MAX_FRAME_BYTES`,
descriptors beside it. A request is answered by one reply, or by several that number themselves
(`part` of `parts`) when entries or descriptors do not fit into one message. Unknown fields are
ignored.

The first frame offers a range of versions, and is itself in the lowest of them. All that follow, in
both directions, have the highest version that both sides speak as their `v`; another is refused by
name. Who offers no range speaks version 1 alone. Version 2 differs by nothing but that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from enum import StrEnum
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta
from msgspec.structs import replace

from snapback_client.codec import MAX_FRAME_BYTES, decode_msgpack, encode_msgpack
from snapback_client.errors import (
    Failure,
    InvalidMessage,
    RemoteFailure,
    SnapbackError,
    UnsupportedVersion,
)

Bytes = Annotated[int, Meta(ge=0, le=2**50)]
Seconds = Annotated[float, Meta(gt=0, le=7 * 86400)]
ShortText = Annotated[str, Meta(max_length=256)]
Versions = tuple[Annotated[int, Meta(ge=1, le=2**15)], Annotated[int, Meta(ge=1, le=2**15)]]
"""The lowest and the highest version of a protocol that one side speaks."""

FIRST_VERSION = 1
PROTOCOL_VERSIONS: Versions = (FIRST_VERSION, 2)
LEASE_SOCKET = "gms.sock"
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
ALLOCATION_PATTERN = r"^[A-Za-z0-9_][A-Za-z0-9_.:/+@-]{0,127}\Z"
AllocationId = Annotated[str, Meta(pattern=ALLOCATION_PATTERN)]
Tag = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_.:/+@-]{0,64}\Z")]
Key = Annotated[str, Meta(min_length=1, max_length=256)]
DeviceUuid = Annotated[str, Meta(min_length=1, max_length=64)]
Token = Annotated[str, Meta(min_length=1, max_length=256)]
AllocationSize = Annotated[int, Meta(ge=1, le=2**50)]
Count = Annotated[int, Meta(ge=0)]
Wait = Annotated[float, Meta(ge=0, le=86400)]
MEMORY_S = 30.0
"""How long engines and loads wait for memory that others hold, in seconds: a process that was
killed keeps its memory until the driver has torn its context down, which takes seconds."""


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
    """An allocation as it is: `aligned` bytes are mapped, `slot` is its place in the layout.

    The names were matched against their patterns when they came to the service, and matching them
    again would take a client longer than all the rest of an answer.
    """

    id: ShortText
    size: AllocationSize
    aligned: AllocationSize
    tag: ShortText
    slot: Count


class MetadataItem(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Opaque bytes about the place `offset` in an allocation."""

    key: Key
    allocation: AllocationId
    offset: Bytes
    value: Annotated[bytes, Meta(max_length=65536)]


class _Frame(msgspec.Struct, frozen=True, kw_only=True, tag_field="type"):
    v: int = FIRST_VERSION


class Attach(_Frame, frozen=True, kw_only=True, tag="attach"):
    """The first frame: what the session is for. The answer comes when the lock is granted.

    `if_match` is the generation that a writer replaces, None when nothing is committed. `replace`
    frees that generation before the writer begins, for devices too small for two. `fence_token`
    makes the session the save of a fence, `load_token` a loader that builds a hidden layout.
    `incarnation` is said by a reader that comes back and waits for no layout that is lost: that of
    the server which held it, "" for one that is not known. `versions` are offered to the server.
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
    versions: Versions | msgspec.UnsetType = msgspec.UNSET


class AllocateMany(_Frame, frozen=True, kw_only=True, tag="allocate_many"):
    """Make all these allocations or none. Waits up to `wait_s` for memory that others hold."""

    allocations: Annotated[list[AllocationSpec], Meta(min_length=1, max_length=MAX_BATCH)]
    wait_s: Wait = 0.0


class ExportMany(_Frame, frozen=True, kw_only=True, tag="export_many"):
    """Send a fresh descriptor for each id, in this order."""

    ids: Annotated[list[ShortText], Meta(min_length=1, max_length=MAX_BATCH)]
    access: Access


class FreeMany(_Frame, frozen=True, kw_only=True, tag="free_many"):
    """Free allocations of the layout being written; the sender has unmapped them."""

    ids: Annotated[list[ShortText], Meta(min_length=1, max_length=MAX_BATCH)]


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

    @property
    def committed(self) -> GenerationRef | None:
        """The generation that is committed, None when nothing is."""
        if not self.generation:
            return None
        return GenerationRef(incarnation=self.incarnation, generation=self.generation)


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
        """Return a failure as a message."""
        return cls(**msgspec.structs.asdict(failure))

    def to_failure(self) -> Failure:
        """Return the failure."""
        return Failure(**{name: getattr(self, name) for name in Failure.__struct_fields__})


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


class _Head(msgspec.Struct, frozen=True):
    v: int = FIRST_VERSION
    versions: Versions | msgspec.UnsetType = msgspec.UNSET


_NUMBERS_BYTES = 40
"""More than the numbers of an entry and the lengths of its texts take when they are encoded."""

E = TypeVar("E")
F = TypeVar("F", bound=Request | Reply)


def negotiated(offered: Versions, spoken: Versions, protocol: str) -> int:
    """Return the highest version in both ranges. UnsupportedVersion names both."""
    version = min(offered[1], spoken[1])
    if version < max(offered[0], spoken[0]):
        raise UnsupportedVersion(
            f"the other side speaks {protocol} {_range(offered)}, and here {_range(spoken)} is "
            "spoken",
            next_step="update the older of the two",
            offered=list(offered),
            supported=list(spoken),
        )
    return version


def _range(versions: Versions) -> str:
    low, high = versions
    return f"{low}" if low == high else f"{low} to {high}"


def offered_in(request: Attach) -> Versions:
    """Return the versions that a client offers."""
    return request.versions or (request.v, request.v)


def encode_frame(frame: Request | Reply, version: int = FIRST_VERSION) -> bytes:
    """Encode one frame in a version. InvalidMessage when it is longer than a frame may be."""
    data = encode_msgpack(frame if frame.v == version else replace(frame, v=version))
    if len(data) > MAX_FRAME_BYTES:
        raise InvalidMessage(
            f"a frame of {len(data)} bytes is over the limit of {MAX_FRAME_BYTES}",
            size=len(data),
            limit=MAX_FRAME_BYTES,
        )
    return data


def decode_request(data: bytes, versions: Versions = PROTOCOL_VERSIONS) -> Request:
    """Decode what a client sent, in one of these versions. UnsupportedVersion or InvalidMessage."""
    request: Request = _decode(data, Request, versions)
    return request


def decode_reply(data: bytes, versions: Versions = PROTOCOL_VERSIONS) -> Reply:
    """Decode what the server sent. UnsupportedVersion or InvalidMessage."""
    reply: Reply = _decode(data, Reply, versions)
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
    """Return the error of a received failure, of its own class where that is known."""
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


LEASE_PROTOCOL = "lease-socket protocol"


def _decode(data: bytes, kind: Any, versions: Versions) -> Any:
    try:
        frame = decode_msgpack(data, kind)
    except InvalidMessage:
        # A later version may not decode at all; its number is then the more helpful answer.
        negotiated(_versions_of(data) or versions, versions, LEASE_PROTOCOL)
        raise
    # An error is an answer to what was offered, and may be in a version of the server's choice.
    if not isinstance(frame, ErrorReply):
        offered = offered_in(frame) if isinstance(frame, Attach) else (frame.v, frame.v)
        negotiated(offered, versions, LEASE_PROTOCOL)
    return frame


def _versions_of(data: bytes) -> Versions | None:
    try:
        head = decode_msgpack(data, _Head)
    except InvalidMessage:
        return None
    return head.versions or (head.v, head.v)


def aligned(size: int, granularity: int) -> int:
    """Return the bytes that `size` bytes take in whole granules."""
    return -(-size // granularity) * granularity
