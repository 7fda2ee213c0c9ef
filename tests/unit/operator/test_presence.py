"""Absence counts only while the bus says who is there."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress

import pytest

from snapshot_operator.core.presence import LOST_AFTER_S
from snapshot_operator.runtime.presence import EVERY_S, PresenceFollower
from snapshot_shared.bus import Delivery
from snapshot_shared.clocks import Clocks
from snapshot_shared.codec import encode_json
from snapshot_shared.errors import BusUnavailable
from snapshot_shared.objects.kubernetes import Node
from snapshot_shared.objects.meta import is_true
from tests.support.brokers import VirtualLoop
from tests.support.objects import presence
from tests.support.operator_world import World


class Broker:
    """A bus that has seen one node once, and then does what `reads` says of each full read."""

    def __init__(self, reads: Callable[[int], None]) -> None:
        self.again = asyncio.Event()
        self._reads = reads
        self._count = 0

    def reconnections(self) -> asyncio.Event:
        return self.again

    @asynccontextmanager
    async def listening(self, _: str) -> AsyncIterator[asyncio.Queue[Delivery]]:
        yield asyncio.Queue()

    async def entries(self, _: str) -> dict[str, bytes]:
        self._count += 1
        if self._count == 1:
            return {"node-1": encode_json(presence("node-1"))}
        self._reads(self._count)
        return {}


async def is_lost(after_s: float, reads: Callable[[Broker, int], None]) -> bool:
    """Whether a node that went away at once counts as lost after some seconds."""
    world = World()
    await world.join()
    broker = Broker(lambda count: reads(broker, count))
    clock = asyncio.get_running_loop().time
    clocks = Clocks(monotonic=clock, wall=clock, boot_id="b")
    follower = PresenceFollower(broker, world.cluster, clocks)  # type: ignore[arg-type]
    with suppress(TimeoutError):
        await asyncio.wait_for(follower.run(), after_s)
    node = world.cluster.get("Node", None, "node-1")
    assert isinstance(node, Node)
    return is_true(node.status.conditions, "Lost")


def nothing(broker: Broker, count: int) -> None:
    """The bus is healthy."""


def unavailable(broker: Broker, count: int) -> None:
    """The second full read finds no bus."""
    if count == 2:
        raise BusUnavailable("not connected")


def reconnected(broker: Broker, count: int) -> None:
    """The connection is lost and found between two full reads."""
    if count == 2:
        broker.again.set()


@pytest.mark.parametrize(
    ("reads", "lost_after_s"),
    [
        (nothing, LOST_AFTER_S),
        (unavailable, LOST_AFTER_S + 2 * EVERY_S),
        (reconnected, LOST_AFTER_S + 2 * EVERY_S),
    ],
)
def test_absence_counts_from_when_the_bus_was_last_unknown(
    reads: Callable[[Broker, int], None], lost_after_s: float
) -> None:
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        assert not runner.run(is_lost(lost_after_s - 1.0, reads))
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        assert runner.run(is_lost(lost_after_s + 1.0, reads))
