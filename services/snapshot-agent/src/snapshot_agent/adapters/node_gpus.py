"""The GPUs of a node, and those that its kubelet gave to a pod without a memory server."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc

from snapshot_agent.domain.pod_resources import held_gpus, on_this_node
from snapshot_agent.ports import GpuMemory
from snapshot_shared.errors import GmsUnavailable, InvalidMessage
from snapshot_shared.orders import PodRef, PresenceDevice
from snapshot_shared.tasks import in_thread

log = logging.getLogger(__name__)

LIST = "/v1.PodResourcesLister/List"
ANSWER_S = 5.0
MAX_ANSWER_BYTES = 16 * 1024 * 1024
_OPTIONS = (
    ("grpc.max_receive_message_length", MAX_ANSWER_BYTES),
    # Of all channels to one address, each connects by itself and at once.
    ("grpc.use_local_subchannel_pool", 1),
)


def nvml() -> Any:
    """Return the module of NVIDIA's management library (nvidia-ml-py). ImportError."""
    return importlib.import_module("pynvml")


class NodeGpus:
    """The ports `NodeDevices` and `PodDevices` on a node with a kubelet."""

    def __init__(
        self, gpu_memory: GpuMemory, kubelet_dir: Path, library: Callable[[], Any] = nvml
    ) -> None:
        """Ask the GMS of the node, the kubelet of this folder, and NVML where there is no GMS."""
        self._gpu_memory = gpu_memory
        self._socket = kubelet_dir / "pod-resources" / "kubelet.sock"
        self._library = library

    async def devices(self, *, wait_s: float) -> list[PresenceDevice]:
        try:
            return await self._gpu_memory.devices(wait_s=wait_s)
        except GmsUnavailable:
            if found := await in_thread(_listed, self._library):
                return found
            raise

    async def of(self, pod: PodRef) -> list[PresenceDevice] | None:
        async with grpc.aio.insecure_channel(f"unix:{self._socket}", options=_OPTIONS) as channel:
            call: Any = channel.unary_unary(LIST)
            try:
                held = held_gpus(await call(b"", timeout=ANSWER_S), pod)
            except (grpc.aio.AioRpcError, InvalidMessage) as error:
                what = error.details() if isinstance(error, grpc.aio.AioRpcError) else error
                log.warning("the kubelet does not say which GPUs a pod has: %s", what)
                return None
        if not held:
            return []
        try:
            listed = await self.devices(wait_s=0.0)
        except GmsUnavailable:
            listed = []
        return on_this_node(held, listed)


def _listed(library: Callable[[], Any]) -> list[PresenceDevice]:
    """Return the GPUs as NVML lists them; none without the library or the driver."""
    try:
        found = library()
        found.nvmlInit()
    except ImportError:
        return []
    except Exception as error:  # noqa: BLE001 - its own errors come from a module that may be absent
        log.info("NVML lists no GPUs: %s", error)
        return []
    try:
        return [_device(found, index) for index in range(found.nvmlDeviceGetCount())]
    finally:
        found.nvmlShutdown()


def _device(library: Any, index: int) -> PresenceDevice:
    handle = library.nvmlDeviceGetHandleByIndex(index)
    return PresenceDevice(
        index=index,
        uuid=_text(library.nvmlDeviceGetUUID(handle)),
        product=_text(library.nvmlDeviceGetName(handle)),
        capacity_bytes=library.nvmlDeviceGetMemoryInfo(handle).total,
    )


def _text(value: str | bytes) -> str:
    # Older versions of the library return bytes.
    return value.decode() if isinstance(value, bytes) else value
