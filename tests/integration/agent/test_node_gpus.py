"""The GPUs of a node and of its pods, as GMS, NVML and a kubelet say them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from snapshot_agent.adapters.gms_grpc import PodGms
from snapshot_agent.adapters.node_gpus import NodeGpus
from snapshot_shared.errors import GmsUnavailable
from snapshot_shared.orders import PodRef, PresenceDevice
from tests.support.pod_resources import claim, container, limit, pod

WORKER = PodRef(uid="u", name="worker", namespace="default", container="main")


def nvml(opened: list[str] | None = None) -> Any:
    """Return NVIDIA's library, as it is documented, on a machine with two GPUs."""
    opened = [] if opened is None else opened
    return SimpleNamespace(
        nvmlInit=lambda: opened.append("init"),
        nvmlShutdown=lambda: opened.append("shutdown"),
        nvmlDeviceGetCount=lambda: 2,
        nvmlDeviceGetHandleByIndex=lambda index: 100 + index,
        nvmlDeviceGetUUID=lambda handle: f"GPU-{handle}",
        nvmlDeviceGetName=lambda _: b"NVIDIA H100",
        nvmlDeviceGetMemoryInfo=lambda _: SimpleNamespace(total=80 << 30),
    )


def without_driver() -> Any:
    """Return the library on a machine without GPUs."""

    def init() -> None:
        raise RuntimeError("Driver Not Loaded")

    return SimpleNamespace(nvmlInit=init)


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

    (folder / "pod-resources").mkdir(exist_ok=True)
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
    calls: list[str] = []
    assert await found(tmp_path, lambda: nvml(calls)).devices(wait_s=0.0) == [h100(0), h100(1)]
    assert calls == ["init", "shutdown"]


@pytest.mark.parametrize("library", [absent, without_driver])
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
        assert await found(tmp_path, nvml).of(WORKER) == [h100(1)]


async def test_a_pod_may_have_none_and_without_a_kubelet_nothing_is_known(tmp_path: Path) -> None:
    assert await found(tmp_path, nvml).of(WORKER) is None
    async with kubelet(tmp_path, pod("other", container("main"))):
        assert await found(tmp_path, nvml).of(WORKER) == []
    async with kubelet(tmp_path, b"<html>"):
        assert await found(tmp_path, nvml).of(WORKER) is None
