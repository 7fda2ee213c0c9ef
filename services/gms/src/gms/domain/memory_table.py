"""The memory table of a server: devices, sessions, layouts, generations and fences.

Every method takes what happened, changes the table and returns the effects to carry out; an error
changes nothing. There is no clock, device or socket here.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from typing import TypeVar

from msgspec import UNSET

from gms.domain.device import DeviceTable, check_generation
from gms.domain.fence import Fence, FenceBook, FenceEvent, FencePhase
from gms.domain.layout import Allocation, Layout
from gms.domain.locks import USES, LockDecision, LockEvent, LockRequest, Operation, Use
from gms.domain.sessions import (
    Effect,
    FenceEnded,
    FenceHeld,
    Freed,
    Hidden,
    Peer,
    Role,
    Room,
    Session,
    Waiter,
)
from gms.domain.shares import Shares
from snapback_client.frames import (
    Access,
    AllocationInfo,
    AllocationSpec,
    Attach,
    Commit,
    LockMode,
    MemoryDomain,
    MetadataItem,
    aligned,
)
from snapshot_shared.errors import (
    Fenced,
    Forbidden,
    HoldDeadline,
    InvalidMessage,
    LayoutConflict,
    LoadLost,
    NotEligible,
    StaleLayout,
    Superseded,
    UnknownDevice,
)
from snapshot_shared.orders import LayoutRef

K = TypeVar("K")
V = TypeVar("V")

_REMEMBERED = 4096
"""Load tokens whose outcome is still known, so that a repeated order gets the same answer."""

WAITING = {"all": 256, "pod": 128, "process": 32}
"""How many clients may wait for the locks of one device."""

_WRITES = (LockRequest.WRITE, LockRequest.REPLACE, LockRequest.EITHER)


class MemoryTable:
    """All state that the server's answers depend on."""

    def __init__(self, incarnation: str, devices: Iterable[tuple[str, int]]) -> None:
        """Start empty. `devices` are (uuid, granularity in bytes)."""
        self.incarnation = incarnation
        self.devices = {uuid: DeviceTable.empty(uuid, granularity) for uuid, granularity in devices}
        self.fences = FenceBook()
        self._published: OrderedDict[tuple[str, str], LayoutRef] = OrderedDict()
        self._dropped: OrderedDict[tuple[str, str], None] = OrderedDict()

    def device(self, uuid: str) -> DeviceTable:
        """Return a device's table. UnknownDevice."""
        try:
            return self.devices[uuid]
        except KeyError:
            raise UnknownDevice(
                f"device {uuid!r} is not served here",
                next_step="ask for one of the devices in `values`",
                device=uuid,
                served=sorted(self.devices),
            ) from None

    # Sessions begin and end.

    def attach(self, ticket: int, request: Attach, peer: Peer) -> list[Effect]:
        """Queue a client for its lock, and grant it at once where that is possible."""
        device = self.device(request.device)
        room = device.rooms[request.domain]
        self._check_attach(device, request)
        waiter = Waiter(ticket=ticket, request=request, peer=peer)
        if request.fence_token is not None:
            return self._attach_save(device, waiter, request.fence_token)
        self._check_incarnation(device, room, request)
        # One more waiter unblocks no other, so only the new one is answered.
        effects = device.answer(room, waiter, self.fences)
        if not effects:
            Shares(WAITING, "clients that wait", device.waiting).check(peer)
            room.enqueue(waiter)
        return effects

    def forget(self, ticket: int, device: str, domain: MemoryDomain) -> list[Effect]:
        """Remove a client that stopped waiting from the queue."""
        table = self.device(device)
        room = table.rooms[domain]
        if ticket not in room.queue:
            return []
        room.dequeue(ticket)
        return self._advance(table)

    def end(self, session: Session, *, unmapped: bool) -> list[Effect]:
        """End a session. `unmapped`: it said that nothing is mapped any more."""
        device, room = self._place(session)
        if room.writer is session:
            room.writer = None
            room.move(LockEvent.WRITER_GONE)
        else:
            del room.readers[session.id]
            room.move(LockEvent.READER_GONE if room.readers else LockEvent.LAST_READER_GONE)
        effects: list[Effect] = []
        if unmapped or not session.imports:
            effects += device.let_go(session)
        else:
            device.lingering[session.id] = session
            if session.use is not Use.READING:
                room.vanished[session.id] = session
        layout, session.layout = session.layout, None
        effects += device.release(layout)
        if session.role is Role.SAVE:
            effects += self._end_save(device, session, finished=unmapped)
        return effects + self._advance(device)

    def importers_gone(self, session: Session) -> list[Effect]:
        """Handle the end of the process of a lingering session."""
        device, room = self._place(session)
        if device.lingering.pop(session.id, None) is None:
            return []
        room.vanished.pop(session.id, None)
        return device.let_go(session) + self._advance(device)

    def has_others(self, session: Session) -> bool:
        """Whether other sessions of the device, also ended ones, may give up memory."""
        device, _ = self._place(session)
        return any(user is not session for user in device.users)

    # What a session asks for.

    def check_allocate(self, session: Session, specs: Sequence[AllocationSpec]) -> list[int]:
        """Return the aligned sizes to create. InvalidTransition, LayoutConflict."""
        layout = self._use(session, Operation.ALLOCATE)
        layout.check_new(specs)
        device, _ = self._place(session)
        return [aligned(spec.size, device.granularity) for spec in specs]

    def allocate(
        self, session: Session, specs: Sequence[AllocationSpec], handles: Sequence[int]
    ) -> list[AllocationInfo]:
        """Add allocations that were created to the layout being written."""
        sizes = self.check_allocate(session, specs)
        layout = self._use(session, Operation.ALLOCATE)
        made = [
            Allocation(spec.id, spec.size, size, spec.tag, handle)
            for spec, size, handle in zip(specs, sizes, handles, strict=True)
        ]
        for allocation in made:
            layout.add(allocation)
        return list(layout.infos(made))

    def export(
        self, session: Session, ids: Sequence[str], access: Access
    ) -> tuple[list[Allocation], list[AllocationInfo]]:
        """Return allocations to export; the session counts as their importer from here on."""
        operation = Operation.EXPORT_RW if access is Access.RW else Operation.EXPORT_RO
        layout = self._use(session, operation)
        found = layout.find(ids)
        for allocation in found:
            allocation.importers.add(session.id)
            session.imports.add(allocation)
        return found, list(layout.infos(found))

    def free(self, session: Session, ids: Sequence[str]) -> list[Effect]:
        """Free allocations of the layout being written; only its writer can have imported them."""
        taken = self._use(session, Operation.FREE).remove(ids)
        device, _ = self._place(session)
        session.imports.difference_update(taken)
        return [Freed(device.uuid, tuple(allocation.handle for allocation in taken))]

    def put_metadata(self, session: Session, entries: Sequence[MetadataItem]) -> None:
        """Add or replace metadata of the layout being written."""
        self._use(session, Operation.METADATA_PUT).put(entries)

    def get_metadata(
        self, session: Session, keys: Sequence[str] | None, prefix: str = ""
    ) -> list[MetadataItem]:
        """Read metadata of the session's layout."""
        return self._use(session, Operation.METADATA_GET).get(keys, prefix)

    def allocations(self, session: Session) -> Iterator[AllocationInfo]:
        """List the session's layout."""
        return self._use(session, Operation.LIST).infos()

    def check_commit(self, session: Session, request: Commit) -> Layout:
        """Return the layout that would be committed. InvalidTransition, GenerationMismatch."""
        layout = self._use(session, _commit_of(request))
        device, room = self._place(session)
        self._check_commit(device, session, layout, request)
        check_generation(device.uuid, request.if_match, room.generation)
        return layout

    def commit(
        self, session: Session, request: Commit, shape: str
    ) -> tuple[LayoutRef, list[Effect]]:
        """Publish the layout being written, or stage it hidden. Generation 0 means hidden.

        `shape` is its structure hash.
        """
        layout = self.check_commit(session, request)
        device, room = self._place(session)
        session.use = USES.next(session.use, _commit_of(request))
        if request.hidden:
            return self._stage(device, session, layout, request, shape), []
        room.move(LockEvent.COMMIT)
        room.writer = None
        room.readers[session.id] = session
        ref, effects = device.install(self.incarnation, layout, request.layout_id, shape)
        return ref, effects + self._advance(device)

    # What the node's orders ask for.

    def publish(self, uuid: str, load_token: str) -> tuple[LayoutRef, list[Effect]]:
        """Make the layout that a load left hidden the committed one. A repeat has no effect."""
        device = self.device(uuid)
        if known := self._published.get((uuid, load_token)):
            return known, []
        hidden = device.hidden.get(load_token)
        if hidden is None:
            raise LoadLost(
                f"nothing that was loaded waits on {uuid}: the GPU memory service was restarted",
                device=uuid,
                token=load_token,
            )
        if self.fences.on(uuid):
            raise Fenced(f"a capture holds {uuid}", device=uuid)
        check_generation(device.uuid, hidden.base, device.weights.generation)
        device.weights.move(LockEvent.PUBLISH)
        del device.hidden[load_token]
        ref, effects = device.install(
            self.incarnation, hidden.layout, hidden.layout_id, hidden.structure_hash
        )
        _remember(self._published, (uuid, load_token), ref)
        return ref, effects + self._advance(device)

    def drop_hidden(self, uuid: str, load_token: str) -> list[Effect]:
        """Forget what a load left hidden, and refuse the token from now on.

        What was published under it is freed too when it is still committed and not in use.
        """
        device = self.device(uuid)
        _remember(self._dropped, (uuid, load_token), None)
        if hidden := device.hidden.pop(load_token, None):
            return device.release(hidden.layout) + self._advance(device)
        published = self._published.get((uuid, load_token))
        if published is None or device.weights.committed is None:
            return []
        if device.weights.committed.ref != published:
            return []
        return self.drop_layout(uuid, published.layout_id)[1]

    def drop_layout(self, uuid: str, layout_id: str | None) -> tuple[bool, list[Effect]]:
        """Free the committed layout. StaleLayout, NotEligible while sessions use it, Fenced."""
        device = self.device(uuid)
        layout = device.weights.committed
        if layout is None or layout.ref is None:
            return False, []
        if layout_id not in (None, layout.ref.layout_id):
            raise StaleLayout(
                f"{uuid} holds layout {layout.ref.layout_id}, and not {layout_id}",
                next_step="see what is committed: gms status",
                expected=layout_id,
                found=layout.ref.layout_id,
            )
        if self.fences.on(uuid):
            raise Fenced(
                f"a capture holds {uuid}",
                next_step="wait for the end of the capture, which gms status shows",
                device=uuid,
            )
        if users := [session.name for session in device.weights.sessions]:
            raise NotEligible(
                f"the layout of {uuid} is in use by {', '.join(users)}",
                next_step="put them to sleep or end them, and try again",
                users=users,
            )
        device.weights.move(LockEvent.DROP)
        device.weights.committed = None
        return True, device.release(layout) + self._advance(device)

    def loaded(self, uuid: str, load_token: str) -> Hidden | LayoutRef | None:
        """Return the outcome of a load: hidden, published or None."""
        return self.device(uuid).hidden.get(load_token) or self._published.get((uuid, load_token))

    # Fences.

    def fence(self, token: str, devices: tuple[str, ...]) -> list[Effect]:
        """Request a fence, which may be held already. LayoutConflict, Superseded."""
        tables = [self.device(uuid) for uuid in devices]
        fence = self.fences.begin(token, devices)
        if not fence.is_pending:
            return [FenceHeld(token, tuple(fence.vector))]
        return self._advance(tables[0])

    def end_fence(self, token: str) -> list[Effect]:
        """End a fence: asked for, at its deadline, or because waiting took too long."""
        fence = self.fences.end(token)
        if fence is None:
            return []
        return [FenceEnded(token), *self._advance_all(fence)]

    def blockers(self, token: str) -> list[str]:
        """Name the sessions that a pending fence waits for."""
        fence = self.fences.active.get(token)
        if fence is None:
            return []
        users = [user for uuid in fence.devices for user in self.devices[uuid].users]
        return [user.name for user in users]

    # How it is done.

    def _place(self, session: Session) -> tuple[DeviceTable, Room]:
        device = self.devices[session.request.device]
        return device, device.rooms[session.request.domain]

    def _use(self, session: Session, operation: Operation) -> Layout:
        USES.next(session.use, operation)
        if session.layout is None:
            raise NotEligible("the session has no layout any more")
        return session.layout

    def _check_attach(self, device: DeviceTable, request: Attach) -> None:
        is_write = request.lock is LockMode.RW
        if request.domain is MemoryDomain.KV and request.lock is LockMode.RO:
            raise Forbidden("the kv domain is never committed, so it cannot be read")
        if request.fence_token is not None and (
            request.lock is not LockMode.RO or request.load_token is not None
        ):
            raise InvalidMessage("a fence token goes with the lock RO alone")
        if request.load_token is None:
            return
        if not is_write or request.domain is not MemoryDomain.WEIGHTS:
            raise InvalidMessage("a load token goes with the lock RW on weights")
        if (device.uuid, request.load_token) in self._dropped:
            raise Superseded("this load was dropped", token=request.load_token)
        if self.loaded(device.uuid, request.load_token):
            raise LayoutConflict(
                "a layout was loaded under this token already", token=request.load_token
            )

    def _check_incarnation(self, device: DeviceTable, room: Room, request: Attach) -> None:
        """Raise StaleLayout for a reader whose layout was lost with an earlier server.

        A restored reader does not know which server that was. A writer or a load may bring the
        layout back, so the reader then waits.
        """
        known = request.incarnation
        if known in (UNSET, self.incarnation) or request.lock is not LockMode.RO:
            return
        is_coming = (
            room.writer
            or device.hidden
            or any(w.lock_request in _WRITES for w in room.queue.values())
        )
        if room.committed is None and not is_coming:
            before = f"by incarnation {known}" if known else "elsewhere or by an earlier one"
            raise StaleLayout(
                f"{device.uuid} was served {before}, now by incarnation {self.incarnation}: the "
                "layout is lost, and no client loads one",
                next_step="close this pool, connect again and load the weights",
                expected=known,
                found=self.incarnation,
            )

    def _attach_save(self, device: DeviceTable, waiter: Waiter, token: str) -> list[Effect]:
        fence = self.fences.active.get(token)
        phase = (
            FencePhase.ENDED if fence is None else fence.phases.get(device.uuid, FencePhase.ENDED)
        )
        if fence is None or phase not in (FencePhase.HELD, FencePhase.LEASED):
            raise HoldDeadline(
                f"no fence with this token is held on {device.uuid}: the capture was aborted, ran "
                "out of time, or the GPU memory service was restarted and its memory is lost",
                device=device.uuid,
                phase=phase.value,
            )
        if device.uuid in fence.savers:
            raise LayoutConflict(f"{device.uuid} is being saved already", device=device.uuid)
        granted = device.grant(waiter, LockDecision.READ)
        fence.move(device.uuid, FenceEvent.LEASED)
        fence.savers[device.uuid] = waiter.ticket
        return [*granted, *self._advance(device)]

    def _end_save(self, device: DeviceTable, session: Session, *, finished: bool) -> list[Effect]:
        fence = self.fences.active.get(session.request.fence_token or "")
        if fence is None or fence.savers.pop(device.uuid, None) is None:
            return []
        if fence.phases[device.uuid] is FencePhase.ENDED:
            return []
        fence.move(device.uuid, FenceEvent.SAVED if finished else FenceEvent.SAVE_LOST)
        return [FenceEnded(fence.token)] if self.fences.finish(fence) else []

    def saved(self, uuid: str, token: str) -> list[Effect]:
        """End the fence of a device whose part is written, also when no session has done that.

        A save that was killed after its last byte is not done again, so no other session comes.
        """
        device, fence = self.device(uuid), self.fences.active.get(token)
        is_left = fence is not None and fence.phases.get(uuid) is FencePhase.LEASED
        if fence is None or not is_left or uuid in fence.savers:
            return []
        fence.move(uuid, FenceEvent.SAVED)
        ended: list[Effect] = [FenceEnded(token)] if self.fences.finish(fence) else []
        return [*ended, *self._advance(device)]

    def _check_commit(
        self, device: DeviceTable, session: Session, layout: Layout, request: Commit
    ) -> None:
        if session.request.domain is MemoryDomain.KV:
            raise Forbidden("the kv domain is never committed")
        if request.hidden != (session.role is Role.LOAD):
            raise InvalidMessage("a loader commits hidden, and no other client does")
        if not layout.allocations:
            raise NotEligible("the layout has no allocations")
        if request.hidden and not request.layout_id:
            raise InvalidMessage("a hidden layout needs its layout id")
        if (device.uuid, session.request.load_token) in self._dropped:
            raise Superseded("this load was dropped", token=session.request.load_token)

    def _stage(
        self, device: DeviceTable, session: Session, layout: Layout, request: Commit, shape: str
    ) -> LayoutRef:
        layout_id, token = request.layout_id or "", session.request.load_token or ""
        session.layout = None
        device.hidden[token] = Hidden(
            layout=layout, layout_id=layout_id, structure_hash=shape, base=request.if_match
        )
        return device.ref(self.incarnation, layout, layout_id, shape)

    def _advance(self, device: DeviceTable) -> list[Effect]:
        """Return the effects of everything that has become possible on a device."""
        effects = self._advance_fence(device)
        for room in device.rooms.values():
            effects += device.serve(room, self.fences)
        return effects

    def _advance_all(self, fence: Fence) -> list[Effect]:
        return [effect for uuid in fence.devices for effect in self._advance(self.devices[uuid])]

    def _advance_fence(self, device: DeviceTable) -> list[Effect]:
        fence = self.fences.on(device.uuid)
        if fence is None or not fence.is_pending:
            return []
        tables = [self.devices[uuid] for uuid in fence.devices]
        if any(table.users for table in tables):
            return []
        vector = [t.weights.committed.ref for t in tables if t.weights.committed]
        for table in tables:
            fence.move(table.uuid, FenceEvent.DRAINED)
            if table.weights.committed is None:
                # No save will end it there.
                fence.move(table.uuid, FenceEvent.OVER)
        fence.vector = [ref for ref in vector if ref is not None]
        effects: list[Effect] = [FenceHeld(fence.token, tuple(fence.vector))]
        if self.fences.finish(fence):
            effects.append(FenceEnded(fence.token))
        return [*effects, *self._advance_all(fence)]


def _commit_of(request: Commit) -> Operation:
    return Operation.COMMIT_HIDDEN if request.hidden else Operation.COMMIT


def _remember(book: OrderedDict[K, V], key: K, value: V) -> None:
    book[key] = value
    while len(book) > _REMEMBERED:
        book.popitem(last=False)
