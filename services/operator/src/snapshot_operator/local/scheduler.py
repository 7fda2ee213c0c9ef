"""Places pods of the local cluster: whole devices, one pod each. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from snapshot_api.facts import HOSTNAME_LABEL, Node, Pod, gpus_wanted
from snapshot_api.v1alpha1.content import SnapshotContent
from snapshot_operator.core.nodes import unusable_for_new_work
from snapshot_operator.core.restore import source_of
from snapshot_shared.codec import encode_json
from snapshot_shared.errors import Failure
from snapshot_shared.orders import DEVICE_DRIVERS, DeviceRef, version_gap
from snapshot_shared.units import counted, sizes


class Placement(NamedTuple):
    """Where a pod goes: the node and its devices, in the worker's order."""

    node: str
    devices: list[DeviceRef]


class Waiting(NamedTuple):
    """Why a pod cannot be placed now."""

    reason: str
    message: str


def place(
    pod: Pod,
    nodes: Sequence[Node],
    used: Mapping[str, set[str]],
    content: SnapshotContent | None = None,
) -> Placement | Waiting | Failure:
    """Choose one of the nodes that the pod admits, and devices.

    `used` gives the device uuids in use by node. `content` is what a restore brings, committed;
    when every node that the pod admits is too small for it, the answer is a Failure with both
    values, before any side effect. Waiting means that it may work later.
    """
    wanted = gpus_wanted(pod.spec)
    if not nodes:
        return Waiting("NoSuchNode", f"no node matches {_selection(pod)}")
    refusals = [_refusal(node, wanted, content) for node in nodes]
    if all(refusals):
        return next(refusal for refusal in refusals if refusal)
    largest = _largest(content)
    reasons = []
    for node, refusal in zip(nodes, refusals, strict=True):
        if refusal:
            reasons.append(refusal.message)
            continue
        name = node.metadata.name
        if unusable := unusable_for_new_work(node):
            reasons.append(f"{name} {unusable}")
            continue
        if gap := version_gap(node.status.schemas):
            reasons.append(f"{name} cannot be ordered anything: {gap}")
            continue
        free = [d for d in node.status.devices if d.uuid not in used.get(name, set())]
        fitting = [device for device in free if device.capacity_bytes >= largest]
        if len(fitting) >= wanted:
            chosen = sorted(fitting, key=lambda device: device.index)[:wanted]
            return Placement(
                name, [DeviceRef(ordinal=i, uuid=device.uuid) for i, device in enumerate(chosen)]
            )
        there = counted(len(node.status.devices), "GPU")
        fit = f", of which {len(fitting)} fit" if len(fitting) < len(free) else ""
        reasons.append(f"{name} has {len(free)} of {there} free{fit}, the pod asks for {wanted}")
    return Waiting("Unschedulable", "; ".join(reasons))


def shape(pod: Pod) -> str:
    """Return what pods that can be placed at the same places have in common.

    While the oldest of a shape waits for room, so do the others: only it has to look for some.
    """
    spec = pod.spec
    parts = (
        pod.metadata.namespace,
        spec.node_name,
        sorted(spec.node_selector.items()),
        gpus_wanted(spec),
        source_of(pod),
    )
    return encode_json(parts).decode()


def admits(pod: Pod, node: Node) -> bool:
    """Whether a pod may be placed on a node, as far as the pod is concerned."""
    name = node.metadata.name
    if pod.spec.node_name is not None and pod.spec.node_name != name:
        return False
    labels = {HOSTNAME_LABEL: name, **node.metadata.labels}
    return all(labels.get(key) == value for key, value in pod.spec.node_selector.items())


def _selection(pod: Pod) -> str:
    selector = ", ".join(f"{key}={value}" for key, value in pod.spec.node_selector.items())
    return f"nodeName {pod.spec.node_name}" if pod.spec.node_name else f"nodeSelector {selector}"


def _largest(content: SnapshotContent | None) -> int:
    """Return the bytes of the largest device of an artifact."""
    committed = content.status.committed if content is not None else None
    vector = committed.vector if committed is not None else []
    return max((entry.layout.bytes for entry in vector if entry.layout is not None), default=0)


def _refusal(node: Node, wanted: int, content: SnapshotContent | None) -> Failure | None:
    """Return why a node can never hold the artifact, with both values."""
    committed = content.status.committed if content is not None else None
    if content is None or committed is None:
        return None
    needed = [entry.layout for entry in committed.vector if entry.layout is not None]
    # What a process itself has on devices is in no layout. An artifact that was imported has no
    # devices here: the node compares how many its source had.
    had = len(content.spec.source.devices) or len(needed)
    if wanted != had and (had or committed.driver not in DEVICE_DRIVERS):
        return Failure(
            reason="Incompatible",
            message=f"the snapshot has {counted(had, 'GPU')}, the pod asks for {wanted}",
            values={"snapshot_gpus": had, "pod_gpus": wanted},
            next_step="give the pod as many nvidia.com/gpu as the source had",
        )
    name = node.metadata.name
    if not node.status.devices:
        # A node whose GMS is being started has announced none yet.
        return None
    if len(node.status.devices) < wanted:
        return Failure(
            reason="Incompatible",
            message=f"the snapshot needs {counted(wanted, 'GPU')}, {name} has "
            f"{len(node.status.devices)}",
            values={"needed_gpus": wanted, "node_gpus": len(node.status.devices), "node": name},
            next_step="choose a node with enough GPUs",
        )
    largest = _largest(content)
    sizes_here = sorted((d.capacity_bytes for d in node.status.devices), reverse=True)
    # The smallest of as many of the largest ones as are asked for.
    capacity = sizes_here[wanted - 1] if wanted else 0
    if wanted and largest > capacity:
        needs, has = sizes(largest, capacity)
        return Failure(
            reason="DeviceTooSmall",
            message=f"the snapshot needs {needs} on one GPU, a GPU of {name} has {has}",
            values={"needed": largest, "capacity": capacity, "node": name},
            next_step="choose a node whose GPUs have at least the memory of the source",
        )
    return None
