"""SnapshotContent: the record of one artifact, which outlives its Snapshot."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, ClassVar, Literal

from msgspec import Meta

from snapshot_api import kind
from snapshot_api.kind import Column, Kind, Version
from snapshot_api.meta import Conditions, ObjectMeta, OrderStatus
from snapshot_api.schema.marks import IMMUTABLE, Rule, never_falls, set_once
from snapshot_api.v1alpha1.snapshot import ONE_SOURCE, ArtifactSource, PodSource
from snapshot_api.well_known import GROUP, OURS
from snapshot_shared.errors import Failure
from snapshot_shared.model import Model
from snapshot_shared.orders import (
    Bytes,
    DeviceRef,
    Digest,
    Driver,
    Label,
    Name,
    NodeStr,
    PartResult,
    SourcePolicy,
    UidStr,
    VectorEntry,
)
from snapshot_shared.transitions import Capture


class SnapshotRef(Model, omit_defaults=False):
    """The snapshot that a content belongs to."""

    namespace: Label
    """The namespace of the Snapshot."""
    name: Name
    """The name of the Snapshot."""
    uid: UidStr
    """The uid of the Snapshot."""


class ContentSource(Model):
    """The captured pod, its node and its devices, fixed at binding; or an artifact that exists."""

    RULES: ClassVar = (
        ONE_SOURCE,
        Rule("has(self.podRef) == has(self.nodeName)", "belongs to podRef", ".nodeName"),
    )

    namespace: Label
    """The namespace of the pod."""
    pod_ref: PodSource | None = None
    """The pod and the container that are captured."""
    node_name: NodeStr | None = None
    """The node of the pod."""
    devices: Annotated[list[DeviceRef], Meta(extra_json_schema={"maxItems": 64})] = []
    """The devices of the pod, in the worker's own order."""
    memory_server: bool = False
    """Whether the pod has a memory server, which says its devices."""
    seccomp_profile: Annotated[str, Meta(max_length=256)] = ""
    """The seccomp profile that the spec of the container's pod names: `RuntimeDefault`,
    `Unconfined` or `Localhost/<file>`; empty if it names none."""
    artifact: ArtifactSource | None = None
    """An artifact that exists, to be imported."""


class SnapshotContentSpec(Model):
    """The durable side of a snapshot."""

    snapshot_ref: SnapshotRef
    """The Snapshot that it belongs to."""
    source: ContentSource
    """What is captured or imported, fixed at binding."""
    source_policy: SourcePolicy = "Resume"
    """What becomes of the worker after a capture that succeeded."""
    driver: Driver = "cooperative"
    """How the state of the process is captured."""
    deletion_policy: Literal["Delete", "Retain"] = "Delete"
    """What becomes of the artifact when this is deleted."""
    deadline_seconds: Annotated[int, Meta(ge=1, le=86400)] = 3600
    """How long after its creation the capture may take."""


class Committed(Model, omit_defaults=False):
    """The generation that readers may use: written by compare-and-swap, once."""

    generation: int
    """The attempt whose directory it is."""
    root_digest: Digest
    """SHA-256 of the root manifest."""
    bytes: Bytes
    """The size of all parts."""
    parts: Annotated[list[PartResult], Meta(extra_json_schema={"maxItems": 65})]
    """The parts, with their digests."""
    vector: Annotated[list[VectorEntry], Meta(extra_json_schema={"maxItems": 65})]
    """What each part will hold: the plan."""
    driver: Driver = "cooperative"
    """The process driver."""


class SnapshotContentStatus(Model):
    """A capture's progress and its result."""

    RULES: ClassVar = (set_once("committed"), never_falls("attempt"))

    phase: str = ""
    """The phase, for people; the conditions decide."""
    progress: str = ""
    """The parts that are complete, of all, for people."""
    size: str = ""
    """The size of the artifact, for people."""
    capture: Capture = Capture.PENDING
    """The state of the capture."""
    attempt: int = 0
    """The current attempt; it fences all orders and never falls."""
    retries: int = 0
    """How many attempts came after the first."""
    generations: list[int] = []
    """The attempts that may have left files."""
    started_at: datetime | None = None
    """When the attempt began."""
    paused_seconds: float = 0.0
    """For how long the worker was paused, in seconds; absent where it ended."""
    captured_seconds: float = 0.0
    """How long the capture took, from its first order to the sealed artifact, in seconds."""
    vector: list[VectorEntry] = []
    """What each part will hold: the plan."""
    orders: list[OrderStatus] = []
    """The orders of the current attempt, and those that are not answered."""
    obligations: list[str] = []
    """The verbs of the orders that have to be answered before this is settled."""
    committed: Committed | None = None
    """The generation that readers may use; set once."""
    readers: list[str] = []
    """The uids of the SnapshotRestores that read the artifact."""
    verifications: int = 0
    """How many verifications were requested."""
    verified: int = 0
    """How many verifications have ended."""
    doubted: int = 0
    """How many verifications had been requested when damage was last found."""
    verify_request: str = ""
    """The value of the annotation `nvidia.com/verify` that was obeyed last."""
    failure: Failure | None = None
    """Why it failed or was refused."""
    traceparent: str = ""
    """Where it belongs in its trace (W3C)."""
    conditions: Conditions = []
    """How it stands: `Ready`, `Failed` and others, each with a reason and a message."""


class SnapshotContent(Model, tag_field="kind", tag="SnapshotContent", omit_defaults=False):
    """The record of one artifact; cluster-scoped."""

    api_version: Literal["nvidia.com/v1alpha1"] = GROUP  # type: ignore[assignment]
    metadata: ObjectMeta
    spec: Annotated[SnapshotContentSpec, IMMUTABLE]
    status: SnapshotContentStatus = SnapshotContentStatus()

    @property
    def artifact_uid(self) -> str:
        """The uid that its files lie under: its own, or that of the content that made them."""
        artifact = self.spec.source.artifact
        return self.metadata.uid if artifact is None else artifact.content_uid


def _phase(value: SnapshotContent) -> str:
    return value.status.capture.value


_COLUMNS = (
    *(kind.PHASE, kind.PROGRESS, kind.SIZE),
    Column("Node", ".spec.source.nodeName", "The node of the pod that is captured"),
    *(kind.REASON, kind.AGE),
    Column("Namespace", ".spec.snapshotRef.namespace", "The namespace of its Snapshot"),
    Column("Snapshot", ".spec.snapshotRef.name", "The Snapshot that it belongs to"),
    kind.seconds("Paused(s)", ".status.pausedSeconds", "Seconds for which the worker was paused"),
    kind.seconds("Took(s)", ".status.capturedSeconds", "Seconds that the capture took"),
    *(kind.driver(".spec.driver"), kind.artifact(".status.committed.rootDigest")),
    kind.TRACE._replace(path=".status.traceparent"),
)

KIND = Kind(
    "SnapshotContent",
    OURS,
    "snapshotcontents",
    "snapcontent",
    (Version("v1alpha1", SnapshotContent, _COLUMNS),),
    _phase,
    namespaced=False,
    appliable=False,
)
