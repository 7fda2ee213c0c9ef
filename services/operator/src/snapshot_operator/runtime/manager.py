"""Runs the controllers: one decision about one object at a time, many objects side by side.

What a decision has read is what its object waits for: a change of that, and of nothing else, has
it decided about again. Reports are inputs of the owner's decision: they are folded in, the status
is written once, and only then are they acknowledged.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from msgspec.structs import replace

from snapshot_api.kinds import AnyObject
from snapshot_api.meta import OrderStatus
from snapshot_api.v1alpha1.content import SnapshotContent
from snapshot_api.views import orders_of
from snapshot_operator.core import fold
from snapshot_operator.core.controllers import Controller
from snapshot_operator.core.plan import Plan, SetStatus, rebased
from snapshot_operator.runtime.cluster import (
    FULL,
    Cluster,
    Interest,
    Key,
    Tracker,
    key_of,
)
from snapshot_operator.runtime.interpreter import Interpreter
from snapshot_operator.runtime.queue import WorkQueue
from snapshot_operator.runtime.world import ALL, Selection
from snapshot_shared import instruments
from snapshot_shared.errors import (
    BusUnavailable,
    Conflict,
    InvalidManifest,
    NoSpace,
    NotFound,
    StoreBusy,
)
from snapshot_shared.ids import OrderId, owner_of
from snapshot_shared.metrics import OFF, Metrics
from snapshot_shared.orders import Report
from snapshot_shared.tasks import end_all, yield_turn

log = logging.getLogger(__name__)

MAX_AT_ONCE = 64
"""Plans that are carried out side by side."""
TURN_S = 0.005
"""How long decisions are made before other work of the process has its turn, in seconds."""


class Input(NamedTuple):
    """A report for an object, and what is called once its effect is in the store."""

    report: Report
    stored: Callable[[], None]


class Manager:
    """The work queue, and what is waited for by whom."""

    def __init__(
        self,
        cluster: Cluster,
        controllers: Iterable[Controller],
        interpreter: Interpreter,
        now: Callable[[], float],
        jitter: Callable[[], float],
        metrics: Metrics = OFF,
        namespaces: Selection = ALL,
    ) -> None:
        """Listen to the objects; nothing runs before `run`.

        `now` returns seconds since the epoch that do not jump while this process lives, `jitter` a
        random number from 0 to 1. Objects of other `namespaces` are read and not decided about.
        """
        self._cluster = cluster
        self._controllers = {controller.kind: controller for controller in controllers}
        self._interpreter = interpreter
        self._now = now
        self._started_at = now()
        self._metrics = metrics
        self._queue = WorkQueue(jitter)
        self._interests: dict[Key, frozenset[Interest]] = {}
        self._waiting_for: dict[Interest, set[Key]] = {}
        self._inbox: dict[Key, list[Input]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_full = False
        self._claiming: Key | None = None
        self._claimants: dict[Key, None] = {}
        self.reconciles = 0
        """How many decisions were made."""
        self._namespaces = namespaces
        namespaces.subscribe(self._selected)
        cluster.on_touch(self._touched)
        metrics.observe(instruments.WORK_QUEUE, lambda: {(): len(self._queue)})

    def enqueue(self, key: Key) -> None:
        """Have an object decided about soon."""
        if key.kind in self._controllers:
            self._queue.add(key)

    def resync(self) -> None:
        """Have every object decided about."""
        for kind in self._controllers:
            for value in self._cluster.all(kind):
                self._queue.add(key_of(value))

    def take(self, key: Key, *inputs: Input) -> None:
        """Have reports folded into an object. One that comes again takes the place of the first."""
        reports = [item.report for item in inputs]
        waiting = [item for item in self._inbox.get(key, ()) if item.report not in reports]
        self._inbox[key] = [*waiting, *inputs]
        self._queue.add(key)

    def _selected(self, namespace: str) -> None:
        """Have every object of a namespace decided about."""
        for kind in self._controllers:
            for value in self._cluster.all(kind):
                if namespace_of(value) == namespace:
                    self._queue.add(key_of(value))

    def _is_left_alone(self, value: AnyObject | None) -> bool:
        namespace = namespace_of(value) if value is not None else ""
        return bool(namespace) and not self._namespaces.has(namespace)

    def _set_aside(self, key: Key) -> None:
        """Acknowledge what came for an object that is left alone, and keep it here.

        A consumer may have few reports unacknowledged, and gets no others then. A report that is
        lost with this process comes again: the first sweep has unanswered orders repeated.
        """
        if key in self._inbox:
            items = self._inbox[key]
            self._inbox[key] = [Input(item.report, lambda: None) for item in items]
            for item in items:
                item.stored()

    def set_full(self, *, is_full: bool) -> None:
        """Note whether new work may begin; who waits for room is woken when there is some."""
        was_full, self._is_full = self._is_full, is_full
        if was_full and not is_full:
            self._touched({FULL}, set())

    def _touched(self, interests: set[Interest], firsts: set[Key]) -> None:
        for interest in interests:
            if isinstance(interest, Key):
                self.enqueue(interest)
            for key in self._waiting_for.get(interest, ()):
                self._queue.add(key)
        for key in firsts:
            self.enqueue(key)

    async def run(self) -> None:
        """Decide about every object once, then about those that something wakes."""
        self.resync()
        try:
            while True:
                await self._queue.filled.wait()
                await self._turn()
                if self._queue:
                    await yield_turn()
        finally:
            self._queue.close()
            await end_all(*self._tasks)

    async def drain(self) -> None:
        """Work until nothing is left to decide or to carry out."""
        while self._queue or self._tasks:
            await self._turn()
            if self._tasks:
                await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)

    async def _turn(self) -> None:
        """Decide for a while; where too much is being carried out already, wait for some of it."""
        loop = asyncio.get_running_loop()
        until = loop.time() + TURN_S
        while loop.time() < until:
            if len(self._tasks) >= MAX_AT_ONCE:
                await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)
            key = self._queue.take()
            if key is None:
                return
            self._reconcile(key)

    def _reconcile(self, key: Key) -> None:
        began = time.perf_counter()
        if self._is_left_alone(self._cluster.at(key)):
            self._set_aside(key)
            self._wait_for(key, frozenset())
            self._queue.done(key)
            return
        self.reconciles += 1
        read = Tracker(self._cluster, is_full=self._is_full)
        value, inputs, now = self._cluster.at(key), self._inbox.pop(key, []), self._now()
        try:
            plan = self._decide(value, inputs, read, now)
        except Exception:
            # A defect of ours; the object is tried again, ever more rarely.
            log.exception("%s cannot be decided about", key)
            self._keep(key, inputs)
            self._end(key, began, "failed")
            return
        self._wait_for(key, frozenset(read.interests) if value is not None else frozenset())
        if plan.writes and self._must_wait(key, plan):
            self._keep(key, inputs)
            self._queue.done(key)
            return
        if not plan.writes and not inputs:
            after_s = max(plan.wake_at - now, 0.0) + 0.01 if plan.wake_at is not None else None
            self._end(key, began, "unchanged", after_s=after_s)
            return
        task = asyncio.create_task(self._carry_out(key, value, plan, inputs, read, began))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _must_wait(self, key: Key, plan: Plan) -> bool:
        """Whether a plan claims something while another does; its object is woken after that."""
        if not self._controllers[key.kind].claims(plan):
            return False
        if self._claiming is None:
            self._claiming = key
            return False
        self._claimants[key] = None
        return True

    def _claimed(self, key: Key) -> None:
        """Have those decided about again that could not claim anything meanwhile."""
        if self._claiming == key:
            self._claiming = None
            claimants, self._claimants = self._claimants, {}
            for waiting in claimants:
                self._queue.add(waiting)

    def _decide(
        self, value: AnyObject | None, inputs: list[Input], read: Tracker, now: float
    ) -> Plan:
        """Return the plan for an object with reports folded in; a pure function of what is read."""
        controller = self._controllers[type(value).__name__] if value is not None else None
        if controller is None or value is None:
            return Plan()
        uid = value.metadata.uid
        reports = [item.report for item in inputs if owner_uid(item.report) == uid]
        known = orders_of(value)
        orders = fold.fold_all(fold.resumed(known, self._started_at, now), reports, now)
        folded = _with_orders(value, orders) if orders != known else value
        plan = controller.reconcile(controller.gather(read, folded), now)
        return rebased(plan, value, folded)

    async def _carry_out(
        self,
        key: Key,
        value: AnyObject | None,
        plan: Plan,
        inputs: list[Input],
        read: Tracker,
        began: float,
    ) -> None:
        outcome, done = "changed", []

        def stored() -> None:
            done.extend(inputs)
            for item in inputs:
                item.stored()

        try:
            await self._confirm_inputs(value, plan, inputs)
            await self._interpreter.apply(plan, read, stored)
        except (BusUnavailable, NoSpace, StoreBusy) as error:
            outcome = "waits"
            log.warning("%s waits: %s", key, error)
        except (Conflict, NotFound) as error:
            outcome = "conflict"
            log.info("%s is decided about again: %s", key, error)
            await self._refresh(value)
        except InvalidManifest as error:
            outcome = "failed"
            log.warning("a write for %s is refused: %s", key, error)
        except Exception:
            outcome = "failed"
            log.exception("what was decided about %s cannot be carried out", key)
        finally:
            self._keep(key, [] if done else inputs)
            after_s = None
            if plan.wake_at is not None:
                after_s = max(plan.wake_at - self._now(), 0.0) + 0.01
            self._end(key, began, outcome, after_s=after_s)

    async def _confirm_inputs(
        self, value: AnyObject | None, plan: Plan, inputs: list[Input]
    ) -> None:
        """Raise Conflict when a report changes nothing only because what is seen is late.

        That is a report for another incarnation, or for an order that another operator has given.
        A write of its status needs no such check: that succeeds on the newest version alone.
        """
        uid = value.metadata.uid if value is not None else ""
        others = {owner_uid(item.report) for item in inputs} - {uid}
        for owner, found in (await self._cluster.find_all(others)).items():
            if found is not None:
                raise Conflict(f"the object with uid {owner} was not seen yet")
        shows = any(isinstance(write, SetStatus) and write.old is value for write in plan.writes)
        if value is not None and inputs and not shows:
            await self._cluster.refresh(value)
            if self._cluster.at(key_of(value)) is not value:
                raise Conflict(f"{value.metadata.name} has changed")

    async def _refresh(self, value: AnyObject | None) -> None:
        """Read again what could not be written; where that fails, the next try reads it."""
        if value is None:
            return
        try:
            await self._cluster.refresh(value)
        except (BusUnavailable, StoreBusy) as error:
            log.info("%s is not read again: %s", value.metadata.name, error)

    def _keep(self, key: Key, inputs: list[Input]) -> None:
        if inputs:
            self._inbox[key] = [*inputs, *self._inbox.get(key, [])]

    def _end(self, key: Key, began: float, outcome: str, *, after_s: float | None = None) -> None:
        self._claimed(key)
        if outcome in ("changed", "unchanged"):
            self._queue.done(key, after_s=after_s)
        else:
            self._queue.failed(key)
        lasted = time.perf_counter() - began
        self._metrics.record(instruments.RECONCILE_DURATION, lasted, key.kind, outcome)

    def _wait_for(self, key: Key, interests: frozenset[Interest]) -> None:
        before = self._interests.get(key, frozenset())
        if before == interests:
            return
        for interest in before - interests:
            waiting = self._waiting_for[interest]
            waiting.discard(key)
            if not waiting:
                del self._waiting_for[interest]
        for interest in interests - before:
            self._waiting_for.setdefault(interest, set()).add(key)
        if interests:
            self._interests[key] = interests
        else:
            self._interests.pop(key, None)


def namespace_of(value: AnyObject) -> str:
    """Return the namespace that an object belongs to: a content to that of its snapshot."""
    if isinstance(value, SnapshotContent):
        return value.spec.snapshot_ref.namespace
    return value.metadata.namespace or ""


def owner_uid(report: Report) -> str:
    """Return the uid of the object that a report's order serves."""
    return owner_of(OrderId(report.order))


def _with_orders(value: Any, orders: list[OrderStatus]) -> AnyObject:
    changed: AnyObject = replace(value, status=replace(value.status, orders=orders))
    return changed
