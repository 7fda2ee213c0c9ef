"""Service, client and transfers on CUDA, on a fake of its driver that keeps the written rules.

That a real GPU keeps them as well is for `make conformance DEVICE=cuda` to find out.
"""

from __future__ import annotations

import contextlib
import os
import re
import threading
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import snapback_client as client
from gms.adapters.cuda import open_devices
from gms.adapters.transfer_process import TransferProcesses
from gms.domain.tasks import LoadTask, SaveTask, TransferDone
from gms.transfer_child import gpu
from gms.transfer_child.save import save
from snapback_client.cuda import CudaDriver, CudaFailed, CudaRange
from snapback_client.frames import Access
from snapback_client.mappings import AddressTaken
from snapback_client.reservation import FIRST_ADDRESS, reserve
from snapshot_shared import errors
from tests.support.backend_site import find_kvikio, site_with_backends
from tests.support.cuda_rig import LOADED, UUIDS, CudaNode, ThisProcess, worker
from tests.support.gms_rig import MIB, apart, children_of, committed, program
from tests.support.waiting import until, wait_until
from tests.support.weights import PART, Weights

GRANULE = 2 * MIB
BLOCKING_SYNC = 4


@pytest.fixture
def driver(cuda_node: CudaNode) -> ThisProcess:
    """What this process has of the driver of a node with two devices."""
    cuda_node.place(*UUIDS[:2])
    return cuda_node.here


@pytest.fixture
def service(driver: ThisProcess, launch: Any) -> Any:
    """The service on every device of the node."""
    return launch(devices=open_devices())


def test_the_server_makes_memory_and_hands_it_out_and_neither_maps_it_nor_makes_a_context(
    service: Any, driver: ThisProcess
) -> None:
    # At its start it finds out what memory it may make.
    before = driver.called("cuMemCreate")
    worker(
        "with client.connect(lock='RW') as pool:\n"
        "    pool.allocate('w', 10, 'f4').set(7)\n"
        "    pool.commit()\n"
        "    pool.sleep()\n"
        "    pool.wake()\n"
        "    assert pool['w'].get().tolist() == [7.0] * 10\n"
    )
    assert driver.called("cuMemCreate") == before + 1
    assert driver.called("cuMemExportToShareableHandle") == 2
    for name in ("cuDevicePrimaryCtxRetain", "cuCtxPushCurrent", "cuMemMap", "cuMemAddressReserve"):
        assert driver.called(name) == 0
    assert service.device().used == GRANULE
    assert service.device().capabilities["zeroed"] == 0
    assert service.device().capabilities["driver"] == 13000


@pytest.mark.parametrize(("fabric", "handles"), [(False, 1), (True, 9)])
def test_the_kinds_of_handles_have_the_value_that_most_bindings_read(
    driver: ThisProcess, monkeypatch: pytest.MonkeyPatch, fabric: bool, handles: int
) -> None:
    """Those before 12.9.7 and 13.5 take what they are given for an enumerator."""
    cuda = CudaDriver()
    given: list[int] = []

    class Described(cuda.api.CUmemAllocationProp):  # type: ignore[misc, name-defined]
        @property
        def requestedHandleTypes(self) -> Any:  # noqa: N802 - as in the bindings
            return None

        @requestedHandleTypes.setter
        def requestedHandleTypes(self, kinds: Any) -> None:  # noqa: N802
            given.append(kinds.value)

    monkeypatch.setattr(cuda.api, "CUmemAllocationProp", Described)
    cuda.allocation(cuda.call("cuDeviceGet", 0), fabric=fabric)
    assert given[-1] == handles


def test_arrays_are_filled_copied_and_described_to_other_libraries(service: Any) -> None:
    with client.connect(lock="RW") as pool:
        matrix = pool.allocate("matrix", (3, 5), np.float32)
        empty = pool.allocate("empty", (0, 4), np.uint8)
        scalar = pool.allocate("scalar", (), np.int64)
        wanted = np.arange(15, dtype="f4").reshape(3, 5)
        matrix.set(wanted)
        scalar.set(9)
        assert (matrix.get() == wanted).all()
        assert scalar.get() == 9
        assert empty.get().shape == (0, 4)
        assert matrix.__cuda_array_interface__ == {
            "version": 3,
            "shape": (3, 5),
            "typestr": "<f4",
            "data": (FIRST_ADDRESS, False),
            "strides": None,
            "stream": None,
        }
        assert empty.__cuda_array_interface__["data"] == (0, False)
        pool.commit()
        assert matrix.__cuda_array_interface__["data"] == (FIRST_ADDRESS, True)
        with pytest.raises(errors.InvalidInput, match="read-only"):
            matrix.set(0)
        assert (matrix.get() == wanted).all()


def test_a_cache_is_zero_at_first_and_after_every_wake_though_new_memory_is_not(
    service: Any,
) -> None:
    with client.connect(lock="RW", domain="kv") as cache:
        blocks = cache.allocate("blocks", 3 * MIB, np.uint8)
        address = blocks.address
        for _ in range(2):
            assert not blocks.get().any()
            blocks.set(255)
            cache.sleep()
            assert service.device().used == 0
            cache.wake()
            assert cache["blocks"].address == address
        assert not blocks.get().any()


def test_asleep_nothing_is_mapped_or_imported_and_the_addresses_stay_reserved(
    service: Any, driver: ThisProcess
) -> None:
    with client.connect(lock="RW") as pool:
        pool.allocate("a", 10, "u1").set(1)
        pool.allocate("b", 3 * MIB, "u1").set(2)
        pool.commit()
        ours = driver.handles
        assert driver.mapped == [FIRST_ADDRESS, FIRST_ADDRESS + GRANULE]
        pool.sleep()
        assert driver.mapped == []
        # Two of the server: every import was released.
        assert driver.handles == ours == 2
        assert driver.reserved == [FIRST_ADDRESS]
        with pytest.raises(AddressTaken):
            reserve("cuda", service.uuids[0], GRANULE, address=FIRST_ADDRESS, exact=True)
        pool.wake()
        assert driver.mapped == [FIRST_ADDRESS, FIRST_ADDRESS + GRANULE]
        assert pool["b"].get().sum() == 2 * 3 * MIB
    assert driver.mapped == []
    assert driver.reserved == []


def test_what_an_engine_made_current_stays_current(service: Any, driver: ThisProcess) -> None:
    cuda = CudaDriver()
    context = cuda.call("cuDevicePrimaryCtxRetain", 1)
    cuda.call("cuCtxPushCurrent", context)
    with committed(value=1) as pool:
        pool.sleep()
        pool.wake()
        assert driver.contexts == [int(context)]
    assert driver.contexts == [int(context)]
    assert [driver.retained(device) for device in range(2)] == [0, 1]


def test_where_the_driver_takes_no_hint_a_pool_sleeps_and_wakes_at_the_addresses_that_it_got(
    service: Any, cuda_node: CudaNode
) -> None:
    cuda_node.faults("cuMemAddressReserve 0 nohint")
    with committed(value=3) as pool:
        address = pool["w"].address
        assert address != FIRST_ADDRESS
        pool.sleep()
        pool.wake()
        assert pool["w"].address == address
        state = pool.save_state()
    with pytest.raises(AddressTaken) as caught:
        client.restore(state)
    assert caught.value.values["address"] == address


def test_a_pool_of_a_simulated_device_does_not_wake_on_another_kind(
    service: Any, driver: ThisProcess
) -> None:
    with committed() as pool:
        state = pool.save_state().replace(b'"device_kind":"cuda"', b'"device_kind":"simulated"')
    with pytest.raises(errors.Incompatible) as caught:
        client.restore(state)
    assert caught.value.values == {"expected": "simulated", "found": "cuda"}


def test_a_kind_that_the_client_does_not_know_is_refused_by_name() -> None:
    with pytest.raises(errors.UnsupportedVersion, match="'tpu'"):
        reserve("tpu", "GPU-1", GRANULE, address=None)


def test_a_device_that_cuda_does_not_show_here_is_named_with_those_it_does(
    service: Any,
) -> None:
    with pytest.raises(errors.UnknownDevice) as caught:
        reserve("cuda", "GPU-elsewhere", GRANULE, address=None)
    assert caught.value.values["visible"] == service.uuids


def counted(driver: ThisProcess, work: Callable[[], object]) -> dict[str, int]:
    """How often calls were made that take long, whatever the number of arrays."""
    names = ("cuMemSetAccess", "cuMemsetD8", "cuCtxSynchronize")
    before = {name: driver.called(name) for name in names}
    work()
    return {name: driver.called(name) - before[name] for name in names}


def test_neighbours_are_given_access_cleared_and_waited_for_at_once(
    service: Any, driver: ThisProcess
) -> None:
    with client.connect(lock="RW") as pool:
        found = counted(
            driver, lambda: pool.allocate_many({f"a{n}": (n + 1, "u1") for n in range(60)})
        )
        assert found == {"cuMemSetAccess": 1, "cuMemsetD8": 1, "cuCtxSynchronize": 1}
        assert all(not array.get().any() for array in pool.arrays().values())
        for n, array in enumerate(pool.arrays().values()):
            array.set(n)
        pool.free("a7")
        # Two runs are left: before what was freed, and after it.
        found = counted(driver, pool.commit)
        assert found == {"cuMemSetAccess": 2, "cuMemsetD8": 0, "cuCtxSynchronize": 2}
        pool.sleep()
        found = counted(driver, pool.wake)
        assert found == {"cuMemSetAccess": 2, "cuMemsetD8": 0, "cuCtxSynchronize": 0}
        assert [pool[f"a{n}"].get()[n] for n in (0, 6, 8, 59)] == [0, 6, 8, 59]


def test_a_range_into_which_the_driver_imports_nothing_stays_usable(
    service: Any, driver: ThisProcess
) -> None:
    device = service.devices[0]
    handle = device.create(GRANULE)
    with os.fdopen(device.export(handle, Access.RW), "rb") as file:
        at = CudaRange(CudaDriver(), service.uuids[0], 2 * GRANULE, address=None, exact=False)
        at.map(file.fileno(), 0, GRANULE, writable=True)
        with pytest.raises(CudaFailed, match="cuMemImportFromShareableHandle"):
            at.map(999_999, GRANULE, GRANULE, writable=True)
        at.map(file.fileno(), GRANULE, GRANULE, writable=False)
        assert len(driver.mapped) == 2
        at.release()
    assert driver.mapped == []
    device.release(handle)


def test_an_allocation_that_fails_late_leaves_no_array_behind(
    service: Any, cuda_node: CudaNode
) -> None:
    with client.connect(lock="RW") as pool:
        pool.allocate("kept", 3, "u1").set(7)
        cuda_node.faults("cuMemsetD8 0 error 1")
        with pytest.raises(CudaFailed, match="cuMemsetD8"):
            pool.allocate("a", (4, 5), "u1")
        cuda_node.faults()
        assert list(pool.arrays()) == ["kept"]
        assert pool.allocate("a", 9, "u2").shape == (9,)
        assert pool["kept"].get().tolist() == [7, 7, 7]


def test_what_a_broken_context_may_have_mapped_stays_charged(
    service: Any, cuda_node: CudaNode
) -> None:
    pool = committed()
    cuda_node.faults("cuCtxSynchronize 0 error 700")
    with pytest.raises(CudaFailed, match="cuCtxSynchronize: CUDA_ERROR_ILLEGAL_ADDRESS"):
        pool.sleep()
    cuda_node.faults()
    # Reported as ended socket: this process may have the memory mapped, and lives.
    wait_until(lambda: service.gms.table.devices[service.uuids[0]].lingering)
    assert service.device().used == GRANULE
    pool.close()


class Saved(Weights):
    """Weights of more than one window on device 0, and transfers of them."""

    generation: client.GenerationRef | None = None

    def __init__(self, service: Any, root: Path) -> None:
        sizes = {"long": (70 * MIB + 5, "u1"), "zeros": (17 * MIB, "u1"), "short": (100, "f4")}
        super().__init__(service, root, sizes, is_fenced=False)

    def commit(self, arrays: Mapping[str, Any]) -> None:
        before = self.generation
        with client.connect(lock="RW", if_match=before, replace=before is not None) as pool:
            wanted = {name: (array.shape, array.dtype) for name, array in arrays.items()}
            for name, array in pool.allocate_many(wanted).items():
                array.set(arrays[name])
            self.generation = pool.commit()
        self.values, self.layout = arrays, self.service.layout()

    def is_served(self) -> bool:
        with client.connect(lock="RO") as pool:
            return all((pool[name].get() == array).all() for name, array in self.values.items())

    def run(self, task: SaveTask | LoadTask) -> TransferDone:
        return apart(
            task, f"{LOADED}sys.path += os.environ.get('PYTHONPATH', '').split(os.pathsep)"
        )

    def save_task(self, attempt: int = 1, **changes: Any) -> SaveTask:
        fields = {"generation": attempt, "fence_token": None, "shard_bytes": 64 * MIB}
        return super().save_task(**fields | changes)

    def save(self, attempt: int = 1, **changes: Any) -> TransferDone:
        return self.run(self.save_task(attempt, **changes))

    def load_task(self, **changes: Any) -> LoadTask:
        device = self.service.uuids[0]
        return super().load_task(device=device, if_match=self.generation, **changes)

    def folder(self, attempt: int = 1) -> Path:
        return self.root / PART.replace("gen-1", f"gen-{attempt}")


@pytest.fixture
def saved(service: Any, tmp_path: Path) -> Saved:
    return Saved(service, tmp_path)


@pytest.mark.parametrize("backend", ["posix-direct", "posix-buffered"])
def test_a_layout_longer_than_the_windows_is_saved_and_loaded_whole(
    saved: Saved, backend: str
) -> None:
    done = saved.save(backend=backend)
    assert [file.stat().st_size for file in sorted(saved.folder().glob("shard*"))] == [
        64 * MIB,
        done.bytes - 64 * MIB,
    ]
    # A chunk in the midst of the zeros is a hole.
    assert done.bytes - done.moved == 8 * MIB
    loaded = saved.run(saved.load_task())
    assert loaded.layout.structure_hash == done.layout.structure_hash
    saved.service.publish("l1", 0)
    assert saved.is_served()
    assert saved.service.device().used == pytest.approx(92 * MIB, abs=4 * MIB)


@pytest.fixture
def direct(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a backend that reads into devices, which transfer processes find."""
    folders = [str(site_with_backends(tmp_path / "site"))]
    if request.param == "gds":
        folders.append(str(find_kvikio(monkeypatch)))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(folders))
    return str(request.param)


@pytest.mark.parametrize(
    ("direct", "way"),
    [("direct-example", "direct-example"), ("gds", "gds-compat")],
    indirect=["direct"],
)
def test_a_device_reads_a_part_itself_where_the_backend_can(
    saved: Saved, direct: str, way: str
) -> None:
    done = saved.save(backend=direct)
    assert done.backend.startswith("posix-")
    loaded = saved.run(saved.load_task(backend=direct))
    assert loaded.backend == way
    assert (loaded.moved, loaded.bytes) == (done.moved, done.bytes)
    saved.service.publish("l1", 0)
    assert saved.is_served()


def test_a_save_of_a_layout_that_changed_in_one_place_writes_that_file(saved: Saved) -> None:
    first = saved.save()
    (saved.folder().parent / "root.json").write_text("{}")
    saved.commit({**saved.values, "short": saved.values["short"] + 1})
    second = saved.save(attempt=2)
    assert 0 < second.moved <= second.bytes - 64 * MIB < first.moved
    is_shared = {
        file.name: file.samefile(saved.folder(2) / file.name)
        for file in saved.folder(1).glob("shard*")
    }
    assert is_shared == {"shard-0000.bin": True, "shard-0001.bin": False}


def test_a_device_that_the_transfer_process_cannot_see_fails_the_transfer_with_what_to_do(
    saved: Saved, cuda_node: CudaNode
) -> None:
    cuda_node.faults("cuInit 0 error 100")
    with pytest.raises(errors.SnapbackError, match="CUDA_ERROR_NO_DEVICE") as caught:
        saved.save()
    assert caught.value.to_failure().reason == "CudaUnavailable"
    assert not saved.folder().exists()


def flags_and_contexts(device: int) -> tuple[int, int]:
    """What the driver says of the context of a device in this process."""
    flags, active = CudaDriver().call("cuDevicePrimaryCtxGetState", device)
    return int(flags), int(active)


def visible(pids: Iterable[int]) -> dict[str, int]:
    """The processes that have started CUDA, each by what it sees of the devices."""
    found = {}
    for pid in pids:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            environment = Path(f"/proc/{pid}/environ").read_bytes().decode()
            if "libcuda.so.1" in Path(f"/proc/{pid}/maps").read_text():
                for seen in re.findall("CUDA_VISIBLE_DEVICES=([^\0]*)", environment):
                    found[seen] = pid
    return found


def test_a_process_that_waits_for_a_gpu_has_started_its_driver_and_holds_nothing_of_it(
    saved: Saved, cuda_node: CudaNode
) -> None:
    uuids = list(UUIDS[:2])
    cuda_node.place(UUIDS[0], f"{UUIDS[1]} context={64 * MIB}")

    async def run() -> None:
        async with TransferProcesses(spares=2, gpus=uuids) as processes:

            async def ready() -> dict[str, int]:
                def found() -> dict[str, int]:
                    return visible(process.pid for _, process in processes._spares)

                await until(lambda: sorted(found()) == uuids)
                return found()

            waiting = await ready()
            # With another context there would not be room for this one and so much memory.
            assert cuda_node.foreign(192 * MIB, ordinal=1).status == 0
            last = [event async for event in processes.run(saved.save_task())][-1]
            assert isinstance(last, TransferDone)
            again = await ready()
            assert again[uuids[0]] != waiting[uuids[0]]
            assert again[uuids[1]] == waiting[uuids[1]]

    saved.service.run(run())


def test_a_saver_that_waits_for_orders_has_started_the_driver_of_each_gpu_in_a_process(
    service: Any, tmp_path: Path
) -> None:
    orders = tmp_path / "orders"
    orders.mkdir()
    folders = {"GMS_SOCKET_DIR": str(service.folder), "GMS_ORDER_DIR": str(orders)}
    with program("gms-saver", **folders, GMS_CHECKPOINT_DIR="") as saver:
        try:
            wait_until(lambda: sorted(visible(children_of(saver.pid))) == list(UUIDS[:2]))
        finally:
            saver.terminate()
            saver.communicate(timeout=30)
    assert saver.returncode == 0


def alone(work: Callable[[], object]) -> None:
    """Work in a thread, which alone stays near the device."""
    with ThreadPoolExecutor(1) as pool:
        pool.submit(work).result()


def test_the_context_of_a_transfer_is_made_beside_its_other_work_and_sleeps_while_it_waits(
    driver: ThisProcess,
) -> None:
    alone(lambda: gpu.make_context(CudaDriver(), UUIDS[1]))
    for thread in threading.enumerate():
        if thread.name == "context":
            thread.join()
    assert flags_and_contexts(1) == (BLOCKING_SYNC, 1)
    assert flags_and_contexts(0) == (0, 0)
    alone(lambda: gpu.make_context(CudaDriver(), "GPU-of-another-node"))


def test_a_transfer_that_was_not_waited_for_sleeps_while_it_waits_too(saved: Saved) -> None:
    alone(lambda: save(saved.save_task(), lambda _: None))
    assert flags_and_contexts(0)[0] == BLOCKING_SYNC
