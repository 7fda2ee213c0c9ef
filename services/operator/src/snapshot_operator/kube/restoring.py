"""A pod that is to be restored, as it is admitted: its worker waits for what is brought to it.

Pods are plain documents here, as in `shaping`: what is not named below is left as the user wrote
it. A pod that is changed already is changed no further, for webhooks may be called again.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

from snapshot_operator.core.restore import LONGEST_S
from snapshot_operator.core.restore_request import RestoreRequest, request_in
from snapshot_operator.kube.shaping import (
    CONTROL_PATH,
    GMS_IMAGE,
    put,
    with_agent_affinity,
    with_control_directory,
    with_memory_server,
    with_transfers,
)
from snapshot_shared.objects.snapback import RESTORE_CONTAINER, STANDBY_VARIABLES
from snapshot_shared.volumes import DEVICES, LOADER

Document = dict[str, Any]

RESTORED_FILE = "restored"
"""The file by which a worker says that it serves again, in its control directory."""

SOURCE_WAIT_S = 86_400
"""The longest deadline that a capture may have, in seconds: a restore waits for its source."""

_GROWN = ("volumes", "initContainers", "affinity")
_PROBES = ("startupProbe", "livenessProbe", "readinessProbe")


def restore_request(pod: Document) -> RestoreRequest:
    """Return what a pod asks for."""
    return request_in(pod.get("metadata", {}).get("annotations") or {})


def standby_patch(pod: Document, gms_image: str = GMS_IMAGE) -> list[Document]:
    """Return the JSON Patch by which the worker of a pod waits to be restored.

    One whose claim is called as that of a checkpoint's worker has a memory server for it, and the
    loader that its template asks for by an init container of that name. The
    container that is restored is written down: another webhook may put one before it.
    """
    index = _target(pod)
    spec = copy.deepcopy(pod["spec"])
    container = spec["containers"][index]
    with_control_directory(spec, container)
    for variable in STANDBY_VARIABLES:
        put(container["env"], {"name": variable, "value": "1"}, by="name")
    claims = (container.get("resources") or {}).get("claims") or []
    if any(claim["name"] == DEVICES for claim in claims):
        with_memory_server(spec, container, gms_image)
        if any(each["name"] == LOADER for each in spec["initContainers"]):
            with_transfers(spec, container, gms_image, LOADER, {})
    with_agent_affinity(spec)
    container["startupProbe"] = startup_probe(container)
    before = pod["spec"]
    marked = {**pod["metadata"]["annotations"], RESTORE_CONTAINER: container["name"]}
    return [
        *_changes("/metadata", pod["metadata"], {"annotations": marked}),
        *_changes("/spec", before, {name: spec[name] for name in _GROWN if name in spec}),
        *_changes(f"/spec/containers/{index}", before["containers"][index], container),
    ]


def startup_probe(container: Document) -> Document:
    """Return the probe that holds the others of a container back until its worker serves again.

    It is the first that the container has, asked every second for as long as a restore may take.
    """
    found = next((container[name] for name in _PROBES if container.get(name)), None)
    probe = found or {"exec": {"command": ["cat", f"{CONTROL_PATH}/{RESTORED_FILE}"]}}
    timing = {"periodSeconds": 1, "successThreshold": 1}
    changed = {**probe, **timing, "failureThreshold": int(SOURCE_WAIT_S + LONGEST_S)}
    # Left out rather than 0: the API server writes none, and a second call must change nothing.
    changed.pop("initialDelaySeconds", None)
    return changed


def _target(pod: Document) -> int:
    name = restore_request(pod).container
    names = [container["name"] for container in pod["spec"]["containers"]]
    return names.index(name) if name else 0


def _changes(path: str, before: Document, after: Document) -> Iterator[Document]:
    """Yield an operation for each field of `after` that differs; `add` replaces what is there."""
    for name, value in after.items():
        if before.get(name) != value:
            yield {"op": "add", "path": f"{path}/{name}", "value": value}
