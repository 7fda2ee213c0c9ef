"""Makes the stream of orders agree with the store: at start, on reconnect, every 30 seconds.

NATS can lose everything it holds; what it lacks is published again, and what it holds although
nothing awaits it is removed. Never in reaction to a report.

The first sweep has every unanswered order delivered again. A store that was restored from a backup
awaits answers that were reported and acknowledged before; only a new delivery has them repeated.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Mapping

from snapshot_api.kinds import KINDS, AnyObject
from snapshot_api.meta import OrderStatus
from snapshot_api.views import is_answered, orders_of
from snapshot_operator.core import backpressure
from snapshot_operator.ports import OrderBus
from snapshot_operator.runtime.cluster import Cluster
from snapshot_operator.runtime.manager import Manager
from snapshot_operator.runtime.owned import owned
from snapshot_operator.runtime.world import Warned, unwarned
from snapshot_shared import instruments, subjects
from snapshot_shared.errors import BusUnavailable, Conflict, InvalidName, StoreBusy
from snapshot_shared.ids import check_order_id, owner_of
from snapshot_shared.metrics import OFF, Metrics
from snapshot_shared.orders import CLEANING
from snapshot_shared.tasks import any_set

log = logging.getLogger(__name__)

RETRY_S = 1.0
EVERY_S = 30.0


class Sweep:
    """Compares the stream with the store, and measures its room."""

    def __init__(
        self,
        cluster: Cluster,
        orders: OrderBus,
        manager: Manager,
        unpublished: asyncio.Event,
        now: Callable[[], float],
        metrics: Metrics = OFF,
        warned: Warned = unwarned,
    ) -> None:
        """Use the objects and the stream. `unpublished` is set when a sweep is wanted soon.

        `warned` gets each object whose status has orders that are left out.
        """
        self._warned = warned
        self._cluster = cluster
        self._orders = orders
        self._manager = manager
        self._unpublished = unpublished
        self._now = now
        self._swept = time.monotonic()
        self._repeats = True
        self.swept_at: float | None = None
        """When the stream was last made to agree with the store, in seconds since the epoch."""
        self.fill = 0.0
        """The share of the stream's room that was taken then."""
        metrics.observe(instruments.STREAM_FILL, lambda: {(subjects.ORDERS,): self.fill})
        metrics.observe(instruments.SWEEP_AGE, lambda: {(): time.monotonic() - self._swept})

    async def run(self, again: asyncio.Event, also: Callable[[], Awaitable[None]]) -> None:
        """Sweep, then do `also`, until it is cancelled. `again` is set by a reconnection."""
        while True:
            try:
                await self.once()
            except (BusUnavailable, StoreBusy) as error:
                log.warning("sweep: %s", error)
                self._unpublished.set()
            await also()
            await self._rest(again)

    async def _rest(self, again: asyncio.Event) -> None:
        """Wait for a reconnection or 30 s; or RETRY_S, when an order could not be published."""
        if not await any_set(RETRY_S, again):
            await any_set(EVERY_S - RETRY_S, again, self._unpublished)
        again.clear()
        self._unpublished.clear()

    async def once(self) -> None:
        """Remove what is not awaited, publish what is missing.

        The stream is listed first: what it holds then was in the store before. Room is made before
        it is needed, and what cleans up comes first: a full stream may refuse the rest.
        """
        published = await self._orders.published()
        unanswered = [
            order
            for kind in KINDS
            for owner in self._cluster.all(kind)
            for order in owned(
                owner, [i for i in orders_of(owner) if not is_answered(i)], self._warned
            )
        ]
        awaited = {order.order for order in unanswered}
        for order_id in await self._unwanted(published.keys() - awaited):
            # It may have been ordered again while the store was read.
            if not _awaits(self._cluster.by_uid(_owner_of(order_id)), order_id):
                await self._orders.remove(published[order_id])
        await self._measure()
        if self._repeats:
            for order in unanswered:
                if order.order in published and self._is_awaited(order):
                    await self._orders.repeat(order)
            self._repeats = False
        for order in sorted(unanswered, key=lambda order: order.verb not in CLEANING):
            if self._is_awaited(order):
                await self._publish_again(order, published)
        self._swept = time.monotonic()
        self.swept_at = self._now()

    async def _unwanted(self, order_ids: Collection[str]) -> list[str]:
        """Return the orders to which the store itself holds nothing that awaits an answer.

        An owner that cannot be read, as one that a later version has written, may await it.
        """
        owners = {order_id: _owner_of(order_id) for order_id in sorted(order_ids)}
        uids = {uid for uid in owners.values() if uid}
        found = await self._cluster.find_all(sorted(uids), skips_busy=True)
        if unread := uids - found.keys():
            log.warning("sweep: %d owners cannot be read, such as %s", len(unread), min(unread))
        return [
            order
            for order, uid in owners.items()
            if uid not in unread and not _awaits(found.get(uid), order)
        ]

    def _is_awaited(self, order: OrderStatus) -> bool:
        """Whether an order is unanswered still; the sweep itself takes its time."""
        key = (order.order, order.attempt)
        mine = orders_of(self._cluster.by_uid(owner_of(check_order_id(order.order))))
        return any((i.order, i.attempt) == key and not is_answered(i) for i in mine)

    async def _measure(self) -> None:
        self.fill = await self._orders.fill()
        is_full = backpressure.is_full(self.fill)
        if is_full:
            log.warning("the stream of orders is %.0f%% full: nothing new begins", 100 * self.fill)
        self._manager.set_full(is_full=is_full)

    async def _publish_again(self, order: OrderStatus, published: Mapping[str, str]) -> None:
        """Publish what is missing.

        A later attempt may hide behind an earlier one's message, and an order that no node has
        accepted behind a message that is none.
        """
        is_there = order.order in published
        if is_there and order.attempt == 1 and order.state != "ordered":
            return
        try:
            await (self._orders.ensure(order) if is_there else self._orders.publish(order))
        except Conflict as error:
            log.warning("sweep: %s", error)


def _owner_of(order_id: str) -> str:
    """Return the uid of the object that an order serves; empty for a name that is no order's."""
    try:
        return owner_of(check_order_id(order_id))
    except InvalidName:
        return ""


def _awaits(owner: AnyObject | None, order_id: str) -> bool:
    return any(item.order == order_id and not is_answered(item) for item in orders_of(owner))
