"""Workers that CRIU captures start with a seccomp profile that refuses io_uring.

CRIU can dump no io_uring, and libraries such as libuv make one wherever the kernel lets them. The
node's helper installs the profile below the kubelet's folder, and its agent announces it. Such a
node has a label, and a pod with the profile may run on nodes with the label alone: on any other
one the kubelet could not start it. A pod that names a profile keeps it, as ours allows all else.

Pods are plain documents here, as in `shaping`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from snapshot_api.facts import SECCOMP_LABEL, Node

Document = dict[str, Any]


def label_of(profile: str) -> str:
    """Return the value of a node's label for a profile, whose name has no underscore."""
    return profile.replace("/", "_")


def has_profile(node: Node, profile: str) -> bool:
    """Whether a node has the label of a profile."""
    return node.metadata.labels.get(SECCOMP_LABEL) == label_of(profile)


def offered(nodes: Iterable[Node], profile: str, spec: Document) -> str:
    """Return the profile if a node that a pod may be bound to has it; empty if none has."""
    place = spec.get("nodeName")
    found = (each for each in nodes if not place or each.metadata.name == place)
    return profile if profile and any(has_profile(each, profile) for each in found) else ""


def names_profile(spec: Document, container: Document) -> bool:
    """Whether a pod says how a container of it is confined. A privileged one never is."""
    own = container.get("securityContext") or {}
    pod = spec.get("securityContext") or {}
    return bool(own.get("privileged") or own.get("seccompProfile") or pod.get("seccompProfile"))


def required(profile: str) -> Document:
    """Return what the affinity of a pod with a profile requires of a node."""
    return {"key": SECCOMP_LABEL, "operator": "In", "values": [label_of(profile)]}


def with_profile(container: Document, profile: str) -> None:
    """Give a container a profile of its node."""
    context = container["securityContext"] = container.get("securityContext") or {}
    context["seccompProfile"] = {"type": "Localhost", "localhostProfile": profile}
