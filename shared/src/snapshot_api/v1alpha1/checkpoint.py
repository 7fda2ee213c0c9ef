"""DynamoCheckpoint: a warm worker of an identity shall exist as an artifact."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from msgspec import Meta, field

from snapshot_api import kind
from snapshot_api.facts import PodTemplateSpec
from snapshot_api.kind import Column, Kind, Version
from snapshot_api.meta import Amount, Argument, Conditions, ObjectMeta, Quantity
from snapshot_api.schema.marks import FORBIDDEN, IMMUTABLE, UNDEFAULTED, Rule, declared_as, list_map
from snapshot_api.template import TemplateSkeleton
from snapshot_api.well_known import GROUP, OURS
from snapshot_shared.model import Model
from snapshot_shared.orders import (
    Bytes,
    Driver,
    Label,
    SourcePolicy,
)

LOADER_REFUSED = "a checkpoint only saves; set the loader where a pod is restored from it"
"""Why a DynamoCheckpoint has no loader, in a cluster and standalone."""


_NEEDS_GMS = "needs gpuMemoryService.enabled: true"

Framework = Literal["vllm", "sglang", "trtllm"]
"""The inference engines that Dynamo knows."""


class IdentitySpec(Model, dict=True):
    """What makes two checkpoints interchangeable; `snapshot_api.identity` hashes it.

    A parallel size of 0 is 1, and a length of 0 is none, as a manifest written for Dynamo has it.
    """

    model: Annotated[str, Meta(min_length=1, max_length=512)]
    """The model."""
    backend_framework: Framework
    """The inference engine."""
    dynamo_version: Annotated[str, Meta(max_length=64)] = ""
    """The version of Dynamo; empty is no part of the hash."""
    tensor_parallel_size: Annotated[int, Meta(ge=0, le=4096)] = 1
    """GPUs over which each layer is spread."""
    pipeline_parallel_size: Annotated[int, Meta(ge=0, le=4096)] = 1
    """GPUs over which the layers are spread."""
    dtype: Annotated[str, Meta(max_length=64)] = ""
    """The type of the weights."""
    max_model_len: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None
    """The longest context, in tokens."""
    extra_parameters: Annotated[
        dict[str, Annotated[str, Meta(extra_json_schema={"maxLength": 4096})]],
        Meta(extra_json_schema={"maxProperties": 256}),
    ] = {}
    """Other parameters that make workers differ."""


class ClientEnvVar(Model):
    """One environment variable of a saver or loader, as a container of Kubernetes has it."""

    name: Annotated[str, Meta(min_length=1, max_length=253)]
    """The name of the variable."""
    value: Argument = ""
    """The value."""
    value_from: dict[str, Any] | None = None
    """Where the value comes from, as in a Pod."""


class VolumeMount(Model):
    """One mount of a saver or loader, as a container of Kubernetes has it."""

    name: Label
    """The name of a volume of the pod."""
    mount_path: Annotated[str, Meta(min_length=1, max_length=4096, pattern=r"^[^:\x00]*\Z")]
    """Where it is mounted."""
    read_only: bool = False
    """Whether nothing can be written there."""
    recursive_read_only: Literal["Disabled", "IfPossible", "Enabled"] | None = None
    """Whether mounts below it are read-only, too."""
    sub_path: Annotated[str, Meta(max_length=4096)] = ""
    """The path within the volume."""
    sub_path_expr: Annotated[str, Meta(max_length=4096)] = ""
    """The same, with variables of the environment."""
    mount_propagation: Literal["None", "HostToContainer", "Bidirectional"] | None = None
    """How mounts are passed between the host and the container."""


class GmsClientSpec(Model):
    """What a saver or loader has beside, or instead of, its defaults; empty changes none."""

    image: Annotated[str, Meta(max_length=512)] = ""
    """The image; empty for the default one."""
    command: Annotated[list[Argument], Meta(max_length=256)] = []
    """The whole argument vector; nothing is put before or behind it."""
    envs: Annotated[list[ClientEnvVar], Meta(max_length=512), list_map("name")] = []
    """Variables: one of a default's name replaces it in place, others follow; `GMS_SOCKET_DIR`
    cannot be set."""
    env_from_secret: Annotated[str, Meta(max_length=253)] = ""
    """A Secret of the namespace whose keys become variables, behind the others."""
    volume_mounts: Annotated[list[VolumeMount], Meta(max_length=64), list_map("mountPath")] = []
    """Mounts, beside the default ones."""


class GmsCheckpointSpec(Model):
    """The containers that move the bytes of GPU memory. A checkpoint saves, its readers load."""

    saver: GmsClientSpec | None = None
    """What the container that saves GPU memory has beside or instead of its defaults; empty changes
    nothing."""
    loader: GmsClientSpec | None = None
    """The container that loads GPU memory, beside a worker that is restored; refused on a
    DynamoCheckpoint, which only saves."""


class GpuMemoryServiceSpec(Model):
    """Whether the worker keeps its weights in the GPU memory service, and how in a cluster."""

    RULES: ClassVar = (
        Rule(
            "self.enabled || !has(self.checkpoint) || !has(self.checkpoint.saver)",
            _NEEDS_GMS,
            ".checkpoint.saver",
            FORBIDDEN,
        ),
        Rule(
            "self.enabled || !has(self.extraClientContainers)"
            " || size(self.extraClientContainers) == 0",
            _NEEDS_GMS,
            ".extraClientContainers",
            FORBIDDEN,
        ),
    )

    enabled: bool = True
    """Whether the worker has its weights in the GPU memory service."""
    mode: Literal["intraPod", "interPod"] = "intraPod"
    """Whether the service runs in the pod of the worker, or in one of its own."""
    device_class_name: Annotated[str, Meta(min_length=1, max_length=253)] = "gpu.nvidia.com"
    """The DeviceClass of the claim for GPUs."""
    extra_client_containers: Annotated[
        list[Label], Meta(max_length=16, extra_json_schema={"uniqueItems": True})
    ] = []
    """Other containers of the pod that attach to the service."""
    checkpoint: GmsCheckpointSpec | None = None
    """The containers that save and load."""

    @property
    def saver(self) -> GmsClientSpec | None:
        """What the saver has beside or instead of its defaults; None where that is nothing."""
        found = self.checkpoint.saver if self.checkpoint is not None else None
        return found if found != GmsClientSpec() else None


class SharedMemorySpec(Model):
    """The tmpfs at /dev/shm of a worker in a cluster."""

    RULES: ClassVar = (
        Rule(
            "!has(self.size) || !has(self.disabled) || !self.disabled",
            "must not be set together with disabled: true",
            ".size",
        ),
    )

    disabled: bool = False
    """Whether there is none."""
    size: Quantity | Amount | None = None
    """Its size."""


class CheckpointJobSpec(Model):
    """The worker to start and capture."""

    RULES: ClassVar = (
        Rule(
            "self.podTemplateSpec.spec.containers.exists(c, c.name == self.targetContainerName)",
            "names no container of podTemplateSpec",
            ".targetContainerName",
            said="'no container of podTemplateSpec is called ' + self.targetContainerName",
        ),
    )

    pod_template_spec: Annotated[PodTemplateSpec, declared_as(TemplateSkeleton)]
    """The pod to start and capture."""
    target_container_name: Label = "main"
    """The container to capture."""
    shared_memory: SharedMemorySpec | None = None
    """The tmpfs at /dev/shm; 8Gi without it."""
    active_deadline_seconds: Annotated[int, Meta(ge=1, le=86400)] = 3600
    """How long after its creation the worker may take to be captured; then its Job is ended."""
    backoff_limit: Annotated[int, Meta(ge=0, le=100)] = 0
    """Deprecated, and on Kubernetes ignored: how often a worker that failed is started again."""
    ttl_seconds_after_finished: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None
    """Deprecated and ignored: the Job goes with its checkpoint."""
    source_policy: SourcePolicy = "Terminate"
    """What becomes of the worker after a capture that succeeded."""
    driver: Driver = "cooperative"
    """How the state of the process is captured."""


class DynamoCheckpointSpec(Model):
    """A warm worker of this identity shall exist as an artifact."""

    RULES: ClassVar = (
        Rule(
            "!has(self.gpuMemoryService) || !has(self.gpuMemoryService.checkpoint)"
            " || !has(self.gpuMemoryService.checkpoint.loader)",
            LOADER_REFUSED,
            ".gpuMemoryService.checkpoint.loader",
            FORBIDDEN,
        ),
        Rule(
            "!has(self.gpuMemoryService) || !self.gpuMemoryService.enabled"
            " || self.gpuMemoryService.mode == 'intraPod'",
            "a checkpoint captures GPU memory in mode intraPod alone",
            ".gpuMemoryService.mode",
        ),
    )

    identity: IdentitySpec
    """What makes two checkpoints interchangeable; equal ones share an artifact."""
    job: CheckpointJobSpec
    """The worker to start and capture."""
    gpu_memory_service: Annotated[GpuMemoryServiceSpec, UNDEFAULTED] = GpuMemoryServiceSpec()
    """Whether and how the weights are in the GPU memory service; not part of the identity."""
    deletion_policy: Literal["Delete", "Retain"] = "Delete"
    """What becomes of the artifact when this is deleted."""


class DynamoCheckpointStatus(Model):
    """What became of it."""

    phase: Literal["Pending", "Creating", "Ready", "Failed", "Terminating"] = "Pending"
    """The phase, for people; the conditions decide."""
    checkpoint_id: str = field(name="checkpointID", default="")
    """The hash of the identity, in 16 hex digits."""
    job_name: str = ""
    """The Job of the worker."""
    snapshot_name: str = ""
    """The Snapshot of the worker."""
    content_name: str = ""
    """The SnapshotContent that has the artifact."""
    shares: str = ""
    """The checkpoint of the same identity whose artifact this is, if not its own."""
    created_at: str = ""
    """When it became ready."""
    message: str = ""
    """Why it waits or failed, for people."""
    bytes: Bytes = 0
    """The size of the artifact."""
    size: str = ""
    """The size of the artifact, for people."""
    location: str = ""
    """Deprecated: where the artifact is stored. It is read in what Dynamo wrote, and never set."""
    storage_type: Literal["pvc", "s3", "oci"] | None = None
    """Deprecated: how the artifact is stored. It is read in what Dynamo wrote, and never set."""
    conditions: Conditions = []
    """How it stands: `Ready`, `Failed` and others, each with a reason and a message."""


class DynamoCheckpoint(Model, tag_field="kind", tag="DynamoCheckpoint", omit_defaults=False):
    """Asks for a checkpoint of a worker; leads to a Job, a Pod, a Snapshot and its content."""

    api_version: Literal["nvidia.com/v1alpha1"] = GROUP  # type: ignore[assignment]
    metadata: ObjectMeta
    spec: Annotated[DynamoCheckpointSpec, IMMUTABLE]
    status: DynamoCheckpointStatus = DynamoCheckpointStatus()


_COLUMNS = (
    Column("Model", ".spec.identity.model", "The model"),
    Column("Backend", ".spec.identity.backendFramework", "The inference engine"),
    *(kind.PHASE, kind.SIZE, kind.REASON, kind.AGE),
    Column("CheckpointID", ".status.checkpointID", "Hash of the identity", is_wide=True),
    *(
        kind.driver(".spec.job.driver"),
        kind.artifact(".status.contentName"),
        kind.TRACE,
    ),
)

KIND = Kind(
    "DynamoCheckpoint",
    OURS,
    "dynamocheckpoints",
    "dckpt",
    (Version("v1alpha1", DynamoCheckpoint, _COLUMNS),),
    others=("ckpt", "checkpoint", "checkpoints"),
)
