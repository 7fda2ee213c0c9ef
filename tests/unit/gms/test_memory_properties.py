"""Whatever clients, captures and loaders do in whatever order: the rules hold."""

from __future__ import annotations

import itertools
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from gms.domain import sessions
from gms.domain.fence import FencePhase
from gms.domain.locks import LockDecision, LockRequest, Use, decide
from gms.domain.memory_table import MemoryTable
from snapback_client import frames
from snapshot_shared.errors import SnapbackError
from snapshot_shared.orders import LayoutRef
from tests.unit.gms.test_memory_table import MEANING

DEVICES = ("GPU-a", "GPU-b")
SHAPE = "the structure hash of every layout here"
WRONG = frames.GenerationRef(incarnation="inc", generation=77)
TOKENS = tuple(f"t{number}" for number in range(12))

devices = st.sampled_from(DEVICES)
tokens = st.sampled_from(TOKENS)


class AnyOrderOfEvents(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.table = MemoryTable("inc", [(device, 16) for device in DEVICES])
        self.counter = itertools.count(1)
        self.handles = itertools.count(1)
        self.created: set[int] = set()
        self.freed: set[int] = set()
        self.mapped: dict[int, set[int]] = {}
        self.waiting: dict[int, frames.Attach] = {}
        self.sessions: dict[int, sessions.Session] = {}
        self.vanished: dict[int, sessions.Session] = {}
        self.held: dict[str, tuple[LayoutRef, ...]] = {}
        self.newest = dict.fromkeys(DEVICES, 0)

    # What happens.

    def take(self, effects: list[sessions.Effect]) -> None:
        for effect in effects:
            match effect:
                case sessions.Granted(ticket, session):
                    self.check_grant(session)
                    self.waiting.pop(ticket, None)
                    self.sessions[ticket] = session
                case sessions.Refused(ticket, _):
                    del self.waiting[ticket]
                case sessions.Freed(_, handles):
                    self.check_freed(set(handles))
                    self.freed |= set(handles)
                case sessions.FenceHeld(token, vector):
                    self.held[token] = vector
                case sessions.FenceEnded(token):
                    self.held.pop(token, None)

    def check_grant(self, session: sessions.Session) -> None:
        phase = self.table.fences.phase(session.request.device)
        if session.access is frames.Access.RW:
            request = session.request
            assert not self.vanished_writers(request.device, request.domain, session.peer.pid)
        if session.request.fence_token is not None:
            assert phase is FencePhase.LEASED or session.request.fence_token in self.held
            return
        assert phase not in (FencePhase.PENDING, FencePhase.HELD)
        if phase is FencePhase.LEASED and session.request.domain is frames.MemoryDomain.WEIGHTS:
            assert session.access is frames.Access.RO

    def check_freed(self, handles: set[int]) -> None:
        assert handles <= self.created
        assert not handles & self.freed, "freed twice"
        for mapped in self.mapped.values():
            assert not handles & mapped, "freed while a process may have it mapped"

    @rule(
        device=devices,
        domain=st.sampled_from(frames.MemoryDomain),
        lock=st.sampled_from(frames.LockMode),
        replace=st.booleans(),
        right=st.booleans(),
        load=st.one_of(st.none(), tokens),
    )
    def attach(
        self,
        device: str,
        domain: frames.MemoryDomain,
        lock: frames.LockMode,
        replace: bool,
        right: bool,
        load: str | None,
    ) -> None:
        current = self.table.devices[device].rooms[domain].generation
        base = current if right else WRONG
        self._attach(device, lock, domain, replace=replace, if_match=base, load_token=load)

    @rule(device=devices)
    def build(self, device: str) -> None:
        """Take a device through a whole cold start, so that the rest has something to work on."""
        before = set(self.sessions)
        current = self.table.devices[device].weights.generation
        self._attach(device, frames.LockMode.RW, if_match=current)
        for ticket in set(self.sessions) - before:
            session = self.sessions[ticket]
            if session.use is not Use.WRITING:
                continue
            handle = next(self.handles)
            self.created.add(handle)
            self.table.allocate(session, [frames.AllocationSpec(id="w", size=9)], [handle])
            self.take(self.table.commit(session, frames.Commit(if_match=current), SHAPE)[1])
            del self.sessions[ticket]
            self.take(self.table.end(session, unmapped=True))

    @rule(device=devices)
    def everybody_leaves(self, device: str) -> None:
        for session in list(self.sessions.values()):
            if session.request.device == device:
                del self.sessions[session.id]
                self.mapped.pop(session.id, None)
                self.take(self.table.end(session, unmapped=True))

    @precondition(lambda self: any(self.held.values()))
    @rule(data=st.data())
    def save_begins(self, data: st.DataObject) -> None:
        token = data.draw(st.sampled_from(sorted(filter(self.held.get, self.held))))
        self.attach_save(data.draw(st.sampled_from(self.held[token])).device, token)

    @rule(device=devices, token=tokens)
    def load(self, device: str, token: str) -> None:
        before = set(self.sessions)
        self.attach(device, frames.MemoryDomain.WEIGHTS, frames.LockMode.RW, False, True, token)
        for ticket in set(self.sessions) - before:
            session = self.sessions[ticket]
            if session.request.load_token != token:
                continue
            handle = next(self.handles)
            self.created.add(handle)
            self.table.allocate(session, [frames.AllocationSpec(id="w", size=9)], [handle])
            request = frames.Commit(if_match=session.request.if_match, hidden=True, layout_id="l")
            with suppress(SnapbackError):
                self.take(self.table.commit(session, request, SHAPE)[1])

    @rule(device=devices, token=tokens)
    def attach_save(self, device: str, token: str) -> None:
        self._attach(device, frames.LockMode.RO, fence_token=token)

    def _attach(
        self,
        device: str,
        lock: frames.LockMode,
        domain: frames.MemoryDomain = frames.MemoryDomain.WEIGHTS,
        **fields: Any,
    ) -> None:
        request = frames.Attach(device=device, domain=domain, lock=lock, deadline_s=1, **fields)
        ticket = next(self.counter)
        self.waiting[ticket] = request
        try:
            self.take(self.table.attach(ticket, request, sessions.Peer(pid=ticket % 3, uid=0)))
        except SnapbackError:
            del self.waiting[ticket]

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def give_up(self, data: st.DataObject) -> None:
        ticket = data.draw(st.sampled_from(sorted(self.waiting)))
        request = self.waiting.pop(ticket)
        self.take(self.table.forget(ticket, request.device, request.domain))

    @precondition(lambda self: self.sessions)
    @rule(data=st.data(), number=st.integers(1, 3))
    def allocate(self, data: st.DataObject, number: int) -> None:
        session = self._pick(data)
        specs = [frames.AllocationSpec(id=f"a{next(self.counter)}", size=9) for _ in range(number)]
        with suppress(SnapbackError):
            self.table.check_allocate(session, specs)
            handles = [next(self.handles) for _ in specs]
            self.table.allocate(session, specs, handles)
            self.created |= set(handles)

    @precondition(lambda self: self.sessions)
    @rule(data=st.data(), access=st.sampled_from(frames.Access))
    def export(self, data: st.DataObject, access: frames.Access) -> None:
        session = self._pick(data)
        if session.layout is None:
            return
        with suppress(SnapbackError):
            found, _ = self.table.export(session, list(session.layout.allocations), access)
            self.mapped.setdefault(session.id, set()).update(a.handle for a in found)

    @precondition(lambda self: self.sessions)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        session = self._pick(data)
        if session.use is not Use.WRITING or not session.layout or not session.layout.allocations:
            return
        name, allocation = next(iter(session.layout.allocations.items()))
        # A client unmaps before it frees.
        self.mapped.get(session.id, set()).discard(allocation.handle)
        self.take(self.table.free(session, [name]))

    @precondition(lambda self: self.sessions)
    @rule(data=st.data(), right=st.booleans())
    def commit(self, data: st.DataObject, right: bool) -> None:
        session = self._pick(data)
        room = self.table.devices[session.request.device].weights
        request = frames.Commit(
            if_match=room.generation if right else WRONG,
            hidden=session.request.load_token is not None,
            layout_id="l",
        )
        with suppress(SnapbackError):
            _, effects = self.table.commit(session, request, SHAPE)
            self.take(effects)
            assert right

    @precondition(lambda self: self.sessions)
    @rule(data=st.data(), unmapped=st.booleans())
    def end(self, data: st.DataObject, unmapped: bool) -> None:
        session = self._pick(data)
        del self.sessions[session.id]
        if unmapped:
            self.mapped.pop(session.id, None)
        else:
            self.vanished[session.id] = session
        self.take(self.table.end(session, unmapped=unmapped))

    @precondition(lambda self: self.vanished)
    @rule(data=st.data())
    def process_ends(self, data: st.DataObject) -> None:
        ticket = data.draw(st.sampled_from(sorted(self.vanished)))
        self.mapped.pop(ticket, None)
        self.take(self.table.importers_gone(self.vanished.pop(ticket)))

    @rule(token=tokens, chosen=st.sets(devices, min_size=1))
    def fence(self, token: str, chosen: set[str]) -> None:
        with suppress(SnapbackError):
            self.take(self.table.fence(token, tuple(sorted(chosen))))

    @rule(token=tokens)
    def unfence(self, token: str) -> None:
        self.take(self.table.end_fence(token))

    @rule(device=devices, token=tokens)
    def publish(self, device: str, token: str) -> None:
        with suppress(SnapbackError):
            self.take(self.table.publish(device, token)[1])

    @rule(device=devices, token=tokens)
    def drop_hidden(self, device: str, token: str) -> None:
        with suppress(SnapbackError):
            self.take(self.table.drop_hidden(device, token))

    @rule(device=devices)
    def drop_layout(self, device: str) -> None:
        with suppress(SnapbackError):
            self.take(self.table.drop_layout(device, None)[1])

    def _pick(self, data: st.DataObject) -> sessions.Session:
        return self.sessions[data.draw(st.sampled_from(sorted(self.sessions)))]

    def vanished_writers(
        self, device: str, domain: frames.MemoryDomain, pid: int
    ) -> list[sessions.Session]:
        """Those whose processes, other than this one, may still write to what they mapped."""
        return [
            session
            for session in self.vanished.values()
            if session.use is not Use.READING
            and self.mapped.get(session.id)
            and (session.request.device, session.request.domain) == (device, domain)
            and (session.peer.pid == 0 or session.peer.pid != pid)
        ]

    # What always holds.

    @invariant()
    def the_lock_says_what_holds(self) -> None:
        for device in self.table.devices.values():
            for room in device.rooms.values():
                found = (room.writer is not None, room.committed is not None, bool(room.readers))
                assert found == MEANING[room.lock]

    @invariant()
    def sessions_are_those_that_were_granted(self) -> None:
        known = {
            s.id for d in self.table.devices.values() for r in d.rooms.values() for s in r.sessions
        }
        assert known == set(self.sessions)

    @invariant()
    def exactly_the_memory_that_no_process_can_reach_is_free(self) -> None:
        reachable: set[int] = set()
        for device in self.table.devices.values():
            layouts = [room.committed for room in device.rooms.values()]
            layouts += [hidden.layout for hidden in device.hidden.values()]
            layouts += [s.layout for r in device.rooms.values() for s in r.sessions]
            for layout in layouts:
                reachable |= {a.handle for a in layout.allocations.values()} if layout else set()
        for mapped in self.mapped.values():
            reachable |= mapped
        assert self.created - self.freed == reachable

    @invariant()
    def generations_only_grow(self) -> None:
        for uuid, device in self.table.devices.items():
            if device.weights.generation:
                assert device.weights.generation.generation >= self.newest[uuid]
                self.newest[uuid] = device.weights.generation.generation
            assert device.rooms[frames.MemoryDomain.KV].committed is None

    @invariant()
    def a_fenced_layout_does_not_change(self) -> None:
        for token, vector in self.held.items():
            fence = self.table.fences.active[token]
            for ref in vector:
                if fence.phases[ref.device] is FencePhase.ENDED:
                    continue
                layout = self.table.devices[ref.device].weights.committed
                assert layout is not None
                assert layout.ref == ref
                assert self.table.devices[ref.device].weights.writer is None

    @invariant()
    def a_held_fence_has_the_device_for_itself(self) -> None:
        for uuid, device in self.table.devices.items():
            if self.table.fences.phase(uuid) is FencePhase.HELD:
                assert device.users == []

    @invariant()
    def no_client_waits_that_could_continue(self) -> None:
        for uuid, device in self.table.devices.items():
            for room in device.rooms.values():
                for waiter in room.queue.values():
                    if not self.table.fences.admits(uuid, room.domain, waiter.lock_request):
                        continue
                    answer = decide(
                        room.lock, waiter.lock_request, replacer_waits=room.replacer_waits
                    )
                    if answer is LockDecision.WRITE:
                        assert self.vanished_writers(uuid, room.domain, waiter.peer.pid)
                        answer = LockDecision.WAIT
                    assert answer is LockDecision.WAIT
                    if waiter.lock_request in (LockRequest.WRITE, LockRequest.REPLACE):
                        assert waiter.request.if_match == room.generation

    @invariant()
    def everybody_who_was_not_answered_is_still_in_a_queue(self) -> None:
        queued = {
            ticket
            for device in self.table.devices.values()
            for room in device.rooms.values()
            for ticket in room.queue
        }
        assert queued == set(self.waiting)


TestAnyOrderOfEvents = AnyOrderOfEvents.TestCase
TestAnyOrderOfEvents.settings = settings(max_examples=60, stateful_step_count=50, deadline=None)


@pytest.mark.slow
class TestManyOrdersOfEvents(AnyOrderOfEvents.TestCase):
    settings = settings(max_examples=400, stateful_step_count=50, deadline=None)
