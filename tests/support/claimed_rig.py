"""A claimed device for the conformance suite: the node's GMS is an event loop in another thread."""

from __future__ import annotations

import asyncio
import mmap
import tempfile
import threading
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

from gms.adapters.device_memory import ClaimedDevice, DeviceSockets
from gms.adapters.simulated import GRANULARITY, SimulatedDevice, allow_many_descriptors
from gms.conformance.rig import CAPACITY
from gms.domain.claims import ClaimableDevice
from gms.ports import Device


def claimable(device: Device) -> ClaimableDevice:
    """Return a device as claims name it."""
    info = device.info
    return ClaimableDevice(
        index=info.index, uuid=info.uuid, product=info.product, capacity=info.capacity
    )


class ClaimedRig:
    """A claimed device of 64 MiB, and the node's device behind it; `folder` is the claim's."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        self._sockets: list[DeviceSockets] = []
        self._opened: list[tuple[ClaimedDevice, SimulatedDevice]] = []
        self.device: Device = self._open(GRANULARITY)

    def many(self) -> Device:
        allow_many_descriptors()
        return self._open(mmap.PAGESIZE)

    def close(self) -> None:
        for claimed, device in self._opened:
            claimed.close()
            device.close()
        for sockets in self._sockets:
            self._run(sockets.aclose())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.run_until_complete(self._loop.shutdown_default_executor())
        self._loop.close()
        self._folder.cleanup()

    def _open(self, granularity: int) -> ClaimedDevice:
        device = SimulatedDevice(
            node="conformance", index=0, capacity=CAPACITY, granularity=granularity
        )
        folder = self.folder = Path(self._folder.name) / str(granularity)
        sockets = DeviceSockets({device.info.uuid: device})
        self._run(sockets.serve(folder, claimable(device)))
        self._sockets.append(sockets)
        claimed = ClaimedDevice(folder, 0)
        self._opened.append((claimed, device))
        return claimed

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result(20)
