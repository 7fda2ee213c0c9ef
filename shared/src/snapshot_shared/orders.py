"""Work orders, the reports that answer them, and progress: the messages of the NATS streams.

An order is one request to one node: immutable, with a deterministic id (`ids.order_id`) and an
attempt that fences it. (order, attempt) is the only idempotency key. Every message is JSON with a
`type`; a new field always has a default. Deadlines are budgets in seconds that begin when the
receiver accepts; `not_after` (seconds since the epoch) may only refuse a late start.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Literal

import msgspec
from msgspec import Meta
from msgspec.structs import force_setattr

from snapshot_shared.errors import Failure
from snapshot_shared.ids import (
    DIGEST_PATTERN,
    LABEL_PATTERN,
    MAX_NAME,
    MAX_NODE_NAME,
    NAME_PATTERN,
    ORDER_PATTERN,
    PART_PATTERN,
    UID_PATTERN,
)
from snapshot_shared.model import Message
from snapshot_shared.units import instant

SCHEMAS = (1,)
"""The versions of the messages that this build reads, the newest last."""
SCHEMA_VERSION = SCHEMAS[-1]
FIRST_SCHEMA = 1
"""What a message means that names no version, in every program."""

Name = Annotated[str, Meta(pattern=NAME_PATTERN, max_length=MAX_NAME)]
NodeStr = Annotated[str, Meta(pattern=NAME_PATTERN, max_length=MAX_NODE_NAME)]
Label = Annotated[str, Meta(pattern=LABEL_PATTERN, max_length=63)]
UidStr = Annotated[str, Meta(pattern=UID_PATTERN, max_length=36)]
OrderIdStr = Annotated[str, Meta(pattern=ORDER_PATTERN, max_length=128)]
PartStr = Annotated[str, Meta(pattern=PART_PATTERN, max_length=7)]
Digest = Annotated[str, Meta(pattern=DIGEST_PATTERN, max_length=71)]
MAX_ATTEMPT = 1_000_000
Attempt = Annotated[int, Meta(ge=1, le=MAX_ATTEMPT)]
Bytes = Annotated[int, Meta(ge=0, le=2**50)]
Seconds = Annotated[float, Meta(gt=0, le=7 * 86400)]
Text = Annotated[str, Meta(max_length=4096)]
ShortText = Annotated[str, Meta(max_length=256)]

_WORD = r"[A-Za-z0-9](?:[A-Za-z0-9.-]*[A-Za-z0-9])?"
ProfileName = Annotated[str, Meta(pattern=rf"^(?:{_WORD}(?:/{_WORD})*)?\Z", max_length=63)]
"""The file of a seccomp profile below the kubelet's folder for them, or empty.

Without `_` and no longer than a label: nodes have it as one, with `_` for `/`.
"""

SourcePolicy = Literal["Resume", "Terminate"]
"""What becomes of the source worker after a capture that succeeded."""

OnFailure = Literal["Resume", "Kill"]
"""What becomes of it after one that failed."""

Driver = Literal["cooperative", "respawn", "criu", "criu+cuda"]
"""How the state of a process is captured and given back."""

PLACEHOLDER_DRIVERS: tuple[Driver, ...] = ("criu", "criu+cuda")
"""Those that bring the process itself, so that a container which waits runs none of its own."""

DEVICE_DRIVERS: tuple[Driver, ...] = ("criu+cuda",)
"""Those that bring what the process itself has on devices. What a GPU memory service has there is a
part of its own in any case."""


class DeviceRef(Message):
    """A device given to a pod: `ordinal` is the worker's own numbering, `uuid` the device.

    Where the memory server of the pod knows which device that is, `uuid` is its part, as `gpu-0`.
    """

    ordinal: Annotated[int, Meta(ge=0, le=63)]
    """The worker's own number of the device."""
    uuid: ShortText
    """The UUID of the device."""


class PodRef(Message):
    """One incarnation of a pod, and the container in it that is meant."""

    namespace: Label
    """The namespace."""
    name: Name
    """The name."""
    uid: UidStr
    """The uid; a pod of the same name that came later has another one."""
    container: Label = "main"
    """The container that is meant."""


class LayoutRef(Message):
    """A committed layout of one device as GMS reports it under a fence."""

    device: ShortText
    """The UUID of the device."""
    incarnation: ShortText
    """The life of the GMS that holds the layout."""
    generation: Annotated[int, Meta(ge=0)]
    """Rises with each commit on the device."""
    layout_id: ShortText
    """Names the layout; the same after a restore."""
    structure_hash: ShortText
    """Hash of allocations and metadata, not of contents."""
    bytes: Bytes
    """How many bytes it has."""


class VectorEntry(Message):
    """What one part of a capture will hold; the vector fixes the plan."""

    part: PartStr
    """The part: `process` or `gpu-<ordinal>`."""
    ordinal: int | None = None
    """The worker's own number of the device."""
    layout: LayoutRef | None = None
    """The layout of the device, as the fence found it."""


class PartResult(Message):
    """A staged part: its size and the digest of its part manifest."""

    part: PartStr
    """The part: `process` or `gpu-<ordinal>`."""
    bytes: Bytes
    """How many bytes it has."""
    digest: Digest
    """SHA-256 of the part manifest."""


class Proven(Message):
    """What an artifact holds, as its root manifest says; all of it was read."""

    bytes: Bytes
    """How many bytes it has."""
    parts: Annotated[list[PartResult], Meta(max_length=64)]
    """All staged parts, with their digests."""
    vector: Annotated[list[VectorEntry], Meta(max_length=64)]
    """What each part will hold: the plan."""
    driver: Driver
    """The process driver."""


class ArtifactRef(Message):
    """A committed artifact: which generation of which content, and the proof."""

    namespace: Label
    """The namespace whose folder it is in."""
    content_uid: UidStr
    """The uid of the SnapshotContent that has the files."""
    generation: Attempt
    """The attempt whose directory it is."""
    root_digest: Digest
    """SHA-256 of the root manifest."""


class Order(Message, tag_field="type"):
    """What all orders have."""

    order: OrderIdStr
    """The id: `<verb>-<owner uid>[-<part>]`."""
    attempt: Attempt
    """Fences the order: a higher one always wins."""
    node: NodeStr
    """The node."""
    owner: UidStr
    """The uid of the object that the order serves."""
    deadline_s: Seconds
    """The budget; it begins when the receiver accepts."""
    not_after: float | None = None
    """No start later than this, in seconds since the epoch."""
    traceparent: ShortText = ""
    """Where it belongs in its trace (W3C)."""
    schema: int = FIRST_SCHEMA
    """The version of the schema."""


class DrivenOrder(Order):
    """An order about one process. Every order of one capture, or restore, names the same driver."""

    driver: Driver = "cooperative"
    """The process driver."""


class RunOrder(DrivenOrder, tag="snapback.v1.run_order"):
    """Start a pod's containers as local processes. The spec is asked for by uid and digest.

    With a driver of `PLACEHOLDER_DRIVERS` they get namespaces of their own; with `standby` as well
    the container of `pod` is a placeholder, and the others start cold.
    """

    pod: PodRef
    """The pod."""
    template_digest: Digest
    """SHA-256 of the pod's spec, which the agent asks for."""
    devices: list[DeviceRef] = []
    """The devices that the pod gets."""
    standby: bool = False
    """Start the worker waiting, to be restored."""


class StopOrder(Order, tag="snapback.v1.stop_order"):
    """End a pod's containers: SIGTERM, then SIGKILL after the grace period."""

    pod: PodRef
    """The pod."""
    grace_s: Annotated[float, Meta(ge=0, le=600)] = 5.0
    """How long after SIGTERM comes SIGKILL."""


class PrepareOrder(DrivenOrder, tag="snapback.v1.prepare_order"):
    """Open a capture: gates, quiesce, fence. Ends `prepared` with the vector.

    `hold_s` bounds how long the worker may stay quiesced in all, and `dump_within_s` how long it
    waits for its dump; after either the agent releases alone.
    With `memory_server` the devices are those of the memory server in the pod. `image_digest` is
    that of the container's image, empty where it is not known. `seccomp_profile` is that of the
    container, as in `ContentSource`.
    """

    pod: PodRef
    """The pod."""
    content_uid: UidStr
    """The SnapshotContent that the capture serves."""
    devices: list[DeviceRef] = []
    """The devices, in the worker's own order."""
    memory_server: bool = False
    """Whether the pod has a memory server, which says its devices."""
    image_digest: ShortText = ""
    """The digest of the image that the container was started from."""
    seccomp_profile: ShortText = ""
    """The seccomp profile that the spec of the container's pod names: `RuntimeDefault`,
    `Unconfined` or `Localhost/<file>`; empty if it names none."""
    fence_token: ShortText
    """Names the fence on the devices."""
    hold_s: Seconds = 600.0
    """How long the worker may stay quiesced in all; then the agent releases it alone."""
    dump_within_s: Seconds = 1800.0
    """How long the worker waits for its dump; then the agent releases it alone."""
    quiesce_s: Seconds = 60.0
    """How long the worker may take to become quiet."""
    ready_s: Seconds = 60.0
    """How long to wait for the worker to be ready."""
    on_failure: OnFailure = "Resume"
    """What becomes of the worker when the capture fails."""


class DumpOrder(DrivenOrder, tag="snapback.v1.dump_order"):
    """Freeze, let the driver write the process part, thaw. Ends `staged`.

    `release_within_s` bounds how long the worker waits for its release after that.
    """

    pod: PodRef
    """The pod."""
    content_uid: UidStr
    """The SnapshotContent that the capture serves."""
    vector: list[VectorEntry]
    """What each part will hold: the plan."""
    release_within_s: Seconds = 1800.0
    """How long the worker waits for its release after its dump; then the agent releases it
    alone."""


class SaveOrder(Order, tag="snapback.v1.save_order"):
    """Write one device's fenced layout as a part. Reports `leased`, ends `staged`."""

    namespace: Label
    """The namespace."""
    content_uid: UidStr
    """The SnapshotContent that the capture serves."""
    part: PartStr
    """The part: `process` or `gpu-<ordinal>`."""
    layout: LayoutRef
    """The layout of the device, as the fence found it."""
    fence_token: ShortText
    """Names the fence on the devices."""
    parent: ArtifactRef | None = None
    """An artifact of the same layout: files that did not change are shared."""
    pod: PodRef | None = None
    """The pod."""


class SealOrder(Order, tag="snapback.v1.seal_order"):
    """Check every part of the plan and write the root manifest last. Ends `sealed`."""

    namespace: Label
    """The namespace."""
    content_uid: UidStr
    """The SnapshotContent that the capture serves."""
    pod: PodRef
    """The pod."""
    vector: list[VectorEntry]
    """What each part will hold: the plan."""
    parts: list[PartResult]
    """All staged parts, with their digests."""


class ReleaseOrder(DrivenOrder, tag="snapback.v1.release_order"):
    """Let the worker go on after a capture, or end it. Ends `released`."""

    pod: PodRef
    """The pod."""
    content_uid: UidStr
    """The SnapshotContent that the capture serves."""
    policy: SourcePolicy = "Resume"
    """What becomes of the worker after its capture."""
    outcome: Literal["complete", "aborted"] = "complete"
    """How the capture ended."""


class LoadOrder(Order, tag="snapback.v1.load_order"):
    """Load one part into a device, hidden and verified. Ends `loaded`."""

    artifact: ArtifactRef
    """The committed artifact that is read."""
    part: PartStr
    """The part: `process` or `gpu-<ordinal>`."""
    part_digest: Digest
    """SHA-256 of the part manifest, as the root manifest has it."""
    device: ShortText
    """The UUID of the device."""
    layout_id: ShortText
    """Names the layout; the same after a restore."""
    structure_hash: ShortText
    """Hash of allocations and metadata, not of contents."""
    load_token: ShortText
    """Names the load, and the layout that it leaves hidden."""
    bytes: Bytes = 0
    """How many bytes will be read; 0 when unknown."""
    pod: PodRef | None = None
    """The pod."""


class CommitOrder(Order, tag="snapback.v1.commit_order"):
    """Publish the layout that a load left hidden. Ends `committed`."""

    device: ShortText
    """The UUID of the device."""
    load_token: ShortText
    """Names the load, and the layout that it leaves hidden."""
    layout_id: ShortText
    """Names the layout; the same after a restore."""
    pod: PodRef | None = None
    """The pod."""


class DropOrder(Order, tag="snapback.v1.drop_order"):
    """Forget the layout of a load, hidden or committed. Ends `dropped`, also when there is none.

    With an empty `load_token` everything on the device that no session holds is forgotten: the
    pod that had the device is gone.
    """

    device: ShortText
    """The UUID of the device."""
    load_token: ShortText = ""
    """The load; empty: everything that no session holds."""
    pod: PodRef | None = None
    """The pod."""


class PlaceOrder(DrivenOrder, tag="snapback.v1.place_order"):
    """Bring the process of the process part into its placeholder, to wait there. Ends `placed`.

    It goes out beside the loads of the devices, for a driver of `PLACEHOLDER_DRIVERS`.
    """

    artifact: ArtifactRef
    """The committed artifact that is read."""
    pod: PodRef
    """The pod."""
    devices: list[DeviceRef] = []
    """The devices, in the worker's own order."""


class RestoreOrder(DrivenOrder, tag="snapback.v1.restore_order"):
    """Bring a waiting worker to the state of the process part and let it go. Ends `restored`.

    What an earlier `place` has brought already is let go as it is.
    """

    artifact: ArtifactRef
    """The committed artifact that is read."""
    pod: PodRef
    """The pod."""
    devices: list[DeviceRef] = []
    """The devices, in the worker's own order."""
    ready_s: Seconds = 60.0
    """How long to wait for the worker to be ready."""


class AbortOrder(DrivenOrder, tag="snapback.v1.abort_order"):
    """Tombstone attempts up to `attempt` of a capture, or of the restore of a pod, and compensate.

    The worker that waits for the restore is given `restore-failed` with the reason `why`. With
    `on_failure` Kill all containers of the pod of a capture are ended.
    """

    pod: PodRef | None = None
    """The pod."""
    content_uid: UidStr | None = None
    """The SnapshotContent that the capture serves."""
    fence_token: ShortText | None = None
    """Names the fence on the devices."""
    devices: list[ShortText] = []
    """The UUIDs of the devices whose fence or load ends."""
    why: Text = ""
    """The reason, for people."""
    on_failure: OnFailure = "Resume"
    """What becomes of the worker when the capture fails."""


class DeleteOrder(Order, tag="snapback.v1.delete_order"):
    """Remove one named generation of one content. Ends `deleted`, also when it is gone."""

    namespace: Label
    """The namespace."""
    content_uid: UidStr
    """The SnapshotContent that the capture serves."""
    generation: Attempt
    """The attempt whose directory it is."""


class VerifyOrder(Order, tag="snapback.v1.verify_order"):
    """Read every byte of an artifact and compare all digests. Ends `verified`."""

    artifact: ArtifactRef
    """The committed artifact that is read."""


AgentOrder = (
    RunOrder
    | StopOrder
    | PrepareOrder
    | DumpOrder
    | SealOrder
    | ReleaseOrder
    | PlaceOrder
    | RestoreOrder
    | AbortOrder
    | DeleteOrder
    | VerifyOrder
)
GmsOrder = SaveOrder | LoadOrder | CommitOrder | DropOrder | AbortOrder
AnyOrder = (
    RunOrder
    | StopOrder
    | PrepareOrder
    | DumpOrder
    | SaveOrder
    | SealOrder
    | ReleaseOrder
    | LoadOrder
    | CommitOrder
    | DropOrder
    | PlaceOrder
    | RestoreOrder
    | AbortOrder
    | DeleteOrder
    | VerifyOrder
)

Service = Literal["agent", "gms"]


CaptureOrder = PrepareOrder | DumpOrder | SaveOrder | SealOrder | ReleaseOrder
"""The orders of a capture. A content is the owner of each."""


def astray(order: AnyOrder) -> str:
    """Return how an order reaches beyond its pod's namespace or its owner; empty if it does not.

    No order needs two namespaces: a pod is captured into an artifact of its own namespace, and
    restored from one. A node sees neither specs nor owners, so it checks this of each order.
    """
    named = {
        name: ref.namespace
        for name in ("pod", "artifact", "parent")
        if (ref := getattr(order, name, None)) is not None
    }
    if (own := getattr(order, "namespace", None)) is not None:
        named["content"] = own
    if len(set(named.values())) > 1:
        return "its " + ", ".join(f"{name} is in {space}" for name, space in named.items())
    if isinstance(order, CaptureOrder) and order.content_uid != order.owner:
        return f"its owner is {order.owner}, and its content {order.content_uid}"
    return ""


class Envelope(msgspec.Struct, frozen=True):
    """What can be read of an order of any version."""

    attempt: int = 0
    traceparent: str = ""
    schema: int = FIRST_SCHEMA


_ORDERS: msgspec.json.Decoder[AnyOrder] = msgspec.json.Decoder(AnyOrder)
_ENVELOPES = msgspec.json.Decoder(Envelope)


def order_in(payload: bytes | msgspec.Raw) -> AnyOrder | None:
    """Return the order in a payload; None when it is of a version that is unknown here."""
    try:
        return _ORDERS.decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def envelope_of(payload: bytes | msgspec.Raw) -> Envelope:
    """Return what can be read of any order; of noise, an envelope of attempt 0."""
    try:
        return _ENVELOPES.decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return Envelope()


ReportKind = Literal[
    "accepted",
    "leased",
    "started",
    "ready",
    "exited",
    "stopped",
    "prepared",
    "staged",
    "sealed",
    "released",
    "loaded",
    "committed",
    "dropped",
    "placed",
    "restored",
    "aborted",
    "deleted",
    "verified",
    "failed",
    "rejected",
]

TERMINAL: dict[str, str] = {
    "run": "started",
    "stop": "stopped",
    "prepare": "prepared",
    "dump": "staged",
    "save": "staged",
    "seal": "sealed",
    "release": "released",
    "load": "loaded",
    "commit": "committed",
    "drop": "dropped",
    "place": "placed",
    "restore": "restored",
    "abort": "aborted",
    "delete": "deleted",
    "verify": "verified",
}
"""The report that ends a verb well. `failed` and `rejected` end any verb badly."""

CLEANING = frozenset({"release", "stop", "drop", "abort", "delete"})
"""Verbs that stay owed until they succeed, or until their node is gone."""


class StepTime(Message):
    """How long a step took, in seconds; the name is one of `steps.table`."""

    step: str
    """The step, one of those of its verb."""
    seconds: float
    """How long it took."""


def _put_time(message: msgspec.Struct, at: float) -> None:
    """Set `time` to an instant as RFC 3339, or to nothing where the calendar has no such day."""
    try:
        text = instant(at)
    except (ValueError, OverflowError, OSError):
        text = ""
    # Whatever its sender wrote: no program reads it, and people must not read another time in it.
    force_setattr(message, "time", text)


class Report(Message, omit_defaults=True, tag_field="type", tag="snapback.v1.report"):
    """What became of an order. `n` counts the reports of one (order, attempt) from 1.

    `failure` is set for `failed` and `rejected`. The other fields belong to the kind that needs
    them.
    """

    order: OrderIdStr
    """The id: `<verb>-<owner uid>[-<part>]`."""
    attempt: Annotated[int, Meta(ge=0, le=1_000_000)]
    """Fences the order: a higher one always wins."""
    n: Annotated[int, Meta(ge=1, le=10_000)]
    """Counts the reports of one (order, attempt) from 1."""
    kind: ReportKind
    """What happened; the last word of the subject."""
    node: NodeStr
    """The node."""
    service: Service
    """The service that sent it."""
    at: float
    """When, in seconds since the epoch on the sender's clock; for people only."""
    traceparent: ShortText = ""
    """Where it belongs in its trace (W3C)."""
    failure: Failure | None = None
    """Why it failed or was refused."""
    vector: list[VectorEntry] = []
    """What each part will hold: the plan."""
    part: PartResult | None = None
    """The part that was staged."""
    root_digest: Digest | None = None
    """SHA-256 of the root manifest."""
    proven: Proven | None = None
    """What a verified artifact holds: its parts, the vector and the process driver."""
    bytes: Bytes = 0
    """How many bytes were moved."""
    generation: int | None = None
    """The generation that was committed or removed."""
    exit_code: int | None = None
    """How the pod ended (`exited`)."""
    exit_codes: dict[Label, int] = {}
    """How each container ended, by its name (`exited`)."""
    unconfirmed: bool = False
    """The hold ran out and the agent let the worker go on alone."""
    message: Text = ""
    """What happened, for people."""
    steps: list[StepTime] = []
    """How long each step took."""
    paused_s: float = 0.0
    """For how long the worker was paused, in seconds."""
    schema: int = FIRST_SCHEMA
    """The version of the schema."""
    time: str = ""
    """`at` as RFC 3339, for people; no program reads it."""

    def __post_init__(self) -> None:
        """Write `at` for people."""
        _put_time(self, self.at)

    @property
    def is_terminal(self) -> bool:
        """Whether only later life signs of the same pod can follow."""
        verb = self.order.partition("-")[0]
        return self.kind in ("failed", "rejected") or self.kind == TERMINAL.get(verb)


class Progress(Message, tag_field="type", tag="snapback.v1.progress"):
    """How far an order is. Lossy: only for people."""

    order: OrderIdStr
    """The id: `<verb>-<owner uid>[-<part>]`."""
    attempt: Attempt
    """Fences the order: a higher one always wins."""
    node: NodeStr
    """The node."""
    part: ShortText
    """The part that is moved."""
    step: ShortText
    """The step, one of those of its verb."""
    done: Bytes
    """Bytes done so far."""
    total: Bytes
    """Bytes in all."""
    at: float
    """When, in seconds since the epoch on the sender's clock; for people only."""
    awaits: Text = ""
    """What the step waits for, if it waits."""
    time: str = ""
    """`at` as RFC 3339, for people; no program reads it."""

    def __post_init__(self) -> None:
        """Write `at` for people."""
        _put_time(self, self.at)


class DeadLetter(Message, tag_field="type", tag="snapback.v1.dead_letter"):
    """A message that is no order or no report: where it came from, why, and a copy."""

    subject: Text
    """The subject it came on."""
    node: NodeStr
    """The node."""
    service: Literal["agent", "gms", "operator"]
    """The service that sent it."""
    sequence: int
    """Its place in the stream."""
    at: float
    """When, in seconds since the epoch on the sender's clock; for people only."""
    failure: Failure
    """Why it failed or was refused."""
    payload: bytes
    """A copy of the message, as base64."""
    time: str = ""
    """`at` as RFC 3339, for people; no program reads it."""

    def __post_init__(self) -> None:
        """Write `at` for people."""
        _put_time(self, self.at)


class UnreadyDriver(Message):
    """A process driver that a node would have and cannot use, and why."""

    driver: ShortText
    """The process driver."""
    why: Failure
    """The reason, for people."""


class Presence(Message, tag_field="type", tag="snapback.v1.presence"):
    """What a node says of itself every 10 s, under its key in `snap_nodes`."""

    node: NodeStr
    """The node."""
    boot_id: ShortText
    """The boot of the machine; a new one means that all processes are gone."""
    version: ShortText
    """The version of the product."""
    schemas: list[int] = msgspec.field(default_factory=lambda: [FIRST_SCHEMA])
    """The versions of orders that the node understands."""
    devices: list[PresenceDevice] = []
    """The devices of the node."""
    drivers: list[ShortText] = []
    """The process drivers that this node has."""
    criu: ShortText = ""
    """The version of CRIU; empty when there is none."""
    unready: list[UnreadyDriver] = []
    """Why process drivers of this node cannot be used now."""
    verbs: list[ShortText] = []
    """The verbs of orders that the agent carries out; an older agent names none."""
    seccomp_profile: ProfileName = ""
    """The seccomp profile that the node has for workers of CRIU."""
    artifact_root: Text = ""
    """The folder of the artifacts on this node."""
    free_bytes: Bytes = 0
    """Free space below the artifact root."""
    slots: int = 1
    """How many workers are captured at a time."""
    unknown: Annotated[int, Meta(ge=0)] = 0
    """How many entries of the artifact root belong to no content."""
    quarantined: Annotated[int, Meta(ge=0)] = 0
    """How many unknown directories it has moved into quarantine."""
    at: float
    """When, in seconds since the epoch on the sender's clock; for people only."""
    time: str = ""
    """`at` as RFC 3339, for people; no program reads it."""

    def __post_init__(self) -> None:
        """Write `at` for people."""
        _put_time(self, self.at)


class PresenceDevice(Message):
    """One GPU of a node."""

    index: int
    """Its number on this node."""
    uuid: ShortText
    """The UUID of the device."""
    product: ShortText
    """The model of the device."""
    capacity_bytes: Bytes
    """The memory of the device."""


def version_gap(announced: Iterable[int]) -> str:
    """Return the versions of two programs that have none in common; empty when they have one."""
    if set(SCHEMAS) & set(announced):
        return ""
    return f"it knows message schemas {sorted(announced)}, the operator knows {list(SCHEMAS)}"


def driver_of(order: Order) -> Driver | None:
    """Return the process driver that an order names; None for a verb that needs none."""
    return order.driver if isinstance(order, DrivenOrder) else None


def service_of(order: Order) -> Service:
    """Return which service of the node carries an order out (aborts go where they are sent)."""
    return "gms" if isinstance(order, SaveOrder | LoadOrder | CommitOrder | DropOrder) else "agent"
