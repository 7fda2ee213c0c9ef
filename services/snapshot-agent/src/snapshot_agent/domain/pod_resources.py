"""What a kubelet says of the devices that it gave to the containers of its node.

It answers `v1.PodResourcesLister/List` of `k8s.io/kubelet/pkg/apis/podresources` in protobuf, of
which few fields are read, by their numbers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from snapshot_shared.errors import InvalidMessage
from snapshot_shared.orders import PodRef, PresenceDevice

GPU_DRIVERS = ("gpu.nvidia.com", "gpu.sim.snapback.nvidia.com")
"""The drivers of dynamic resource allocation whose devices are GPUs, called `gpu-<index>`."""

GPU_RESOURCES = ("nvidia.com/gpu", "nvidia.com/mig-")
"""How the names of the resources of device plugins begin whose devices are GPUs."""

# ListPodResourcesResponse, and within it PodResources, ContainerResources, ContainerDevices,
# DynamicResource and ClaimResource.
_PODS = 1
_NAME, _NAMESPACE, _CONTAINERS = 1, 2, 3
_DEVICES, _CLAIMS = 2, 5
_IDS = 2
_CLAIMED = 4
_DRIVER, _DEVICE = 2, 4


class HeldGpu(NamedTuple):
    """A GPU that a container holds: `name` is that of its driver or plugin.

    A device of a claim is named by its number on the node, one of a plugin by its uuid.
    """

    name: str
    number: int | None = None


def held_gpus(answer: bytes, pod: PodRef) -> list[HeldGpu]:
    """Return the GPUs of a container: those of its claims, else those of its limits.

    None are held by one that the kubelet does not know. InvalidMessage.
    """
    claimed: list[HeldGpu] = []
    limited: list[HeldGpu] = []
    for found in _nested(answer, _PODS):
        if (_text(found, _NAMESPACE), _text(found, _NAME)) != (pod.namespace, pod.name):
            continue
        for container in _nested(found, _CONTAINERS):
            if _text(container, _NAME) == pod.container:
                claimed += _claimed(container)
                limited += _limited(container)
    return claimed or limited


def _claimed(container: bytes) -> Iterator[HeldGpu]:
    for dynamic in _nested(container, _CLAIMS):
        for resource in _nested(dynamic, _CLAIMED):
            if _text(resource, _DRIVER) in GPU_DRIVERS:
                name = _text(resource, _DEVICE)
                digits = name.removeprefix("gpu-")
                is_whole = digits != name and digits.isdecimal() and len(digits) < 10
                yield HeldGpu(name, int(digits) if is_whole else None)


def _limited(container: bytes) -> Iterator[HeldGpu]:
    for devices in _nested(container, _DEVICES):
        if _text(devices, _NAME).startswith(GPU_RESOURCES):
            # A GPU that is shared in time has several ids: its uuid, and a number after `::`. A
            # container may have several shares of it.
            names = (_decoded(each).partition("::")[0] for each in _nested(devices, _IDS))
            yield from map(HeldGpu, dict.fromkeys(names))


def on_this_node(held: Sequence[HeldGpu], listed: Sequence[PresenceDevice]) -> list[PresenceDevice]:
    """Return what a node knows of the GPUs that a container holds, in the same order.

    Of one that it does not list there is the name alone.
    """
    by_index = {device.index: device for device in listed}
    by_uuid = {device.uuid: device for device in listed}
    found = []
    for ordinal, each in enumerate(held):
        known = by_uuid.get(each.name) if each.number is None else by_index.get(each.number)
        unknown = PresenceDevice(index=ordinal, uuid=each.name[:256], product="", capacity_bytes=0)
        found.append(known or unknown)
    return found


def _nested(message: bytes, number: int) -> Iterator[bytes]:
    """Yield the values of a field that has a length: strings, and messages."""
    at = 0
    while at < len(message):
        key, at = _varint(message, at)
        match key & 7:
            case 0:
                _, at = _varint(message, at)
            case 1:
                at += 8
            case 5:
                at += 4
            case 2:
                length, at = _varint(message, at)
                if at + length > len(message):
                    raise InvalidMessage("the answer of the kubelet is cut off")
                if key >> 3 == number:
                    yield message[at : at + length]
                at += length
            case kind:
                raise InvalidMessage(f"the answer of the kubelet has a field of type {kind}")


def _varint(message: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while at < len(message) and shift < 64:
        value |= (message[at] & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if message[at - 1] < 0x80:
            return value, at
    raise InvalidMessage("the answer of the kubelet is cut off")


def _text(message: bytes, number: int) -> str:
    return _decoded(next(_nested(message, number), b""))


def _decoded(value: bytes) -> str:
    return value.decode(errors="replace")
