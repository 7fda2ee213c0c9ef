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
from snapshot_shared.errors import BusUnavailable, Conflict, InvalidMessage
from snapshot_shared.ids import NodeName, OrderId, check_order_id
from snapshot_shared.objects import AnyObject, OrderStatus, kind_of
from snapshot_shared.orders import SCHEMA_VERSION, Presence

log = logging.getLogger(__name__)


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
        payload = encode_json(order.payload)
        headers = {"Snapback-Schema": str(SCHEMA_VERSION)}
        if trace := order.payload.get("traceparent"):
            headers["traceparent"] = trace
        expected = 0
        for _ in range(5):
            try:
                await self._bus.publish(subject, payload, headers=headers, expected_last=expected)
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

    async def withdraw(self, order: OrderStatus) -> None:
        """Delete the message by its exact sequence, if it is still this attempt."""
        found = await self._bus.last(subjects.ORDERS, _subject(order))
        if found is not None and _attempt(found[1]) == order.attempt:
            await self._bus.delete(subjects.ORDERS, found[0])

    async def published(self) -> set[str]:
        """List the ids of all orders that the stream holds now."""
        names = await self._bus.subjects_in(subjects.ORDERS, "snap.order.>")
        return {name.rpartition(".")[2] for name in names}


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
            found[presence.node] = presence
        return found


class Announcer:
    """Tells every change on `snap.event.…` and keeps the mirror for people up to date."""

    def __init__(self, bus: Bus) -> None:
        """Use a connected bus."""
        self._bus = bus
        self._changes: asyncio.Queue[tuple[Change, AnyObject]] = asyncio.Queue()

    def listener(self, change: Change, value: AnyObject) -> None:
        """Take a change of the store."""
        self._changes.put_nowait((change, value))

    async def run(self) -> None:
        """Tell changes in their order, for ever; what cannot be told is left out."""
        while True:
            change, value = await self._changes.get()
            kind, meta = kind_of(value), value.metadata
            event = ObjectEvent(type=change, object=value)
            subject = subjects.event(kind.plural, meta.namespace, meta.name)
            await self._bus.announce(subject, encode_json(event))
            key = subjects.object_key(kind.plural, meta.namespace, meta.name)
            try:
                if change == "DELETED":
                    await self._bus.remove(subjects.OBJECTS_BUCKET, key)
                else:
                    await self._bus.put(subjects.OBJECTS_BUCKET, key, encode_json(_mirrored(value)))
            except BusUnavailable as error:
                log.info("mirror of %s is behind: %s", key, error)


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
