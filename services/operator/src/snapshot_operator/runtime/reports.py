"""Takes reports from their stream and gives each to the decision about the object it is for."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

from snapshot_api.views import Ordered
from snapshot_operator.runtime.cluster import Cluster, key_of
from snapshot_operator.runtime.manager import Input, Manager, owner_uid
from snapshot_shared import instruments, subjects
from snapshot_shared.bus import Bus, Delivery
from snapshot_shared.codec import decode_json, encode_json
from snapshot_shared.errors import (
    MAX_VALUES_BYTES,
    BusUnavailable,
    InvalidMessage,
    SnapbackError,
    StoreBusy,
    failure_of,
)
from snapshot_shared.ids import NodeName, OrderId, verb_of
from snapshot_shared.metrics import OFF, Metrics
from snapshot_shared.orders import DeadLetter, Report
from snapshot_shared.telemetry import working_on

log = logging.getLogger(__name__)

DURABLE = "operator"
OPERATOR = NodeName("operator")
ACK_WAIT_S = 5.0
"""A report is folded in milliseconds; one that an operator took with it comes again after this."""
MAX_REPORT_BYTES = 128 * 1024
MAX_COPY_BYTES = 65536


class Reports:
    """The intake of reports."""

    def __init__(
        self,
        bus: Bus,
        cluster: Cluster,
        manager: Manager,
        wall: Callable[[], float],
        metrics: Metrics = OFF,
    ) -> None:
        """Use a connected bus."""
        self._bus = bus
        self._cluster = cluster
        self._manager = manager
        self._wall = wall
        self._metrics = metrics
        self._acks: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Take reports in the order of the stream. No report can end this."""
        async for delivery in self._bus.consume(
            subjects.REPORTS, DURABLE, "snap.report.>", ack_wait_s=ACK_WAIT_S
        ):
            try:
                await self._take(delivery)
            except (BusUnavailable, StoreBusy) as error:
                log.warning("report on %s will come again: %s", delivery.subject, error)
            except SnapbackError as error:
                await self._refuse(delivery, error)
            except Exception as error:
                log.exception("report on %s cannot be taken", delivery.subject)
                await self._refuse(delivery, error)

    async def _take(self, delivery: Delivery) -> None:
        """Have a report folded in.

        One for an object that is gone from the store, or is of a kind without orders, is acked.
        """
        report = decode_json(delivery.data, Report, limit=MAX_REPORT_BYTES)
        expected = subjects.report(NodeName(report.node), OrderId(report.order), report.kind)
        if delivery.subject != expected:
            raise InvalidMessage(f"it says {expected}, and came on {delivery.subject}")
        _check_values(report.failure.values if report.failure is not None else {})
        uid = owner_uid(report)
        verb = verb_of(OrderId(report.order))
        with (
            working_on(report.order, report.attempt),
            self._metrics.timed(
                instruments.PROCESS_DURATION, subjects.family(delivery.subject), verb
            ),
        ):
            value = self._cluster.by_uid(uid) or await self._cluster.find(uid)
            if not isinstance(value, Ordered):
                self._ack(delivery)
                return
            self._manager.take(key_of(value), Input(report, lambda: self._ack(delivery)))

    def _ack(self, delivery: Delivery) -> None:
        task = asyncio.create_task(_acked(delivery))
        self._acks.add(task)
        task.add_done_callback(self._acks.discard)

    async def _refuse(self, delivery: Delivery, error: Exception) -> None:
        """Keep a copy of what is no report, for people, and take it off the stream's list."""
        failure = failure_of(error)
        log.warning("report on %s is refused: %s", delivery.subject, failure)
        letter = DeadLetter(
            subject=delivery.subject[:4096],
            node=OPERATOR,
            service="operator",
            sequence=delivery.sequence,
            at=self._wall(),
            failure=failure,
            payload=delivery.data[:MAX_COPY_BYTES],
        )
        try:
            await self._bus.publish(subjects.dead(OPERATOR), encode_json(letter))
        except BusUnavailable as unavailable:
            log.warning("report on %s will come again: %s", delivery.subject, unavailable)
            return
        self._ack(delivery)


async def _acked(delivery: Delivery) -> None:
    try:
        await delivery.ack()
    except BusUnavailable as error:
        log.info("report on %s will come again: %s", delivery.subject, error)


def _check_values(values: dict[str, Any]) -> None:
    """Raise InvalidMessage unless the values are plain: they are stored, and shown to people."""
    for key, value in values.items():
        items = value if isinstance(value, list) else [value]
        if any(isinstance(item, dict | list) for item in items):
            raise InvalidMessage(
                f"failure.values.{key[:64]} is nested: a value is a scalar or a list of scalars"
            )
    size = len(encode_json(values))
    if size > MAX_VALUES_BYTES:
        raise InvalidMessage(
            f"failure.values has {size} bytes, the limit is {MAX_VALUES_BYTES}",
            size=size,
            limit=MAX_VALUES_BYTES,
        )
