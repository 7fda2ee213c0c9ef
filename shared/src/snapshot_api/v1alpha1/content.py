"""SnapshotContent: the record of one artifact, which outlives its Snapshot."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from snapshot_api.meta import Condition, ObjectMeta, OrderStatus
from snapshot_api.v1alpha1.snapshot import ArtifactSource, PodSource
from snapshot_api.well_known import GROUP
from snapshot_shared.errors import Failure
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


class SnapshotRef(msgspec.Struct, frozen=True, kw_only=True):
    """The snapshot that a content belongs to."""

    namespace: Label
    name: Name
    uid: UidStr


class ContentSource(msgspec.Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True):
    """The captured pod, its node and its devices, fixed at binding; or an artifact that exists.

    With `memory_server` the pod has one, and `prepare` says which devices it serves.
    `seccomp_profile` is that of the container as its spec names it: `RuntimeDefault`, `Unconfined`
    or `Localhost/<file>`; empty if it names none.
    """

    namespace: Label
    pod_ref: PodSource | None = None
    node_name: NodeStr | None = None
    devices: Annotated[list[DeviceRef], Meta(extra_json_schema={"maxItems": 64})] = []
    memory_server: bool = False
    seccomp_profile: Annotated[str, Meta(max_length=256)] = ""
    artifact: ArtifactSource | None = None


class SnapshotContentSpec(
    msgspec.Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True
):
    """The durable side of a snapshot."""

    snapshot_ref: SnapshotRef
    source: ContentSource
    source_policy: SourcePolicy = "Resume"
    driver: Driver = "cooperative"
    deletion_policy: Literal["Delete", "Retain"] = "Delete"
    deadline_seconds: Annotated[int, Meta(ge=1, le=86400)] = 3600


class Committed(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """The generation that readers may use: written by compare-and-swap, once."""

    generation: int
    root_digest: Digest
    bytes: Bytes
    parts: Annotated[list[PartResult], Meta(extra_json_schema={"maxItems": 65})]
    vector: Annotated[list[VectorEntry], Meta(extra_json_schema={"maxItems": 65})]
    driver: Driver = "cooperative"


class SnapshotContentStatus(
    msgspec.Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True
):
    """A capture's progress and its result.

    `attempt` is the fencing token, `retries` counts the attempts after the first. `generations`
    are the attempts that may have left files below the artifact root. `orders` holds those of the
    current attempt and what is unanswered; `obligations` are the verbs that still have to be
    answered before this object is settled. `readers` are uids of the SnapshotRestores that read
    the artifact. `verify_request` is the value of the annotation that was last obeyed,
    `verifications` counts the requests and `verified` those that have ended; `doubted` is the
    number that had been asked for when damage was last found. `paused_seconds` is for how long the
    worker was paused, `captured_seconds` how long the capture took.
    """

    phase: str = ""
    progress: str = ""
    size: str = ""
    capture: Capture = Capture.PENDING
    attempt: int = 0
    retries: int = 0
    generations: list[int] = []
    started_at: datetime | None = None
    paused_seconds: float = 0.0
    captured_seconds: float = 0.0
    vector: list[VectorEntry] = []
    orders: list[OrderStatus] = []
    obligations: list[str] = []
    committed: Committed | None = None
    readers: list[str] = []
    verifications: int = 0
    verified: int = 0
    doubted: int = 0
    verify_request: str = ""
    failure: Failure | None = None
    traceparent: str = ""
    conditions: list[Condition] = []


class SnapshotContent(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    rename="camel",
    tag_field="kind",
    tag="SnapshotContent",
):
    """The record of one artifact; cluster-scoped."""

    api_version: Literal["nvidia.com/v1alpha1"] = GROUP  # type: ignore[assignment]
    metadata: ObjectMeta
    spec: SnapshotContentSpec
    status: SnapshotContentStatus = SnapshotContentStatus()

    @property
    def artifact_uid(self) -> str:
        """The uid that its files lie under: its own, or that of the content that made them."""
        artifact = self.spec.source.artifact
        return self.metadata.uid if artifact is None else artifact.content_uid
