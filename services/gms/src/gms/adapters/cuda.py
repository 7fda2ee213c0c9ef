"""The devices that the CUDA driver shows, by its virtual memory management.

A `CudaDevice` creates and exports memory, maps none of it and makes no CUDA context. The driver and
the side of those who import the memory are `snapback_client.cuda`.
"""

from __future__ import annotations

import fcntl
import logging
import os
import threading
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from gms.adapters.nvml import Nvml
from gms.ports import DeviceInfo
from snapback_client.cuda import KIND, OUT_OF_MEMORY, CudaDriver, CudaFailed, CudaUnavailable
from snapback_client.errors import Internal, InvalidInput, OutOfDeviceMemory
from snapback_client.frames import Access

log = logging.getLogger(__name__)


class MemoryKind(NamedTuple):
    """What can be done with memory besides what clients do: see `CudaDriver.allocation`."""

    rdma: bool = False
    fabric: bool = False


def memory_kinds(capabilities: Mapping[str, int], *, fabric: bool) -> list[MemoryKind]:
    """Return the kinds of memory to try on a device, the most able first and the plain one last.

    A device may have an attribute and refuse the memory: fabric handles need an IMEX channel.
    """
    rdma = bool(capabilities.get("gpu-direct-rdma"))
    has_fabric = fabric and bool(capabilities.get("fabric-handles"))
    kinds = [MemoryKind(rdma, has_fabric), MemoryKind(rdma), MemoryKind()]
    return list(dict.fromkeys(kinds))


class CudaDevice:
    """One GPU. The driver counts importers itself; `used` is what was made here.

    What is free is what NVML says; without NVML it is what this service has not made, which is too
    much where others hold memory.

    CUDA cannot export a descriptor for reading only, and cannot keep an importer from a new
    writable mapping, so `export` takes no notice of the access and `seal` only checks the handle:
    clients protect their own mappings. Nor does it say what new memory holds: clients clear it.
    """

    def __init__(
        self,
        driver: CudaDriver,
        ordinal: int,
        nvml: Nvml | None = None,
        *,
        fabric_handles: bool = False,
    ) -> None:
        """Use a visible device. CudaUnavailable when it has no virtual memory management.

        Its memory can be used for RDMA where it is granted, and exported as fabric handles where
        that is asked for and granted; the capabilities `rdma-memory` and `fabric-memory` say so.
        """
        self._driver = driver
        self._nvml = nvml or Nvml()
        self._device = driver.call("cuDeviceGet", ordinal)
        capabilities = self._capabilities()
        lacking = [name for name in _NEEDED if not capabilities.get(name)]
        if lacking:
            raise CudaUnavailable(
                f"device {ordinal} has no {', '.join(lacking)}",
                next_step="use a GPU and a driver with virtual memory management",
                missing=lacking,
            )
        uuid = driver.uuid_of(self._device)
        if fabric_handles and not capabilities.get("fabric-handles"):
            log.warning("%s has no fabric handles: its memory is made without them", uuid)
        made = self._granted(uuid, memory_kinds(capabilities, fabric=fabric_handles))
        self._prop = driver.allocation(self._device, **made._asdict())
        self._info = DeviceInfo(
            kind=KIND,
            uuid=uuid,
            index=ordinal,
            product=driver.name_of(self._device),
            capacity=int(driver.call("cuDeviceTotalMem", self._device)),
            granularity=self._granularity(self._prop),
            capabilities={
                **capabilities,
                "rdma-memory": int(made.rdma),
                "fabric-memory": int(made.fabric),
                "read-only-exports": 0,
                "zeroed": 0,
                "driver": driver.version,
            },
            is_shared=True,
        )
        self._lock = threading.Lock()
        self._handles: dict[int, tuple[Any, int]] = {}
        self._used = 0

    @property
    def info(self) -> DeviceInfo:
        return self._info

    @property
    def used(self) -> int:
        return self._used

    def free(self) -> int:
        ours = max(0, self._info.capacity - self._used)
        said = self._nvml.free(self._info.uuid)
        return ours if said is None else min(said, ours)

    def holders(self) -> Mapping[str, int]:
        return self._nvml.holders(self._info.uuid)

    def create(self, size: int) -> int:
        granularity = self._info.granularity
        if size <= 0 or size % granularity:
            raise InvalidInput(f"{size} bytes are no multiple of {granularity}", size=size)
        try:
            handle = self._driver.call("cuMemCreate", size, self._prop, 0)
        except CudaFailed as error:
            if error.status != OUT_OF_MEMORY:
                raise
            uuid, capacity, used = self._info.uuid, self._info.capacity, self._used
            # It is the driver that knows: what is said to be free may be others' by now.
            raise OutOfDeviceMemory(
                f"the driver has no {size} bytes left on {uuid}; this service holds {used} of "
                f"{capacity}, others hold the rest",
                next_step="end the processes that hold it: look with `nvidia-smi`",
                needed=size,
                free=min(self.free(), size - 1),
                capacity=capacity,
                used=used,
                holders=dict(self.holders()),
            ) from error
        with self._lock:
            self._handles[int(handle)] = (handle, size)
            self._used += size
        return int(handle)

    def export(self, handle: int, access: Access) -> int:
        found, _ = self._of(handle)
        driver = self._driver
        descriptor = int(driver.call("cuMemExportToShareableHandle", found, driver.posix, 0))
        flags = fcntl.fcntl(descriptor, fcntl.F_GETFD)
        fcntl.fcntl(descriptor, fcntl.F_SETFD, flags | fcntl.FD_CLOEXEC)
        return descriptor

    def seal(self, handle: int) -> None:
        self._of(handle)

    def release(self, handle: int) -> None:
        with self._lock:
            found, size = self._handles.pop(handle, (None, 0))
            self._used -= size
        if found is None:
            raise Internal(f"handle {handle} is released twice")
        self._driver.call("cuMemRelease", found)

    def close(self) -> None:
        """Release everything."""
        for handle in list(self._handles):
            self.release(handle)

    def _of(self, handle: int) -> tuple[Any, int]:
        try:
            return self._handles[handle]
        except KeyError:
            raise Internal(f"handle {handle} is not allocated") from None

    def _granted(self, uuid: str, kinds: Sequence[MemoryKind]) -> MemoryKind:
        """Return the first kind of memory that the driver does not refuse; the last is not tried.

        Whether one is refused is known by making a little of it: no attribute says it.
        """
        *tried, plain = kinds
        for kind in tried:
            prop = self._driver.allocation(self._device, **kind._asdict())
            try:
                size = self._granularity(prop)
                self._driver.call("cuMemRelease", self._driver.call("cuMemCreate", size, prop, 0))
            except CudaFailed as error:
                if error.status == OUT_OF_MEMORY and not kind.fabric:
                    # The device is full, which says nothing against the kind.
                    return kind
                log.warning(
                    "%s refuses memory for %s (%s)%s",
                    uuid,
                    " and ".join(name for name, has in kind._asdict().items() if has),
                    error,
                    ": has this node an IMEX channel?" if kind.fabric else "",
                )
            else:
                return kind
        return plain

    def _granularity(self, prop: Any) -> int:
        minimum = self._driver.api.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        return int(self._driver.call("cuMemGetAllocationGranularity", prop, minimum))

    def _capabilities(self) -> dict[str, int]:
        attributes = self._driver.api.CUdevice_attribute
        found: dict[str, int] = {}
        for name, symbol in _CAPABILITIES.items():
            attribute = getattr(attributes, f"CU_DEVICE_ATTRIBUTE_{symbol}", None)
            if attribute is not None:
                value = self._driver.call("cuDeviceGetAttribute", attribute, self._device)
                found[name] = int(value)
        return found


_NEEDED = ("virtual-memory-management", "posix-descriptors")

_CAPABILITIES = {
    "virtual-memory-management": "VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED",
    "posix-descriptors": "HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED",
    "fabric-handles": "HANDLE_TYPE_FABRIC_SUPPORTED",
    "gpu-direct-rdma": "GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED",
}


def open_devices(*, fabric_handles: bool = False) -> list[CudaDevice]:
    """Open every visible device, in the order of nvidia-smi. CudaUnavailable.

    With `fabric_handles` memory is made so that it can be exported as one, too, where it can be.
    """
    # By default CUDA has the fastest device first.
    os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    driver = CudaDriver()
    try:
        count = driver.devices
    except CudaFailed as error:
        raise CudaUnavailable(
            f"the CUDA driver names no device: {error}", next_step=_SHOW_A_GPU
        ) from error
    if not count:
        raise CudaUnavailable("no CUDA device is visible", next_step=_SHOW_A_GPU)
    nvml = Nvml()
    return [
        CudaDevice(driver, ordinal, nvml, fabric_handles=fabric_handles) for ordinal in range(count)
    ]


_SHOW_A_GPU = "look with `nvidia-smi`, and at NVIDIA_VISIBLE_DEVICES and CUDA_VISIBLE_DEVICES"
