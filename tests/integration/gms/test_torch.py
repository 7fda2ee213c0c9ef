"""What PyTorch allocates lies in a pool, as far as that shows without a GPU and without PyTorch."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

import snapback_client as client
from gms.adapters.cuda import open_devices
from snapback_client.cuda import CudaUnavailable
from snapback_client.tensors import PREFIX, View, place_tensors, read_tensors
from snapback_client.torch import SegmentAllocator, TorchMemory, tensor_of
from snapshot_shared.errors import OutOfDeviceMemory
from tests.support.cuda_rig import UUIDS, CudaNode

MIB = 1024 * 1024
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
        first, second = library.malloc(2 * MIB), library.malloc(5 * MIB)
        assert first is not None
        assert second is not None
        assert [(s.name, s.address, s.size) for s in allocator.segments] == [
            ("segment-000000", first, 2 * MIB),
            ("segment-000001", second, 5 * MIB),
        ]
        assert service.device().used == 8 * MIB
        library.free(second, 5 * MIB)
        assert service.device().used == 2 * MIB
        assert list(pool.arrays()) == ["segment-000000"]
        # Its addresses are not used again: a late copy must not reach what came after.
        assert library.malloc(5 * MIB) not in (first, second)


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


def test_without_pytorch_it_says_what_to_install(service: Any) -> None:
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from snapback_client.torch import TorchMemory; TorchMemory(None)"
    )
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, check=False, text=True, timeout=30
    )
    assert "PyTorch is missing" in found.stderr
    assert "CudaUnavailable" in found.stderr


def test_the_library_is_not_imported_before_it_is_needed() -> None:
    code = "import sys, snapback_client.torch; print('torch' in sys.modules, 'cuda' in sys.modules)"
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, check=True, text=True, timeout=30
    )
    assert found.stdout == "False False\n"


@pytest.mark.gpu
def test_a_model_lies_in_a_pool_and_comes_back_in_place(launch: Any) -> None:
    torch = pytest.importorskip("torch")
    try:
        launch(devices=open_devices())
    except CudaUnavailable as error:
        pytest.skip(str(error))
    with client.connect(lock="RW") as pool:
        memory = TorchMemory(pool)
        with memory.allocating():
            model = torch.nn.Linear(300, 200, bias=False).to("cuda")
        values = model.weight.detach().cpu()
        memory.commit(model.state_dict())
        address = model.weight.data_ptr()
        pool.sleep()
        pool.wake()
        assert model.weight.data_ptr() == address
        assert torch.equal(model.weight.detach().cpu(), values)
        again = memory.tensors()["weight"]
        assert again.data_ptr() == address
        assert torch.equal(again.cpu(), values)
        array = pool["segment-000000"]
        assert tensor_of(array).data_ptr() == array.address


def test_a_machine_without_a_gpu_has_another_error_than_one_without_pytorch(service: Any) -> None:
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    with client.connect(lock="RW") as pool, pytest.raises(CudaUnavailable, match="no CUDA device"):
        TorchMemory(pool)
