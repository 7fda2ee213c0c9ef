"""The emptyDirs of a pod by which its containers meet the services of their node."""

from __future__ import annotations

from pathlib import PurePath

CONTROL_VOLUME = "snapshot-control"
"""Has the control directory of each container, by the name of the container."""

GMS_VOLUME = "gms-sockets"
"""Has the sockets of the pod's memory server."""

SAVER = "gms-saver"
LOADER = "gms-loader"
"""Containers of a pod that move its GPU memory, and the volumes in which they get their orders."""


def folder_of(kubelet_dir: PurePath, pod_uid: str, volume: str) -> str:
    """Return where an emptyDir of a pod is on its node, below the folder of the kubelet."""
    return str(kubelet_dir / "pods" / pod_uid / "volumes" / "kubernetes.io~empty-dir" / volume)
