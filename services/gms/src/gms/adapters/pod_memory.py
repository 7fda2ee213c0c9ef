"""The memory servers in the pods of a node, reached over their gRPC sockets."""

from __future__ import annotations

from pathlib import Path

from gms.adapters.grpc_client import RemoteControl
from gms.adapters.pod_transfers import PodTransfers
from gms.ports import Memory, NoMemoryServer, Transfers
from snapshot_shared.ids import check_uid
from snapshot_shared.orders import PodRef
from snapshot_shared.pod_logs import check_pod
from snapshot_shared.tasks import in_thread
from snapshot_shared.volumes import GMS_VOLUME, LOADER, SAVER, folder_of


class PodMemories:
    """Finds the memory server of a pod by the pod's uid."""

    def __init__(self, kubelet_dir: Path, pod_logs_dir: Path, processes: Transfers) -> None:
        """Look below `<kubelet_dir>/pods`; `processes` copy what savers and loaders move.

        A pod has to have a folder in the kubelet's logs of pods.
        """
        self._kubelet_dir = kubelet_dir
        self._pod_logs_dir = pod_logs_dir
        self._processes = processes

    async def find(self, pod: PodRef | None) -> Memory:
        """Return the memory server of a pod. NoMemoryServer, StalePodReference."""
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
        await in_thread(check_pod, pod, self._pod_logs_dir)
        workers = [await self._worker(uid, volume) for volume in (SAVER, LOADER)]
        return Memory(RemoteControl(folder), folder, *workers)

    async def _worker(self, uid: str, volume: str) -> PodTransfers | None:
        orders = Path(folder_of(self._kubelet_dir, uid, volume))
        return PodTransfers(orders, self._processes) if await in_thread(orders.is_dir) else None
