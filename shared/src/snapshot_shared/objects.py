"""The objects of the store: our own kinds, and the Pods, Jobs and Nodes around them.

DynamoCheckpoint, Snapshot, SnapshotContent and SnapshotRestore are written by the operator alone.
Pod, Job and Node are observed facts: standalone mode writes them itself, in Kubernetes the kubelet
and its controllers do. Of Job and Pod only the fields below are honoured in standalone mode;
`manifests` refuses any other by its path. Spec is what a user wants and never changes after
creation, but for a Node that is cordoned. Times are RFC 3339.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
from msgspec import Meta, field

from snapshot_shared.errors import Failure, NotFound
from snapshot_shared.orders import (
    ArtifactRef,
    Attempt,
    Bytes,
    DeviceRef,
    Digest,
    Driver,
    Label,
    Name,
    PartResult,
    PresenceDevice,
    Report,
    SourcePolicy,
    UidStr,
    VectorEntry,
)
from snapshot_shared.transitions import Capture, Restore

GROUP = "nvidia.com/v1alpha1"
RESTORE_FROM = "nvidia.com/restore-from"
"""Annotation of a Pod: `<snapshot or checkpoint>` in the same namespace to restore from."""
TRACEPARENT = "nvidia.com/traceparent"
"""Annotation that carries the trace in which an object was applied."""
SNAPSHOT_UID = "nvidia.com/snapshot-uid"
"""Label of a SnapshotContent, which is in no namespace and so has no owner: whose it is."""
ABORT = "nvidia.com/abort"
"""Annotation of a SnapshotContent: who wants its capture to end now."""
VERIFY = "nvidia.com/verify"
"""Annotation of a SnapshotContent: each new value asks for one verification of its artifact."""
UNKNOWN_ARTIFACTS = "UnknownArtifacts"
"""Condition of a Node: something below its artifact root has no owner."""
GPU_RESOURCE = "nvidia.com/gpu"
HOSTNAME_LABEL = "kubernetes.io/hostname"

Quantity = Annotated[str, Meta(pattern=r"^[0-9]{1,15}(\.[0-9]{1,6})?(m|[kKMGTP]i?)?\Z")]
Amount = Annotated[int, Meta(ge=0, le=2**50)]
EnvName = Annotated[str, Meta(pattern=r"^[A-Za-z_][A-Za-z0-9_]{0,127}\Z")]
Argument = Annotated[str, Meta(max_length=32768, pattern=r"^[^\x00]*\Z")]
LabelKey = Annotated[str, Meta(max_length=316, pattern=r"^[A-Za-z0-9./_-]+\Z")]
LabelValue = Annotated[str, Meta(max_length=63)]
AnnotationValue = Annotated[str, Meta(max_length=16384)]
Framework = Literal["vllm", "sglang", "trtllm"]
"""The inference engines that Dynamo knows."""


class OwnerReference(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """The object that this one belongs to; it is deleted with it."""

    api_version: str
    kind: str
    name: str
    uid: UidStr
    controller: bool = True


class ObjectMeta(msgspec.Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True):
    """Identity. Everything from `uid` on is set by the store and ignored in manifests."""

    name: Name
    namespace: Label | None = None
    labels: dict[LabelKey, LabelValue] = {}
    annotations: dict[LabelKey, AnnotationValue] = {}
    uid: str = ""
    resource_version: str = ""
    generation: int = 0
    creation_timestamp: str = ""
    deletion_timestamp: str | None = None
    finalizers: list[str] = []
    owner_references: list[OwnerReference] = []


class TemplateMeta(msgspec.Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True):
    """Labels and annotations for the pods of a template."""

    labels: dict[LabelKey, LabelValue] = {}
    annotations: dict[LabelKey, AnnotationValue] = {}


class EnvVar(msgspec.Struct, frozen=True, kw_only=True):
    """One environment variable; values that come from elsewhere are not honoured standalone."""

    name: EnvName
    value: Argument = ""


class ResourceRequirements(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Limits and requests; `nvidia.com/gpu` takes whole devices, the rest is informational."""

    limits: dict[LabelKey, Quantity | Amount] = {}
    requests: dict[LabelKey, Quantity | Amount] = {}


class Container(msgspec.Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True):
    """One container. Standalone it is a local process; `image` is recorded, not pulled."""

    name: Label
    image: Annotated[str, Meta(max_length=512)] = ""
    command: Annotated[list[Argument], Meta(max_length=256)] = []
    args: Annotated[list[Argument], Meta(max_length=256)] = []
    env: Annotated[list[EnvVar], Meta(max_length=512)] = []
    working_dir: Annotated[str, Meta(max_length=4096)] = ""
    resources: ResourceRequirements = ResourceRequirements()


class PodSpec(msgspec.Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True):
    """The honoured subset of a pod's spec."""

    containers: Annotated[list[Container], Meta(min_length=1, max_length=8)]
    restart_policy: Literal["Never"] = "Never"
    node_name: Name | None = None
    node_selector: dict[LabelKey, LabelValue] = {}
    termination_grace_period_seconds: Annotated[int, Meta(ge=0, le=600)] = 5
    active_deadline_seconds: Annotated[int, Meta(ge=1, le=86400)] | None = None


class PodTemplateSpec(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """How the pods of a Job look."""

    metadata: TemplateMeta = TemplateMeta()
    spec: PodSpec


class Condition(msgspec.Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True):
    """A Kubernetes condition."""

    type: str
    status: Literal["True", "False", "Unknown"]
    reason: str
    message: str = ""
    observed_generation: int = 0
    last_transition_time: str = ""


class OrderStatus(msgspec.Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True):
    """One order as the operator remembers it on the object that it serves.

    `payload` is the order as it is published; `orders.order_in` decodes it. `state` is `ordered`,
    the kind of the last report folded, or `lost` when its node is gone. `final` is the terminal
    report. `tries` counts the attempts at a cleaning order, this one included.
    """

    order: str
    verb: str
    attempt: int
    node: str
    service: Literal["agent", "gms"]
    payload: msgspec.Raw
    ordered_at: datetime
    deadline: datetime
    state: str = "ordered"
    final: Report | None = None
    leased: bool = False
    ended_at: datetime | None = None
    tries: int = 1


class IdentitySpec(msgspec.Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True):
    """What makes two checkpoints interchangeable; `snapshot_shared.identity` hashes it."""

    model: Annotated[str, Meta(min_length=1, max_length=512)]
    backend_framework: Framework
    dynamo_version: Annotated[str, Meta(max_length=64)] = ""
    tensor_parallel_size: Annotated[int, Meta(ge=1, le=4096)] = 1
    pipeline_parallel_size: Annotated[int, Meta(ge=1, le=4096)] = 1
    dtype: Annotated[str, Meta(max_length=64)] = ""
    max_model_len: Annotated[int, Meta(ge=1, le=2**31 - 1)] | None = None
    extra_parameters: dict[str, str] = {}


class GpuMemoryServiceSpec(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Whether the worker keeps its weights in the GPU memory service."""

    enabled: bool = True


class CheckpointJobSpec(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """The worker to start and capture."""

    pod_template_spec: PodTemplateSpec
    target_container_name: Label = "main"
    active_deadline_seconds: Annotated[int, Meta(ge=1, le=86400)] = 3600
    backoff_limit: Annotated[int, Meta(ge=0, le=100)] = 0
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
    """What became of it. `phase` is only a column; the conditions decide.

    `shares` names the checkpoint of the same identity whose artifact this is, if not its own.
    """

    phase: Literal["Pending", "Creating", "Ready", "Failed"] = "Pending"
    checkpoint_id: str = field(name="checkpointID", default="")
    job_name: str = ""
    snapshot_name: str = ""
    content_name: str = ""
    shares: str = ""
    created_at: str = ""
    message: str = ""
    bytes: Bytes = 0
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
    """Capture one pod once, within `deadline_seconds` of the snapshot's creation."""

    source: SnapshotSource
    source_policy: SourcePolicy = "Resume"
    driver: Driver = "cooperative"
    deletion_policy: Literal["Delete", "Retain"] = "Delete"
    deadline_seconds: Annotated[int, Meta(ge=1, le=86400)] = 3600


class SnapshotStatus(msgspec.Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True):
    """Which content holds it, and how it stands."""

    bound_snapshot_content_name: str | None = None
    bytes: Bytes = 0
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
    """The captured pod, its node and its devices, fixed at binding; or an artifact that exists."""

    namespace: Label
    pod_ref: PodSource | None = None
    node_name: Name | None = None
    devices: list[DeviceRef] = []
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
    parts: list[PartResult]
    vector: list[VectorEntry]
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
    number that had been asked for when damage was last found.
    """

    capture: Capture = Capture.PENDING
    attempt: int = 0
    retries: int = 0
    generations: list[int] = []
    started_at: datetime | None = None
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

    `content_name` asks that content to register this restore as a reader; `artifact`, `driver`,
    `node_name` and `devices` are fixed when an attempt begins.
    """

    state: Restore = Restore.PENDING
    attempt: int = 0
    retries: int = 0
    content_name: str = ""
    artifact: ArtifactRef | None = None
    driver: Driver = "cooperative"
    node_name: str = ""
    devices: list[DeviceRef] = []
    started_at: datetime | None = None
    orders: list[OrderStatus] = []
    obligations: list[str] = []
    failure: Failure | None = None
    traceparent: str = ""
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


class JobSpec(msgspec.Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True):
    """One pod, started again when it fails, `backoff_limit` times at most."""

    template: PodTemplateSpec
    active_deadline_seconds: Annotated[int, Meta(ge=1, le=86400)] | None = None
    backoff_limit: Annotated[int, Meta(ge=0, le=100)] = 0


class JobStatus(msgspec.Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True):
    """How the pod of a Job stands."""

    active: int = 0
    ready: int = 0
    succeeded: int = 0
    failed: int = 0
    conditions: list[Condition] = []


class Job(msgspec.Struct, frozen=True, kw_only=True, rename="camel", tag_field="kind", tag="Job"):
    """A batch/v1 Job of one pod."""

    api_version: Literal["batch/v1"] = "batch/v1"
    metadata: ObjectMeta
    spec: JobSpec
    status: JobStatus = JobStatus()


class ContainerStatus(
    msgspec.Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True
):
    """A container's process: `state` is waiting, running or terminated."""

    name: str
    state: Literal["waiting", "running", "terminated"] = "waiting"
    ready: bool = False
    exit_code: int | None = None


class PodStatus(msgspec.Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True):
    """Where a pod runs and how it is."""

    phase: Literal["Pending", "Running", "Succeeded", "Failed", "Unknown"] = "Pending"
    node_name: str = ""
    devices: list[DeviceRef] = []
    message: str = ""
    reason: str = ""
    container_statuses: list[ContainerStatus] = []
    orders: list[OrderStatus] = []
    obligations: list[str] = []
    traceparent: str = ""
    conditions: list[Condition] = []


class Pod(msgspec.Struct, frozen=True, kw_only=True, rename="camel", tag_field="kind", tag="Pod"):
    """A v1 Pod; standalone its containers are local processes of its node."""

    api_version: Literal["v1"] = "v1"
    metadata: ObjectMeta
    spec: PodSpec
    status: PodStatus = PodStatus()


class NodeSpec(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What people want of a node; nothing new begins on one that is `unschedulable` (cordoned)."""

    unschedulable: bool = False


class NodeStatus(msgspec.Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True):
    """What the node's agent last said of it."""

    boot_id: str = field(name="bootID", default="")
    version: str = ""
    schemas: list[int] = []
    devices: list[PresenceDevice] = []
    drivers: list[str] = []
    artifact_root: str = ""
    slots: int = 1
    conditions: list[Condition] = []


class Node(msgspec.Struct, frozen=True, kw_only=True, rename="camel", tag_field="kind", tag="Node"):
    """A machine with an agent; the operator creates it from the agent's presence."""

    api_version: Literal["v1"] = "v1"
    metadata: ObjectMeta
    spec: NodeSpec = NodeSpec()
    status: NodeStatus = NodeStatus()


AnyObject = DynamoCheckpoint | Snapshot | SnapshotContent | SnapshotRestore | Job | Pod | Node


class Kind(NamedTuple):
    """How a kind is named, stored and decoded."""

    name: str
    api_version: str
    plural: str
    short: str
    type: type[Any]
    namespaced: bool = True
    appliable: bool = True
    others: tuple[str, ...] = ()


_ALL_KINDS = (
    Kind("DynamoCheckpoint", GROUP, "dynamocheckpoints", "dckpt", DynamoCheckpoint),
    Kind("Snapshot", GROUP, "snapshots", "snap", Snapshot),
    Kind(
        "SnapshotContent",
        GROUP,
        "snapshotcontents",
        "snapcontent",
        SnapshotContent,
        namespaced=False,
        appliable=False,
    ),
    Kind(
        "SnapshotRestore",
        GROUP,
        "snapshotrestores",
        "srestore",
        SnapshotRestore,
        appliable=False,
        others=("restore", "restores"),
    ),
    Kind("Job", "batch/v1", "jobs", "job", Job),
    Kind("Pod", "v1", "pods", "po", Pod),
    Kind("Node", "v1", "nodes", "no", Node, namespaced=False, appliable=False),
)
KINDS: dict[str, Kind] = {kind.name: kind for kind in _ALL_KINDS}


def kind_of(value: AnyObject) -> Kind:
    """Return the kind of an object."""
    return KINDS[type(value).__name__]


def find_kind(name: str) -> Kind:
    """Find a kind by its name, plural, singular, short or other name, in any case. NotFound."""
    wanted = name.lower()
    for kind in KINDS.values():
        if wanted in (kind.name.lower(), kind.plural, kind.short, *kind.others):
            return kind
    known = ", ".join(kind.plural for kind in KINDS.values())
    raise NotFound(f"no kind is called {name!r}", next_step=f"use one of: {known}")


def restore_name(pod_uid: str) -> str:
    """Return the name of the restore of a pod, which follows from the pod's uid."""
    return f"restore-{pod_uid}"[:63]


def time_of(seconds: float) -> datetime:
    """Return the time of an object's field for seconds since the epoch."""
    return datetime.fromtimestamp(seconds, UTC)


def condition(conditions: list[Condition], type_: str) -> Condition | None:
    """Find a condition by its type."""
    return next((found for found in conditions if found.type == type_), None)


def is_true(conditions: list[Condition], type_: str) -> bool:
    """Whether a condition is there and True."""
    found = condition(conditions, type_)
    return found is not None and found.status == "True"


def set_condition(conditions: list[Condition], new: Condition, now: str) -> list[Condition]:
    """Replace one condition; its transition time moves only when its status changes."""
    old = condition(conditions, new.type)
    since = old.last_transition_time if old and old.status == new.status else now
    changed = msgspec.structs.replace(new, last_transition_time=since)
    if old is None:
        return [*conditions, changed]
    return [changed if found.type == new.type else found for found in conditions]


def gpus_wanted(spec: PodSpec) -> int:
    """Return the number of whole devices that a pod's containers ask for together."""
    return sum(int(c.resources.limits.get(GPU_RESOURCE, 0)) for c in spec.containers)
