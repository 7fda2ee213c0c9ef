"""SnapshotRestore: one container of one pod, restored from a capture."""

from __future__ import annotations

from datetime import datetime
from typing import Literal

import msgspec

from snapshot_api.meta import Condition, ObjectMeta, OrderStatus
from snapshot_api.well_known import GROUP
from snapshot_shared.errors import Failure
from snapshot_shared.orders import (
    ArtifactRef,
    DeviceRef,
    Driver,
    Label,
    Name,
    UidStr,
)
from snapshot_shared.transitions import Restore


class RestoreTarget(msgspec.Struct, frozen=True, kw_only=True):
    """The container to restore into: one incarnation of a pod, and which of its containers."""

    name: Name
    uid: UidStr
    container: Label = "main"


class SnapshotRestoreSpec(
    msgspec.Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True
):
    """Restore one container from a snapshot. `source` names a Snapshot or DynamoCheckpoint."""

    pod_ref: RestoreTarget
    source: Name


class SnapshotRestoreStatus(
    msgspec.Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True
):
    """A restore's progress. `attempt` is its fencing token, `retries` counts those after the first.

    `content_name` asks that content to register this restore as a reader; `source_lost` is set when
    it was gone before it did, `absent_since` while nothing has the name of the source. `artifact`,
    `driver`, `node_name` and `devices` are fixed when an attempt begins. `restored_seconds` is how
    long the restore took.
    """

    phase: str = ""
    progress: str = ""
    state: Restore = Restore.PENDING
    attempt: int = 0
    retries: int = 0
    content_name: str = ""
    source_lost: bool = False
    absent_since: datetime | None = None
    artifact: ArtifactRef | None = None
    driver: Driver = "cooperative"
    node_name: str = ""
    devices: list[DeviceRef] = []
    started_at: datetime | None = None
    restored_seconds: float = 0.0
    orders: list[OrderStatus] = []
    obligations: list[str] = []
    failure: Failure | None = None
    traceparent: str = ""
    capture_traceparent: str = ""
    conditions: list[Condition] = []


class SnapshotRestore(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    rename="camel",
    tag_field="kind",
    tag="SnapshotRestore",
):
    """The restore of one container of one pod, made by the operator for its annotation."""

    api_version: Literal["nvidia.com/v1alpha1"] = GROUP  # type: ignore[assignment]
    metadata: ObjectMeta
    spec: SnapshotRestoreSpec
    status: SnapshotRestoreStatus = SnapshotRestoreStatus()


def restore_name(pod_uid: str) -> str:
    """Return the name of the restore of a pod, which follows from the pod's uid."""
    return f"restore-{pod_uid}"[:63]
