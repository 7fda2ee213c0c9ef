"""Does what plans say: the store first, then NATS. Nothing else writes to the store for a plan."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType

from snapshot_api.facts import Node
from snapshot_api.kinds import AnyObject, kind_of
from snapshot_api.meta import OrderStatus
from snapshot_api.views import is_answered, orders_of
from snapshot_api.well_known import POD_SPEC
from snapshot_operator.core.kept_spec import kept
from snapshot_operator.core.owning import require_own
from snapshot_operator.core.plan import (
    FINALIZER,
    Adopt,
    Create,
    Delete,
    Finalize,
    KeepSpec,
    Label,
    Plan,
    SetStatus,
    Write,
    is_final,
    new_orders,
)
from snapshot_operator.ports import Document, OrderBus
from snapshot_operator.runtime.cluster import Cluster, Tracker, key_of
from snapshot_operator.runtime.owned import owned
from snapshot_operator.runtime.spans import Spans
from snapshot_operator.runtime.world import Changed, Shape, Warned, unsaid, unwarned
from snapshot_shared import instruments
from snapshot_shared.errors import (
    AlreadyExists,
    BusUnavailable,
    Conflict,
    InvalidManifest,
    NotFound,
    Refused,
)
from snapshot_shared.metrics import OFF, Metrics
from snapshot_shared.orders import envelope_of
from snapshot_shared.telemetry import working_on

log = logging.getLogger(__name__)


class Stale(Conflict):
    """A plan rested on an absence or a value that the store does not confirm."""


class Interpreter:
    """Carries plans out."""

    def __init__(
        self,
        cluster: Cluster,
        orders: OrderBus,
        spans: Spans,
        metrics: Metrics = OFF,
        changed: Changed = unsaid,
        warned: Warned = unwarned,
        shapes: Mapping[str, Shape] = MappingProxyType({}),
    ) -> None:
        """Use the objects, the stream of orders and the recorder of what ended.

        `changed` gets each status that was written, before and after, and `warned` what is refused
        of an object or left out. `shapes` are those of the world.
        """
        self._shapes = shapes
        self._metrics = metrics
        self._changed = changed
        self._warned = warned
        self._cluster = cluster
        self._orders = orders
        self._spans = spans
        self._tidying: set[asyncio.Task[None]] = set()
        self.unpublished = asyncio.Event()
        """Set when an order of the store could not be published."""

    async def apply(
        self, plan: Plan, read: Tracker | None = None, stored: Callable[[], None] = lambda: None
    ) -> None:
        """Do the writes in their order; the first conflict ends it, for the plan is stale then.

        A plan that cannot be taken back is first confirmed in each absence that it has `read`, and
        any plan in what it relies on: Stale when that does not hold. `stored` is called when all
        writes are durable, before orders are published.
        """
        if read is not None and is_final(plan):
            await self._confirm(read)
        for value in plan.relies_on:
            await self._cluster.refresh(value)
            if self._cluster.at(key_of(value)) is not value:
                raise Stale(f"{kind_of(value).name} {value.metadata.name} has changed")
        published: list[OrderStatus] = []
        changed: list[tuple[AnyObject, AnyObject]] = []
        for write in plan.writes:
            try:
                await self._write(write)
            except InvalidManifest as error:
                if not isinstance(write, Create) or write.refused is None:
                    raise
                await self.apply(write.refused(error.to_failure()), read, stored)
                return
            if isinstance(write, SetStatus):
                orders = new_orders(write.old, write.new)
                published += owned(write.new, orders, self._warned)
                changed.append((write.old, write.new))
        stored()
        for old, new in changed:
            self._spans.ended(old, new)
            self._changed(old, new)
            self._tidy(old, new)
        await self._publish(published)

    async def _confirm(self, read: Tracker) -> None:
        for key, uid in read.absent:
            if not await self._cluster.confirm_gone(key, uid):
                raise Stale(f"{key.kind} {key.name} is there, and was not seen yet")
        for uid, found in (await self._cluster.find_all(read.absent_uids)).items():
            if found is not None:
                raise Stale(f"the object with uid {uid} is there, and was not seen yet")

    async def _write(self, write: Write) -> None:
        """Do a write. If it is refused, a condition of the object says so, or a warning.

        A policy of the cluster may refuse a valid object with the code of an invalid one.
        """
        try:
            await self._carry_out(write)
        except (Refused, InvalidManifest) as error:
            if not isinstance(write, Create):
                about = write.new if isinstance(write, SetStatus) else write.value
                self._warned(about, error.to_failure())
            elif write.waits is not None and (isinstance(error, Refused) or write.refused is None):
                await self.apply(write.waits(error.to_failure()))
            raise

    async def _carry_out(self, write: Write) -> None:
        cluster = self._cluster
        match write:
            case Create(value):
                try:
                    await self._create(value)
                except AlreadyExists:
                    log.info("%s %s exists already", kind_of(value).name, value.metadata.name)
                    await cluster.confirm_gone(key_of(value))
            case Delete(value):
                await cluster.delete(value)
            case Adopt(value):
                await cluster.add_finalizer(value, FINALIZER)
            case Finalize(value):
                await cluster.remove_finalizer(value, FINALIZER)
            case SetStatus(_, new):
                await cluster.update_status(new)
            case Label(value, key, text):
                await cluster.label(value, key, text)
            case KeepSpec(value, pod):
                spec = await cluster.spec_of(pod)
                if spec is None:
                    await cluster.refresh(pod)
                    raise Stale(f"pod {pod.metadata.name} is gone")
                await cluster.annotate(value, POD_SPEC, kept(spec))

    async def _create(self, value: AnyObject) -> None:
        shape = self._shapes.get(kind_of(value).name)
        if shape is None:
            await self._cluster.create(value)
            return
        (owner,) = value.metadata.owner_references
        place = {"name": owner.name, "namespace": value.metadata.namespace}
        found = await self._cluster.read_document({"kind": owner.kind, "metadata": place})
        if found is None or found["metadata"]["uid"] != owner.uid:
            raise NotFound(f"{owner.kind} {owner.name} is gone", kind=owner.kind)
        nodes = (each for each in self._cluster.all("Node") if isinstance(each, Node))
        *others, last = shape(value, found, nodes)
        for document in others:
            await self._create_beside(document)
        await self._cluster.create_document(last)

    async def _create_beside(self, document: Document) -> None:
        """Create an object that another one needs, unless its owner has made it before."""
        try:
            await self._cluster.create_document(document)
        except AlreadyExists as error:
            there = await self._cluster.read_document(document)
            if there is None:
                raise Stale(f"{document['kind']} {document['metadata']['name']} is gone") from error
            require_own(document, there)

    async def _publish(self, orders: Iterable[OrderStatus]) -> None:
        for order in orders:
            with working_on(order.order, order.attempt, envelope_of(order.payload).traceparent):
                try:
                    await self._orders.publish(order)
                except (BusUnavailable, Conflict) as error:
                    # The store has it; the sweep publishes what the stream lacks.
                    log.warning("order %s waits for the sweep: %s", order.order, error)
                    self._metrics.add(instruments.UNPUBLISHED, order.verb)
                    self.unpublished.set()

    def _tidy(self, old: AnyObject, new: AnyObject) -> None:
        """Withdraw what has been answered from the stream; the work does not wait for that."""
        open_ = {(i.order, i.attempt) for i in orders_of(old) if not is_answered(i)}
        for item in orders_of(new):
            if is_answered(item) and (item.order, item.attempt) in open_:
                task = asyncio.create_task(self._withdraw(item))
                self._tidying.add(task)
                task.add_done_callback(self._tidying.discard)

    async def _withdraw(self, item: OrderStatus) -> None:
        try:
            await self._orders.withdraw(item)
        except BusUnavailable as error:
            log.info("order %s is withdrawn by the sweep: %s", item.order, error)
