"""What the courier relies on, run on a real nats-server: each is a property of JetStream."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing

import pytest

from snapshot_shared import subjects
from snapshot_shared.bus import Bus
from snapshot_shared.errors import BusUnavailable, Conflict, NotFound
from snapshot_shared.ids import NodeName, OrderId

NODE = NodeName("node-1")
ORDER = OrderId("dump-00000000-0000-0000-0000-000000000001")
SUBJECT = subjects.order(NODE, "agent", ORDER)


@pytest.fixture
async def bus(nats_url: str) -> AsyncIterator[Bus]:
    bus = await Bus(nats_url, "test").connect()
    await bus.ensure_assets()
    yield bus
    await bus.close()


async def test_ensuring_the_assets_twice_changes_nothing(bus: Bus) -> None:
    await bus.publish(SUBJECT, b"{}")
    await bus.ensure_assets()
    assert await bus.last(subjects.ORDERS, SUBJECT) == (1, b"{}")


async def test_a_second_publisher_is_refused_by_the_expected_sequence(bus: Bus) -> None:
    await bus.publish(SUBJECT, b"first", expected_last=0)
    with pytest.raises(Conflict):
        await bus.publish(SUBJECT, b"second", expected_last=0)


async def test_a_newer_attempt_replaces_an_older_one_that_is_pending(bus: Bus) -> None:
    sequence = await bus.publish(SUBJECT, b"one", expected_last=0)
    await bus.publish(SUBJECT, b"two", expected_last=sequence)
    assert await bus.subjects_in(subjects.ORDERS, "snap.order.>") == {SUBJECT: 1}
    found = await bus.last(subjects.ORDERS, SUBJECT)
    assert found is not None
    assert found[1] == b"two"


async def test_an_order_waits_for_a_node_that_is_not_there_yet(bus: Bus) -> None:
    await bus.publish(SUBJECT, b"early")
    filter_ = subjects.orders_of(NODE, "agent")
    async with aclosing(bus.consume(subjects.ORDERS, "agent-node-1", filter_)) as source:
        delivery = await asyncio.wait_for(anext(source), 10)
        assert (delivery.subject, delivery.data) == (SUBJECT, b"early")
        await delivery.ack()


async def test_an_acked_order_stays_readable_and_is_not_delivered_again(bus: Bus) -> None:
    await bus.publish(SUBJECT, b"x")
    filter_ = subjects.orders_of(NODE, "agent")
    async with aclosing(bus.consume(subjects.ORDERS, "agent-node-1", filter_)) as source:
        await (await asyncio.wait_for(anext(source), 10)).ack()
    other = SUBJECT[:-1] + "2"
    await bus.publish(other, b"y")
    async with aclosing(bus.consume(subjects.ORDERS, "agent-node-1", filter_)) as source:
        assert (await asyncio.wait_for(anext(source), 10)).subject == other
    assert await bus.last(subjects.ORDERS, SUBJECT) is not None


async def test_a_consumer_sees_only_its_own_node(bus: Bus) -> None:
    await bus.publish(subjects.order(NodeName("node-2"), "agent", ORDER), b"not mine")
    await bus.publish(SUBJECT, b"mine")
    filter_ = subjects.orders_of(NODE, "agent")
    async with aclosing(bus.consume(subjects.ORDERS, "agent-node-1", filter_)) as source:
        assert (await asyncio.wait_for(anext(source), 10)).data == b"mine"


async def test_the_same_message_id_is_stored_once(bus: Bus) -> None:
    subject = subjects.report(NODE, ORDER, "accepted")
    first = await bus.publish(subject, b"a", message_id="dump.1.1")
    second = await bus.publish(subject, b"a", message_id="dump.1.1")
    assert first == second


async def test_deleting_by_sequence_spares_a_newer_message(bus: Bus) -> None:
    first = await bus.publish(SUBJECT, b"one")
    await bus.publish(SUBJECT, b"two", expected_last=first)
    await bus.delete(subjects.ORDERS, first)
    assert await bus.last(subjects.ORDERS, SUBJECT) is not None


async def test_an_order_over_the_size_limit_is_refused_with_the_reason(bus: Bus) -> None:
    with pytest.raises(BusUnavailable, match="message size exceeds"):
        await bus.publish(SUBJECT, b"x" * (300 * 1024))


async def test_a_deleted_stream_comes_back_and_publishing_goes_on(bus: Bus) -> None:
    await bus.client.jetstream().delete_stream(subjects.ORDERS)
    with pytest.raises(BusUnavailable):
        await bus.publish(SUBJECT, b"x")
    await bus.ensure_assets()
    await bus.publish(SUBJECT, b"x", expected_last=0)


async def test_replay_gives_everything_that_a_stream_holds(bus: Bus) -> None:
    trace = "a" * 32
    for index in range(20):
        await bus.publish(subjects.span("node-1", trace), str(index).encode())
    found = await bus.replay(subjects.SPANS, subjects.spans_of(trace))
    assert [int(delivery.data) for delivery in found] == list(range(20))
    assert await bus.replay(subjects.SPANS, subjects.spans_of("b" * 32)) == []


async def test_bucket_entries_can_be_listed_changed_and_removed(bus: Bus) -> None:
    assert await bus.entries(subjects.NODES_BUCKET) == {}
    await bus.put(subjects.NODES_BUCKET, "node-1", b"one")
    await bus.put(subjects.NODES_BUCKET, "node-1", b"two")
    assert await bus.entries(subjects.NODES_BUCKET) == {"node-1": b"two"}
    await bus.remove(subjects.NODES_BUCKET, "node-1")
    assert await bus.entries(subjects.NODES_BUCKET) == {}


async def test_a_request_that_nobody_serves_is_not_found(bus: Bus) -> None:
    with pytest.raises(NotFound, match="nobody answers"):
        await bus.request("snap.api.get", b"")


async def test_a_service_answers_and_is_announced(bus: Bus, nats_url: str) -> None:
    async def echo(data: bytes, _headers: object) -> bytes:
        return data.upper()

    await bus.serve("snap-test", "0.1.0", {"node": "node-1"}, {"snap.rpc.test": echo})
    other = await Bus(nats_url, "other").connect()
    assert await other.request("snap.rpc.test", b"hello") == b"HELLO"
    assert b"snap-test" in await other.request("$SRV.INFO.snap-test", b"")
    await other.close()


async def test_a_command_gives_up_at_once_when_no_server_answers() -> None:
    with pytest.raises(BusUnavailable, match=r"127\.0\.0\.1:9"):
        await Bus("nats://127.0.0.1:9", "test").connect(patiently=False)


async def test_a_cancelled_subscription_leaves_the_connection_alive(bus: Bus) -> None:
    async def listen() -> None:
        async with bus.listening("snap.event.>"):
            await asyncio.Event().wait()

    for _ in range(20):
        task = asyncio.create_task(listen())
        for _ in range(3):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    await bus.publish(SUBJECT, b"x")
