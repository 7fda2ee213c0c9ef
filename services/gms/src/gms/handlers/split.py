"""Answers calls of the gRPC socket of a node whose devices have a process each."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable
from contextlib import aclosing
from typing import TypeVar

from msgspec import UNSET
from msgspec.structs import replace

from gms.domain.history import History
from gms.handlers.memory_server import followed
from gms.ports import Control, DeviceControls, StartedDevice
from snapshot_shared.errors import DeadlineExceeded, NotFound, SnapbackError, failure_of
from snapshot_shared.frames import (
    DeviceStatus,
    DropLayoutReply,
    DropLayoutRequest,
    EventKind,
    FenceReply,
    FenceRequest,
    ForgetReply,
    ForgetRequest,
    MissingDevice,
    PublishReply,
    PublishRequest,
    StatusReply,
    StatusRequest,
    UnfenceReply,
    UnfenceRequest,
    WatchReply,
    WatchRequest,
)
from snapshot_shared.orders import LayoutRef
from snapshot_shared.tasks import Changes, any_set, end_all, undisturbed

log = logging.getLogger(__name__)

T = TypeVar("T")

ANSWER_S = 3.0
"""How long one of all devices may take to answer, in seconds."""

AGAIN_S = 0.5
"""The rest before the events of a device are followed again, in seconds."""


class SplitControl:
    """The `Control` port over the processes of devices, each of which knows its own device only."""

    def __init__(self, node: str, incarnation: str, devices: DeviceControls) -> None:
        """Ask `devices`. `incarnation` is a fresh uuid of this process."""
        self._node = node
        self._incarnation = incarnation
        self._devices = devices
        self._history = History()
        self._changes = Changes()

    async def fence(self, request: FenceRequest) -> FenceReply:
        loop = asyncio.get_running_loop()
        began = loop.time()
        found: dict[str, LayoutRef] = {}
        order = {info.uuid: info.index for info in self._devices.infos}
        fenced: list[str] = []
        try:
            # In one order, so that two fences never wait for each other.
            for device in sorted(set(request.devices), key=lambda uuid: order.get(uuid, -1)):
                passed = loop.time() - began
                reply = await self._devices.control(device).fence(
                    replace(
                        request,
                        devices=[device],
                        wait_s=max(0.0, request.wait_s - passed),
                        deadline_s=max(0.001, request.deadline_s - passed),
                    )
                )
                fenced.append(device)
                found.update((ref.device, ref) for ref in reply.vector)
        except Exception:
            # On all devices or on none, and no token is spent on a device that has refused it. A
            # call that is cancelled may be repeated with its token: it leaves what it has.
            await undisturbed(self._give_back(request.token, fenced))
            raise
        wanted = dict.fromkeys(request.devices)
        return FenceReply(vector=[found[device] for device in wanted if device in found])

    async def unfence(self, request: UnfenceRequest) -> UnfenceReply:
        if request.device:
            return await self._devices.control(request.device).unfence(request)
        answers = await self._all(lambda control: control.unfence(request))
        for answer in answers.values():
            # The fences of a process that has ended are gone with it.
            if isinstance(answer, SnapbackError) and not isinstance(answer, NotFound):
                raise answer
        return UnfenceReply(
            ended=any(isinstance(each, UnfenceReply) and each.ended for each in answers.values())
        )

    async def drop_layout(self, request: DropLayoutRequest) -> DropLayoutReply:
        return await self._devices.control(request.device).drop_layout(request)

    async def publish(self, request: PublishRequest) -> PublishReply:
        return await self._devices.control(request.device).publish(request)

    async def forget(self, request: ForgetRequest) -> ForgetReply:
        return await self._devices.control(request.device).forget(request)

    async def status(self, request: StatusRequest) -> StatusReply:
        answers = await self._all(lambda control: control.status(StatusRequest(events=0)))
        devices: list[DeviceStatus] = []
        missing: list[MissingDevice] = []
        for info in self._devices.infos:
            answer = answers[info.uuid]
            if isinstance(answer, SnapbackError):
                log.warning("device %s is left out: %s", info.uuid, answer)
                missing.append(
                    MissingDevice(uuid=info.uuid, index=info.index, failure=failure_of(answer))
                )
            else:
                devices += answer.devices
        return StatusReply(
            node=self._node,
            incarnation=self._incarnation,
            devices=devices,
            missing=missing or UNSET,
            events=self._history.latest(request.events or 0),
            now_s=asyncio.get_running_loop().time(),
        )

    async def watch(self, request: WatchRequest) -> AsyncGenerator[WatchReply, None]:
        if request.status:
            yield WatchReply(status=await self.status(StatusRequest()))
        runs = followed(self._history, request.after, self._changes)
        async with aclosing(runs):
            async for events, missed in runs:
                status = await self.status(StatusRequest()) if request.status else None
                yield WatchReply(events=events, missed=missed, status=status)

    @contextlib.asynccontextmanager
    async def following(self) -> AsyncGenerator[None, None]:
        """Take over the events of all devices for the length of the block."""
        tasks = [asyncio.create_task(self._follow(info.uuid)) for info in self._devices.infos]
        try:
            yield
        finally:
            await end_all(*tasks)

    async def _follow(self, device: str) -> None:
        while True:
            process = await self._devices.started(device)
            seen = 0
            while not process.ended.is_set():
                try:
                    async for seq in self._taken_over(process, seen):
                        seen = seq
                    why = "there are no more"
                except Exception as error:  # noqa: BLE001 - the events of a device are never given up
                    why = str(failure_of(error))
                if not await any_set(AGAIN_S, process.ended):
                    log.warning("the events of device %s are asked for again: %s", device, why)
            now = asyncio.get_running_loop().time()
            self._history.add(EventKind.DEATH, now, device, reason="device-process")
            self._changes.notify()

    async def _taken_over(self, process: StartedDevice, after: int) -> AsyncGenerator[int, None]:
        """Take over the events after number `after`; yield the number of each."""
        async with aclosing(process.control.watch(WatchRequest(after=after))) as replies:
            async for reply in replies:
                for event in reply.events:
                    self._history.take(event)
                    yield event.seq
                self._changes.notify()

    async def _give_back(self, token: str, devices: Iterable[str]) -> None:
        """End what a fence that is refused elsewhere has on these devices."""

        async def end(device: str) -> None:
            try:
                control = self._devices.control(device)
                async with asyncio.timeout(ANSWER_S):
                    await control.unfence(UnfenceRequest(token=token))
            except NotFound:
                # It has ended with the process.
                return
            except (SnapbackError, TimeoutError) as error:
                log.warning("the fence of device %s goes on: %s", device, failure_of(error))

        await asyncio.gather(*map(end, devices))

    async def _all(self, ask: Callable[[Control], Awaitable[T]]) -> dict[str, T | SnapbackError]:
        """Ask every device at the same time; return what each says, or why it says nothing."""

        async def answer(uuid: str) -> T | SnapbackError:
            try:
                async with asyncio.timeout(ANSWER_S):
                    return await ask(self._devices.control(uuid))
            except SnapbackError as error:
                return error
            except TimeoutError:
                return DeadlineExceeded(
                    f"device {uuid} does not answer in {ANSWER_S:.0f} s",
                    next_step="look at its process: it may hang in the driver",
                    device=uuid,
                    budget_s=ANSWER_S,
                )

        await self._devices.settled()
        uuids = [info.uuid for info in self._devices.infos]
        return dict(zip(uuids, await asyncio.gather(*map(answer, uuids)), strict=True))
