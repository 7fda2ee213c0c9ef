"""Snapshot: one capture of one running pod, or an artifact that exists."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta, field

from snapshot_api.meta import Condition, ObjectMeta
from snapshot_api.well_known import GROUP
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


class PodSource(msgspec.Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True):
    """The pod to capture: one incarnation of it, one container."""

    name: Name
    uid: UidStr | None = None
    containers: Annotated[list[Label], Meta(min_length=1, max_length=1)] = field(
        default_factory=lambda: ["main"]
    )


class ArtifactSource(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """An artifact that was retained: no content has its files below the artifact root any more.

    It lies in `<namespace>/<contentUID>/gen-<generation>`; `root_digest` is the SHA-256 of the root
    manifest there.
    """

    content_uid: UidStr = field(name="contentUID")
    generation: Attempt
    root_digest: Digest


class SnapshotSource(msgspec.Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True):
    """Where a snapshot comes from: a running pod, or an artifact that exists. One of them."""

    pod_ref: PodSource | None = None
    artifact: ArtifactSource | None = None


class SnapshotSpec(msgspec.Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True):
    """Capture one pod once, within `deadline_seconds` of the snapshot's creation.

    Snapshots with one `revision_of` are revisions of that name.
    """

    source: SnapshotSource
    source_policy: SourcePolicy = "Resume"
    driver: Driver = "cooperative"
    deletion_policy: Literal["Delete", "Retain"] = "Delete"
    deadline_seconds: Annotated[int, Meta(ge=1, le=86400)] = 3600
    revision_of: Name | None = None


class SnapshotStatus(msgspec.Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True):
    """Which content holds it, and how it stands."""

    phase: str = ""
    bound_snapshot_content_name: Annotated[
        str | None, Meta(extra_json_schema={"maxLength": 253})
    ] = None
    bytes: Bytes = 0
    size: str = ""
    conditions: list[Condition] = []


class Snapshot(
    msgspec.Struct, frozen=True, kw_only=True, rename="camel", tag_field="kind", tag="Snapshot"
):
    """Asks for one capture of one running pod."""

    api_version: Literal["nvidia.com/v1alpha1"] = GROUP  # type: ignore[assignment]
    metadata: ObjectMeta
    spec: SnapshotSpec
    status: SnapshotStatus = SnapshotStatus()
