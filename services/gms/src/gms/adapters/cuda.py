"""Memory of a real GPU, by the virtual memory management of the CUDA driver.

`CudaDevice` is the server's side: it creates and exports memory, maps none of it and makes no CUDA
context. `CudaMapping` is an importer's side. `cuda-bindings` (extra `cuda`) is imported when a
driver is asked for and not before; every symbol that is used is looked for then.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import importlib
import threading
import uuid
from collections.abc import Iterator
from typing import Any

from gms.ports import DeviceInfo
from snapshot_shared.errors import DeviceError, Internal, InvalidInput, OutOfDeviceMemory
from snapshot_shared.frames import Access

SYMBOLS = (
    "cuInit",
    "cuDriverGetVersion",
    "cuDeviceGetCount",
    "cuDeviceGet",
    "cuDeviceGetName",
    "cuDeviceGetUuid",
    "cuDeviceTotalMem",
    "cuDeviceGetAttribute",
    "cuMemGetAllocationGranularity",
    "cuMemCreate",
    "cuMemRelease",
    "cuMemExportToShareableHandle",
    "cuMemImportFromShareableHandle",
    "cuMemAddressReserve",
    "cuMemAddressFree",
    "cuMemMap",
    "cuMemUnmap",
    "cuMemSetAccess",
    "cuMemcpyHtoD",
    "cuMemcpyDtoH",
    "cuDevicePrimaryCtxRetain",
    "cuDevicePrimaryCtxRelease",
    "cuCtxSetCurrent",
    "cuCtxSynchronize",
)
"""What the driver has to offer."""


class CudaUnavailable(DeviceError):
    """This machine or this environment cannot use CUDA; the message says what is missing."""


class CudaDriver:
    """The driver of this machine, initialised. Every call is checked."""

    def __init__(self) -> None:
        """Load the bindings and the driver. CudaUnavailable names what is missing."""
        try:
            self.api: Any = importlib.import_module("cuda.bindings.driver")
        except ImportError as error:
            raise CudaUnavailable(
                f"the Python bindings of CUDA are missing: {error}",
                next_step="pip install 'snapback-gms[cuda]'",
            ) from error
        missing = [name for name in SYMBOLS if not hasattr(self.api, name)]
        if missing:
            raise CudaUnavailable(
                f"cuda-bindings has no {', '.join(missing)}",
                next_step="install a version of cuda-bindings from 13.3.1 on",
                missing=missing,
            )
        try:
            self.call("cuInit", 0)
            self.version = int(self.call("cuDriverGetVersion"))
        except RuntimeError as error:
            raise CudaUnavailable(
                f"the CUDA driver does not load: {str(error).splitlines()[0]}",
                next_step="install the NVIDIA driver, or run where a GPU is visible",
            ) from error

    @property
    def devices(self) -> int:
        """How many devices are visible."""
        return int(self.call("cuDeviceGetCount"))

    def call(self, name: str, *arguments: Any) -> Any:
        """Call the driver and give what it returned beside its status. DeviceError."""
        status, *found = getattr(self.api, name)(*arguments)
        if int(status) != 0:
            raise CudaFailed(name, status)
        return found[0] if len(found) == 1 else tuple(found)

    def allocation(self, device: Any) -> Any:
        """Describe pinned memory of a device that can be exported as a descriptor."""
        api = self.api
        prop = api.CUmemAllocationProp()
        prop.type = api.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        prop.location.type = api.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        prop.location.id = int(device)
        prop.requestedHandleTypes = self.posix
        return prop

    @property
    def posix(self) -> Any:
        """The kind of handle that is a file descriptor."""
        return self.api.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR


class CudaFailed(DeviceError):
    """The driver refused a call."""

    def __init__(self, name: str, status: Any) -> None:
        super().__init__(
            f"{name}: {getattr(status, 'name', status)}", call=name, status=int(status)
        )
        self.status = int(status)


_OUT_OF_MEMORY = 2


class CudaDevice:
    """One GPU. The driver counts importers itself; `used` is what was made here.

    CUDA cannot export a descriptor for reading only, and cannot keep an importer from a new
    writable mapping, so `export` takes no notice of the access and `seal` only checks the handle:
    clients protect their own mappings.
    """

    def __init__(self, driver: CudaDriver, ordinal: int) -> None:
        """Use a visible device. CudaUnavailable when it has no virtual memory management."""
        self._driver = driver
        self._device = driver.call("cuDeviceGet", ordinal)
        capabilities = self._capabilities()
        lacking = [name for name in _NEEDED if not capabilities.get(name)]
        if lacking:
            raise CudaUnavailable(
                f"device {ordinal} has no {', '.join(lacking)}",
                next_step="use a GPU and a driver with virtual memory management",
                missing=lacking,
            )
        self._prop = driver.allocation(self._device)
        api = driver.api
        minimum = api.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        name = bytes(driver.call("cuDeviceGetName", 128, self._device))
        found = driver.call("cuDeviceGetUuid", self._device)
        self._info = DeviceInfo(
            uuid=f"GPU-{uuid.UUID(bytes=bytes(found.bytes))}",
            index=ordinal,
            product=name.partition(b"\0")[0].decode(errors="replace"),
            capacity=int(driver.call("cuDeviceTotalMem", self._device)),
            granularity=int(driver.call("cuMemGetAllocationGranularity", self._prop, minimum)),
            capabilities={**capabilities, "read-only-exports": 0, "driver": driver.version},
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

    def create(self, size: int) -> int:
        granularity = self._info.granularity
        if size <= 0 or size % granularity:
            raise InvalidInput(f"{size} bytes are no multiple of {granularity}", size=size)
        try:
            handle = self._driver.call("cuMemCreate", size, self._prop, 0)
        except CudaFailed as error:
            if error.status != _OUT_OF_MEMORY:
                raise
            free = max(0, self._info.capacity - self._used)
            raise OutOfDeviceMemory(
                f"the driver has no {size} bytes left on {self._info.uuid}",
                needed=size,
                free=free,
                capacity=self._info.capacity,
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


class CudaMapping:
    """Memory of another process, imported and mapped at a reserved address of this one."""

    def __init__(self, driver: CudaDriver, size: int, address: int) -> None:
        """Use `CudaImporter.mapped`."""
        self._driver = driver
        self.size = size
        self.address = address

    def read(self, offset: int, size: int) -> bytes:
        """Copy bytes from the device."""
        data = bytearray(size)
        view = (ctypes.c_char * size).from_buffer(data)
        self._driver.call("cuMemcpyDtoH", ctypes.addressof(view), self.address + offset, size)
        self._driver.call("cuCtxSynchronize")
        return bytes(data)

    def write(self, offset: int, data: bytes) -> None:
        """Copy bytes to the device. DeviceError where the mapping is read-only."""
        view = (ctypes.c_char * len(data)).from_buffer(bytearray(data))
        self._driver.call("cuMemcpyHtoD", self.address + offset, ctypes.addressof(view), len(data))
        self._driver.call("cuCtxSynchronize")


class CudaImporter:
    """Imports into the primary context of one device, which is held until `close`."""

    def __init__(self, driver: CudaDriver, ordinal: int) -> None:
        """Retain the primary context and make it current in this thread."""
        self._driver = driver
        self._device = driver.call("cuDeviceGet", ordinal)
        driver.call("cuCtxSetCurrent", driver.call("cuDevicePrimaryCtxRetain", self._device))

    @contextlib.contextmanager
    def mapped(
        self, descriptor: int, size: int, access: Access, *, address: int = 0
    ) -> Iterator[CudaMapping]:
        """Map a descriptor at `address`, or where the driver likes; unmap at the end.

        The driver takes an address for a hint: DeviceError when it gives another one.
        """
        driver, api = self._driver, self._driver.api
        with contextlib.ExitStack() as undo:
            handle = driver.call("cuMemImportFromShareableHandle", descriptor, driver.posix)
            undo.callback(driver.call, "cuMemRelease", handle)
            found = driver.call("cuMemAddressReserve", size, 0, address, 0)
            undo.callback(driver.call, "cuMemAddressFree", found, size)
            if address and int(found) != address:
                raise DeviceError(
                    f"address {address:#x} is taken, the driver offers {int(found):#x}",
                    expected=address,
                    found=int(found),
                )
            driver.call("cuMemMap", found, size, 0, handle, 0)
            undo.callback(driver.call, "cuMemUnmap", found, size)
            description = api.CUmemAccessDesc()
            description.location.type = api.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
            description.location.id = int(self._device)
            flags = api.CUmemAccess_flags
            description.flags = (
                flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
                if access is Access.RW
                else flags.CU_MEM_ACCESS_FLAGS_PROT_READ
            )
            driver.call("cuMemSetAccess", found, size, [description], 1)
            yield CudaMapping(driver, size, int(found))
            driver.call("cuCtxSynchronize")

    def close(self) -> None:
        """Let the context go."""
        self._driver.call("cuDevicePrimaryCtxRelease", self._device)
