"""What a pod has for the services of its node: the emptyDirs by which they meet, and its claim."""

from __future__ import annotations

from pathlib import PurePath

CONTROL_VOLUME = "snapshot-control"
"""Has the control directory of each container, by the name of the container."""

GMS_VOLUME = "gms-sockets"
"""Has the sockets of the pod's memory server."""

INIT_VOLUME = "snapback-init"
"""Has `snapback-init` for each container that waits for a process, by the name of the container."""

SAVER = "gms-saver"
LOADER = "gms-loader"
"""Containers of a pod that move its GPU memory, and the volumes in which they get their orders."""

DEVICES = "snapback-devices"
"""The claim of a pod whose devices its memory server shares."""


def folder_of(kubelet_dir: PurePath, pod_uid: str, volume: str) -> str:
    """Return where an emptyDir of a pod is on its node, below the folder of the kubelet."""
    return str(kubelet_dir / "pods" / pod_uid / "volumes" / "kubernetes.io~empty-dir" / volume)
