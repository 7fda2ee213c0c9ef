"""How a service takes orders from NATS and answers them.

An ack means "in my journal", never "done": the order book has it then. Reports leave the outbox
of the order book and are published until NATS has them.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from itertools import compress
from operator import not_
from typing import Annotated, Any, NamedTuple, cast

import msgspec
from msgspec import Meta

from snapshot_shared import instruments, subjects
from snapshot_shared.bus import Bus, Delivery
from snapshot_shared.codec import decode_json, encode_json
from snapshot_shared.errors import (
    BusUnavailable,
    Failure,
    InvalidMessage,
    InvalidName,
    NoSpace,
    OutcomeUnknown,
    Rejected,
    SnapbackError,
    UnsupportedVersion,
    WrongNode,
)
from snapshot_shared.ids import OrderId, owner_of, short_hash, verb_of
from snapshot_shared.journal import FRESH_S, KEEP_S
from snapshot_shared.ledger import Entry, Noted
from snapshot_shared.order_book import LIFE_SIGNS, OrderBook, Result
from snapshot_shared.orders import (
    CLEANING,
    FIRST_SCHEMA,
    SCHEMAS,
    AnyOrder,
    DeadLetter,
    Order,
    Progress,
    Report,
    astray,
)
from snapshot_shared.runner import Runner, Step
from snapshot_shared.spans import message_attributes, order_context
from snapshot_shared.steps import message_span
from snapshot_shared.tasks import any_set, end_all
from snapshot_shared.telemetry import Telemetry, working_on

__all__ = ["Courier", "Handler", "OrderContext", "Result"]

log = logging.getLogger(__name__)

PROGRESS_EVERY_S = 0.5
REPEAT_S = 3600.0
"""How old an order's last report may be to be published again after a reconnection, in seconds."""
LIFE_SIGNS_EVERY_S = FRESH_S / 2
"""How often the life signs of the last two such periods are published again, in seconds."""
MAX_REPORTS = 64
"""How many reports are published at a time."""

Handler = Callable[[Any, "OrderContext"], Awaitable[Result]]


class OrderContext:
    """What a handler may do besides its work: report, announce progress, run steps, note facts."""

    def __init__(self, book: OrderBook, bus: Bus, runner: Runner, entry: Entry, order: Any) -> None:
        """Belong to one accepted order."""
        self.entry = entry
        self.order = order
        self._book = book
        self._bus = bus
        self._runner = runner
        self._last_progress = float("-inf")
        self._last_quarter = -1

    def remaining_s(self) -> float:
        """Return the seconds left of the order's budget. A reboot ends every budget."""
        accepted = self.entry.accepted
        clocks = self._book.clocks
        if accepted.boot_id != clocks.boot_id:
            return 0.0
        return accepted.monotonic + accepted.deadline_s - clocks.monotonic()

    @property
    def is_handed_on(self) -> bool:
        """Whether the service stops and leaves this order to the next service."""
        return self._book.is_handed_on(self.entry)

    def uncut(self) -> asyncio.Event:
        """Return an event; until it is set, a stopping service waits for this order."""
        return self._book.uncut(self.entry)

    async def report(self, kind: str, **fields: Any) -> None:
        """Journal a report and have it published."""
        await self._book.report(self.entry, kind, **fields)

    async def note(self, key: str, value: Any) -> None:
        """Journal a fact that recovery will need."""
        await self._book.journal.append(
            Noted(order=self.entry.order, attempt=self.entry.attempt, key=key, value=value)
        )

    async def steps(self, verb: str, table: Sequence[Step]) -> None:
        """Run a step table for this order."""
        await self._runner.run(verb, self.order, table, remaining_s=self.remaining_s)

    async def progress(self, part: str, step: str, done: int, total: int, awaits: str = "") -> None:
        """Announce how many bytes are done: twice a second, at each quarter, and the last.

        `awaits` says what the step waits for.
        """
        now = self._book.clocks.monotonic()
        quarter = 4 * done // total if total else 4
        is_due = now - self._last_progress >= PROGRESS_EVERY_S
        if done < total and quarter == self._last_quarter and not is_due:
            return
        self._last_progress, self._last_quarter = now, quarter
        value = Progress(
            order=self.entry.order,
            attempt=self.entry.attempt,
            node=self._book.node,
            part=part,
            step=step,
            done=done,
            total=total,
            awaits=awaits,
            at=self._book.clocks.wall(),
        )
        subject = subjects.progress(self._book.node, OrderId(self.entry.order))
        await self._bus.announce(subject, encode_json(value))


class _Taken(NamedTuple):
    """An order that is being accepted; `kind` and `fields` are those of its first report."""

    delivery: Delivery
    order: Order
    kind: str = "accepted"
    fields: Mapping[str, Any] = {}


class Courier:
    """Takes the orders of an order book from NATS, has them carried out, delivers the reports."""

    schemas: tuple[int, ...] = SCHEMAS
    """The versions of orders that are carried out."""

    def __init__(
        self,
        book: OrderBook,
        bus: Bus,
        *,
        telemetry: Telemetry,
        runner: Runner,
        handlers: Mapping[type[Order], Handler],
    ) -> None:
        """Wire the parts; nothing runs before `serve`."""
        self.book = book
        self.bus = bus
        self.telemetry = telemetry
        self.runner = runner
        self._handlers = dict(handlers)
        self._again = bus.reconnections()
        self._metrics = runner.metrics

    async def serve(self) -> None:
        """Resume unfinished orders, then deliver reports and take orders.

        StorageFailed when the journal cannot be written any more: only a new start can find out
        what it holds.
        """
        for entry in self.book.journal.ledger.unfinished():
            await self._resume(entry)
        tasks = (
            asyncio.create_task(self._deliver(), name="outbox"),
            asyncio.create_task(self._take(), name="intake"),
            asyncio.create_task(self._resend(), name="resending"),
            asyncio.create_task(self.book.journal.until_broken(), name="journal"),
        )
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            await end_all(*tasks)

    # Orders.

    async def _take(self) -> None:
        durable = subjects.durable(self.book.node, self.book.service)
        filter_ = subjects.orders_of(self.book.node, self.book.service)
        batches = self.bus.consume_batches(subjects.ORDERS, durable, filter_)
        async with contextlib.aclosing(batches):
            async for deliveries in batches:
                await self.take(deliveries)

    async def take(self, deliveries: Sequence[Delivery]) -> None:
        """Judge messages: accept each, answer a repeat, or refuse it with a reason.

        What cannot be journalled or published is not acked and will be delivered again.
        """
        new: dict[str, _Taken] = {}
        for delivery in deliveries:
            with _or_again(delivery):
                try:
                    order = self._read(delivery)
                except (InvalidMessage, InvalidName, Rejected, UnsupportedVersion) as error:
                    await self._refuse(delivery, error)
                    continue
                if order.order in new:
                    await self._accept(new.values())
                    new = {}
                if (answers := self.book.answers(order)) is not None:
                    await self._repeat(delivery, order, answers)
                    continue
                new[order.order] = await self._taken(delivery, order)
        await self._accept(new.values())

    async def _taken(self, delivery: Delivery, order: Order) -> _Taken:
        if order.schema in self.schemas:
            forgotten = self._perhaps_forgotten(delivery, order)
            if forgotten is None:
                return _Taken(delivery, order)
            return _Taken(delivery, order, "failed", {"failure": forgotten})
        # On record, for the next build may be able to carry out what is delivered again.
        failure = self._unsupported(order.schema).to_failure()
        await self._keep_letter(delivery, failure)
        return _Taken(delivery, order, "rejected", {"failure": failure})

    async def _accept(self, new: Collection[_Taken]) -> None:
        """Journal orders with one fsync, begin each, and ack."""
        written = [self.book.accept(each.order, each.kind, **each.fields) for each in new]
        acks: list[Awaitable[None]] = []
        for each, accepted in zip(new, written, strict=True):
            with _or_again(each.delivery):
                await accepted
                if each.kind == "accepted":
                    self._count_accepted(each)
                    self._start(each.order, each.delivery.headers.get("traceparent", ""))
                acks.append(self._ack(each.delivery))
        await asyncio.gather(*acks)

    async def _ack(self, delivery: Delivery) -> None:
        with _or_again(delivery):
            await delivery.ack()

    def _count_accepted(self, taken: _Taken) -> None:
        verb = verb_of(OrderId(taken.order.order))
        self._metrics.add(instruments.ACCEPTED, verb)
        if taken.delivery.stored_at:
            age = max(self.book.clocks.wall() - taken.delivery.stored_at, 0.0)
            self._metrics.record(instruments.QUEUED, age, verb)

    def _perhaps_forgotten(self, delivery: Delivery, order: Order) -> Failure | None:
        """Return OutcomeUnknown if a new order may repeat one that the journal has dropped."""
        now, stored_at = self.book.clocks.wall(), delivery.stored_at
        is_old = 0 < stored_at < now - KEEP_S
        if not is_old or verb_of(OrderId(order.order)) in CLEANING:
            return None
        return OutcomeUnknown(
            f"the order is older than the orders that {self.book.node} remembers, and may have run",
            next_step="take a new snapshot or restore it again; if it is new, compare the clocks "
            "of that node and of nats-server",
            stored_at=stored_at,
            now=now,
        ).to_failure()

    def _read(self, delivery: Delivery) -> Any:
        node, service, order_id = subjects.parse_order(delivery.subject)
        try:
            order: Any = decode_json(delivery.data, cast("type[Any]", AnyOrder))
        except InvalidMessage:
            # Another version may not decode at all; its number is then the more helpful answer.
            if (schema := _claim(delivery.data).schema) not in self.schemas:
                raise self._unsupported(schema) from None
            raise
        if (node, service) != (self.book.node, self.book.service) or order.node != self.book.node:
            raise WrongNode(
                f"the order is for {order.node}, this is {self.book.node}",
                expected=self.book.node,
                found=order.node,
            )
        if order.order != order_id or owner_of(order.order) != order.owner:
            raise InvalidMessage(
                f"subject, id and owner differ: {order_id}, {order.order}, {order.owner}"
            )
        if why := astray(order):
            raise Rejected(f"the order reaches beyond its owner: {why}")
        if type(order) not in self._handlers:
            raise Rejected(f"{self.book.service} does not carry out {type(order).__name__}")
        if order.not_after is not None and self.book.clocks.wall() > order.not_after:
            raise Rejected("the order came too late to be started", not_after=order.not_after)
        return order

    def _unsupported(self, schema: int) -> UnsupportedVersion:
        known = ", ".join(map(str, self.schemas))
        return UnsupportedVersion(
            f"the order has schema {schema}, {self.book.service} on {self.book.node} reads {known}",
            found=schema,
            supported=list(self.schemas),
        )

    async def _refuse(self, delivery: Delivery, error: SnapbackError) -> None:
        """Copy to DEAD, report to the operator if the id can be known, and ack."""
        await self._keep_letter(delivery, error.to_failure())
        with contextlib.suppress(InvalidName):
            _, _, order_id = subjects.parse_order(delivery.subject)
            attempt = _claim(delivery.data).attempt
            await self._publish(self.book.refusal(order_id, attempt, error))
        await delivery.ack()

    async def _keep_letter(self, delivery: Delivery, failure: Failure) -> None:
        self._metrics.add(instruments.DEAD_LETTERS, failure.reason)
        log.warning("refused %s: %s", delivery.subject, failure)
        letter = DeadLetter(
            subject=delivery.subject[:4096],
            node=self.book.node,
            service=self.book.service,
            sequence=delivery.sequence,
            at=self.book.clocks.wall(),
            failure=failure,
            payload=delivery.data[:65536],
        )
        await self.bus.publish(subjects.dead(self.book.node), encode_json(letter))

    async def _repeat(self, delivery: Delivery, order: Order, answers: Sequence[Report]) -> None:
        """Answer what is on record already, and ack.

        An operator that orders again has not read the first answer, or could not know yet that it
        was one: this one must not be dropped as the same message, so its id names the order that
        it answers.
        """
        self._metrics.add(instruments.REPEATED, verb_of(OrderId(order.order)))
        for report in answers:
            await self._publish(report, again=f".{delivery.sequence}")
        await delivery.ack()

    def _start(self, order: Order, link: str = "") -> None:
        """Begin to carry an order out; `link` is the traceparent of the message it came in."""
        self.book.start(order, lambda entry: self._process(entry, order, link))

    async def _process(self, entry: Entry, order: Order, link: str) -> Result:
        verb = verb_of(OrderId(entry.order))
        service = self.book.service
        about = message_attributes(
            "process",
            subjects.order_template(service, verb),
            client=subjects.durable(self.book.node, service),
            order=entry.order,
            attempt=entry.attempt,
        )
        family = subjects.family(subjects.order_template(service, verb))
        with (
            self._metrics.timed(instruments.PROCESS_DURATION, family, verb),
            self.telemetry.span(
                message_span("process", service, verb),
                kind="consumer",
                parent=order.traceparent,
                identity=order_context(order.traceparent, entry.order, entry.attempt),
                links=[link] if link else [],
                attributes={**about, "snapback.verb": verb, "snapback.node": self.book.node},
            ),
        ):
            context = OrderContext(self.book, self.bus, self.runner, entry, order)
            return await self._handlers[type(order)](order, context)

    async def _resume(self, entry: Entry) -> None:
        """Go on after a restart: run again what may be run again, fail the rest."""
        try:
            order: Any = decode_json(bytes(entry.accepted.payload), cast("type[Any]", AnyOrder))
        except InvalidMessage as unreadable:
            # A newer build has accepted it and was then replaced by this one.
            await self.book.fail(entry, unreadable)
            return
        if order.schema not in self.schemas:
            await self.book.fail(entry, self._unsupported(order.schema))
        elif entry.open_step is not None and entry.notes.get("no-replay"):
            step = entry.open_step
            error = OutcomeUnknown(f"the service was restarted within step {step}", step=step)
            with working_on(entry.order, entry.attempt):
                await self.book.fail(entry, error)
        else:
            self._start(order)

    # Reports.

    async def _deliver(self) -> None:
        outbox = self.book.outbox
        while True:
            await outbox.filled()
            reports, are_new = outbox.take(MAX_REPORTS)
            delivered = await asyncio.gather(*map(self._is_delivered, reports))
            if are_new:
                self.book.delivered(compress(reports, delivered))
            if not all(delivered):
                outbox.put_back(compress(reports, map(not_, delivered)), are_new=are_new)
                await self.bus.pause(self._again)

    async def _is_delivered(self, report: Report) -> bool:
        """Publish a report; whether it need not be published once more."""
        try:
            await self._publish(report)
        except BusUnavailable as error:
            with working_on(report.order, report.attempt):
                log.info("report %s/%s waits: %s", report.order, report.kind, error)
            return False
        return True

    async def _resend(self) -> None:
        """After a reconnection report again what was reported lately, and life signs regularly.

        A server that lost its store has lost reports that it had acknowledged, perhaps before
        the operator had read them. Most are asked for again, with their orders; the life signs of
        a pod that was started are not. To fold a report twice changes nothing.
        """
        again = self.bus.reconnections()
        while True:
            if await any_set(LIFE_SIGNS_EVERY_S, again):
                again.clear()
                self.book.queue_since(self.book.clocks.wall() - REPEAT_S)
            else:
                since = self.book.clocks.wall() - 2 * LIFE_SIGNS_EVERY_S
                self.book.queue_since(since, LIFE_SIGNS)

    async def _publish(self, report: Report, *, again: str = "") -> None:
        payload = encode_json(report)
        # The ids of a stream are those of all nodes. With what it says in it, an id can neither be
        # taken by another node nor by the refusal of a bad order.
        said = short_hash(payload.decode())
        await self.bus.publish(
            subjects.report(self.book.node, OrderId(report.order), report.kind),
            payload,
            message_id=f"{report.order}.{report.attempt}.{report.n}.{said}{again}",
        )


@contextlib.contextmanager
def _or_again(delivery: Delivery) -> Iterator[None]:
    """Leave a message without an ack when it cannot be taken now: it is delivered again."""
    try:
        yield
    except (BusUnavailable, NoSpace) as error:
        log.warning("order on %s will come again: %s", delivery.subject, error)


class _Claim(msgspec.Struct):
    """What a bad order claims."""

    attempt: Annotated[int, Meta(ge=0, le=1_000_000)] = 0
    schema: int = FIRST_SCHEMA


def _claim(data: bytes) -> _Claim:
    try:
        return msgspec.json.decode(data, type=_Claim)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return _Claim()
