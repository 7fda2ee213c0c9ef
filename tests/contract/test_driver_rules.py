"""The simulated device and its range of addresses keep the rules that the CUDA driver documents.

Each test names the page of the CUDA Driver API documentation that states its rule; all of them
belong to the group Virtual Memory Management. What speaks to the driver itself keeps them too,
because the same tests run on it over the likeness of the driver, whose rules are these.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Iterator
from typing import Any

import pytest

from gms.adapters.cuda import CudaDevice
from gms.adapters.simulated import SimulatedDevice
from gms.ports import Device
from snapback_client.cuda import CudaDriver
from snapback_client.frames import Access
from snapback_client.mappings import AddressRange, AddressTaken, Mappings
from snapback_client.reservation import Reservation, reserve
from snapshot_shared.errors import DeviceError, InvalidInput, LayoutError
from tests.bench.machine import huge_bytes_free
from tests.support.likeness_rig import likeness

MIB = 1024 * 1024
GRANULE = 2 * MIB


@pytest.fixture(params=["simulated", "simulated in huge pages", "cuda"])
def device(request: pytest.FixtureRequest, monkeypatch: Any) -> Iterator[Device]:
    if request.param != "cuda":
        huge = request.param == "simulated in huge pages"
        if huge and huge_bytes_free() < 32 * MIB:
            pytest.skip("this host has set no huge pages aside (vm.nr_hugepages)")
        simulated = SimulatedDevice(node="n1", index=0, capacity=32 * MIB, huge_pages=huge)
        yield simulated
        simulated.close()
        return
    for _ in likeness(monkeypatch, f"bytes={32 * MIB}"):
        cuda = CudaDevice(CudaDriver(), 0)
        yield cuda
        cuda.close()


@pytest.fixture
def at(device: Device) -> Iterator[AddressRange]:
    """Addresses for four granules, of which none is mapped."""
    found = reserve(device.info.kind, device.info.uuid, 4 * GRANULE, address=None)
    yield found
    found.release()


@contextlib.contextmanager
def exported(device: Device, granules: int = 1, access: Access = Access.RW) -> Iterator[int]:
    """A descriptor of memory whose handle is released."""
    handle = device.create(granules * GRANULE)
    descriptor = device.export(handle, access)
    device.release(handle)
    yield descriptor
    os.close(descriptor)


def put(at: AddressRange, offset: int, data: bytes) -> None:
    if isinstance(at, Reservation):
        at.view(offset, len(data)).cast("B")[:] = data
    else:
        at.write(offset, memoryview(bytearray(data)))  # type: ignore[attr-defined]


def get(at: AddressRange, offset: int, size: int) -> bytes:
    if isinstance(at, Reservation):
        return bytes(at.view(offset, size))
    found = bytearray(size)
    at.read(offset, memoryview(found))  # type: ignore[attr-defined]
    return bytes(found)


@pytest.mark.parametrize("size", [1, GRANULE - 1, GRANULE + 4096])
def test_memory_is_made_in_whole_granules(device: Device, size: int) -> None:
    """cuMemCreate: the size "must be a multiple" of cuMemGetAllocationGranularity (MINIMUM)."""
    assert device.info.granularity == GRANULE
    with pytest.raises(InvalidInput):
        device.create(size)
    device.release(device.create(3 * GRANULE))


def test_a_mapping_begins_with_the_first_byte_of_the_memory(
    device: Device, at: AddressRange
) -> None:
    """cuMemMap: maps "starting from byte offset"; both kinds map whole handles, at offset 0."""
    with exported(device, granules=2) as descriptor:
        at.map(descriptor, 0, 2 * GRANULE, writable=True)
        put(at, 0, b"first")
        put(at, GRANULE, b"second")
        at.unmap()
        at.map(descriptor, GRANULE, 2 * GRANULE, writable=True)
        assert get(at, GRANULE, 5) == b"first"
        assert get(at, 2 * GRANULE, 6) == b"second"


@pytest.mark.parametrize("offset", [-GRANULE, 4 * GRANULE, 3 * GRANULE + GRANULE // 2])
def test_mappings_stand_on_reserved_addresses_only(
    device: Device, at: AddressRange, offset: int
) -> None:
    """cuMemMap: the range "must be an address reservation previously reserved"."""
    with exported(device) as descriptor, pytest.raises(LayoutError, match="outside the reserved"):
        at.map(descriptor, offset, GRANULE, writable=True)


def test_what_is_mapped_is_not_mapped_over(device: Device, at: AddressRange) -> None:
    """cuMemMap: it "can only create mappings on VA range reservations that are not mapped"."""
    with exported(device) as one, exported(device, granules=2) as two:
        at.map(one, GRANULE, GRANULE, writable=True)
        put(at, GRANULE, b"first")
        for offset in (0, GRANULE):
            with pytest.raises(LayoutError, match="mapped already"):
                at.map(two, offset, 2 * GRANULE, writable=True)
        assert get(at, GRANULE, 5) == b"first"
        at.map(two, 2 * GRANULE, 2 * GRANULE, writable=True)


def test_a_mapping_goes_as_a_whole(device: Device, at: AddressRange) -> None:
    """cuMemUnmap: it "cannot unmap a sub-range of an address range mapped by cuMemMap"."""
    with exported(device, granules=2) as descriptor:
        at.map(descriptor, 0, 2 * GRANULE, writable=True)
        put(at, 0, b"first")
        for offset in (0, GRANULE):
            with pytest.raises(LayoutError, match="a part of a mapping"):
                at.unmap(offset, GRANULE)
        assert get(at, 0, 5) == b"first"
        at.unmap(0, 2 * GRANULE)


def test_addresses_stay_reserved_when_what_was_mapped_is_gone(
    device: Device, at: AddressRange
) -> None:
    """cuMemUnmap: "the address range is converted to an address reservation"."""
    with exported(device) as descriptor:
        first = at.map(descriptor, GRANULE, GRANULE, writable=True)
        at.unmap()
        info = device.info
        with pytest.raises(AddressTaken):
            reserve(info.kind, info.uuid, GRANULE, address=at.address + GRANULE, exact=True)
        assert at.map(descriptor, GRANULE, GRANULE, writable=True) == first


def test_an_address_that_is_not_taken_is_given_when_it_is_asked_for(device: Device) -> None:
    """cuMemAddressReserve: the driver "treats it as a hint about where to place" the range."""
    wanted = 0x5000_0000_0000
    found = reserve(device.info.kind, device.info.uuid, GRANULE, address=wanted, exact=True)
    assert found.address == wanted
    found.release()


def test_an_import_needs_its_descriptor_only_until_it_is_mapped(
    device: Device, at: AddressRange
) -> None:
    """CuMemImportFromShareableHandle and cuMemRelease: mappings are references of their own."""
    with exported(device) as descriptor:
        at.map(descriptor, 0, GRANULE, writable=True)
    put(at, 0, b"still here")
    assert get(at, 0, 10) == b"still here"


def test_two_imports_show_the_same_memory(device: Device, at: AddressRange) -> None:
    """cuMemExportToShareableHandle: a handle "can be used to share the memory"."""
    with exported(device) as descriptor:
        at.map(descriptor, 0, GRANULE, writable=True)
        at.map(descriptor, GRANULE, GRANULE, writable=False)
        put(at, 5, b"shared")
        assert get(at, GRANULE + 5, 6) == b"shared"


@pytest.mark.parametrize("pages", [1, 512, 513])
def test_a_range_for_a_simulated_device_begins_at_a_huge_page(pages: int) -> None:
    size = pages * mmap.PAGESIZE
    with contextlib.ExitStack() as stack:
        found = [Reservation(size) for _ in range(3)]
        for each in found:
            stack.callback(each.release)
        assert [each.address % (2 * MIB) for each in found] == [0, 0, 0]
        # The addresses are taken.
        for each in found:
            with pytest.raises(AddressTaken):
                Reservation(mmap.PAGESIZE, address=each.address + size - mmap.PAGESIZE)


def test_access_can_be_taken_back_and_given_again(device: Device, at: AddressRange) -> None:
    """cuMemSetAccess: it sets "the access flags for the target locations", at any time."""
    with exported(device) as descriptor:
        at.map(descriptor, 0, GRANULE, writable=True)
        put(at, 0, b"first")
        at.protect(0, GRANULE, writable=False)
        assert get(at, 0, 5) == b"first"
        if not isinstance(at, Reservation):
            # The kernel would end this process; the conformance rules try it in another.
            with pytest.raises(DeviceError):
                put(at, 0, b"other")
        at.protect(0, GRANULE, writable=True)
        put(at, 0, b"again")
        assert get(at, 0, 5) == b"again"


def test_memory_is_charged_while_anyone_holds_it(device: Device, at: AddressRange) -> None:
    """cuMemRelease: freed when all mappings and all references, shareable ones too, are gone."""
    with exported(device) as descriptor:
        at.map(descriptor, 0, GRANULE, writable=True)
        put(at, 0, b"kept")
        blocks = os.fstat(descriptor).st_blocks * 512
        assert blocks == GRANULE
    # Released and closed; the mapping alone holds it.
    assert get(at, 0, 4) == b"kept"
    at.unmap()
    assert device.used == 0


@pytest.mark.parametrize("first", [0, 3 * mmap.PAGESIZE])
def test_places_may_be_used_again_in_any_order(first: int) -> None:
    """cuMemUnmap: what was unmapped "can be used for a future calls to cuMemMap"."""
    mappings = Mappings(16 * mmap.PAGESIZE)
    places = [(first, 2), (6, 1), (9, 3)]
    for start, pages in places:
        mappings.add(start if start == first else start * mmap.PAGESIZE, pages * mmap.PAGESIZE)
    assert [at for at, _ in mappings.within(0, 16 * mmap.PAGESIZE)] == [
        first,
        6 * mmap.PAGESIZE,
        9 * mmap.PAGESIZE,
    ]
    mappings.remove(6 * mmap.PAGESIZE)
    mappings.add(5 * mmap.PAGESIZE, 4 * mmap.PAGESIZE)
    with pytest.raises(LayoutError):
        mappings.within(6 * mmap.PAGESIZE, mmap.PAGESIZE)
    assert mappings.within(12 * mmap.PAGESIZE, 4 * mmap.PAGESIZE) == []
