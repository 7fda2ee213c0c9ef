"""The bodies of the gRPC calls of GMS, in msgpack. Unknown fields are ignored.

The frames of its lease socket are those of its client, `snapback_client.frames`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from enum import StrEnum
from typing import Annotated

import msgspec
from msgspec import Meta

from snapback_client.frames import (
    Access,
    Count,
    DeviceUuid,
    GenerationRef,
    LockMode,
    MemoryDomain,
    Token,
    Versions,
    Wait,
    negotiated,
)
from snapshot_shared.errors import Failure, InvalidMessage
from snapshot_shared.model import Message
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

_VERSIONS = re.compile(r"([0-9]{1,5})-([0-9]{1,5})")

GRPC_SOCKET = "gms-grpc.sock"

GRPC_SERVICE = "snapback.gms.v1.Gms"

GRPC_PROTOCOL = "GMS calls of version"
GRPC_VERSIONS: Versions = (1, 2)
"""The versions of calls that are spoken here. Version 2 differs from 1 only in that it is named."""

VERSIONS_HEADER = "snapback-versions"
"""Metadata of a call: the lowest and the highest version that the caller speaks, as `1-2`. A call
without it is of version 1."""

VERSION_HEADER = "snapback-version"
"""Initial metadata of an answer: its version. An answer without it is of version 1."""

FAILURE_TRAILER = "snapback-failure-bin"
"""Trailing metadata of a call that failed: a msgpack `Failure`."""


def grpc_method(name: str) -> str:
    """Give the path of a gRPC method, such as `Fence`."""
    return f"/{GRPC_SERVICE}/{name}"


def call_metadata(versions: Versions, traceparent: str) -> tuple[tuple[str, str], ...]:
    """Return the metadata of a call, which belongs to this trace if it belongs to one."""
    offered = (VERSIONS_HEADER, f"{versions[0]}-{versions[1]}")
    return (offered, ("traceparent", traceparent)) if traceparent else (offered,)


def version_of_call(metadata: Mapping[str, str | bytes], spoken: Versions) -> int:
    """Return the version in which a call is answered. UnsupportedVersion, InvalidMessage."""
    text = metadata.get(VERSIONS_HEADER, "1-1")
    found = _VERSIONS.fullmatch(text) if isinstance(text, str) else None
    if found is None:
        raise InvalidMessage(f"{VERSIONS_HEADER}={text!r:.80} is no range of versions, as 1-2")
    return negotiated((int(found[1]), int(found[2])), spoken, GRPC_PROTOCOL)


def check_answer(metadata: Mapping[str, str | bytes], versions: Versions) -> None:
    """Raise UnsupportedVersion unless an answer is of one of these versions.

    A server that names none speaks version 1 alone.
    """
    text = metadata.get(VERSION_HEADER, "1")
    version = int(text) if isinstance(text, str) and text.isdigit() and len(text) < 6 else 0
    negotiated((version, version), versions, GRPC_PROTOCOL)


class FenceRequest(Message):
    """Keep every session off these devices, all or none, once the present ones have left.

    Waits at most `wait_s` for them; the fence ends by itself `deadline_s` after it was asked for.
    """

    token: Token
    devices: Annotated[list[DeviceUuid], Meta(min_length=1, max_length=64)]
    wait_s: Wait
    deadline_s: Seconds
    traceparent: ShortText = ""


class FenceReply(Message):
    """The fence is held; what is committed on the devices that have it, in the order asked for."""

    vector: list[LayoutRef]


class UnfenceRequest(Message):
    """End a fence, or make sure that it never begins. With `device` it goes on on the others."""

    token: Token
    device: ShortText | msgspec.UnsetType = msgspec.UNSET


class UnfenceReply(Message):
    """`ended` is False when no such fence was active."""

    ended: bool


class DropLayoutRequest(Message):
    """Free the committed layout of a device whose users are gone.

    With `layout_id` only that one; another is StaleLayout.
    """

    device: DeviceUuid
    layout_id: ShortText | None = None


class DropLayoutReply(Message):
    """`dropped` is False when nothing was committed."""

    dropped: bool


MAX_EVENTS = 256
"""Events that a server remembers."""


class StatusRequest(Message):
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


class EventRecord(Message, omit_defaults=True):
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


class SessionStatus(Message):
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


class WaitingStatus(Message):
    """One client that waits for its lock, in the order of the queue. `why` says for what."""

    lock: LockMode
    client: str
    pid: int
    why: str | msgspec.UnsetType = msgspec.UNSET


class DomainStatus(Message):
    """One memory domain of a device."""

    domain: MemoryDomain
    lock: str
    sessions: list[SessionStatus] = []
    waiting: list[WaitingStatus] = []
    layout: LayoutRef | None = None


class FenceStatus(Message):
    """A fence as it stands on one device. The token is a capability and is not shown."""

    phase: str
    ends_in_s: float


class LoadStatus(Message):
    """A layout that was loaded and is not published yet. `bytes` are charged."""

    load_token: str
    layout_id: str
    structure_hash: str
    bytes: int


class DeviceStatus(Message):
    """One device: bytes, domains, fence and loads. `retired` bytes wait for importers to let go.

    `capabilities` are what it can do, 1 or 0 by name, and the version of its driver. `kind` is
    `simulated` or `cuda`; an older service says nothing of it.
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
    kind: str | msgspec.UnsetType = msgspec.UNSET


class MissingDevice(Message):
    """A device of which nothing is known now, and why."""

    uuid: str
    index: int
    failure: Failure


class StatusReply(Message):
    """The whole server. `events` are oldest first, `now_s` is the clock of their `at_s`.

    `missing` are the devices whose process does not serve or does not answer.
    """

    node: str
    incarnation: str
    devices: list[DeviceStatus]
    events: list[EventRecord] | msgspec.UnsetType = msgspec.UNSET
    now_s: float | msgspec.UnsetType = msgspec.UNSET
    missing: list[MissingDevice] | msgspec.UnsetType = msgspec.UNSET


class WatchRequest(Message):
    """Follow the history after event `after`: 0 begins with what is still remembered.

    With `status` each answer has the status as it is then, the first at once.
    """

    after: Count = 0
    status: bool = False


class WatchReply(Message):
    """What happened since the last answer. `missed` events were forgotten before they were read."""

    events: list[EventRecord] = []
    missed: int = 0
    status: StatusReply | None = None


class SaveRequest(Message):
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


class LoadRequest(Message):
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


class PublishRequest(Message):
    """Make the layout that a load left hidden the committed one. A repeat has no effect."""

    device: DeviceUuid
    load_token: Token


class PublishReply(Message):
    """What is committed now."""

    layout: LayoutRef


class ForgetRequest(Message):
    """Free what a load left, hidden or published, and refuse its token from now on.

    Without a token all layouts of the device are freed. Sessions that use them are waited for
    during `wait_s`.
    """

    device: DeviceUuid
    load_token: ShortText = ""
    wait_s: Wait | msgspec.UnsetType = msgspec.UNSET


class ForgetReply(Message):
    """It is forgotten."""


class TransferStage(StrEnum):
    """How far a save or a load is."""

    LEASED = "leased"
    PROGRESS = "progress"
    DONE = "done"


class TransferUpdate(Message):
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
