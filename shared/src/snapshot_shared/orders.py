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


class DeviceRef(msgspec.Struct, frozen=True, kw_only=True):
    """A device given to a pod: `ordinal` is the worker's own numbering, `uuid` the device.

    Where the memory server of the pod knows which device that is, `uuid` is its part, as `gpu-0`.
    """

    ordinal: Annotated[int, Meta(ge=0, le=63)]
    uuid: ShortText


class PodRef(msgspec.Struct, frozen=True, kw_only=True):
    """One incarnation of a pod, and the container in it that is meant."""

    namespace: Label
    name: Name
    uid: UidStr
    container: Label = "main"


class LayoutRef(msgspec.Struct, frozen=True, kw_only=True):
    """A committed layout of one device as GMS reports it under a fence."""

    device: ShortText
    incarnation: ShortText
    generation: Annotated[int, Meta(ge=0)]
    layout_id: ShortText
    structure_hash: ShortText
    bytes: Bytes


class VectorEntry(msgspec.Struct, frozen=True, kw_only=True):
    """What one part of a capture will hold; the vector fixes the plan."""

    part: PartStr
    ordinal: int | None = None
    layout: LayoutRef | None = None


class PartResult(msgspec.Struct, frozen=True, kw_only=True):
    """A staged part: its size and the digest of its part manifest."""

    part: PartStr
    bytes: Bytes
    digest: Digest


class Proven(msgspec.Struct, frozen=True, kw_only=True):
    """What an artifact holds, as its root manifest says; all of it was read."""

    bytes: Bytes
    parts: Annotated[list[PartResult], Meta(max_length=64)]
    vector: Annotated[list[VectorEntry], Meta(max_length=64)]
    driver: Driver


class ArtifactRef(msgspec.Struct, frozen=True, kw_only=True):
    """A committed artifact: which generation of which content, and the proof."""

    namespace: Label
    content_uid: UidStr
    generation: Attempt
    root_digest: Digest


class Order(msgspec.Struct, frozen=True, kw_only=True, tag_field="type"):
    """What all orders have. `owner` is the uid of the object that the order serves."""

    order: OrderIdStr
    attempt: Attempt
    node: NodeStr
    owner: UidStr
    deadline_s: Seconds
    not_after: float | None = None
    traceparent: ShortText = ""
    schema: int = FIRST_SCHEMA


class DrivenOrder(Order, frozen=True, kw_only=True):
    """An order about one process. Every order of one capture, or restore, names the same driver."""

    driver: Driver = "cooperative"


class RunOrder(DrivenOrder, frozen=True, kw_only=True, tag="snapback.v1.run_order"):
    """Start a pod's containers as local processes. The spec is asked for by uid and digest.

    With a driver of `PLACEHOLDER_DRIVERS` they get namespaces of their own; with `standby` as well
    the container of `pod` is a placeholder, and the others start cold.
    """

    pod: PodRef
    template_digest: Digest
    devices: list[DeviceRef] = []
    standby: bool = False


class StopOrder(Order, frozen=True, kw_only=True, tag="snapback.v1.stop_order"):
    """End a pod's containers: SIGTERM, then SIGKILL after the grace period."""

    pod: PodRef
    grace_s: Annotated[float, Meta(ge=0, le=600)] = 5.0


class PrepareOrder(DrivenOrder, frozen=True, kw_only=True, tag="snapback.v1.prepare_order"):
    """Open a capture: gates, quiesce, fence. Ends `prepared` with the vector.

    `hold_s` bounds how long the worker may stay quiesced in all, and `dump_within_s` how long it
    waits for its dump; after either the agent releases alone.
    With `memory_server` the devices are those of the memory server in the pod. `image_digest` is
    that of the container's image, empty where it is not known. `seccomp_profile` is that of the
    container, as in `ContentSource`.
    """

    pod: PodRef
    content_uid: UidStr
    devices: list[DeviceRef] = []
    memory_server: bool = False
    image_digest: ShortText = ""
    seccomp_profile: ShortText = ""
    fence_token: ShortText
    hold_s: Seconds = 600.0
    dump_within_s: Seconds = 1800.0
    quiesce_s: Seconds = 60.0
    ready_s: Seconds = 60.0
    on_failure: OnFailure = "Resume"


class DumpOrder(DrivenOrder, frozen=True, kw_only=True, tag="snapback.v1.dump_order"):
    """Freeze, let the driver write the process part, thaw. Ends `staged`.

    `release_within_s` bounds how long the worker waits for its release after that.
    """

    pod: PodRef
    content_uid: UidStr
    vector: list[VectorEntry]
    release_within_s: Seconds = 1800.0


class SaveOrder(Order, frozen=True, kw_only=True, tag="snapback.v1.save_order"):
    """Write one device's fenced layout as a part. Reports `leased`, ends `staged`."""

    namespace: Label
    content_uid: UidStr
    part: PartStr
    layout: LayoutRef
    fence_token: ShortText
    parent: ArtifactRef | None = None
    pod: PodRef | None = None


class SealOrder(Order, frozen=True, kw_only=True, tag="snapback.v1.seal_order"):
    """Check every part of the plan and write the root manifest last. Ends `sealed`."""

    namespace: Label
    content_uid: UidStr
    pod: PodRef
    vector: list[VectorEntry]
    parts: list[PartResult]


class ReleaseOrder(DrivenOrder, frozen=True, kw_only=True, tag="snapback.v1.release_order"):
    """Let the worker go on after a capture, or end it. Ends `released`."""

    pod: PodRef
    content_uid: UidStr
    policy: SourcePolicy = "Resume"
    outcome: Literal["complete", "aborted"] = "complete"


class LoadOrder(Order, frozen=True, kw_only=True, tag="snapback.v1.load_order"):
    """Load one part into a device, hidden and verified. Ends `loaded`."""

    artifact: ArtifactRef
    part: PartStr
    part_digest: Digest
    device: ShortText
    layout_id: ShortText
    structure_hash: ShortText
    load_token: ShortText
    bytes: Bytes = 0
    pod: PodRef | None = None


class CommitOrder(Order, frozen=True, kw_only=True, tag="snapback.v1.commit_order"):
    """Publish the layout that a load left hidden. Ends `committed`."""

    device: ShortText
    load_token: ShortText
    layout_id: ShortText
    pod: PodRef | None = None


class DropOrder(Order, frozen=True, kw_only=True, tag="snapback.v1.drop_order"):
    """Forget the layout of a load, hidden or committed. Ends `dropped`, also when there is none.

    With an empty `load_token` everything on the device that no session holds is forgotten: the
    pod that had the device is gone.
    """

    device: ShortText
    load_token: ShortText = ""
    pod: PodRef | None = None


class PlaceOrder(DrivenOrder, frozen=True, kw_only=True, tag="snapback.v1.place_order"):
    """Bring the process of the process part into its placeholder, to wait there. Ends `placed`.

    It goes out beside the loads of the devices, for a driver of `PLACEHOLDER_DRIVERS`.
    """

    artifact: ArtifactRef
    pod: PodRef
    devices: list[DeviceRef] = []


class RestoreOrder(DrivenOrder, frozen=True, kw_only=True, tag="snapback.v1.restore_order"):
    """Bring a waiting worker to the state of the process part and let it go. Ends `restored`.

    What an earlier `place` has brought already is let go as it is.
    """

    artifact: ArtifactRef
    pod: PodRef
    devices: list[DeviceRef] = []
    ready_s: Seconds = 60.0


class AbortOrder(DrivenOrder, frozen=True, kw_only=True, tag="snapback.v1.abort_order"):
    """Tombstone attempts up to `attempt` of a capture, or of the restore of a pod, and compensate.

    The worker that waits for the restore is given `restore-failed` with the reason `why`. With
    `on_failure` Kill all containers of the pod of a capture are ended.
    """

    pod: PodRef | None = None
    content_uid: UidStr | None = None
    fence_token: ShortText | None = None
    devices: list[ShortText] = []
    why: Text = ""
    on_failure: OnFailure = "Resume"


class DeleteOrder(Order, frozen=True, kw_only=True, tag="snapback.v1.delete_order"):
    """Remove one named generation of one content. Ends `deleted`, also when it is gone."""

    namespace: Label
    content_uid: UidStr
    generation: Attempt


class VerifyOrder(Order, frozen=True, kw_only=True, tag="snapback.v1.verify_order"):
    """Read every byte of an artifact and compare all digests. Ends `verified`."""

    artifact: ArtifactRef


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


class StepTime(msgspec.Struct, frozen=True, kw_only=True):
    """How long a step took, in seconds; the name is one of `steps.table`."""

    step: str
    seconds: float


def _put_time(message: msgspec.Struct, at: float) -> None:
    """Set `time` to an instant as RFC 3339, or to nothing where the calendar has no such day."""
    try:
        text = instant(at)
    except (ValueError, OverflowError, OSError):
        text = ""
    # Whatever its sender wrote: no program reads it, and people must not read another time in it.
    force_setattr(message, "time", text)


class Report(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    omit_defaults=True,
    tag_field="type",
    tag="snapback.v1.report",
):
    """What became of an order. `n` counts the reports of one (order, attempt) from 1.

    `at` is seconds since the epoch on the reporter's clock, for people only. `failure` is set for
    `failed` and `rejected`. `exit_codes` are those of each container by name, `exit_code` that of
    the pod. `paused_s` of `released` is for how many seconds the worker was quiet, where it goes on
    and that was measured. The other fields belong to the kind that needs them.
    """

    order: OrderIdStr
    attempt: Annotated[int, Meta(ge=0, le=1_000_000)]
    n: Annotated[int, Meta(ge=1, le=10_000)]
    kind: ReportKind
    node: NodeStr
    service: Service
    at: float
    traceparent: ShortText = ""
    failure: Failure | None = None
    vector: list[VectorEntry] = []
    part: PartResult | None = None
    root_digest: Digest | None = None
    proven: Proven | None = None
    bytes: Bytes = 0
    generation: int | None = None
    exit_code: int | None = None
    exit_codes: dict[Label, int] = {}
    unconfirmed: bool = False
    message: Text = ""
    steps: list[StepTime] = []
    paused_s: float = 0.0
    schema: int = FIRST_SCHEMA
    time: str = ""

    def __post_init__(self) -> None:
        """Write `at` for people."""
        _put_time(self, self.at)

    @property
    def is_terminal(self) -> bool:
        """Whether only later life signs of the same pod can follow."""
        verb = self.order.partition("-")[0]
        return self.kind in ("failed", "rejected") or self.kind == TERMINAL.get(verb)


class Progress(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="snapback.v1.progress"
):
    """How far an order is. Lossy: only for people.

    `done` and `total` are bytes, and `awaits` says what the step waits for if it waits.
    """

    order: OrderIdStr
    attempt: Attempt
    node: NodeStr
    part: ShortText
    step: ShortText
    done: Bytes
    total: Bytes
    at: float
    awaits: Text = ""
    time: str = ""

    def __post_init__(self) -> None:
        """Write `at` for people."""
        _put_time(self, self.at)


class DeadLetter(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="snapback.v1.dead_letter"
):
    """A message that is no order or no report: where it came from, why, and a copy."""

    subject: Text
    node: NodeStr
    service: Literal["agent", "gms", "operator"]
    sequence: int
    at: float
    failure: Failure
    payload: bytes
    time: str = ""

    def __post_init__(self) -> None:
        """Write `at` for people."""
        _put_time(self, self.at)


class UnreadyDriver(msgspec.Struct, frozen=True, kw_only=True):
    """A process driver that a node would have and cannot use, and why."""

    driver: ShortText
    why: Failure


class Presence(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="snapback.v1.presence"
):
    """What a node says of itself every 10 s, under its key in `snap_nodes`.

    `unknown` counts what lies below its artifact root and belongs to no content, `quarantined`
    what was moved away for that. `criu` is the version of its CRIU. `unready` are drivers
    that the node would have, and that are not among its `drivers`. `verbs` are those that its agent
    carries out; an agent that names none is of a release without `place`. `seccomp_profile` is the
    one that the node has for workers of CRIU.
    """

    node: NodeStr
    boot_id: ShortText
    version: ShortText
    schemas: list[int] = msgspec.field(default_factory=lambda: [FIRST_SCHEMA])
    devices: list[PresenceDevice] = []
    drivers: list[ShortText] = []
    criu: ShortText = ""
    unready: list[UnreadyDriver] = []
    verbs: list[ShortText] = []
    seccomp_profile: ProfileName = ""
    artifact_root: Text = ""
    free_bytes: Bytes = 0
    slots: int = 1
    unknown: Annotated[int, Meta(ge=0)] = 0
    quarantined: Annotated[int, Meta(ge=0)] = 0
    at: float
    time: str = ""

    def __post_init__(self) -> None:
        """Write `at` for people."""
        _put_time(self, self.at)


class PresenceDevice(msgspec.Struct, frozen=True, kw_only=True):
    """One GPU of a node."""

    index: int
    uuid: ShortText
    product: ShortText
    capacity_bytes: Bytes


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
