"""The GPUs of a node and of its pods, as GMS, NVML and a kubelet say them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import pytest

from snapshot_agent.adapters.gms_grpc import PodGms
from snapshot_agent.adapters.node_gpus import NodeGpus
from snapshot_shared.errors import GmsUnavailable
from snapshot_shared.orders import PodRef, PresenceDevice
from tests.support.pod_resources import claim, container, limit, pod

WORKER = PodRef(uid="u", name="worker", namespace="default", container="main")


class Memory(NamedTuple):
    total: int


class Nvml:
    """NVIDIA's library, as it is documented, on a machine with two GPUs."""

    open = 0

    def nvmlInit(self) -> None:  # noqa: N802 - its name
        self.open += 1

    def nvmlShutdown(self) -> None:  # noqa: N802
        self.open -= 1

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        return 2

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:  # noqa: N802
        return 100 + index

    def nvmlDeviceGetUUID(self, handle: int) -> str:  # noqa: N802
        return f"GPU-{handle}"

    def nvmlDeviceGetName(self, _handle: int) -> bytes:  # noqa: N802
        return b"NVIDIA H100"

    def nvmlDeviceGetMemoryInfo(self, _handle: int) -> Memory:  # noqa: N802
        return Memory(80 << 30)


class WithoutDriver(Nvml):
    """The library on a machine without GPUs."""

    def nvmlInit(self) -> None:  # noqa: N802
        raise RuntimeError("Driver Not Loaded")


def absent() -> Any:
    raise ModuleNotFoundError("No module named 'pynvml'")


def found(folder: Path, library: Any) -> NodeGpus:
    """Return what an agent asks on a node without a GMS."""
    return NodeGpus(PodGms(folder, folder), folder, library)


@asynccontextmanager
async def kubelet(folder: Path, answer: bytes) -> AsyncIterator[None]:
    """Answer as the kubelet of this folder does."""

    async def listed(request: bytes, _context: Any) -> bytes:
        assert request == b""
        return answer

    (folder / "pod-resources").mkdir()
    server = grpc.aio.server()
    handlers = {"List": grpc.unary_unary_rpc_method_handler(listed)}
    handler = grpc.method_handlers_generic_handler("v1.PodResourcesLister", handlers)
    server.add_generic_rpc_handlers((handler,))
    server.add_insecure_port(f"unix:{folder}/pod-resources/kubelet.sock")
    await server.start()
    yield
    await server.stop(None)


def h100(index: int) -> PresenceDevice:
    return PresenceDevice(
        index=index, uuid=f"GPU-{100 + index}", product="NVIDIA H100", capacity_bytes=80 << 30
    )


async def test_without_a_gms_the_devices_of_a_node_are_those_of_nvml(tmp_path: Path) -> None:
    library = Nvml()
    assert await found(tmp_path, lambda: library).devices(wait_s=0.0) == [h100(0), h100(1)]
    assert library.open == 0


@pytest.mark.parametrize("library", [absent, WithoutDriver])
async def test_without_a_gms_and_nvml_nothing_is_known(tmp_path: Path, library: Any) -> None:
    with pytest.raises(GmsUnavailable):
        await found(tmp_path, library).devices(wait_s=0.0)


@pytest.mark.parametrize(
    "row", [claim("gpu.nvidia.com", "gpu-1"), limit("nvidia.com/gpu", ["GPU-101"])]
)
async def test_the_devices_of_a_pod_are_those_that_its_kubelet_gave_to_it(
    tmp_path: Path, row: bytes
) -> None:
    async with kubelet(tmp_path, pod("worker", container("main", row))):
        assert await found(tmp_path, Nvml).of(WORKER) == [h100(1)]


async def test_a_pod_may_have_none_and_without_a_kubelet_nothing_is_known(tmp_path: Path) -> None:
    assert await found(tmp_path, Nvml).of(WORKER) is None
    async with kubelet(tmp_path, pod("other", container("main"))):
        assert await found(tmp_path, Nvml).of(WORKER) == []


async def test_an_answer_that_is_none_of_a_kubelet_says_nothing(tmp_path: Path) -> None:
    async with kubelet(tmp_path, b"<html>"):
        assert await found(tmp_path, Nvml).of(WORKER) is None
