"""The orders of one service on one node: what it accepted, what runs, what it has to report.

Everything is journalled before it counts. Reports are numbered and wait in the outbox in their
order; a repeat is answered with what is on record. How orders arrive and how reports leave is the
business of the courier.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Container, Iterable, Mapping
from itertools import islice
from typing import Any

import msgspec

from snapshot_shared import instruments
from snapshot_shared.clocks import Clocks
from snapshot_shared.codec import decode_json, encode_json
from snapshot_shared.errors import (
    Aborted,
    NoSpace,
    Rejected,
    ServiceStopped,
    SnapbackError,
    Superseded,
    bounded,
    failure_of,
)
from snapshot_shared.ids import NodeName, OrderId, verb_of
from snapshot_shared.journal import Journal
from snapshot_shared.ledger import Accepted, Delivered, Entry, Record, Reported, Tombstoned
from snapshot_shared.metrics import OFF, Metrics
from snapshot_shared.orders import TERMINAL, ArtifactRef, Order, Report, Service
from snapshot_shared.spans import order_context
from snapshot_shared.steps import VERBS_OF
from snapshot_shared.tasks import over, yield_turn
from snapshot_shared.telemetry import working_on

log = logging.getLogger(__name__)

FULL_S = 0.5
"""How long a full disk is left alone, in seconds."""

Result = Mapping[str, Any]
"""Fields of the terminal report besides the ones that every report has."""

HANDED_ON = frozenset({"restore"})
"""Verbs whose orders a service that stops leaves open, and the service that follows carries out."""

LIFE_SIGNS = frozenset({"ready", "exited"})
"""Kinds of reports about a worker that runs on after its order has ended."""


class Outbox:
    """Reports on their way: new ones in their order, then those that are resent, each once."""

    def __init__(self) -> None:
        """Begin empty."""
        self._new: dict[tuple[str, int, int], Report] = {}
        self._again: dict[tuple[str, int, int], Report] = {}
        self._has_some = asyncio.Event()

    def __len__(self) -> int:
        """Return how many wait."""
        return len(self._new) + len(self._again)

    def put(self, report: Report) -> None:
        """Add a new report."""
        self._new[_name(report)] = report
        self._has_some.set()

    def tell_again(self, reports: Iterable[Report]) -> None:
        """Add reports that were published before; one that waits already waits once."""
        named = ((_name(report), report) for report in reports)
        self._again.update((name, report) for name, report in named if name not in self._new)
        self._has_some.set()

    def put_back(self, reports: Iterable[Report], *, are_new: bool) -> None:
        """Add reports that were taken and could not be published, before their likes."""
        named = {_name(report): report for report in reports}
        if are_new:
            self._new = named | self._new
        else:
            self._again = named | self._again
        self._has_some.set()

    async def filled(self) -> None:
        """Wait until there is something to take."""
        while not len(self):
            self._has_some.clear()
            await self._has_some.wait()

    def take(self, most: int) -> tuple[list[Report], bool]:
        """Return what goes next, and whether it is new: either all of it is, or nothing."""
        source = self._new or self._again
        names = list(islice(source, most))
        return [source.pop(name) for name in names], source is self._new


def _name(report: Report) -> tuple[str, int, int]:
    return (report.order, report.attempt, report.n)


def _artifact_of(order: Order) -> str:
    found: ArtifactRef | None = getattr(order, "artifact", None)
    return f"artifact {found.content_uid}/gen-{found.generation}" if found else "no artifact"


class OrderBook:
    """What one service has promised, and the tasks that keep it."""

    def __init__(
        self,
        *,
        node: NodeName,
        service: Service,
        journal: Journal,
        clocks: Clocks,
        metrics: Metrics = OFF,
    ) -> None:
        """Continue an open journal; reports that were not delivered are in the outbox."""
        self.node = node
        self.service: Service = service
        self.journal = journal
        self.clocks = clocks
        self.outbox = Outbox()
        self._is_draining = False
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._uncut: dict[str, asyncio.Event] = {}
        self._why: dict[str, SnapbackError] = {}
        """Why orders are being cancelled, if their failure is not Aborted."""
        self._unwritten: dict[tuple[str, int], list[Report]] = {}
        self._metrics = metrics
        for report in journal.ledger.pending_reports():
            self.outbox.put(report)
        metrics.observe(instruments.OUTBOX, lambda: {(): len(self.outbox)})
        metrics.observe(instruments.IN_FLIGHT, self._in_flight)

    def _in_flight(self) -> Mapping[tuple[str, ...], float]:
        now = Counter(verb_of(OrderId(order)) for order in self._tasks)
        return {(verb,): now[verb] for verb in VERBS_OF[self.service]}

    # Orders.

    def answers(self, order: Order) -> list[Report] | None:
        """Return what answers an order that is on record; None when this one is new.

        The answer to a lower attempt than the known one is a refusal that names the known one, and
        so is that to the same attempt with another artifact: the store of the operator was restored
        from a backup, and counts its attempts again.
        """
        known = self.journal.ledger.entry(order.order)
        if known is None or known.attempt < order.attempt:
            return None
        number, what = known.attempt, f"attempt {known.attempt} of {order.order} is known here"
        newer = Superseded(f"{what}, this is {order.attempt}", attempt=number)
        if number == order.attempt:
            accepted = decode_json(bytes(known.accepted.payload), type(order))
            before, now = _artifact_of(accepted), _artifact_of(order)
            if before == now:
                return known.reports
            newer = Superseded(f"{what} with {before}, this is {now}", attempt=number, known=before)
        return [self.refusal(order.order, order.attempt, newer)]

    def refusal(self, order: str, attempt: int, error: SnapbackError) -> Report:
        """Return the report that an order was not accepted. It is not journalled."""
        return self._report_of(order, attempt, 1, "rejected", {"failure": error.to_failure()})

    def accept(self, order: Order, kind: str = "accepted", **fields: Any) -> asyncio.Future[None]:
        """Journal an order and its first report as one. The order counts when the future ends.

        NoSpace, StorageFailed: the order was not accepted.
        """
        accepted = Accepted(
            order=order.order,
            attempt=order.attempt,
            payload=msgspec.Raw(encode_json(order)),
            boot_id=self.clocks.boot_id,
            monotonic=self.clocks.monotonic(),
            wall=self.clocks.wall(),
            deadline_s=order.deadline_s,
        )
        report = self._report_of(order.order, order.attempt, 1, kind, fields)
        written = self.journal.write(accepted, Reported(report=report))

        def queue(done: asyncio.Future[None]) -> None:
            if not done.cancelled() and done.exception() is None:
                self.outbox.put(report)
                if report.is_terminal:
                    self._count_finished(report)

        written.add_done_callback(queue)
        return written

    def start(self, order: Order, work: Callable[[Entry], Awaitable[Result]]) -> None:
        """Begin to carry out an accepted order; how `work` ends is reported.

        An older attempt of the same order is cancelled, and has ended before `work` begins.
        """
        entry = self.journal.ledger.entries[order.order]
        previous = self._tasks.get(entry.order)
        task = asyncio.create_task(self._carry_out(entry, order, work, previous), name=entry.order)
        self._tasks[entry.order] = task
        task.add_done_callback(lambda done: self._forget(entry, done))

    def _forget(self, entry: Entry, task: asyncio.Task[None]) -> None:
        if self._tasks.get(entry.order) is task:
            del self._tasks[entry.order]
            self._uncut.pop(entry.order, None)
            self._why.pop(entry.order, None)
        if not task.cancelled() and (error := task.exception()):
            with working_on(entry.order, entry.attempt):
                log.error("order %s ended without a report: %r", entry.order, error, exc_info=error)

    async def _carry_out(
        self,
        entry: Entry,
        order: Order,
        work: Callable[[Entry], Awaitable[Result]],
        previous: asyncio.Task[None] | None,
    ) -> None:
        identity = order_context(order.traceparent, entry.order, entry.attempt)
        with working_on(entry.order, entry.attempt, identity.traceparent if identity else ""):
            try:
                if previous is not None:
                    previous.cancel()
                    await over(previous)
                result = await work(entry)
            except asyncio.CancelledError:
                error = self._why.pop(entry.order, None) or Aborted("the order was aborted here")
                if self.is_handed_on(entry):
                    raise
                if self._is_draining:
                    error = ServiceStopped(f"{self.service} was stopped; the order was undone")
                await asyncio.shield(self.fail(entry, error))
                raise
            except Exception as error:  # noqa: BLE001 - the one place where every failure becomes a report
                await self.fail(entry, error)
            else:
                await self.report(entry, TERMINAL[verb_of(OrderId(entry.order))], **result)

    async def cancel(
        self,
        order_id: str,
        attempt: int,
        within_s: float | None = None,
        why: SnapbackError | None = None,
    ) -> bool:
        """Cancel a running order of at most this attempt; wait for its compensation.

        For `within_s` seconds at most, if given. The order fails with `why`, or else with Aborted.
        """
        task = self._tasks.get(order_id)
        entry = self.journal.ledger.entry(order_id)
        if task is None or entry is None or entry.attempt > attempt:
            return False
        if why is not None:
            self._why[order_id] = why
        await _cancelled(task, within_s=within_s)
        return True

    async def drain(self, within_s: float | None = None, *, finish_s: float = 0.0) -> None:
        """Cancel what runs and wait until its compensation is over and journalled.

        For `within_s` seconds at most, if given. An order that must not be cut has `finish_s`
        seconds before that. The service ends after it.
        """
        self._is_draining = True
        await asyncio.gather(
            *(
                self._ended(task, self._uncut.get(order), within_s, finish_s)
                for order, task in list(self._tasks.items())
            )
        )
        await self.journal.settled()

    async def _ended(
        self,
        task: asyncio.Task[None],
        may_be_cut: asyncio.Event | None,
        within_s: float | None,
        finish_s: float,
    ) -> None:
        if may_be_cut is not None:
            cut = asyncio.ensure_future(may_be_cut.wait())
            await asyncio.wait((task, cut), timeout=finish_s, return_when=asyncio.FIRST_COMPLETED)
            cut.cancel()
        await _cancelled(task, within_s=within_s)

    def uncut(self, entry: Entry) -> asyncio.Event:
        """Return an event; until it is set or the order ends, `drain` waits."""
        may_be_cut = self._uncut[entry.order] = asyncio.Event()
        return may_be_cut

    def is_handed_on(self, entry: Entry) -> bool:
        """Whether the order is being cancelled and is left to the next service."""
        task = self._tasks.get(entry.order)
        is_cancelled = task is not None and task.cancelling() > 0
        return self._is_draining and is_cancelled and verb_of(OrderId(entry.order)) in HANDED_ON

    # Tombstones.

    async def tombstone(self, subject: str, attempt: int) -> None:
        """Journal that no attempt up to this one of the named work may begin or go on."""
        await self.journal.append(Tombstoned(subject=subject, attempt=attempt))

    def require_current(self, subject: str, attempt: int) -> None:
        """Superseded when the named work was aborted at this attempt or later."""
        if self.journal.ledger.is_tombstoned(subject, attempt):
            raise Superseded(f"attempt {attempt} of {subject} was aborted here", attempt=attempt)

    # Reports.

    async def fail(self, entry: Entry, error: BaseException) -> None:
        """Report that an accepted order failed, or was rejected after all."""
        failure = failure_of(error)
        if failure.reason == "Internal":
            log.error("order %s", entry.order, exc_info=error)
        kind = "rejected" if isinstance(error, Rejected) else "failed"
        await self.report(entry, kind, failure=failure)

    async def report(self, entry: Entry, kind: str, **fields: Any) -> None:
        """Journal the next report of an order and put it into the outbox, however full the disk is.

        A terminal report absorbs: a second one for the same attempt is dropped. The report of a
        caller that is cancelled is made all the same.
        """
        await asyncio.shield(asyncio.ensure_future(self._report(entry, kind, fields)))

    async def _report(self, entry: Entry, kind: str, fields: Mapping[str, Any]) -> None:
        unwritten = self._unwritten.setdefault((entry.order, entry.attempt), [])
        has_ended = entry.terminal is not None or any(each.is_terminal for each in unwritten)
        if has_ended and kind not in LIFE_SIGNS:
            return
        number = len(entry.reports) + len(unwritten) + 1
        report = self._report_of(entry.order, entry.attempt, number, kind, fields)
        unwritten.append(report)
        try:
            await self._append_however_full(Reported(report=report))
        finally:
            unwritten.remove(report)
            if not unwritten:
                self._unwritten.pop((entry.order, entry.attempt), None)
        self.outbox.put(report)
        if report.is_terminal and not has_ended:
            self._count_finished(report)

    def _report_of(
        self, order: str, attempt: int, number: int, kind: str, fields: Mapping[str, Any]
    ) -> Report:
        if "failure" in fields:
            # The operator takes no longer one, and its order would stay without an answer.
            fields = {**fields, "failure": bounded(fields["failure"])}
        return Report(
            order=order,
            attempt=attempt,
            n=number,
            kind=kind,  # type: ignore[arg-type]
            node=self.node,
            service=self.service,
            at=self.clocks.wall(),
            **fields,
        )

    def _count_finished(self, report: Report) -> None:
        outcome = report.kind if report.kind in ("failed", "rejected") else "done"
        reason = report.failure.reason if report.failure else ""
        verb = verb_of(OrderId(report.order))
        self._metrics.add(instruments.FINISHED, verb, outcome, reason)

    async def _append_however_full(self, record: Record) -> None:
        """Write a record down however long the disk is full: an outcome is never dropped."""
        while True:
            try:
                return await self.journal.append(record)
            except NoSpace as error:
                log.warning("the journal waits: %s", error)
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self.journal.until_broken(), FULL_S)

    def delivered(self, reports: Iterable[Report]) -> None:
        """Journal that reports have left, with what is written next.

        What a crash or a full disk keeps from being written is published once more by the next
        process, and folded once.
        """
        self.journal.write_later(
            *(Delivered(order=each.order, attempt=each.attempt, n=each.n) for each in reports)
        )

    def queue_since(self, wall: float, kinds: Container[str] | None = None) -> None:
        """Put reports of orders that reported since then into the outbox once more.

        All their reports, or those of some kinds.
        """
        for entry in self.journal.ledger.entries.values():
            if entry.reports and entry.reports[-1].at >= wall:
                self.outbox.tell_again(
                    each for each in entry.reports if kinds is None or each.kind in kinds
                )


async def _cancelled(*tasks: asyncio.Task[None], within_s: float | None = None) -> None:
    """Cancel tasks and wait for their ends, for so many seconds at most."""
    # One that is cancelled before its first step does nothing at all, and reports nothing.
    await yield_turn()
    for task in tasks:
        task.cancel()
    if within_s is None:
        await over(*tasks)
    elif tasks:
        await asyncio.wait(tasks, timeout=within_s)
