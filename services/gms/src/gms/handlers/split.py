"""Answers calls of the gRPC socket of a node whose devices have a process each."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import TypeVar

from msgspec.structs import replace

from gms.domain.history import History
from gms.handlers.memory_server import followed
from gms.ports import Control, DeviceControls
from snapshot_shared.errors import NotFound, SnapbackError
from snapshot_shared.frames import (
    DropLayoutReply,
    DropLayoutRequest,
    EventKind,
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
from snapshot_shared.orders import LayoutRef
from snapshot_shared.tasks import any_set, end_all, undisturbed

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
        self._changed = asyncio.Event()

    async def fence(self, request: FenceRequest) -> FenceReply:
        loop = asyncio.get_running_loop()
        began = loop.time()
        found: dict[str, LayoutRef] = {}
        order = {info.uuid: info.index for info in self._devices.infos}
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
                found.update((ref.device, ref) for ref in reply.vector)
        except BaseException:
            # On all devices or on none.
            await undisturbed(self.unfence(UnfenceRequest(token=request.token)))
            raise
        wanted = dict.fromkeys(request.devices)
        return FenceReply(vector=[found[device] for device in wanted if device in found])

    async def unfence(self, request: UnfenceRequest) -> UnfenceReply:
        if request.device:
            return await self._devices.control(request.device).unfence(request)
        replies = await self._all(lambda control: control.unfence(request))
        return UnfenceReply(ended=any(reply.ended for reply in replies))

    async def drop_layout(self, request: DropLayoutRequest) -> DropLayoutReply:
        return await self._devices.control(request.device).drop_layout(request)

    async def publish(self, request: PublishRequest) -> PublishReply:
        return await self._devices.control(request.device).publish(request)

    async def forget(self, request: ForgetRequest) -> ForgetReply:
        return await self._devices.control(request.device).forget(request)

    async def status(self, request: StatusRequest) -> StatusReply:
        replies = await self._all(lambda control: control.status(StatusRequest(events=0)))
        return StatusReply(
            node=self._node,
            incarnation=self._incarnation,
            devices=[device for reply in replies for device in reply.devices],
            events=self._history.latest(request.events or 0),
            now_s=asyncio.get_running_loop().time(),
        )

    async def watch(self, request: WatchRequest) -> AsyncGenerator[WatchReply, None]:
        if request.status:
            yield WatchReply(status=await self.status(StatusRequest()))
        runs = followed(self._history, request.after, lambda: self._changed)
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
            control = await self._devices.started(device)
            with contextlib.suppress(SnapbackError):
                async with aclosing(control.watch(WatchRequest())) as replies:
                    async for reply in replies:
                        for event in reply.events:
                            self._history.take(event)
                        self._notify()
            now = asyncio.get_running_loop().time()
            self._history.add(EventKind.DEATH, now, device, reason="device-process")
            self._notify()
            await any_set(AGAIN_S)

    def _notify(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def _all(self, ask: Callable[[Control], Awaitable[T]]) -> list[T]:
        """Ask every device that is served, at the same time; leave out what does not answer."""

        async def answer(uuid: str) -> list[T]:
            try:
                async with asyncio.timeout(ANSWER_S):
                    return [await ask(self._devices.control(uuid))]
            except NotFound as error:
                log.warning("device %s is left out: %s", uuid, error)
            except TimeoutError:
                log.warning("device %s is left out: no answer in %.0f s", uuid, ANSWER_S)
            return []

        answers = await asyncio.gather(*map(answer, await self._devices.running()))
        return [each for found in answers for each in found]
