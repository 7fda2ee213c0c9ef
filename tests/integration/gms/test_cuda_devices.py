"""On GPUs: devices by the names that a process has for them, and memory that others hold.

The driver and NVML are fakes with several devices and with processes that are none of ours.
"""

from __future__ import annotations

import ctypes
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import snapback_client as client
from gms.adapters.cuda import CudaDevice, open_devices
from snapback_client.cuda import CudaDriver, CudaRange
from snapback_client.frames import Access, AllocationSpec
from snapback_client.reservation import DEVICE_BYTES, FIRST_ADDRESS
from snapshot_shared.errors import DeadlineExceeded, OutOfDeviceMemory
from tests.support.cuda_rig import UUIDS, CudaNode, Foreign, worker
from tests.support.gms_rig import MIB, attach
from tests.support.waiting import later, wait_until

MIG = tuple(f"MIG-{n}0000000-0000-4000-8000-00000000000{n}" for n in range(5, 7))

OPEN = """
name = sys.argv[1]
try:
    with client.connect(int(name) if name.isdigit() else name, lock="RW") as pool:
        pool.allocate("w", 10, "u1").set(7)
        print(pool.device, hex(pool.address("w")))
except client.UnknownDevice as error:
    print("UnknownDevice")
"""


@pytest.fixture
def service(cuda_node: CudaNode, launch: Any) -> Any:
    cuda_node.place(*UUIDS[:2])
    return launch(devices=open_devices())


NUMBERS = [
    (None, "0", 0),
    ("1,0", "0", 1),
    ("1,0", "1", 0),
    ("1", "0", 1),
    ("1", "1", None),
    ("0", "1", None),
    (f"{UUIDS[1]},{UUIDS[0]}", "0", 1),
    ("1,0", UUIDS[0], 0),
    ("1,0", UUIDS[0][:6], 0),
]
"""CUDA_VISIBLE_DEVICES, the name of a device, and the index of the device."""


@pytest.mark.parametrize("nvidia", ["void", "all", ",".join(UUIDS[:2])], ids=["void", "all", "in"])
def test_a_number_is_that_of_cuda_in_the_process(service: Any, nvidia: str) -> None:
    wrong = {}
    for cuda, device, found in NUMBERS:
        said = worker(OPEN, device, NVIDIA_VISIBLE_DEVICES=nvidia, CUDA_VISIBLE_DEVICES=cuda)
        expected = "UnknownDevice" if found is None else place_of(found)
        if said != f"{expected}\n":
            wrong[cuda, device] = said
    assert wrong == {}


def place_of(index: int, uuids: Sequence[str] = UUIDS) -> str:
    return f"{uuids[index]} {FIRST_ADDRESS + index * DEVICE_BYTES:#x}"


def test_a_simulated_service_on_a_node_with_gpus_has_numbers_of_its_own(
    cuda_node: CudaNode, launch: Any
) -> None:
    service = launch()
    code = OPEN.replace(".set(7)", "[:] = 7")
    for variables in ({}, {"NVIDIA_VISIBLE_DEVICES": "void"}):
        for index in (0, 1):
            said = worker(code, str(index), CUDA_VISIBLE_DEVICES="0", **variables)
            assert said.split() == place_of(index, service.uuids).split()


def test_finding_a_device_makes_no_context(service: Any, cuda_node: CudaNode) -> None:
    held = attach(service)
    with pytest.raises(DeadlineExceeded):
        client.connect(0, lock="RW", deadline_s=0.2)
    assert cuda_node.here.called("cuDeviceGetUuid") >= 2
    assert cuda_node.here.called("cuDevicePrimaryCtxRetain") == 0
    held.detach()


def test_pools_that_are_opened_by_uuid_are_restored_at_their_addresses_in_any_order_of_devices(
    service: Any, tmp_path: Path
) -> None:
    write = (
        "import pathlib\n"
        "pools = [client.connect(name, lock='RW') for name in sys.argv[2:]]\n"
        "for value, pool in enumerate(pools):\n"
        "    pool.allocate('w', 10, 'u1').set(value)\n"
        "    pool.commit()\n"
        "    pathlib.Path(sys.argv[1], str(value)).write_bytes(pool.save_state())\n"
        "    print(pool.device, pool.address('w'))\n"
    )
    read = (
        "import pathlib\n"
        "for value in (1, 0):\n"
        "    pool = client.restore(pathlib.Path(sys.argv[1], str(value)).read_bytes())\n"
        "    print(pool.device, pool.address('w'))\n"
        "    assert pool['w'].get().tolist() == [value] * 10\n"
    )
    order = {"NVIDIA_VISIBLE_DEVICES": "void", "CUDA_VISIBLE_DEVICES": "1,0"}
    written = worker(write, str(tmp_path), *UUIDS[:2], **order).splitlines()
    assert written == [f"{UUIDS[n]} {FIRST_ADDRESS + n * DEVICE_BYTES}" for n in (0, 1)]
    assert worker(read, str(tmp_path), **order).splitlines() == written[::-1]


@pytest.mark.parametrize("device", ["0", MIG[1], "MIG-6"])
def test_a_mig_device_is_named_as_kubernetes_names_it(
    cuda_node: CudaNode, launch: Any, monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    cuda_node.place(UUIDS[0], *(f"{uuid} of={UUIDS[0]}" for uuid in MIG))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", MIG[1])
    service = launch(devices=open_devices())
    assert service.uuids == [MIG[1]]
    said = worker(OPEN, device, NVIDIA_VISIBLE_DEVICES=None)
    assert said.split()[0] == MIG[1]


def test_the_devices_of_a_service_are_in_the_order_of_nvidia_smi_unless_another_is_asked_for(
    cuda_node: CudaNode,
) -> None:
    code = (
        "from gms.adapters.cuda import open_devices\n"
        "print([device.info.index for device in open_devices()], os.environ['CUDA_DEVICE_ORDER'])\n"
    )
    assert worker(code, CUDA_DEVICE_ORDER=None) == "[0, 1, 2, 3] PCI_BUS_ID\n"
    assert worker(code, CUDA_DEVICE_ORDER="FASTEST_FIRST") == "[0, 1, 2, 3] FASTEST_FIRST\n"


def test_a_fork_closes_a_pool_without_the_driver_which_is_dead_in_it(service: Any) -> None:
    code = (
        "pool = client.connect(0, lock='RW')\n"
        "array = pool.allocate('w', 10, 'u1')\n"
        "array.set(7)\n"
        "if (pid := os.fork()) == 0:\n"
        "    try:\n"
        "        array.get()\n"
        "    except client.NotEligible:\n"
        "        pool.close()\n"
        "        os._exit(7)\n"
        "print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))\n"
        "pool.commit()\n"
        "print(array.get().tolist() == [7] * 10)\n"
    )
    assert worker(code) == "7\nTrue\n"


# Memory of others.


def end(foreign: Foreign) -> None:
    foreign.process.kill()
    foreign.process.wait()


@pytest.fixture
def blind(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with cuda-bindings that have no NVML yet."""
    monkeypatch.setitem(sys.modules, "cuda.bindings.nvml", None)


def test_memory_that_another_process_frees_meanwhile_is_had(
    cuda_node: CudaNode, service: Any
) -> None:
    foreign = cuda_node.foreign(200 * MIB)
    with client.connect(0, lock="RW") as pool, later(foreign.free):
        pool.allocate("w", 100 * MIB, "u1")
        assert service.device().used == 100 * MIB


def test_memory_of_a_process_that_is_killed_is_had_also_where_nvml_is_missing(
    blind: None, cuda_node: CudaNode, service: Any
) -> None:
    foreign = cuda_node.foreign(200 * MIB)
    with client.connect(0, lock="RW") as pool, later(lambda: end(foreign)):
        pool.allocate("w", 100 * MIB, "u1")
        assert service.device().used == 100 * MIB


def test_a_context_has_its_memory_when_another_process_frees_it_meanwhile(
    cuda_node: CudaNode, launch: Any
) -> None:
    cuda_node.place(f"{UUIDS[0]} context={100 * MIB}")
    launch(devices=open_devices())
    foreign = cuda_node.foreign(100 * MIB)
    with later(lambda: end(foreign)):
        assert worker(OPEN, "0") == f"{place_of(0)}\n"


def test_what_is_free_is_what_nvml_says_and_who_holds_the_rest_is_named(
    cuda_node: CudaNode, service: Any
) -> None:
    foreign = cuda_node.foreign(200 * MIB)
    pid = foreign.process.pid
    # The service may answer by what the driver has said before.
    wait_until(lambda: service.device().free == 56 * MIB)
    lease = attach(service)
    assert lease.attached.free == 56 * MIB
    assert service.device(1).free == 256 * MIB
    lease.allocate([AllocationSpec(id="a", size=6 * MIB)])
    with pytest.raises(OutOfDeviceMemory, match=rf"python\S* \(pid {pid}\) 200 MiB") as caught:
        lease.allocate([AllocationSpec(id="w", size=60 * MIB)], wait_s=0.1)
    values = caught.value.values
    (holder,) = values.pop("holders").items()
    assert (f"(pid {pid})" in holder[0], holder[1]) == (True, 200 * MIB)
    assert values == {
        "needed": 60 * MIB,
        "free": 50 * MIB,
        "capacity": 256 * MIB,
        "used": 6 * MIB,
    }
    lease.detach()
    assert cuda_node.here.called("cuDevicePrimaryCtxRetain") == 0


def test_without_nvml_a_refusal_says_what_the_service_holds_itself(
    blind: None, cuda_node: CudaNode
) -> None:
    cuda_node.foreign(200 * MIB)
    device = CudaDevice(CudaDriver(), 0)
    assert (device.free(), device.holders()) == (256 * MIB, {})
    with pytest.raises(OutOfDeviceMemory, match=r"service holds 0 of .*, others hold"):
        device.create(60 * MIB)


# What memory can be used for.


def made_of(device: CudaDevice) -> tuple[int, int]:
    """The flag for RDMA and the mask of handle types that memory of a device really has."""
    api, handle = CudaDriver().api, device.create(device.info.granularity)
    status, prop = api.cuMemGetAllocationPropertiesFromHandle(handle)
    device.release(handle)
    assert int(status) == 0
    # The bindings have no name for a mask of two kinds; it comes after the type.
    mask = ctypes.c_int.from_address(prop.getPtr() + ctypes.sizeof(ctypes.c_int))
    return prop.allocFlags.gpuDirectRDMACapable, mask.value


POSIX, BOTH = 1, 9


@pytest.mark.parametrize(
    ("attributes", "is_asked", "rdma", "handles", "logged"),
    [
        ("rdma=1", False, 1, POSIX, []),
        ("rdma=0", False, 0, POSIX, []),
        ("rdma=2", False, 0, POSIX, ["memory for rdma .*NOT_PERMITTED"]),
        ("rdma=1 fabric=1", False, 1, POSIX, []),
        ("rdma=1 fabric=1", True, 1, BOTH, []),
        ("rdma=0 fabric=1", True, 0, BOTH, []),
        ("rdma=1 fabric=0", True, 1, POSIX, ["has no fabric handles"]),
        ("rdma=1 fabric=2", True, 1, POSIX, ["rdma and fabric .*NOT_PERMITTED.* IMEX channel"]),
        ("rdma=0 fabric=2", True, 0, POSIX, ["memory for fabric .*NOT_PERMITTED"]),
        ("rdma=2 fabric=2", True, 0, POSIX, ["rdma and fabric", "memory for rdma"]),
    ],
)
def test_memory_is_made_for_what_the_device_has_and_grants(
    cuda_node: CudaNode,
    caplog: pytest.LogCaptureFixture,
    attributes: str,
    is_asked: bool,
    rdma: int,
    handles: int,
    logged: list[str],
) -> None:
    cuda_node.place(f"{UUIDS[0]} {attributes}")
    (device,) = open_devices(fabric_handles=is_asked)
    assert made_of(device) == (rdma, handles)
    capabilities = device.info.capabilities
    found = (capabilities["rdma-memory"], capabilities["fabric-memory"])
    assert found == (rdma, int(handles == BOTH))
    assert len(caplog.messages) == len(logged)
    for message, pattern in zip(caplog.messages, logged, strict=True):
        assert re.search(pattern, message)
        assert UUIDS[0] in message
    assert cuda_node.here.handles == 0


@pytest.mark.parametrize(("attributes", "rdma"), [("fabric=1", 1), ("rdma=0 fabric=1", 0)])
def test_on_a_full_device_memory_is_asked_for_without_what_has_not_been_granted(
    cuda_node: CudaNode, caplog: pytest.LogCaptureFixture, attributes: str, rdma: int
) -> None:
    cuda_node.place(f"{UUIDS[0]} bytes={64 * MIB} {attributes}")
    foreign = cuda_node.foreign(64 * MIB)
    (device,) = open_devices(fabric_handles=True)
    assert "OUT_OF_MEMORY" in caplog.text
    foreign.free()
    assert made_of(device) == (rdma, POSIX)


def test_memory_with_fabric_handles_is_handed_out_as_descriptors(
    cuda_node: CudaNode, launch: Any
) -> None:
    cuda_node.place(f"{UUIDS[0]} fabric=1")
    service = launch(devices=open_devices(fabric_handles=True))
    assert service.device().capabilities["fabric-memory"] == 1
    assert worker(OPEN, "0") == f"{place_of(0)}\n"


# What the fake itself has to keep, or the tests above would prove nothing.


def test_what_is_imported_is_counted_once_and_outlives_who_made_it(cuda_node: CudaNode) -> None:
    cuda_node.place(f"{UUIDS[0]} bytes={64 * MIB}")
    (device,) = open_devices()
    handle = device.create(40 * MIB)
    at = CudaRange(CudaDriver(), UUIDS[0], 40 * MIB, address=None, exact=False)
    with os.fdopen(device.export(handle, Access.RW), "rb") as file:
        at.map(file.fileno(), 0, 40 * MIB, writable=True)
    second = device.create(24 * MIB)
    device.release(second)
    device.release(handle)
    assert cuda_node.foreign(40 * MIB).status == 2
    at.release()
    assert cuda_node.foreign(40 * MIB).status == 0


def test_a_context_takes_memory_while_it_is_retained(cuda_node: CudaNode) -> None:
    cuda_node.place(f"{UUIDS[0]} bytes={64 * MIB} context={40 * MIB}")
    device = open_devices()[0]
    at = CudaRange(CudaDriver(), UUIDS[0], 2 * MIB, address=None, exact=False)
    with pytest.raises(OutOfDeviceMemory):
        device.create(40 * MIB)
    at.release()
    device.release(device.create(40 * MIB))
