"""A GPU memory service of its own for every test, in a thread of its own."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
import threading
import uuid
from collections.abc import Callable, Coroutine, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import pytest

from gms.adapters.admission import LeasePolicy
from gms.adapters.grpc_api import GrpcServer
from gms.adapters.lease_socket import LeaseServer
from gms.adapters.simulated import GRANULARITY, SimulatedDevice
from gms.adapters.transfer_process import TransferProcesses
from gms.handlers.control import GmsControl
from gms.handlers.memory_server import MemoryServer
from gms.handlers.sessions import LeaseSessions
from gms.handlers.transfers import GmsTransfers
from gms.ports import Device
from snapshot_shared.frames import DeviceStatus, StatusRequest
from snapshot_shared.spans import SpanRecord
from snapshot_shared.telemetry import Telemetry

MIB = 1024 * 1024
CAPACITY = 64 * MIB

T = TypeVar("T")


class RunningGms:
    """The real service, both sockets, two simulated devices unless it is given others."""

    def __init__(
        self,
        folder: Path,
        *,
        capacities: tuple[int, ...] = (CAPACITY, CAPACITY),
        granularity: int = GRANULARITY,
        policy: LeasePolicy | None = None,
        devices: Sequence[Device] | None = None,
    ) -> None:
        self.folder = folder
        self.policy = policy
        self.devices: Sequence[Device] = devices or [
            SimulatedDevice(node="n1", index=index, capacity=capacity, granularity=granularity)
            for index, capacity in enumerate(capacities)
        ]
        self.uuids = [device.info.uuid for device in self.devices]
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)

    def start(self) -> None:
        self._thread.start()
        self.run(self._start())

    async def _start(self) -> None:
        self.gms = MemoryServer(node="n1", incarnation=str(uuid.uuid4()), devices=self.devices)
        self.telemetry = Telemetry("snap-gms", "n1", "0")
        sessions = LeaseSessions(self.gms, self.telemetry)
        self.lease = LeaseServer(self.folder, sessions, self.policy)
        self.lease.start()
        self.control = GmsControl(self.gms)
        self.transfers = GmsTransfers(
            self.gms, TransferProcesses(), socket_dir=self.folder, root=self.folder / "artifacts"
        )
        self.grpc = GrpcServer(self.folder, self.control, self.transfers, self.telemetry)
        await self.grpc.start()

    def restart(self) -> None:
        """End the service with all its memory, and start another in its place."""
        self.run(self._close())
        for device in self.devices:
            device.close()
        self.devices = [
            SimulatedDevice(
                node="n1",
                index=index,
                capacity=device.info.capacity,
                granularity=device.info.granularity,
            )
            for index, device in enumerate(self.devices)
        ]
        self.run(self._start())

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine where the service runs."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(30)

    def device(self, index: int = 0) -> DeviceStatus:
        """What the service says of a device now."""
        status = self.run(self.control.status(StatusRequest()))
        return status.devices[index]

    def spans(self) -> list[SpanRecord]:
        """What it has recorded of traces."""
        return list(self.telemetry._outbox.records)

    def stop(self) -> None:
        self.run(self._stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        for device in self.devices:
            device.close()

    async def _close(self) -> None:
        await self.lease.close()
        await self.grpc.close()
        await self.gms.drained()
        self.telemetry.shutdown()

    async def _stop(self) -> None:
        await self._close()
        await self._loop.shutdown_default_executor()


@pytest.fixture
def socket_dir() -> Iterator[Path]:
    """A folder whose path is short enough for a socket."""
    folder = Path(tempfile.mkdtemp(prefix="gms-"))
    yield folder
    shutil.rmtree(folder)


Launch = Callable[..., RunningGms]


@pytest.fixture
def launch(socket_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Launch]:
    """Start a service with settings of its own; clients find it by the environment."""
    started: list[RunningGms] = []

    def start(**options: Any) -> RunningGms:
        running = RunningGms(socket_dir, **options)
        running.start()
        started.append(running)
        monkeypatch.setenv("GMS_SOCKET_DIR", str(socket_dir))
        monkeypatch.setenv("NVIDIA_VISIBLE_DEVICES", ",".join(running.uuids))
        return running

    yield start
    for running in started:
        running.stop()


@pytest.fixture
def service(launch: Launch) -> RunningGms:
    """A running service, and an environment in which clients find it."""
    return launch()
