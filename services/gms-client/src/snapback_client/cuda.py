"""Memory of a real GPU in the process of a client, by the CUDA driver's virtual memory management.

`CudaRange` reserves addresses of one device, into which imported memory is mapped. `cuda-bindings`
(extra `cuda`) is imported when a driver is asked for and not before; every symbol that is used is
looked for then.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import math
import os
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from snapback_client import dlpack
from snapback_client.devices import find_device
from snapback_client.errors import DeviceError, InvalidValue, OutOfDeviceMemory, UnknownDevice
from snapback_client.forks import check_owner
from snapback_client.frames import MEMORY_S
from snapback_client.mappings import AddressTaken, Mappings, neighbours

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
    "cuMemcpyHtoDAsync",
    "cuMemcpyDtoHAsync",
    "cuMemsetD8",
    "cuMemHostAlloc",
    "cuMemFreeHost",
    "cuStreamCreate",
    "cuStreamDestroy",
    "cuStreamSynchronize",
    "cuDevicePrimaryCtxSetFlags",
    "cuDevicePrimaryCtxRetain",
    "cuDevicePrimaryCtxRelease",
    "cuCtxPushCurrent",
    "cuCtxPopCurrent",
    "cuCtxSynchronize",
)
"""What the driver has to offer."""

KIND = "cuda"

OUT_OF_MEMORY = 2
"""The status CUDA_ERROR_OUT_OF_MEMORY."""

_AGAIN_S = 0.25


class CudaUnavailable(DeviceError):
    """This machine or this environment cannot use CUDA; the message says what is missing."""


class CudaDriver:
    """The driver of this machine, initialised. Every call is checked."""

    def __init__(self) -> None:
        """Load the bindings and the driver. CudaUnavailable names what is missing."""
        self._owner = os.getpid()
        try:
            self.api: Any = importlib.import_module("cuda.bindings.driver")
        except (ImportError, OSError) as error:
            # An OSError where their search for libraries finds no folder for temporary files.
            raise CudaUnavailable(
                f"the Python bindings of CUDA cannot be imported: {error}",
                next_step="pip install 'snapback-client[cuda]', and let this process write to /tmp",
            ) from error
        missing = [name for name in SYMBOLS if not hasattr(self.api, name)]
        if missing:
            raise CudaUnavailable(
                f"cuda-bindings has no {', '.join(missing)}",
                next_step="install a version of cuda-bindings from 12.8 on",
                missing=missing,
            )
        try:
            self.call("cuInit", 0)
            self.version = int(self.call("cuDriverGetVersion"))
        except (RuntimeError, CudaFailed) as error:
            # Without the library the bindings raise an error of their own; without a GPU, or in a
            # container that was given none, the library answers cuInit with a status.
            raise CudaUnavailable(
                f"the CUDA driver does not start: {str(error).splitlines()[0]}",
                next_step="install the NVIDIA driver, or run where a GPU is visible: `nvidia-smi`",
            ) from error

    @property
    def devices(self) -> int:
        """How many devices are visible."""
        return int(self.call("cuDeviceGetCount"))

    def call(self, name: str, *arguments: Any) -> Any:
        """Call the driver and return its values without the status. CudaFailed.

        NotEligible in a fork of the process, where CUDA cannot be used.
        """
        check_owner(self._owner, "the CUDA driver")
        status, *found = getattr(self.api, name)(*arguments)
        if int(status) != 0:
            raise CudaFailed(name, status)
        return found[0] if len(found) == 1 else tuple(found)

    @property
    def uuids(self) -> list[str]:
        """The uuids of the visible devices, in the order of CUDA in this process."""
        return [self.uuid_of(self.call("cuDeviceGet", each)) for each in range(self.devices)]

    def uuid_of(self, device: Any) -> str:
        """Return the uuid of a device as nvidia-smi, Kubernetes and the environment have it."""
        # Before 13 the bindings have two, and the older one names the GPU of a MIG device.
        newer = hasattr(self.api, "cuDeviceGetUuid_v2")
        found = self.call("cuDeviceGetUuid_v2" if newer else "cuDeviceGetUuid", device)
        # No attribute says that a device is one of MIG; its name ends in " MIG 1g.10gb".
        kind = "MIG" if " MIG " in self.name_of(device) else "GPU"
        return f"{kind}-{uuid.UUID(bytes=bytes(found.bytes))}"

    def name_of(self, device: Any) -> str:
        """Return the name of the product."""
        name = bytes(self.call("cuDeviceGetName", 128, device))
        return name.partition(b"\0")[0].decode(errors="replace")

    def find(self, device: str) -> Any:
        """Return the visible device with this uuid, or whose uuid begins so. UnknownDevice.

        Ordinals differ between processes: CUDA_VISIBLE_DEVICES leaves devices out and sorts them.
        """
        uuids = self.uuids
        found = find_device(device, {each: ordinal for ordinal, each in enumerate(uuids)})
        if found is None:
            raise UnknownDevice(
                f"{device} is not visible to CUDA in this process",
                next_step="give this process the GPU: NVIDIA_VISIBLE_DEVICES, CUDA_VISIBLE_DEVICES",
                device=device,
                visible=uuids,
            )
        return self.call("cuDeviceGet", uuids.index(found))

    def pci_address(self, device: Any) -> str:
        """Return where a device is on the PCI bus, as the kernel names it: `0000:3b:00.0`."""
        attributes = self.api.CUdevice_attribute
        domain, bus, slot = (
            int(self.call("cuDeviceGetAttribute", attribute, device))
            for attribute in (
                attributes.CU_DEVICE_ATTRIBUTE_PCI_DOMAIN_ID,
                attributes.CU_DEVICE_ATTRIBUTE_PCI_BUS_ID,
                attributes.CU_DEVICE_ATTRIBUTE_PCI_DEVICE_ID,
            )
        )
        return f"{domain:04x}:{bus:02x}:{slot:02x}.0"

    def allocation(self, device: Any, *, rdma: bool = False, fabric: bool = False) -> Any:
        """Describe pinned memory of a device that can be exported as a descriptor.

        With `rdma` other devices of the node may read and write it, as GPUDirect RDMA and GPUDirect
        Storage do. With `fabric` it can be exported as a fabric handle, too.
        """
        api = self.api
        prop = api.CUmemAllocationProp()
        prop.type = api.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        prop.location.type = api.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        prop.location.id = int(device)
        prop.requestedHandleTypes = self.posix
        if fabric:
            kind = api.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_FABRIC
            prop.requestedHandleTypes = _Mask(self.posix.value | kind.value)
        prop.allocFlags.gpuDirectRDMACapable = int(rdma)
        return prop

    @property
    def posix(self) -> Any:
        """The kind of handle that is a file descriptor."""
        return self.api.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR


class _Mask(int):
    """Kinds of handles together. Most bindings want an enumerator, of which they read `value`."""

    value = property(int)


class CudaFailed(DeviceError):
    """The driver refused a call."""

    def __init__(self, name: str, status: Any) -> None:
        super().__init__(
            f"{name}: {getattr(status, 'name', status)}", call=name, status=int(status)
        )
        self.status = int(status)


class CudaRange:
    """A reserved range of addresses of one device, into which imports are mapped.

    It holds the primary context of the device, which is that of PyTorch and of the CUDA runtime,
    and makes it current only while it works: what an engine has made current stays so. Any thread
    may use it, one at a time.
    """

    kind = KIND

    def __init__(
        self, driver: CudaDriver, device: str, size: int, *, address: int | None, exact: bool
    ) -> None:
        """Reserve `size` bytes, whole granules, at `address`, which the driver takes for a hint.

        Another address is accepted, too, unless it must be `exact`: AddressTaken.
        UnknownDevice when this process does not see the device.
        """
        self._driver = driver
        self._device = driver.find(device)
        self._mappings = Mappings(size)
        self._context = _retain(driver, self._device, device)
        self.size = size
        try:
            self.address = int(driver.call("cuMemAddressReserve", size, 0, address or 0, 0))
            if exact and address is not None and self.address != address:
                driver.call("cuMemAddressFree", self.address, size)
                raise AddressTaken(
                    f"{size} bytes at {address:#x} are in use in this process: the driver offers "
                    f"{self.address:#x}",
                    address=address,
                    size=size,
                )
        except BaseException:
            driver.call("cuDevicePrimaryCtxRelease", self._device)
            raise

    def map(self, fd: int, offset: int, size: int, *, writable: bool) -> int:
        """Map the whole of a descriptor at `offset` of the range and return the address.

        The descriptor may be closed afterwards: the mapping alone holds the memory.
        """
        self.map_all([(fd, offset, size)], writable=writable)
        return self.address + offset

    def map_all(self, places: Iterable[tuple[int, int, int]], *, writable: bool) -> None:
        """Map each descriptor at an offset: (descriptor, offset, size).

        Access is given at the end, to all neighbours in one call, which the driver takes long for.
        """
        done: list[tuple[int, int]] = []
        with self._current():
            for fd, offset, size in places:
                self._map(fd, offset, size)
                done.append((offset, size))
            for offset, size in neighbours(done):
                self._allow(offset, size, writable=writable)

    def _map(self, fd: int, offset: int, size: int) -> None:
        self._mappings.add(offset, size)
        driver = self._driver
        try:
            handle = driver.call("cuMemImportFromShareableHandle", fd, driver.posix)
            try:
                driver.call("cuMemMap", self.address + offset, size, 0, handle, 0)
            finally:
                # Each import is paired with a release; a handle may go before its mappings.
                driver.call("cuMemRelease", handle)
        except BaseException:
            self._mappings.remove(offset)
            raise

    def protect(self, offset: int, size: int, *, writable: bool) -> None:
        """Change what the device may do with mappings, once all that was begun has ended."""
        with self._current():
            # Access must not change under kernels that were launched before.
            self._driver.call("cuCtxSynchronize")
            self._allow(offset, size, writable=writable)

    def _allow(self, offset: int, size: int, *, writable: bool) -> None:
        api = self._driver.api
        description = api.CUmemAccessDesc()
        description.location.type = api.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        description.location.id = int(self._device)
        flags = api.CUmemAccess_flags
        description.flags = (
            flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
            if writable
            else flags.CU_MEM_ACCESS_FLAGS_PROT_READ
        )
        self._driver.call("cuMemSetAccess", self.address + offset, size, [description], 1)

    def unmap(self, offset: int = 0, size: int | None = None) -> None:
        """Remove mappings and keep their addresses reserved; the whole range by default.

        Waits first for the work of the device, which may still use them.
        """
        gone = self._mappings.within(offset, self.size if size is None else size)
        if not gone:
            return
        with self._current():
            self._driver.call("cuCtxSynchronize")
            for at, length in reversed(gone):
                self._driver.call("cuMemUnmap", self.address + at, length)
                self._mappings.remove(at)

    def clear(self, offset: int, size: int) -> None:
        """Fill with zeros: the driver does not say what new memory holds."""
        with self._current():
            self._driver.call("cuMemsetD8", self.address + offset, 0, size)
            self._driver.call("cuCtxSynchronize")

    def read(self, offset: int, into: memoryview) -> None:
        """Copy bytes out of the device."""
        with self._current():
            self._driver.call("cuMemcpyDtoH", host_address(into), self.address + offset, len(into))

    def write(self, offset: int, source: memoryview) -> None:
        """Copy bytes into the device. CudaFailed where the mapping is read-only."""
        with self._current():
            to, size = self.address + offset, len(source)
            self._driver.call("cuMemcpyHtoD", to, host_address(source), size)
            self._driver.call("cuCtxSynchronize")

    def array(self, offset: int, shape: Sequence[int], dtype: DTypeLike) -> CudaArray:
        """Return the array at a place of the range."""
        return CudaArray(self, offset, shape, dtype)

    def copier(self, size: int) -> CudaCopier:
        """Return a stream of copies of its own, with a pinned buffer of `size` bytes."""
        return CudaCopier(self, size)

    def release(self) -> None:
        """Release mappings, addresses and the context."""
        if self.size:
            self.unmap()
            self._driver.call("cuMemAddressFree", self.address, self.size)
            self._driver.call("cuDevicePrimaryCtxRelease", self._device)
            self.size = 0

    @contextlib.contextmanager
    def _current(self) -> Iterator[CudaDriver]:
        """Make the context current in this thread for a block; then the engine's is again."""
        self._driver.call("cuCtxPushCurrent", self._context)
        try:
            yield self._driver
        finally:
            self._driver.call("cuCtxPopCurrent")


def _retain(driver: CudaDriver, device: Any, name: str) -> Any:
    """Retain the primary context of a device. OutOfDeviceMemory.

    A new one takes memory, which a process that has just been killed may still hold.
    """
    end = time.monotonic() + MEMORY_S
    while True:
        try:
            return driver.call("cuDevicePrimaryCtxRetain", device)
        except CudaFailed as error:
            if error.status != OUT_OF_MEMORY:
                raise
            if time.monotonic() >= end:
                raise OutOfDeviceMemory(
                    f"{name} has no memory left for a context of this process",
                    next_step="end the processes that hold it: look with `nvidia-smi`",
                    device=name,
                ) from error
        # No event says that another process has freed memory.
        threading.Event().wait(_AGAIN_S)


class CudaCopier:
    """Copies on a stream of its own, fast to and from its pinned `buffer`.

    `flush` waits for all copies, which run in the order in which they began. One thread at a time.
    """

    def __init__(self, at: CudaRange, size: int) -> None:
        """Use `CudaRange.copier`."""
        self._range = at
        with at._current() as driver:  # noqa: SLF001 - one module
            flags = driver.api.CUstream_flags
            # A blocking stream would wait for the default stream of the engine.
            self._stream = driver.call("cuStreamCreate", flags.CU_STREAM_NON_BLOCKING.value)
            try:
                self._pinned = int(driver.call("cuMemHostAlloc", size, 0))
            except BaseException:
                driver.call("cuStreamDestroy", self._stream)
                raise
        self.buffer = memoryview((ctypes.c_ubyte * size).from_address(self._pinned)).cast("B")

    def read(self, offset: int, into: memoryview) -> None:
        """Start to copy bytes out of the device."""
        at = self._range
        with at._current() as driver:  # noqa: SLF001 - one module
            source = at.address + offset
            driver.call("cuMemcpyDtoHAsync", host_address(into), source, len(into), self._stream)

    def write(self, offset: int, source: memoryview) -> None:
        """Start to copy bytes into the device; they must not change until `flush`."""
        at = self._range
        with at._current() as driver:  # noqa: SLF001 - one module
            driver.call(
                "cuMemcpyHtoDAsync",
                at.address + offset,
                host_address(source),
                len(source),
                self._stream,
            )

    def flush(self) -> None:
        """Wait until every copy is done. CudaFailed when one was refused."""
        with self._range._current() as driver:  # noqa: SLF001 - one module
            driver.call("cuStreamSynchronize", self._stream)

    def lend(self, offset: int, use: Callable[[int, int], None]) -> None:
        """Call `use` with the address of an offset and the stream. From any thread.

        The context of the device is current meanwhile. What `use` puts on the stream is done before
        the copies that begin after it.
        """
        with self._range._current():  # noqa: SLF001 - one module
            use(self._range.address + offset, int(self._stream))

    def close(self) -> None:
        """Wait, and release the stream and the pinned memory."""
        with self._range._current() as driver:  # noqa: SLF001 - one module
            with contextlib.suppress(CudaFailed):
                driver.call("cuStreamSynchronize", self._stream)
            driver.call("cuStreamDestroy", self._stream)
            driver.call("cuMemFreeHost", self._pinned)


class _Flags:
    """What may be done with an array, under the name that it has in numpy."""

    def __init__(self) -> None:
        self.writeable = True


class CudaArray:
    """An array in device memory, for libraries that know `__cuda_array_interface__` (version 3).

    `cupy.asarray(array)` and `numba.cuda.as_cuda_array(array)` make arrays over the same memory,
    `snapback_client.torch.tensor_of(array)` makes a tensor, and `from_dlpack` of any library takes
    it, too. Writing where `flags.writeable` is False ends in a fault of the device.
    """

    def __init__(self, at: CudaRange, offset: int, shape: Sequence[int], dtype: DTypeLike) -> None:
        """Use `CudaRange.array`."""
        self._range = at
        self._offset = offset
        self.shape = tuple(shape)
        self.dtype = np.dtype(dtype)
        self.nbytes = math.prod(self.shape) * self.dtype.itemsize
        self.flags = _Flags()

    @property
    def address(self) -> int:
        """Where it begins, in the address space of the device and of this process."""
        return self._range.address + self._offset

    @property
    def ordinal(self) -> int:
        """The number that CUDA has for its device in this process."""
        return int(self._range._device)  # noqa: SLF001 - one module

    def __dlpack_device__(self) -> tuple[int, int]:
        """Return the kind of its device for DLPack, and the ordinal."""
        return dlpack.CUDA, self.ordinal

    def __dlpack__(
        self,
        *,
        stream: Any = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> Any:
        """Return a capsule over the same memory. BufferError for a copy or another device.

        No stream has to wait for another: `set` returns when its copy is done.
        """
        del stream
        if copy or dl_device not in (None, self.__dlpack_device__()):
            raise BufferError("the array is only shared where it is; copy it with `get`")
        return dlpack.to_dlpack(
            self.address if self.nbytes else 0,
            self.shape,
            self.dtype,
            device=self.__dlpack_device__(),
            writable=self.flags.writeable,
            max_version=max_version,
        )

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """Describe it to other libraries."""
        return {
            "version": 3,
            "shape": self.shape,
            "typestr": self.dtype.str,
            "data": (self.address if self.nbytes else 0, not self.flags.writeable),
            "strides": None,
            "stream": None,
        }

    def get(self) -> NDArray[Any]:
        """Copy it to the host."""
        found = np.empty(self.shape, self.dtype)
        if self.nbytes:
            self._range.read(self._offset, found.reshape(-1).view(np.uint8).data)
        return found

    def set(self, values: Any) -> None:
        """Fill it from the host; `values` are converted and broadcast as numpy does."""
        if not self.flags.writeable:
            raise InvalidValue("the array is read-only: it is committed, or the lock is RO")
        whole = np.empty(self.shape, self.dtype)
        whole[...] = values
        if self.nbytes:
            self._range.write(self._offset, whole.reshape(-1).view(np.uint8).data)


def host_address(view: memoryview) -> int:
    """Return the address of writable bytes of the host."""
    return ctypes.addressof(ctypes.c_ubyte.from_buffer(view))
