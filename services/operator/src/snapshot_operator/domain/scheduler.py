"""Places pods of the local cluster: whole devices, one pod each. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from snapshot_shared.errors import Failure
from snapshot_shared.objects import HOSTNAME_LABEL, Node, Pod, gpus_wanted, is_true
from snapshot_shared.orders import DeviceRef, VectorEntry


class Placement(NamedTuple):
    """Where a pod goes: the node and its devices, in the worker's order."""

    node: str
    devices: list[DeviceRef]


class Waiting(NamedTuple):
    """Why a pod cannot be placed now."""

    reason: str
    message: str


def place(
    pod: Pod, nodes: Sequence[Node], used: Mapping[str, set[str]], vector: Sequence[VectorEntry]
) -> Placement | Waiting | Failure:
    """Choose a node and devices.

    `used` gives the device uuids in use by node. `vector` is what a restore target has to hold;
    when every node that the pod admits is too small for it, the answer is a Failure with both
    values, before any side effect. Waiting means that it may work later.
    """
    wanted = gpus_wanted(pod.spec)
    admitted = [node for node in nodes if _admits(pod, node)]
    if not admitted:
        return Waiting("NoSuchNode", f"no node matches {_wish(pod)}")
    refusals = [_refusal(node, wanted, vector) for node in admitted]
    if all(refusals):
        return next(refusal for refusal in refusals if refusal)
    reasons = []
    for node, refusal in zip(admitted, refusals, strict=True):
        if refusal:
            continue
        name = node.metadata.name
        if unusable := unusable_for_new_work(node):
            reasons.append(f"{name} {unusable}")
            continue
        free = [d for d in node.status.devices if d.uuid not in used.get(name, set())]
        if len(free) >= wanted:
            chosen = sorted(free, key=lambda device: device.index)[:wanted]
            return Placement(
                name, [DeviceRef(ordinal=i, uuid=device.uuid) for i, device in enumerate(chosen)]
            )
        reasons.append(f"{name} has {len(free)} of {wanted} GPUs free")
    return Waiting("Unschedulable", "; ".join(reasons))


def unusable_for_new_work(node: Node) -> str:
    """Say why nothing new may begin on a node, for the end of a sentence; empty when it may."""
    if not is_true(node.status.conditions, "Ready"):
        return "is not ready"
    return "is cordoned" if node.spec.unschedulable else ""


def _admits(pod: Pod, node: Node) -> bool:
    name = node.metadata.name
    if pod.spec.node_name is not None and pod.spec.node_name != name:
        return False
    labels = {HOSTNAME_LABEL: name, **node.metadata.labels}
    return all(labels.get(key) == value for key, value in pod.spec.node_selector.items())


def _wish(pod: Pod) -> str:
    selector = ", ".join(f"{key}={value}" for key, value in pod.spec.node_selector.items())
    return f"nodeName {pod.spec.node_name}" if pod.spec.node_name else f"nodeSelector {selector}"


def _refusal(node: Node, wanted: int, vector: Sequence[VectorEntry]) -> Failure | None:
    """Say why a node can never hold the artifact, with both values."""
    needed = [entry.layout for entry in vector if entry.layout is not None]
    if vector and wanted != len(needed):
        return Failure(
            reason="Incompatible",
            message=f"the snapshot has {len(needed)} GPUs, the pod asks for {wanted}",
            values={"snapshot_gpus": len(needed), "pod_gpus": wanted},
            next_step="give the pod as many nvidia.com/gpu as the source had",
        )
    if not vector:
        return None
    name = node.metadata.name
    if len(node.status.devices) < wanted:
        return Failure(
            reason="Incompatible",
            message=f"the snapshot needs {wanted} GPUs, {name} has {len(node.status.devices)}",
            values={"needed_gpus": wanted, "node_gpus": len(node.status.devices), "node": name},
            next_step="choose a node with enough GPUs",
        )
    largest = max((layout.bytes for layout in needed), default=0)
    smallest = min((device.capacity_bytes for device in node.status.devices), default=0)
    if largest > smallest:
        return Failure(
            reason="DeviceTooSmall",
            message=f"the snapshot needs {largest} bytes on one GPU, a GPU of {name} has "
            f"{smallest} bytes",
            values={"needed": largest, "capacity": smallest, "node": name},
            next_step="choose a node whose GPUs have at least the memory of the source",
        )
    return None
