"""Answers calls of the gRPC socket from the memory server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

from gms.domain.device import DeviceTable
from gms.domain.fence import FencePhase
from gms.domain.locks import Lock, LockRequest
from gms.domain.sessions import Room, Waiter
from gms.handlers.memory_server import MemoryServer
from snapshot_shared.frames import (
    DeviceStatus,
    DomainStatus,
    DropLayoutReply,
    DropLayoutRequest,
    FenceReply,
    FenceRequest,
    FenceStatus,
    ForgetReply,
    ForgetRequest,
    LoadStatus,
    PublishReply,
    PublishRequest,
    SessionStatus,
    StatusReply,
    StatusRequest,
    UnfenceReply,
    UnfenceRequest,
    WaitingStatus,
    WatchReply,
    WatchRequest,
)


class GmsControl:
    """Answers the node's agent and tools."""

    def __init__(self, gms: MemoryServer) -> None:
        """Answer from `gms`."""
        self._gms = gms

    async def fence(self, request: FenceRequest) -> FenceReply:
        devices = tuple(dict.fromkeys(request.devices))
        vector = await self._gms.fence(
            request.token, devices, wait_s=request.wait_s, deadline_s=request.deadline_s
        )
        return FenceReply(vector=list(vector))

    async def unfence(self, request: UnfenceRequest) -> UnfenceReply:
        if request.device:
            self._gms.saved(request.device, request.token)
            return UnfenceReply(ended=True)
        return UnfenceReply(ended=self._gms.unfence(request.token))

    async def drop_layout(self, request: DropLayoutRequest) -> DropLayoutReply:
        return DropLayoutReply(dropped=self._gms.drop_layout(request.device, request.layout_id))

    async def publish(self, request: PublishRequest) -> PublishReply:
        return PublishReply(layout=self._gms.publish_hidden(request.device, request.load_token))

    async def forget(self, request: ForgetRequest) -> ForgetReply:
        device, token, wait_s = request.device, request.load_token, request.wait_s or 0.0
        if token:
            await self._gms.drop_hidden_when_unused(device, token, wait_s=wait_s)
        else:
            await self._gms.forget_when_unused(device, wait_s=wait_s)
        return ForgetReply()

    async def status(self, request: StatusRequest) -> StatusReply:
        # Memory that is on its way back counts as used until it is free.
        await self._gms.drained()
        # At the same time: each may take its time to say how much is free.
        devices = await asyncio.gather(*map(self._device, self._gms.table.devices.values()))
        return StatusReply(
            node=self._gms.node,
            incarnation=self._gms.incarnation,
            devices=devices,
            events=self._gms.history.latest(request.events or 0),
            now_s=asyncio.get_running_loop().time(),
        )

    async def watch(self, request: WatchRequest) -> AsyncGenerator[WatchReply, None]:
        if request.status:
            yield WatchReply(status=await self.status(StatusRequest()))
        async with aclosing(self._gms.watch(request.after)) as runs:
            async for events, missed in runs:
                status = await self.status(StatusRequest()) if request.status else None
                yield WatchReply(events=events, missed=missed, status=status)

    async def _device(self, table: DeviceTable) -> DeviceStatus:
        device = self._gms.devices[table.uuid]
        free = await self._gms.free_on(table.uuid)
        info, used = device.info, device.used
        return DeviceStatus(
            uuid=info.uuid,
            index=info.index,
            product=info.product,
            endpoint=f"{self._gms.node}-gpu{info.index}",
            capacity=info.capacity,
            used=used,
            free=free,
            retired=sum(allocation.aligned for allocation in table.retired),
            capabilities=dict(info.capabilities),
            kind=info.kind,
            domains=[self._domain(table, room) for room in table.rooms.values()],
            fence=self._fence(table.uuid),
            loads=[
                LoadStatus(
                    load_token=token,
                    layout_id=hidden.layout_id,
                    structure_hash=hidden.structure_hash,
                    bytes=hidden.layout.charged,
                )
                for token, hidden in table.hidden.items()
            ],
        )

    def _fence(self, uuid: str) -> FenceStatus | None:
        fence = self._gms.table.fences.on(uuid)
        if fence is None:
            return None
        phase: FencePhase = fence.phases[uuid]
        timer = self._gms.fence_ends.get(fence.token)
        left = timer.when() - asyncio.get_running_loop().time() if timer else 0.0
        return FenceStatus(phase=phase.value, ends_in_s=round(max(0.0, left), 3))

    def _domain(self, table: DeviceTable, room: Room) -> DomainStatus:
        lingering = [s for s in table.lingering.values() if s.request.domain is room.domain]
        return DomainStatus(
            domain=room.domain,
            lock=room.lock.value,
            sessions=[
                SessionStatus(
                    session=session.id,
                    access=session.access,
                    client=session.request.client,
                    pid=session.peer.pid,
                    state=state,
                    fence="pidfd" if session.peer.has_pidfd else "socket-only",
                )
                for state, group in (("active", room.sessions), ("lingering", lingering))
                for session in group
            ],
            waiting=[
                WaitingStatus(
                    lock=waiter.request.lock,
                    client=waiter.request.client,
                    pid=waiter.peer.pid,
                    why=self._why(table, room, waiter),
                )
                for waiter in room.queue.values()
            ],
            layout=room.committed.ref if room.committed else None,
        )

    def _why(self, table: DeviceTable, room: Room, waiter: Waiter) -> str:
        wanted = waiter.lock_request
        if not self._gms.table.fences.admits(table.uuid, room.domain, wanted):
            return "the fence of a capture"
        vanished = table.vanished_writers(room.domain, waiter.peer)
        if vanished and wanted is not LockRequest.READ:
            return f"the end of the process of {vanished[0].name}, which wrote and hung up"
        if room.replacer_waits and wanted is LockRequest.READ:
            return "a writer that replaces the layout and is first"
        if room.lock in (Lock.EMPTY, Lock.WRITING) and waiter.lock_request in (
            LockRequest.READ,
            LockRequest.EITHER,
        ):
            return "a commit"
        return f"{', '.join(session.name for session in room.sessions)} to leave"
