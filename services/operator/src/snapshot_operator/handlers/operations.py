"""Requests of people on call: `snap.api.cordon`, `abort`, `requeue` and `health`."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import NamedTuple

from msgspec.structs import replace

from snapshot_operator.domain import wishes
from snapshot_operator.domain.plan import orders_of
from snapshot_operator.handlers.answering import Endpoint, answering
from snapshot_operator.ports import Cluster, OrderBus
from snapshot_shared.api import (
    AbortReply,
    AbortRequest,
    CordonReply,
    CordonRequest,
    HealthReply,
    HealthRequest,
    RequeueReply,
    RequeueRequest,
)
from snapshot_shared.errors import Conflict, NotEligible, NotFound, StoreBusy
from snapshot_shared.ids import check_node, check_order_id, owner_of
from snapshot_shared.objects import (
    KINDS,
    AnyObject,
    DynamoCheckpoint,
    Node,
    Snapshot,
    SnapshotContent,
    find_kind,
    kind_of,
)
from snapshot_shared.service import VERSION

log = logging.getLogger(__name__)


class Sweeping(NamedTuple):
    """When the stream and the store were last compared (seconds since the epoch, None: never)."""

    swept_at: float | None
    fill: float


class Operations:
    """Answers those on call. A wish is stored before it is answered, so no restart forgets it."""

    def __init__(
        self, cluster: Cluster, orders: OrderBus, sweeping: Callable[[], Sweeping]
    ) -> None:
        """Use the object store and the stream of orders; `sweeping` tells of the last sweep."""
        self._cluster = cluster
        self._orders = orders
        self._sweeping = sweeping

    def endpoints(self) -> dict[str, Endpoint]:
        """Give the handler of each `snap.api.<verb>`."""
        return {
            "cordon": answering(CordonRequest, CordonReply, self.cordon),
            "abort": answering(AbortRequest, AbortReply, self.abort),
            "requeue": answering(RequeueRequest, RequeueReply, self.requeue),
            "health": answering(HealthRequest, HealthReply, self.health),
        }

    async def cordon(self, request: CordonRequest) -> CordonReply:
        """Let new work begin on a node, or not. NotFound. Asking again changes nothing."""
        name = check_node(request.node)
        while True:
            node = await self._cluster.get("Node", None, name)
            if not isinstance(node, Node):
                raise _absent("Node", name)
            wanted = wishes.cordoned(node, unschedulable=request.unschedulable)
            try:
                if wanted != node:
                    await self._cluster.update_spec(wanted)
                    log.info("node %s unschedulable: %s", name, request.unschedulable)
            except StoreBusy:
                raise
            except Conflict:
                continue
            return CordonReply(node=name, changed=wanted != node)

    async def abort(self, request: AbortRequest) -> AbortReply:
        """End the capture behind an object. NotFound, and NotEligible when none is under way."""
        kind = find_kind(request.kind)
        space = (request.namespace or "default") if kind.namespaced else None
        while True:
            value = await self._cluster.get(kind.name, space, request.name)
            if value is None:
                raise _absent(kind.name, request.name)
            content = await self._content(value)
            wanted = replace(content, status=wishes.aborted(content, request.by))
            try:
                if wanted != content:
                    await self._cluster.update_status(wanted)
                    log.warning("%s aborts the capture of %s", request.by, content.metadata.name)
            except StoreBusy:
                raise
            except Conflict:
                continue
            return AbortReply(content=content.metadata.name, capture=content.status.capture.value)

    async def _content(self, value: AnyObject) -> SnapshotContent:
        """Find the content behind an object that people name."""
        kind, name = kind_of(value), value.metadata.name
        match value:
            case DynamoCheckpoint():
                content_name = value.status.content_name
            case Snapshot():
                content_name = value.status.bound_snapshot_content_name or ""
            case SnapshotContent():
                return value
            case _:
                raise NotEligible(
                    f"a {kind.name} has no capture of its own",
                    next_step=f"end it with: snapshotctl delete {kind.short} {name}",
                )
        found = await self._cluster.get("SnapshotContent", None, content_name or "-")
        if not isinstance(found, SnapshotContent):
            raise NotEligible(
                f"no capture of {kind.name} {name} is under way",
                next_step=f"to give it up: snapshotctl delete {kind.short} {name}",
            )
        return found

    async def requeue(self, request: RequeueRequest) -> RequeueReply:
        """Publish the operator's own current order again, in place of what stands on its subject.

        What somebody sent instead of it is never used. NotEligible when it is not wanted any more.
        """
        order_id = check_order_id(request.order)
        owner = await self._cluster.by_uid(owner_of(order_id))
        order = wishes.sent_again(owner, orders_of(owner), order_id)
        await self._orders.replace(order)
        log.info("order %s, attempt %d, is published again", order.order, order.attempt)
        return RequeueReply(
            order=order.order, attempt=order.attempt, node=order.node, service=order.service
        )

    async def health(self, _request: HealthRequest) -> HealthReply:
        """Say how the operator itself is."""
        sweeping = self._sweeping()
        return HealthReply(version=VERSION, swept_at=sweeping.swept_at, fill=sweeping.fill)


def _absent(kind: str, name: str) -> NotFound:
    return NotFound(
        f"{kind} {name} does not exist",
        next_step=f"list what there is: snapshotctl get {KINDS[kind].plural}",
        kind=kind,
        name=name,
    )
