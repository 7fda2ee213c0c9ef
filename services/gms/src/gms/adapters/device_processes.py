"""A process for each device: a crash of one loses the memory of one device.

Each is this service again (`python -m gms.main --device <index>`), without NATS, with a folder of
sockets of its own below that of the node. It ends with the process that has started it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import socket
import sys
from asyncio.subprocess import Process
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from typing import Self

from gms.adapters.grpc_client import GmsCaller, RemoteControl
from gms.adapters.lease_router import hand, until_ready
from gms.ports import Control, DeviceInfo, StartedDevice
from snapshot_shared.errors import NotFound, UnknownDevice
from snapshot_shared.frames import LoadRequest, SaveRequest, TransferUpdate
from snapshot_shared.tasks import any_set, end_all, in_thread

log = logging.getLogger(__name__)

START_S = 30.0
"""How long the processes may take until they serve, in seconds."""
END_S = 10.0
"""How long one may take to end after it was asked to, in seconds."""
BACK_S = 5.0
"""How long after the end of one its device is waited for, in seconds."""
PAUSES_S = (0.2, 30.0)
"""The first and the longest rest before one that has ended is started again, in seconds."""


class DeviceProcessGone(NotFound):
    """The process of a device has ended, with all memory of that device; it is started again."""

    retryable = True
    default_next_step = "memory of that device is lost; attach again, and load its weights again"


class DeviceProcesses:
    """The processes of the devices of a node, as a context manager.

    What was committed in one that ends is gone. Its clients see their connection closed, and who
    asks for its device meanwhile gets DeviceProcessGone with how it has ended.
    """

    def __init__(self, devices: Sequence[DeviceInfo], socket_dir: Path) -> None:
        """Serve these devices below a folder of sockets."""
        self.infos = devices
        self._kept = {info.uuid: _Kept(info, socket_dir) for info in devices}
        self._keeping: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        """Start all, and wait until they serve. DeviceProcessGone."""
        kept = self._kept.values()
        self._keeping = [asyncio.create_task(each.keep(), name=each.name) for each in kept]
        try:
            async with asyncio.timeout(START_S):
                for each in kept:
                    await each.serves.wait()
        except BaseException as error:
            await end_all(*self._keeping, again_s=2 * END_S)
            if isinstance(error, TimeoutError):
                for each in kept:
                    each.check()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await end_all(*self._keeping, again_s=2 * END_S)

    def hand_over(self, device: str, client: socket.socket) -> None:
        """Give a client to the process of a device. UnknownDevice, DeviceProcessGone."""
        self._of(device).take(client)

    async def settled(self) -> None:
        """Wait for the processes that have ended just now, for BACK_S after the end of each."""
        await asyncio.gather(*(kept.back() for kept in self._kept.values()))

    def control(self, device: str) -> Control:
        """Return what a device is asked by. UnknownDevice, DeviceProcessGone."""
        kept = self._of(device)
        kept.check()
        return RemoteControl(kept.folder)

    async def started(self, device: str) -> StartedDevice:
        """Wait until the process of a device serves."""
        kept = self._of(device)
        await kept.serves.wait()
        return StartedDevice(RemoteControl(kept.folder), kept.ended)

    async def save(self, request: SaveRequest) -> AsyncGenerator[TransferUpdate, None]:
        """Have the process of the device save."""
        kept = self._of(request.device)
        kept.check()
        async with GmsCaller(kept.folder) as gms, contextlib.aclosing(gms.save(request)) as updates:
            async for update in updates:
                yield update

    async def load(self, request: LoadRequest) -> AsyncGenerator[TransferUpdate, None]:
        """Have the process of the device load."""
        kept = self._of(request.device)
        kept.check()
        async with GmsCaller(kept.folder) as gms, contextlib.aclosing(gms.load(request)) as updates:
            async for update in updates:
                yield update

    def _of(self, device: str) -> _Kept:
        try:
            return self._kept[device]
        except KeyError:
            raise UnknownDevice(
                f"device {device!r} is not served here",
                next_step="ask for one of the devices in `values`",
                device=device,
                served=sorted(self._kept),
            ) from None


class _Kept:
    """The process of one device, which is started again whenever it has ended."""

    def __init__(self, info: DeviceInfo, socket_dir: Path) -> None:
        self.name = f"gpu-{info.index}"
        self.folder = socket_dir / self.name
        self.serves = asyncio.Event()
        self.ended = asyncio.Event()
        self._info = info
        self._channel: socket.socket | None = None
        self._state = "is being started"
        self._ended_at = -math.inf

    async def keep(self) -> None:
        first, longest = PAUSES_S
        pause_s = first
        while True:
            has_served = False
            try:
                has_served = await self._run()
            except OSError as error:
                self._state = f"cannot be started: {error.strerror}"
            pause_s = first if has_served else min(2 * pause_s, longest)
            log.error("the process of %s %s", self._info.uuid, self._state)
            await any_set(pause_s)

    async def back(self) -> None:
        """Wait for a process that has ended just now: what is asked of its device may wait, too."""
        left = self._ended_at + BACK_S - asyncio.get_running_loop().time()
        if left > 0:
            await any_set(left, self.serves)

    def check(self) -> None:
        """Raise DeviceProcessGone unless the process serves."""
        if not self.serves.is_set():
            uuid = self._info.uuid
            raise DeviceProcessGone(f"the process of device {uuid} {self._state}", device=uuid)

    def take(self, client: socket.socket) -> None:
        self.check()
        assert self._channel is not None  # noqa: S101 - it is there while the process serves
        try:
            hand(self._channel, client)
        except OSError as error:
            raise DeviceProcessGone(
                f"the process of device {self._info.uuid} takes no clients: {error.strerror}",
                device=self._info.uuid,
            ) from error

    async def _run(self) -> bool:
        """Run the process until it has ended; return whether it has served."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with ours:
            with theirs:
                process = await self._started(theirs)
            try:
                ours.settimeout(0)
                has_served = await until_ready(ours)
                if has_served:
                    self._channel = ours
                    self.ended = asyncio.Event()
                    self.serves.set()
                status = await process.wait()
                how = f"was killed by signal {-status}" if status < 0 else f"ended ({status})"
                self._state = f"{how}, and is started again"
                return has_served
            finally:
                self.serves.clear()
                self.ended.set()
                self._ended_at = asyncio.get_running_loop().time()
                self._channel = None
                await _ended(process)
                with contextlib.suppress(OSError):
                    await in_thread(self.folder.rmdir)

    async def _started(self, channel: socket.socket) -> Process:
        ports = ("SNAPBACK_HTTP_ADDRESS", "SNAPBACK_HEALTH_ADDRESS")
        environment = {name: value for name, value in os.environ.items() if name not in ports}
        return await asyncio.create_subprocess_exec(
            sys.executable,
            "-P",  # The working directory is no place to import from.
            "-m",
            "gms.main",
            "--device",
            str(self._info.index),
            env=environment | {"SNAPBACK_SOCKET_DIR": str(self.folder), "SNAPBACK_NATS_URL": ""},
            stdin=channel.fileno(),
            process_group=0,  # Ctrl-C goes to the service alone, which ends the process.
        )


async def _ended(process: Process) -> None:
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        try:
            async with asyncio.timeout(END_S):
                await process.wait()
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
