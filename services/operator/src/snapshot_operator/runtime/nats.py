"""The operator's side of NATS: orders out, the mirror for people and announcements."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from contextlib import AbstractContextManager

from snapshot_operator.ports import Change
from snapshot_shared import subjects
from snapshot_shared.api import ObjectEvent
from snapshot_shared.bus import Bus
from snapshot_shared.codec import encode_json
from snapshot_shared.errors import Conflict, SnapbackError
from snapshot_shared.ids import NodeName, OrderId, check_order_id
from snapshot_shared.objects.kinds import AnyObject, kind_of
from snapshot_shared.objects.meta import OrderStatus
from snapshot_shared.orders import envelope_of
from snapshot_shared.permissions import User
from snapshot_shared.spans import message_attributes
from snapshot_shared.steps import message_span
from snapshot_shared.telemetry import Telemetry
from snapshot_shared.views import mirrored

log = logging.getLogger(__name__)

MAX_TRIES = 5
"""How often a publish is tried while others write on the same subject."""


class NatsOrders:
    """The `OrderBus` port over the ORDERS stream."""

    def __init__(self, bus: Bus, telemetry: Telemetry | None = None) -> None:
        """Use a connected bus; with a tracer each publication of a traced order is a span."""
        self._bus = bus
        self._telemetry = telemetry

    async def publish(self, order: OrderStatus) -> None:
        """Publish with the expected last sequence; on conflict compare attempts and decide."""
        with self._span(order) as trace:
            await self._publish(order, trace)

    def _span(self, order: OrderStatus) -> AbstractContextManager[str]:
        trace = envelope_of(order.payload).traceparent
        if self._telemetry is None or not trace:
            return contextlib.nullcontext(trace)
        attributes = message_attributes(
            "publish",
            subjects.order_template(order.service, order.verb),
            client=User("operator").name,
            order=order.order,
            attempt=order.attempt,
        )
        return self._telemetry.span(
            message_span("publish", order.service, order.verb),
            kind="producer",
            parent=trace,
            attributes={**attributes, "snapback.verb": order.verb},
        )

    async def _publish(self, order: OrderStatus, trace: str) -> None:
        subject = _subject(order)
        expected = 0
        for _ in range(MAX_TRIES):
            try:
                await self._send(subject, order, expected, trace)
            except Conflict:
                found = await self._bus.last(subjects.ORDERS, subject)
                if found is None:
                    expected = 0
                    continue
                expected, data = found
                if envelope_of(data).attempt >= order.attempt:
                    return
            else:
                return
        raise Conflict(f"order {order.order} keeps changing on the stream")

    async def ensure(self, order: OrderStatus) -> None:
        """Publish what the stream lacks; what stands there already adds no span to the trace."""
        found = await self._bus.last(subjects.ORDERS, _subject(order))
        if found is None or envelope_of(found[1]).attempt < order.attempt:
            await self.publish(order)

    async def repeat(self, order: OrderStatus) -> None:
        """Publish in place of the same attempt; one that is answered meanwhile stays withdrawn."""
        subject = _subject(order)
        found = await self._bus.last(subjects.ORDERS, subject)
        if found is not None and envelope_of(found[1]).attempt == order.attempt:
            with self._span(order) as trace, contextlib.suppress(Conflict):
                await self._send(subject, order, found[0], trace)

    async def replace(self, order: OrderStatus) -> None:
        """Publish whatever stands there. The sweep puts back a later attempt that this hides."""
        subject = _subject(order)
        with self._span(order) as trace:
            for _ in range(MAX_TRIES):
                found = await self._bus.last(subjects.ORDERS, subject)
                try:
                    return await self._send(subject, order, found[0] if found else 0, trace)
                except Conflict:
                    continue
        raise Conflict(f"order {order.order} keeps changing on the stream")

    async def _send(self, subject: str, order: OrderStatus, expected: int, trace: str) -> None:
        headers = {"Snapback-Schema": str(envelope_of(order.payload).schema)}
        if trace:
            headers["traceparent"] = trace
        payload = bytes(order.payload)
        await self._bus.publish(subject, payload, headers=headers, expected_last=expected)

    async def withdraw(self, order: OrderStatus) -> None:
        """Delete the message by its exact sequence, if it is still this attempt."""
        found = await self._bus.last(subjects.ORDERS, _subject(order))
        if found is not None and envelope_of(found[1]).attempt <= order.attempt:
            await self._bus.delete(subjects.ORDERS, found[0])

    async def published(self) -> dict[str, str]:
        """Return the subjects of all orders that the stream holds now, by order id."""
        names = await self._bus.subjects_in(subjects.ORDERS, "snap.order.>")
        return {name.rpartition(".")[2]: name for name in names}

    async def fill(self) -> float:
        """Return the share of the stream's room that is taken, from 0 to 1."""
        return await self._bus.fill(subjects.ORDERS)

    async def remove(self, subject: str) -> None:
        """Delete the message on a subject by its exact sequence."""
        found = await self._bus.last(subjects.ORDERS, subject)
        if found is not None:
            await self._bus.delete(subjects.ORDERS, found[0])


class ChangePublisher:
    """Publishes every change on `snap.event.…` and keeps the mirror for people up to date."""

    def __init__(self, bus: Bus, source: str = "", *, is_mirroring: bool = True) -> None:
        """Use a connected bus; `source` names this process. The mirror may be left out."""
        self._bus = bus
        self._is_mirroring = is_mirroring
        self._source = source
        self._changes: dict[str, tuple[Change, AnyObject]] = {}
        self._filled = asyncio.Event()

    def watcher(self, old: AnyObject | None, new: AnyObject | None) -> None:
        """Take a change of an object; of several of one object only the newest is published."""
        value = new or old
        if value is None:
            return
        change: Change = "DELETED" if new is None else "ADDED" if old is None else "MODIFIED"
        self._changes[value.metadata.uid] = (change, value)
        self._filled.set()

    async def run(self) -> None:
        """Publish changes, oldest first; what cannot be published is left out."""
        while True:
            await self._filled.wait()
            self._filled.clear()
            while self._changes:
                change, value = self._changes.pop(next(iter(self._changes)))
                try:
                    await self._publish(change, value)
                except SnapbackError as error:
                    log.info("%s is not announced: %s", value.metadata.name, error)

    async def _publish(self, change: Change, value: AnyObject) -> None:
        kind, meta = kind_of(value), value.metadata
        shown = mirrored(value)
        event = ObjectEvent(type=change, object=shown, source=self._source)
        subject = subjects.event(kind.plural, meta.namespace, meta.name)
        await self._bus.announce(subject, encode_json(event))
        if not self._is_mirroring or not self._bus.is_connected:
            return
        key = subjects.object_key(kind.plural, meta.namespace, meta.name)
        if change == "DELETED":
            await self._bus.remove(subjects.OBJECTS_BUCKET, key)
        else:
            await self._bus.put(subjects.OBJECTS_BUCKET, key, encode_json(shown))


def _subject(order: OrderStatus) -> str:
    return subjects.order(NodeName(order.node), order.service, OrderId(check_order_id(order.order)))
