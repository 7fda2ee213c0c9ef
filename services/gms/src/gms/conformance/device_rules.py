"""The rules of a device and of the address ranges into which its memory is mapped.

A rule that comes from the CUDA driver names the function whose documentation has it, in the group
Virtual Memory Management of the CUDA Driver API.
"""

from __future__ import annotations

import contextlib
import mmap
import os

from gms.conformance.rig import (
    Rig,
    Skipped,
    allocated,
    descriptor_of,
    exported,
    map_writable,
    mapped,
    needs,
    read,
    refuses,
    require,
    reserved,
    write,
)
from snapback_client.errors import LayoutError
from snapback_client.frames import Access
from snapback_client.mappings import AddressTaken
from snapback_client.reservation import address_of
from snapshot_shared.errors import Internal, InvalidInput, OutOfDeviceMemory, SnapbackError

WORDS = b"the same bytes"
_NO_ACCESS_MODE = "its descriptors have no access mode: every importer may map them for writing"


# Memory.


def says_what_it_is(rig: Rig) -> None:
    """It has a uuid, a product, a capacity and whole granules."""
    info = rig.device.info
    require(info.uuid.startswith(("GPU-", "MIG-")), f"its uuid is {info.uuid!r}")
    require(bool(info.product), "its product has no name")
    require(info.granularity > 0 and info.granularity % mmap.PAGESIZE == 0, "granules are odd")
    require(info.capacity >= 4 * info.granularity, f"its capacity is {info.capacity}")


def counts_what_is_taken(rig: Rig) -> None:
    """Memory counts as used from create to release."""
    before, granule = rig.device.used, rig.device.info.granularity
    handle = rig.device.create(2 * granule)
    taken = rig.device.used - before
    rig.device.release(handle)
    require(taken == 2 * granule, f"two granules took {taken} bytes")
    require(rig.device.used == before, f"{rig.device.used - before} bytes did not come back")


def refuses_odd_sizes(rig: Rig) -> None:
    """Memory is made in whole granules (cuMemCreate, cuMemGetAllocationGranularity)."""
    granule = rig.device.info.granularity
    for size in (0, -1, 1, granule - 1, granule + 1, granule + mmap.PAGESIZE // 2):
        refuses(InvalidInput, lambda size=size: rig.device.create(size), f"{size} bytes")  # type: ignore[misc]


def refuses_more_than_it_has(rig: Rig) -> None:
    """More than the device has is refused with the values, and nothing is taken."""
    info, before = rig.device.info, rig.device.used
    too_much = -(-info.capacity // info.granularity) * info.granularity + info.granularity
    error = refuses(OutOfDeviceMemory, lambda: rig.device.create(too_much), f"{too_much} bytes")
    require(rig.device.used == before, "a refusal took memory")
    values = error.values if isinstance(error, SnapbackError) else {}
    expected = {"needed": too_much, "capacity": info.capacity}
    require(values.items() >= expected.items(), f"the refusal says {values}, not {expected}")
    free = values.get("free", -1)
    require(0 <= free <= info.capacity - before, f"the refusal says that {free} bytes are free")


def gives_zeroes(rig: Rig) -> None:
    """New memory is zero, also where old memory was."""
    needs(rig, "zeroed", "this kind of device does not say what new memory holds")
    size = rig.device.info.granularity
    for _ in range(4):
        with exported(rig) as descriptor, mapped(rig, descriptor) as at:
            require(
                not read(at, 0, size).strip(b"\0"), "bytes of an earlier allocation are visible"
            )
            write(at, 0, WORDS * 100)


def refuses_released_handles(rig: Rig) -> None:
    """A handle that was released is refused."""
    device = rig.device
    handle = device.create(device.info.granularity)
    device.release(handle)
    refuses(Internal, lambda: device.release(handle), "a second release")
    refuses(Internal, lambda: device.export(handle, Access.RO), "an export after the release")
    refuses(Internal, lambda: device.seal(handle), "a seal after the release")


# Exports.


def shares_bytes(rig: Rig) -> None:
    """Two exports of one allocation show the same bytes (cuMemExportToShareableHandle)."""
    with allocated(rig) as handle, contextlib.ExitStack() as stack:
        one = stack.enter_context(descriptor_of(rig, handle))
        two = stack.enter_context(descriptor_of(rig, handle, Access.RO))
        writer = stack.enter_context(mapped(rig, one))
        reader = stack.enter_context(mapped(rig, two, Access.RO))
        write(writer, 4096, WORDS)
        found = read(reader, 4096, len(WORDS))
        require(found == WORDS, f"{WORDS!r} was written, {found!r} was read")


def exports_for_reading_only(rig: Rig) -> None:
    """A read-only export can be neither mapped for writing nor written."""
    needs(rig, "read-only-exports", _NO_ACCESS_MODE)
    with exported(rig, access=Access.RO) as descriptor:
        refuses(OSError, lambda: map_writable(rig, descriptor), "a writable mapping")
        refuses(OSError, lambda: os.pwrite(descriptor, b"x", 0), "a write to the descriptor")


def seals(rig: Rig) -> None:
    """After a seal there is no new writable mapping, and those from before stay."""
    needs(rig, "read-only-exports", _NO_ACCESS_MODE)
    with allocated(rig) as handle, descriptor_of(rig, handle) as first, mapped(rig, first) as old:
        rig.device.seal(handle)
        rig.device.seal(handle)
        with descriptor_of(rig, handle) as second:
            for descriptor in (first, second):
                refuses(OSError, lambda fd=descriptor: map_writable(rig, fd), "a writable mapping")  # type: ignore[misc]
            write(old, 0, WORDS)
            with mapped(rig, second, Access.RO) as reader:
                require(read(reader, 0, len(WORDS)) == WORDS, "other bytes are there")


def exports_a_fixed_size(rig: Rig) -> None:
    """Memory cannot be resized through an export."""
    needs(rig, "read-only-exports", "its descriptors are not files, which could be resized")
    granule = rig.device.info.granularity
    with exported(rig) as descriptor:
        for size in (0, 2 * granule):
            refuses(OSError, lambda size=size: os.ftruncate(descriptor, size), f"{size} bytes")  # type: ignore[misc]


def closes_on_exec(rig: Rig) -> None:
    """A descriptor is not inherited by other programs."""
    with exported(rig) as descriptor:
        require(not os.get_inheritable(descriptor), "a descriptor is inherited")


# Ranges of addresses.


def reserves_where_asked(rig: Rig) -> None:
    """A reservation begins at the address asked for (cuMemAddressReserve takes it for a hint)."""
    wanted = address_of(63, is_kv=True)
    with reserved(rig, address=wanted) as at:
        if at.address != wanted:
            raise Skipped(
                f"it takes an address for a hint, and gave {at.address:#x} for {wanted:#x}: "
                "a pool may not come back in another process"
            )


def maps_whole_allocations(rig: Rig) -> None:
    """A mapping begins with the first byte of the memory (cuMemMap, offset 0)."""
    granule = rig.device.info.granularity
    with exported(rig, 2) as descriptor, reserved(rig, 4) as at:
        at.map(descriptor, 0, 2 * granule, writable=True)
        write(at, 0, b"first")
        write(at, granule, b"second")
        at.unmap()
        at.map(descriptor, granule, 2 * granule, writable=True)
        found = read(at, granule, 5), read(at, 2 * granule, 6)
        require(found == (b"first", b"second"), f"at another place it shows {found}")


def maps_inside_reservations(rig: Rig) -> None:
    """A mapping stands inside its reservation (cuMemMap)."""
    granule = rig.device.info.granularity
    with exported(rig) as descriptor, reserved(rig, 4) as at:
        for offset in (-granule, 4 * granule, 3 * granule + granule // 2):
            refuses(
                LayoutError,
                lambda offset=offset: at.map(descriptor, offset, granule, writable=True),  # type: ignore[misc]
                f"a mapping at {offset} of {4 * granule}",
            )


def maps_over_nothing(rig: Rig) -> None:
    """A mapping never stands where another does (cuMemMap)."""
    granule = rig.device.info.granularity
    with exported(rig) as one, exported(rig, 2) as two, reserved(rig, 4) as at:
        at.map(one, granule, granule, writable=True)
        write(at, granule, b"first")
        for offset in (0, granule):
            refuses(
                LayoutError,
                lambda offset=offset: at.map(two, offset, 2 * granule, writable=True),  # type: ignore[misc]
                f"a mapping at {offset} over one at {granule}",
            )
        require(read(at, granule, 5) == b"first", "a refused mapping replaced another")
        at.map(two, 2 * granule, 2 * granule, writable=True)


def unmaps_whole_mappings(rig: Rig) -> None:
    """A mapping goes as a whole (cuMemUnmap)."""
    granule = rig.device.info.granularity
    with exported(rig, 2) as descriptor, reserved(rig, 4) as at:
        at.map(descriptor, 0, 2 * granule, writable=True)
        write(at, 0, b"first")
        for offset in (0, granule):
            refuses(
                LayoutError,
                lambda offset=offset: at.unmap(offset, granule),  # type: ignore[misc]
                "half of a mapping",
            )
        require(read(at, 0, 5) == b"first", "a refused unmap took the mapping away")
        at.unmap(0, 2 * granule)


def keeps_addresses(rig: Rig) -> None:
    """Unmapped addresses stay reserved and map the same bytes again (cuMemUnmap)."""
    info = rig.device.info
    granule = info.granularity
    with exported(rig) as descriptor, reserved(rig, 4) as at:
        first = at.map(descriptor, granule, granule, writable=True)
        write(at, granule, WORDS)
        at.unmap()

        def take() -> None:
            with reserved(rig, address=at.address + granule, exact=True):
                pass

        refuses(AddressTaken, take, "a reservation of reserved addresses")
        second = at.map(descriptor, granule, granule, writable=False)
        require(first == second, f"it is at {second:#x}, not {first:#x}")
        require(read(at, granule, len(WORDS)) == WORDS, "other bytes are there")


def changes_access(rig: Rig) -> None:
    """Access can be taken back and given again, and the bytes stay (cuMemSetAccess)."""
    granule = rig.device.info.granularity
    with exported(rig) as descriptor, reserved(rig) as at:
        at.map(descriptor, 0, granule, writable=True)
        write(at, 0, b"first")
        at.protect(0, granule, writable=False)
        require(read(at, 0, 5) == b"first", "the bytes changed with the access")
        # A write here would end this process or its context: protects_from_readers has another.
        at.protect(0, granule, writable=True)
        write(at, 0, b"again")
        require(read(at, 0, 5) == b"again", "a write was lost")


def takes_neighbours_as_one(rig: Rig) -> None:
    """Mappings side by side are given access, and cleared, in one call (cuMemSetAccess)."""
    granule = rig.device.info.granularity
    ends = (0, 2 * granule - len(WORDS))
    with exported(rig) as one, exported(rig) as two, reserved(rig, 4) as at:
        at.map_all([(two, granule, granule), (one, 0, granule)], writable=True)
        for end in ends:
            write(at, end, WORDS)
        for writable in (False, True):
            at.protect(0, 2 * granule, writable=writable)
            found = [read(at, end, len(WORDS)) for end in ends]
            require(found == [WORDS] * 2, "the bytes changed with the access")
        at.clear(0, 2 * granule)
        if not rig.device.info.capabilities.get("zeroed"):
            found = [read(at, end, len(WORDS)) for end in ends]
            require(found == [bytes(len(WORDS))] * 2, "not all of it is cleared")


def outlives_its_handle(rig: Rig) -> None:
    """A mapping keeps its bytes after the release of the memory (cuMemRelease)."""
    handle = rig.device.create(rig.device.info.granularity)
    with descriptor_of(rig, handle) as descriptor, mapped(rig, descriptor) as at:
        write(at, 0, WORDS)
        rig.device.release(handle)
        require(read(at, 0, len(WORDS)) == WORDS, "the bytes went with the release")


def outlives_its_descriptor(rig: Rig) -> None:
    """A mapping keeps its bytes after the descriptor was closed (cuMemRelease)."""
    with allocated(rig) as handle, reserved(rig) as at:
        with descriptor_of(rig, handle) as descriptor:
            at.map(descriptor, 0, rig.device.info.granularity, writable=True)
        write(at, 0, WORDS)
        require(read(at, 0, len(WORDS)) == WORDS, "the bytes went with the descriptor")


DEVICE_RULES = (
    says_what_it_is,
    counts_what_is_taken,
    refuses_odd_sizes,
    refuses_more_than_it_has,
    gives_zeroes,
    refuses_released_handles,
    shares_bytes,
    exports_for_reading_only,
    seals,
    exports_a_fixed_size,
    closes_on_exec,
    reserves_where_asked,
    maps_whole_allocations,
    maps_inside_reservations,
    maps_over_nothing,
    unmaps_whole_mappings,
    keeps_addresses,
    changes_access,
    takes_neighbours_as_one,
    outlives_its_handle,
    outlives_its_descriptor,
)
