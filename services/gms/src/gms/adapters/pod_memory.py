"""The memory servers in the pods of a node, reached over their gRPC sockets."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from pathlib import Path
from typing import TypeVar

from gms.adapters.grpc_client import CALL_S, GmsCaller
from gms.adapters.pod_transfers import PodTransfers
from gms.ports import Memory, NoMemoryServer, Transfers
from snapshot_shared.frames import (
    DropLayoutReply,
    DropLayoutRequest,
    FenceReply,
    FenceRequest,
    ForgetReply,
    ForgetRequest,
    PublishReply,
    PublishRequest,
    StatusReply,
    StatusRequest,
    UnfenceReply,
    UnfenceRequest,
    WatchReply,
    WatchRequest,
)
from snapshot_shared.ids import check_uid
from snapshot_shared.orders import PodRef
from snapshot_shared.tasks import in_thread
from snapshot_shared.volumes import GMS_VOLUME, LOADER, SAVER, folder_of

T = TypeVar("T")


class PodMemories:
    """Finds the memory server of a pod by the pod's uid."""

    def __init__(self, kubelet_dir: Path, processes: Transfers) -> None:
        """Look below `<kubelet_dir>/pods`; `processes` copy what savers and loaders move."""
        self._kubelet_dir = kubelet_dir
        self._processes = processes

    async def find(self, pod: PodRef | None) -> Memory:
        """Return the memory server of a pod. NoMemoryServer."""
        if pod is None:
            raise NoMemoryServer("the order names no pod, and memory servers are in pods here")
        uid = check_uid(pod.uid)
        folder = Path(folder_of(self._kubelet_dir, uid, GMS_VOLUME))
        if not await in_thread(folder.is_dir):
            raise NoMemoryServer(
                f"pod {pod.name} has no memory server on this node",
                next_step=f"see what became of it: kubectl logs {pod.name} --container gms-server",
                path=str(folder),
            )
        workers = [await self._worker(uid, volume) for volume in (SAVER, LOADER)]
        return Memory(_PodControl(folder), folder, *workers)

    async def _worker(self, uid: str, volume: str) -> PodTransfers | None:
        orders = Path(folder_of(self._kubelet_dir, uid, volume))
        return PodTransfers(orders, self._processes) if await in_thread(orders.is_dir) else None


class _PodControl:
    """The `Control` port of the memory server at a socket."""

    def __init__(self, socket_dir: Path) -> None:
        self._socket_dir = socket_dir

    async def _call(self, request: object, kind: type[T], within_s: float = CALL_S) -> T:
        method = type(request).__name__.removesuffix("Request")
        async with GmsCaller(self._socket_dir) as caller:
            return await caller.call(method, request, kind, within_s)

    async def fence(self, request: FenceRequest) -> FenceReply:
        return await self._call(request, FenceReply, request.wait_s + CALL_S)

    async def unfence(self, request: UnfenceRequest) -> UnfenceReply:
        return await self._call(request, UnfenceReply)

    async def drop_layout(self, request: DropLayoutRequest) -> DropLayoutReply:
        return await self._call(request, DropLayoutReply)

    async def publish(self, request: PublishRequest) -> PublishReply:
        return await self._call(request, PublishReply)

    async def forget(self, request: ForgetRequest) -> ForgetReply:
        return await self._call(request, ForgetReply, (request.wait_s or 0.0) + CALL_S)

    async def status(self, request: StatusRequest) -> StatusReply:
        return await self._call(request, StatusReply)

    async def watch(self, request: WatchRequest) -> AsyncGenerator[WatchReply, None]:
        async with GmsCaller(self._socket_dir) as caller:
            async for each in caller.watch(request):
                yield each
