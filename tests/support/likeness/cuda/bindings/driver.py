"""A likeness of the CUDA driver, with the rules that its documentation states.

It stands where `cuda.bindings.driver` would, in any process whose PYTHONPATH begins with the folder
`tests/support/likeness`: what has never seen a GPU runs at least against the documented rules, with
real bytes that pass between real processes. Where the documentation promises nothing, this is
unkind: new memory holds garbage, the processor cannot read what is mapped, a copy on a stream
happens as late as it may, and what the rules forbid is refused at once.

The groups of the CUDA Driver API documentation that are meant: Virtual Memory Management, Memory
Management, Stream Management, Primary Context Management, Context Management, Device Management.

`CUDA_LIKENESS` in the environment changes it, with commas between: `devices=N`, `bytes=N`,
`init=STATUS`, `novmm`, `nohint`.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import threading
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from functools import wraps
from typing import Any

GRANULARITY = 2 * 1024 * 1024
GARBAGE = 0xA5
_OPTIONS = dict(
    part.partition("=")[::2] for part in os.environ.get("CUDA_LIKENESS", "").split(",") if part
)
_DEVICES = int(_OPTIONS.get("devices", "1"))
_BYTES = int(_OPTIONS.get("bytes", str(256 * 1024 * 1024)))


class CUresult(IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_VALUE = 1
    CUDA_ERROR_OUT_OF_MEMORY = 2
    CUDA_ERROR_NOT_INITIALIZED = 3
    CUDA_ERROR_NO_DEVICE = 100
    CUDA_ERROR_INVALID_DEVICE = 101
    CUDA_ERROR_INVALID_CONTEXT = 201
    CUDA_ERROR_INVALID_HANDLE = 400
    CUDA_ERROR_ILLEGAL_ADDRESS = 700
    CUDA_ERROR_NOT_SUPPORTED = 801


class CUmemAllocationType(IntEnum):
    CU_MEM_ALLOCATION_TYPE_PINNED = 1


class CUmemLocationType(IntEnum):
    CU_MEM_LOCATION_TYPE_DEVICE = 1


class CUmemAllocationHandleType(IntEnum):
    CU_MEM_HANDLE_TYPE_NONE = 0
    CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR = 1


class CUmemAllocationGranularity_flags(IntEnum):  # noqa: N801 - the driver's name
    CU_MEM_ALLOC_GRANULARITY_MINIMUM = 0


class CUmemAccess_flags(IntEnum):  # noqa: N801 - the driver's name
    CU_MEM_ACCESS_FLAGS_PROT_NONE = 0
    CU_MEM_ACCESS_FLAGS_PROT_READ = 1
    CU_MEM_ACCESS_FLAGS_PROT_READWRITE = 3


class CUstream_flags(IntEnum):  # noqa: N801 - the driver's name
    CU_STREAM_DEFAULT = 0
    CU_STREAM_NON_BLOCKING = 1


class CUdevice_attribute(IntEnum):  # noqa: N801 - the driver's name
    CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED = 102
    CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED = 103
    CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED = 110


@dataclass
class CUmemLocation:
    type: int = 0
    id: int = 0


@dataclass
class CUmemAllocationProp:
    type: int = 0
    requestedHandleTypes: int = 0  # noqa: N815 - the driver's name
    location: CUmemLocation = field(default_factory=CUmemLocation)


@dataclass
class CUmemAccessDesc:
    location: CUmemLocation = field(default_factory=CUmemLocation)
    flags: int = 0


@dataclass
class CUuuid:
    bytes: bytes


@dataclass
class _Allocation:
    fd: int
    size: int


@dataclass
class _Mapping:
    size: int
    alias: int
    access: int = 0


class _Refused(Exception):
    pass


calls: list[str] = []
"""The name of every call of this process."""

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_FAILED = ctypes.c_void_p(-1).value
_NOREPLACE, _NORESERVE = 0x100000, 0x4000

_lock = threading.RLock()
_thread = threading.local()
_state: dict[str, bool] = {}
_handles: dict[int, _Allocation] = {}
_reserved: dict[int, int] = {}
_mappings: dict[int, _Mapping] = {}
_retained: dict[int, int] = {}
_streams: dict[int, list[Callable[[], None]]] = {}
_pinned: dict[int, int] = {}
_numbers = iter(range(1000, 1 << 60))


def _refuse(status: CUresult) -> None:
    raise _Refused(status)


def _need(holds: object, status: CUresult = CUresult.CUDA_ERROR_INVALID_VALUE) -> None:
    if not holds:
        _refuse(status)


def _call(work: Callable[..., Any]) -> Callable[..., tuple[Any, ...]]:
    """Answer as the bindings do: the status, and what was found beside it."""

    @wraps(work)
    def answer(*arguments: Any) -> tuple[Any, ...]:
        with _lock:
            calls.append(work.__name__)
            try:
                ready = _state.get("ready") or work.__name__ in ("cuInit", "cuDriverGetVersion")
                _need(ready, CUresult.CUDA_ERROR_NOT_INITIALIZED)
                found = work(*arguments)
            except _Refused as refused:
                return (refused.args[0], *[0] * (work.__annotations__["return"] != "None"))
            return (CUresult.CUDA_SUCCESS,) if found is None else (CUresult.CUDA_SUCCESS, found)

    return answer


@_call
def cuInit(flags: int) -> None:  # noqa: N802
    status = CUresult(int(_OPTIONS.get("init", "0")))
    _need(not status, status)
    _state["ready"] = True


@_call
def cuDriverGetVersion() -> int:  # noqa: N802
    return 13000


@_call
def cuDeviceGetCount() -> int:  # noqa: N802
    return _DEVICES


@_call
def cuDeviceGet(ordinal: int) -> int:  # noqa: N802
    _need(0 <= ordinal < _DEVICES, CUresult.CUDA_ERROR_INVALID_DEVICE)
    return ordinal


@_call
def cuDeviceGetName(length: int, device: int) -> bytes:  # noqa: N802
    return b"Likeness of a GPU".ljust(length, b"\0")


@_call
def cuDeviceGetUuid(device: int) -> CUuuid:  # noqa: N802
    return CUuuid(uuid.uuid5(uuid.NAMESPACE_DNS, f"likeness{device}").bytes)


@_call
def cuDeviceTotalMem(device: int) -> int:  # noqa: N802
    return _BYTES


@_call
def cuDeviceGetAttribute(attribute: int, device: int) -> int:  # noqa: N802
    missing = "novmm" in _OPTIONS and attribute == 102
    return 0 if missing else 1


@_call
def cuMemGetAllocationGranularity(prop: CUmemAllocationProp, option: int) -> int:  # noqa: N802
    return GRANULARITY


@_call
def cuMemCreate(size: int, prop: CUmemAllocationProp, flags: int) -> int:  # noqa: N802
    _need(flags == 0 and size > 0 and size % GRANULARITY == 0)
    _need(prop.type == 1 and prop.location.type == 1 and 0 <= prop.location.id < _DEVICES)
    used = sum(allocation.size for allocation in _handles.values())
    _need(used + size <= _BYTES, CUresult.CUDA_ERROR_OUT_OF_MEMORY)
    fd = os.memfd_create("likeness", os.MFD_CLOEXEC)
    os.ftruncate(fd, size)
    with mmap.mmap(fd, size) as pages:
        pages[:] = bytes([GARBAGE]) * size
    return _add(fd, size)


def _add(fd: int, size: int) -> int:
    handle = next(_numbers)
    _handles[handle] = _Allocation(fd, size)
    return handle


@_call
def cuMemRelease(handle: int) -> None:  # noqa: N802
    found = _handles.pop(int(handle), None)
    _need(found)
    os.close(found.fd)


@_call
def cuMemExportToShareableHandle(handle: int, kind: int, flags: int) -> int:  # noqa: N802
    _need(kind == 1 and flags == 0 and handle in _handles)
    return os.dup(_handles[handle].fd)


@_call
def cuMemImportFromShareableHandle(descriptor: int, kind: int) -> int:  # noqa: N802
    _need(kind == 1)
    try:
        fd = fcntl.fcntl(int(descriptor), fcntl.F_DUPFD_CLOEXEC, 0)
    except OSError:
        _refuse(CUresult.CUDA_ERROR_INVALID_VALUE)
    return _add(fd, os.fstat(fd).st_size)


@_call
def cuMemAddressReserve(size: int, alignment: int, address: int, flags: int) -> int:  # noqa: N802
    _need(flags == 0 and size > 0 and size % mmap.PAGESIZE == 0 and address % mmap.PAGESIZE == 0)
    private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE
    found = None
    if address and "nohint" not in _OPTIONS:
        found = _libc.mmap(address, size, 0, private | _NOREPLACE, -1, 0)
    if found in (None, _FAILED):
        # A hint only; and reservations begin at whole granules.
        wide = _libc.mmap(None, size + GRANULARITY, 0, private, -1, 0)
        _need(wide not in (None, _FAILED), CUresult.CUDA_ERROR_OUT_OF_MEMORY)
        found = -(-wide // GRANULARITY) * GRANULARITY
    _reserved[found] = size
    return int(found)


@_call
def cuMemAddressFree(address: int, size: int) -> None:  # noqa: N802
    _need(_reserved.get(address) == size)
    _need(not any(address <= at < address + size for at in _mappings))
    del _reserved[address]
    _libc.munmap(address, size)


@_call
def cuMemMap(address: int, size: int, offset: int, handle: int, flags: int) -> None:  # noqa: N802
    _need(flags == 0 and handle in _handles)
    _need(not (size % GRANULARITY or address % GRANULARITY or offset % GRANULARITY) and size > 0)
    _need(offset + size <= _handles[handle].size)
    _need(any(at <= address and address + size <= at + n for at, n in _reserved.items()))
    _need(all(address + size <= at or at + m.size <= address for at, m in _mappings.items()))
    # Elsewhere: only the device reaches memory at the address itself.
    alias = _libc.mmap(None, size, 3, mmap.MAP_SHARED, _handles[handle].fd, offset)
    _need(alias not in (None, _FAILED), CUresult.CUDA_ERROR_OUT_OF_MEMORY)
    _mappings[address] = _Mapping(size, alias)


@_call
def cuMemUnmap(address: int, size: int) -> None:  # noqa: N802
    gone = _within(address, size)
    for at in gone:
        _libc.munmap(_mappings[at].alias, _mappings.pop(at).size)


@_call
def cuMemSetAccess(  # noqa: N802
    address: int, size: int, descriptions: Sequence[CUmemAccessDesc], count: int
) -> None:
    _need(count == len(descriptions) == 1 and descriptions[0].location.type == 1)
    for at in _within(address, size):
        _mappings[at].access = int(descriptions[0].flags)


def _within(address: int, size: int) -> list[int]:
    """Give the mappings that together are exactly this range."""
    at, found = address, []
    while at < address + size:
        _need(at in _mappings)
        found.append(at)
        at += _mappings[at].size
    _need(found and at == address + size)
    return found


@_call
def cuDevicePrimaryCtxRetain(device: int) -> int:  # noqa: N802
    _retained[device] = _retained.get(device, 0) + 1
    return device + 1


@_call
def cuDevicePrimaryCtxRelease(device: int) -> None:  # noqa: N802
    _need(_retained.get(device, 0) > 0, CUresult.CUDA_ERROR_INVALID_CONTEXT)
    _retained[device] -= 1


def _contexts() -> list[int]:
    if not hasattr(_thread, "stack"):
        _thread.stack = []
    stack: list[int] = _thread.stack
    return stack


@_call
def cuCtxPushCurrent(context: int) -> None:  # noqa: N802
    _need(_retained.get(int(context) - 1, 0) > 0, CUresult.CUDA_ERROR_INVALID_CONTEXT)
    _contexts().append(int(context))


@_call
def cuCtxPopCurrent() -> int:  # noqa: N802
    _need(_contexts(), CUresult.CUDA_ERROR_INVALID_CONTEXT)
    return _contexts().pop()


@_call
def cuCtxSynchronize() -> None:  # noqa: N802
    _need_context()
    for stream in _streams.values():
        _drain(stream)


def _need_context() -> None:
    _need(_contexts(), CUresult.CUDA_ERROR_INVALID_CONTEXT)


@_call
def cuStreamCreate(flags: int) -> int:  # noqa: N802
    _need_context()
    _need(int(flags) in (0, 1))
    stream = next(_numbers)
    _streams[stream] = []
    return stream


@_call
def cuStreamSynchronize(stream: int) -> None:  # noqa: N802
    _need_context()
    _need(stream in _streams, CUresult.CUDA_ERROR_INVALID_HANDLE)
    _drain(_streams[stream])


@_call
def cuStreamDestroy(stream: int) -> None:  # noqa: N802
    _need_context()
    _need(stream in _streams, CUresult.CUDA_ERROR_INVALID_HANDLE)
    _drain(_streams.pop(stream))


def _drain(stream: list[Callable[[], None]]) -> None:
    while stream:
        stream.pop(0)()


@_call
def cuMemHostAlloc(size: int, flags: int) -> int:  # noqa: N802
    _need_context()
    found = _libc.mmap(None, size, 3, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
    _need(found not in (None, _FAILED), CUresult.CUDA_ERROR_OUT_OF_MEMORY)
    ctypes.memset(found, GARBAGE, size)
    _pinned[found] = size
    return int(found)


@_call
def cuMemFreeHost(address: int) -> None:  # noqa: N802
    _need_context()
    _need(address in _pinned)
    _libc.munmap(address, _pinned.pop(address))


def _device_side(address: int, size: int, access: int) -> list[tuple[int, int]]:
    """Give where the bytes of a device range really are. A range may cross mappings."""
    found = []
    while size:
        at = max((each for each in _mappings if each <= address), default=None)
        mapping = None if at is None else _mappings[at]
        inside = mapping is not None and address < at + mapping.size
        _need(inside and mapping.access & access == access, CUresult.CUDA_ERROR_ILLEGAL_ADDRESS)
        run = min(size, at + mapping.size - address)
        found.append((mapping.alias + address - at, run))
        address, size = address + run, size - run
    return found


def _to_device(address: int, host: int, size: int) -> None:
    for at, run in _device_side(address, size, 3):
        ctypes.memmove(at, host, run)
        host += run


def _to_host(host: int, address: int, size: int) -> None:
    for at, run in _device_side(address, size, 1):
        ctypes.memmove(host, at, run)
        host += run


@_call
def cuMemcpyHtoD(address: int, host: int, size: int) -> None:  # noqa: N802
    _need_context()
    _to_device(address, host, size)


@_call
def cuMemcpyDtoH(host: int, address: int, size: int) -> None:  # noqa: N802
    _need_context()
    _to_host(host, address, size)


@_call
def cuMemcpyHtoDAsync(address: int, host: int, size: int, stream: int) -> None:  # noqa: N802
    _need_context()
    _need(stream in _streams, CUresult.CUDA_ERROR_INVALID_HANDLE)
    _streams[stream].append(lambda: _to_device(address, host, size))


@_call
def cuMemcpyDtoHAsync(host: int, address: int, size: int, stream: int) -> None:  # noqa: N802
    _need_context()
    _need(stream in _streams, CUresult.CUDA_ERROR_INVALID_HANDLE)
    _streams[stream].append(lambda: _to_host(host, address, size))


@_call
def cuMemsetD8(address: int, value: int, size: int) -> None:  # noqa: N802
    _need_context()
    for at, run in _device_side(address, size, 3):
        ctypes.memset(at, value, run)
