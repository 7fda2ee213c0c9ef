"""What a claim of simulated devices gives its containers, and what is kept of it.

Kubernetes allocates devices to a ResourceClaim (dynamic resource allocation, DRA) and the kubelet
has the driver of the devices prepare them. A claim is prepared once, whatever pods and containers
share it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from snapshot_shared.errors import InvalidMessage, NotEligible, NotFound, UnknownDevice
from snapshot_shared.ids import UID_PATTERN

DRIVER = "gpu.sim.snapback.nvidia.com"
"""Not `gpu.nvidia.com`: a cluster may have NVIDIA's driver, too."""
CDI_VERSION = "0.6.0"
CDI_KIND = f"{DRIVER}/claim"
DEVICE_DIR = "/run/snapback/gpu"
"""Where a container finds its devices: a folder each, named by its number in the claim."""
DEVICE_FILE = "device.json"
MEMORY_SOCKET = "memory.sock"

MAX_DEVICES = 64
MAX_RECORD_BYTES = 64 * 1024
MAX_PREPARED = 1024
"""How many claims a node may have prepared at a time."""

_LABEL = r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?"
ObjectName = Annotated[str, Meta(pattern=r"^[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?\Z")]
Label = Annotated[str, Meta(pattern=rf"^{_LABEL}\Z")]
RequestName = Annotated[str, Meta(pattern=rf"^{_LABEL}(/{_LABEL})?\Z")]
ClaimUid = Annotated[str, Meta(pattern=UID_PATTERN)]
PoolName = Annotated[str, Meta(min_length=1, max_length=253)]


class ClaimableDevice(msgspec.Struct, frozen=True, kw_only=True):
    """A simulated device as the cluster sees it; `capacity` is in bytes."""

    index: int
    uuid: str
    product: str
    capacity: int

    @property
    def name(self) -> str:
        """Its name in the pool of the node."""
        return f"gpu-{self.index}"


class ClaimRef(msgspec.Struct, frozen=True, kw_only=True):
    """A claim as the kubelet names it."""

    namespace: Label
    name: ObjectName
    uid: ClaimUid


class PreparedDevice(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A device of a claim. `ordinal` counts the devices of this driver in the claim.

    With `admin` it is for looking after devices, which others may hold meanwhile.
    """

    request: Label
    pool: PoolName
    device: Label
    ordinal: Annotated[int, Meta(ge=0, lt=MAX_DEVICES)]
    admin: bool = False


class PreparedClaim(ClaimRef, frozen=True, kw_only=True):
    """What is kept on disk of a prepared claim."""

    devices: Annotated[list[PreparedDevice], Meta(min_length=1, max_length=MAX_DEVICES)]
    version: Annotated[int, Meta(ge=1, le=1)] = 1


class _Metadata(msgspec.Struct, frozen=True):
    uid: str


class _Result(msgspec.Struct, frozen=True, rename="camel"):
    request: RequestName
    driver: str
    pool: PoolName
    device: Label
    admin_access: bool | None = None


class _Devices(msgspec.Struct, frozen=True):
    results: Annotated[list[_Result], Meta(max_length=MAX_DEVICES)] = []


class _Allocation(msgspec.Struct, frozen=True):
    devices: _Devices = _Devices()


class _Status(msgspec.Struct, frozen=True):
    allocation: _Allocation | None = None


class ResourceClaim(msgspec.Struct, frozen=True):
    """The fields of a ResourceClaim (resource.k8s.io/v1) that a driver reads."""

    metadata: _Metadata
    status: _Status = _Status()


def prepared_claim(
    ref: ClaimRef, claim: ResourceClaim, pool: str, devices: Sequence[ClaimableDevice]
) -> PreparedClaim:
    """Return what is to be prepared for a claim. NotFound, NotEligible, UnknownDevice.

    Results of other drivers are left to them.
    """
    if claim.metadata.uid != ref.uid:
        raise NotFound(
            f"the claim {ref.namespace}/{ref.name} has uid {claim.metadata.uid[:64]!r} now, "
            f"not {ref.uid}",
            next_step="the pod that it was prepared for is gone",
        )
    allocation = claim.status.allocation
    results = allocation.devices.results if allocation else []
    ours = [result for result in results if result.driver == DRIVER]
    if not ours:
        raise NotEligible(
            f"the claim {ref.namespace}/{ref.name} has no device of {DRIVER} allocated",
            next_step="look at its status.allocation with kubectl get resourceclaim -o yaml",
        )
    served = {device.name for device in devices}
    for result in ours:
        if result.pool != pool or result.device not in served:
            raise UnknownDevice(
                f"device {result.device} of pool {result.pool} is not served here; "
                f"pool {pool} has {', '.join(sorted(served))}",
                next_step="delete the pod, so that its claim is allocated again",
            )
    return PreparedClaim(
        namespace=ref.namespace,
        name=ref.name,
        uid=ref.uid,
        devices=[
            PreparedDevice(
                # Of a request with alternatives the result names `request/alternative`; a
                # container, and so the kubelet, names the request.
                request=result.request.partition("/")[0],
                pool=result.pool,
                device=result.device,
                ordinal=ordinal,
                admin=bool(result.admin_access),
            )
            for ordinal, result in enumerate(ours)
        ],
    )


def held_by_others(
    claim: PreparedClaim, prepared: Iterable[PreparedClaim]
) -> list[tuple[str, PreparedClaim]]:
    """Return the devices of a claim that another prepared claim still holds, and that claim.

    The scheduler frees a device when the pod object is gone, the kubelet may unprepare it later:
    after an outage of the node, minutes later.
    """
    wanted = {device.device for device in claim.devices if not device.admin}
    return [
        (device.device, other)
        for other in prepared
        if other.uid != claim.uid
        for device in other.devices
        if not device.admin and device.device in wanted
    ]


def cdi_file(uid: str) -> str:
    """Return the name of the CDI specification of a claim."""
    return f"{DRIVER}-claim_{uid}.json"


def cdi_id(uid: str, ordinal: int) -> str:
    """Return the qualified CDI name of a device of a claim."""
    return f"{CDI_KIND}={uid}-{ordinal}"


def environment(uuids: Mapping[int, str]) -> dict[str, str]:
    """Return the environment of a container with these devices, by their numbers.

    The uuids are true at a cold start only: a process that is restored elsewhere keeps the
    environment of its source. The file in the folder of a device is always right.
    """
    common = {"SNAPBACK_GMS_DEVICE": "claimed", "NVIDIA_VISIBLE_DEVICES": "void"}
    return common | {f"SNAPBACK_GPU_{ordinal}": uuid for ordinal, uuid in uuids.items()}


def cdi_spec(
    claim: PreparedClaim, folder: str, devices: Sequence[ClaimableDevice]
) -> dict[str, Any]:
    """Return the CDI specification of a claim whose devices have folders below `folder`.

    A device each, which a container gets with its requests. What several devices put into one
    container adds up: each has a variable and a mount of its own.
    """
    uuids = {device.name: device.uuid for device in devices}
    return {
        "cdiVersion": CDI_VERSION,
        "kind": CDI_KIND,
        "devices": [
            {
                "name": f"{claim.uid}-{each.ordinal}",
                "containerEdits": {
                    "env": [
                        f"{name}={value}"
                        for name, value in environment({each.ordinal: uuids[each.device]}).items()
                    ],
                    "mounts": [
                        {
                            "hostPath": f"{folder}/{each.ordinal}",
                            "containerPath": f"{DEVICE_DIR}/{each.ordinal}",
                            # A read-only mount lets clients connect to the socket in it.
                            "options": ["ro", "rbind", "nosuid", "nodev", "noexec"],
                        }
                    ],
                },
            }
            for each in claim.devices
        ],
    }


def decode_record(data: bytes, name: str) -> PreparedClaim:
    """Decode a record that was found on disk under the name of its uid. InvalidMessage."""
    if len(data) > MAX_RECORD_BYTES:
        raise InvalidMessage(f"{len(data)} bytes are over the limit of {MAX_RECORD_BYTES}")
    try:
        record = msgspec.json.decode(data, type=PreparedClaim)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise InvalidMessage(f"not a valid record of a claim: {error}") from error
    if record.uid != name:
        raise InvalidMessage(f"it is of claim {record.uid}, not of {name}")
    ordinals = [device.ordinal for device in record.devices]
    if ordinals != list(range(len(ordinals))):
        raise InvalidMessage(f"its devices are numbered {ordinals}, not from 0 on")
    return record
