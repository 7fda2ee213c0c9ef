"""The same devices for clusters without DRA: what the device plugin API hands out.

A container asks for a number of `nvidia.com/gpu` and gets devices that no other container has: the
API names no pod and no claim.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gms.domain.claims import DEVICE_DIR, ClaimableDevice, environment
from snapshot_shared.errors import UnknownDevice

RESOURCE = "nvidia.com/gpu"


def device_list(devices: Sequence[ClaimableDevice]) -> dict[str, Any]:
    """Return the ListAndWatchResponse: simulated devices do not fail."""
    return {"devices": [{"ID": each.uuid, "health": "Healthy"} for each in devices]}


def container_allocation(
    ids: Sequence[str], devices: Sequence[ClaimableDevice], folder: str
) -> dict[str, Any]:
    """Return the ContainerAllocateResponse for the devices of one container. UnknownDevice.

    Devices have folders below `folder`, named by their uuids.
    """
    served = {device.uuid: device for device in devices}
    if missing := [each for each in ids if each not in served]:
        raise UnknownDevice(f"device {missing[0][:80]!r} is not served here")
    # In the order of the node, so that a container that starts again has the same numbers.
    ordered = sorted(ids, key=lambda uuid: served[uuid].index)
    return {
        "envs": environment(dict(enumerate(ordered))),
        "mounts": [
            {
                "container_path": f"{DEVICE_DIR}/{ordinal}",
                "host_path": f"{folder}/{uuid}",
                "read_only": True,
            }
            for ordinal, uuid in enumerate(ordered)
        ],
    }
