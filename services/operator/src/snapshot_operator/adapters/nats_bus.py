"""The operator's side of NATS: orders out, presence in, the mirror and announcements."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import msgspec

from snapshot_operator.ports import Change
from snapshot_shared import subjects
from snapshot_shared.api import ObjectEvent
from snapshot_shared.bus import Bus
from snapshot_shared.codec import decode_json, encode_json
from snapshot_shared.errors import Conflict, InvalidMessage, SnapbackError
from snapshot_shared.ids import NodeName, OrderId, check_order_id, token
from snapshot_shared.objects import AnyObject, OrderStatus, kind_of
from snapshot_shared.orders import SCHEMA_VERSION, Presence

log = logging.getLogger(__name__)

TRIES = 5
"""How often a publish is tried while others write on the same subject."""


class _Claim(msgspec.Struct):
    attempt: int = 0


class NatsOrders:
    """The `OrderBus` port over the ORDERS stream."""

    def __init__(self, bus: Bus) -> None:
        """Use a connected bus."""
        self._bus = bus

    async def publish(self, order: OrderStatus) -> None:
        """Publish with the expected last sequence; on conflict compare attempts and decide."""
        subject = _subject(order)
        expected = 0
        for _ in range(TRIES):
            try:
                await self._send(subject, order, expected)
            except Conflict:
                found = await self._bus.last(subjects.ORDERS, subject)
                if found is None:
                    expected = 0
                    continue
                expected, data = found
                if _attempt(data) >= order.attempt:
                    return
            else:
                return
        raise Conflict(f"order {order.order} keeps changing on the stream")

    async def replace(self, order: OrderStatus) -> None:
        """Publish whatever stands there. A later attempt that this hides, the sweep puts back."""
        subject = _subject(order)
        for _ in range(TRIES):
            found = await self._bus.last(subjects.ORDERS, subject)
            try:
                return await self._send(subject, order, found[0] if found else 0)
            except Conflict:
                continue
        raise Conflict(f"order {order.order} keeps changing on the stream")

    async def _send(self, subject: str, order: OrderStatus, expected: int) -> None:
        headers = {"Snapback-Schema": str(SCHEMA_VERSION)}
        if trace := order.payload.get("traceparent"):
            headers["traceparent"] = trace
        payload = encode_json(order.payload)
        await self._bus.publish(subject, payload, headers=headers, expected_last=expected)

    async def withdraw(self, order: OrderStatus) -> None:
        """Delete the message by its exact sequence, if it is still this attempt."""
        found = await self._bus.last(subjects.ORDERS, _subject(order))
        if found is not None and _attempt(found[1]) <= order.attempt:
            await self._bus.delete(subjects.ORDERS, found[0])

    async def published(self) -> dict[str, str]:
        """List the subjects of all orders that the stream holds now, by order id."""
        names = await self._bus.subjects_in(subjects.ORDERS, "snap.order.>")
        return {name.rpartition(".")[2]: name for name in names}

    async def fill(self) -> float:
        """Give the share of the stream's room that is taken, from 0 to 1."""
        return await self._bus.fill(subjects.ORDERS)

    async def remove(self, subject: str) -> None:
        """Delete the message on a subject by its exact sequence."""
        found = await self._bus.last(subjects.ORDERS, subject)
        if found is not None:
            await self._bus.delete(subjects.ORDERS, found[0])


class NatsNodes:
    """The `Nodes` port over the `snap_nodes` bucket."""

    def __init__(self, bus: Bus) -> None:
        """Use a connected bus."""
        self._bus = bus

    async def present(self) -> dict[str, Presence]:
        """Read the presence of every node; what does not decode is logged and left out."""
        found = {}
        for key, value in (await self._bus.entries(subjects.NODES_BUCKET)).items():
            try:
                presence = decode_json(value, Presence)
            except InvalidMessage as error:
                log.warning("presence of %s is ignored: %s", key, error)
                continue
            if token(presence.node) == key:
                found[presence.node] = presence
        return found


class Announcer:
    """Tells every change on `snap.event.…` and keeps the mirror for people up to date."""

    def __init__(self, bus: Bus, source: str = "") -> None:
        """Use a connected bus; `source` names this process."""
        self._bus = bus
        self._source = source
        self._changes: dict[str, tuple[Change, AnyObject]] = {}
        self._filled = asyncio.Event()

    def listener(self, change: Change, value: AnyObject) -> None:
        """Take a change of the store; of one object only the newest is told."""
        self._changes[value.metadata.uid] = (change, value)
        self._filled.set()

    async def run(self) -> None:
        """Tell changes, oldest first, for ever; what cannot be told is left out."""
        while True:
            await self._filled.wait()
            self._filled.clear()
            while self._changes:
                change, value = self._changes.pop(next(iter(self._changes)))
                try:
                    await self._tell(change, value)
                except SnapbackError as error:
                    log.info("%s is not announced: %s", value.metadata.name, error)

    async def _tell(self, change: Change, value: AnyObject) -> None:
        kind, meta = kind_of(value), value.metadata
        shown = _mirrored(value)
        event = ObjectEvent(type=change, object=shown, source=self._source)
        subject = subjects.event(kind.plural, meta.namespace, meta.name)
        await self._bus.announce(subject, encode_json(event))
        if not self._bus.is_connected:
            return
        key = subjects.object_key(kind.plural, meta.namespace, meta.name)
        if change == "DELETED":
            await self._bus.remove(subjects.OBJECTS_BUCKET, key)
        else:
            await self._bus.put(subjects.OBJECTS_BUCKET, key, encode_json(shown))


def _mirrored(value: AnyObject) -> dict[str, Any]:
    """Give what the mirror may show: identity and status, never a spec with its environment."""
    shown: dict[str, Any] = msgspec.to_builtins(value)
    identity = shown.get("spec", {}).get("identity")
    shown.pop("spec", None)
    if identity:
        shown["identity"] = identity
    return shown


def _subject(order: OrderStatus) -> str:
    return subjects.order(NodeName(order.node), order.service, OrderId(check_order_id(order.order)))


def _attempt(data: bytes) -> int:
    try:
        return msgspec.json.decode(data, type=_Claim).attempt
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return 0
