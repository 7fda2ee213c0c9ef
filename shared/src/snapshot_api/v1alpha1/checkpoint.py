"""DynamoCheckpoint: a warm worker of an identity shall exist as an artifact."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, field

from snapshot_api.facts import PodTemplateSpec
from snapshot_api.meta import Amount, Argument, Condition, ObjectMeta, Quantity
from snapshot_api.well_known import GROUP
from snapshot_shared.orders import (
    Bytes,
    Driver,
    Label,
    SourcePolicy,
)

LOADER_REFUSED = "a checkpoint only saves; set the loader where a pod is restored from it"
"""Why a DynamoCheckpoint has no loader, in a cluster and standalone."""


Framework = Literal["vllm", "sglang", "trtllm"]
"""The inference engines that Dynamo knows."""


class IdentitySpec(
    msgspec.Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True, dict=True
):
    """What makes two checkpoints interchangeable; `snapshot_api.identity` hashes it.

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
