"""One device: its two domains, the layouts in its memory, and what can be freed when.

Memory is free only when no layout holds it and every importer has let go, as the driver rules.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from gms.domain.fence import FenceBook
from gms.domain.layout import Allocation, Layout
from gms.domain.locks import LockDecision, LockEvent, LockRequest, Use, decide
from gms.domain.sessions import (
    Effect,
    Freed,
    Granted,
    Hidden,
    Peer,
    Refused,
    Role,
    Room,
    Session,
    Waiter,
)
from snapback_client.frames import Attach, GenerationRef, MemoryDomain
from snapshot_shared.errors import GenerationMismatch
from snapshot_shared.ids import derived_uid
from snapshot_shared.orders import LayoutRef


@dataclass(eq=False, slots=True)
class DeviceTable:
    """The state of one device.

    `lingering` sessions ended without Detach while their process lives: it may still have
    mappings. `retired` allocations belong to no layout and wait for such importers.
    """

    uuid: str
    granularity: int
    rooms: dict[MemoryDomain, Room]
    hidden: dict[str, Hidden] = field(default_factory=dict)
    lingering: dict[int, Session] = field(default_factory=dict)
    retired: set[Allocation] = field(default_factory=set)
    generation: int = 0

    @classmethod
    def empty(cls, uuid: str, granularity: int) -> DeviceTable:
        """Return the state of a device with nothing allocated."""
        return cls(uuid, granularity, {domain: Room(domain) for domain in MemoryDomain})

    @property
    def weights(self) -> Room:
        """The domain that is committed, saved and loaded."""
        return self.rooms[MemoryDomain.WEIGHTS]

    @property
    def users(self) -> list[Session]:
        """Every session that may have something mapped."""
        return [*(s for r in self.rooms.values() for s in r.sessions), *self.lingering.values()]

    @property
    def waiting(self) -> list[Peer]:
        """Every process that waits for a lock, once for each."""
        return [waiter.peer for room in self.rooms.values() for waiter in room.queue.values()]

    def serve(self, room: Room, fences: FenceBook) -> list[Effect]:
        """Grant or refuse what waits, first come first served, until nothing more can move."""
        effects: list[Effect] = []
        moved = True
        while moved:
            moved = False
            for waiter in list(room.queue.values()):
                answer = self.answer(room, waiter, fences)
                moved = moved or bool(answer)
                effects += answer
        return effects

    def answer(self, room: Room, waiter: Waiter, fences: FenceBook) -> list[Effect]:
        """Grant or refuse what one client waits for; nothing while it has to wait."""
        if waiter.lock_request in (LockRequest.WRITE, LockRequest.REPLACE):
            try:
                check_generation(self.uuid, waiter.request.if_match, room.generation)
            except GenerationMismatch as error:
                room.dequeue(waiter.ticket)
                return [Refused(waiter.ticket, error)]
        if not fences.admits(self.uuid, room.domain, waiter.lock_request):
            return []
        answer = self.decision_on(room, waiter)
        if answer is LockDecision.WAIT:
            return []
        room.dequeue(waiter.ticket)
        return self.grant(waiter, answer)

    def decision_on(self, room: Room, waiter: Waiter) -> LockDecision:
        """Decide about a waiter that no fence holds up.

        A writer waits for the end of the process of an earlier one that vanished.
        """
        answer = decide(room.lock, waiter.lock_request, replacer_waits=room.replacer_waits)
        is_blocked = answer is LockDecision.WRITE and self.vanished_writers(
            room.domain, waiter.peer
        )
        return LockDecision.WAIT if is_blocked else answer

    def vanished_writers(self, domain: MemoryDomain, peer: Peer) -> list[Session]:
        """Return the writers that ended without Detach and whose process may still write.

        Such a process is not blocked by its own earlier session.
        """
        return [
            session
            for session in self.rooms[domain].vanished.values()
            if not session.peer.is_same(peer)
        ]

    def grant(self, waiter: Waiter, answer: LockDecision) -> list[Effect]:
        """Turn a waiter into a session."""
        room = self.rooms[waiter.request.domain]
        base = room.committed
        is_write = answer is LockDecision.WRITE
        is_replace = is_write and waiter.lock_request is LockRequest.REPLACE
        session = Session(
            id=waiter.ticket,
            request=waiter.request,
            peer=waiter.peer,
            use=Use.WRITING if is_write else Use.READING,
            role=_role(waiter.request),
            layout=Layout() if is_write else base,
            base=base.ref if base and not is_replace else None,
        )
        effects: list[Effect] = [Granted(waiter.ticket, session)]
        if not is_write:
            room.move(LockEvent.READ)
            room.readers[session.id] = session
            return effects
        room.move(LockEvent.REPLACE if is_replace else LockEvent.WRITE)
        room.writer = session
        if is_replace:
            room.committed = None
            effects += self.release(base)
        return effects

    def ref(self, incarnation: str, layout: Layout, layout_id: str, shape: str) -> LayoutRef:
        """Describe a layout that has no generation."""
        return LayoutRef(
            device=self.uuid,
            incarnation=incarnation,
            generation=0,
            layout_id=layout_id,
            structure_hash=shape,
            bytes=layout.bytes,
        )

    def install(
        self, incarnation: str, layout: Layout, layout_id: str | None, shape: str
    ) -> tuple[LayoutRef, list[Effect]]:
        """Make a layout the committed one, with the next generation. The old one is let go."""
        self.generation += 1
        layout.ref = LayoutRef(
            device=self.uuid,
            incarnation=incarnation,
            generation=self.generation,
            layout_id=layout_id or derived_uid(incarnation, self.uuid, str(self.generation)),
            structure_hash=shape,
            bytes=layout.bytes,
        )
        old, self.weights.committed = self.weights.committed, layout
        return layout.ref, self.release(old)

    def release(self, layout: Layout | None) -> list[Effect]:
        """Free a layout that nothing holds any more, as far as its importers allow."""
        if layout is None:
            return []
        holders = [room.committed for room in self.rooms.values()]
        holders += [hidden.layout for hidden in self.hidden.values()]
        holders += [session.layout for room in self.rooms.values() for session in room.sessions]
        if any(holder is layout for holder in holders):
            return []
        free: list[int] = []
        for allocation in layout.allocations.values():
            if allocation.importers:
                # As CUDA rules: memory is free when the last import is unmapped.
                self.retired.add(allocation)
            else:
                free.append(allocation.handle)
        return self._freed(free)

    def let_go(self, session: Session) -> list[Effect]:
        """Remove a session from the importers of everything that was exported to it."""
        free: list[int] = []
        for allocation in session.imports:
            allocation.importers.discard(session.id)
            if not allocation.importers and allocation in self.retired:
                self.retired.remove(allocation)
                free.append(allocation.handle)
        session.imports.clear()
        return self._freed(free)

    def _freed(self, handles: list[int]) -> list[Effect]:
        return [Freed(self.uuid, tuple(handles))] if handles else []


def check_generation(uuid: str, wanted: GenerationRef | None, found: GenerationRef | None) -> None:
    """Compare what a writer wants to replace with what is committed. GenerationMismatch."""
    if wanted == found:
        return
    step = "read the committed generation and decide again whether to replace it"
    if wanted is None:
        step = (
            "put all arrays of a device into one pool, or attach as a reader; if no worker needs "
            f"what is committed, free it: gms drop --device {uuid}"
        )
    raise GenerationMismatch(
        f"if_match names {_named(wanted)}, committed is {_named(found)}",
        next_step=step,
        expected=_named(wanted),
        found=_named(found),
    )


def _named(ref: GenerationRef | None) -> str:
    return "nothing" if ref is None else f"generation {ref.generation} of {ref.incarnation}"


def _role(request: Attach) -> Role:
    if request.fence_token is not None:
        return Role.SAVE
    return Role.ENGINE if request.load_token is None else Role.LOAD
