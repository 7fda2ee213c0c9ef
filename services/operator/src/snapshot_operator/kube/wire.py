"""Pods, Jobs and Nodes as the API server sends them, and the facts that the operator keeps of them.

Only what a decision reads is decoded; a field that is not named here costs nothing. These objects
have been checked by the API server, so that names and values are taken as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Literal, get_type_hints

import msgspec
from msgspec.structs import asdict, replace

from snapshot_api.facts import (
    GPU_RESOURCE,
    Container,
    ContainerStatus,
    Job,
    JobSpec,
    JobStatus,
    Node,
    NodeSpec,
    Pod,
    PodSpec,
    PodStatus,
    PodTemplateSpec,
    ResourceRequirements,
    TemplateMeta,
)
from snapshot_api.kinds import AnyObject
from snapshot_api.meta import Condition, ObjectMeta, OwnerReference
from snapshot_api.v1alpha1.checkpoint import (
    CheckpointJobSpec,
    DynamoCheckpoint,
    DynamoCheckpointSpec,
)
from snapshot_api.well_known import POD_SPEC, RESTORE_FROM, STANDBY_VARIABLES
from snapshot_operator.core.checkpoint import STUCK
from snapshot_shared.codec import digest
from snapshot_shared.volumes import GMS_VOLUME

OURS = "nvidia.com/"
"""Labels and annotations with this prefix are kept; a pod has many others that nothing reads."""

TEMPLATE_DIGEST = f"{OURS}template-digest"
"""Annotation of a template in memory: the digest of what the API server has, in its own order.

Two checkpoints of one identity share an artifact only where their templates are the same.
"""

GMS_SERVER = "gms-server"
"""The init container of a pod that has its memory server, and goes on beside the others."""

INIT_PROGRAM = "/snapback/snapback-init"
"""The program of a container that waits for a process: nothing of its image runs until then."""

_EMPTY = msgspec.Raw(b"{}")

_Phase = Literal["Pending", "Running", "Succeeded", "Failed", "Unknown"]


class _Wire(msgspec.Struct, frozen=True, kw_only=True, rename="camel", gc=False):
    """What all structs here have: unknown fields are skipped."""


_STUCK = {word: reason for reason, row in STUCK.items() for word in row.words}


class WireOwner(_Wire, frozen=True):
    """A row of `metadata.ownerReferences`."""

    api_version: str
    kind: str
    name: str
    uid: str
    controller: bool = False


class WireMeta(_Wire, frozen=True):
    """The `metadata` of any object of Kubernetes."""

    name: str
    uid: str
    resource_version: str
    namespace: str | None = None
    generation: int = 0
    creation_timestamp: str = ""
    deletion_timestamp: str | None = None
    labels: dict[str, str] = {}
    annotations: dict[str, str] = {}
    finalizers: list[str] = []
    owner_references: list[WireOwner] = []


class Sent(_Wire, frozen=True):
    """An object as it was sent. Its spec and its status are views of the bytes that came."""

    metadata: WireMeta
    spec: msgspec.Raw = _EMPTY
    status: msgspec.Raw = _EMPTY


Decode = Callable[[Sent, AnyObject | None], AnyObject]
"""Gives an object as it is kept.

The second argument is an earlier version of it whose spec was sent in the same bytes, if there is
one: its spec is taken as it is. msgspec.ValidationError where the object is none of its kind.
"""


class WireCondition(_Wire, frozen=True):
    """A condition of a Pod or Job."""

    type: str
    status: Literal["True", "False", "Unknown"]
    reason: str = ""
    message: str = ""
    last_transition_time: str | None = None


class WireResources(_Wire, frozen=True):
    """What a container asks for, by resource; a template has quantities as the user wrote them."""

    limits: dict[str, msgspec.Raw] | None = None


class WireEnvVar(_Wire, frozen=True):
    """An environment variable; one whose value comes from elsewhere has none here."""

    name: str
    value: str = ""


class WireSeccompProfile(_Wire, frozen=True):
    """How a container or all of a pod are confined."""

    type: str
    localhost_profile: str | None = None


class WireSecurityContext(_Wire, frozen=True):
    """What a pod or a container may do, as far as it says."""

    seccomp_profile: WireSeccompProfile | None = None
    privileged: bool | None = None


class WireContainer(_Wire, frozen=True):
    """A container of a pod. What is raw is decoded only where a decision needs it."""

    name: str
    image: str | None = None
    command: msgspec.Raw = msgspec.Raw(b"[]")
    env: msgspec.Raw = msgspec.Raw(b"[]")
    resources: WireResources | None = None
    security_context: WireSecurityContext | None = None


class WireTerminated(_Wire, frozen=True):
    """How a container ended."""

    exit_code: int = 0


class WireWaiting(_Wire, frozen=True):
    """Why a container has not started."""

    reason: str = ""
    message: str = ""


class WireState(_Wire, frozen=True):
    """The state of a container: one of these."""

    waiting: WireWaiting | None = None
    running: dict[str, str | None] | None = None
    terminated: WireTerminated | None = None


class WireContainerStatus(_Wire, frozen=True):
    """A row of `status.containerStatuses`."""

    name: str
    ready: bool = False
    started: bool | None = None
    image_id: str = msgspec.field(name="imageID", default="")
    state: WireState = WireState()


class WireVolume(_Wire, frozen=True):
    """A volume of a pod."""

    name: str


class WirePodSpec(_Wire, frozen=True):
    """The spec of a pod."""

    containers: list[WireContainer] = []
    volumes: list[WireVolume] = []
    node_name: str | None = None
    security_context: WireSecurityContext | None = None
    restart_policy: Literal["Always", "OnFailure", "Never"] = "Always"


class WirePodStatus(_Wire, frozen=True):
    """The status of a pod."""

    phase: _Phase = "Pending"
    reason: str = ""
    message: str = ""
    conditions: list[WireCondition] = []
    container_statuses: list[WireContainerStatus] = []
    init_container_statuses: list[WireContainerStatus] = []


class WireJobStatus(_Wire, frozen=True):
    """The status of a Job."""

    active: int = 0
    ready: int = 0
    succeeded: int = 0
    failed: int = 0
    conditions: list[WireCondition] = []


class WireTemplateSpec(_Wire, frozen=True):
    """The spec of a pod template, of which decisions need the containers."""

    containers: list[WireContainer] = []


class WireTemplate(_Wire, frozen=True):
    """A pod template: that of a checkpoint is checked with its Job, and has what anyone wrote."""

    spec: WireTemplateSpec


class WireJobSpec(_Wire, frozen=True):
    """The spec of a Job."""

    template: WireTemplate


class WireNodeSpec(_Wire, frozen=True):
    """The spec of a Node."""

    unschedulable: bool = False


class _WireJobSpec(CheckpointJobSpec, frozen=True, kw_only=True):
    """The worker of a checkpoint with its template as it was sent."""

    pod_template_spec: msgspec.Raw  # type: ignore[assignment]


class _WireCheckpointSpec(DynamoCheckpointSpec, frozen=True, kw_only=True):
    """The spec of a checkpoint with its template as it was sent."""

    job: _WireJobSpec


_POD_SPEC = msgspec.json.Decoder(WirePodSpec)
_POD_STATUS = msgspec.json.Decoder(WirePodStatus)
_JOB_SPEC = msgspec.json.Decoder(WireJobSpec)
_JOB_STATUS = msgspec.json.Decoder(WireJobStatus)
_NODE_SPEC = msgspec.json.Decoder(WireNodeSpec)
_CHECKPOINT_SPEC = msgspec.json.Decoder(_WireCheckpointSpec)
_TEMPLATE = msgspec.json.Decoder(WireTemplate)
_ENV = msgspec.json.Decoder(list[WireEnvVar])


MAX_CONTAINERS = 256
"""How many containers of a pod are looked at. Anyone may make a pod of 1.5 MiB, and the loop of the
operator decodes it at each change."""


def pod_in(sent: Sent, _same: AnyObject | None) -> Pod:
    """Return the facts of a pod, as `Decode` says."""
    spec, status = _POD_SPEC.decode(sent.spec), _POD_STATUS.decode(sent.status)
    spec = replace(spec, containers=spec.containers[:MAX_CONTAINERS])
    status = replace(
        status,
        container_statuses=status.container_statuses[:MAX_CONTAINERS],
        init_container_statuses=status.init_container_statuses[:MAX_CONTAINERS],
    )
    reason, message = _stuck(status)
    return Pod(
        metadata=_meta(sent.metadata),
        spec=PodSpec(containers=[_container(found) for found in spec.containers]),
        status=PodStatus(
            phase=status.phase,
            node_name=spec.node_name or "",
            memory_server=_memory_server(spec, status),
            message=message,
            reason=reason,
            container_statuses=[
                _container_status(found, restarts=_restarts(spec, status, found))
                for found in status.container_statuses
            ],
            cold_containers=_not(_waits, sent.metadata, spec),
            worker_containers=_not(_is_placeholder, sent.metadata, spec),
            seccomp_profiles=_seccomp_profiles(spec),
            conditions=_conditions(status.conditions),
        ),
    )


def _seccomp_profiles(spec: WirePodSpec) -> dict[str, str]:
    """Return the profiles that a spec names; a privileged container has none, whatever it says."""
    found = {}
    of_pod = spec.security_context or WireSecurityContext()
    for container in spec.containers:
        own = container.security_context or WireSecurityContext()
        profile = own.seccomp_profile or of_pod.seccomp_profile
        if profile is not None and not own.privileged:
            names = (profile.type, profile.localhost_profile)
            found[container.name] = "/".join(filter(None, names))
    return found


def _stuck(status: WirePodStatus) -> tuple[str, str]:
    """Return the reason and message of a pod: those of a container that cannot start, if one is."""
    for found in (*status.init_container_statuses, *status.container_statuses):
        waiting = found.state.waiting
        if waiting is not None and (reason := _STUCK.get(waiting.reason)):
            return reason, f"container {found.name}: {waiting.message or waiting.reason}"
    return status.reason, status.message


def _memory_server(
    spec: WirePodSpec, status: WirePodStatus
) -> Literal["none", "starting", "ready"]:
    if not any(each.name == GMS_VOLUME for each in spec.volumes):
        return "none"
    found = (each for each in status.init_container_statuses if each.name == GMS_SERVER)
    return "ready" if any(each.started for each in found) else "starting"


def job_in(sent: Sent, same: AnyObject | None) -> Job:
    """Return the facts of a Job, as `Decode` says; of its template the containers alone."""
    status = _JOB_STATUS.decode(sent.status)
    return Job(
        metadata=_meta(sent.metadata),
        spec=same.spec if isinstance(same, Job) else _job_spec(sent.spec),
        status=JobStatus(
            active=status.active,
            ready=status.ready,
            succeeded=status.succeeded,
            failed=status.failed,
            conditions=_conditions(status.conditions),
        ),
    )


def _job_spec(sent: msgspec.Raw) -> JobSpec:
    wire = _JOB_SPEC.decode(sent).template.spec
    containers = [_container(found) for found in wire.containers]
    return JobSpec(template=PodTemplateSpec(spec=PodSpec(containers=containers)))


def node_in(sent: Sent, _same: AnyObject | None) -> Node:
    """Return what Kubernetes says of a Node, as `Decode` says; the rest is said by its agent."""
    spec = _NODE_SPEC.decode(sent.spec)
    return Node(metadata=_meta(sent.metadata), spec=NodeSpec(unschedulable=spec.unschedulable))


def decoder(kind: type[Any]) -> Decode:
    """Return how an object of one of our kinds is decoded.

    Its metadata may have what standalone mode refuses, such as the long annotation of kubectl.
    """
    types = get_type_hints(kind)
    status_in = msgspec.json.Decoder(types["status"]).decode
    plain_spec = msgspec.json.Decoder(types["spec"]).decode
    spec_in = _checkpoint_spec if kind is DynamoCheckpoint else plain_spec

    def decoded(sent: Sent, same: Any) -> Any:
        return kind(
            metadata=_meta(sent.metadata),
            spec=spec_in(sent.spec) if same is None else same.spec,
            # A copy: orders keep a view of their bytes, and with it the whole page or line.
            status=status_in(bytes(sent.status)),
        )

    return decoded


def _checkpoint_spec(sent: msgspec.Raw) -> DynamoCheckpointSpec:
    """Return a spec with what is needed of its template: its containers, and a digest of it all."""
    found = _CHECKPOINT_SPEC.decode(sent)
    raw = bytes(found.job.pod_template_spec)
    wire = _TEMPLATE.decode(raw)
    template = PodTemplateSpec(
        metadata=TemplateMeta(annotations={TEMPLATE_DIGEST: digest(raw)}),
        spec=PodSpec(containers=[_container(each) for each in wire.spec.containers]),
    )
    job = CheckpointJobSpec(**{**asdict(found.job), "pod_template_spec": template})
    return DynamoCheckpointSpec(**{**asdict(found), "job": job})


def new_meta(meta: ObjectMeta) -> ObjectMeta:
    """Return the metadata of an object that is to be created: the API server sets the rest."""
    return ObjectMeta(
        name=meta.name,
        namespace=meta.namespace,
        labels=meta.labels,
        annotations=meta.annotations,
        finalizers=meta.finalizers,
        owner_references=meta.owner_references,
    )


def _meta(wire: WireMeta) -> ObjectMeta:
    return ObjectMeta(
        name=wire.name,
        namespace=wire.namespace,
        labels=_ours(wire.labels),
        annotations=_ours(wire.annotations),
        uid=wire.uid,
        resource_version=wire.resource_version,
        generation=wire.generation,
        creation_timestamp=wire.creation_timestamp,
        deletion_timestamp=wire.deletion_timestamp,
        finalizers=wire.finalizers,
        owner_references=[
            OwnerReference(
                api_version=owner.api_version,
                kind=owner.kind,
                name=owner.name,
                uid=owner.uid,
                controller=owner.controller,
            )
            for owner in wire.owner_references
        ],
    )


def _ours(words: dict[str, str]) -> dict[str, str]:
    # Decisions need to know that a spec is kept, and not the spec.
    ours = {key: text for key, text in words.items() if key.startswith(OURS)}
    return ours | {POD_SPEC: ""} if POD_SPEC in ours else ours


def _container(wire: WireContainer) -> Container:
    resources = ResourceRequirements(limits=_gpus(wire.resources or WireResources()))
    return Container(name=wire.name, image=wire.image or "", resources=resources)


def _gpus(wire: WireResources) -> dict[str, str | int]:
    found = msgspec.json.decode((wire.limits or {}).get(GPU_RESOURCE, b"null"))
    if isinstance(found, float) and found.is_integer():
        found = int(found)
    # Null is none, and with anything else the API server refuses the Job.
    return {GPU_RESOURCE: found} if isinstance(found, str | int) else {}


def _not(is_so: Callable[[WireContainer], bool], meta: WireMeta, spec: WirePodSpec) -> list[str]:
    """Return the containers of which something is not so, of a pod that is to be restored."""
    if RESTORE_FROM not in meta.annotations:
        return []
    return [found.name for found in spec.containers if not is_so(found)]


def _waits(container: WireContainer) -> bool:
    # Of several entries of one name the last counts.
    found = {entry.name: entry.value for entry in _ENV.decode(container.env)}
    return found.get(STANDBY_VARIABLES[0]) == "1"


def _is_placeholder(container: WireContainer) -> bool:
    return bool(msgspec.json.decode(container.command)[:1] == [INIT_PROGRAM])


def _restarts(spec: WirePodSpec, status: WirePodStatus, wire: WireContainerStatus) -> bool:
    """Whether the kubelet will start a container again that has ended."""
    ended = wire.state.terminated
    if ended is None or status.phase in ("Succeeded", "Failed"):
        return False
    policy = spec.restart_policy
    return policy == "Always" or (policy == "OnFailure" and ended.exit_code != 0)


def _container_status(wire: WireContainerStatus, *, restarts: bool) -> ContainerStatus:
    ended = wire.state.terminated
    if restarts:
        return ContainerStatus(name=wire.name)
    if ended is not None:
        return ContainerStatus(name=wire.name, state="terminated", exit_code=ended.exit_code)
    running = wire.state.running
    if running is None:
        return ContainerStatus(name=wire.name, ready=wire.ready)
    return ContainerStatus(
        name=wire.name,
        state="running",
        ready=wire.ready,
        started_at=running.get("startedAt") or "",
        image_id=wire.image_id,
    )


def _conditions(wire: Iterable[WireCondition]) -> list[Condition]:
    return [
        Condition(
            type=found.type,
            status=found.status,
            reason=found.reason,
            message=found.message,
            last_transition_time=found.last_transition_time or "",
        )
        for found in wire
    ]
