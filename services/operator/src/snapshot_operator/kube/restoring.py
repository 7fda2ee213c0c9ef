"""A pod as it is admitted: its worker waits to be restored, or may be captured while it runs.

Pods are plain documents here, as in `shaping`: what is not named below is left as the user wrote
it. A pod that is changed already is changed no further, for webhooks may be called again.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any, NamedTuple

from snapshot_api.validate import Problem
from snapshot_api.well_known import IMMEDIATE, RESTORE_CONTAINER, RESTORE_DRIVER, STANDBY_VARIABLES
from snapshot_operator.core.restore import LONGEST_S
from snapshot_operator.core.restore_request import RestoreRequest, request_in
from snapshot_operator.kube.shaping import (
    AGENT_IMAGE,
    CONTROL_PATH,
    GMS_IMAGE,
    confined_as,
    init_container,
    put,
    with_agent_affinity,
    with_control_directory,
    with_memory_server,
    with_seccomp_profile,
    with_shared_memory,
    with_transfers,
)
from snapshot_operator.kube.wire import INIT_PROGRAM
from snapshot_shared.orders import PLACEHOLDER_DRIVERS
from snapshot_shared.volumes import DEVICES, INIT_VOLUME, LOADER, SAVER

Document = dict[str, Any]

RESTORED_FILE = "restored"
"""The file by which a worker says that it serves again, in its control directory."""

SOURCE_WAIT_S = 86_400
"""The longest deadline that a capture may have, in seconds: a restore waits for its source."""

INSTALLED_INIT = "/opt/snapback/snapback-init"
"""Where the image of the agent has the first process of placeholders."""

_SERVES = (
    f"cat {CONTROL_PATH}/{RESTORED_FILE} 2>/dev/null || "
    '{ echo "the worker has not been restored yet: kubectl get snapshotrestores"; exit 1; }'
)
"""The probe of a worker that has none. The kubelet shows what a failed probe has written."""

_INIT_PATH = INIT_PROGRAM.rpartition("/")[0]
_INIT_AMOUNTS = {"cpu": "100m", "memory": "64Mi"}
_NOT_IN_PLACEHOLDER = ("stdin", "stdinOnce", "tty")
_GROWN = ("volumes", "initContainers", "affinity")
_PROBES = ("startupProbe", "livenessProbe", "readinessProbe")


def restore_request(pod: Document) -> RestoreRequest:
    """Return what a pod asks for."""
    return request_in(pod.get("metadata", {}).get("annotations") or {})


class Images(NamedTuple):
    """The images of what is put into pods: of the memory server, and of the first process."""

    gms: str = GMS_IMAGE
    agent: str = AGENT_IMAGE


def placeholder_problems(pod: Document, driver: str = "") -> Iterator[Problem]:
    """Yield why a driver, else the one that a pod names, cannot bring a process into the pod."""
    if not _needs_placeholder(pod, driver):
        return
    for field in ("hostPID", "shareProcessNamespace"):
        if pod["spec"].get(field):
            text = "a process is restored below the first one of its container; leave this out"
            yield Problem(f"spec.{field}", text)


def standby_patch(
    pod: Document,
    images: Images = Images(),  # noqa: B008 - it never changes
    driver: str = "",
    shared_memory: Document | None = None,
    profile: str = "",
) -> list[Document]:
    """Return the JSON Patch by which the worker of a pod waits to be restored.

    One whose claim is called as that of a checkpoint's worker has a memory server for it, and the
    loader that its template asks for by an init container of that name. The
    container that is restored is written down: another webhook may put one before it.

    Where a `driver` (else the one that the pod names) brings the process, the container is a
    placeholder for it, with the mounts of a checkpoint's worker: `shared_memory` is what its
    checkpoint says of that, None where it has none, and `profile` a seccomp profile of nodes for a
    worker that had one.
    """
    return _patch(pod, _standing_by(pod, images, driver, shared_memory, profile))


def capturable_patch(
    pod: Document,
    images: Images = Images(),  # noqa: B008 - it never changes
    profile: str = "",
) -> list[Document]:
    """Return the JSON Patch by which the worker of a pod can be captured while it runs.

    It has a control directory, a node with an agent, and a memory server if its claim is called as
    that of a checkpoint's worker. `profile` is the seccomp profile of nodes for workers of CRIU.
    """
    return _patch(pod, _capturable(pod, images, profile))


def cold_patch(
    pod: Document,
    images: Images = Images(),  # noqa: B008 - it never changes
) -> list[Document]:
    """Return the JSON Patch by which the worker of a pod that is to be restored starts cold.

    It has what its worker needs, and may run on a node without an agent.
    """
    return _patch(pod, _cold(pod, images))


def complete(pod: Document, images: Images, *, starts_cold: bool = False) -> Document:
    """Return a pod as admission changes it, as far as its annotations say it.

    A pod of the policy `Immediate` waits, or `starts_cold`.
    """
    asked = restore_request(pod)
    if asked.source and asked.policy == IMMEDIATE and starts_cold:
        found = _cold(pod, images)
    elif asked.source:
        found = _standing_by(pod, images)
    elif asked.is_capturable:
        found = _capturable(pod, images)
    else:
        return pod
    meta = {**pod["metadata"], "annotations": _marked(pod, found)}
    return {**pod, "metadata": meta, "spec": found.spec}


class _Shaped(NamedTuple):
    """The spec of a pod as it is changed, and annotations that it gets."""

    spec: Document
    marks: dict[str, str]


def _standing_by(
    pod: Document,
    images: Images,
    driver: str = "",
    shared_memory: Document | None = None,
    profile: str = "",
) -> _Shaped:
    spec, container = _with_worker(pod, images, LOADER)
    with_agent_affinity(spec)
    for variable in STANDBY_VARIABLES:
        put(container["env"], {"name": variable, "value": "1"}, by="name")
    marks = {RESTORE_CONTAINER: container["name"]}
    if _needs_placeholder(pod, driver):
        marks[RESTORE_DRIVER] = driver or restore_request(pod).driver
        if shared_memory is not None:
            with_shared_memory(spec, container, shared_memory)
        with_seccomp_profile(spec, container, profile)
        _with_placeholder(spec, container, images.agent)
    else:
        container["startupProbe"] = startup_probe(container)
    return _Shaped(spec, marks)


def _capturable(pod: Document, images: Images, profile: str = "") -> _Shaped:
    spec, container = _with_worker(pod, images, SAVER)
    with_agent_affinity(spec)
    with_seccomp_profile(spec, container, profile)
    return _Shaped(spec, {RESTORE_CONTAINER: container["name"]})


def _cold(pod: Document, images: Images) -> _Shaped:
    spec, container = _with_worker(pod, images, LOADER)
    return _Shaped(spec, {RESTORE_CONTAINER: container["name"]})


def _with_worker(pod: Document, images: Images, mover: str) -> tuple[Document, Document]:
    """Return the spec of a pod with what each worker of ours has, and its container."""
    spec = copy.deepcopy(pod["spec"])
    container = spec["containers"][_target(pod)]
    with_control_directory(spec, container)
    claims = (container.get("resources") or {}).get("claims") or []
    if any(claim["name"] == DEVICES for claim in claims):
        with_memory_server(spec, container, images.gms)
        if any(each["name"] == mover for each in spec["initContainers"]):
            with_transfers(spec, container, images.gms, mover, {})
    return spec, container


def _marked(pod: Document, shaped: _Shaped) -> Document:
    return {**pod["metadata"]["annotations"], **shaped.marks}


def _patch(pod: Document, shaped: _Shaped) -> list[Document]:
    index, spec = _target(pod), shaped.spec
    before, path, container = pod["spec"], f"/spec/containers/{index}", spec["containers"][index]
    return [
        *_changes("/metadata", pod["metadata"], {"annotations": _marked(pod, shaped)}),
        *_changes("/spec", before, {name: spec[name] for name in _GROWN if name in spec}),
        *_changes(path, before["containers"][index], container),
        *_removals(path, before["containers"][index], container),
    ]


def _needs_placeholder(pod: Document, driver: str) -> bool:
    return (driver or restore_request(pod).driver) in PLACEHOLDER_DRIVERS


def _with_placeholder(spec: Document, container: Document, image: str) -> None:
    """Have a container run nothing but our first process, which an init container installs.

    Where the API server has added defaults to what is here already, they stay.
    """
    put(spec["volumes"], {"name": INIT_VOLUME, "emptyDir": {}}, by="name")
    mount = {"name": INIT_VOLUME, "mountPath": _INIT_PATH, "subPath": container["name"]}
    found = init_container(spec, INIT_VOLUME) or {"name": INIT_VOLUME, "image": image}
    installer = {
        # As much as it may have: a pod whose containers have all of theirs stays Guaranteed.
        "resources": {"requests": _INIT_AMOUNTS, "limits": _INIT_AMOUNTS},
        "securityContext": {**confined_as(container), "readOnlyRootFilesystem": True},
        **found,
        "command": [INSTALLED_INIT, "--install", INIT_PROGRAM],
    }
    put(installer.setdefault("volumeMounts", []), mount, by="mountPath")
    put(spec.setdefault("initContainers", []), installer, by="name")
    put(container["volumeMounts"], mount, by="mountPath")
    command = container.get("command") or []
    if command[:1] != [INIT_PROGRAM]:
        # What it runs when the container starts again after its process has ended.
        container["command"] = [INIT_PROGRAM, *(["--", *command] if command else [])]
    if len(container["command"]) == 1:
        container.pop("args", None)
    for name in _NOT_IN_PLACEHOLDER:
        container.pop(name, None)
    # It would run in the placeholder, and what is brought has been through its own.
    lifecycle = container.get("lifecycle") or {}
    if lifecycle.pop("postStart", None) and not lifecycle:
        del container["lifecycle"]
    asked = {"command": [INIT_PROGRAM, "--restored"]}
    before = container.get("startupProbe") or {}
    container["startupProbe"] = {**(before if before.get("exec") == asked else {}), "exec": asked}
    container["startupProbe"] |= _patience()


def startup_probe(container: Document) -> Document:
    """Return the probe that holds the others of a container back until its worker serves again.

    It is the first that the container has, asked every second for as long as a restore may take.
    """
    found = next((container[name] for name in _PROBES if container.get(name)), None)
    probe = found or {"exec": {"command": ["sh", "-c", _SERVES]}}
    changed = {**probe, **_patience()}
    # Left out rather than 0: the API server writes none, and a second call must change nothing.
    changed.pop("initialDelaySeconds", None)
    return changed


def _patience() -> Document:
    """Return how a startup probe asks: every second for as long as a restore may take."""
    limit = int(SOURCE_WAIT_S + LONGEST_S)
    return {"periodSeconds": 1, "successThreshold": 1, "failureThreshold": limit}


def _target(pod: Document) -> int:
    name = restore_request(pod).container
    names = [container["name"] for container in pod["spec"]["containers"]]
    return names.index(name) if name else 0


def _changes(path: str, before: Document, after: Document) -> Iterator[Document]:
    """Yield an operation for each field of `after` that differs; `add` replaces what is there."""
    for name, value in after.items():
        if before.get(name) != value:
            yield {"op": "add", "path": f"{path}/{name}", "value": value}


def _removals(path: str, before: Document, after: Document) -> Iterator[Document]:
    """Yield an operation for each field that `after` has no more."""
    for name in before:
        if name not in after:
            yield {"op": "remove", "path": f"{path}/{name}"}
