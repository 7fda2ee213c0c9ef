"""The pods of a node by the names of their log folders, which its kubelet wrote.

The kubelet makes `<namespace>_<name>_<uid>` for each pod before it starts a container, and removes
it after the pod. An order names its pod by the same three, but an order is only as true as its
author was. No pod can write this folder, so a service of the node compares the two.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from snapshot_shared.errors import NotEligible, StalePodReference
from snapshot_shared.orders import PodRef

USUAL = Path("/var/log/pods")
"""The folder, unless the kubelet's configuration has another `podLogsDir`."""


def named(folders: Iterable[str], uid: str) -> tuple[str, str] | None:
    """Return the namespace and the name of the pod with a uid; None if no folder is of it."""
    for folder in folders:
        # Names of Kubernetes have no underscore.
        namespace, _, rest = folder.partition("_")
        name, _, found = rest.partition("_")
        if found == uid:
            return namespace, name
    return None


def check_pod(pod: PodRef, folder: Path) -> None:
    """Raise StalePodReference unless the kubelet has this pod; NotEligible without the folder."""
    try:
        found = named((path.name for path in folder.iterdir()), pod.uid)
    except FileNotFoundError:
        raise NotEligible(
            f"{folder}, in which the kubelet has a folder for each pod, is not there",
            next_step="mount it from the node, or set SNAPBACK_POD_LOGS_DIR",
        ) from None
    if found != (pod.namespace, pod.name):
        # The other pod is not named, because the author of the order may read the report.
        raise StalePodReference(
            f"pod {pod.namespace}/{pod.name} with uid {pod.uid} was not started on this node",
            next_step="name the pod by its own namespace, name and uid",
            expected=pod.uid,
        )
