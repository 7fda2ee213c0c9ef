"""What only the simulated device has, and on which processors a transfer of a GPU runs."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest

from gms.adapters.simulated import SimulatedDevice, simulated_uuid
from gms.transfer_child.gpu import cpus_of, stay_near
from snapback_client.frames import Access
from snapshot_shared.errors import DeviceError, InvalidInput, OutOfDeviceMemory
from tests.bench.machine import huge_bytes_free
from tests.support.limits import no_descriptor_left

MIB = 1024 * 1024
CAPACITY = 16 * MIB


@pytest.fixture
def device() -> Iterator[SimulatedDevice]:
    simulated = SimulatedDevice(node="n1", index=0, capacity=CAPACITY)
    yield simulated
    simulated.close()


def test_more_than_is_free_is_refused_with_all_three_values(device: SimulatedDevice) -> None:
    granule = device.info.granularity
    device.create(CAPACITY - granule)
    with pytest.raises(OutOfDeviceMemory) as caught:
        device.create(2 * granule)
    values = {"needed": 2 * granule, "free": granule, "capacity": CAPACITY}
    assert caught.value.values == values
    assert device.used == CAPACITY - granule
    device.create(granule)


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


def test_what_finds_no_descriptor_left_says_so_and_takes_nothing(device: SimulatedDevice) -> None:
    granule = device.info.granularity
    handle = device.create(granule)
    for work in (
        lambda: device.create(granule),
        lambda: device.export(handle, Access.RW),
        lambda: device.export(handle, Access.RO),
    ):
        with no_descriptor_left(), pytest.raises(DeviceError, match="no descriptor is left") as one:
            work()
        assert one.value.reason == "DeviceError"
    assert device.used == granule
    device.create(granule)


def test_a_simulated_uuid_is_the_same_at_every_start_and_different_for_every_device() -> None:
    assert simulated_uuid("n1", 0) == "GPU-2f26acd4-f975-56ae-85be-f9f11cb1cb1c"
    found = {simulated_uuid(node, index) for node in ("n1", "n2") for index in range(4)}
    assert len(found) == 8


ADDRESS = "0000:3b:00.0"
ALLOWED = os.sched_getaffinity(0)
FIRST = min(ALLOWED)


def processors_after(folder: Path) -> set[int]:
    """Where a thread of its own may run after it was to stay near."""

    def stay() -> set[int]:
        stay_near(ADDRESS, folder)
        return os.sched_getaffinity(0)

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(stay).result()


def place(folder: Path, node: str, cpus: str = "") -> None:
    device = folder / "bus/pci/devices" / ADDRESS
    device.mkdir(parents=True)
    (device / "numa_node").write_text(f"{node}\n")
    if cpus:
        nodes = folder / f"devices/system/node/node{node}"
        nodes.mkdir(parents=True)
        (nodes / "cpulist").write_text(f"{cpus}\n")


def test_it_runs_on_those_of_the_node_that_it_may_use(tmp_path: Path) -> None:
    place(tmp_path, "1", f"{FIRST},100000-100003")
    assert processors_after(tmp_path) == {FIRST}
    assert os.sched_getaffinity(0) == ALLOWED


@pytest.mark.parametrize(
    ("node", "cpus"),
    [("-1", ""), ("nonsense", ""), ("1", ""), ("1", "100000-100003"), ("1", "0-x")],
)
def test_it_runs_where_it_did_on_an_unknown_node(tmp_path: Path, node: str, cpus: str) -> None:
    assert processors_after(tmp_path) == ALLOWED, "the kernel does not know the device"
    place(tmp_path, node, cpus)
    assert processors_after(tmp_path) == ALLOWED


@pytest.mark.parametrize(
    ("text", "cpus"), [("0\n", {0}), ("0-3,8", {0, 1, 2, 3, 8}), ("4-4", {4}), ("1,3", {1, 3})]
)
def test_processors_are_read_as_the_kernel_lists_them(text: str, cpus: set[int]) -> None:
    assert cpus_of(text) == cpus
