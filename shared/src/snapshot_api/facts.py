"""Pod, Job and Node: the fields of Kubernetes that are honoured.

They are observed facts: standalone mode writes them itself, in Kubernetes the kubelet and its
controllers do. `manifests` refuses any other field of a Job or Pod by its path.
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, field

from snapshot_api.kind import Kind, Version
from snapshot_api.meta import (
    Amount,
    AnnotationValue,
    Argument,
    Condition,
    EnvName,
    LabelKey,
    LabelValue,
    ObjectMeta,
    OrderStatus,
    Quantity,
    condition,
    is_true,
)
from snapshot_shared.model import Model
from snapshot_shared.orders import DeviceRef, Label, NodeStr, PresenceDevice, UnreadyDriver

FINISHED = ("Succeeded", "Failed")
"""The phases of a pod whose containers have all ended."""
UNKNOWN_ARTIFACTS = "UnknownArtifacts"
"""Condition of a Node: something below its artifact root has no owner."""

GPU_RESOURCE = "nvidia.com/gpu"

AGENT_LABEL = "nvidia.com/snapback-agent"
"""Label of a Node of a cluster, `true` while a snapshot agent is there: pods are placed by it."""

SECCOMP_LABEL = "nvidia.com/snapback-seccomp"
"""Label of a Node of a cluster: the seccomp profile of its agent, with `_` for `/`.

Pods with the profile are placed by it.
"""

HOSTNAME_LABEL = "kubernetes.io/hostname"


class TemplateMeta(Model):
    """Labels and annotations for the pods of a template."""

    labels: dict[LabelKey, LabelValue] = {}
    annotations: dict[LabelKey, AnnotationValue] = {}


class EnvVar(Model, omit_defaults=False):
    """One environment variable; values that come from elsewhere are not honoured standalone."""

    name: EnvName
    value: Argument = ""


class ResourceRequirements(Model):
    """Limits and requests; `nvidia.com/gpu` takes whole devices, the rest is informational."""

    limits: dict[LabelKey, Quantity | Amount] = {}
    requests: dict[LabelKey, Quantity | Amount] = {}


class Container(Model):
    """One container. Standalone it is a local process; `image` is recorded, not pulled."""

    name: Label
    image: Annotated[str, Meta(max_length=512)] = ""
    command: Annotated[list[Argument], Meta(max_length=256)] = []
    args: Annotated[list[Argument], Meta(max_length=256)] = []
    env: Annotated[list[EnvVar], Meta(max_length=512)] = []
    working_dir: Annotated[str, Meta(max_length=4096)] = ""
    resources: ResourceRequirements = ResourceRequirements()


class PodSpec(Model):
    """The honoured subset of a pod's spec."""

    containers: Annotated[list[Container], Meta(min_length=1, max_length=8)]
    restart_policy: Literal["Never"] = "Never"
    node_name: NodeStr | None = None
    node_selector: dict[LabelKey, LabelValue] = {}
    termination_grace_period_seconds: Annotated[int, Meta(ge=0, le=600)] = 5
    active_deadline_seconds: Annotated[int, Meta(ge=1, le=86400)] | None = None


class PodTemplateSpec(Model, omit_defaults=False):
    """How the pods of a Job look."""

    metadata: TemplateMeta = TemplateMeta()
    spec: PodSpec


class JobSpec(Model):
    """One pod, started again when it fails, `backoff_limit` times at most."""

    template: PodTemplateSpec
    active_deadline_seconds: Annotated[int, Meta(ge=1, le=86400)] | None = None
    backoff_limit: Annotated[int, Meta(ge=0, le=100)] = 0


class JobStatus(Model):
    """How the pod of a Job stands."""

    active: int = 0
    ready: int = 0
    succeeded: int = 0
    failed: int = 0
    conditions: list[Condition] = []


class Job(Model, tag_field="kind", tag="Job", omit_defaults=False):
    """A batch/v1 Job of one pod."""

    api_version: Literal["batch/v1"] = "batch/v1"
    metadata: ObjectMeta
    spec: JobSpec
    status: JobStatus = JobStatus()


class ContainerStatus(Model):
    """A container's process: `state` is waiting, running (since `started_at`) or terminated.

    `image_id` names its image by a digest, where the node has said so.
    """

    name: str
    state: Literal["waiting", "running", "terminated"] = "waiting"
    ready: bool = False
    exit_code: int | None = None
    started_at: str = ""
    image_id: str = field(name="imageID", default="")


class PodStatus(Model):
    """Where a pod runs and how it is; `memory_server` is how far one of its own is.

    `cold_containers` are those of a pod with `nvidia.com/restore-from` that a cluster started
    without the variable of standby, and `worker_containers` those that run a program of their own,
    which a driver that brings the process cannot restore into. `seccomp_profiles` are those that
    the spec names, by container. Standalone there are none of these.
    """

    phase: Literal["Pending", "Running", "Succeeded", "Failed", "Unknown"] = "Pending"
    node_name: str = ""
    devices: list[DeviceRef] = []
    memory_server: Literal["none", "starting", "ready"] = "none"
    message: str = ""
    reason: str = ""
    container_statuses: list[ContainerStatus] = []
    cold_containers: list[str] = []
    worker_containers: list[str] = []
    seccomp_profiles: dict[str, str] = {}
    orders: list[OrderStatus] = []
    obligations: list[str] = []
    traceparent: str = ""
    conditions: list[Condition] = []


class Pod(Model, tag_field="kind", tag="Pod", omit_defaults=False):
    """A v1 Pod; standalone its containers are local processes of its node."""

    api_version: Literal["v1"] = "v1"
    metadata: ObjectMeta
    spec: PodSpec
    status: PodStatus = PodStatus()


class NodeSpec(Model):
    """What people want of a node; nothing new begins on one that is `unschedulable` (cordoned)."""

    unschedulable: bool = False


class NodeStatus(Model):
    """What the node's agent last said of it."""

    boot_id: str = field(name="bootID", default="")
    version: str = ""
    schemas: list[int] = []
    devices: list[PresenceDevice] = []
    drivers: list[str] = []
    criu: str = ""
    unready: list[UnreadyDriver] = []
    verbs: list[str] = []
    seccomp_profile: str = ""
    artifact_root: str = ""
    slots: int = 1
    conditions: list[Condition] = []


class Node(Model, tag_field="kind", tag="Node", omit_defaults=False):
    """A machine with an agent; the operator creates it from the agent's presence."""

    api_version: Literal["v1"] = "v1"
    metadata: ObjectMeta
    spec: NodeSpec = NodeSpec()
    status: NodeStatus = NodeStatus()


def gpus_wanted(spec: PodSpec) -> int:
    """Return the number of whole devices that a pod's containers ask for together."""
    return sum(int(c.resources.limits.get(GPU_RESOURCE, 0)) for c in spec.containers)


CORDONED = "SchedulingDisabled"
"""What the phase of a node ends with if nothing new begins there."""


def _phase_of_job(value: Job) -> str:
    rows = value.status.conditions
    return next((name for name in ("Complete", "Failed") if is_true(rows, name)), "Running")


def _phase_of_node(value: Node) -> str:
    rows = value.status.conditions
    if is_true(rows, "Lost"):
        return "Lost"
    ready = condition(rows, "Ready")
    # As in kubectl: if the condition is Unknown, the node is NotReady; if it is missing, Unknown.
    found = "Unknown" if ready is None else "Ready" if ready.status == "True" else "NotReady"
    return f"{found},{CORDONED}" if value.spec.unschedulable else found


JOB = Kind("Job", "batch", "jobs", "job", (Version("v1", Job),), _phase_of_job)
POD = Kind("Pod", "", "pods", "po", (Version("v1", Pod),))
NODE = Kind(
    "Node",
    "",
    "nodes",
    "no",
    (Version("v1", Node),),
    _phase_of_node,
    namespaced=False,
    appliable=False,
)
