"""The Device port: what every device, simulated or real, has to do."""

from __future__ import annotations

import contextlib
import mmap
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing

import pytest

from gms.adapters.simulated import SimulatedDevice, simulated_uuid
from gms.ports import Device
from snapback_client.frames import Access
from snapshot_shared.errors import Internal, InvalidInput, OutOfDeviceMemory
from tests.bench.machine import huge_bytes_free

MIB = 1024 * 1024
CAPACITY = 16 * MIB


@pytest.fixture(params=["simulated", "simulated in huge pages"])
def device(request: pytest.FixtureRequest) -> Iterator[Device]:
    huge = request.param == "simulated in huge pages"
    if huge and huge_bytes_free() < CAPACITY:
        pytest.skip("this host has set no huge pages aside (vm.nr_hugepages)")
    simulated = SimulatedDevice(node="n1", index=0, capacity=CAPACITY, huge_pages=huge)
    yield simulated
    simulated.close()


@contextlib.contextmanager
def exported(device: Device, handle: int, access: Access) -> Iterator[int]:
    descriptor = device.export(handle, access)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def granule(device: Device) -> int:
    return device.info.granularity


def test_a_host_without_enough_huge_pages_says_how_to_get_them() -> None:
    size = huge_bytes_free() + 64 * MIB
    device = SimulatedDevice(node="n1", index=0, capacity=size, huge_pages=True)
    with pytest.raises(OutOfDeviceMemory, match=f"no huge pages for {size} bytes") as caught:
        device.create(size)
    assert "sysctl vm.nr_hugepages" in caught.value.next_step
    assert device.used == 0


def test_huge_pages_are_taken_when_memory_is_allocated() -> None:
    size = huge_bytes_free()
    if not size:
        pytest.skip("this host has set no huge pages aside (vm.nr_hugepages)")
    first, second = (
        SimulatedDevice(node="n1", index=index, capacity=size, huge_pages=True) for index in (0, 1)
    )
    with closing(first), closing(second):
        handle = first.create(size)
        with pytest.raises(OutOfDeviceMemory):
            second.create(2 * MIB)
        first.release(handle)
        second.create(2 * MIB)


def test_huge_pages_are_whole_in_every_allocation() -> None:
    with pytest.raises(InvalidInput, match="65536 bytes are no huge pages"):
        SimulatedDevice(node="n1", index=0, capacity=MIB, granularity=65536, huge_pages=True)


def test_a_device_says_what_it_is(device: Device) -> None:
    info = device.info
    assert info.uuid.startswith("GPU-")
    assert info.capacity == CAPACITY
    assert info.product
    assert device.used == 0


def test_memory_is_taken_by_create_and_back_after_release(device: Device) -> None:
    size = 2 * granule(device)
    handle = device.create(size)
    assert device.used == size
    device.release(handle)
    assert device.used == 0


def test_more_than_is_free_is_refused_with_all_three_values(device: Device) -> None:
    device.create(CAPACITY - granule(device))
    with pytest.raises(OutOfDeviceMemory) as caught:
        device.create(2 * granule(device))
    assert caught.value.values == {
        "needed": 2 * granule(device),
        "free": granule(device),
        "capacity": CAPACITY,
    }
    assert device.used == CAPACITY - granule(device)
    device.create(granule(device))


@pytest.mark.parametrize("size", [0, -1, 1, 2 * MIB + 1])
def test_a_size_is_whole_granules(device: Device, size: int) -> None:
    with pytest.raises(InvalidInput):
        device.create(size)


def test_new_memory_is_zero_even_where_old_memory_was(device: Device) -> None:
    handle = device.create(granule(device))
    with (
        exported(device, handle, Access.RW) as descriptor,
        mmap.mmap(descriptor, granule(device)) as memory,
    ):
        memory[:6] = b"secret"
    device.release(handle)
    handle = device.create(granule(device))
    with exported(device, handle, Access.RO) as descriptor:
        assert os.pread(descriptor, 6, 0) == bytes(6)


def test_two_exports_show_the_same_bytes(device: Device) -> None:
    handle = device.create(granule(device))
    with (
        exported(device, handle, Access.RW) as one,
        exported(device, handle, Access.RO) as two,
        mmap.mmap(one, granule(device)) as writer,
        mmap.mmap(two, granule(device), prot=mmap.PROT_READ) as reader,
    ):
        writer[4096:4101] = b"hello"
        assert reader[4096:4101] == b"hello"


def test_another_process_sees_the_same_bytes(device: Device) -> None:
    handle = device.create(granule(device))
    with exported(device, handle, Access.RW) as descriptor:
        with mmap.mmap(descriptor, granule(device)) as memory:
            memory[:6] = b"shared"
        code = f"import mmap; print(mmap.mmap({descriptor}, {granule(device)}, prot=1)[:6])"
        found = subprocess.run(
            [sys.executable, "-c", code],
            pass_fds=[descriptor],
            capture_output=True,
            check=True,
            text=True,
        )
    assert found.stdout.strip() == "b'shared'"


def test_a_read_only_export_cannot_be_mapped_or_written(device: Device) -> None:
    handle = device.create(granule(device))
    with exported(device, handle, Access.RO) as descriptor:
        with pytest.raises(PermissionError):
            mmap.mmap(descriptor, granule(device))
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.pwrite(descriptor, b"x", 0)


def test_after_seal_no_new_writable_mapping_is_possible_and_old_ones_stay(device: Device) -> None:
    handle = device.create(granule(device))
    with (
        exported(device, handle, Access.RW) as descriptor,
        mmap.mmap(descriptor, granule(device)) as before,
    ):
        device.seal(handle)
        device.seal(handle)
        with exported(device, handle, Access.RW) as again, pytest.raises(PermissionError):
            mmap.mmap(again, granule(device))
        before[0] = 7
        with mmap.mmap(descriptor, granule(device), prot=mmap.PROT_READ) as reader:
            assert reader[0] == 7


def test_memory_cannot_be_resized_through_an_export(device: Device) -> None:
    handle = device.create(granule(device))
    with exported(device, handle, Access.RW) as descriptor:
        for size in (0, 2 * granule(device)):
            with pytest.raises(PermissionError):
                os.ftruncate(descriptor, size)


def test_an_exported_mapping_outlives_the_release(device: Device) -> None:
    handle = device.create(granule(device))
    with (
        exported(device, handle, Access.RW) as descriptor,
        mmap.mmap(descriptor, granule(device)) as mapping,
    ):
        mapping[0] = 9
        device.release(handle)
        assert mapping[0] == 9


def test_a_descriptor_is_not_inherited_by_other_programs(device: Device) -> None:
    handle = device.create(granule(device))
    with exported(device, handle, Access.RW) as descriptor:
        assert not os.get_inheritable(descriptor)


def test_a_handle_that_was_released_is_refused(device: Device) -> None:
    handle = device.create(granule(device))
    device.release(handle)
    with pytest.raises(Internal):
        device.release(handle)
    with pytest.raises(Internal):
        device.export(handle, Access.RO)
    with pytest.raises(Internal):
        device.seal(handle)


def test_a_simulated_uuid_is_the_same_at_every_start_and_different_for_every_device() -> None:
    assert simulated_uuid("n1", 0) == "GPU-2f26acd4-f975-56ae-85be-f9f11cb1cb1c"
    found = {simulated_uuid(node, index) for node in ("n1", "n2") for index in range(4)}
    assert len(found) == 8
