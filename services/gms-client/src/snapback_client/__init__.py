"""GPU memory for an engine: arrays that other processes share, that sleep, and that wake in place.

    import snapback_client

    with snapback_client.connect(device=0, lock="RW") as weights:
        table = weights.allocate("embedding", (50_000, 512), "float32")
        table[:] = read_from_disk()
        weights.commit()         # readers may attach; the arrays are read-only from here on
        ...
        weights.sleep()          # nothing is mapped, open or running
        weights.wake()           # the same arrays at the same addresses

A pool is a mapping of names to arrays. Errors are also those of Python where it has one of the same
meaning: an array that is not there is a KeyError, a wait that was too long a TimeoutError, an
argument that cannot be used a ValueError, and memory that does not suffice a MemoryError.

While a pool sleeps its arrays must not be touched: the process would end with SIGSEGV, as CUDA
would fault. After `wake` they are valid again.

Arrays of a simulated device are numpy's. Those of a CUDA device (extra `cuda`) are `CudaArray`s:
`set` fills and `get` copies them, and libraries that know DLPack or `__cuda_array_interface__` work
on them in place. `snapback_client.torch` keeps models of PyTorch in pools of either kind.
"""

from typing import TYPE_CHECKING, Any

from snapback_client.errors import (
    DeadlineExceeded,
    Fenced,
    GenerationMismatch,
    GmsUnavailable,
    InvalidInput,
    LayoutConflict,
    NotEligible,
    NotFound,
    OutOfDeviceMemory,
    SnapbackError,
    StaleLayout,
    UnknownDevice,
)
from snapback_client.frames import GenerationRef
from snapback_client.mappings import AddressTaken
from snapback_client.pool import MemoryPool, connect, device_count, restore

if TYPE_CHECKING:
    from snapback_client.identity import Identity
    from snapback_client.worker import AsyncWorker, Resumed, Worker

__all__ = [
    "AddressTaken",
    "AsyncWorker",
    "DeadlineExceeded",
    "Fenced",
    "GenerationMismatch",
    "GenerationRef",
    "GmsUnavailable",
    "Identity",
    "InvalidInput",
    "LayoutConflict",
    "MemoryPool",
    "NotEligible",
    "NotFound",
    "OutOfDeviceMemory",
    "Resumed",
    "SnapbackError",
    "StaleLayout",
    "UnknownDevice",
    "Worker",
    "connect",
    "device_count",
    "restore",
]


def __getattr__(name: str) -> Any:
    """Import what a worker is made of when it is asked for: no service pays for its asyncio."""
    if name not in ("AsyncWorker", "Identity", "Resumed", "Worker"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from snapback_client import worker  # noqa: PLC0415

    return getattr(worker, name)
