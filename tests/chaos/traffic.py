"""What users do during a chaos run: capture, restore and delete small workers, again and again."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import msgspec

from snapshot_api.facts import Node
from snapshot_api.kinds import KINDS, AnyObject
from snapshot_shared import subjects
from snapshot_shared.bus import Bus
from snapshot_shared.codec import decode_json
from snapshot_shared.errors import BusUnavailable, NotFound, RemoteFailure
from snapshot_shared.orders import Report
from snapshotctl.adapters.operator_client import OperatorClient
from snapshotctl.domain.servers import Server
from snapshotctl.domain.targets import Target
from tests.support import live_cluster, rules

T = TypeVar("T")
AGAIN_S = 1.0
"""How long a user waits before the next try, and before the next look."""


class Traffic:
    """Users that share one connection, what they got, and every report that went by."""

    def __init__(self, bus: Bus, seed: int, nodes: list[str]) -> None:
        self.client = OperatorClient(bus, Server("", "chaos"))
        self.outcomes: Counter[str] = Counter()
        self.reasons: Counter[str] = Counter()
        self.reports: list[Report] = []
        self.longest_s = 0.0
        self.stopping = asyncio.Event()
        self._bus = bus
        self._seed = seed
        self._nodes = nodes
        self._last = asyncio.get_running_loop().time()

    async def listen(self) -> None:
        """Collect reports, for ever."""
        async with self._bus.listening("snap.report.>") as heard:
            while True:
                self.reports.append(decode_json((await heard.get()).data, Report))

    async def replay(self) -> None:
        """Add what the stream holds and we may have missed."""
        for delivery in await self._bus.replay(subjects.REPORTS, "snap.report.>"):
            self.reports.append(decode_json(delivery.data, Report))

    async def use(self, user: int) -> None:
        """Be one user until it is enough; what was begun is brought to its end."""
        chance = random.Random(f"{self._seed}-{user}")
        number = 0
        while not self.stopping.is_set():
            number += 1
            name = f"user-{user}-{number}"
            node, other = chance.choice(self._nodes), chance.choice(self._nodes)
            policy = chance.choice(("Resume", "Terminate"))
            await self._apply(live_cluster.checkpoint(name, node, policy))
            ready = await self._settled("capture", "DynamoCheckpoint", name)
            if ready and not self.stopping.is_set():
                await self._apply(live_cluster.pod(f"{name}-restored", other, name))
                await self._settled("restore", "Pod", f"{name}-restored")
                await self._delete("Pod", f"{name}-restored")
            await self._delete("DynamoCheckpoint", name)

    async def _apply(self, document: dict[str, Any]) -> None:
        raw = msgspec.Raw(msgspec.json.encode(document))
        await self.persistently(lambda: self.client.apply([raw], ""))

    async def _settled(self, what: str, kind: str, name: str) -> bool:
        """Wait until an object is settled; say whether well."""
        target = Target(KINDS[kind], "default", name)
        while True:
            value = await self.persistently(lambda: self.client.get(target))
            if value is None or not rules.unsettled([value]):
                break
            await asyncio.sleep(AGAIN_S / 4)
        status: Any = value.status if value is not None else None
        is_well = status is not None and status.phase in ("Ready", "Running")
        self._count(f"{what}s {'done' if is_well else 'failed'}")
        if not is_well:
            self.reasons[f"{what}: {_reason(status)}"] += 1
        return is_well

    async def _delete(self, kind: str, name: str) -> None:
        target = Target(KINDS[kind], "default", name)
        while await self.persistently(lambda: self.client.get(target)) is not None:
            with contextlib.suppress(RemoteFailure):
                await self.persistently(lambda: self.client.delete(target))
            await asyncio.sleep(AGAIN_S / 4)
        self._count("deletes done")

    def _count(self, what: str) -> None:
        now = asyncio.get_running_loop().time()
        self.longest_s = max(self.longest_s, now - self._last)
        self._last = now
        self.outcomes[what] += 1

    async def persistently(self, ask: Callable[[], Awaitable[T]]) -> T:
        """Ask until there is an answer; one that went amiss is asked again."""
        while True:
            try:
                return await ask()
            except (BusUnavailable, NotFound):
                await asyncio.sleep(AGAIN_S)
            except RemoteFailure as error:
                if not error.failure.retryable:
                    raise
                await asyncio.sleep(AGAIN_S)

    async def objects(self) -> list[AnyObject]:
        """Every object but the nodes."""
        found: list[AnyObject] = []
        for kind in KINDS.values():
            if kind.type is not Node:
                found += await self.persistently(lambda kind=kind: self.client.all_of(kind, None))
        return found


def _reason(status: Any) -> str:
    if status is None:
        return "gone"
    failed = next((c.reason for c in status.conditions if c.type == "Failed"), "")
    return failed or getattr(status, "reason", "") or "unknown"
