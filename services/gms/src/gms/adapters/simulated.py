"""A GPU made of memfds: real bytes, real descriptors, a fixed capacity, the driver's rules."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import resource
import threading
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Protocol

from gms.ports import DeviceInfo
from snapback_client.frames import Access
from snapback_client.reservation import HUGE_PAGE
from snapshot_shared import units
from snapshot_shared.errors import DeviceError, Internal, InvalidInput, OutOfDeviceMemory

GRANULARITY = 2 * 1024 * 1024
PRODUCT = "Snapback Simulated GPU"
KIND = "simulated"
CAPABILITIES = {
    "virtual-memory-management": 1,
    "posix-descriptors": 1,
    "read-only-exports": 1,
    "zeroed": 1,
}

_F_SEAL_FUTURE_WRITE = 0x10


def simulated_uuid(node: str, index: int) -> str:
    """Return the uuid of a simulated device, the same at every start."""
    return f"GPU-{uuid.uuid5(uuid.NAMESPACE_DNS, f'gpu{index}.{node}.snapback.invalid')}"


def allow_many_descriptors() -> None:
    """Raise the soft limit to the hard one: every allocation of a simulated device is a file."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


class MemorySource(Protocol):
    """Where the memory of a simulated device comes from. May be called from any thread."""

    def create(self, size: int) -> int:
        """Return a sealed memfd of `size` zeroed bytes. OutOfDeviceMemory."""
        ...

    def release(self, handle: int) -> None:
        """Close a memfd that was created."""
        ...


class HostMemory:
    """Memory of this process's own.

    With `huge_pages` it is what the host has set aside (`vm.nr_hugepages`): like the memory of a
    GPU it is there before it is asked for, in pieces of 2 MiB.
    """

    def __init__(self, *, huge_pages: bool = False) -> None:
        """Take ordinary or huge pages."""
        self._huge_pages = huge_pages

    def create(self, size: int) -> int:
        return _memfd(size, huge_pages=self._huge_pages)

    def release(self, handle: int) -> None:
        os.close(handle)


class MemfdDevice:
    """A simulated GPU. Each allocation is a memfd whose pages are its own from the beginning."""

    def __init__(self, info: DeviceInfo, memory: MemorySource) -> None:
        """Have nothing allocated. InvalidInput for a device smaller than one allocation."""
        if info.capacity < info.granularity:
            raise InvalidInput(
                f"a device needs at least {info.granularity} bytes", capacity=info.capacity
            )
        self._info = info
        self._memory = memory
        self._lock = threading.Lock()
        self._sizes: dict[int, int] = {}
        self._used = 0

    @property
    def info(self) -> DeviceInfo:
        return self._info

    @property
    def used(self) -> int:
        return self._used

    def free(self) -> int:
        return self._info.capacity - self._used

    def holders(self) -> Mapping[str, int]:
        return {}

    def create(self, size: int) -> int:
        granularity = self._info.granularity
        if size <= 0 or size % granularity:
            raise InvalidInput(f"{size} bytes are no multiple of {granularity}", size=size)
        self._take(size)
        try:
            handle = self._memory.create(size)
        except BaseException:
            self._give_back(size)
            raise
        with self._lock:
            self._sizes[handle] = size
        return handle

    def adopt(self, handle: int) -> None:
        """Count a memfd of another process's, which this device then releases as its own.

        InvalidInput for what is no allocation of a simulated device, OutOfDeviceMemory.
        """
        size = _allocation_size(handle, self._info.granularity)
        self._take(size)
        with self._lock:
            self._sizes[handle] = size

    def export(self, handle: int, access: Access) -> int:
        self._size_of(handle)
        with _descriptors():
            if access is Access.RW:
                return os.dup(handle)
            # A reopened file has its own access mode, which the kernel checks at every mmap.
            return os.open(f"/proc/self/fd/{handle}", os.O_RDONLY | os.O_CLOEXEC)

    def seal(self, handle: int) -> None:
        self._size_of(handle)
        # Not F_SEAL_WRITE, which the kernel refuses while the writer's own mapping exists.
        fcntl.fcntl(handle, fcntl.F_ADD_SEALS, _F_SEAL_FUTURE_WRITE)

    def release(self, handle: int) -> None:
        with self._lock:
            size = self._sizes.pop(handle, None)
        if size is None:
            raise Internal(f"handle {handle} is released twice")
        self._memory.release(handle)
        self._give_back(size)

    def close(self) -> None:
        """Release everything."""
        for handle in list(self._sizes):
            self.release(handle)

    def _size_of(self, handle: int) -> int:
        try:
            return self._sizes[handle]
        except KeyError:
            raise Internal(f"handle {handle} is not allocated") from None

    def _take(self, size: int) -> None:
        capacity = self._info.capacity
        with self._lock:
            free = capacity - self._used
            if size > free:
                wanted, there = units.sizes(size, free)
                raise OutOfDeviceMemory(
                    f"{wanted} are needed, {there} of {units.size(capacity)} are free",
                    needed=size,
                    free=free,
                    capacity=capacity,
                )
            self._used += size

    def _give_back(self, size: int) -> None:
        with self._lock:
            self._used -= size


class SimulatedDevice(MemfdDevice):
    """A simulated GPU of a node, in memory of this process."""

    def __init__(
        self,
        *,
        node: str,
        index: int,
        capacity: int,
        granularity: int = GRANULARITY,
        huge_pages: bool = False,
        product: str = PRODUCT,
        is_shared: bool = False,
    ) -> None:
        """Make an empty device of `capacity` bytes; `granularity` is whole pages.

        `is_shared`: pods take its memory, too (`device_memory.DeviceSockets`).
        """
        if huge_pages and granularity % HUGE_PAGE:
            raise InvalidInput(f"{granularity} bytes are no huge pages", granularity=granularity)
        info = simulated_info(simulated_uuid(node, index), index, product, capacity, granularity)
        info = replace(info, is_shared=is_shared)
        super().__init__(info, HostMemory(huge_pages=huge_pages))


def simulated_info(
    device: str, index: int, product: str, capacity: int, granularity: int = GRANULARITY
) -> DeviceInfo:
    """Return the description of a simulated device with this uuid."""
    return DeviceInfo(
        kind=KIND,
        uuid=device,
        index=index,
        product=product,
        capacity=capacity,
        granularity=granularity,
        capabilities=CAPABILITIES,
    )


def _allocation_size(fd: int, granularity: int) -> int:
    """Return the size of a memfd whose size is sealed. InvalidInput."""
    sealed = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError:
        # Only files in memory know of seals.
        seals = 0
    size = os.fstat(fd).st_size
    if seals & sealed != sealed or size <= 0 or size % granularity:
        raise InvalidInput(f"a file of {size} bytes is no allocation of a device", size=size)
    return size


@contextlib.contextmanager
def _descriptors() -> Iterator[None]:
    """Raise DeviceError where no descriptor is left: every allocation and every export is one."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.EMFILE, errno.ENFILE):
            raise
        raise DeviceError(
            f"no descriptor is left for memory of a simulated device: {error.strerror}",
            next_step="raise the limit of the GPU memory service; see LimitNOFILE, ulimit -n",
        ) from error


@_descriptors()
def _reserve(fd: int, size: int) -> None:
    """Reserve huge pages for a file. OSError without enough of them."""
    os.ftruncate(fd, size)
    # The first mapping reserves the pages until the file is gone, and clears none of them
    # (Documentation/mm/hugetlbfs_reserv.rst).
    mmap.mmap(fd, size).close()


def _memfd(size: int, *, huge_pages: bool) -> int:
    kind = os.MFD_HUGETLB | os.MFD_HUGE_2MB if huge_pages else 0
    with _descriptors():
        fd = os.memfd_create("snapback-gpu", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING | kind)
    try:
        if huge_pages:
            _reserve(fd, size)
        else:
            # Not ftruncate: without pages a write could find the host out of memory later.
            os.posix_fallocate(fd, 0, size)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    except OSError as error:
        os.close(fd)
        pages = "huge pages" if huge_pages else "memory"
        raise OutOfDeviceMemory(
            f"the host has no {pages} for {size} bytes of a simulated device: {error.strerror}",
            next_step="set more aside: sysctl vm.nr_hugepages=…, of 2 MiB each"
            if huge_pages
            else "give the simulated devices less memory than the host has",
            needed=size,
            free=0,
            capacity=0,
        ) from error
    except BaseException:
        os.close(fd)
        raise
    return fd
