"""The Job of a checkpoint as Kubernetes gets it: the user's pod template, made ready for a capture.

Templates are plain documents here: what is not named below passes through as the user wrote it, in
the order in which they wrote it, whether this program knows the field or not.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable
from typing import Any

import msgspec
from msgspec.structs import replace

from snapshot_api.facts import AGENT_LABEL, GPU_RESOURCE, Job, Node
from snapshot_api.well_known import STANDBY_VARIABLES
from snapshot_operator.core.checkpoint import READY_FILE
from snapshot_operator.kube.seccomp import names_profile, offered, required, with_profile
from snapshot_operator.kube.wire import GMS_SERVER, OURS, new_meta
from snapshot_shared.errors import InvalidManifest
from snapshot_shared.orders import PLACEHOLDER_DRIVERS
from snapshot_shared.volumes import CONTROL_VOLUME, DEVICES, GMS_VOLUME, SAVER

Document = dict[str, Any]

CONTROL_PATH = "/snapshot-control"
CONTROL_VARIABLES = ("SNAPSHOT_CONTROL_DIR", "DYN_SNAPSHOT_CONTROL_DIR")
"""Both name the control directory; the second is what images for Dynamo read."""
GMS_PATH = "/gms-sockets"
LEASE_SOCKET = "gms.sock"
GMS_IMAGE = "snapback/gms:dev"
AGENT_IMAGE = "snapback/snapshot-agent:dev"
ORDER_PATH = "/gms-checkpoint"
"""Where a saver or loader has its orders and their parts."""
SHARED_VOLUME = "shared-memory"
SHARED_PATH = "/dev/shm"  # noqa: S108 - a mount of a pod
SHARED_SIZE = "8Gi"
GMS_START_S = 120
"""How long a memory server may take to open its devices, in seconds."""

_GMS_ENV = {
    # Nothing in a pod has credentials of NATS.
    "SNAPBACK_NATS_URL": "",
    "SNAPBACK_SOCKET_DIR": GMS_PATH,
    # Without orders it keeps and reads nothing there.
    "SNAPBACK_STATE_DIR": GMS_PATH,
    "SNAPBACK_ARTIFACT_ROOT": GMS_PATH,
    # Where the claim is one of simulated devices, the runtime sets another value.
    "SNAPBACK_GMS_DEVICE": "cuda",
}
_VARIABLES = {
    *CONTROL_VARIABLES,
    *STANDBY_VARIABLES,
    *_GMS_ENV,
    "GMS_SOCKET_DIR",
    "SNAPBACK_LEASE_GROUP",
}
GMS_DISABLED = "this operator captures no worker with a memory server"
GMS_DISABLED_FIX = (
    "leave out spec.gpuMemoryService, or set SNAPBACK_ALLOW_GMS_SNAPSHOT=true for the operator"
)

SOURCE_LABEL = f"{OURS}snapshot-is-checkpoint-source"

_VERSION = {f"{OURS}snapshot-artifact-version": "1"}
"""The version of what is captured of a worker, unless its template says another one."""

_HAS_AGENT = {"key": AGENT_LABEL, "operator": "In", "values": ["true"]}

# A proxy beside the worker would hold its connections, which no capture can bring back.
_NO_MESH = {"linkerd.io/inject": "disabled", "sidecar.istio.io/inject": "false"}


class GMSSnapshotDisabled(InvalidManifest):
    """A checkpoint asks for a memory server, and this operator captures no worker with one."""

    default_next_step = GMS_DISABLED_FIX


class DriverNotInCluster(InvalidManifest):
    """A checkpoint names a driver that starts processes, and in a cluster only the kubelet does."""

    default_next_step = "use the driver cooperative, which copies the same state, or criu"


class JobShape(msgspec.Struct, frozen=True):
    """How the Job of a checkpoint looks in a cluster.

    `gms_image` is that of the memory servers in pods. Unless it `allows_gms`, no worker with one is
    started. `seccomp_profile` is that of workers for CRIU, if a node has it.
    """

    gms_image: str = GMS_IMAGE
    allows_gms: bool = True
    seccomp_profile: str = ""

    def __call__(self, job: Job, checkpoint: Document, nodes: Iterable[Node]) -> list[Document]:
        """Return the template of its pod's claims, if it needs one, and the Job that names it.

        InvalidManifest says what is wrong with the template of the pod.
        """
        try:
            if has_memory_server(checkpoint) and not self.allows_gms:
                raise GMSSnapshotDisabled(GMS_DISABLED)
            spec = checkpoint["spec"]["job"]["podTemplateSpec"]["spec"]
            profile = offered(nodes, self.seccomp_profile, spec)
            manifest = job_manifest(job, checkpoint, self.gms_image, profile)
            devices = devices_template(job, checkpoint)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise InvalidManifest(
                f"spec.job.podTemplateSpec is no template of a pod: {error!r}",
                next_step="correct it: kubectl explain pod.spec",
            ) from error
        return [*([devices] if devices else ()), manifest]


def job_manifest(
    job: Job, checkpoint: Document, gms_image: str = GMS_IMAGE, profile: str = ""
) -> Document:
    """Return the Job of a DynamoCheckpoint, given what is decided of it and its document.

    `profile` is the seccomp profile that nodes have for workers of CRIU; empty if none has it.
    InvalidManifest if the template has no container of the target's name. DriverNotInCluster.
    """
    spec = checkpoint["spec"]["job"]
    if spec.get("driver") == "respawn":
        raise DriverNotInCluster(
            "spec.job.driver is respawn, which ends a process and starts it again; in a pod only "
            "the kubelet does"
        )
    target = spec.get("targetContainerName", "main")
    template = source_template(spec["podTemplateSpec"], target, job.metadata.labels)
    pod = template["spec"]
    container = find_container(pod, target)
    if spec.get("driver") in PLACEHOLDER_DRIVERS:
        with_seccomp_profile(pod, container, profile)
    with_shared_memory(pod, container, spec.get("sharedMemory") or {})
    if has_memory_server(checkpoint):
        with_devices(pod, container, devices_name(job.metadata.name))
        with_memory_server(pod, container, gms_image)
        moved_by = (checkpoint["spec"]["gpuMemoryService"].get("checkpoint") or {}).get("saver")
        if moved_by or init_container(pod, SAVER):
            with_transfers(pod, container, gms_image, SAVER, moved_by or {})
    # The Job of a worker that ended with its capture would start another one.
    shaped: Document = {"template": template, "backoffLimit": 0}
    if job.spec.active_deadline_seconds is not None:
        shaped["activeDeadlineSeconds"] = job.spec.active_deadline_seconds
    return {
        "apiVersion": job.api_version,
        "kind": "Job",
        "metadata": msgspec.to_builtins(new_meta(job.metadata)),
        "spec": shaped,
    }


def source_template(template: Document, target: str, labels: dict[str, str]) -> Document:
    """Return the template of a worker that is to be captured: one that runs once, and is watched.

    The target's readiness is that it may be captured. Its other probes are left out: a worker that
    is quiet for its capture answers none.
    """
    shaped = copy.deepcopy(template)
    meta = shaped.setdefault("metadata", {})
    meta["labels"] = {**meta.get("labels", {}), **labels, SOURCE_LABEL: "true"}
    meta["annotations"] = {**_VERSION, **meta.get("annotations", {}), **_NO_MESH}
    spec = shaped["spec"]
    spec["restartPolicy"] = "Never"
    with_agent_affinity(spec)
    container = find_container(spec, target)
    with_control_directory(spec, container)
    container.pop("livenessProbe", None)
    container.pop("startupProbe", None)
    container["readinessProbe"] = {
        "exec": {"command": ["cat", f"{CONTROL_PATH}/{READY_FILE}"]},
        "periodSeconds": 1,
    }
    return shaped


def find_container(spec: Document, name: str) -> Document:
    """Return the container with a name. InvalidManifest lists those that there are."""
    containers: list[Document] = spec.get("containers", [])
    for container in containers:
        if container.get("name") == name:
            return container
    names = ", ".join(str(container.get("name")) for container in containers) or "none"
    raise InvalidManifest(
        f"no container is called {name} (found {names})",
        next_step="name one of the pod's containers in spec.job.targetContainerName",
        problems=[f"spec.job.targetContainerName: no container is called {name}"],
    )


def with_control_directory(spec: Document, container: Document) -> None:
    """Mount a control directory of its own into a container, and name it in its environment."""
    volumes = spec.setdefault("volumes", [])
    put(volumes, {"name": CONTROL_VOLUME, "emptyDir": {}}, by="name")
    name = container["name"]
    mount = {"name": CONTROL_VOLUME, "mountPath": CONTROL_PATH, "subPath": name}
    put(container.setdefault("volumeMounts", []), mount, by="mountPath")
    for variable in CONTROL_VARIABLES:
        put(container.setdefault("env", []), {"name": variable, "value": CONTROL_PATH}, by="name")


def has_memory_server(checkpoint: Document) -> bool:
    """Whether the weights of a checkpoint's worker are to be in a memory server of its pod."""
    gms = checkpoint["spec"].get("gpuMemoryService")
    return gms is not None and bool(gms.get("enabled", True))


def devices_name(checkpoint: str) -> str:
    """Return the name of the ResourceClaimTemplate of a checkpoint's devices."""
    return f"{checkpoint}-devices"


def devices_template(job: Job, checkpoint: Document) -> Document | None:
    """Return the ResourceClaimTemplate of a checkpoint's devices; None where it needs none.

    As many devices as the limit of the target says, else one for each tensor and pipeline rank.
    """
    spec = checkpoint["spec"]
    container = find_container(
        spec["job"]["podTemplateSpec"]["spec"], spec["job"].get("targetContainerName", "main")
    )
    resources = container.get("resources") or {}
    if not has_memory_server(checkpoint) or resources.get("claims"):
        return None
    identity = spec["identity"]
    sizes = (identity.get(name) or 1 for name in ("tensorParallelSize", "pipelineParallelSize"))
    ranks = math.prod(sizes)
    count = int((resources.get("limits") or {}).get(GPU_RESOURCE, ranks))
    device_class = spec["gpuMemoryService"].get("deviceClassName", "gpu.nvidia.com")
    meta = new_meta(job.metadata)
    request = {"name": "gpu", "exactly": {"deviceClassName": device_class, "count": max(count, 1)}}
    return {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceClaimTemplate",
        "metadata": {
            **msgspec.to_builtins(replace(meta, finalizers=[])),
            "name": devices_name(job.metadata.name),
        },
        "spec": {"spec": {"devices": {"requests": [request]}}},
    }


def with_devices(spec: Document, container: Document, template: str) -> None:
    """Have a container claim the devices of a template, in place of a limit of GPUs.

    One that claims devices of its own keeps these.
    """
    # Null, here and below, is what the API server takes for nothing.
    resources = container["resources"] = container.get("resources") or {}
    if resources.get("claims"):
        return
    for kind in ("limits", "requests"):
        (resources.get(kind) or {}).pop(GPU_RESOURCE, None)
    resources["claims"] = [{"name": DEVICES}]
    claim = {"name": DEVICES, "resourceClaimTemplateName": template}
    put(spec.setdefault("resourceClaims", []), claim, by="name")


def with_shared_memory(spec: Document, container: Document, shared: Document) -> None:
    """Mount a tmpfs at /dev/shm, unless the container has a mount there or it is not wanted."""
    mounts = container.setdefault("volumeMounts", [])
    if shared.get("disabled") or any(each.get("mountPath") == SHARED_PATH for each in mounts):
        return
    memory = {"medium": "Memory", "sizeLimit": shared.get("size", SHARED_SIZE)}
    put(spec.setdefault("volumes", []), {"name": SHARED_VOLUME, "emptyDir": memory}, by="name")
    mounts.append({"name": SHARED_VOLUME, "mountPath": SHARED_PATH})


def with_seccomp_profile(spec: Document, container: Document, profile: str) -> None:
    """Give a container a seccomp profile of its node, unless the pod names one."""
    if profile and not names_profile(spec, container):
        with_profile(container, profile)
        _with_affinity(spec, required(profile))


def with_agent_affinity(spec: Document) -> None:
    """Require a node with a live agent, beside what the affinity of the pod requires already."""
    _with_affinity(spec, _HAS_AGENT)


def _with_affinity(spec: Document, row: Document) -> None:
    """Require a label of a node.

    A template that names its node has nothing to be placed: its kubelet would end the pod.
    """
    if spec.get("nodeName"):
        return
    where: Any = spec
    for name in ("affinity", "nodeAffinity", "requiredDuringSchedulingIgnoredDuringExecution"):
        if where.get(name) is None:
            where[name] = {}
        where = where[name]
        if not isinstance(where, dict):
            return  # The API server refuses it, with its path.
    if "nodeSelectorTerms" not in where:
        where["nodeSelectorTerms"] = [{"matchExpressions": [row]}]
    terms = where["nodeSelectorTerms"]
    for term in terms if isinstance(terms, list) else ():
        # One of them is enough for a node. An empty one matches no node, and goes on to.
        if isinstance(term, dict) and (term.get("matchFields") or term.get("matchExpressions")):
            _require(term, row)


def _require(term: Document, row: Document) -> None:
    rows = term.get("matchExpressions") or []
    if isinstance(rows, list) and row not in rows:
        term["matchExpressions"] = [*rows, row]


def with_memory_server(spec: Document, container: Document, image: str) -> None:
    """Add a memory server to a pod, for the devices that a container has claimed, if it has.

    An init container of its name in the template is what it is made of: its image, command and
    mounts stay.
    """
    claims = container.get("resources", {}).get("claims")
    if not claims:
        return
    init: list[Document] = spec.setdefault("initContainers", [])
    server = init_container(spec, GMS_SERVER) or {"name": GMS_SERVER}
    server.setdefault("image", image)
    # An init container that restarts is started before the engine, and runs beside it.
    server["restartPolicy"] = "Always"
    server["resources"] = {**(server.get("resources") or _gms_requests()), "claims": claims}
    server.setdefault("securityContext", confined_as(container))
    server["startupProbe"] = {
        "exec": {"command": ["test", "-S", f"{GMS_PATH}/{LEASE_SOCKET}"]},
        "periodSeconds": 1,
        "failureThreshold": GMS_START_S,
    }
    node = {"fieldRef": {"fieldPath": "spec.nodeName"}}
    put(server.setdefault("env", []), {"name": "SNAPBACK_NODE", "valueFrom": node}, by="name")
    for variable, value in {**_GMS_ENV, **_group_of(spec)}.items():
        put(server["env"], {"name": variable, "value": value}, by="name")
    spec["initContainers"] = [server, *(each for each in init if each is not server)]
    volumes = spec.setdefault("volumes", [])
    put(volumes, {"name": GMS_VOLUME, "emptyDir": {}}, by="name")
    for each in (server, container):
        mount = {"name": GMS_VOLUME, "mountPath": GMS_PATH}
        put(each.setdefault("volumeMounts", []), mount, by="mountPath")
    put(container.setdefault("env", []), {"name": "GMS_SOCKET_DIR", "value": GMS_PATH}, by="name")


def with_transfers(
    spec: Document, container: Document, image: str, name: str, changes: Document
) -> None:
    """Add the saver or the loader to a pod that has a memory server; `changes` are the user's.

    An init container of its name in the template is what it is made of. An image and a command of
    `changes` replace its own; variables replace those of the same name in their place and follow
    the others in their order; the secret and the mounts come behind the others. What is empty
    changes nothing.
    """
    claims = container.get("resources", {}).get("claims")
    if not claims:
        return
    init = spec["initContainers"]
    mover = init_container(spec, name) or {"name": name}
    mover["image"] = changes.get("image") or mover.get("image") or image
    if command := changes.get("command"):
        mover["command"] = command
        mover.pop("args", None)
    # Without one, a container would run what its image is for: the service itself.
    mover.setdefault("command", [name])
    # It has to be there for as long as the worker, and must not keep the pod of a Job from ending.
    mover["restartPolicy"] = "Always"
    mover["resources"] = {**(mover.get("resources") or _gms_requests()), "claims": claims}
    mover.setdefault("securityContext", confined_as(container))
    env = mover.setdefault("env", [])
    if all(each.get("name") != "GMS_CHECKPOINT_DIR" for each in env):
        env.append({"name": "GMS_CHECKPOINT_DIR", "value": ORDER_PATH})
    for variable in changes.get("envs") or ():
        put(env, variable, by="name")
    # Ours, whatever the user says: the node's gms and the memory server are found by them.
    for variable, value in {"GMS_SOCKET_DIR": GMS_PATH, "GMS_ORDER_DIR": ORDER_PATH}.items():
        put(env, {"name": variable, "value": value}, by="name")
    if secret := changes.get("envFromSecret"):
        mover["envFrom"] = [*(mover.get("envFrom") or []), {"secretRef": {"name": secret}}]
    mounts = mover.setdefault("volumeMounts", [])
    for volume, path in ((GMS_VOLUME, GMS_PATH), (name, ORDER_PATH)):
        put(mounts, {"name": volume, "mountPath": path}, by="mountPath")
    mounts += changes.get("volumeMounts") or []
    put(spec["volumes"], {"name": name, "emptyDir": {}}, by="name")
    server, *others = (each for each in init if each is not mover)
    spec["initContainers"] = [server, mover, *others]


def init_container(spec: Document, name: str) -> Document | None:
    """Return the init container of a name."""
    init = spec.get("initContainers") or ()
    return next((each for each in init if each.get("name") == name), None)


def _gms_requests() -> Document:
    """Return what a memory server needs without its devices; weights are memory of theirs."""
    return {"requests": {"cpu": "50m", "memory": "128Mi"}}


def confined_as(container: Document) -> Document:
    """Return what Pod Security `restricted` asks for, with the user of the worker.

    A worker of the same user reaches the sockets, and where its pod is within `restricted` the
    server is too: what its pod says of users counts for both.
    """
    worker = container.get("securityContext") or {}
    users = ("runAsUser", "runAsGroup", "runAsNonRoot")
    return {
        **{key: worker[key] for key in users if key in worker},
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
        "seccompProfile": {"type": "RuntimeDefault"},
    }


def _group_of(spec: Document) -> dict[str, str]:
    """Return how workers of other users reach the memory server: by the group of the volumes."""
    group = spec.get("securityContext", {}).get("fsGroup")
    return {} if group is None else {"SNAPBACK_LEASE_GROUP": str(group)}


def without_ours(spec: Document) -> Document:
    """Return the spec of a pod without the variables that are put into each pod of ours."""
    found = copy.deepcopy(spec)
    for container in (*found.get("initContainers", ()), *found["containers"]):
        if "env" in container:
            container["env"] = [row for row in container["env"] if row["name"] not in _VARIABLES]
    return found


def put(rows: list[Document], row: Document, *, by: str) -> None:
    """Put a row in the place of the first with the same key, or behind all others.

    Any further row of that key is taken out: of several variables of one name the last counts.
    """
    places = [index for index, found in enumerate(rows) if found.get(by) == row[by]]
    if not places:
        rows.append(row)
        return
    rows[places[0]] = row
    for index in reversed(places[1:]):
        del rows[index]
