"""The real operator over an in-memory store, with the nodes' answers given by the test.

Orders are collected as they are published; the test answers them with reports, as messages.
"""

from __future__ import annotations

from typing import Any

import msgspec

from snapshot_operator.adapters.sqlite import SqliteCluster
from snapshot_operator.controller import Controller, Interpreter
from snapshot_operator.domain.conditions import timestamp
from snapshot_operator.domain.retention import Limits
from snapshot_operator.handlers import Api, Retention, fold_presence, fold_report
from snapshot_operator.handlers.operations import Operations, Sweeping
from snapshot_shared.api import ApplyRequest
from snapshot_shared.errors import BusUnavailable, Failure
from snapshot_shared.objects import AnyObject, OrderStatus
from snapshot_shared.orders import (
    TERMINAL,
    LayoutRef,
    PartResult,
    Presence,
    Report,
    VectorEntry,
)
from snapshot_shared.telemetry import Telemetry

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

    def __init__(self, limits: Limits = Limits()) -> None:  # noqa: B008 - an immutable value
        self.now = 1_000_000.0
        self.cluster = SqliteCluster(None, timestamp=lambda: timestamp(self.now))
        self.orders = MemoryOrders()
        telemetry = Telemetry("snap-operator", "operator", "0")
        self.interpreter = Interpreter(self.cluster, self.orders, telemetry, lambda: self.now)
        self.controller = Controller(
            self.cluster, self.orders, self.interpreter, lambda: self.now, limits
        )
        self.operations = Operations(
            self.cluster,
            self.orders,
            lambda: Sweeping(self.controller.swept_at, self.controller.fill),
        )
        retention = Retention(limits, self.controller.judged, self.controller.retain)
        self.api = Api(self.cluster, retention)
        self.present: dict[str, Presence] = {}
        self.answered: set[tuple[str, int]] = set()
        self.numbers: dict[tuple[str, int], int] = {}

    async def apply(self, *documents: dict[str, Any]) -> None:
        raw = [msgspec.Raw(msgspec.json.encode(document)) for document in documents]
        reply = await self.api.apply(ApplyRequest(documents=raw))
        assert reply.failure is None
        await self.settle()

    async def join(self, *presences: Presence) -> None:
        self.present.update({presence.node: presence for presence in presences})
        await self.see(absent_s=0.0)

    async def see(self, *, absent_s: float) -> None:
        """Fold presence; nodes that are not there were last seen `absent_s` ago."""
        last = {node.metadata.name: 1000.0 - absent_s for node in await self.cluster.list("Node")}
        await fold_presence(self.cluster, self.present, last, now=self.now, monotonic=1000.0)
        await self.settle()

    async def settle(self) -> None:
        await self.controller.settle()

    async def advance(self, seconds: float) -> None:
        """Let time pass, then look at everything."""
        self.now += seconds
        await self.controller.look_at_all()
        await self.settle()

    def open(self, verb: str | None = None) -> list[OrderStatus]:
        """Give the published orders that the test has not answered, oldest first."""
        return [
            order
            for order in self.orders.history
            if (order.order, order.attempt) not in self.answered and verb in (None, order.verb)
        ]

    async def report(self, order: OrderStatus, kind: str | None = None, **fields: Any) -> None:
        kind = kind or TERMINAL[order.verb]
        key = (order.order, order.attempt)
        self.numbers[key] = self.numbers.get(key, 0) + 1
        report = Report(
            order=order.order,
            attempt=order.attempt,
            n=self.numbers[key],
            kind=kind,  # type: ignore[arg-type]
            node=order.node,
            service=order.service,
            at=self.now,
            **fields,
        )
        if report.is_terminal:
            self.answered.add(key)
        changed = await fold_report(self.cluster, report, self.now)
        if changed:
            self.interpreter.trace(*changed)
        await self.settle()

    async def fail(self, order: OrderStatus, reason: str, *, retryable: bool = False) -> None:
        failure = Failure(reason=reason, message=f"{reason} happened", retryable=retryable)
        await self.report(order, "failed", failure=failure)

    async def answer_well(self, order: OrderStatus) -> None:
        """Answer as a node does when all goes well."""
        await self.report(order, **_good_fields(order))
        if order.verb == "run" and not order.payload.get("standby"):
            await self.report(order, "ready")

    async def answer_all(self, *, rounds: int = 50) -> None:
        """Answer everything well until nothing is open."""
        for _ in range(rounds):
            if not self.open():
                return
            for order in self.open():
                await self.answer_well(order)
        raise AssertionError(f"orders never end: {[order.order for order in self.open()]}")

    async def get(self, kind: str, name: str) -> Any:
        return await self.cluster.get(kind, "default", name)

    async def content(self) -> Any:
        (content,) = await self.cluster.list("SnapshotContent")
        return content

    async def everything(self) -> list[AnyObject]:
        kinds = ("DynamoCheckpoint", "Job", "Snapshot", "SnapshotContent", "Pod", "Node")
        return [value for kind in kinds for value in await self.cluster.list(kind)]


def _good_fields(order: OrderStatus) -> dict[str, Any]:
    payload = order.payload
    match order.verb:
        case "prepare":
            layouts = [
                VectorEntry(
                    part=f"gpu-{device['ordinal']}",
                    ordinal=device["ordinal"],
                    layout=LayoutRef(
                        device=device["uuid"],
                        incarnation="one",
                        generation=1,
                        layout_id=f"layout-{device['ordinal']}",
                        structure_hash="hash",
                        bytes=1024,
                    ),
                )
                for device in payload["devices"]
            ]
            return {"vector": [VectorEntry(part="process"), *layouts]}
        case "dump":
            return {"part": PartResult(part="process", bytes=10, digest=DIGEST)}
        case "save":
            return {"part": PartResult(part=payload["part"], bytes=1024, digest=DIGEST)}
        case "seal":
            return {"root_digest": DIGEST, "bytes": 2058}
        case _:
            return {}
