"""Answers frames of the lease socket from the memory server."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import TypeVar, assert_never

from msgspec.structs import replace

from gms.domain.layout import Allocation
from gms.domain.sessions import Peer, Session
from gms.handlers.memory_server import MemoryServer
from gms.ports import Answer, Device, Message, Tracer
from snapback_client.frames import (
    DESCRIPTORS_PER_MESSAGE,
    Access,
    Allocated,
    AllocateMany,
    AllocationInfo,
    Allocations,
    Attach,
    Attached,
    Commit,
    Committed,
    Detach,
    Done,
    Exported,
    ExportMany,
    FreeMany,
    ListAllocations,
    Metadata,
    MetadataGet,
    MetadataItem,
    MetadataPut,
    Request,
    batches,
    cost_of_allocation,
    cost_of_metadata,
)
from snapshot_shared.errors import InvalidMessage

E = TypeVar("E")


class LeaseSessions:
    """Answers clients. Spans are recorded for sessions that belong to a trace."""

    def __init__(self, gms: MemoryServer, tracer: Tracer | None = None) -> None:
        """Answer from `gms`."""
        self._gms = gms
        self._tracer = tracer

    async def attach(self, request: Attach, peer: Peer) -> Session:
        request = replace(request, device=self._gms.uuid_of(request.device))
        with self._span("attach", request):
            if request.load_token is not None:
                # A loader compares its needs with what is free, so that has to be final.
                await self._gms.drained()
            return await self._gms.attach(request, peer)

    async def describe(self, session: Session) -> Attached:
        device = self._device(session)
        info, base = device.info, session.base
        return Attached(
            session=session.id,
            granted=session.access,
            device=info.uuid,
            index=info.index,
            product=info.product,
            capacity=info.capacity,
            free=await self._gms.free_on(info.uuid),
            granularity=info.granularity,
            device_kind=info.kind,
            incarnation=self._gms.incarnation,
            generation=base.generation if base else 0,
            layout_id=base.layout_id if base else "",
            structure_hash=base.structure_hash if base else "",
            bytes=base.bytes if base else 0,
        )

    async def allocate(self, session: Session, request: AllocateMany) -> Answer:
        with self._span("allocate", session.request):
            made = await self._gms.allocate(session, request.allocations, wait_s=request.wait_s)
        return _allocations(made, Allocated)

    def call(self, session: Session, request: Request) -> Answer:
        match request:
            case ExportMany():
                return self._export(session, request)
            case FreeMany():
                self._gms.free(session, request.ids)
                return _done()
            case MetadataPut():
                self._gms.table.put_metadata(session, request.entries)
                return _done()
            case MetadataGet():
                return _metadata(
                    self._gms.table.get_metadata(session, request.keys, request.prefix or "")
                )
            case ListAllocations():
                return _allocations(self._gms.table.allocations(session), Allocations)
            case Commit():
                return self._commit(session, request)
            case Attach() | AllocateMany() | Detach():
                raise InvalidMessage(f"{type(request).__name__} cannot come here")
            case _:
                assert_never(request)

    def end(self, session: Session, *, unmapped: bool) -> bool:
        return self._gms.end(session, unmapped=unmapped)

    def process_ended(self, session: Session) -> None:
        self._gms.process_ended(session)

    def _commit(self, session: Session, request: Commit) -> Answer:
        with self._span("commit-layout", session.request):
            ref = yield from self._gms.commit(session, request)
        yield Message(
            Committed(
                incarnation=ref.incarnation,
                generation=ref.generation,
                layout_id=ref.layout_id,
                structure_hash=ref.structure_hash,
                bytes=ref.bytes,
                hidden=request.hidden,
            )
        )

    def _export(self, session: Session, request: ExportMany) -> Answer:
        device = self._device(session)

        def exported(run: Sequence[tuple[Allocation, AllocationInfo]], **numbers: int) -> Message:
            descriptors = _open_all(device, [pair[0] for pair in run], request.access)
            return Message(Exported(allocations=[pair[1] for pair in run], **numbers), descriptors)

        with self._span("export", session.request):
            found, infos = self._gms.table.export(session, request.ids, request.access)
            pairs = zip(found, infos, strict=True)
            runs = batches(pairs, cost=_cost_of_pair, most=DESCRIPTORS_PER_MESSAGE)
            yield from _numbered(runs, exported)

    def _device(self, session: Session) -> Device:
        return self._gms.devices[session.request.device]

    def _span(self, name: str, request: Attach) -> AbstractContextManager[object]:
        if self._tracer is None or not request.traceparent:
            return contextlib.nullcontext()
        attributes = {
            "snapback.device": request.device,
            "snapback.domain": request.domain.value,
            "snapback.lock": request.lock.value,
            "snapback.client": request.client,
        }
        return self._tracer.span(name, parent=request.traceparent, attributes=attributes)


def _done() -> Answer:
    yield Message(Done())


def _open_all(device: Device, allocations: Sequence[Allocation], access: Access) -> list[int]:
    message = Message(Done())
    try:
        for allocation in allocations:
            message.descriptors.append(device.export(allocation.handle, access))
    except BaseException:
        message.close()
        raise
    return message.descriptors


def _allocations(infos: Iterable[AllocationInfo], kind: type[Allocated | Allocations]) -> Answer:
    runs = batches(infos, cost=cost_of_allocation)
    return _numbered(runs, lambda run, **numbers: Message(kind(allocations=list(run), **numbers)))


def _metadata(entries: Sequence[MetadataItem]) -> Answer:
    runs = batches(entries, cost=cost_of_metadata)
    return _numbered(runs, lambda run, **numbers: Message(Metadata(entries=list(run), **numbers)))


def _numbered(runs: Iterable[list[E]], message: Callable[..., Message]) -> Answer:
    """Yield a numbered message for each run of entries."""
    known: list[list[E]] = []
    for run in runs:
        known.append(run)
        yield None
    for part, run in enumerate(known, start=1):
        if part > 1:
            yield None
        yield message(run, part=part, parts=len(known))


def _cost_of_pair(pair: tuple[Allocation, AllocationInfo]) -> int:
    return cost_of_allocation(pair[1])
