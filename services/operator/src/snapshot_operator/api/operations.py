"""Requests of people on call: `snap.api.cordon`, `abort`, `requeue` and `health`."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import NamedTuple, cast

from snapshot_api.facts import Node
from snapshot_api.kinds import KINDS, AnyObject, find_kind, kind_of
from snapshot_api.v1alpha1.checkpoint import DynamoCheckpoint
from snapshot_api.v1alpha1.content import SnapshotContent
from snapshot_api.v1alpha1.snapshot import Snapshot
from snapshot_api.views import orders_of
from snapshot_api.well_known import ABORT
from snapshot_operator.api.answering import Endpoint, answering
from snapshot_operator.api.objects import check_uid, named
from snapshot_operator.core import interventions
from snapshot_operator.core.content import content_behind
from snapshot_operator.ports import OrderBus
from snapshot_operator.runtime.cluster import Cluster
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
from snapshot_shared.errors import Conflict, NotEligible
from snapshot_shared.ids import check_node, check_order_id, owner_of
from snapshot_shared.service import VERSION

log = logging.getLogger(__name__)


class Sweeping(NamedTuple):
    """When the stream and the store were last compared (seconds since the epoch, None: never)."""

    swept_at: float | None
    fill: float


class Operations:
    """Answers those on call. A request is stored before it is answered: no restart forgets it."""

    def __init__(
        self,
        cluster: Cluster,
        orders: OrderBus,
        sweeping: Callable[[], Sweeping],
        wall: Callable[[], float],
        ahead_s: float = 0.0,
    ) -> None:
        """Use the objects and the stream of orders; `sweeping` returns how the last sweep was.

        `ahead_s` is how far the clock of this machine is ahead of `wall`.
        """
        self._cluster = cluster
        self._orders = orders
        self._sweeping = sweeping
        self._wall = wall
        self._ahead_s = ahead_s

    def endpoints(self) -> dict[str, Endpoint]:
        """Return the handler of each `snap.api.<verb>`."""
        wall = self._wall
        return {
            "cordon": answering(CordonRequest, CordonReply, self.cordon, wall),
            "abort": answering(AbortRequest, AbortReply, self.abort, wall),
            "requeue": answering(RequeueRequest, RequeueReply, self.requeue, wall),
            "health": answering(HealthRequest, HealthReply, self.health),
        }

    async def cordon(self, request: CordonRequest) -> CordonReply:
        """Let new work begin on a node, or not. NotFound, Conflict. Repeating changes nothing."""
        name = check_node(request.node)
        while True:
            node = cast("Node", named(self._cluster, KINDS["Node"], None, name))
            wanted = interventions.cordoned(node, unschedulable=request.unschedulable)
            if wanted == node:
                return CordonReply(node=name, changed=False)
            version = request.resource_version
            if version and version != node.metadata.resource_version:
                raise Conflict(
                    f"node {name} changed since it was read",
                    expected=version,
                    found=node.metadata.resource_version,
                )
            try:
                await self._cluster.update_spec(wanted)
            except Conflict:
                await self._cluster.refresh(node)
                continue
            log.info("node %s unschedulable: %s", name, request.unschedulable)
            return CordonReply(node=name, changed=True)

    async def abort(self, request: AbortRequest) -> AbortReply:
        """End the capture behind an object. NotFound, and NotEligible when none is under way.

        The request is an annotation of the content; the first who asked is kept.
        """
        value = named(self._cluster, find_kind(request.kind), request.namespace, request.name)
        check_uid(value, request.uid)
        while True:
            content = self._capture(value)
            interventions.check_abortable(content)
            try:
                if ABORT not in content.metadata.annotations:
                    await self._cluster.annotate(content, ABORT, request.by)
                    log.warning("%s aborts the capture of %s", request.by, content.metadata.name)
            except Conflict:
                await self._cluster.refresh(content)
                continue
            return AbortReply(content=content.metadata.name, capture=content.status.capture.value)

    def _capture(self, value: AnyObject) -> SnapshotContent:
        """Return the content behind an object that people name."""
        kind, name = kind_of(value), value.metadata.name
        if not isinstance(value, DynamoCheckpoint | Snapshot | SnapshotContent):
            raise NotEligible(
                f"a {kind.name} has no capture of its own",
                next_step=f"end it with: snapshotctl delete {kind.short} {name}",
            )
        found = content_behind(self._cluster.get, value)
        if found is None:
            raise NotEligible(
                f"no capture of {kind.name} {name} is under way",
                next_step=f"to give it up: snapshotctl delete {kind.short} {name}",
            )
        return found

    async def requeue(self, request: RequeueRequest) -> RequeueReply:
        """Publish the operator's own current order again, in place of what stands on its subject.

        What stands there instead of it is never used. NotEligible when it is not wanted any more.
        """
        order_id = check_order_id(request.order)
        owner = self._cluster.by_uid(owner_of(order_id))
        order = interventions.sent_again(owner, orders_of(owner), order_id)
        await self._orders.replace(order)
        log.info("order %s, attempt %d, is published again", order.order, order.attempt)
        return RequeueReply(
            order=order.order, attempt=order.attempt, node=order.node, service=order.service
        )

    async def health(self, _request: HealthRequest) -> HealthReply:
        """Return how the operator itself is."""
        sweeping = self._sweeping()
        return HealthReply(
            version=VERSION,
            swept_at=sweeping.swept_at,
            fill=sweeping.fill,
            ahead_s=self._ahead_s,
        )
