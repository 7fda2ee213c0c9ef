"""SnapshotRestore: one container of one pod, restored from a capture."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, ClassVar, Literal

from snapshot_api import kind
from snapshot_api.kind import Column, Kind, Version
from snapshot_api.meta import Conditions, ObjectMeta, OrderStatus
from snapshot_api.schema.marks import IMMUTABLE, never_falls
from snapshot_api.well_known import GROUP, OURS
from snapshot_shared.errors import Failure
from snapshot_shared.model import Model
from snapshot_shared.orders import (
    ArtifactRef,
    DeviceRef,
    Driver,
    Label,
    Name,
    UidStr,
)
from snapshot_shared.transitions import Restore


class RestoreTarget(Model, omit_defaults=False):
    """The container to restore into: one incarnation of a pod, and which of its containers."""

    name: Name
    """The pod."""
    uid: UidStr
    """The uid; a pod of the same name that came later has another one."""
    container: Label = "main"
    """The container to restore into."""


class SnapshotRestoreSpec(Model):
    """Restore one container from a snapshot."""

    pod_ref: RestoreTarget
    """The container to restore into."""
    source: Name
    """The Snapshot or DynamoCheckpoint, in the same namespace."""


class SnapshotRestoreStatus(Model):
    """A restore's progress.

    `artifact`, `driver`, `node_name` and `devices` are fixed when an attempt begins.
    """

    RULES: ClassVar = (never_falls("attempt"),)

    phase: str = ""
    """The phase, for people; the conditions decide."""
    progress: str = ""
    """The parts that are complete, of all, for people."""
    state: Restore = Restore.PENDING
    """The state of the restore."""
    attempt: int = 0
    """The current attempt; it fences all orders and never falls."""
    retries: int = 0
    """How many attempts came after the first."""
    content_name: str = ""
    """The SnapshotContent that is to register this as a reader."""
    source_lost: bool = False
    """Whether a content that the source led to was gone before this restore could read it."""
    absent_since: datetime | None = None
    """Since when no Snapshot or DynamoCheckpoint has the name of the source; unset while one
    has."""
    artifact: ArtifactRef | None = None
    """The artifact that is read, fixed when an attempt begins."""
    driver: Driver = "cooperative"
    """The process driver."""
    node_name: str = ""
    """The node."""
    devices: list[DeviceRef] = []
    """The devices of the pod, in the worker's own order."""
    started_at: datetime | None = None
    """When the attempt began."""
    restored_seconds: float = 0.0
    """How long the restore took, from its first order to the worker that serves, in seconds."""
    orders: list[OrderStatus] = []
    """The orders of the current attempt, and those that are not answered."""
    obligations: list[str] = []
    """The verbs of the orders that have to be answered before this is settled."""
    failure: Failure | None = None
    """Why it failed or was refused."""
    traceparent: str = ""
    """Where it belongs in its trace (W3C)."""
    capture_traceparent: str = ""
    """The span of the capture of the artifact."""
    conditions: Conditions = []
    """How it stands: `Ready`, `Failed` and others, each with a reason and a message."""


class SnapshotRestore(Model, tag_field="kind", tag="SnapshotRestore", omit_defaults=False):
    """The restore of one container of one pod, made by the operator for its annotation."""

    api_version: Literal["nvidia.com/v1alpha1"] = GROUP  # type: ignore[assignment]
    metadata: ObjectMeta
    spec: Annotated[SnapshotRestoreSpec, IMMUTABLE]
    status: SnapshotRestoreStatus = SnapshotRestoreStatus()


def _phase(value: SnapshotRestore) -> str:
    return value.status.state.value


_COLUMNS = (
    Column("Pod", ".spec.podRef.name", "The pod that is restored"),
    Column("Source", ".spec.source", "What it is restored from"),
    *(kind.PHASE, kind.PROGRESS),
    Column("Node", ".status.nodeName", "The node of the pod"),
    *(kind.REASON, kind.AGE),
    kind.seconds("Took(s)", ".status.restoredSeconds", "Seconds that the restore took"),
    *(kind.driver(".status.driver"), kind.artifact(".status.contentName")),
    kind.TRACE._replace(path=".status.traceparent"),
)

KIND = Kind(
    "SnapshotRestore",
    OURS,
    "snapshotrestores",
    "srestore",
    (Version("v1alpha1", SnapshotRestore, _COLUMNS),),
    _phase,
    appliable=False,
    others=("restore", "restores"),
)


def restore_name(pod_uid: str) -> str:
    """Return the name of the restore of a pod: derived from its uid, so that it is made once."""
    return f"restore-{pod_uid}"[:63]
