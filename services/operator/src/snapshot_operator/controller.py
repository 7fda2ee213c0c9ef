"""The loop of the operator: one key at a time, observe, decide, do.

`Observer` reads everything a decision needs, `reconcile` decides, `Interpreter` is the only place
that acts on a plan. The queue holds keys, never events; a key that is queued twice runs once.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Container
from typing import NamedTuple, TypeVar

from snapshot_operator.domain import backpressure, fold
from snapshot_operator.domain.capture import (
    CaptureView,
    capture_span,
    content_name,
    reconcile_content,
    trace_parent,
)
from snapshot_operator.domain.census import Census, census
from snapshot_operator.domain.ordering import order_span as order_context
from snapshot_operator.domain.plan import (
    FINALIZER,
    NOTHING,
    Create,
    Delete,
    Finalize,
    Plan,
    SetStatus,
    Write,
    new_orders,
    orders_of,
)
from snapshot_operator.domain.pods import (
    PodView,
    Source,
    holds_devices,
    reconcile_pod,
    resolve,
    restore_source,
)
from snapshot_operator.domain.requests import (
    CheckpointView,
    reconcile_checkpoint,
    reconcile_job,
    reconcile_snapshot,
)
from snapshot_operator.domain.retention import Holdings, Limits, Verdict, judged
from snapshot_operator.ports import Change, Cluster, OrderBus
from snapshot_shared import instruments, subjects
from snapshot_shared.errors import (
    AlreadyExists,
    BusUnavailable,
    Conflict,
    Failure,
    NoSpace,
    NotFound,
    StoreBusy,
)
from snapshot_shared.metrics import OFF, Metrics
from snapshot_shared.objects import (
    KINDS,
    TRACEPARENT,
    AnyObject,
    DynamoCheckpoint,
    Job,
    Node,
    OrderStatus,
    Pod,
    Snapshot,
    SnapshotContent,
    condition,
    kind_of,
)
from snapshot_shared.spans import parse_traceparent
from snapshot_shared.steps import order_span
from snapshot_shared.telemetry import Telemetry, working_on
from snapshot_shared.transitions import Capture, Restore

log = logging.getLogger(__name__)

T = TypeVar("T")

RETRY_S = 1.0
SWEEP_EVERY_S = 30.0
COUNT_EVERY_S = 10.0


class Key(NamedTuple):
    """Which object to look at."""

    kind: str
    namespace: str | None
    name: str


def key_of(value: AnyObject) -> Key:
    """Give the key of an object."""
    return Key(kind_of(value).name, value.metadata.namespace, value.metadata.name)


class Observer:
    """Reads, once and up front, all that a decision about a key looks at."""

    def __init__(self, cluster: Cluster) -> None:
        """Use the object store. `is_full` says whether the stream of orders was, last seen."""
        self._cluster = cluster
        self.is_full = False

    async def plan(self, key: Key, now: float) -> Plan:
        """Observe a key and decide."""
        value = await self._cluster.get(*key)
        match value:
            case DynamoCheckpoint():
                return reconcile_checkpoint(await self._checkpoint(value), now)
            case Job():
                return reconcile_job(value, await self._pod_of(value), now)
            case Snapshot():
                pod = await self._pod(value.metadata.namespace, value.spec.source.pod_ref.name)
                return reconcile_snapshot(value, pod, await self._content_of(value), now)
            case SnapshotContent():
                return reconcile_content(await self._capture(value), now)
            case Pod():
                return reconcile_pod(await self._pod_view(value), now)
            case Node() | None:
                return NOTHING

    async def _checkpoint(self, value: DynamoCheckpoint) -> CheckpointView:
        space, name = value.metadata.namespace, value.metadata.name
        job = await self._cluster.get("Job", space, name)
        snapshot = await self._cluster.get("Snapshot", space, name)
        job = job if isinstance(job, Job) else None
        pod = await self._pod_of(job) if job else None
        return CheckpointView(value, job, pod, snapshot if isinstance(snapshot, Snapshot) else None)

    async def _pod_of(self, job: Job) -> Pod | None:
        return await self._pod(job.metadata.namespace, job.status.pod_name or "-")

    async def _pod(self, namespace: str | None, name: str) -> Pod | None:
        value = await self._cluster.get("Pod", namespace, name)
        return value if isinstance(value, Pod) else None

    async def _content_of(self, snapshot: Snapshot) -> SnapshotContent | None:
        value = await self._cluster.get(
            "SnapshotContent", None, content_name(snapshot.metadata.uid)
        )
        return value if isinstance(value, SnapshotContent) else None

    async def _capture(self, value: SnapshotContent) -> CaptureView:
        contents = await self._cluster.list("SnapshotContent")
        siblings = [found for found in contents if isinstance(found, SnapshotContent)]
        pods = {pod.metadata.uid for pod in await self._cluster.list("Pod")}
        return CaptureView(value, siblings, await self._nodes(), pods, self.is_full)

    async def _nodes(self) -> list[Node]:
        return [found for found in await self._cluster.list("Node") if isinstance(found, Node)]

    async def _pod_view(self, pod: Pod) -> PodView:
        used: dict[str, set[str]] = {}
        for other in await self._cluster.list("Pod"):
            if isinstance(other, Pod) and other != pod and holds_devices(other):
                mine = used.setdefault(other.status.node_name, set())
                mine.update(device.uuid for device in other.status.devices)
        return PodView(pod, await self._nodes(), used, await self._source(pod), self.is_full)

    async def _source(self, pod: Pod) -> Source | None:
        name = restore_source(pod)
        if name is None:
            return None
        restore = pod.status.restore
        if restore is not None:
            content = await self._cluster.get("SnapshotContent", None, restore.content_name)
            return Source(content if isinstance(content, SnapshotContent) else None)
        space = pod.metadata.namespace
        snapshot = await self._cluster.get("Snapshot", space, name)
        checkpoint = await self._cluster.get("DynamoCheckpoint", space, name)
        content = await self._content_of(snapshot) if isinstance(snapshot, Snapshot) else None
        return resolve(
            name,
            content,
            exists=bool(snapshot or checkpoint),
            failure=_failure_of(snapshot) or _failure_of(checkpoint),
        )


class Interpreter:
    """Does what plans say: the store first, then NATS."""

    def __init__(
        self,
        cluster: Cluster,
        orders: OrderBus,
        telemetry: Telemetry,
        wall: Callable[[], float],
        metrics: Metrics = OFF,
    ) -> None:
        """Use the store, the bus, the tracer and the clock (seconds since the epoch)."""
        self._metrics = metrics
        self._cluster = cluster
        self._orders = orders
        self._telemetry = telemetry
        self._wall = wall
        self._tidying: set[asyncio.Task[None]] = set()
        self.unpublished = asyncio.Event()
        """Set when an order of the store could not be published."""

    async def apply(self, plan: Plan, as_of: int) -> None:
        """Do the writes in their order; the first conflict ends it, for the plan is stale then.

        The plan was made of what the store held at version `as_of`.
        """
        for write in plan.writes:
            await self._write(write, as_of)

    async def _write(self, write: Write, as_of: int) -> None:
        match write:
            case Create(value):
                try:
                    await self._cluster.create(value, as_of=as_of)
                except AlreadyExists:
                    log.info("%s %s exists already", kind_of(value).name, value.metadata.name)
            case Delete(value):
                await self._cluster.delete(value, as_of=as_of)
            case Finalize(value):
                await self._cluster.remove_finalizer(value, FINALIZER, as_of=as_of)
            case SetStatus(old, new):
                await self._cluster.update_status(new, as_of=as_of)
                await self._publish(new_orders(old, new))
                self.trace(old, new)

    async def _publish(self, orders: list[OrderStatus]) -> None:
        for order in orders:
            with working_on(order.order, order.attempt, order.payload.get("traceparent", "")):
                try:
                    await self._orders.publish(order)
                except (BusUnavailable, Conflict) as error:
                    # The store has it; the sweep publishes what the stream lacks.
                    log.warning("order %s waits for the sweep: %s", order.order, error)
                    self._metrics.add(instruments.UNPUBLISHED, order.verb)
                    self.unpublished.set()

    def trace(self, old: AnyObject, new: AnyObject) -> None:
        """Record the spans that this change ended."""
        before = {(item.order, item.attempt): item for item in orders_of(old)}
        for item in orders_of(new):
            known = before.get((item.order, item.attempt))
            if fold.is_answered(item) and (known is None or not fold.is_answered(known)):
                self._trace_order(new, item)
                lasted = max(item.ended_at - item.ordered_at, 0.0)
                reason = _reason(item.final.failure if item.final else None)
                reason = "NodeLost" if item.state == fold.LOST else reason
                self._metrics.record(instruments.ORDER_DURATION, lasted, item.verb, reason)
                self._tidy(item)
        match old, new:
            case SnapshotContent(), SnapshotContent():
                self._trace_capture(old, new)
            case Pod(), Pod():
                self._trace_restoration(old, new)
            case _:
                return

    def _tidy(self, item: OrderStatus) -> None:
        """Withdraw an answered order from the stream, behind the back of the work."""

        async def withdraw() -> None:
            try:
                await self._orders.withdraw(item)
            except BusUnavailable as error:
                log.info("order %s is withdrawn by the sweep: %s", item.order, error)

        task = asyncio.create_task(withdraw())
        self._tidying.add(task)
        task.add_done_callback(self._tidying.discard)

    def _trace_order(self, owner: AnyObject, item: OrderStatus) -> None:
        """Record the span of an order: from the decision until its answer is in the store."""
        parent = _span_over(owner, item)
        identity = parse_traceparent(order_context(parent, item.order, item.attempt))
        if identity is None:
            return
        failure = item.final.failure if item.final else None
        self._telemetry.record(
            order_span(item.verb),
            parent=parent,
            identity=identity,
            start_ns=_ns(item.ordered_at),
            end_ns=_ns(self._wall()),
            error=failure.message if failure else "",
            attributes={
                "snapback.order.id": item.order,
                "snapback.attempt": item.attempt,
                "snapback.verb": item.verb,
                "snapback.node": item.node,
                **_error_type(failure),
            },
        )

    def _trace_capture(self, old: SnapshotContent, new: SnapshotContent) -> None:
        ended = (Capture.READY, Capture.FAILED)
        if old.status.capture in ended or new.status.capture not in ended:
            return
        failure = new.status.failure
        size = new.status.committed.bytes if new.status.committed else 0
        self._metrics.add(instruments.CAPTURE_IO, by=size)
        lasted = max(self._wall() - new.status.started_at, 0.0)
        self._metrics.record(instruments.CAPTURE_DURATION, lasted, _reason(failure))
        self._telemetry.record(
            "capture",
            parent=trace_parent(new),
            identity=parse_traceparent(capture_span(new, new.status.attempt)),
            start_ns=_ns(new.status.started_at),
            end_ns=_ns(self._wall()),
            error=failure.message if failure else "",
            attributes={
                "snapback.content": new.metadata.name,
                "snapback.bytes": size,
                **_error_type(failure),
            },
        )

    def _trace_restoration(self, old: Pod, new: Pod) -> None:
        before, after = old.status.restore, new.status.restore
        ended = (Restore.RESTORED, Restore.FAILED)
        if before is None or after is None or before.state in ended or after.state not in ended:
            return
        lasted = max(self._wall() - after.started_at, 0.0)
        self._metrics.record(instruments.RESTORE_DURATION, lasted, _reason(after.failure))
        self._telemetry.record(
            "restoration",
            parent=new.metadata.annotations.get(TRACEPARENT, ""),
            identity=parse_traceparent(after.traceparent),
            start_ns=_ns(after.started_at),
            end_ns=_ns(self._wall()),
            error=after.failure.message if after.failure else "",
            attributes={
                "snapback.pod": new.metadata.name,
                "snapback.content": after.content_name,
                **_error_type(after.failure),
            },
        )


def _span_over(owner: AnyObject, item: OrderStatus) -> str:
    """Give the span that an order's own span hangs below: it was the order's trace argument."""
    match owner:
        case SnapshotContent() if item.verb == "verify":
            return capture_span(owner, owner.status.attempt)
        case SnapshotContent():
            return capture_span(owner, item.attempt)
        case Pod() if owner.status.restore is not None:
            return owner.status.restore.traceparent
        case _:
            return owner.metadata.annotations.get(TRACEPARENT, "")


def _reason(failure: Failure | None) -> str:
    return failure.reason if failure else ""


def _error_type(failure: Failure | None) -> dict[str, str]:
    return {instruments.ERROR: failure.reason} if failure else {}


def _ns(seconds: float) -> int:
    return int(seconds * 1_000_000_000)


class Controller:
    """The queue of keys and the worker that empties it."""

    def __init__(
        self,
        cluster: Cluster,
        orders: OrderBus,
        interpreter: Interpreter,
        wall: Callable[[], float],
        limits: Limits = Limits(),  # noqa: B008 - an immutable value
        metrics: Metrics = OFF,
    ) -> None:
        """Listen to the store; nothing runs before `run`. `limits` say what is kept."""
        self._metrics = metrics
        self._census: Census | None = None
        self._swept_at = time.monotonic()
        self._cluster = cluster
        self._orders = orders
        self._observer = Observer(cluster)
        self._interpreter = interpreter
        self._wall = wall
        self._limits = limits
        self._queue: dict[Key, None] = {}
        self._filled = asyncio.Event()
        self._timers: dict[Key, asyncio.TimerHandle] = {}
        self._changed_kinds: set[str] = set()
        self._looked_as_of = cluster.as_of()
        self.swept_at: float | None = None
        """When the stream was last made to agree with the store, in seconds since the epoch."""
        self.fill = 0.0
        """The share of the stream's room that was taken then."""
        cluster.subscribe(self._changed)
        self._show()

    def _show(self) -> None:
        """Let the metrics see the queue, and what was counted last."""
        observe = self._metrics.observe
        observe(instruments.WORK_QUEUE, lambda: {(): len(self._queue)})
        observe(instruments.STREAM_FILL, lambda: {(subjects.ORDERS,): self.fill})
        observe(instruments.SWEEP_AGE, lambda: {(): time.monotonic() - self._swept_at})
        observe(instruments.OBJECTS, lambda: c.objects if (c := self._census) else {})
        observe(instruments.NODES, lambda: c.nodes if (c := self._census) else {})
        observe(instruments.READERS, lambda: {(): c.readers} if (c := self._census) else {})
        observe(instruments.QUARANTINED, lambda: {(): c.quarantined} if (c := self._census) else {})

    def enqueue(self, key: Key) -> None:
        """Have a key looked at soon."""
        self._queue.setdefault(key)
        self._filled.set()

    def _changed(self, _change: Change, value: AnyObject) -> None:
        """Look at what changed, at its owners, and at what may wait for it."""
        self.enqueue(key_of(value))
        space = value.metadata.namespace
        for reference in value.metadata.owner_references:
            self.enqueue(Key(reference.kind, space or _snapshot_space(value), reference.name))
        if not isinstance(value, Job):
            self._changed_kinds.add(type(value).__name__)
            self._filled.set()

    async def notice(self, key: Key) -> None:
        """Look at what another operator changed. Of what it removed only the rest can tell."""
        value = await self._cluster.get(*key)
        if value is None:
            await self.look_at_all()
        else:
            self._changed("MODIFIED", value)

    async def run(self) -> None:
        """Look at everything once, then at what changes, for ever."""
        await self.look_at_all()
        while True:
            await self._filled.wait()
            await self.settle()

    async def look_at_all(self) -> None:
        """Queue every object."""
        for kind in ("DynamoCheckpoint", "Job", "Snapshot", "SnapshotContent", "Pod"):
            for value in await self._cluster.list(kind):
                self.enqueue(key_of(value))

    async def settle(self) -> None:
        """Work until the queue is empty."""
        self._filled.clear()
        while self._queue or self._changed_kinds:
            await self._enqueue_dependents()
            if self._queue:
                key = next(iter(self._queue))
                del self._queue[key]
                await self._reconcile(key)

    async def _enqueue_dependents(self) -> None:
        """Pods may wait for a node, for devices or for a content; contents for each other."""
        if not self._changed_kinds:
            return
        changed = set(self._changed_kinds)
        self._changed_kinds.clear()
        for value in await self._cluster.list("Pod"):
            if isinstance(value, Pod) and (not value.status.node_name or "Node" in changed):
                self.enqueue(key_of(value))
        if changed & {"SnapshotContent", "Node", "Pod"}:
            for value in await self._cluster.list("SnapshotContent"):
                if isinstance(value, SnapshotContent) and _may_wait(value):
                    self.enqueue(key_of(value))
        if "Pod" in changed:
            await self._enqueue_pod_watchers()

    async def _enqueue_pod_watchers(self) -> None:
        """Snapshots wait for their pod, checkpoints for the pod of their Job."""
        for value in await self._cluster.list("Snapshot"):
            if isinstance(value, Snapshot) and not value.status.bound_snapshot_content_name:
                self.enqueue(key_of(value))
        for value in await self._cluster.list("DynamoCheckpoint"):
            if isinstance(value, DynamoCheckpoint) and value.status.phase == "Creating":
                self.enqueue(key_of(value))

    async def _reconcile(self, key: Key) -> None:
        now = self._wall()
        if timer := self._timers.pop(key, None):
            timer.cancel()
        as_of = self._cluster.as_of()
        began, outcome = time.perf_counter(), "unchanged"
        try:
            plan = await self._observer.plan(key, now)
            await self._interpreter.apply(plan, as_of)
        except (BusUnavailable, NoSpace, StoreBusy) as error:
            outcome = "waits"
            log.warning("%s waits: %s", key, error)
            self._wake(key, RETRY_S)
        except (Conflict, NotFound):
            await self._cluster.catch_up()
            outcome = "conflict"
            self.enqueue(key)
        except Exception:
            outcome = "failed"
            log.exception("reconcile %s failed", key)
            self._wake(key, RETRY_S)
        else:
            outcome = "changed" if plan.writes else outcome
            if plan.wake_at is not None:
                self._wake(key, max(plan.wake_at - now, 0.0) + 0.01)
        lasted = time.perf_counter() - began
        self._metrics.record(instruments.RECONCILE_DURATION, lasted, key.kind, outcome)

    def _wake(self, key: Key, delay_s: float) -> None:
        loop = asyncio.get_running_loop()
        self._timers[key] = loop.call_later(delay_s, self.enqueue, key)

    async def sweep(self, again: asyncio.Event) -> None:
        """Publish what the store wants and the stream lacks: at start, on reconnect, every 30 s.

        Soon, too, when an order could not be published.

        Where another operator has written, look at everything, too: news of it may be lost.
        """
        while True:
            if self._cluster.others_since(self._looked_as_of):
                self._looked_as_of = self._cluster.as_of()
                await self.look_at_all()
            try:
                await self.sweep_once()
            except BusUnavailable as error:
                log.warning("sweep: %s", error)
                self._interpreter.unpublished.set()
            else:
                self._swept_at = time.monotonic()
            await self.retain()
            await self._rest(again)

    async def take_stock(self) -> None:
        """Count what the store holds, where anybody reads metrics: every 10 s, for ever."""
        never = asyncio.Event()
        if not self._metrics.is_on:
            await never.wait()
        while True:
            values = [value for kind in KINDS for value in await self._cluster.list(kind)]
            self._census = census(values)
            await _any_set(COUNT_EVERY_S, never)

    async def _rest(self, again: asyncio.Event) -> None:
        """Wait for the time of the next sweep.

        That is a reconnection or 30 s; or RETRY_S, when an order could not be published meanwhile.
        """
        unpublished = self._interpreter.unpublished
        if not await _any_set(RETRY_S, again):
            await _any_set(SWEEP_EVERY_S - RETRY_S, again, unpublished)
        again.clear()
        unpublished.clear()

    async def sweep_once(self) -> None:
        """Make the stream agree with the store: remove what nobody awaits, publish what it lacks.

        The stream is listed first: what it holds then was in the store before. Room is made before
        it is needed, and what cleans up comes first: a full stream may refuse the rest.
        """
        published = await self._orders.published()
        await self._cluster.catch_up()
        owners: list[AnyObject] = [*await self._all(SnapshotContent), *await self._all(Pod)]
        orders = [order for owner in owners for order in orders_of(owner)]
        unanswered = [order for order in orders if not fold.is_answered(order)]
        awaited = {order.order for order in unanswered}
        for order_id, subject in published.items():
            if order_id not in awaited:
                await self._orders.remove(subject)
        await self._measure()
        for order in sorted(unanswered, key=lambda order: order.verb not in fold.CLEANING):
            await self._publish_again(order, published)
        self.swept_at = self._wall()

    async def _measure(self) -> None:
        """See whether there is room for new work; when there is again, look at who waits."""
        self.fill = fill = await self._orders.fill()
        was_full, self._observer.is_full = self._observer.is_full, backpressure.is_full(fill)
        if self._observer.is_full:
            log.warning("the stream of orders is %.0f%% full: nothing new begins", 100 * fill)
        elif was_full:
            await self.look_at_all()

    async def retain(self) -> None:
        """Let go what the limits do not keep; what stands in the way now is tried next time."""
        if self._limits.is_off:
            return
        as_of = self._cluster.as_of()
        try:
            for verdict in await self.judged():
                if verdict.goes:
                    await self._let_go(verdict, as_of)
        except (Conflict, NotFound) as error:
            log.info("retention waits for the next sweep: %s", error)

    async def _let_go(self, verdict: Verdict, as_of: int) -> None:
        value, meta = verdict.value, verdict.value.metadata
        name = f"{kind_of(value).name} {meta.namespace}/{meta.name}"
        log.warning("retention deletes %s: %s", name, verdict.why)
        await self._interpreter.apply(Plan((Delete(value),)), as_of)

    async def judged(self) -> list[Verdict]:
        """Judge every captured artifact: whether it goes now, and why, or why it stays."""
        holdings = Holdings(
            await self._all(DynamoCheckpoint),
            await self._all(Snapshot),
            await self._all(SnapshotContent),
            await self._all(Pod),
        )
        return judged(holdings, self._limits, self._wall())

    async def _all(self, type_: type[T]) -> list[T]:
        found = await self._cluster.list(type_.__name__)
        return [value for value in found if isinstance(value, type_)]

    async def _publish_again(self, order: OrderStatus, published: Container[str]) -> None:
        """Publish what is missing.

        A later attempt may hide behind an earlier one's message, and an order that nobody has
        accepted behind one that is none.
        """
        if order.order in published and order.attempt == 1 and order.state != "ordered":
            return
        try:
            await self._orders.publish(order)
        except Conflict as error:
            log.warning("sweep: %s", error)


async def _any_set(within_s: float, *events: asyncio.Event) -> bool:
    """Wait until an event is set; False when none was in time."""
    waiters = [asyncio.ensure_future(event.wait()) for event in events]
    try:
        done, _ = await asyncio.wait(waiters, timeout=within_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for waiter in waiters:
            waiter.cancel()
    return bool(done)


def _failure_of(value: AnyObject | None) -> str:
    """Give why a snapshot or checkpoint failed, or nothing."""
    if not isinstance(value, Snapshot | DynamoCheckpoint):
        return ""
    found = condition(value.status.conditions, "Failed")
    return found.message if found is not None and found.status == "True" else ""


def _snapshot_space(value: AnyObject) -> str | None:
    return value.spec.snapshot_ref.namespace if isinstance(value, SnapshotContent) else None


def _may_wait(content: SnapshotContent) -> bool:
    return bool(
        content.status.capture is Capture.PENDING
        or content.metadata.deletion_timestamp
        or content.status.obligations
        or content.status.verifications > content.status.verified
    )
