"""The devices that are checked, and how a rule reports what it found."""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from gms.adapters.cuda import CudaDevice
from gms.adapters.simulated import SimulatedDevice, allow_many_descriptors
from gms.ports import Device
from snapback_client.cuda import CudaDriver
from snapback_client.frames import Access
from snapback_client.mappings import AddressRange
from snapback_client.reservation import Reservation, reserve
from snapshot_shared.errors import UnknownDevice

CAPACITY = 64 * 1024 * 1024
MANY = 4_000
"""How many allocations of one granule are handed over at once."""


class Broken(Exception):
    """A rule does not hold; the message says what was found."""


class Skipped(Exception):
    """The rule does not apply to this kind of device; the message says why."""


class Rig(Protocol):
    """A device that is checked."""

    @property
    def device(self) -> Device:
        """The device, with nothing allocated."""
        ...

    def many(self) -> Device:
        """Return a device with room for `MANY` allocations, which the caller closes. Skipped."""
        ...

    def close(self) -> None:
        """Release everything."""
        ...


class SimulatedRig:
    """A simulated device of 64 MiB."""

    def __init__(self, *, huge_pages: bool = False) -> None:
        """Make an empty device."""
        self.device: Device = SimulatedDevice(
            node="conformance", index=0, capacity=CAPACITY, huge_pages=huge_pages
        )

    def many(self) -> Device:
        allow_many_descriptors()
        return SimulatedDevice(
            node="conformance", index=0, capacity=CAPACITY, granularity=mmap.PAGESIZE
        )

    def close(self) -> None:
        self.device.close()


class CudaRig:
    """A GPU."""

    def __init__(self, ordinal: int) -> None:
        """Use a visible device. CudaUnavailable, UnknownDevice."""
        self._driver = CudaDriver()
        if not 0 <= ordinal < self._driver.devices:
            raise UnknownDevice(
                f"CUDA shows {self._driver.devices} devices here, and none with ordinal {ordinal}",
                next_step="look with `nvidia-smi`",
                ordinal=ordinal,
            )
        self._ordinal = ordinal
        self.device: Device = CudaDevice(self._driver, ordinal)

    def many(self) -> Device:
        info = self.device.info
        if info.capacity < 2 * MANY * info.granularity:
            raise Skipped(f"{MANY} granules do not fit well in {info.capacity} bytes")
        return CudaDevice(self._driver, self._ordinal)

    def close(self) -> None:
        self.device.close()


def require(holds: bool, otherwise: str) -> None:  # noqa: FBT001 - reads as a sentence
    """Raise Broken with `otherwise` unless the condition holds."""
    if not holds:
        raise Broken(otherwise)


def refuses(kind: type[Exception], call: Callable[[], object], what: str) -> Exception:
    """Return the error of this kind that a call raises. Broken when it raises none."""
    try:
        call()
    except kind as error:
        return error
    raise Broken(f"{what} was not refused")


def needs(rig: Rig, capability: str, otherwise: str) -> None:
    """Raise Skipped with `otherwise` unless the device has a capability."""
    if not rig.device.info.capabilities.get(capability):
        raise Skipped(otherwise)


def read(at: AddressRange, offset: int, size: int) -> bytes:
    """Return bytes of a mapping, by the way of its kind of device."""
    if isinstance(at, Reservation):
        return bytes(at.view(offset, size))
    found = bytearray(size)
    at.read(offset, memoryview(found))  # type: ignore[attr-defined]
    return bytes(found)


def write(at: AddressRange, offset: int, data: bytes) -> None:
    """Write bytes to a mapping, by the way of its kind of device."""
    if isinstance(at, Reservation):
        at.view(offset, len(data)).cast("B")[:] = data
    else:
        at.write(offset, memoryview(bytearray(data)))  # type: ignore[attr-defined]


@contextlib.contextmanager
def reserved(
    rig: Rig, granules: int = 1, *, address: int | None = None, exact: bool = False
) -> Iterator[AddressRange]:
    """Reserve addresses for some granules of the device."""
    info = rig.device.info
    at = reserve(info.kind, info.uuid, granules * info.granularity, address=address, exact=exact)
    try:
        yield at
    finally:
        at.release()


@contextlib.contextmanager
def allocated(rig: Rig, granules: int = 1) -> Iterator[int]:
    """Allocate some granules of the device."""
    handle = rig.device.create(granules * rig.device.info.granularity)
    try:
        yield handle
    finally:
        rig.device.release(handle)


@contextlib.contextmanager
def descriptor_of(rig: Rig, handle: int, access: Access = Access.RW) -> Iterator[int]:
    """Export an allocation."""
    descriptor = rig.device.export(handle, access)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def exported(rig: Rig, granules: int = 1, access: Access = Access.RW) -> Iterator[int]:
    """Allocate and export some granules."""
    with allocated(rig, granules) as handle, descriptor_of(rig, handle, access) as descriptor:
        yield descriptor


@contextlib.contextmanager
def mapped(rig: Rig, descriptor: int, access: Access = Access.RW) -> Iterator[AddressRange]:
    """Map a descriptor of one granule into a reservation of its own."""
    with reserved(rig) as at:
        at.map(descriptor, 0, rig.device.info.granularity, writable=access is Access.RW)
        yield at


def map_writable(rig: Rig, descriptor: int) -> None:
    """Map a descriptor of one granule for writing, and unmap it."""
    with mapped(rig, descriptor):
        pass


def data_of(array: Any) -> bytes:
    """Return the bytes of a pool's array."""
    return bytes(array.get() if hasattr(array, "get") else array)


def fill(array: Any, values: int | bytes) -> None:
    """Write to a pool's array."""
    found = list(values) if isinstance(values, bytes) else values
    if hasattr(array, "set"):
        array.set(found)
    else:
        array[...] = found


def address_of_array(array: Any) -> int:
    """Return where a pool's array begins."""
    return int(array.address if hasattr(array, "address") else array.ctypes.data)
