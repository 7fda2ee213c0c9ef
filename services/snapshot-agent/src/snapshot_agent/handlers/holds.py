"""Workers that a capture holds: quiesced, under a guard, until they are let go.

A hold begins in the gate of `prepare` and ends in exactly one of three ways: the capture is
complete, it is given up, or the agent releases the worker at its deadline without an order.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from snapshot_agent.domain import control
from snapshot_agent.domain.driving import Phase
from snapshot_agent.handlers.background import HANGS_S, Background, pause
from snapshot_agent.ports import (
    GuardLink,
    GuardSpec,
    Machine,
    Orders,
    ProcessDriver,
    Worker,
    Workers,
)
from snapshot_shared import instruments
from snapshot_shared.encrypting import PartCipher
from snapshot_shared.errors import (
    AgentSilent,
    Failure,
    HoldDeadline,
    ServiceStopped,
    SnapbackError,
    SourceExited,
)
from snapshot_shared.ids import Uid, order_id, short_hash
from snapshot_shared.ledger import Noted
from snapshot_shared.orders import PodRef, PrepareOrder

log = logging.getLogger(__name__)

AGAIN_S = 1.0
"""How long to wait before another try when the disk is full or GMS does not answer, in seconds."""

BEAT_S = 1.0
"""How often a guard gets a sign of life from its agent, in seconds."""

SILENCE_S = 3.0
"""How long after the last sign of life a worker may be held, in seconds.

A guard acts two seconds later (`guards.MARGIN_S`), so five seconds after the sign.
"""

UNFENCE_S = 1.0
"""How long the release of a worker waits for the end of its fence, in seconds."""

UNCONFIRMED = "unconfirmed"
"""The note on a prepared capture whose worker was released without an order."""

_OVERDUE = HoldDeadline("the next order did not come in time; the worker goes on").to_failure()


@dataclass(eq=False)
class Hold:
    """One held worker. Times are in seconds of the monotonic clock.

    The worker is let go at `deadline`, or at `order_by` unless the next order of its capture has
    come. `phase` decides how. The guard lets it go at `thaw_by`, infinite unless the driver works,
    and upon silence, unless the driver works in the phase BEGUN. `watchdog` waits for both
    deadlines, `pulse` sends the signs of life.
    `quiet_since` and `frozen_since` are None while the worker is not, and after a restart of the
    agent. `paused_s` is for how long it was quiet, once it goes on and if that was measured. `turn`
    keeps two ends of the hold apart. `free_slot` ends its use of a slot of the node. `cipher` is
    for the dump, which makes its own after a restart of the agent.
    """

    order: PrepareOrder
    worker: Worker
    driver: ProcessDriver
    deadline: float
    unlock: Callable[[], None]
    phase: Phase = Phase.SIGNAL
    guard: GuardLink | None = None
    order_by: float = math.inf
    thaw_by: float = math.inf
    watchdog: asyncio.Task[None] | None = None
    pulse: asyncio.Task[None] | None = None
    quiet_since: float | None = None
    frozen_since: float | None = None
    paused_s: float = 0.0
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    free_slot: Callable[[], None] = lambda: None
    cipher: PartCipher | None = None

    @property
    def content(self) -> Uid:
        """The content that the capture is for."""
        return Uid(self.order.content_uid)

    @property
    def attempt(self) -> int:
        """The attempt of the capture."""
        return self.order.attempt


class Holds:
    """All holds of this node, by content."""

    def __init__(
        self, machine: Machine, orders: Orders, workers: Workers, background: Background
    ) -> None:
        """Use the parts of the node. `watch` and the gate of `prepare` add holds."""
        self._machine = machine
        self._orders = orders
        self._workers = workers
        self._background = background
        self.by_content: dict[str, Hold] = {}
        observe = machine.metrics.observe
        observe(instruments.HELD, lambda: {(): len(self.by_content)})
        observe(instruments.GUARDS, lambda: {(): sum(1 for hold in self._all if hold.guard)})
        observe(instruments.FROZEN, lambda: {(): len(self._frozen_since)})
        observe(instruments.FROZEN_AGE, self._frozen_age)

    @property
    def _all(self) -> Iterable[Hold]:
        return self.by_content.values()

    @property
    def _frozen_since(self) -> list[float]:
        return [hold.frozen_since for hold in self._all if hold.frozen_since is not None]

    def _frozen_age(self) -> dict[tuple[str, ...], float]:
        now = self._machine.clocks.monotonic()
        return {(): now - min(self._frozen_since, default=now)}

    def of(self, content: str, attempt: int) -> Hold | None:
        """Return the hold of a content, if it is of this attempt or an earlier one."""
        hold = self.by_content.get(content)
        return hold if hold is not None and hold.attempt <= attempt else None

    def holder_of(self, pod: PodRef) -> str | None:
        """Return the uid of the content whose capture holds a container, or None."""
        for content, hold in self.by_content.items():
            if (hold.order.pod.uid, hold.order.pod.container) == (pod.uid, pod.container):
                return content
        return None

    def guard_spec(self, hold: Hold) -> GuardSpec:
        """Return the task of the guard of a hold."""
        return GuardSpec(
            name=short_hash(hold.content, str(hold.attempt)),
            process=hold.worker.process,
            control=hold.worker.paths.control,
            attempt=hold.attempt,
            deadline=hold.deadline,
            boot_id=self._machine.clocks.boot_id,
            on_failure=hold.order.on_failure,
            release=hold.driver.release(hold.worker, hold.phase),
            unfence=self._unfencing(hold.order),
            access=hold.worker.paths.access,
            order=hold.order.order,
            traceparent=hold.order.traceparent,
        )

    def _unfencing(self, order: PrepareOrder) -> tuple[str, ...]:
        if not order.devices:
            return ()
        return self._machine.gpu_memory.at(order.pod).unfencing(order.fence_token)

    async def arm(self, hold: Hold) -> None:
        """Start the guard of a hold."""
        hold.guard = await self._machine.guards.start(self.guard_spec(hold))
        self._keep(hold)

    def _keep(self, hold: Hold) -> None:
        """Send the guard signs of life, so that it acts upon silence."""
        self._beat(hold)
        if hold.pulse is None:
            hold.pulse = self._background.start(self._pulse(hold), f"pulse of {hold.content}")

    async def _pulse(self, hold: Hold) -> None:
        while True:
            await pause(BEAT_S)
            self._beat(hold)

    def _beat(self, hold: Hold) -> None:
        if hold.guard is not None:
            silent_by = self._machine.clocks.monotonic() + SILENCE_S
            # To let a worker go inside CRIU, or while it is replaced, would end it.
            only_deadline = hold.phase is Phase.BEGUN and hold.thaw_by < math.inf
            hold.guard.thaw_by(hold.thaw_by if only_deadline else min(silent_by, hold.thaw_by))

    async def confirm(self, hold: Hold) -> None:
        """Make sure that the guard has not let the worker go. AgentSilent if it has.

        An agent that was stopped does not know how long it was.
        """
        if hold.guard is not None:
            await hold.guard.confirm()
        if self.is_let_go(hold.worker, hold.attempt):
            raise AgentSilent("the guard let the worker go, because the agent was silent")

    def enter(self, hold: Hold, phase: Phase) -> None:
        """Set the phase, here and at the guard."""
        hold.phase = phase
        if hold.guard is not None:
            hold.guard.release_by(hold.driver.release(hold.worker, phase))
        self._beat(hold)

    def follow(self, hold: Hold, worker: Worker) -> None:
        """Continue with the process that has replaced the one before."""
        hold.worker = worker
        if hold.guard is not None:
            hold.guard.follow(worker.process)

    def may_freeze(self, hold: Hold, within_s: float = math.inf) -> None:
        """Set after how many seconds the guard thaws the worker; infinite when it is not frozen."""
        hold.thaw_by = self._machine.clocks.monotonic() + within_s
        self._beat(hold)

    @contextlib.contextmanager
    def busy(self, hold: Hold, within_s: float) -> Iterator[None]:
        """Do the work of an order; the next order has to come within `within_s` seconds after it.

        After work that fails only an abort can come, as soon as a dump after its prepare.
        """
        hold.order_by = math.inf
        try:
            yield
        except BaseException:
            self._wait(hold, hold.order.dump_within_s)
            raise
        self._wait(hold, within_s)

    def _wait(self, hold: Hold, within_s: float) -> None:
        hold.order_by = self._machine.clocks.monotonic() + within_s

    async def arm_if_possible(self, hold: Hold) -> None:
        """Start another guard. Without one it is tried again, until the hold's deadline."""
        try:
            await self.arm(hold)
        except SourceExited:
            # There is no process to guard, but the capture can still be completed.
            log.info("the worker of %s has ended", hold.content)
        except (SnapbackError, OSError):
            log.exception("no guard for %s", hold.content)

    def watch(self, hold: Hold, within_s: float) -> None:
        """Hold a prepared worker until it is let go, at its deadline at the latest.

        The next order of its capture has to come within `within_s` seconds.
        """
        self.by_content[hold.content] = hold
        self._wait(hold, within_s)
        self._keep(hold)
        hold.watchdog = self._background.start(self._watch(hold), f"hold of {hold.content}")

    async def _watch(self, hold: Hold) -> None:
        while (left := self._left(hold)) > 0:
            try:
                async with asyncio.timeout(min(left, BEAT_S)):
                    await self._guard_is_lost(hold)
            except TimeoutError:
                continue
            # A guard that acts writes the file before it ends.
            if self.is_let_go(hold.worker, hold.attempt):
                break
            log.warning("the guard of %s is gone; arming another", hold.content)
            if hold.guard is not None:
                hold.guard.close()
                hold.guard = None
            await self.arm_if_possible(hold)
        await self._release_at_last(hold)

    def _left(self, hold: Hold) -> float:
        return min(hold.deadline, hold.order_by) - self._machine.clocks.monotonic()

    async def _release_at_last(self, hold: Hold) -> None:
        """Release at the deadline; try again until it is done, because no order will."""
        while True:
            try:
                return await self.release_alone(hold)
            except (SnapbackError, OSError) as error:
                log.warning("the release of %s waits: %s", hold.content, error)
                await pause(AGAIN_S)

    async def _guard_is_lost(self, hold: Hold) -> None:
        if hold.guard is not None:
            await hold.guard.lost()
        if not self._workers.is_alive(hold.worker.process):
            await asyncio.get_running_loop().create_future()
        if hold.guard is None:
            await pause(AGAIN_S)

    def is_let_go(self, worker: Worker, attempt: int) -> bool:
        """Whether `snapshot-aborted` of this attempt is there; a guard may have written it."""
        data = self._machine.control.get(worker.paths, control.ABORTED)
        return data is not None and control.is_of(data, attempt)

    # The three ways in which a hold ends.

    async def complete(self, hold: Hold) -> bool:
        """Report to the worker that the capture is complete, and let it go on.

        Return False if the hold has ended otherwise before.
        """
        async with hold.turn:
            if self.by_content.get(hold.content) is not hold:
                return False
            await self.let_go(hold)
            where = hold.worker.paths
            self._machine.control.put(where, control.COMPLETE, control.body(hold.attempt))
            self._machine.control.remove(where, control.QUIESCE)
            self.count(hold, "complete")
            await self._forget(hold)
            return True

    async def give_up(self, hold: Hold, why: Failure) -> None:
        """Undo a capture: let the worker run, end the fence, report to the worker or kill it."""
        async with hold.turn:
            if self.by_content.get(hold.content) is hold:
                await self._undo(hold, why)
                await self._forget(hold)

    async def release_alone(self, hold: Hold) -> None:
        """Release at the deadline, with a note for the release order that may still come."""
        release = self._orders.journal.ledger.entry(order_id("release", hold.content))
        if release is not None and release.attempt >= hold.attempt and release.terminal is None:
            # The order is under way and lets the worker go.
            return
        # A guard that is stopped lets its worker go, and an upgrade stops it with the agent.
        is_let_go = self.is_let_go(hold.worker, hold.attempt)
        why = ServiceStopped("the guard of the worker was stopped; the order was undone")
        name = order_id("dump", hold.content)
        await self._orders.cancel(name, hold.attempt, HANGS_S, why if is_let_go else None)
        note = Noted(order=hold.order.order, attempt=hold.attempt, key=UNCONFIRMED, value=True)
        async with hold.turn:
            if self.by_content.get(hold.content) is hold:
                await self._undo(hold, _OVERDUE)
                try:
                    # A release order that finds no hold reads the note.
                    await self._orders.journal.append(note)
                finally:
                    await self._forget(hold)
                return
        await self._orders.journal.append(note)

    # What they consist of.

    async def _undo(self, hold: Hold, why: Failure) -> None:
        await self.let_go(hold)
        await self.end_fence(hold.order, hold.deadline)
        await self.free(hold, why)

    def begin_pause(self, hold: Hold) -> None:
        """Record the time at which a worker is stopped."""
        hold.frozen_since = self._machine.clocks.monotonic()

    def end_pause(self, hold: Hold, lasted: float | None = None) -> None:
        """Measure how long a worker was stopped, unless it is known; later calls do nothing."""
        since, hold.frozen_since = hold.frozen_since, None
        if since is not None:
            if lasted is None:
                lasted = self._machine.clocks.monotonic() - since
            self._machine.metrics.record(instruments.FREEZE_DURATION, lasted)

    def let_go_s(self, content: str, attempt: int) -> float:
        """Return how long a driver may take to let a worker go, if it is held, in seconds."""
        hold = self.of(content, attempt)
        return hold.driver.release(hold.worker, Phase.BEGUN).within_s if hold else 0.0

    async def let_go(self, hold: Hold) -> None:
        """Let a worker run, frozen or not, or end it in a phase that cannot be undone."""
        release = hold.driver.release(hold.worker, hold.phase)
        is_undone = await self._machine.guards.release(hold.worker.process, release)
        if is_undone and not release.ends:
            # The hold may go on, and what the program needs may not be there at its end.
            self.enter(hold, Phase.SIGNAL)
        self.end_pause(hold)

    def count(self, hold: Hold, outcome: str) -> None:
        """Measure how long a worker was quiet; later calls do nothing."""
        since, hold.quiet_since = hold.quiet_since, None
        if since is not None:
            hold.paused_s = self._machine.clocks.monotonic() - since
            self._machine.metrics.record(instruments.HOLD_DURATION, hold.paused_s, outcome)

    async def end_fence(self, order: PrepareOrder, until: float) -> None:
        """End the fence of a capture, if it has one; after UNFENCE_S in the background.

        `until` is the deadline of the fence, at which GMS itself ends it.
        """
        # A worker that wakes under a fence waits for its memory, so the fence ends first; but a GMS
        # that hangs must not delay the worker for longer than UNFENCE_S.
        if order.devices:
            work = self._unfence_at_last(order, until)
            ending = self._background.start(work, f"fence of {order.content_uid}")
            await asyncio.wait([ending], timeout=UNFENCE_S)

    async def _unfence_at_last(self, order: PrepareOrder, until: float) -> None:
        while True:
            try:
                return await self._machine.gpu_memory.at(order.pod).unfence(order.fence_token)
            except (SnapbackError, OSError) as error:
                log.warning("the fence of %s waits: %s", order.content_uid, error)
            if self._machine.clocks.monotonic() >= until:
                return None
            await pause(AGAIN_S)

    async def free(self, hold: Hold, why: Failure) -> None:
        """Report to the worker that the capture was aborted; kill it where the policy is Kill."""
        where = hold.worker.paths
        self.count(hold, "aborted")
        self._machine.control.put(where, control.ABORTED, control.body(hold.attempt, why))
        self._machine.control.remove(where, control.QUIESCE)
        if hold.order.on_failure == "Kill":
            await self._workers.end(hold.worker)

    async def _forget(self, hold: Hold) -> None:
        """End the watchdog and the guard, and unlock the container."""
        watchdog = hold.watchdog
        if watchdog is not None and watchdog is not asyncio.current_task():
            watchdog.cancel()
            await asyncio.gather(watchdog, return_exceptions=True)
        await self.dismiss(hold)
        self.drop(hold)

    async def dismiss(self, hold: Hold) -> None:
        """End the guard without action."""
        pulse, hold.pulse = hold.pulse, None
        if pulse is not None:
            pulse.cancel()
        guard, hold.guard = hold.guard, None
        if guard is not None:
            await guard.dismiss()

    def drop(self, hold: Hold) -> None:
        """Remove a hold and unlock its container."""
        # The hold of a later attempt may have taken its place.
        if self.by_content.get(hold.content) is hold:
            del self.by_content[hold.content]
            hold.unlock()
            hold.free_slot()

    def close(self) -> None:
        """Close the connections to the guards, which then wait for the next agent."""
        for hold in self.by_content.values():
            if hold.guard is not None:
                with contextlib.suppress(OSError):
                    hold.guard.close()
