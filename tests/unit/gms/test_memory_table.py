"""The memory table: who is admitted, what is published, what is freed, what a fence holds."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest

from gms.domain import usage
from gms.domain.fence import FencePhase
from gms.domain.locks import (
    LOCK_DECISIONS,
    LOCKS,
    USES,
    Lock,
    LockDecision,
    LockEvent,
    LockRequest,
    Operation,
    Use,
    decide,
    lock_request_of,
)
from gms.domain.memory_table import WAITING, MemoryTable
from gms.domain.sessions import (
    Effect,
    FenceEnded,
    FenceHeld,
    Freed,
    Granted,
    Peer,
    Refused,
    Session,
)
from gms.domain.shares import TooManySessions
from snapback_client import frames
from snapshot_shared import errors
from tests.unit.tables import each

A, B = "GPU-a", "GPU-b"
SHAPE = "the structure hash of every layout here"
PEER, OTHER = Peer(pid=7, uid=0), Peer(pid=8, uid=0)
RW, RO, EITHER = frames.LockMode.RW, frames.LockMode.RO, frames.LockMode.RW_OR_RO
WEIGHTS, KV = frames.MemoryDomain.WEIGHTS, frames.MemoryDomain.KV


class World:
    """A table, and everything that its effects have said so far."""

    def __init__(self) -> None:
        self.table = MemoryTable("inc", [(A, 16), (B, 16)])
        self.tickets = itertools.count(1)
        self.handles = itertools.count(100)
        self.effects: list[Effect] = []

    def take(self, effects: list[Effect]) -> list[Effect]:
        self.effects += effects
        return effects

    def ask(
        self, device: str = A, lock: frames.LockMode = RW, *, peer: Peer = PEER, **fields: Any
    ) -> int:
        ticket = next(self.tickets)
        fields = {"domain": WEIGHTS, "deadline_s": 1.0, "client": f"c{ticket}"} | fields
        self.take(
            self.table.attach(ticket, frames.Attach(device=device, lock=lock, **fields), peer)
        )
        return ticket

    def granted(self, ticket: int) -> Session | None:
        found = [e.session for e in self.effects if isinstance(e, Granted) and e.ticket == ticket]
        return found[0] if found else None

    def access(self, ticket: int) -> frames.Access | None:
        """Return what a client may do, or None while it waits."""
        session = self.granted(ticket)
        return session.access if session else None

    def attach(self, device: str = A, lock: frames.LockMode = RW, **fields: Any) -> Session:
        session = self.granted(self.ask(device, lock, **fields))
        assert session is not None, "the lock was not granted at once"
        return session

    def writing(self, device: str = A, **fields: Any) -> Session:
        """Begin to write a layout of one allocation."""
        writer = self.attach(device, **fields)
        self.allocate(writer, "w")
        return writer

    def allocate(self, session: Session, *ids: str) -> list[int]:
        handles = [next(self.handles) for _ in ids]
        self.table.allocate(session, [frames.AllocationSpec(id=i, size=10) for i in ids], handles)
        return handles

    def commit(self, session: Session, **fields: Any) -> frames.GenerationRef:
        ref, effects = self.table.commit(session, frames.Commit(**fields), SHAPE)
        self.take(effects)
        return frames.GenerationRef(incarnation=ref.incarnation, generation=max(1, ref.generation))

    def committed(self, device: str = A) -> frames.GenerationRef:
        """Commit a first layout and leave."""
        writer = self.writing(device)
        ref = self.commit(writer)
        self.end(writer)
        return ref

    def replaced(self, first: frames.GenerationRef) -> Session:
        """Commit another layout, and stay."""
        writer = self.writing(if_match=first)
        self.commit(writer, if_match=first)
        return writer

    def hung_up(self, reader: Session) -> None:
        """Leave with the layout mapped."""
        self.table.export(reader, ["w"], frames.Access.RO)
        self.end(reader, unmapped=False)

    def end(self, session: Session, *, unmapped: bool = True) -> None:
        self.take(self.table.end(session, unmapped=unmapped))

    def fence(self, token: str = "f", *devices: str) -> list[Effect]:
        return self.take(self.table.fence(token, devices or (A,)))

    def freed(self) -> set[int]:
        return {h for e in self.effects if isinstance(e, Freed) for h in e.handles}

    def said(self, kind: type) -> list[Any]:
        return [e for e in self.effects if isinstance(e, kind)]

    def lock(self, device: str = A, domain: frames.MemoryDomain = WEIGHTS) -> Lock:
        return self.table.devices[device].rooms[domain].lock


@pytest.fixture
def world() -> World:
    return World()


# Who waits.


def waiting(world: World, domain: frames.MemoryDomain = WEIGHTS) -> int:
    return len(world.table.devices[A].rooms[domain].queue)


def test_a_process_that_waits_as_often_as_it_may_leaves_room_for_others(world: World) -> None:
    world.attach(lock=RW)
    for _ in range(WAITING["process"]):
        world.ask()
    with pytest.raises(TooManySessions) as refusal:
        world.ask()
    assert refusal.value.values == {"limit": WAITING["process"], "process": PEER.pid}
    assert waiting(world) == WAITING["process"], "who is refused stands in the queue"
    world.ask(peer=OTHER)
    world.ask(B)


def test_a_device_has_an_end_of_those_who_wait_in_both_domains(world: World) -> None:
    writers = [world.attach(domain=domain) for domain in frames.MemoryDomain]
    for number in range(WAITING["all"]):
        world.ask(domain=(WEIGHTS, KV)[number % 2], peer=Peer(pid=100 + number, uid=number))
    with pytest.raises(TooManySessions):
        world.ask(peer=Peer(pid=99, uid=99))
    # A transfer of the service waits all the same.
    ours = world.ask(peer=Peer(pid=98, uid=0, is_ours=True))
    world.end(writers[0])
    assert waiting(world) == WAITING["all"] // 2
    assert world.granted(ours) is None


def test_a_full_queue_refuses_no_client_that_need_not_wait(world: World) -> None:
    ref = world.committed()
    world.attach(lock=RO)
    for _ in range(WAITING["process"]):
        world.ask(replace=True, if_match=ref, domain=WEIGHTS)
    assert world.granted(world.ask(lock=RW, domain=KV)) is not None


def test_a_queue_costs_each_who_waits_the_same_however_long_it_is(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Lock] = []

    def counted(lock: Lock, request: LockRequest, **fields: Any) -> LockDecision:
        asked.append(lock)
        return decide(lock, request, **fields)

    requests = itertools.count()
    monkeypatch.setattr("gms.domain.device.decide", counted)
    monkeypatch.setattr(
        "gms.domain.sessions.lock_request_of",
        lambda lock, replace: (next(requests), lock_request_of(lock, replace=replace))[1],
    )
    ref = world.committed()
    readers = [world.attach(lock=RO) for _ in range(2)]
    for number in range(200):
        before = next(requests)
        asked.clear()
        world.ask(replace=True, if_match=ref, peer=Peer(pid=100 + number, uid=0))
        assert len(asked) == 1, "others are asked again because one more waits"
        assert next(requests) - before < 10
    before = next(requests)
    asked.clear()
    world.end(readers[0])
    assert len(asked) == 200
    assert next(requests) - before < 10 * 200


def test_a_queue_behind_a_vanished_writer_does_not_look_at_readers_that_vanished(
    world: World,
) -> None:
    ref = world.committed()
    for number in range(50):
        reader = world.attach(lock=RO, peer=Peer(pid=100 + number, uid=0))
        world.hung_up(reader)
    writer = vanished_writer(world, if_match=ref, peer=OTHER)

    class Seen(dict[int, Session]):
        looks = 0

        def values(self) -> Any:
            Seen.looks += 1
            return super().values()

    device = world.table.devices[A]
    device.lingering = Seen(device.lingering)
    waiters = [world.ask(if_match=ref, peer=Peer(pid=200 + n, uid=0)) for n in range(20)]
    world.end(world.attach(lock=RO))
    assert Seen.looks <= 1
    assert waiting(world) == 20
    world.take(world.table.importers_gone(writer))
    assert world.granted(waiters[0]) is not None


# Locks and generations.


def test_commit_turns_the_writer_into_a_reader_and_lets_waiting_readers_in(world: World) -> None:
    writer = world.writing()
    waiting = world.ask(lock=RO)
    assert world.granted(waiting) is None
    world.commit(writer)
    reader = world.granted(waiting)
    assert reader is not None
    assert reader.layout is writer.layout
    assert writer.access is frames.Access.RO


def test_readers_keep_the_old_layout_until_the_last_of_them_leaves(world: World) -> None:
    first = world.committed()
    reader = world.attach(lock=RO)
    writer = world.writing(if_match=first)
    second = world.commit(writer, if_match=first)
    assert second.generation == first.generation + 1
    assert world.freed() == set()
    world.end(reader)
    assert world.freed() == {100}
    assert world.attach(lock=RO).layout is writer.layout


def test_a_writer_must_name_what_it_replaces(world: World) -> None:
    world.committed()
    for wrong in (
        None,
        frames.GenerationRef(incarnation="inc", generation=2),
        frames.GenerationRef(incarnation="other", generation=1),
    ):
        ticket = world.ask(if_match=wrong)
        refused = world.said(Refused)[-1]
        assert refused.ticket == ticket
        assert isinstance(refused.error, errors.GenerationMismatch)
        assert refused.error.values["found"] == "generation 1 of inc"
        assert wrong or refused.error.values["expected"] == "nothing"
    assert world.freed() == set()


@pytest.mark.parametrize("commits", [True, False])
def test_a_writer_that_queued_behind_another_is_refused_only_when_that_one_commits(
    world: World, commits: bool
) -> None:
    first = world.writing()
    second = world.ask()
    if commits:
        world.commit(first)
    else:
        world.end(first)
    assert [refused.ticket for refused in world.said(Refused)] == [second] * commits
    assert (world.granted(second) is None) == commits


def test_replace_waits_for_readers_holds_new_ones_back_and_frees_the_old_first(
    world: World,
) -> None:
    first = world.committed()
    reader = world.attach(lock=RO)
    writer = world.ask(if_match=first, replace=True)
    late = [world.ask(lock=RO), world.ask(lock=EITHER)]
    assert world.granted(writer) is None
    assert [world.granted(ticket) for ticket in late] == [None, None]
    world.end(reader)
    assert world.granted(writer) is not None
    assert world.freed() == {100}
    assert [world.granted(ticket) for ticket in late] == [None, None]
    assert world.lock() is Lock.WRITING


def test_the_kv_domain_is_never_committed_nor_read(world: World) -> None:
    writer = world.attach(domain=KV)
    handles = world.allocate(writer, "k")
    with pytest.raises(errors.Forbidden):
        world.commit(writer)
    with pytest.raises(errors.Forbidden):
        world.ask(domain=KV, lock=RO)
    world.end(writer)
    assert world.freed() == set(handles)


def test_an_empty_layout_is_not_committed(world: World) -> None:
    with pytest.raises(errors.NotEligible):
        world.commit(world.attach())


def test_a_reader_cannot_write(world: World) -> None:
    world.committed()
    reader = world.attach(lock=RO)
    with pytest.raises(errors.InvalidTransition):
        world.allocate(reader, "x")
    with pytest.raises(errors.InvalidTransition):
        world.table.export(reader, ["w"], frames.Access.RW)


def test_a_layout_id_is_chosen_or_derived_and_never_the_same_twice(world: World) -> None:
    world.commit(world.writing(), layout_id="mine")
    first = world.table.devices[A].weights
    assert first.committed is not None
    assert first.committed.ref is not None
    assert first.committed.ref.layout_id == "mine"
    derived = set()
    for device in (A, B):
        current = world.table.devices[device].weights.generation
        writer = world.writing(device, if_match=current)
        ref, _ = world.table.commit(writer, frames.Commit(if_match=current), SHAPE)
        derived.add(ref.layout_id)
    assert len(derived) == 2


# Memory goes back.


def test_memory_is_free_only_when_every_importer_has_let_go(world: World) -> None:
    first = world.committed()
    careless, careful = world.attach(lock=RO), world.attach(lock=RO)
    for session in (careless, careful):
        world.table.export(session, ["w"], frames.Access.RO)
    writer = world.replaced(first)
    world.end(careful, unmapped=True)
    world.end(careless, unmapped=False)
    assert world.freed() == set()
    assert [s.id for s in world.table.devices[A].users] == [writer.id, careless.id]
    world.take(world.table.importers_gone(careless))
    assert world.freed() == {100}


def vanished_writer(world: World, **fields: Any) -> Session:
    """A writer that hung up with its memory mapped."""
    writer = world.attach(**fields)
    world.allocate(writer, "a")
    world.table.export(writer, ["a"], frames.Access.RW)
    world.end(writer, unmapped=False)
    return writer


@pytest.mark.parametrize("lock", [RW, EITHER])
def test_the_next_writer_waits_for_the_end_of_one_that_hung_up_and_may_still_write(
    world: World, lock: frames.LockMode
) -> None:
    gone = vanished_writer(world)
    waiter = world.ask(lock=lock, peer=OTHER)
    assert world.granted(waiter) is None
    world.take(world.table.importers_gone(gone))
    assert world.access(waiter) is frames.Access.RW


def test_a_vanished_writer_holds_up_neither_readers_nor_the_other_domain(world: World) -> None:
    ref = world.committed()
    vanished_writer(world, if_match=ref)
    assert world.granted(world.ask(lock=RO, peer=OTHER)) is not None
    assert world.granted(world.ask(lock=EITHER, peer=OTHER)) is not None
    assert world.granted(world.ask(domain=KV, peer=OTHER)) is not None


def test_a_lingering_reader_of_what_is_still_committed_frees_nothing(world: World) -> None:
    world.committed()
    reader = world.attach(lock=RO)
    world.hung_up(reader)
    world.take(world.table.importers_gone(reader))
    world.take(world.table.importers_gone(reader))
    assert world.freed() == set()


def test_a_committed_layout_can_be_dropped_when_no_session_uses_it(world: World) -> None:
    world.committed()
    reader = world.attach(lock=RO)
    with pytest.raises(errors.NotEligible):
        world.table.drop_layout(A, None)
    world.end(reader)
    with pytest.raises(errors.StaleLayout):
        world.table.drop_layout(A, "another")
    dropped, effects = world.table.drop_layout(A, None)
    world.take(effects)
    assert dropped
    assert world.freed() == {100}
    assert world.table.drop_layout(A, None) == (False, [])


# Hidden layouts.


def _load(world: World, token: str = "t", **fields: Any) -> list[int]:
    loader = world.attach(load_token=token, **fields)
    handles = world.allocate(loader, "w")
    world.commit(loader, hidden=True, layout_id="saved", **fields)
    world.end(loader)
    return handles


def test_a_hidden_layout_is_charged_and_served_once_it_is_published(world: World) -> None:
    _load(world)
    waiting = world.ask(lock=RO)
    assert world.granted(waiting) is None
    assert world.freed() == set()
    ref, effects = world.table.publish(A, "t")
    world.take(effects)
    assert ref.layout_id == "saved"
    assert world.granted(waiting) is not None


def test_publishing_twice_gives_the_same_generation(world: World) -> None:
    _load(world)
    first, _ = world.table.publish(A, "t")
    again, effects = world.table.publish(A, "t")
    assert again == first
    assert effects == []


def test_publishing_what_is_not_loaded_is_refused_and_may_be_tried_again(world: World) -> None:
    with pytest.raises(errors.LoadLost) as caught:
        world.table.publish(A, "t")
    assert caught.value.retryable


def test_a_hidden_layout_is_published_only_over_what_it_was_loaded_for(world: World) -> None:
    first = world.committed()
    _load(world, if_match=first)
    writer = world.writing(if_match=first)
    with pytest.raises(errors.InvalidTransition):
        world.table.publish(A, "t")
    world.commit(writer, if_match=first)
    with pytest.raises(errors.GenerationMismatch):
        world.table.publish(A, "t")


def test_dropping_is_idempotent_and_makes_the_token_useless(world: World) -> None:
    handles = _load(world)
    world.take(world.table.drop_hidden(A, "t"))
    assert world.table.drop_hidden(A, "t") == []
    assert world.freed() == set(handles)
    with pytest.raises(errors.Superseded):
        world.ask(load_token="t")


def test_a_drop_that_overtakes_its_load_stops_it_at_the_commit(world: World) -> None:
    loader = world.writing(load_token="t")
    world.take(world.table.drop_hidden(A, "t"))
    with pytest.raises(errors.Superseded):
        world.commit(loader, hidden=True, layout_id="saved")


def test_dropping_after_publication_frees_what_no_session_uses(world: World) -> None:
    handles = _load(world)
    world.table.publish(A, "t")
    reader = world.attach(lock=RO)
    with pytest.raises(errors.NotEligible):
        world.table.drop_hidden(A, "t")
    world.end(reader)
    world.take(world.table.drop_hidden(A, "t"))
    assert world.freed() == set(handles)
    assert world.lock() is Lock.EMPTY


def test_dropping_an_old_load_leaves_a_newer_layout_alone(world: World) -> None:
    _load(world)
    ref, _ = world.table.publish(A, "t")
    current = frames.GenerationRef(incarnation=ref.incarnation, generation=ref.generation)
    world.end(world.replaced(current))
    assert world.table.drop_hidden(A, "t") == []
    assert world.lock() is Lock.COMMITTED


def test_only_loaders_commit_hidden_and_loaders_only_hidden(world: World) -> None:
    writer = world.writing()
    with pytest.raises(errors.InvalidMessage):
        world.commit(writer, hidden=True, layout_id="x")
    loader = world.writing(B, load_token="t")
    with pytest.raises(errors.InvalidMessage):
        world.commit(loader)
    with pytest.raises(errors.InvalidMessage):
        world.commit(loader, hidden=True)


@pytest.mark.parametrize(
    "fields",
    [
        {"lock": RO, "load_token": "t"},
        {"lock": RW, "load_token": "t", "domain": KV},
        {"lock": RW, "fence_token": "t"},
        {"lock": RO, "fence_token": "t", "load_token": "t"},
    ],
)
def test_tokens_go_with_their_lock_only(world: World, fields: dict[str, Any]) -> None:
    with pytest.raises(errors.InvalidMessage):
        world.ask(**fields)


def test_a_load_is_not_repeated_under_a_token_that_has_a_layout(world: World) -> None:
    _load(world)
    with pytest.raises(errors.LayoutConflict):
        world.ask(load_token="t")


# Fences.


def test_a_fence_waits_for_every_session_of_every_device_and_gives_the_vector(world: World) -> None:
    first, second = world.committed(A), world.committed(B)
    reader, cache = world.attach(A, RO), world.attach(B, domain=KV)
    world.fence("f", A, B)
    assert world.said(FenceHeld) == []
    world.end(reader)
    assert world.said(FenceHeld) == []
    world.end(cache)
    (held,) = world.said(FenceHeld)
    assert [(r.device, r.generation) for r in held.vector] == [
        (A, first.generation),
        (B, second.generation),
    ]


def test_a_fence_waits_for_imports_of_sessions_that_vanished(world: World) -> None:
    world.committed()
    reader = world.attach(lock=RO)
    world.table.export(reader, ["w"], frames.Access.RO)
    world.fence()
    world.end(reader, unmapped=False)
    assert world.said(FenceHeld) == []
    assert world.table.blockers("f") == ["c2 (pid 7)"]
    world.take(world.table.importers_gone(reader))
    assert len(world.said(FenceHeld)) == 1


def test_a_pending_fence_admits_no_client_and_lets_the_present_writer_commit(world: World) -> None:
    writer = world.writing()
    world.fence()
    late = [world.ask(lock=RO), world.ask(domain=KV), world.ask(lock=EITHER)]
    world.commit(writer)
    assert [world.granted(ticket) for ticket in late] == [None, None, None]
    world.end(writer)
    assert len(world.said(FenceHeld)) == 1
    assert [world.granted(ticket) for ticket in late] == [None, None, None]


def test_a_held_fence_ends_and_those_who_waited_go_on(world: World) -> None:
    world.committed()
    world.fence()
    late = world.ask(lock=RO)
    assert world.granted(late) is None
    world.take(world.table.end_fence("f"))
    assert world.granted(late) is not None
    assert world.said(FenceEnded) == [FenceEnded("f")]


def test_a_fence_ends_at_once_where_nothing_is_committed(world: World) -> None:
    world.committed(A)
    writer = world.attach(B, RW)
    world.fence("f", A, B)
    late = world.ask(B, lock=RW)
    assert world.said(FenceHeld) == []
    world.end(writer)
    (held,) = world.said(FenceHeld)
    assert [layout.device for layout in held.vector] == [A]
    assert world.granted(late) is not None
    assert world.granted(world.ask(A, lock=RO)) is None


def test_a_fence_over_devices_with_nothing_committed_is_over_when_it_is_held(world: World) -> None:
    world.fence("f", A, B)
    assert world.said(FenceHeld) == [FenceHeld("f", ())]
    assert world.said(FenceEnded) == [FenceEnded("f")]
    assert world.granted(world.ask(A, lock=RW)) is not None


def test_devices_are_fenced_together_or_not_at_all(world: World) -> None:
    world.committed(A)
    world.committed(B)
    world.fence("one", B)
    with pytest.raises(errors.LayoutConflict):
        world.fence("two", A, B)
    assert world.attach(A, RO) is not None
    with pytest.raises(errors.UnknownDevice):
        world.fence("three", A, "GPU-z")


def test_a_repeated_fence_answers_again_and_an_ended_one_never_returns(world: World) -> None:
    world.committed()
    first = world.fence()
    assert world.fence() == first
    with pytest.raises(errors.LayoutConflict):
        world.fence("f", A, B)
    world.table.end_fence("f")
    with pytest.raises(errors.Superseded):
        world.fence()


def test_only_the_save_with_the_token_enters_a_held_fence(world: World) -> None:
    world.committed()
    world.fence()
    with pytest.raises(errors.HoldDeadline):
        world.ask(lock=RO, fence_token="other")
    save = world.attach(lock=RO, fence_token="f")
    assert world.table.fences.phase(A) is FencePhase.LEASED
    with pytest.raises(errors.LayoutConflict):
        world.ask(lock=RO, fence_token="f")
    assert save.layout is world.table.devices[A].weights.committed


def test_once_the_save_reads_readers_and_caches_return_and_writers_still_wait(world: World) -> None:
    first = world.committed()
    world.fence()
    reader, cache = world.ask(lock=RO), world.ask(domain=KV)
    either, writer = world.ask(lock=EITHER), world.ask(if_match=first)
    save = world.attach(lock=RO, fence_token="f")
    assert world.granted(reader) is not None
    assert world.granted(cache) is not None
    assert world.access(either) is frames.Access.RO
    assert world.granted(writer) is None
    world.end(save)
    assert world.granted(writer) is not None
    assert world.said(FenceEnded) == [FenceEnded("f")]


def test_a_fence_ends_for_each_device_when_its_save_has_finished(world: World) -> None:
    first = world.committed(A)
    world.committed(B)
    world.fence("f", A, B)
    save = world.attach(A, RO, fence_token="f")
    world.end(save)
    assert world.table.fences.phase(A) is FencePhase.ENDED
    assert world.table.fences.phase(B) is FencePhase.HELD
    assert world.attach(A, if_match=first) is not None
    assert world.said(FenceEnded) == []


def test_a_save_that_was_lost_may_come_again_and_writers_still_wait(world: World) -> None:
    first = world.committed()
    world.fence()
    save = world.attach(lock=RO, fence_token="f")
    world.end(save, unmapped=False)
    assert world.granted(world.ask(if_match=first)) is None
    assert world.attach(lock=RO, fence_token="f") is not None


def test_a_save_without_its_fence_is_refused(world: World) -> None:
    world.committed()
    reader = world.attach(lock=RO)
    world.fence()
    with pytest.raises(errors.HoldDeadline) as caught:
        world.ask(lock=RO, fence_token="f")
    assert caught.value.values["phase"] == "pending"
    world.end(reader)
    world.table.end_fence("f")
    with pytest.raises(errors.HoldDeadline):
        world.ask(lock=RO, fence_token="f")


def test_a_fence_ends_when_its_part_is_written_though_the_save_was_killed(world: World) -> None:
    world.committed()
    world.fence()
    save = world.attach(lock=RO, fence_token="f")
    world.take(world.table.saved(A, "f"))
    assert world.table.fences.phase(A) is FencePhase.LEASED
    world.end(save, unmapped=False)
    assert world.table.fences.phase(A) is FencePhase.LEASED
    world.take(world.table.saved(A, "f"))
    assert world.table.fences.on(A) is None


def test_nothing_is_published_or_dropped_under_a_fence(world: World) -> None:
    first = world.committed()
    _load(world, if_match=first)
    world.fence()
    with pytest.raises(errors.Fenced):
        world.table.publish(A, "t")
    with pytest.raises(errors.Fenced):
        world.table.drop_layout(A, None)


def test_a_save_that_goes_on_after_its_fence_ended_keeps_its_layout(world: World) -> None:
    first = world.committed()
    world.fence()
    save = world.attach(lock=RO, fence_token="f")
    world.take(world.table.end_fence("f"))
    world.replaced(first)
    assert world.freed() == set()
    world.end(save)
    assert world.freed() == {100}


@each(
    ("there", "happened", "incarnation", "outcome"),
    [
        ("nothing", lambda _: None, "before", "refused"),
        ("nothing, restored", lambda _: None, "", "refused"),
        ("nothing, never read", lambda _: None, None, "waits"),
        ("nothing, of this service", lambda _: None, "inc", "waits"),
        ("another layout", lambda world: world.committed(), "before", "served"),
        ("another layout, restored", lambda world: world.committed(), "", "served"),
        ("a writer", lambda world: world.attach(), "before", "waits"),
        ("a writer that waits", lambda world: waiting_writer(world, RW), "before", "waits"),
        ("either that waits", lambda world: waiting_writer(world, EITHER), "before", "waits"),
        ("a reader that waits", lambda world: world.ask(lock=RO), "before", "refused"),
        ("a hidden load", _load, "before", "waits"),
        ("a load elsewhere", lambda world: world.attach(B, load_token="t"), "before", "refused"),
    ],
)
def test_a_reader_of_a_lost_layout_waits_only_for_what_may_bring_it_back(
    there: str, happened: Callable[[World], object], incarnation: str | None, outcome: str
) -> None:
    world = World()
    happened(world)
    before = waiting(world)
    fields = {} if incarnation is None else {"incarnation": incarnation}
    if outcome == "refused":
        with pytest.raises(errors.StaleLayout) as caught:
            world.ask(lock=RO, **fields)
        if incarnation == "":
            assert "the layout is lost" in caught.value.message
        else:
            assert caught.value.values == {"expected": incarnation, "found": "inc"}
        assert waiting(world) == before
    else:
        access = world.access(world.ask(lock=RO, **fields))
        assert access is (frames.Access.RO if outcome == "served" else None)
        assert waiting(world) == before + (outcome == "waits")


def waiting_writer(world: World, lock: frames.LockMode) -> None:
    vanished_writer(world)
    world.ask(lock=lock, peer=OTHER)


# What the metrics count.


def test_sessions_and_who_waits_are_counted_by_device_and_domain(world: World) -> None:
    writer = world.writing()
    world.ask(lock=RO)
    table = world.table
    assert usage.sessions(table) == {(A, "weights", "RW"): 1}
    assert usage.waiting(table)[A, "weights"] == 1
    assert usage.waiting(table)[B, "kv"] == 0
    world.commit(writer)
    assert usage.sessions(table) == {(A, "weights", "RO"): 2}
    world.hung_up(writer)
    assert usage.sessions(table) == {(A, "weights", "RO"): 1, (A, "weights", "lingering"): 1}


def test_memory_is_counted_once_wherever_it_is(world: World) -> None:
    first = world.attach()
    world.allocate(first, "a", "b")
    ref = world.commit(first)
    reader = world.attach(lock=RO)
    table = world.table
    assert usage.memory(table) == {(A, "weights"): 32}
    assert usage.allocations(table) == {(A, "weights"): 2}
    assert usage.generations(table) == {(A,): 1, (B,): 0}
    table.export(reader, ["a"], frames.Access.RO)
    world.end(first)
    world.end(reader, unmapped=False)
    loader = world.attach(load_token="t" * 16, if_match=ref)
    world.allocate(loader, "l")
    world.commit(loader, hidden=True, layout_id="x", if_match=ref)
    world.end(loader)
    assert usage.memory(table) == {(A, "weights"): 32, (A, "hidden"): 16}
    world.take(table.publish(A, "t" * 16)[1])
    assert usage.memory(table) == {(A, "weights"): 16, (A, "retired"): 16}


def test_a_fence_is_counted_in_its_phase(world: World) -> None:
    world.committed()
    assert set(usage.fences(world.table).values()) == {0.0}
    world.fence()
    counted = usage.fences(world.table)
    assert counted[A, "held"] == 1
    assert sum(counted.values()) == 1


def test_the_tokens_of_the_latest_4096_fences_and_dropped_loads_never_come_again(
    world: World,
) -> None:
    world.committed(B)
    for number in range(4097):
        world.table.end_fence(f"t{number}")
        world.table.drop_hidden(A, f"t{number}")
    for known in ("t1", "t4096"):
        with pytest.raises(errors.Superseded):
            world.fence(known, B)
        with pytest.raises(errors.Superseded):
            world.ask(load_token=known)
    assert world.fence("t0", B)
    assert world.attach(load_token="t0")


@pytest.mark.parametrize(("pid", "other", "same"), [(7, 7, True), (7, 8, False), (0, 0, False)])
def test_a_process_that_cannot_be_seen_is_no_other(pid: int, other: int, same: bool) -> None:
    assert Peer(pid=pid, uid=0).is_same(Peer(pid=other, uid=0)) is same
    assert Peer(pid=1, uid=0).is_same(Peer(pid=1, uid=9))


# What a state says of (writer, committed layout, readers).
MEANING = {
    Lock.EMPTY: (False, False, False),
    Lock.WRITING: (True, False, False),
    Lock.COMMITTED: (False, True, False),
    Lock.READING: (False, True, True),
    Lock.UPDATING: (True, True, False),
    Lock.UPDATING_READ: (True, True, True),
}


# What an event makes of it; None: what it was.
AFTER: dict[LockEvent, tuple[bool | None, ...]] = {
    LockEvent.WRITE: (True, None, None),
    LockEvent.REPLACE: (True, False, None),
    LockEvent.READ: (None, None, True),
    LockEvent.COMMIT: (False, True, True),
    LockEvent.WRITER_GONE: (False, None, None),
    LockEvent.READER_GONE: (None, None, None),
    LockEvent.LAST_READER_GONE: (None, None, False),
    LockEvent.PUBLISH: (None, True, None),
    LockEvent.DROP: (None, False, None),
}


def test_every_state_answers_every_request() -> None:
    assert set(LOCK_DECISIONS) == set(itertools.product(Lock, LockRequest))


@each(("row", "target"), LOCKS.rows.items())
def test_a_step_leads_to_the_state_that_describes_what_holds_then(
    row: tuple[Lock, LockEvent], target: Lock
) -> None:
    state, event = row
    both = zip(MEANING[state], AFTER[event], strict=True)
    assert MEANING[target] == tuple(old if new is None else new for old, new in both)


@each(("row", "answer"), LOCK_DECISIONS.items())
def test_what_is_granted_is_a_step_of_the_lock(
    row: tuple[Lock, LockRequest], answer: LockDecision
) -> None:
    state, wanted = row
    if answer is LockDecision.READ:
        assert LOCKS.allows(state, LockEvent.READ)
    if answer is LockDecision.WRITE:
        event = LockEvent.REPLACE if wanted is LockRequest.REPLACE else LockEvent.WRITE
        assert LOCKS.allows(state, event)


@each("state", Lock)
def test_there_is_never_a_second_writer(state: Lock) -> None:
    has_writer = MEANING[state][0]
    granted = LOCK_DECISIONS[state, LockRequest.WRITE] is LockDecision.WRITE
    assert granted is not has_writer


@each("state", Lock)
def test_reading_needs_a_committed_layout(state: Lock) -> None:
    has_committed = MEANING[state][1]
    assert (LOCK_DECISIONS[state, LockRequest.READ] is LockDecision.READ) is has_committed


@pytest.mark.parametrize("state", [Lock.UPDATING, Lock.UPDATING_READ])
def test_a_committed_layout_is_served_while_the_next_is_written(state: Lock) -> None:
    assert decide(state, LockRequest.READ, replacer_waits=True) is LockDecision.READ


def test_either_writes_only_while_nothing_is_committed() -> None:
    assert LOCK_DECISIONS[Lock.EMPTY, LockRequest.EITHER] is LockDecision.WRITE
    assert LOCK_DECISIONS[Lock.WRITING, LockRequest.EITHER] is LockDecision.WAIT
    assert LOCK_DECISIONS[Lock.COMMITTED, LockRequest.EITHER] is LockDecision.READ


@each(
    "operation",
    sorted(set(Operation) - {Operation.EXPORT_RO, Operation.METADATA_GET, Operation.LIST}),
)
def test_a_reader_changes_nothing(operation: Operation) -> None:
    with pytest.raises(errors.InvalidTransition) as caught:
        USES.next(Use.READING, operation)
    assert caught.value.values == {"state": "reading", "event": operation.value}


@each("operation", Operation)
def test_a_session_whose_layout_waits_hidden_can_only_end(operation: Operation) -> None:
    assert not USES.allows(Use.SPENT, operation)
