"""What a network may do to a client of the simulated server."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from itertools import chain, repeat

import pytest

from snapshot_shared import subjects
from snapshot_shared.bus import REQUEST_S, Delivery
from snapshot_shared.bus.streams import ACK_WAIT_S, FETCH_S
from snapshot_shared.errors import BusUnavailable, Conflict, NotFound
from snapshot_shared.ids import NodeName, OrderId
from tests.scenario.bus import Faults, SimBus, SimServer

NODE = NodeName("node-1")
SUBJECT = subjects.order(NODE, "agent", OrderId("dump-00000000-0000-0000-0000-000000000001"))
OTHER = SUBJECT[:-1] + "2"
MINE = subjects.orders_of(NODE, "agent")


def now() -> float:
    return asyncio.get_running_loop().time()


@pytest.fixture
def server() -> SimServer:
    return SimServer()


@pytest.fixture
def faults() -> Faults:
    return Faults()


@pytest.fixture
async def bus(server: SimServer, faults: Faults) -> SimBus:
    bus = await SimBus(server, "test", faults=faults).connect()
    await bus.ensure_assets()
    return bus


@pytest.fixture
async def other(server: SimServer) -> SimBus:
    return await SimBus(server, "other").connect()


async def take(bus: SimBus, count: int) -> list[Delivery]:
    found: list[Delivery] = []
    async with aclosing(bus.consume(subjects.ORDERS, "agent-node-1", MINE)) as source:
        while len(found) < count:
            found.append(await anext(source))
    return found


def once(faults: Faults, name: str, decision: object) -> None:
    """Have the network decide something else, once."""
    calm = getattr(faults, name)()
    setattr(faults, name, chain([decision], repeat(calm)).__next__)


async def test_a_lost_request_fails_in_time_and_is_not_stored(bus: SimBus, faults: Faults) -> None:
    once(faults, "loses_request", True)
    begin = now()
    with pytest.raises(BusUnavailable, match="timeout"):
        await bus.publish(SUBJECT, b"x")
    assert now() - begin == pytest.approx(REQUEST_S)
    assert await bus.last(subjects.ORDERS, SUBJECT) is None


async def test_a_lost_answer_fails_in_time_although_the_message_is_stored(
    bus: SimBus, faults: Faults
) -> None:
    once(faults, "loses_answer", True)
    with pytest.raises(BusUnavailable, match="timeout"):
        await bus.publish(SUBJECT, b"x", expected_last=0)
    with pytest.raises(Conflict):
        await bus.publish(SUBJECT, b"x", expected_last=0)


async def test_a_cut_client_notices_after_a_while_and_is_back_after_the_healing(
    server: SimServer, bus: SimBus, other: SimBus
) -> None:
    again = bus.reconnections()
    server.cut(bus)
    with pytest.raises(BusUnavailable, match="timeout"):
        await bus.publish(SUBJECT, b"x")
    await asyncio.sleep(Faults().notices())
    assert not bus.is_connected
    assert other.is_connected
    with pytest.raises(BusUnavailable, match="not connected"):
        await bus.publish(SUBJECT, b"x")
    server.heal(bus)
    await again.wait()
    await bus.publish(SUBJECT, b"x", expected_last=0)


async def test_a_short_cut_is_not_noticed(server: SimServer, bus: SimBus) -> None:
    again = bus.reconnections()
    server.cut(bus)
    await asyncio.sleep(3)
    server.heal(bus)
    await bus.publish(SUBJECT, b"x")
    await asyncio.sleep(100)
    assert bus.is_connected
    assert not again.is_set()


async def test_a_cut_within_a_request_leaves_its_outcome_unknown(
    server: SimServer, bus: SimBus
) -> None:
    publishing = asyncio.ensure_future(bus.publish(SUBJECT, b"x"))
    await asyncio.sleep(Faults().latency() * 1.5)
    server.cut(bus)
    with pytest.raises(BusUnavailable):
        await publishing
    server.heal(bus)
    await bus.wait_connected()
    assert await bus.last(subjects.ORDERS, SUBJECT) == (1, b"x")


async def test_acks_fail_behind_a_cut_and_the_order_comes_again(
    server: SimServer, bus: SimBus
) -> None:
    await bus.publish(SUBJECT, b"x")
    (delivery,) = await take(bus, 1)
    server.cut(bus)
    with pytest.raises(BusUnavailable):
        await delivery.ack()
    server.heal(bus)
    assert (await take(bus, 1))[0].sequence == delivery.sequence


async def test_a_delivery_into_a_cut_comes_again(
    server: SimServer, bus: SimBus, other: SimBus
) -> None:
    taking = asyncio.ensure_future(take(bus, 1))
    await asyncio.sleep(1)
    server.cut(bus)
    await other.publish(SUBJECT, b"x")
    await asyncio.sleep(1)
    server.heal(bus)
    assert (await taking)[0].data == b"x"
    assert ACK_WAIT_S <= now() <= ACK_WAIT_S + FETCH_S


async def test_a_crash_behind_a_cut_is_learned_with_the_healing(
    server: SimServer, bus: SimBus
) -> None:
    again = bus.reconnections()
    server.cut(bus)
    server.crash()
    server.restart()
    await asyncio.sleep(1)
    assert bus.is_connected
    server.heal(bus)
    await again.wait()
    await bus.publish(SUBJECT, b"x")


async def test_a_message_that_is_postponed_is_overtaken(bus: SimBus, faults: Faults) -> None:
    await bus.publish(SUBJECT, b"first")
    await bus.publish(OTHER, b"second")
    once(faults, "postpones", 5.0)
    assert [found.data for found in await take(bus, 2)] == [b"second", b"first"]


async def test_a_message_that_is_repeated_comes_again_though_it_was_acked(
    bus: SimBus, faults: Faults
) -> None:
    await bus.publish(SUBJECT, b"x")
    once(faults, "repeats", 5.0)
    (first,) = await take(bus, 1)
    await first.ack()
    (again,) = await take(bus, 1)
    assert again.sequence == first.sequence
    assert now() < ACK_WAIT_S


async def test_an_announcement_may_be_lost_for_one_listener_alone(
    bus: SimBus, other: SimBus, faults: Faults
) -> None:
    async with bus.listening("snap.event.>") as mine, other.listening("snap.event.>") as theirs:
        once(faults, "loses_announcement", True)
        for word in (b"one", b"two"):
            await other.announce("snap.event.x", word)
        await asyncio.sleep(1)
        assert [mine.get_nowait().data for _ in range(mine.qsize())] == [b"two"]
        assert [theirs.get_nowait().data for _ in range(theirs.qsize())] == [b"one", b"two"]


async def test_while_a_leader_is_elected_nobody_is_answered(server: SimServer, bus: SimBus) -> None:
    server.stall(2.0)
    begin = now()
    assert await bus.publish(SUBJECT, b"waits", expected_last=0) == 1
    assert now() - begin == pytest.approx(2.0, abs=0.1)


async def test_a_client_that_never_runs_again_holds_nothing_up(
    server: SimServer, bus: SimBus, other: SimBus
) -> None:
    """Its callbacks are dropped, as the simulator does when it crashes a process."""
    dying = asyncio.ensure_future(take(other, 1))
    await asyncio.sleep(1)

    async def echo(data: bytes, _headers: object) -> bytes:
        return data

    await other.serve("snap-test", "0", {}, {"snap.rpc.test": echo})
    server.drop_client(other)
    await bus.publish(SUBJECT, b"x")
    assert (await asyncio.wait_for(take(bus, 1), 1))[0].data == b"x"
    with pytest.raises(NotFound):
        await bus.request("snap.rpc.test", b"")
    dying.cancel()
