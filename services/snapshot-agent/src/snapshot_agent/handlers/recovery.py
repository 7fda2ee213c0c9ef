"""The recovery of captures and pods at the start of an agent, before it connects to NATS."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from snapshot_agent.domain.driving import Phase, phase_of
from snapshot_agent.domain.recovery import CaptureLeft, Recovery, deadline_of, decide, interruption
from snapshot_agent.handlers.holds import UNCONFIRMED, Hold, Holds
from snapshot_agent.handlers.pods import Pods
from snapshot_agent.handlers.prepare import DEADLINE_NOTE, with_devices
from snapshot_agent.ports import Machine, Orders, Worker, Workers
from snapshot_shared.codec import decode_json
from snapshot_shared.errors import SnapbackError
from snapshot_shared.ids import OrderId, Uid, order_id, owner_of
from snapshot_shared.ledger import Entry
from snapshot_shared.orders import DumpOrder, PrepareOrder

log = logging.getLogger(__name__)


class Recoverer:
    """Recovers what an earlier agent left behind."""

    def __init__(
        self, machine: Machine, orders: Orders, workers: Workers, pods: Pods | None, holds: Holds
    ) -> None:
        """Use the parts of the node."""
        self._machine = machine
        self._orders = orders
        self._workers = workers
        self._pods = pods
        self._holds = holds

    async def run(self) -> None:
        """Adopt the processes, then recover the captures."""
        # All at the same time, for any of the workers may be frozen.
        if pods := self._pods:
            runs = await self._orders.journal.entries_of("run")
            await asyncio.gather(*(self._safely(pods.recover, e) for e in runs))
        captures = await self._orders.journal.entries_of("prepare")
        await asyncio.gather(*(self._safely(self._recover_capture, e) for e in captures))

    async def _safely(self, recover: Callable[[Entry], Awaitable[None]], entry: Entry) -> None:
        """Recover one. An error there must not keep the workers of others frozen."""
        try:
            await recover(entry)
        except Exception:
            log.exception("%s could not be recovered", entry.order)

    async def _recover_capture(self, prepare: Entry) -> None:
        order = decode_json(bytes(prepare.accepted.payload), PrepareOrder)
        order = with_devices(order, prepare.notes)
        worker = (await self._workers.resolve(order.pod)).worker
        left = self._observe(prepare, order, worker)
        decision = decide(left)
        if decision is Recovery.NOTHING:
            return
        log.info("capture of %s left at attempt %d: %s", order.content_uid, order.attempt, decision)
        hold = await self._rebuilt(left, order, worker) if worker else None
        if decision is Recovery.COMPENSATE:
            await self._compensate(left, order, hold)
        elif hold is not None and decision is Recovery.HOLD:
            await self._hold_on(hold, left.dump)
        elif hold is not None:
            await self._holds.release_alone(hold)

    def _observe(self, prepare: Entry, order: PrepareOrder, worker: Worker | None) -> CaptureLeft:
        content = owner_of(OrderId(prepare.order))
        dump = self._entry("dump", content)
        if dump is not None and dump.attempt != prepare.attempt:
            dump = None
        return CaptureLeft(
            prepare=prepare,
            dump=dump,
            is_settled=bool(prepare.notes.get(UNCONFIRMED))
            or any(self._is_over(verb, content, prepare) for verb in ("release", "abort")),
            is_let_go=worker is not None and self._holds.is_let_go(worker, order.attempt),
            is_overdue=self._deadline(prepare, order) <= self._machine.clocks.monotonic(),
        )

    def _entry(self, verb: str, content: Uid) -> Entry | None:
        return self._orders.journal.ledger.entry(order_id(verb, content))

    def _is_over(self, verb: str, content: Uid, prepare: Entry) -> bool:
        entry = self._entry(verb, content)
        if entry is None or entry.attempt < prepare.attempt or entry.terminal is None:
            return False
        return entry.terminal.failure is None

    def _deadline(self, prepare: Entry, order: PrepareOrder) -> float:
        clocks, noted = self._machine.clocks, prepare.notes.get(DEADLINE_NOTE)
        return deadline_of(
            prepare, noted, order.hold_s, boot_id=clocks.boot_id, now=clocks.monotonic()
        )

    async def _rebuilt(self, left: CaptureLeft, order: PrepareOrder, worker: Worker) -> Hold | None:
        """Return the hold of the earlier agent, with its guard if that lives.

        None when its driver is not on this node any more: only the guard can let the worker go.
        """
        driver = self._machine.drivers.get(order.driver)
        if driver is None:
            log.error("driver %s of %s is not here any more", order.driver, left.prepare.order)
            return None
        # None while the agent before, which is still ending, has the lock.
        unlock = self._machine.locks.take(worker.paths.lock)
        deadline = self._deadline(left.prepare, order)
        # A guard that has acted has done all that the phase requires.
        phase = Phase.SIGNAL if left.is_let_go else phase_of(left.dump)
        hold = Hold(order, worker, driver, deadline, unlock or _nothing, phase)
        hold.guard = await self._machine.guards.adopt(self._holds.guard_spec(hold))
        self._holds.by_content[hold.content] = hold
        return hold

    async def _compensate(self, left: CaptureLeft, order: PrepareOrder, hold: Hold | None) -> None:
        entry = left.interrupted
        error = interruption(entry or left.prepare)
        try:
            if hold is not None:
                await self._holds.give_up(hold, error.to_failure())
            else:
                await self._holds.end_fence(order, self._deadline(left.prepare, order))
        except (SnapbackError, OSError):
            log.exception("capture of %s could not be undone completely", order.content_uid)
            if hold is not None:
                self._holds.watch(hold, 0.0)
        if entry is not None:
            await self._orders.report(entry, "failed", failure=error.to_failure())

    async def _hold_on(self, hold: Hold, dump: Entry | None) -> None:
        """Keep a prepared capture. The worker may still be frozen by a dump that ended."""
        within_s = hold.order.dump_within_s
        if dump is not None and dump.terminal is not None:
            within_s = decode_json(bytes(dump.accepted.payload), DumpOrder).release_within_s
        await self._holds.let_go(hold)
        self._holds.may_freeze(hold)
        if hold.guard is None:
            await self._holds.arm_if_possible(hold)
        self._holds.watch(hold, within_s)


def _nothing() -> None:
    """Unlock nothing: another process has the lock."""
