"""The fake driver that the tests of CUDA run on keeps the rules that hold between processes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from gms.adapters.cuda import CudaDevice, open_devices
from snapback_client.cuda import CudaDriver, CudaFailed, CudaRange
from snapback_client.frames import Access
from snapshot_shared.errors import OutOfDeviceMemory
from tests.support.cuda_rig import UUIDS, CudaNode, worker

MIB = 1024 * 1024
SIZE = 64 * MIB
MIG = tuple(f"MIG-{n}0000000-0000-4000-8000-00000000000{n}" for n in range(1, 3))


def seen(setting: str | None) -> list[str]:
    """What a process sees of the devices of the node."""
    code = (
        "import uuid\n"
        "from snapback_client.cuda import CudaDriver, CudaUnavailable\n"
        "try:\n"
        "    cuda = CudaDriver()\n"
        "    for n in range(cuda.devices):\n"
        "        print(uuid.UUID(bytes=bytes(cuda.call('cuDeviceGetUuid', n).bytes)))\n"
        "except CudaUnavailable as error:\n"
        "    assert 'CUDA_ERROR_NO_DEVICE' in str(error)\n"
    )
    return worker(code, CUDA_VISIBLE_DEVICES=setting).split()


def plain(*uuids: str) -> list[str]:
    return [uuid.removeprefix("GPU-").removeprefix("MIG-") for uuid in uuids]


def test_devices_are_seen_as_cuda_visible_devices_names_them(cuda_node: CudaNode) -> None:
    expected = {
        None: UUIDS,
        "2,0": (UUIDS[2], UUIDS[0]),
        f"{UUIDS[3]},GPU-2": (UUIDS[3], UUIDS[1]),
        "1,-1,0": (UUIDS[1],),
        "1,9,0": (UUIDS[1],),
        "1,1": (),
        "GPU-": (),
        "": (),
    }
    assert {setting: seen(setting) for setting in expected} == {
        setting: plain(*uuids) for setting, uuids in expected.items()
    }


def test_a_process_sees_one_mig_device_or_whole_gpus(cuda_node: CudaNode) -> None:
    parts = [f"{uuid} of={UUIDS[0]}" for uuid in MIG]
    cuda_node.place(UUIDS[0], *parts, UUIDS[1])
    expected = {
        None: UUIDS[1],
        MIG[1]: MIG[1],
        f"{MIG[1]},{MIG[0]}": MIG[1],
        "MIG-1": MIG[0],
        "0": MIG[0],
        "1": UUIDS[1],
    }
    assert {setting: seen(setting) for setting in expected} == {
        setting: plain(uuid) for setting, uuid in expected.items()
    }


@pytest.fixture
def device(cuda_node: CudaNode) -> CudaDevice:
    cuda_node.place(f"{UUIDS[0]} bytes={SIZE}", f"{UUIDS[1]} bytes={SIZE}")
    return open_devices()[0]


def test_memory_of_another_process_is_taken_until_it_frees_it_or_is_killed(
    cuda_node: CudaNode, device: CudaDevice
) -> None:
    freeing, killed = cuda_node.foreign(40 * MIB), cuda_node.foreign(20 * MIB)
    with pytest.raises(OutOfDeviceMemory):
        device.create(6 * MIB)
    freeing.free()
    ours = [device.create(40 * MIB)]
    with pytest.raises(OutOfDeviceMemory):
        device.create(6 * MIB)
    killed.process.kill()
    killed.process.wait()
    ours.append(device.create(20 * MIB))
    assert cuda_node.foreign(6 * MIB).status == 2
    assert cuda_node.foreign(6 * MIB, ordinal=1).status == 0
    for handle in ours:
        device.release(handle)


def test_what_is_imported_is_counted_once_and_outlives_who_made_it(
    cuda_node: CudaNode, device: CudaDevice
) -> None:
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
    cuda_node.place(f"{UUIDS[0]} bytes={SIZE} context={40 * MIB}")
    device = open_devices()[0]
    at = CudaRange(CudaDriver(), UUIDS[0], 2 * MIB, address=None, exact=False)
    with pytest.raises(OutOfDeviceMemory):
        device.create(40 * MIB)
    at.release()
    device.release(device.create(40 * MIB))


def test_nvml_has_the_memory_and_its_holders_of_each_device(
    cuda_node: CudaNode, device: CudaDevice
) -> None:
    from cuda.bindings import nvml

    foreign = cuda_node.foreign(20 * MIB)
    handle = device.create(2 * MIB)
    nvml.init_v2()
    assert nvml.device_get_count_v2() == 2
    first = nvml.device_get_handle_by_uuid(UUIDS[0])
    memory = nvml.device_get_memory_info_v2(first)
    assert (memory.total, memory.used, memory.free) == (SIZE, 22 * MIB, 42 * MIB)
    holders = nvml.device_get_compute_running_processes_v3(first)
    found = {int(each.pid): int(each.used_gpu_memory) for each in holders}
    assert found == {foreign.process.pid: 20 * MIB, os.getpid(): 2 * MIB}
    assert Path(nvml.system_get_process_name(foreign.process.pid)).name.startswith("python")
    second = nvml.device_get_memory_info_v2(nvml.device_get_handle_by_index_v2(1))
    assert second.used == 0
    nvml.shutdown()
    device.release(handle)


def test_rdma_and_fabric_are_granted_where_the_device_has_them(cuda_node: CudaNode) -> None:
    cuda_node.place(
        f"{UUIDS[0]} rdma=0", f"{UUIDS[1]} rdma=1 fabric=1", f"{UUIDS[2]} fabric=2", UUIDS[3]
    )
    cuda = CudaDriver()

    def asked(device: int, *, rdma: int = 0, handles: int = 1) -> int:
        prop = cuda.allocation(device)
        prop.requestedHandleTypes = handles
        prop.allocFlags.gpuDirectRDMACapable = rdma
        try:
            cuda.call("cuMemRelease", cuda.call("cuMemCreate", 2 * MIB, prop, 0))
        except CudaFailed as error:
            return error.status
        return 0

    assert [asked(0, rdma=1), asked(1, rdma=1)] == [801, 0]
    assert [asked(1, handles=9), asked(2, handles=9), asked(3, handles=9)] == [0, 800, 801]
