"""How PyTorch reaches the memory of pools: on a CUDA device, and on a simulated one.

On a CUDA device PyTorch's allocator takes its segments from a pool, through two C functions. Host
memory has no such allocator in PyTorch, so on a simulated device a dispatch mode moves what factory
functions (`torch.empty`, `torch.zeros`, `torch.randn` …) make into the pool.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from snapback_client.cuda import CudaDriver, CudaUnavailable
from snapback_client.errors import DeviceError, NotEligible
from snapback_client.frames import aligned
from snapback_client.pool import MemoryPool
from snapback_client.tensors import ALIGNMENT, Segment, next_segments, pieces, unused

_MALLOC = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p)
_FREE = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p)

_KEPT: list[Any] = []
"""What C code may call until the process ends: PyTorch frees memory as late as that."""


class TorchUnavailable(DeviceError):
    """PyTorch is missing, or too old for what is used of it."""


class SegmentAllocator:
    """Addresses of a pool that is being written, for a library that allocates for itself.

    `malloc(size, device, stream)` and `free(address, size, device, stream)` are C functions. The
    first gives an address, or NULL when the pool has no more, and why is then in `failure`. What
    was reserved is handed out without a call to the service or the driver; the second never makes
    one. Any thread may call them. No address is handed out twice: the device may still use it.
    """

    def __init__(self, pool: MemoryPool) -> None:
        """Serve from a pool that is being written."""
        self._pool = pool
        self._lock = threading.Lock()
        self._segments: list[Segment] = []
        self._taken: dict[int, int] = {}
        self._next = self._end = 0
        self.failure: Exception | None = None
        self.malloc = _MALLOC(self._malloc)
        self.free = _FREE(self._free)

    @property
    def segments(self) -> list[Segment]:
        """The memory that was allocated, in whole granules, and not freed again."""
        return list(self._segments)

    @property
    def taken(self) -> list[tuple[int, int]]:
        """Address and bytes of what was taken and not given back."""
        # A copy first: making the pairs may run finalizers, which give back.
        return list(self._taken.copy().items())

    def reserve(self, size: int) -> None:
        """Allocate bytes ahead, in pieces that can be freed one by one. OutOfDeviceMemory."""
        with self._lock:
            self._grow(pieces(size, self._pool.granularity))

    def take(self, size: int) -> int:
        """Return the address of `size` bytes; of more memory when the reserve has too little."""
        with self._lock:
            for wanted in (size - (self._end - self._next), size):
                # Twice where the reserve could not grow, for something else stands behind it.
                if self._end - self._next < size:
                    self._grow([aligned(wanted, self._pool.granularity)])
            address = self._next
            self._next += aligned(size, ALIGNMENT)
            self._taken[address] = size
            return address

    def give(self, address: int) -> None:
        """Take an address back. Its memory is freed by `trim` once no other is in the segment."""
        # Without the lock: this is called by finalizers, also within `take`.
        self._taken.pop(address, None)

    def trim(self, live: Iterable[tuple[int, int]] | None = None) -> None:
        """Free the segments that touch no live range, and what was reserved and not taken.

        `live` are addresses and bytes; by default all that was taken, and the reserve is kept.
        """
        with self._lock:
            kept = list(live) if live is not None else self.taken
            if live is None:
                kept.append((self._next, self._end - self._next))
            else:
                self._next = self._end
            gone = unused(self._segments, kept)
            for segment in gone:
                self._pool.free(segment.name)
            names = {segment.name for segment in gone}
            self._segments = [each for each in self._segments if each.name not in names]

    def _grow(self, sizes: Sequence[int]) -> None:
        """Allocate segments, all or none, behind the reserve where that is possible."""
        names = next_segments(self._pool.arrays(), len(sizes))
        wanted = {name: (size, "uint8") for name, size in zip(names, sizes, strict=True)}
        self._pool.allocate_many(wanted)
        made = [Segment(name, self._pool.address(name), wanted[name][0]) for name in names]
        self._segments += made
        if made[0].address != self._end:
            self._next = made[0].address
        self._end = made[-1].address + made[-1].size

    def _malloc(self, size: int, _device: int, _stream: int | None) -> int | None:
        # An exception cannot pass through C.
        try:
            return self.take(size)
        except Exception as error:  # noqa: BLE001 - raised again by the region
            self.failure = error
            return None

    def _free(self, address: int | None, _size: int, _device: int, _stream: int | None) -> None:
        self.give(address or 0)


class TorchDevice(Protocol):
    """What a kind of device does for PyTorch."""

    name: str

    def synchronize(self) -> None:
        """Wait for all that was begun on the device."""
        ...

    def bytes_at(self, address: int, size: int) -> Any:
        """Return a tensor of bytes over memory that is mapped; it keeps nothing alive."""
        ...

    def routing(self, allocator: SegmentAllocator) -> contextlib.AbstractContextManager[None]:
        """Have this thread's tensors of the device lie where the allocator says."""
        ...

    def live(self, allocator: SegmentAllocator) -> list[tuple[int, int]]:
        """Return address and bytes of what tensors use of the allocator's memory."""
        ...


class SimulatedTorch:
    """Tensors over the memory of a simulated device, which is that of the host."""

    name = "cpu"

    def __init__(self, torch: Any) -> None:
        """Use PyTorch."""
        self._torch = torch

    def synchronize(self) -> None:
        """Do nothing: what was called has been done."""

    def bytes_at(self, address: int, size: int) -> Any:
        """Return a tensor of bytes over memory that is mapped; it keeps nothing alive."""
        return self._over((ctypes.c_ubyte * size).from_address(address))

    @contextlib.contextmanager
    def routing(self, allocator: SegmentAllocator) -> Iterator[None]:
        """Have what factory functions make on the host lie where the allocator says."""
        with _factories(self._torch, lambda made: self._moved(made, allocator)):
            yield

    def live(self, allocator: SegmentAllocator) -> list[tuple[int, int]]:
        """Return address and bytes of what tensors use of the allocator's memory."""
        return allocator.taken

    def _over(self, block: Any) -> Any:
        return self._torch.frombuffer(block, dtype=self._torch.uint8)

    def _moved(self, made: Any, allocator: SegmentAllocator) -> Any:
        """Return a copy of a new tensor in the pool, whose memory is given back with it."""
        size = made.untyped_storage().nbytes()
        address = allocator.take(size)
        block = (ctypes.c_ubyte * size).from_address(address)
        # The storage of the tensor is what keeps the block.
        weakref.finalize(block, allocator.give, address).atexit = False
        typed = self._over(block).view(made.dtype)
        moved = typed.as_strided(made.shape, made.stride(), made.storage_offset())
        return moved.copy_(made)


class CudaTorch:
    """Tensors over the memory of a CUDA device, which PyTorch allocates from a pool."""

    def __init__(self, torch: Any, ordinal: int) -> None:
        """Use a device by its number in this process. TorchUnavailable, CudaUnavailable."""
        check_cuda(torch)
        self._torch = torch
        self._ordinal = ordinal
        self._pools: dict[SegmentAllocator, Any] = {}
        self.name = f"cuda:{ordinal}"

    def synchronize(self) -> None:
        """Wait for all that was begun on the device."""
        self._torch.cuda.synchronize(self._ordinal)

    def bytes_at(self, address: int, size: int) -> Any:
        """Return a tensor of bytes over memory that is mapped; it keeps nothing alive."""
        # The device is named, for PyTorch copies what is on another than the one it is asked for.
        return self._torch.as_tensor(_Bytes(address, size), device=self.name)

    @contextlib.contextmanager
    def routing(self, allocator: SegmentAllocator) -> Iterator[None]:
        """Have PyTorch's allocator take the segments for this thread from ours.

        What the service refuses is raised in place of PyTorch's own error.
        """
        torch = self._torch
        allocator.failure = None
        try:
            # A pool of PyTorch belongs to the device that is current when it is made.
            with torch.cuda.device(self._ordinal):
                pool = self._pools.get(allocator)
                is_new = pool is None
                if is_new:
                    pool = self._pool_of(allocator)
                with torch.cuda.use_mem_pool(pool):
                    if is_new:
                        self._check_routed(allocator)
                        self._pools[allocator] = pool
                    yield
        except torch.OutOfMemoryError as error:
            if allocator.failure is not None:
                raise allocator.failure from error
            raise

    def live(self, allocator: SegmentAllocator) -> list[tuple[int, int]]:
        """Return address and bytes of what tensors use of the allocator's memory."""
        if allocator not in self._pools:
            return allocator.taken
        return live_blocks(self._torch.cuda.memory_snapshot())

    def _pool_of(self, allocator: SegmentAllocator) -> Any:
        torch = self._torch
        functions = (allocator.malloc, allocator.free)
        addresses = [ctypes.cast(each, ctypes.c_void_p).value for each in functions]
        custom = torch._C._cuda_customAllocator(*addresses)  # noqa: SLF001 - the only way in without a library file
        pool = torch.cuda.MemPool(custom)
        # PyTorch calls into all of them as long as a tensor lives.
        _KEPT.append((custom, pool, allocator))
        return pool

    def _check_routed(self, allocator: SegmentAllocator) -> None:
        """Allocate a byte and see where it lies: with some settings PyTorch asks no pool."""
        before = len(allocator.taken)
        self._torch.empty(1, dtype=self._torch.uint8, device=self.name)
        if len(allocator.taken) == before:
            raise NotEligible(
                f"PyTorch {self._torch.__version__} allocates outside of the pool",
                next_step="take expandable_segments:True out of PYTORCH_CUDA_ALLOC_CONF and "
                "PYTORCH_ALLOC_CONF, or use a later PyTorch",
            )


def live_blocks(snapshot: Sequence[Mapping[str, Any]]) -> list[tuple[int, int]]:
    """Return address and bytes of what is in use, of a snapshot of PyTorch's allocator.

    Its blocks stand one behind the other in each segment
    (https://docs.pytorch.org/docs/stable/torch_cuda_memory.html, "Snapshot API Reference").
    """
    found = []
    for segment in snapshot:
        address = segment["address"]
        for block in segment["blocks"]:
            if block["state"] != "inactive":
                found.append((address, block["size"]))
            address += block["size"]
    return found


def import_torch() -> Any:
    """Import PyTorch. TorchUnavailable."""
    try:
        return importlib.import_module("torch")
    except (ImportError, OSError) as error:
        raise TorchUnavailable(
            f"PyTorch is missing: {error}", next_step="pip install 'snapback-client[torch]'"
        ) from error


def check_cuda(torch: Any) -> None:
    """Look for what is used of PyTorch on CUDA. TorchUnavailable, CudaUnavailable."""
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
        raise TorchUnavailable(
            f"PyTorch {torch.__version__} has no {', '.join(lacking)}",
            next_step="install PyTorch 2.6 or later",
            missing=lacking,
        )


def device_of(torch: Any, kind: str, uuid: str) -> TorchDevice:
    """Return the device of a pool. TorchUnavailable, CudaUnavailable, UnknownDevice."""
    if kind != "cuda":
        return SimulatedTorch(torch)
    # CUDA and PyTorch count the devices of a process alike.
    check_cuda(torch)
    return CudaTorch(torch, int(CudaDriver().find(uuid)))


def _factories(torch: Any, move: Callable[[Any], Any]) -> Any:
    """Return a mode in which what factory functions make on the host is moved."""

    def dispatch(_: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        made = func(*args, **(kwargs or {}))
        if not isinstance(made, torch.Tensor) or _takes_tensors(func):
            return made
        is_here = made.device.type == "cpu" and made.layout is torch.strided
        return move(made) if is_here and made.numel() else made

    mode = importlib.import_module("torch.utils._python_dispatch").TorchDispatchMode
    return type("Factories", (mode,), {"__torch_dispatch__": dispatch})()


def _takes_tensors(func: Any) -> bool:
    # By its schema, which is what a dispatch mode has to go by.
    return any("Tensor" in str(each.type) for each in func._schema.arguments)  # noqa: SLF001


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
