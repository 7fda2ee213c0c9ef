"""Our own kinds, which the operator alone writes.

A spec is what a user wants and never changes after creation. In a status `phase`, `progress` and
`size` are columns for people, which `views.with_columns` fills in and no decision reads; of a
DynamoCheckpoint the phase decides, too.
"""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, field

from snapshot_shared.errors import Failure
from snapshot_shared.objects.kubernetes import PodTemplateSpec
from snapshot_shared.objects.meta import (
    Amount,
    Argument,
    Condition,
    ObjectMeta,
    OrderStatus,
    Quantity,
)
from snapshot_shared.orders import (
    ArtifactRef,
    Attempt,
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
from snapshot_shared.transitions import Capture, Restore

GROUP = "nvidia.com/v1alpha1"

RESTORE_FROM = "nvidia.com/restore-from"
"""Annotation of a Pod: `<snapshot or checkpoint>` in the same namespace to restore from."""

RESTORE_CONTAINER = "nvidia.com/restore-container"
"""Annotation of a Pod: which of its containers is restored or captured; the first without it."""

RESTORE_UID = "nvidia.com/restore-from-uid"
"""Annotation of a Pod: the uid that the snapshot or checkpoint has to have."""

RESTORE_CONTENT = "nvidia.com/restore-content"
"""Annotation of a Pod: the SnapshotContent that the snapshot or checkpoint has to lead to."""

RESTORE_DIGEST = "nvidia.com/restore-digest"
"""Annotation of a Pod: the digest that the root manifest of the artifact has to have."""

RESTORE_DRIVER = "nvidia.com/restore-driver"
"""Annotation of a Pod: the driver that its source is captured with, where that is not there yet."""

CAPTURE_DRIVER = "nvidia.com/capture-driver"
"""Annotation of a Pod in standalone mode: the driver that it will be captured with.

The Job of a checkpoint has it and gives it to its pods.
"""

CAPTURABLE = "nvidia.com/capturable"
"""Annotation of a Pod: `true` has admission add to it what a capture of its worker needs."""

RESTORE_POLICY = "nvidia.com/restore-policy"
"""Annotation of a Pod: what it does in a cluster when its source is not captured yet."""

WAIT, IMMEDIATE = "WaitForCheckpoint", "Immediate"
"""Its values: wait in standby, which is the default, or start cold at once."""

STANDBY_VARIABLES = ("SNAPSHOT_RESTORE_STANDBY", "DYN_SNAPSHOT_RESTORE_STANDBY")
"""Either is 1 for a worker that waits to be restored; images for Dynamo read the second."""

CAPTURE_ON_DRAIN = "nvidia.com/capture-on-drain"
"""Label of a Pod: `true` where it is captured, and restored elsewhere, when its node is drained."""

SNAPSHOT_UID = "nvidia.com/snapshot-uid"
"""Label of a SnapshotContent, which is in no namespace and so has no owner: whose it is."""

POD_SPEC = "nvidia.com/pod-spec"
"""Annotation of a Snapshot: the spec of its pod in JSON, without the values of variables.

The operator sets it before the capture, so that a restore does without the pod. It is empty if the
spec is too long for an annotation.
"""

CHECKPOINT_ID = "nvidia.com/snapshot-checkpoint-id"
"""Label of the Job of a checkpoint, and of its pods: the identity hash."""

ABORT = "nvidia.com/abort"
"""Annotation of a SnapshotContent: who wants its capture to end now."""

VERIFY = "nvidia.com/verify"
"""Annotation of a SnapshotContent: each new value asks for one verification of its artifact."""

LOADER_REFUSED = "a checkpoint only saves; set the loader where a pod is restored from it"
"""Why a DynamoCheckpoint has no loader, in a cluster and standalone."""

Framework = Literal["vllm", "sglang", "trtllm"]
"""The inference engines that Dynamo knows."""


class IdentitySpec(
    msgspec.Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True, dict=True
):
    """What makes two checkpoints interchangeable; `snapshot_shared.identity` hashes it.

    A parallel size of 0 is 1, and a length of 0 is none, as a manifest written for Dynamo has it.
    """

    model: Annotated[str, Meta(min_length=1, max_length=512)]
    backend_framework: Framework
    dynamo_version: Annotated[str, Meta(max_length=64)] = ""
    tensor_parallel_size: Annotated[int, Meta(ge=0, le=4096)] = 1
    pipeline_parallel_size: Annotated[int, Meta(ge=0, le=4096)] = 1
    dtype: Annotated[str, Meta(max_length=64)] = ""
    max_model_len: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None
    extra_parameters: Annotated[
        dict[str, Annotated[str, Meta(extra_json_schema={"maxLength": 4096})]],
        Meta(extra_json_schema={"maxProperties": 256}),
    ] = {}


class ClientEnvVar(msgspec.Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True):
    """One environment variable of a saver or loader, as a container of Kubernetes has it."""

    name: Annotated[str, Meta(min_length=1, max_length=253)]
    value: Argument = ""
    value_from: dict[str, Any] | None = None


class VolumeMount(msgspec.Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True):
    """One mount of a saver or loader, as a container of Kubernetes has it."""

    name: Label
    mount_path: Annotated[str, Meta(min_length=1, max_length=4096, pattern=r"^[^:\x00]*\Z")]
    read_only: bool = False
    recursive_read_only: Literal["Disabled", "IfPossible", "Enabled"] | None = None
    sub_path: Annotated[str, Meta(max_length=4096)] = ""
    sub_path_expr: Annotated[str, Meta(max_length=4096)] = ""
    mount_propagation: Literal["None", "HostToContainer", "Bidirectional"] | None = None


class GmsClientSpec(msgspec.Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True):
    """What a saver or loader has beside, or instead of, its defaults. What is empty changes none.

    `command` is the whole argument vector, with no `args` behind it.
    """

    image: Annotated[str, Meta(max_length=512)] = ""
    command: Annotated[list[Argument], Meta(max_length=256)] = []
    envs: Annotated[list[ClientEnvVar], Meta(max_length=512)] = []
    env_from_secret: Annotated[str, Meta(max_length=253)] = ""
    volume_mounts: Annotated[list[VolumeMount], Meta(max_length=64)] = []


class GmsCheckpointSpec(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The containers that move the bytes of GPU memory. A checkpoint saves, its readers load."""

    saver: GmsClientSpec | None = None
    loader: GmsClientSpec | None = None


class GpuMemoryServiceSpec(
    msgspec.Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True
):
    """Whether the worker keeps its weights in the GPU memory service, and how in a cluster."""

    enabled: bool = True
    mode: Literal["intraPod", "interPod"] = "intraPod"
    device_class_name: Annotated[str, Meta(min_length=1, max_length=253)] = "gpu.nvidia.com"
    extra_client_containers: Annotated[
        list[Label], Meta(max_length=16, extra_json_schema={"uniqueItems": True})
    ] = []
    checkpoint: GmsCheckpointSpec | None = None

    @property
    def saver(self) -> GmsClientSpec | None:
        """What the saver has beside or instead of its defaults; None where that is nothing."""
        found = self.checkpoint.saver if self.checkpoint is not None else None
        return found if found != GmsClientSpec() else None


class SharedMemorySpec(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The tmpfs at /dev/shm of a worker in a cluster."""

    disabled: bool = False
    size: Quantity | Amount | None = None


class CheckpointJobSpec(
    msgspec.Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True
):
    """The worker to start and capture."""

    pod_template_spec: PodTemplateSpec
    target_container_name: Label = "main"
    shared_memory: SharedMemorySpec | None = None
    active_deadline_seconds: Annotated[int, Meta(ge=1, le=86400)] = 3600
    backoff_limit: Annotated[int, Meta(ge=0, le=100)] = 0
    ttl_seconds_after_finished: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None
    source_policy: SourcePolicy = "Terminate"
    driver: Driver = "cooperative"


class DynamoCheckpointSpec(
    msgspec.Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True
):
    """A warm worker of this identity shall exist as an artifact."""

    identity: IdentitySpec
    job: CheckpointJobSpec
    gpu_memory_service: GpuMemoryServiceSpec = GpuMemoryServiceSpec()
    deletion_policy: Literal["Delete", "Retain"] = "Delete"


class DynamoCheckpointStatus(
    msgspec.Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True
):
    """What became of it.

    `shares` names the checkpoint of the same identity whose artifact this is, if not its own.
    `location` and `storage_type` are read in what Dynamo wrote, and never written.
    """

    phase: Literal["Pending", "Creating", "Ready", "Failed", "Terminating"] = "Pending"
    checkpoint_id: str = field(name="checkpointID", default="")
    job_name: str = ""
    snapshot_name: str = ""
    content_name: str = ""
    shares: str = ""
    created_at: str = ""
    message: str = ""
    bytes: Bytes = 0
    size: str = ""
    location: str = ""
    storage_type: Literal["pvc", "s3", "oci"] | None = None
    conditions: list[Condition] = []


class DynamoCheckpoint(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    rename="camel",
    tag_field="kind",
    tag="DynamoCheckpoint",
):
    """Asks for a checkpoint of a worker; leads to a Job, a Pod, a Snapshot and its content."""

    api_version: Literal["nvidia.com/v1alpha1"] = GROUP  # type: ignore[assignment]
    metadata: ObjectMeta
    spec: DynamoCheckpointSpec
    status: DynamoCheckpointStatus = DynamoCheckpointStatus()


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
