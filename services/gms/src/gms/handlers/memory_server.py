"""The core of the service: the memory table, the devices, and the calls that wait for them.

The table decides and returns effects, which are carried out here alone. All calls come from one
event loop; only the allocation and the release of memory run in threads.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import logging
from collections.abc import AsyncGenerator, Callable, Generator, Iterable, Sequence
from typing import assert_never

from gms.domain import usage
from gms.domain.history import History
from gms.domain.layout import PIECE
from gms.domain.memory_table import MemoryTable
from gms.domain.room import out_of_memory
from gms.domain.sessions import (
    Effect,
    FenceEnded,
    FenceHeld,
    Freed,
    Granted,
    Peer,
    Refused,
    Session,
    Waiter,
)
from gms.ports import Device
from snapback_client.devices import find_device
from snapback_client.frames import AllocationInfo, AllocationSpec, Attach, Commit
from snapshot_shared import instruments
from snapshot_shared.errors import (
    DeadlineExceeded,
    Fenced,
    NotEligible,
    OutOfDeviceMemory,
    SnapbackError,
    Superseded,
)
from snapshot_shared.frames import EventKind, EventRecord
from snapshot_shared.instruments import Instrument
from snapshot_shared.metrics import OFF, Metrics
from snapshot_shared.orders import LayoutRef
from snapshot_shared.tasks import Changes, any_set

log = logging.getLogger(__name__)

RELEASE_S = 10.0
"""The least time for which an allocation waits for memory that is being released, in seconds."""

LOOK_S = 1.0
"""How long a device may take to say how much is free, in seconds."""

AGAIN_S = (0.05, 0.5)
"""The first and the longest rest before memory that others may free is asked for again."""


class MemoryServer:
    """The GPU memory of one node."""

    def __init__(
        self, *, node: str, incarnation: str, devices: Sequence[Device], metrics: Metrics = OFF
    ) -> None:
        """Serve these devices. `incarnation` is a fresh uuid of this process."""
        self.node = node
        self.incarnation = incarnation
        self.devices = {device.info.uuid: device for device in devices}
        self.table = MemoryTable(
            incarnation, [(device.info.uuid, device.info.granularity) for device in devices]
        )
        self.history = History()
        self.fence_ends: dict[str, asyncio.TimerHandle] = {}
        self._tickets = itertools.count(1)
        self._grants: dict[int, asyncio.Future[Session]] = {}
        self._fences: dict[str, asyncio.Future[tuple[LayoutRef, ...]]] = {}
        self._fence_waits: dict[str, asyncio.TimerHandle] = {}
        self._releases: dict[str, set[asyncio.Future[None]]] = {}
        self._changes = Changes()
        self._said_free: dict[str, int] = {}
        self._asked: dict[str, tuple[float, asyncio.Future[int]]] = {}
        self._looking: dict[str, asyncio.Future[None]] = {}
        self._metrics = metrics
        self._show()

    def _show(self) -> None:
        """Register the metrics that are read from the table."""
        reads: tuple[tuple[Instrument, Callable[[MemoryTable], usage.Numbers]], ...] = (
            (instruments.SESSIONS, usage.sessions),
            (instruments.LOCK_QUEUE, usage.waiting),
            (instruments.MEMORY_USED, usage.memory),
            (instruments.ALLOCATIONS, usage.allocations),
            (instruments.GENERATION, usage.generations),
            (instruments.FENCES, usage.fences),
        )
        for instrument, read in reads:
            self._metrics.observe(instrument, functools.partial(read, self.table))
        self._metrics.observe(instruments.MEMORY_FREE, self._show_free)

    def _show_free(self) -> usage.Numbers:
        found: dict[tuple[str, ...], float] = {}
        for uuid, device in self.devices.items():
            if device.info.is_shared:
                # It may take its time to answer: what it said last, and the next time a newer one.
                found[uuid,] = self._said_free.get(uuid, device.info.capacity - device.used)
                if uuid not in self._looking:
                    self._looking[uuid] = asyncio.ensure_future(self._look(uuid))
            else:
                found[uuid,] = device.free()
        return found

    async def _look(self, uuid: str) -> None:
        try:
            await self.free_on(uuid)
        finally:
            del self._looking[uuid]

    async def free_on(self, uuid: str) -> int:
        """Return the bytes that can be taken on a device now, as it says, or as it said last.

        A shared device is asked once at a time, and has LOOK_S from then on for all who ask.
        """
        device = self.devices[uuid]
        if not device.info.is_shared:
            return device.free()
        loop = asyncio.get_running_loop()
        end, asked = self._asked.get(uuid, (0.0, None))
        if asked is None or asked.done():
            # Allocations need the threads of this executor: a device that hangs holds one of them.
            end, asked = loop.time() + LOOK_S, loop.run_in_executor(None, device.free)
            self._asked[uuid] = end, asked
        if (rest := end - loop.time()) > 0:
            await asyncio.wait((asked,), timeout=rest)
        if asked.done():
            self._said_free[uuid] = asked.result()
        return self._said_free.get(uuid, device.info.capacity - device.used)

    def uuid_of(self, name: str) -> str:
        """Return the uuid of the device that a client means (`snapback_client.devices`).

        A name of no device stays as it is, for the table to refuse.
        """
        indices = {uuid: device.info.index for uuid, device in self.devices.items()}
        return find_device(name, indices) or name

    # Sessions.

    async def attach(self, request: Attach, peer: Peer) -> Session:
        """Wait for a lock. DeadlineExceeded names who holds it."""
        with self._metrics.timed(instruments.LOCK_WAIT, request.lock.value):
            return await self._attach(request, peer)

    async def _attach(self, request: Attach, peer: Peer) -> Session:
        ticket = next(self._tickets)
        grant: asyncio.Future[Session] = asyncio.get_running_loop().create_future()
        self._grants[ticket] = grant
        waiter = Waiter(ticket=ticket, request=request, peer=peer)
        self.history.add_of(
            waiter, EventKind.ATTACH, _now(), reason=request.lock.value, generation=_base(request)
        )
        try:
            self._apply(self.table.attach(ticket, request, peer))
            async with asyncio.timeout(request.deadline_s):
                return await grant
        except TimeoutError:
            # Before it leaves the queue: the message names the holders of the lock.
            error = self._lock_timeout(waiter)
            self._give_up(waiter, grant, error.reason)
            raise error from None
        except SnapbackError as refusal:
            self._give_up(waiter, grant, refusal.reason)
            raise
        except BaseException:
            self._give_up(waiter, grant, "gone")
            raise

    def end(self, session: Session, *, unmapped: bool) -> bool:
        """End a session; True when it lingers because its process may hold mappings."""
        self._apply(self.table.end(session, unmapped=unmapped))
        is_lingering = session.id in self.table.devices[session.request.device].lingering
        kind = EventKind.DETACH if unmapped else EventKind.DEATH
        reason = "lingering" if is_lingering else ""
        self.history.add_of(session, kind, _now(), reason=reason)
        return is_lingering

    def process_ended(self, session: Session) -> None:
        """Free what only this process, which has ended, could still have mapped."""
        reason = "process-ended" if session.peer.has_pidfd else "socket-only"
        self.history.add_of(session, EventKind.DEATH, _now(), reason=reason)
        self._apply(self.table.importers_gone(session))

    async def allocate(
        self, session: Session, specs: Sequence[AllocationSpec], *, wait_s: float
    ) -> list[AllocationInfo]:
        """Allocate all or none; wait up to `wait_s` for memory that others hold.

        OutOfDeviceMemory, and at once where no other can give up as much.
        """
        sizes = self.table.check_allocate(session, specs)
        device = self.devices[session.request.device]
        handles = await self._create_patiently(session, sizes, wait_s)
        try:
            return self.table.allocate(session, specs, handles)
        except BaseException:
            self._release(device, handles)
            raise

    def commit(self, session: Session, request: Commit) -> Generator[None, None, LayoutRef]:
        """Publish or stage what a session wrote; yield between pieces of the work.

        The session must not end or change its layout meanwhile. A commit that is closed early or
        refused publishes nothing, but may have sealed memory: it has no new writable mappings.
        """
        device = self.devices[session.request.device]
        try:
            layout = self.table.check_commit(session, request)
            shape = yield from layout.hashing()
            # Before the layout is published: no reader ever sees memory that can still be mapped
            # for writing.
            for number, allocation in enumerate(layout.allocations.values(), start=1):
                device.seal(allocation.handle)
                if not number % PIECE:
                    yield
            ref, effects = self.table.commit(session, request, shape)
        except SnapbackError as error:
            self.history.add_of(session, EventKind.REFUSAL, _now(), reason=error.reason)
            raise
        self.history.add_of(
            session,
            EventKind.COMMIT,
            _now(),
            reason="hidden" if request.hidden else "",
            generation=ref.generation,
            size=ref.bytes,
        )
        self._apply(effects)
        return ref

    def free(self, session: Session, ids: Sequence[str]) -> None:
        """Free allocations of the layout being written."""
        self._apply(self.table.free(session, ids))

    # Layouts.

    def publish_hidden(self, device: str, load_token: str) -> LayoutRef:
        """Make a loaded layout the committed one; a repeat gives the same generation."""
        before = self.table.device(device).generation
        ref, effects = self.table.publish(device, load_token)
        if ref.generation > before:
            self.history.add(
                EventKind.COMMIT,
                _now(),
                device,
                reason="published",
                generation=ref.generation,
                size=ref.bytes,
            )
        self._apply(effects)
        return ref

    def drop_hidden(self, device: str, load_token: str) -> None:
        """Forget a loaded layout, published or not. NotEligible while sessions use it."""
        effects = self.table.drop_hidden(device, load_token)
        if effects:
            self.history.add(EventKind.DROP, _now(), device, reason="load")
        self._apply(effects)

    async def drop_hidden_when_unused(self, device: str, load_token: str, *, wait_s: float) -> None:
        """Forget a loaded layout once no session uses it. NotEligible names the sessions."""
        await self._when_unused(lambda: self.drop_hidden(device, load_token), wait_s)

    async def forget_when_unused(self, device: str, *, wait_s: float) -> None:
        """Forget all layouts of a device, hidden and committed, once no session uses them."""
        for load_token in list(self.table.device(device).hidden):
            self.drop_hidden(device, load_token)
        await self._when_unused(lambda: self.drop_layout(device, None), wait_s)

    async def _when_unused(self, forget: Callable[[], object], wait_s: float) -> None:
        end = asyncio.get_running_loop().time() + wait_s
        while True:
            changed = self._changes.next
            try:
                forget()
            except (NotEligible, Fenced):
                if not await any_set(end - _now(), changed):
                    raise
            else:
                return

    def drop_layout(self, device: str, layout_id: str | None) -> bool:
        """Free a committed layout that no session uses."""
        dropped, effects = self.table.drop_layout(device, layout_id)
        if dropped:
            self.history.add(EventKind.DROP, _now(), device, reason="layout")
        self._apply(effects)
        return dropped

    # Fences.

    async def fence(
        self, token: str, devices: tuple[str, ...], *, wait_s: float, deadline_s: float
    ) -> tuple[LayoutRef, ...]:
        """Hold a fence on all devices or on none. DeadlineExceeded names who did not leave."""
        loop = asyncio.get_running_loop()
        effects = self.table.fence(token, devices)
        held = self._fences.get(token)
        if held is None:
            self._record_fence(devices, "asked")
            held = self._fences[token] = loop.create_future()
            self.fence_ends[token] = loop.call_later(deadline_s, self.unfence, token)
            # Not a timeout of the caller: the wait has to end also after a cancellation.
            self._fence_waits[token] = loop.call_later(wait_s, self._stop_waiting, token, wait_s)
        self._apply(effects)
        return await asyncio.shield(held)

    def unfence(self, token: str) -> bool:
        """End a fence, also before it is asked for; False when it was not active."""
        fence = self.table.fences.active.get(token)
        is_active = fence is not None
        if fence is not None:
            self._record_fence(fence.devices, "ended")
        self._apply(self.table.end_fence(token))
        return is_active

    def saved(self, device: str, token: str) -> None:
        """End the fence of a device whose part is written."""
        self._apply(self.table.saved(device, token))

    def _stop_waiting(self, token: str, wait_s: float) -> None:
        fence = self.table.fences.active.get(token)
        if fence is None or not fence.is_pending:
            return
        blockers = self.table.blockers(token)
        error = DeadlineExceeded(
            f"after {wait_s:.1f} s these sessions still use the devices: {', '.join(blockers)}",
            next_step="the worker must put its GMS clients to sleep when it is quiesced",
            step="fence",
            budget_s=wait_s,
            sessions=blockers,
        )
        self._answer_fence(token, error)
        self.unfence(token)

    def _record_fence(self, devices: Iterable[str], reason: str) -> None:
        for device in devices:
            self.history.add(EventKind.FENCE, _now(), device, reason=reason)

    # Waiting.

    def watch(self, after: int) -> AsyncGenerator[tuple[list[EventRecord], int], None]:
        """Yield the events after number `after` in runs, each with the number of missed events."""
        return followed(self.history, after, self._changes)

    async def drained(self) -> None:
        """Wait until all memory whose release has begun is free."""
        # Not what is released meanwhile: a client that frees all the time would delay every caller.
        if pending := [future for group in self._releases.values() for future in group]:
            await asyncio.wait(pending)

    def _give_up(self, waiter: Waiter, grant: asyncio.Future[Session], reason: str) -> None:
        request = waiter.request
        self._grants.pop(waiter.ticket, None)
        if grant.done() and not grant.cancelled() and grant.exception() is None:
            self.end(grant.result(), unmapped=True)
            return
        self.history.add_of(waiter, EventKind.REFUSAL, _now(), reason=reason)
        if request.device in self.table.devices:
            self._apply(self.table.forget(waiter.ticket, request.device, request.domain))

    def _lock_timeout(self, waiter: Waiter) -> SnapbackError:
        request = waiter.request
        device = self.table.device(request.device)
        room = device.rooms[request.domain]
        holders = [session.name for session in room.sessions]
        vanished = [
            session.name for session in device.vanished_writers(request.domain, waiter.peer)
        ]
        phase = self.table.fences.phase(request.device).value
        return DeadlineExceeded(
            f"the lock {request.lock.value} on {request.domain.value} of {request.device} was not "
            f"granted within {request.deadline_s:.1f} s; it is {room.lock.value}"
            + (f", held by {', '.join(holders)}" if holders else "")
            + (
                f", and may still be written by {', '.join(vanished)}, which hung up and lives"
                if vanished
                else ""
            )
            + (f", fenced ({phase})" if phase != "ended" else ""),
            step="attach",
            budget_s=request.deadline_s,
            lock=room.lock.value,
            fence=phase,
            holders=holders,
            vanished=vanished,
        )

    # Effects.

    def _apply(self, effects: Iterable[Effect]) -> None:
        for effect in effects:
            self._carry_out(effect)
        self._changes.notify()

    def _carry_out(self, effect: Effect) -> None:
        match effect:
            case Granted(ticket, session):
                grant = self._grants.pop(ticket, None)
                self.history.add_of(
                    session,
                    EventKind.GRANT,
                    _now(),
                    reason=session.access.value,
                    generation=session.base.generation if session.base else 0,
                )
                if grant is None or grant.done():
                    # The client hung up before its grant was read.
                    self.end(session, unmapped=True)
                else:
                    grant.set_result(session)
            case Refused(ticket, error):
                refused = self._grants.pop(ticket, None)
                if refused is not None and not refused.done():
                    refused.set_exception(error)
            case Freed(device, handles):
                self._release(self.devices[device], handles)
            case FenceHeld(token, vector):
                self._record_fence([ref.device for ref in vector], "held")
                self._answer_fence(token, vector)
            case FenceEnded(token):
                self._answer_fence(token, Superseded("the fence was ended before it was held"))
                self._forget_fence(token)
            case _:
                assert_never(effect)

    def _answer_fence(self, token: str, answer: tuple[LayoutRef, ...] | SnapbackError) -> None:
        held = self._fences.get(token)
        if held is None or held.done():
            return
        if isinstance(answer, SnapbackError):
            held.set_exception(answer)
            # Without a waiting call asyncio would log the exception as never retrieved.
            held.exception()
        else:
            held.set_result(answer)

    def _forget_fence(self, token: str) -> None:
        self._fences.pop(token, None)
        for timers in (self.fence_ends, self._fence_waits):
            if timer := timers.pop(token, None):
                timer.cancel()

    # Memory.

    async def _create_patiently(
        self, session: Session, sizes: Sequence[int], wait_s: float
    ) -> list[int]:
        loop = asyncio.get_running_loop()
        device = self.devices[session.request.device]
        is_shared, uuid = device.info.is_shared, device.info.uuid
        end, rest = loop.time() + wait_s, AGAIN_S[0]
        while True:
            # Read before the attempt, so that the wait below sees every later release.
            changed = self._changes.next
            # Also one that is over when the attempt has failed.
            was_releasing = bool(self._releases.get(uuid))
            try:
                return await self._create(device, sizes)
            except OutOfDeviceMemory:
                is_releasing = was_releasing or bool(self._releases.get(uuid))
                others = is_shared or is_releasing or self.table.has_others(session)
                if not others or sum(sizes) > device.info.capacity - session.charged:
                    raise
                limit = max(end, loop.time() + RELEASE_S) if is_releasing else end
                # No event of ours says that another process has freed memory.
                again = min(limit, loop.time() + rest) if is_shared else limit
                rest = min(2 * rest, AGAIN_S[1])
                if not await any_set(again - _now(), changed) and again == limit:
                    raise

    async def _create(self, device: Device, sizes: Sequence[int]) -> list[int]:
        loop = asyncio.get_running_loop()
        making = loop.run_in_executor(None, create_all, device, sizes)
        try:
            # A thread cannot be cancelled: what it makes has to be released when it is done.
            return await asyncio.shield(making)
        except asyncio.CancelledError:
            making.add_done_callback(lambda done: self._discard(device, done))
            raise

    def _discard(self, device: Device, made: asyncio.Future[list[int]]) -> None:
        if not made.cancelled() and made.exception() is None:
            self._release(device, made.result())

    def _release(self, device: Device, handles: Sequence[int]) -> None:
        """Release handles in a thread: the kernel takes long to free many pages."""
        loop = asyncio.get_running_loop()
        group = self._releases.setdefault(device.info.uuid, set())
        future = loop.run_in_executor(None, _release_all, device, tuple(handles))
        group.add(future)
        future.add_done_callback(lambda done: self._released(group, done))

    def _released(self, group: set[asyncio.Future[None]], done: asyncio.Future[None]) -> None:
        group.discard(done)
        if not done.cancelled() and (error := done.exception()):
            log.error("memory could not be freed", exc_info=error)
        self._changes.notify()


def _now() -> float:
    return asyncio.get_running_loop().time()


def _base(request: Attach) -> int:
    return request.if_match.generation if request.if_match else 0


def create_all(device: Device, sizes: Sequence[int]) -> list[int]:
    """Allocate memory of all sizes or of none. OutOfDeviceMemory counts all of them."""
    needed, info, free = sum(sizes), device.info, device.free()
    if needed > free:
        raise out_of_memory(
            info.uuid,
            needed=needed,
            free=free,
            capacity=info.capacity,
            used=device.used,
            holders=device.holders(),
        )
    made: list[int] = []
    try:
        for size in sizes:
            made.append(device.create(size))  # noqa: PERF401 - released after an error
    except BaseException:
        _release_all(device, made)
        raise
    return made


def _release_all(device: Device, handles: Sequence[int]) -> None:
    for handle in handles:
        device.release(handle)


async def followed(
    history: History, after: int, changes: Changes
) -> AsyncGenerator[tuple[list[EventRecord], int], None]:
    """Yield the events after number `after` in runs, each with the number of missed events.

    The history itself is the queue: a slow reader misses events and needs no memory.
    """
    # A number above the last one is from before a restart of the service.
    seen = after if after <= history.last else 0
    while True:
        more = changes.next
        found, missed = history.since(seen)
        if found:
            seen = found[-1].seq
            yield found, missed
        else:
            await more.wait()
