"""The ResourceSlice of a node: its simulated devices, as schedulers read them.

The attributes have the names and types that NVIDIA's driver publishes, qualified with its domain,
so that selectors written for it hold for simulated devices, whatever the name of their driver.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from gms.domain.claims import DRIVER, ClaimableDevice

API = "resource.k8s.io/v1"
NVIDIA = "gpu.nvidia.com"
_KIB = 1024
_SUFFIXES = ("", "Ki", "Mi", "Gi", "Ti", "Pi")


class _Metadata(msgspec.Struct, frozen=True, rename="camel"):
    name: str
    resource_version: str = ""


class _Pool(msgspec.Struct, frozen=True):
    generation: int = 0


class _Spec(msgspec.Struct, frozen=True):
    pool: _Pool
    devices: list[dict[str, Any]] = []


class FoundSlice(msgspec.Struct, frozen=True):
    """The fields of a ResourceSlice that its publisher compares."""

    metadata: _Metadata
    spec: _Spec


@dataclass(frozen=True, slots=True)
class Create:
    """There is no slice yet, or the kubelet has deleted it: it does so at each of its starts."""

    body: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Replace:
    """The slice lists other devices."""

    name: str
    body: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Delete:
    """A second slice of the pool, of another writer."""

    name: str


def next_write(
    found: Sequence[FoundSlice], node: str, node_uid: str, devices: Sequence[ClaimableDevice]
) -> Create | Replace | Delete | None:
    """Return what brings the slices of a node nearer to its devices; None when they are right."""
    if not found:
        return Create(resource_slice(node, node_uid, devices, generation=1))
    first, *others = sorted(found, key=lambda each: each.metadata.name != slice_name(node))
    if others:
        return Delete(others[0].metadata.name)
    # A scheduler ignores what belongs to an older generation of the pool.
    body = resource_slice(node, node_uid, devices, generation=first.spec.pool.generation + 1)
    if first.spec.devices == body["spec"]["devices"]:
        return None
    body["metadata"]["name"] = first.metadata.name
    body["metadata"]["resourceVersion"] = first.metadata.resource_version
    return Replace(first.metadata.name, body)


def slice_name(node: str) -> str:
    """Return the name of the slice of a node."""
    return f"{node}-{DRIVER}"


def resource_slice(
    node: str, node_uid: str, devices: Sequence[ClaimableDevice], *, generation: int
) -> dict[str, Any]:
    """Return the ResourceSlice of a node. It is deleted with the Node, which owns it."""
    owner = {"apiVersion": "v1", "kind": "Node", "name": node, "uid": node_uid}
    return {
        "apiVersion": API,
        "kind": "ResourceSlice",
        "metadata": {"name": slice_name(node), "ownerReferences": [owner]},
        "spec": {
            "driver": DRIVER,
            "nodeName": node,
            "pool": {"name": node, "generation": generation, "resourceSliceCount": 1},
            "devices": [_device(each) for each in devices],
        },
    }


def _device(device: ClaimableDevice) -> dict[str, Any]:
    texts = {
        "type": "gpu",
        "uuid": device.uuid,
        "productName": device.product,
        "brand": "Nvidia",
        "architecture": "Hopper",
        "addressingMode": "HMM",
        "pcieBusID": f"0000:{device.index:02x}:00.0",
    }
    # Semantic versions: three numbers without leading zeros.
    versions = {
        "cudaComputeCapability": "9.0.0",
        "cudaDriverVersion": "13.0.0",
        "driverVersion": "580.65.6",
    }
    return {
        "name": device.name,
        "attributes": {
            **{f"{NVIDIA}/{name}": {"string": text} for name, text in texts.items()},
            **{f"{NVIDIA}/{name}": {"version": text} for name, text in versions.items()},
            "resource.kubernetes.io/pcieRoot": {"string": f"pci0000:{device.index:02x}"},
            "snapback.nvidia.com/simulated": {"bool": True},
        },
        "capacity": {f"{NVIDIA}/memory": {"value": quantity(device.capacity)}},
    }


def quantity(size: int) -> str:
    """Write bytes, rounded down to whole KiB, as the API server writes them itself.

    Otherwise what it returns would differ from what was sent, and be sent again.
    """
    value, power = size // _KIB, 1
    while value and value % _KIB == 0 and power < len(_SUFFIXES) - 1:
        value, power = value // _KIB, power + 1
    return f"{value}{_SUFFIXES[power]}"
