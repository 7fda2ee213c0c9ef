"""GPU memory for PyTorch (2.6 or later): a model's tensors lie in a pool that others share.

    import snapback_client
    from snapback_client.torch import TorchMemory

    with snapback_client.connect(device=0) as pool:     # RW_OR_RO: the first writes, others read
        memory = TorchMemory(pool)
        if pool.access == "RW":
            with memory.allocating():                   # what is allocated here lies in the pool
                model = build().to("cuda")
            memory.commit(model.state_dict())           # read-only from here on
        else:
            with torch.device("meta"):
                model = build()
            model.load_state_dict(memory.tensors(), assign=True)
        ...
        pool.sleep()                                    # tensors must not be touched
        pool.wake()                                     # the same tensors at the same addresses

Give a pool its weights alone: buffers that a model changes, and what is allocated while it serves,
belong outside, for writing what is committed is a fault of the device. PyTorch calls two C
functions for memory; they are made by ctypes, so that no compiler is needed. PyTorch and CUDA are
looked for when a `TorchMemory` is made, and not before.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import threading
from collections.abc import Iterator, Mapping
from typing import Any

from snapback_client.cuda import CudaUnavailable
from snapback_client.errors import InvalidInput, NotEligible
from snapback_client.frames import GenerationRef
from snapback_client.pool import MemoryPool
from snapback_client.tensors import PREFIX, Segment, View, next_segment, place_tensors, read_tensors

_MALLOC = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p)
_FREE = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p)

_KEPT: list[Any] = []
"""What C code may call until the process ends: PyTorch frees memory as late as that."""


class SegmentAllocator:
    """Two C functions that take segments from a pool and give them back.

    `malloc(size, device, stream)` gives an address, or NULL when the pool has no more, and why is
    then in `failure`; `free(address, size, device, stream)` gives one back while the pool is being
    written. Once it is committed its segments belong to the layout. Any thread may call them.
    """

    def __init__(self, pool: MemoryPool) -> None:
        """Serve from a pool that is being written."""
        self._pool = pool
        self._lock = threading.Lock()
        self._segments: dict[int, Segment] = {}
        self.failure: Exception | None = None
        self.malloc = _MALLOC(self._malloc)
        self.free = _FREE(self._free)
        _KEPT.append((self.malloc, self.free))

    @property
    def segments(self) -> list[Segment]:
        """What was taken and not given back."""
        return list(self._segments.values())

    def _malloc(self, size: int, _device: int, _stream: int | None) -> int | None:
        # An exception cannot pass through C.
        with self._lock:
            try:
                name = next_segment(self._pool.arrays())
                self._pool.allocate(name, size, "uint8")
                address = self._pool.address(name)
            except Exception as error:  # noqa: BLE001 - raised again by `allocating`
                self.failure = error
                return None
            self._segments[address] = Segment(name, address, size)
            return address

    def _free(self, address: int | None, _size: int, _device: int, _stream: int | None) -> None:
        with self._lock:
            segment = self._segments.pop(address or 0, None)
            if segment is None:
                return
            try:
                self._pool.free(segment.name)
            except NotEligible:
                # It is committed, asleep or closed: the layout keeps it, or nothing is left of it.
                return
            except Exception as error:  # noqa: BLE001 - as above
                self.failure = error


class TorchMemory:
    """The tensors of a pool on a CUDA device. One thread at a time."""

    def __init__(self, pool: MemoryPool) -> None:
        """Work on an open pool. CudaUnavailable without PyTorch; InvalidInput for another kind."""
        self._torch = _torch()
        self._pool = pool
        self._index = _index_of(self._torch, pool)
        self._allocator: SegmentAllocator | None = None
        self._mem_pool: Any = None

    @contextlib.contextmanager
    def allocating(self) -> Iterator[None]:
        """Allocate in the pool everything that this thread allocates on the device.

        Meanwhile no other thread may allocate or free tensors of the device: it could hold the
        interpreter and wait for PyTorch's allocator, which waits for the interpreter to call us.
        What the service refuses is raised in place of PyTorch's own error. OutOfDeviceMemory.
        """
        if self._pool.access != "RW":
            raise NotEligible("the pool is read-only: allocate before the commit")
        torch = self._torch
        if self._allocator is None:
            self._allocator = SegmentAllocator(self._pool)
            functions = (self._allocator.malloc, self._allocator.free)
            addresses = [ctypes.cast(each, ctypes.c_void_p).value for each in functions]
            custom = torch._C._cuda_customAllocator(*addresses)  # noqa: SLF001 - the only way in without a library file
            self._mem_pool = torch.cuda.MemPool(custom)
            # PyTorch calls into both as long as a tensor lives.
            _KEPT.append((custom, self._mem_pool))
        self._allocator.failure = None
        try:
            with torch.cuda.device(self._index), torch.cuda.use_mem_pool(self._mem_pool):
                yield
        except torch.OutOfMemoryError as error:
            if self._allocator.failure is not None:
                raise self._allocator.failure from error
            raise

    def commit(self, tensors: Mapping[str, Any], *, layout_id: str | None = None) -> GenerationRef:
        """Publish the pool with these tensors by name, which all lie in it.

        InvalidInput names those that do not. They stay where they are and become read-only.
        """
        allocator = self._allocator
        if allocator is None:
            raise NotEligible("nothing was allocated", next_step="use allocating() first")
        self._torch.cuda.synchronize(self._index)
        views = {name: _view(tensor) for name, tensor in tensors.items()}
        items = place_tensors(allocator.segments, views)
        return self._pool.commit(layout_id=layout_id, metadata=items)

    def tensors(self) -> dict[str, Any]:
        """Return every tensor that was committed, over the same memory."""
        pool = self._pool
        sizes = pool.sizes()
        places = read_tensors(sizes, pool.metadata(PREFIX))
        segments = {
            name: self._bytes(pool.address(name), sizes[name])
            for name in {place.segment for place in places.values()}
        }
        found: dict[str, Any] = {}
        for name, place in places.items():
            part = segments[place.segment][place.offset : place.offset + place.size]
            typed = part.view(_dtype(self._torch, place.dtype))
            found[name] = typed.as_strided(place.shape, place.strides)
        return found

    def _bytes(self, address: int, size: int) -> Any:
        return self._torch.as_tensor(_Bytes(address, size), device=f"cuda:{self._index}")


def tensor_of(array: Any) -> Any:
    """Return a tensor over an array of a pool on a CUDA device. CudaUnavailable without PyTorch.

    PyTorch knows no read-only tensors: writing one that is committed is a fault of the device.
    """
    torch = _torch()
    shape = list(array.shape)
    kind = _dtype(torch, array.dtype.name)
    if not array.nbytes:
        return torch.empty(shape, dtype=kind, device="cuda")
    return (
        torch.as_tensor(_Bytes(array.address, array.nbytes), device="cuda").view(kind).view(shape)
    )


class _Bytes:
    """Bytes of a device for PyTorch, which takes only what says that it is writable."""

    def __init__(self, address: int, size: int) -> None:
        self.__cuda_array_interface__ = {
            "version": 3,
            "shape": (size,),
            "typestr": "|u1",
            "data": (address, False),
            "strides": None,
            "stream": None,
        }


def _view(tensor: Any) -> View:
    return View(
        address=tensor.data_ptr(),
        shape=tuple(tensor.shape),
        strides=tuple(tensor.stride()),
        dtype=str(tensor.dtype).removeprefix("torch."),
        itemsize=tensor.element_size(),
    )


def _dtype(torch: Any, name: str) -> Any:
    """Return a type by its name, which another process may have written. InvalidInput."""
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise InvalidInput(
            f"this PyTorch ({torch.__version__}) has no type {name!r}",
            next_step="use the version of PyTorch with which the tensors were committed",
            found=name,
        )
    return found


def _torch() -> Any:
    """Import PyTorch and look for what is used of it. CudaUnavailable says what is missing."""
    try:
        torch = importlib.import_module("torch")
    except ImportError as error:
        raise CudaUnavailable(
            f"PyTorch is missing: {error}", next_step="pip install 'snapback-client[cuda,torch]'"
        ) from error
    if not torch.cuda.is_available():
        raise CudaUnavailable(
            f"PyTorch {torch.__version__} finds no CUDA device",
            next_step="install a build of PyTorch for CUDA, and look with `nvidia-smi`",
        )
    lacking = [
        name
        for name, owner in (
            ("MemPool", torch.cuda),
            ("use_mem_pool", torch.cuda),
            ("_cuda_customAllocator", torch._C),  # noqa: SLF001 - as above
            ("OutOfMemoryError", torch),
        )
        if not hasattr(owner, name)
    ]
    if lacking:
        raise CudaUnavailable(
            f"PyTorch {torch.__version__} has no {', '.join(lacking)}",
            next_step="install PyTorch 2.6 or later",
            missing=lacking,
        )
    return torch


def _index_of(torch: Any, pool: MemoryPool) -> int:
    """Return PyTorch's index of the pool's device among those that are visible to it."""
    if pool.device_kind != "cuda":
        raise InvalidInput(
            f"{pool.device} is a device of the kind {pool.device_kind!r}: PyTorch cannot use it",
            next_step="use a GPU, or numpy on a simulated device",
            found=pool.device_kind,
        )
    uuids = [
        f"GPU-{torch.cuda.get_device_properties(index).uuid}"
        for index in range(torch.cuda.device_count())
    ]
    if pool.device not in uuids:
        raise InvalidInput(
            f"PyTorch does not see {pool.device}",
            next_step="look at CUDA_VISIBLE_DEVICES",
            visible=uuids,
        )
    return uuids.index(pool.device)
