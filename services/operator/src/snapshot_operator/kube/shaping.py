"""The Job of a checkpoint as Kubernetes gets it: the user's pod template, made ready for a capture.

Templates are plain documents here: what is not named below passes through as the user wrote it, in
the order in which they wrote it, whether this program knows the field or not.
"""

from __future__ import annotations

import copy
from typing import Any

import msgspec

from snapshot_operator.kube.wire import GMS_SERVER, OURS, new_meta
from snapshot_shared.errors import InvalidManifest
from snapshot_shared.objects.kubernetes import Job
from snapshot_shared.volumes import CONTROL_VOLUME, GMS_VOLUME

Document = dict[str, Any]

CONTROL_PATH = "/snapshot-control"
CONTROL_VARIABLES = ("SNAPSHOT_CONTROL_DIR", "DYN_SNAPSHOT_CONTROL_DIR")
"""Both name the control directory; the second is what images for Dynamo read."""
GMS_PATH = "/gms-sockets"
LEASE_SOCKET = "gms.sock"
GMS_IMAGE = "snapback/gms:dev"
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
READY_FILE = "ready-for-snapshot"
"""The file by which a worker says that it may be captured, in its control directory."""

SOURCE_LABEL = f"{OURS}snapshot-is-checkpoint-source"

# A proxy beside the worker would hold its connections, which no capture can bring back.
_NO_MESH = {"linkerd.io/inject": "disabled", "sidecar.istio.io/inject": "false"}


def job_manifest(job: Job, checkpoint: Document, gms_image: str = GMS_IMAGE) -> Document:
    """Return the Job of a DynamoCheckpoint, given what is decided of it and its document.

    InvalidManifest where the template has no container of the target's name.
    """
    spec = checkpoint["spec"]["job"]
    target = spec.get("targetContainerName", "main")
    template = source_template(spec["podTemplateSpec"], target, job.metadata.labels)
    if checkpoint["spec"].get("gpuMemoryService", {}).get("enabled", True):
        pod = template["spec"]
        with_memory_server(pod, find_container(pod, target), gms_image)
    shaped: Document = {"template": template, "backoffLimit": job.spec.backoff_limit}
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
    meta["annotations"] = {**meta.get("annotations", {}), **_NO_MESH}
    spec = shaped["spec"]
    spec["restartPolicy"] = "Never"
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


def with_memory_server(spec: Document, container: Document, image: str) -> None:
    """Add a memory server to a pod, for the devices that a container has claimed, if it has.

    An init container of its name in the template is what it is made of: its image, command and
    mounts stay.
    """
    claims = container.get("resources", {}).get("claims")
    if not claims:
        return
    init: list[Document] = spec.setdefault("initContainers", [])
    named = (each for each in init if each.get("name") == GMS_SERVER)
    server: Document = next(named, {"name": GMS_SERVER})
    server.setdefault("image", image)
    # An init container that restarts is started before the engine, and runs beside it.
    server["restartPolicy"] = "Always"
    server["resources"] = {**server.get("resources", {}), "claims": claims}
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


def _group_of(spec: Document) -> dict[str, str]:
    """Return how workers of other users reach the memory server: by the group of the volumes."""
    group = spec.get("securityContext", {}).get("fsGroup")
    return {} if group is None else {"SNAPBACK_LEASE_GROUP": str(group)}


def put(rows: list[Document], row: Document, *, by: str) -> None:
    """Put a row in the place of the one with the same key, or behind all others."""
    for index, found in enumerate(rows):
        if found.get(by) == row[by]:
            rows[index] = row
            return
    rows.append(row)
