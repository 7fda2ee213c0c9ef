"""How a service takes orders from NATS and answers them.

An ack means "in my journal", never "done". A repeat is answered with what is on record. Reports
are numbered and journalled before they are published, and published until NATS has them.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Annotated, Any, cast

import msgspec
from msgspec import Meta

from snapshot_shared import instruments, subjects
from snapshot_shared.bus import Bus, Delivery
from snapshot_shared.clocks import Clocks
from snapshot_shared.codec import decode_json, encode_json
from snapshot_shared.errors import (
    Aborted,
    BusUnavailable,
    Failure,
    InvalidMessage,
    InvalidName,
    NoSpace,
    OutcomeUnknown,
    Rejected,
    SnapbackError,
    Superseded,
    UnsupportedVersion,
    WrongNode,
    failure_of,
)
from snapshot_shared.ids import NodeName, OrderId, owner_of, short_hash, verb_of
from snapshot_shared.journal import Journal
from snapshot_shared.ledger import (
    Accepted,
    Delivered,
    Entry,
    Noted,
    Record,
    Reported,
    Tombstoned,
)
from snapshot_shared.orders import (
    FIRST_SCHEMA,
    SCHEMAS,
    TERMINAL,
    AnyOrder,
    DeadLetter,
    Order,
    Progress,
    Report,
    Service,
)
from snapshot_shared.runner import Runner, Step
from snapshot_shared.spans import SpanContext, message_attributes, order_context
from snapshot_shared.steps import VERBS_OF, message_span
from snapshot_shared.tasks import end_all
from snapshot_shared.telemetry import Telemetry, working_on

log = logging.getLogger(__name__)

PROGRESS_EVERY_S = 0.5
FULL_S = 0.5
"""How long a full disk is left alone, in seconds."""
RETELL_S = 3600.0
"""How old an order's last report may be to be told again after a reconnection, in seconds."""

Result = Mapping[str, Any]
"""Fields of the terminal report besides the ones that every report has."""

Handler = Callable[[Any, "OrderContext"], Awaitable[Result]]


class OrderContext:
    """What a handler may do besides its work: report, tell progress, run steps, note facts."""

    def __init__(self, courier: Courier, entry: Entry, order: Any) -> None:
        """Belong to one accepted order."""
        self._courier = courier
        self.entry = entry
        self.order = order
        self._last_progress = float("-inf")
        self._last_quarter = -1

    def remaining_s(self) -> float:
        """Give the seconds left of the order's budget. A reboot ends every budget."""
        accepted = self.entry.accepted
        clocks = self._courier.clocks
        if accepted.boot_id != clocks.boot_id:
            return 0.0
        return accepted.monotonic + accepted.deadline_s - clocks.monotonic()

    async def report(self, kind: str, **fields: Any) -> None:
        """Journal a report and have it published."""
        await self._courier.report(self.entry, kind, **fields)

    async def note(self, key: str, value: Any) -> None:
        """Journal a fact that recovery will need."""
        await self._courier.journal.append(
            Noted(order=self.entry.order, attempt=self.entry.attempt, key=key, value=value)
        )

    async def steps(self, verb: str, table: Sequence[Step]) -> None:
        """Run a step table for this order."""
        await self._courier.runner.run(verb, self.order, table, remaining_s=self.remaining_s)

    async def progress(self, part: str, step: str, done: int, total: int) -> None:
        """Tell how many bytes are done: twice a second, at each quarter, and always the last."""
        now = self._courier.clocks.monotonic()
        quarter = 4 * done // total if total else 4
        is_due = now - self._last_progress >= PROGRESS_EVERY_S
        if done < total and quarter == self._last_quarter and not is_due:
            return
        self._last_progress, self._last_quarter = now, quarter
        value = Progress(
            order=self.entry.order,
            attempt=self.entry.attempt,
            node=self._courier.node,
            part=part,
            step=step,
            done=done,
            total=total,
            at=self._courier.clocks.wall(),
        )
        subject = subjects.progress(self._courier.node, OrderId(self.entry.order))
        await self._courier.bus.announce(subject, encode_json(value))


class Courier:
    """Takes the orders of one service on one node, runs their handlers, delivers the reports."""

    schemas: tuple[int, ...] = SCHEMAS
    """The versions of orders that are carried out."""

    def __init__(
        self,
        *,
        node: NodeName,
        service: Service,
        bus: Bus,
        journal: Journal,
        telemetry: Telemetry,
        runner: Runner,
        clocks: Clocks,
        handlers: Mapping[type[Order], Handler],
    ) -> None:
        """Wire the parts; nothing runs before `serve`."""
        self.node = node
        self.service: Service = service
        self.bus = bus
        self.journal = journal
        self.telemetry = telemetry
        self.runner = runner
        self.clocks = clocks
        self._handlers = dict(handlers)
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._outbox: asyncio.Queue[Report] = asyncio.Queue()
        self._numbering = asyncio.Lock()
        self._again = bus.reconnections()
        self._metrics = runner.metrics
        self._metrics.observe(instruments.OUTBOX, lambda: {(): self._outbox.qsize()})
        self._metrics.observe(instruments.IN_FLIGHT, self._in_flight)

    def _in_flight(self) -> Mapping[tuple[str, ...], float]:
        now = Counter(verb_of(OrderId(order)) for order in self._tasks)
        return {(verb,): now[verb] for verb in VERBS_OF[self.service]}

    async def serve(self) -> None:
        """Resume unfinished orders, then deliver reports and take orders, for ever.

        StorageFailed when the journal cannot be written any more: only a new start can tell what
        it holds.
        """
        # What was reported before is in the journal, like everything that was never delivered.
        self._outbox = asyncio.Queue()
        for report in self.journal.ledger.pending_reports():
            self._outbox.put_nowait(report)
        for entry in self.journal.ledger.unfinished():
            await self._resume(entry)
        tasks = (
            asyncio.create_task(self._deliver(), name="outbox"),
            asyncio.create_task(self._take(), name="intake"),
            asyncio.create_task(self._retell(), name="retelling"),
            asyncio.create_task(self.journal.until_broken(), name="journal"),
        )
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            await end_all(*tasks)

    async def drain(self) -> None:
        """Cancel what runs and wait until its compensation is over."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _take(self) -> None:
        durable = subjects.durable(self.node, self.service)
        filter_ = subjects.orders_of(self.node, self.service)
        async for delivery in self.bus.consume(subjects.ORDERS, durable, filter_):
            try:
                await self.take(delivery)
            except (BusUnavailable, NoSpace) as error:
                log.warning("order on %s will come again: %s", delivery.subject, error)

    async def take(self, delivery: Delivery) -> None:
        """Judge one message: accept it, answer a repeat, or refuse it with a reason."""
        try:
            order = self._read(delivery)
        except (InvalidMessage, InvalidName, Rejected, UnsupportedVersion) as error:
            await self._refuse(delivery, error)
            return
        known = self.journal.ledger.entries.get(order.order)
        verb = verb_of(order.order)
        if known is not None and known.attempt >= order.attempt:
            self._metrics.add(instruments.REPEATED, verb)
            await self._repeat(known, order, delivery.sequence)
            await delivery.ack()
            return
        if order.schema in self.schemas:
            entry = await self._accept(order)
            self._count_accepted(verb, delivery.stored_at)
            self._start(entry, order, delivery.headers.get("traceparent", ""))
            await self.report(entry, "accepted")
        else:
            # On record, for the next build may be able to carry out what is delivered again.
            failure = self._unsupported(order.schema).to_failure()
            await self._keep_letter(delivery, failure)
            await self.report(await self._accept(order), "rejected", failure=failure)
        await delivery.ack()

    def _count_accepted(self, verb: str, stored_at: float) -> None:
        self._metrics.add(instruments.ACCEPTED, verb)
        if stored_at:
            age = max(self.clocks.wall() - stored_at, 0.0)
            self._metrics.record(instruments.QUEUED, age, verb)

    def _read(self, delivery: Delivery) -> Any:
        node, service, order_id = subjects.parse_order(delivery.subject)
        try:
            order: Any = decode_json(delivery.data, cast("type[Any]", AnyOrder))
        except InvalidMessage:
            # Another version may not decode at all; its number is then the more helpful answer.
            if (schema := _claim(delivery.data).schema) not in self.schemas:
                raise self._unsupported(schema) from None
            raise
        if (node, service) != (self.node, self.service) or order.node != self.node:
            raise WrongNode(
                f"the order is for {order.node}, this is {self.node}",
                expected=self.node,
                found=order.node,
            )
        if order.order != order_id or owner_of(order.order) != order.owner:
            raise InvalidMessage(
                f"subject, id and owner differ: {order_id}, {order.order}, {order.owner}"
            )
        if type(order) not in self._handlers:
            raise Rejected(f"{self.service} does not carry out {type(order).__name__}")
        if order.not_after is not None and self.clocks.wall() > order.not_after:
            raise Rejected("the order came too late to be started", not_after=order.not_after)
        return order

    def _unsupported(self, schema: int) -> UnsupportedVersion:
        known = ", ".join(map(str, self.schemas))
        return UnsupportedVersion(
            f"the order has schema {schema}, {self.service} on {self.node} reads {known}",
            found=schema,
            supported=list(self.schemas),
        )

    async def _refuse(self, delivery: Delivery, error: SnapbackError) -> None:
        """Copy to DEAD, tell the operator if the id can be known, settle. The next is served."""
        failure = error.to_failure()
        await self._keep_letter(delivery, failure)
        with contextlib.suppress(InvalidName):
            _, _, order_id = subjects.parse_order(delivery.subject)
            report = Report(
                order=order_id,
                attempt=_claim(delivery.data).attempt,
                n=1,
                kind="rejected",
                node=self.node,
                service=self.service,
                at=self.clocks.wall(),
                failure=failure,
            )
            await self._publish(report)
        await delivery.ack()

    async def _keep_letter(self, delivery: Delivery, failure: Failure) -> None:
        self._metrics.add(instruments.DEAD_LETTERS, failure.reason)
        log.warning("refused %s: %s", delivery.subject, failure)
        letter = DeadLetter(
            subject=delivery.subject[:4096],
            node=self.node,
            service=self.service,
            sequence=delivery.sequence,
            at=self.clocks.wall(),
            failure=failure,
            payload=delivery.data[:65536],
        )
        await self.bus.publish(subjects.dead(self.node), encode_json(letter))

    async def _repeat(self, known: Entry, order: Order, sequence: int) -> None:
        """Answer from the record; a lower attempt than the known one gets no answer at all.

        Who orders again has not heard the first answer, or did not know yet that it was one: this
        one must not be dropped as the same message, so its id names the order that it answers.
        """
        if known.attempt == order.attempt:
            for report in known.reports:
                await self._publish(report, again=f".{sequence}")

    async def _accept(self, order: Order) -> Entry:
        await self.journal.append(
            Accepted(
                order=order.order,
                attempt=order.attempt,
                payload=msgspec.Raw(encode_json(order)),
                boot_id=self.clocks.boot_id,
                monotonic=self.clocks.monotonic(),
                wall=self.clocks.wall(),
                deadline_s=order.deadline_s,
            )
        )
        return self.journal.ledger.entries[order.order]

    def _start(self, entry: Entry, order: Order, link: str = "") -> None:
        """Begin to carry an order out; `link` is the traceparent of the message it came in."""
        previous = self._tasks.get(entry.order)
        task = asyncio.create_task(self._carry_out(entry, order, link, previous), name=entry.order)
        self._tasks[entry.order] = task
        task.add_done_callback(lambda done: self._forget(entry.order, done))

    def _forget(self, order: str, task: asyncio.Task[None]) -> None:
        if self._tasks.get(order) is task:
            del self._tasks[order]
        if not task.cancelled() and (error := task.exception()):
            attempt = self.journal.ledger.entries[order].attempt
            with working_on(order, attempt):
                log.error("order %s ended without a report: %r", order, error, exc_info=error)

    async def _carry_out(
        self, entry: Entry, order: Order, link: str, previous: asyncio.Task[None] | None
    ) -> None:
        identity = order_context(order.traceparent, entry.order, entry.attempt)
        own = identity.traceparent if identity else ""
        with working_on(entry.order, entry.attempt, own):
            try:
                if previous is not None:
                    # An older attempt of the same order must have let go before this one begins.
                    previous.cancel()
                    await asyncio.gather(previous, return_exceptions=True)
                result = await self._process(entry, order, identity, link)
            except asyncio.CancelledError:
                await asyncio.shield(self._fail(entry, Aborted("the order was aborted here")))
                raise
            except Exception as error:  # noqa: BLE001 - the one place where every failure becomes a report
                await self._fail(entry, error)
            else:
                await self.report(entry, TERMINAL[verb_of(OrderId(entry.order))], **result)

    async def _process(
        self, entry: Entry, order: Order, identity: SpanContext | None, link: str
    ) -> Result:
        verb = verb_of(OrderId(entry.order))
        about = message_attributes(
            "process",
            subjects.order_template(self.service, verb),
            client=subjects.durable(self.node, self.service),
            order=entry.order,
            attempt=entry.attempt,
        )
        family = subjects.family(subjects.order_template(self.service, verb))
        with (
            self._metrics.timed(instruments.PROCESS_DURATION, family, verb),
            self.telemetry.span(
                message_span("process", self.service, verb),
                kind="consumer",
                parent=order.traceparent,
                identity=identity,
                links=[link] if link else [],
                attributes={**about, "snapback.verb": verb, "snapback.node": self.node},
            ),
        ):
            return await self._handlers[type(order)](order, OrderContext(self, entry, order))

    async def _fail(self, entry: Entry, error: BaseException) -> None:
        failure = failure_of(error)
        if failure.reason == "Internal":
            log.error("order %s", entry.order, exc_info=error)
        kind = "rejected" if isinstance(error, Rejected) else "failed"
        await self.report(entry, kind, failure=failure)

    async def _resume(self, entry: Entry) -> None:
        """Go on after a restart: run again what may be run again, fail the rest."""
        try:
            order: Any = decode_json(bytes(entry.accepted.payload), cast("type[Any]", AnyOrder))
        except InvalidMessage as unreadable:
            # A newer build has accepted it and was then replaced by this one.
            await self._fail(entry, unreadable)
            return
        if order.schema not in self.schemas:
            await self._fail(entry, self._unsupported(order.schema))
        elif entry.open_step is not None and entry.notes.get("no-replay"):
            step = entry.open_step
            error = OutcomeUnknown(f"the service was restarted within step {step}", step=step)
            with working_on(entry.order, entry.attempt):
                await self._fail(entry, error)
        else:
            self._start(entry, order)

    async def report(self, entry: Entry, kind: str, **fields: Any) -> None:
        """Journal the next report of an order and queue it for NATS.

        A terminal report absorbs: a second one for the same attempt is dropped.
        """
        await asyncio.shield(asyncio.ensure_future(self._report(entry, kind, fields)))

    async def _report(self, entry: Entry, kind: str, fields: Mapping[str, Any]) -> None:
        """Number, journal and queue in one piece, so that a cancelled caller leaves no gap."""
        async with self._numbering:
            if entry.terminal is not None and kind not in ("ready", "exited"):
                return
            report = Report(
                order=entry.order,
                attempt=entry.attempt,
                n=len(entry.reports) + 1,
                kind=kind,  # type: ignore[arg-type]
                node=self.node,
                service=self.service,
                at=self.clocks.wall(),
                **fields,
            )
            is_news = entry.terminal is None and report.is_terminal
            await self._append_however_full(Reported(report=report))
            self._outbox.put_nowait(report)
            if is_news:
                self._count_finished(report)

    def _count_finished(self, report: Report) -> None:
        outcome = report.kind if report.kind in ("failed", "rejected") else "done"
        reason = report.failure.reason if report.failure else ""
        verb = verb_of(OrderId(report.order))
        self._metrics.add(instruments.FINISHED, verb, outcome, reason)

    async def _append_however_full(self, record: Record) -> None:
        """Write a record down however long the disk is full: an outcome is never dropped.

        NATS may be away meanwhile.
        """
        while True:
            try:
                return await self.journal.append(record)
            except NoSpace as error:
                log.warning("the journal waits: %s", error)
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self.journal.until_broken(), FULL_S)

    async def _deliver(self) -> None:
        while True:
            report = await self._outbox.get()
            while True:
                try:
                    await self._publish(report)
                    break
                except BusUnavailable as error:
                    with working_on(report.order, report.attempt):
                        log.info("report %s/%s waits: %s", report.order, report.kind, error)
                    await self.bus.pause(self._again)
            await self._append_however_full(
                Delivered(order=report.order, attempt=report.attempt, n=report.n)
            )

    async def _retell(self) -> None:
        """After a reconnection report again what was reported lately.

        A server that lost its store has lost reports that it had acknowledged, perhaps before
        the operator had read them. To fold one twice changes nothing.
        """
        again = self.bus.reconnections()
        while True:
            await again.wait()
            again.clear()
            since = self.clocks.wall() - RETELL_S
            for entry in self.journal.ledger.entries.values():
                if entry.reports and entry.reports[-1].at >= since:
                    for report in entry.reports:
                        self._outbox.put_nowait(report)

    async def _publish(self, report: Report, *, again: str = "") -> None:
        payload = encode_json(report)
        # The ids of a stream are those of all nodes. With what it says in it, an id can neither be
        # taken by another node nor by the refusal of a bad order.
        said = short_hash(payload.decode())
        await self.bus.publish(
            subjects.report(self.node, OrderId(report.order), report.kind),
            payload,
            message_id=f"{report.order}.{report.attempt}.{report.n}.{said}{again}",
        )

    async def tombstone(self, subject: str, attempt: int) -> None:
        """Journal that no attempt up to this one of the named work may begin or go on."""
        await self.journal.append(Tombstoned(subject=subject, attempt=attempt))

    def require_current(self, subject: str, attempt: int) -> None:
        """Superseded when the named work was aborted at this attempt or later."""
        if self.journal.ledger.is_tombstoned(subject, attempt):
            raise Superseded(f"attempt {attempt} of {subject} was aborted here", attempt=attempt)

    async def cancel(self, order_id: str, attempt: int) -> bool:
        """Cancel a running order of at most this attempt; wait for its compensation."""
        task = self._tasks.get(order_id)
        entry = self.journal.ledger.entries.get(order_id)
        if task is None or entry is None or entry.attempt > attempt:
            return False
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return True


class _Claim(msgspec.Struct):
    """What a bad order claims."""

    attempt: Annotated[int, Meta(ge=0, le=1_000_000)] = 0
    schema: int = FIRST_SCHEMA


def _claim(data: bytes) -> _Claim:
    try:
        return msgspec.json.decode(data, type=_Claim)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return _Claim()
