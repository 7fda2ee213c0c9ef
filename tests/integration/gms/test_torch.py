"""What PyTorch allocates lies in a pool, as far as that shows without a GPU and without PyTorch."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import snapback_client as client
from gms.adapters.cuda import open_devices
from snapback_client.cuda import CudaUnavailable
from snapback_client.errors import OutOfDeviceMemory, SnapbackError
from snapback_client.tensors import PREFIX, View, place_tensors, read_tensors
from snapback_client.torch import SegmentAllocator, TorchMemory, TorchUnavailable
from tests.support.cuda_rig import UUIDS, CudaNode
from tests.support.gms_rig import MIB

STREAM = 0xBEEF

MALLOC = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p)
FREE = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p)


class Library:
    """Calls the two functions by their addresses, as PyTorch does."""

    def __init__(self, allocator: SegmentAllocator) -> None:
        self._malloc = MALLOC(address_of(allocator.malloc))
        self._free = FREE(address_of(allocator.free))

    def malloc(self, size: int) -> int | None:
        return self._malloc(size, 0, STREAM)

    def free(self, address: int, size: int) -> None:
        self._free(address, size, 0, STREAM)


def address_of(function: Any) -> int:
    found = ctypes.cast(function, ctypes.c_void_p).value
    assert found
    return found


@pytest.fixture(params=["simulated", "cuda"])
def service(request: pytest.FixtureRequest) -> Any:
    if request.param == "simulated":
        return request.getfixturevalue("launch")()
    # Before `launch`, so that the driver goes after the service.
    node: CudaNode = request.getfixturevalue("cuda_node")
    node.place(f"{UUIDS[0]} bytes={64 * MIB}")
    return request.getfixturevalue("launch")(devices=open_devices())


def test_a_library_takes_segments_by_address_and_gives_them_back(service: Any) -> None:
    with client.connect(lock="RW") as pool:
        allocator = SegmentAllocator(pool)
        library = Library(allocator)
        first, second = library.malloc(2 * MIB), library.malloc(6 * MIB)
        assert first is not None
        assert second is not None
        assert [(s.name, s.address, s.size) for s in allocator.segments] == [
            ("segment-000000", first, 2 * MIB),
            ("segment-000001", second, 6 * MIB),
        ]
        assert service.device().used == 8 * MIB
        library.free(second, 6 * MIB)
        allocator.trim()
        assert service.device().used == 2 * MIB
        assert list(pool.arrays()) == ["segment-000000"]
        # Its addresses are not used again: a late copy must not reach what came after.
        assert library.malloc(6 * MIB) not in (first, second)


def test_a_library_that_asks_for_too_much_gets_null_and_the_reason_is_kept(service: Any) -> None:
    with client.connect(lock="RW") as pool:
        allocator = SegmentAllocator(pool)
        library = Library(allocator)
        assert library.malloc(100 * MIB) is None
        assert isinstance(allocator.failure, OutOfDeviceMemory)
        assert library.malloc(2 * MIB)
        assert len(allocator.segments) == 1


def test_a_late_free_leaves_what_is_committed_alone(service: Any) -> None:
    with client.connect(lock="RW") as pool:
        allocator = SegmentAllocator(pool)
        library = Library(allocator)
        address = library.malloc(2 * MIB)
        assert address
        pool.commit()
        library.free(address, 2 * MIB)
        library.free(0xDEAD, 1)
        assert allocator.failure is None
        pool.sleep()
        pool.wake()
        assert pool.address("segment-000000") == address
    library.free(address, 2 * MIB)


def test_tensors_of_a_segment_are_found_again_by_a_reader(service: Any) -> None:
    values = np.arange(6, dtype="f4").reshape(2, 3)
    with client.connect(lock="RW") as pool:
        allocator = SegmentAllocator(pool)
        start = Library(allocator).malloc(2 * MIB)
        assert start
        whole = np.zeros(2 * MIB, "u1")
        whole[512 : 512 + values.nbytes] = values.reshape(-1).view("u1")
        fill(pool["segment-000000"], whole)
        views = {"layer.weight": View(start + 512, (2, 3), (3, 1), "float32", 4)}
        pool.commit(metadata=place_tensors(allocator.segments, views))
        state = pool.save_state()
    with client.restore(state) as pool:
        places = read_tensors(pool.sizes(), pool.metadata(PREFIX))
        place = places["layer.weight"]
        part = bytes_of(pool[place.segment])[place.offset : place.offset + place.size]
        assert (part.view("f4").reshape(place.shape) == values).all()
        assert pool.address(place.segment) == start


def fill(array: Any, values: Any) -> None:
    if hasattr(array, "set"):
        array.set(values)
    else:
        array[...] = values


def bytes_of(array: Any) -> Any:
    return array.get() if hasattr(array, "get") else np.array(array)


def test_without_pytorch_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(TorchUnavailable, match="PyTorch is missing"):
        TorchMemory({})


def test_the_library_is_not_imported_before_it_is_needed() -> None:
    code = "import sys, snapback_client.torch; print('torch' in sys.modules, 'cuda' in sys.modules)"
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, check=True, text=True, timeout=30
    )
    assert found.stdout == "False False\n"


def test_a_machine_without_a_gpu_has_another_error_than_one_without_pytorch(service: Any) -> None:
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    with client.connect(lock="RW") as pool:
        if pool.device_kind != "cuda":
            pytest.skip("PyTorch works on simulated devices")
        with pytest.raises(CudaUnavailable, match="no CUDA device"):
            TorchMemory({"weights": pool})


def test_an_array_of_a_gpu_is_offered_to_other_libraries_where_it_is(service: Any) -> None:
    with client.connect(lock="RW") as pool:
        array = pool.allocate("a", (2, 3), "f4")
        if pool.device_kind != "cuda":
            pytest.skip("numpy does so itself")
        assert array.__dlpack_device__() == (2, array.ordinal) == (2, 0)
        assert '"dltensor"' in repr(array.__dlpack__())
        assert '"dltensor_versioned"' in repr(array.__dlpack__(max_version=(1, 0), stream=1))
        with pytest.raises(BufferError, match="copy it"):
            array.__dlpack__(copy=True)
        with pytest.raises(BufferError, match="copy it"):
            array.__dlpack__(dl_device=(1, 0))
        pool.commit()
        with pytest.raises(BufferError, match="read-only"):
            array.__dlpack__()


@pytest.fixture
def pool(service: Any) -> Iterator[client.MemoryPool]:
    with client.connect(lock="RW") as found:
        yield found


def test_what_is_reserved_is_handed_out_without_a_call(pool: client.MemoryPool) -> None:
    allocator = SegmentAllocator(pool)
    allocator.reserve(10 * MIB)
    # Whatever asks the service from here on fails.
    pool._held.close()
    start = allocator.take(6 * MIB)
    assert allocator.take(100) == start + 6 * MIB
    assert allocator.take(3 * MIB) == start + 6 * MIB + 512
    allocator.give(start)
    with pytest.raises(SnapbackError):
        allocator.take(2 * MIB)
    assert allocator.malloc(2 * MIB, 0, None) is None
    assert isinstance(allocator.failure, SnapbackError)


def test_a_reserve_grows_where_it_ends_by_what_is_missing(
    service: Any, pool: client.MemoryPool
) -> None:
    allocator = SegmentAllocator(pool)
    start = allocator.take(100)
    assert allocator.take(3 * MIB) == start + 512
    assert service.device().used == 4 * MIB
    pool.allocate("between", 1, "u1")
    apart = allocator.take(4 * MIB)
    assert apart > start + 4 * MIB, "not across another array"
    whole = pool["segment-000000"], pool["segment-000001"]
    assert sum(array.nbytes for array in whole) == 4 * MIB


def test_what_no_range_touches_is_freed_and_the_reserve_is_kept(
    service: Any, pool: client.MemoryPool
) -> None:
    allocator = SegmentAllocator(pool)
    allocator.reserve(12 * MIB)
    first, second, third = (allocator.take(3 * MIB) for _ in range(3))
    assert service.device().used == 12 * MIB
    allocator.give(second)
    allocator.trim()
    assert service.device().used == 10 * MIB, "the first touches the granule from 2 to 4"
    allocator.give(first)
    allocator.trim()
    assert service.device().used == 6 * MIB, "6 to 9 are in use, 9 to 12 are the reserve"
    allocator.trim([(third + MIB, 1)])
    assert service.device().used == 2 * MIB
    assert [segment.name for segment in allocator.segments] == ["segment-000003"]
    assert allocator.take(MIB) == third + 6 * MIB, "behind what was reserved"


def test_a_reserve_that_does_not_fit_is_refused_whole(
    service: Any, pool: client.MemoryPool
) -> None:
    allocator = SegmentAllocator(pool)
    with pytest.raises(OutOfDeviceMemory):
        allocator.reserve(66 * MIB)
    assert service.device().used == 0
    assert allocator.segments == []
    assert allocator.take(64 * MIB)


def test_what_was_reserved_is_there_again_after_a_sleep(service: Any) -> None:
    with client.connect(lock="RW", domain="kv") as cache:
        allocator = SegmentAllocator(cache)
        allocator.reserve(6 * MIB)
        place = allocator.take(MIB)
        assert cache.imported_bytes == 6 * MIB
        cache.sleep()
        assert (service.device().used, cache.imported_bytes) == (0, 0)
        cache.wake()
        assert (service.device().used, cache.imported_bytes) == (6 * MIB, 6 * MIB)
        assert allocator.take(MIB) == place + MIB
        assert service.device().used == 6 * MIB
