"""Snapshot: one capture of one running pod, or an artifact that exists."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from msgspec import Meta, field

from snapshot_api import kind
from snapshot_api.kind import Column, Kind, Version
from snapshot_api.meta import Conditions, ObjectMeta, is_true
from snapshot_api.schema.marks import IMMUTABLE, Rule, set_once
from snapshot_api.well_known import GROUP, OURS
from snapshot_shared.model import Model
from snapshot_shared.orders import (
    Attempt,
    Bytes,
    Digest,
    Driver,
    Label,
    Name,
    SourcePolicy,
    UidStr,
)

ONE_SOURCE = Rule(
    "has(self.podRef) != has(self.artifact)",
    "exactly one of podRef and artifact is needed",
    said="'exactly one of podRef and artifact is needed, found '"
    " + (has(self.podRef) ? 'both' : 'neither')",
)


class PodSource(Model):
    """The pod to capture: one incarnation of it, one container."""

    name: Name
    """The pod, in the namespace of the snapshot."""
    uid: UidStr | None = None
    """The uid of the pod; one of the same name that came later is refused."""
    containers: Annotated[list[Label], Meta(min_length=1, max_length=1)] = field(
        default_factory=lambda: ["main"]
    )
    """The one container to capture."""


class ArtifactSource(Model, omit_defaults=False):
    """An artifact that was retained: no content has its files below the artifact root any more.

    It lies in `<namespace>/<contentUID>/gen-<generation>`.
    """

    content_uid: UidStr = field(name="contentUID")
    """The uid of the SnapshotContent that made the files."""
    generation: Attempt
    """The attempt whose directory it is."""
    root_digest: Digest
    """SHA-256 of the root manifest."""


class SnapshotSource(Model):
    """Where a snapshot comes from: a running pod, or an artifact that exists. One of them."""

    RULES: ClassVar = (ONE_SOURCE,)

    pod_ref: PodSource | None = None
    """The running pod to capture."""
    artifact: ArtifactSource | None = None
    """An artifact that was retained, to be imported."""


class SnapshotSpec(Model):
    """Capture one pod once, within `deadline_seconds` of the snapshot's creation."""

    source: SnapshotSource
    """What to capture or import: exactly one of the two."""
    source_policy: SourcePolicy = "Resume"
    """What becomes of the worker after a capture that succeeded."""
    driver: Driver = "cooperative"
    """How the state of the process is captured."""
    deletion_policy: Literal["Delete", "Retain"] = "Delete"
    """What becomes of the artifact when this is deleted."""
    deadline_seconds: Annotated[int, Meta(ge=1, le=86400)] = 3600
    """How long after its creation the capture may take."""
    revision_of: Name | None = None
    """The name of which this is a revision, for restores of the newest."""


class SnapshotStatus(Model):
    """Which content holds it, and how it stands."""

    RULES: ClassVar = (set_once("boundSnapshotContentName"),)

    phase: str = ""
    """The phase, for people; the conditions decide."""
    bound_snapshot_content_name: Annotated[
        str | None, Meta(extra_json_schema={"maxLength": 253})
    ] = None
    """The SnapshotContent of this snapshot; set once."""
    bytes: Bytes = 0
    """The size of the artifact."""
    size: str = ""
    """The size of the artifact, for people."""
    conditions: Conditions = []
    """How it stands: `Ready`, `Failed` and others, each with a reason and a message."""


class Snapshot(Model, tag_field="kind", tag="Snapshot", omit_defaults=False):
    """Asks for one capture of one running pod."""

    api_version: Literal["nvidia.com/v1alpha1"] = GROUP  # type: ignore[assignment]
    metadata: ObjectMeta
    spec: Annotated[SnapshotSpec, IMMUTABLE]
    status: SnapshotStatus = SnapshotStatus()


def _phase(value: Snapshot) -> str:
    rows, status = value.status.conditions, value.status
    if is_true(rows, "Failed"):
        return "Failed"
    if is_true(rows, "Ready") or status.bytes:
        return "Ready"
    return "Capturing" if status.bound_snapshot_content_name else "Pending"


_COLUMNS = (
    Column("Pod", ".spec.source.podRef.name", "The pod that is captured"),
    *(kind.PHASE, kind.SIZE, kind.REASON, kind.AGE, kind.driver(".spec.driver")),
    Column(
        "Revision-Of",
        ".spec.revisionOf",
        "Of which name it is a revision",
        is_wide=True,
    ),
    *(kind.artifact(".status.boundSnapshotContentName"), kind.TRACE),
)

KIND = Kind(
    "Snapshot",
    OURS,
    "snapshots",
    "snap",
    (Version("v1alpha1", Snapshot, _COLUMNS),),
    _phase,
)
