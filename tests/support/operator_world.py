"""The real operator over an in-memory store, with the nodes' answers given by the test.

Orders are collected as they are published; the test answers them with reports, as messages.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import msgspec

from snapshot_api.kinds import KINDS, AnyObject
from snapshot_api.meta import Condition, OrderStatus, condition
from snapshot_api.v1alpha1.restore import restore_name
from snapshot_operator.api.nodes import NodeApi
from snapshot_operator.api.objects import Api
from snapshot_operator.api.operations import Operations, Sweeping
from snapshot_operator.core.conditions import timestamp
from snapshot_operator.core.inventory import Policy
from snapshot_operator.core.plan import Plan, SetStatus
from snapshot_operator.core.retention import Limits
from snapshot_operator.local.controllers import CONTROLLERS, INDEXES
from snapshot_operator.local.store import SqliteStore
from snapshot_operator.runtime.cluster import Cluster, key_of
from snapshot_operator.runtime.interpreter import Interpreter
from snapshot_operator.runtime.manager import Input, Manager, owner_uid
from snapshot_operator.runtime.presence import fold_presence
from snapshot_operator.runtime.spans import Spans
from snapshot_operator.runtime.sweep import Sweep
from snapshot_operator.runtime.upkeep import Retention
from snapshot_operator.runtime.world import ALL, Selection, Shape
from snapshot_shared import api
from snapshot_shared.api import ApplyRequest
from snapshot_shared.codec import encode_json
from snapshot_shared.errors import BusUnavailable, Failure, StoreBusy
from snapshot_shared.metrics import OFF, Metrics
from snapshot_shared.orders import TERMINAL, PartResult, Presence, Report
from snapshot_shared.telemetry import Telemetry
from tests.support import builders
from tests.support.blind_store import BlindStore
from tests.support.objects import checkpoint_document, presence

DIGEST = "sha256:" + "0" * 64


class MemoryOrders:
    """The stream of orders as the operator sees it: the last attempt of each id."""

    def __init__(self) -> None:
        self.stream: dict[str, OrderStatus] = {}
        self.history: list[OrderStatus] = []
        self.most = 100_000
        self.taken = 0.0
        """The share of the room that orders of others take."""

    async def publish(self, order: OrderStatus) -> None:
        known = self.stream.get(order.order)
        if known is None and len(self.stream) >= self.most:
            raise BusUnavailable("maximum messages exceeded")
        if known is None or known.attempt < order.attempt:
            self.stream[order.order] = order
            self.history.append(order)

    async def ensure(self, order: OrderStatus) -> None:
        await self.publish(order)

    async def repeat(self, order: OrderStatus) -> None:
        known = self.stream.get(order.order)
        if known is not None and known.attempt == order.attempt:
            self.history.append(order)

    async def replace(self, order: OrderStatus) -> None:
        self.stream[order.order] = order
        self.history.append(order)

    async def withdraw(self, order: OrderStatus) -> None:
        found = self.stream.get(order.order)
        if found is not None and found.attempt <= order.attempt:
            del self.stream[order.order]

    async def published(self) -> dict[str, str]:
        return {order: f"snap.order.x.y.{order}" for order in self.stream}

    async def fill(self) -> float:
        return self.taken + len(self.stream) / 100_000

    async def remove(self, subject: str) -> None:
        self.stream.pop(subject.rpartition(".")[2], None)


class World:
    """Time, store, orders, and the means to let the operator settle."""

    def __init__(
        self,
        limits: Limits = Limits(),  # noqa: B008 - an immutable value
        *,
        store: Any = None,
        orders: MemoryOrders | None = None,
        namespaces: Selection = ALL,
        metrics: Metrics = OFF,
        now: float = 1_000_000.0,
        shapes: Mapping[str, Shape] = MappingProxyType({}),
    ) -> None:
        self.now = now
        self.store = store or SqliteStore(None, timestamp=lambda: timestamp(self.now)).open()
        self.cluster = Cluster(self.store, INDEXES)
        self.orders = orders or MemoryOrders()
        self.spans = Spans(Telemetry("snap-operator", "operator", "0"), self.clock, metrics)
        self.warnings: list[tuple[str, Failure]] = []
        """What was refused or left out, with the names of the objects."""
        self.interpreter = Interpreter(
            self.cluster, self.orders, self.spans, warned=self._warned, shapes=shapes
        )
        self.manager = Manager(
            self.cluster,
            CONTROLLERS,
            self.interpreter,
            self.clock,
            jitter=lambda: 1.0,
            namespaces=namespaces,
        )
        self.sweep = Sweep(
            self.cluster,
            self.orders,
            self.manager,
            self.interpreter.unpublished,
            self.clock,
            warned=self._warned,
        )
        self.operations = Operations(
            self.cluster,
            self.orders,
            lambda: Sweeping(self.sweep.swept_at, self.sweep.fill),
            self.clock,
        )
        self.retention = Retention(self.cluster, limits, self.clock, namespaces)
        ids = itertools.count(1)
        self.api = Api(self.cluster, self.retention, self.clock, lambda: f"request-{next(ids)}")
        self.nodes = NodeApi(self.cluster, Policy())
        self.present: dict[str, Presence] = {}
        self.answered: set[tuple[str, int]] = set()
        self.numbers: dict[tuple[str, int], int] = {}
        self.stored: list[Report] = []
        """Reports that may be acknowledged."""
        self.is_synced = False

    def _warned(self, value: AnyObject, failure: Failure) -> None:
        self.warnings.append((value.metadata.name, failure))

    def clock(self) -> float:
        return self.now

    def another(self, *hidden: str) -> World:
        """Return an operator that starts now on this store, and hears nothing of these kinds."""
        other = World(store=BlindStore(self.store, hidden), orders=self.orders, now=self.now)
        other.answered = self.answered
        return other

    @contextlib.contextmanager
    def refusing_status(
        self, is_refused: Callable[[Any], bool], error: type[Exception] = StoreBusy
    ) -> Iterator[None]:
        """Have the store take no status of these objects meanwhile."""
        update = self.store.update_status

        async def refusing(value: AnyObject) -> AnyObject:
            if is_refused(value):
                raise error("refused by the test")
            taken: AnyObject = await update(value)
            return taken

        self.store.update_status = refusing
        try:
            yield
        finally:
            self.store.update_status = update

    async def apply(self, *documents: dict[str, Any]) -> None:
        await self.sync()
        raw = [msgspec.Raw(msgspec.json.encode(document)) for document in documents]
        reply = await self.api.apply(ApplyRequest(documents=raw))
        assert reply.failure is None
        await self.settle()

    async def join(self, *presences: Presence) -> None:
        self.present.update({presence.node: presence for presence in presences})
        await self.see(absent_s=0.0)

    async def see(self, *, absent_s: float) -> None:
        """Fold presence; nodes that are not there were last seen `absent_s` ago."""
        await self.sync()
        last = {node.metadata.name: 1000.0 - absent_s for node in self.cluster.all("Node")}
        await fold_presence(self.cluster, self.present, last, now=self.now, monotonic=1000.0)
        await self.settle()

    async def sync(self) -> None:
        """Read all kinds from the store, once."""
        if not self.is_synced:
            self.is_synced = True
            await self.cluster.sync()

    async def settle(self) -> None:
        await self.sync()
        await self.manager.drain()

    async def advance(self, seconds: float) -> None:
        """Let time pass, then decide about everything."""
        self.now += seconds
        self.manager.resync()
        await self.settle()

    def open(self, verb: str | None = None) -> list[OrderStatus]:
        """Return the published orders that the test has not answered, oldest first, each once."""
        published = {(order.order, order.attempt): order for order in self.orders.history}
        return [
            order
            for key, order in published.items()
            if key not in self.answered and verb in (None, order.verb)
        ]

    async def report(self, order: OrderStatus, kind: str | None = None, **fields: Any) -> None:
        kind = kind or TERMINAL[order.verb]
        key = (order.order, order.attempt)
        self.numbers[key] = self.numbers.get(key, 0) + 1
        report = builders.report(order, kind, n=self.numbers[key], at=self.now, **fields)
        if report.is_terminal:
            self.answered.add(key)
        await self.deliver(report)

    async def deliver(self, report: Report) -> None:
        """Give a report to the decision about its owner, if there is one."""
        owner = self.cluster.by_uid(owner_uid(report))
        if owner is not None:
            self.manager.take(key_of(owner), Input(report, lambda: self.stored.append(report)))
        await self.settle()

    async def fail(self, order: OrderStatus, reason: str, *, retryable: bool = False) -> None:
        failure = Failure(reason=reason, message=f"{reason} happened", retryable=retryable)
        await self.report(order, "failed", failure=failure)

    async def answer_well(self, order: OrderStatus) -> None:
        """Answer as a node does when all goes well."""
        await self.report(order, **_good_fields(order))
        if order.verb == "run" and not payload(order)["standby"]:
            await self.report(order, "ready")

    async def answer_all(self) -> None:
        """Answer everything well until nothing is open."""
        for _ in range(50):
            if not self.open():
                return
            for order in self.open():
                await self.answer_well(order)
        raise AssertionError(f"orders never end: {[order.order for order in self.open()]}")

    async def answer(self, *verbs: str) -> None:
        """Answer well what is open of these verbs, of which there must be some, one by one."""
        for verb in verbs:
            orders = self.open(verb)
            assert orders, f"no {verb} is open"
            for order in orders:
                await self.answer_well(order)

    async def capture(self, name: str = "llm", **job: Any) -> None:
        """Apply a checkpoint, and answer everything well."""
        await self.perform(checkpoint_document(name, **job))

    async def perform(self, *documents: dict[str, Any]) -> None:
        """Apply documents, and answer everything well."""
        await self.apply(*documents)
        await self.answer_all()

    async def ask(self, verb: str, request: Any, headers: dict[str, str] | None = None) -> Any:
        """Ask as a client does: bytes in, bytes out; then let the operator settle."""
        data = request if isinstance(request, bytes) else encode_json(request)
        answers = self.api.endpoints() | self.nodes.endpoints() | self.operations.endpoints()
        answer = await answers[verb](data, headers or {})
        await self.settle()
        kind = "get" if verb == "view" else verb.removesuffix(".*")
        return msgspec.json.decode(answer, type=getattr(api, f"{kind.capitalize()}Reply"))

    async def verify(self, kind: str = "DynamoCheckpoint", name: str = "llm") -> api.VerifyReply:
        """Ask for an artifact to be read as a whole."""
        reply = await self.api.verify(api.VerifyRequest(kind=kind, name=name))
        await self.settle()
        return reply

    async def delete(self, kind: str, name: str) -> None:
        await self.cluster.delete(await self.get(kind, name))
        await self.settle()

    async def remove(self, kind: str, name: str) -> None:
        """Delete an object, and answer everything well."""
        await self.delete(kind, name)
        await self.answer_all()

    async def silence(self, absent_s: float) -> None:
        """Have no node present any more, each last seen `absent_s` ago."""
        self.present.clear()
        await self.see(absent_s=absent_s)

    async def get(self, kind: str, name: str) -> Any:
        namespace = None if kind in ("Node", "SnapshotContent") else "default"
        return self.cluster.get(kind, namespace, name)

    async def row(self, kind: str, name: str = "llm", type_: str = "Ready") -> Condition:
        return row_of(await self.get(kind, name), type_)

    async def restore(self, pod: str) -> Any:
        return self.cluster.get(
            "SnapshotRestore", "default", restore_name((await self.get("Pod", pod)).metadata.uid)
        )

    async def content(self) -> Any:
        (content,) = self.cluster.all("SnapshotContent")
        return content

    async def everything(self) -> list[AnyObject]:
        return [value for kind in KINDS for value in self.cluster.all(kind)]


def row_of(value: Any, type_: str = "Ready") -> Condition:
    """Return a condition of an object, which must have it."""
    found = condition(value.status.conditions, type_)
    assert found is not None, f"{value.metadata.name} has no condition {type_}"
    return found


def written(plan: Plan) -> Any:
    """Return the object as the one write of a plan, which must be one of its status, has it."""
    (write,) = plan.writes
    assert isinstance(write, SetStatus), write
    return write.new


def payload(order: OrderStatus) -> dict[str, Any]:
    """Return an order as JSON that is published."""
    found: dict[str, Any] = msgspec.json.decode(order.payload)
    return found


def _good_fields(order: OrderStatus) -> dict[str, Any]:
    wanted = payload(order)
    match order.verb:
        case "prepare":
            return {"vector": builders.vector(wanted["devices"], 1024)}
        case "dump":
            return {"part": PartResult(part="process", bytes=10, digest=DIGEST)}
        case "save":
            return {"part": PartResult(part=wanted["part"], bytes=1024, digest=DIGEST)}
        case "seal":
            return {"root_digest": DIGEST, "bytes": 2058}
        case _:
            return {}


async def world_of(
    nodes: int,
    *,
    gpus: int = 2,
    captured: bool = False,
    answered: tuple[str, ...] | None = None,
) -> World:
    """Make a world with nodes from node-1 on, and one checkpoint if that is to be captured.

    With `answered` there is one, too, of which the orders of these verbs are answered well.
    """
    world = World()
    await world.join(*(presence(f"node-{number + 1}", gpus=gpus) for number in range(nodes)))
    if captured:
        await world.capture()
    elif answered is not None:
        await world.apply(checkpoint_document())
        await world.answer(*answered)
    return world
