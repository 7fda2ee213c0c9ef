"""The operator's side of NATS: orders out, the mirror for people and announcements."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from contextlib import AbstractContextManager
from typing import Any

from snapshot_api.kinds import KINDS, AnyObject, kind_of
from snapshot_api.meta import OrderStatus
from snapshot_api.views import mirrored
from snapshot_operator.ports import Change
from snapshot_operator.runtime.cluster import Cluster
from snapshot_shared import subjects
from snapshot_shared.api import ObjectEvent
from snapshot_shared.bus import Bus
from snapshot_shared.codec import encode_json
from snapshot_shared.errors import Conflict, SnapbackError
from snapshot_shared.ids import NodeName, OrderId, check_order_id
from snapshot_shared.orders import envelope_of
from snapshot_shared.permissions import User
from snapshot_shared.spans import message_attributes
from snapshot_shared.steps import message_span
from snapshot_shared.tasks import any_set
from snapshot_shared.telemetry import Telemetry

log = logging.getLogger(__name__)

MAX_TRIES = 5
"""How often a publish is tried while others write on the same subject."""
RETRY_S = 5.0
"""How soon the mirror is compared again after something could not be written, in seconds.

It is twice as long after each further comparison of which that is true, up to COMPARE_EVERY_S.
"""
COMPARE_EVERY_S = 3600.0


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
    """Publishes every change on `snap.event.…` and keeps the mirror for people up to date.

    What changes while NATS is away, or while it loses what it holds, is found by `keep_mirror`.
    """

    def __init__(self, bus: Bus, source: str = "", objects: Cluster | None = None) -> None:
        """Use a connected bus; `source` names this process. Without objects no mirror."""
        self._bus = bus
        self._source = source
        self._objects = objects
        self._changes: dict[str, tuple[Change, AnyObject]] = {}
        self._filled = asyncio.Event()
        self._versions: dict[str, str] = {}
        """By key, the version that this process has put into the mirror; empty for one removed."""
        self._differing: dict[str, AnyObject | None] = {}
        """By key, what the mirror lacks; None for what it is to be rid of."""
        self._behind = asyncio.Event()

    def watcher(self, old: AnyObject | None, new: AnyObject | None) -> None:
        """Take a change of an object; of several of one object only the newest is published."""
        value = new or old
        if value is None:
            return
        change: Change = "DELETED" if new is None else "ADDED" if old is None else "MODIFIED"
        self._changes[value.metadata.uid] = (change, value)
        self._filled.set()

    async def run(self) -> None:
        """Publish changes, oldest first; what cannot be published is left out.

        The mirror gets what it lacks one after another, while there is no change to publish.
        """
        while True:
            await self._filled.wait()
            self._filled.clear()
            while self._changes or self._differing:
                is_news = bool(self._changes) or not self._behind.is_set()
                try:
                    if self._changes:
                        await self._publish(*self._changes.pop(next(iter(self._changes))))
                    else:
                        await self._mirror(*self._differing.popitem())
                except SnapbackError as error:
                    # Of thousands of keys that fail for one reason, the first one says it.
                    if is_news:
                        log.info("a change is not published: %s", error)
                    self._behind.set()

    async def keep_mirror(self) -> None:
        """Compare the mirror with the objects: at start, with each reconnection, and every hour.

        Sooner after something could not be written, and less and less soon while that goes on. What
        this process has written is not written again while its key is there: that a key was removed
        shows for an hour.
        """
        again, wait_s = self._bus.reconnections(), RETRY_S
        while self._objects is not None:
            self._behind.clear()
            again.clear()
            try:
                await self._compare(self._objects)
            except SnapbackError as error:
                log.info("the mirror is not compared: %s", error)
                self._behind.set()
            if await any_set(RETRY_S, again) or not self._behind.is_set():
                wait_s = RETRY_S
                await any_set(COMPARE_EVERY_S - RETRY_S, again, self._behind)
            else:
                is_new = await any_set(wait_s - RETRY_S, again)
                wait_s = RETRY_S if is_new else min(2 * wait_s, COMPARE_EVERY_S)
        await asyncio.Event().wait()

    async def _compare(self, objects: Cluster) -> None:
        start = subjects.bucket_key(subjects.OBJECTS_BUCKET, "")
        stream = subjects.stream_of_bucket(subjects.OBJECTS_BUCKET)
        found = await self._bus.subjects_in(stream, f"{start}>")
        stored = {subject.removeprefix(start) for subject in found}
        wanted = {_key(value): value for kind in KINDS for value in objects.all(kind)}
        self._versions = {key: put for key, put in self._versions.items() if key in stored}
        values = ((key, wanted.get(key)) for key in sorted(stored | wanted.keys()))
        self._differing = {k: v for k, v in values if self._versions.get(k) != _version(v)}
        self._filled.set()

    async def _publish(self, change: Change, value: AnyObject) -> None:
        kind, meta = kind_of(value), value.metadata
        shown = mirrored(value)
        event = ObjectEvent(type=change, object=shown, source=self._source)
        subject = subjects.event(kind.plural, meta.namespace, meta.name)
        await self._bus.announce(subject, encode_json(event))
        if self._objects is not None:
            await self._mirror(_key(value), value if change != "DELETED" else None, shown)

    async def _mirror(self, key: str, value: AnyObject | None, shown: Any = None) -> None:
        """Write what there is now under a key, unless NATS is away: a comparison follows that."""
        self._differing.pop(key, None)
        self._versions.pop(key, None)
        if not self._bus.is_connected:
            return
        if value is None:
            await self._bus.remove(subjects.OBJECTS_BUCKET, key)
        else:
            data = encode_json(shown or mirrored(value))
            await self._bus.put(subjects.OBJECTS_BUCKET, key, data)
        self._versions[key] = _version(value)


def _version(value: AnyObject | None) -> str:
    return value.metadata.resource_version if value is not None else ""


def _key(value: AnyObject) -> str:
    return subjects.object_key(kind_of(value).plural, value.metadata.namespace, value.metadata.name)


def _subject(order: OrderStatus) -> str:
    return subjects.order(NodeName(order.node), order.service, OrderId(check_order_id(order.order)))
