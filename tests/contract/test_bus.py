"""What the courier relies on. Every case runs on a real nats-server and on the simulated one.

Each is a property of JetStream with our settings that was measured on real servers, so the
simulator may not be kinder than they are. Which server is real, `NATS_SERVER` says.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, aclosing
from pathlib import Path

import pytest

from snapshot_shared import subjects
from snapshot_shared.bus import Bus, Delivery, assets, connection, streams
from snapshot_shared.errors import BusUnavailable, Conflict, InvalidName, NotFound
from snapshot_shared.ids import NodeName, OrderId
from tests.support.brokers import Broker, SimulatedBroker, VirtualLoop, real_broker
from tests.unit.tables import each

NODE = NodeName("node-1")
ORDER = OrderId("dump-00000000-0000-0000-0000-000000000001")
SUBJECT = subjects.order(NODE, "agent", ORDER)
OTHER = SUBJECT[:-1] + "2"
REPORT = subjects.report(NODE, ORDER, "accepted")
MINE = subjects.orders_of(NODE, "agent")
DURABLE = subjects.durable(NODE, "agent")

ACK_WAIT_S = 1.5
REQUEST_S = 1.5
FETCH_S = 2.0
TTL_S = 1.5


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten what a test has to wait out on a real server."""
    buckets = tuple(bucket.evolve(ttl=TTL_S) if bucket.ttl else bucket for bucket in assets.BUCKETS)
    monkeypatch.setattr(assets, "BUCKETS", buckets)
    monkeypatch.setattr(streams, "ACK_WAIT_S", ACK_WAIT_S)
    for module in (assets, connection, streams):
        monkeypatch.setattr(module, "REQUEST_S", REQUEST_S)
    monkeypatch.setattr(streams, "FETCH_S", FETCH_S)


@pytest.fixture
async def broker(tmp_path: Path) -> AsyncIterator[Broker]:
    if isinstance(asyncio.get_running_loop(), VirtualLoop):
        yield SimulatedBroker()
    else:
        async with real_broker(tmp_path / "nats") as broker:
            yield broker


@pytest.fixture
async def bus(broker: Broker) -> AsyncIterator[Bus]:
    bus = await broker.client("test").connect()
    await bus.ensure_assets()
    yield bus
    await bus.close()


@pytest.fixture
async def other(broker: Broker, bus: Bus) -> AsyncIterator[Bus]:
    """Another client of the server, whose streams are there."""
    client = await broker.client("other").connect()
    yield client
    await client.close()


def consuming(bus: Bus) -> AbstractAsyncContextManager[AsyncIterator[Delivery]]:
    return aclosing(bus.consume(subjects.ORDERS, DURABLE, MINE))


async def deliveries(bus: Bus, count: int, *, durable: str = DURABLE) -> list[Delivery]:
    """Take the next orders without acking them."""
    found: list[Delivery] = []
    async with aclosing(bus.consume(subjects.ORDERS, durable, MINE)) as source:
        async with asyncio.timeout(20):
            while len(found) < count:
                found.append(await anext(source))
    return found


async def nothing_comes(bus: Bus, *, within_s: float) -> bool:
    """Say whether the durable delivers nothing for a while."""
    async with consuming(bus) as source:
        try:
            await asyncio.wait_for(anext(source), within_s)
        except TimeoutError:
            return True
    return False


async def restarted(broker: Broker, bus: Bus) -> None:
    await broker.crash()
    await broker.start()
    await bus.wait_connected()


async def publish_numbers(bus: Bus, count: int) -> None:
    """Publish orders of their own, whose bodies are the numbers from 0 on."""
    for index in range(count):
        await bus.publish(f"{SUBJECT[:-1]}{index}", str(index).encode())


async def echo(data: bytes, _headers: Mapping[str, str]) -> bytes:
    return data


async def test_an_acked_order_stays_readable_and_is_not_delivered_again_nor_to_another_node(
    bus: Bus,
) -> None:
    await bus.publish(subjects.order(NodeName("node-2"), "agent", ORDER), b"not mine")
    await bus.publish(SUBJECT, b"x")
    (delivery,) = await deliveries(bus, 1)
    assert delivery.subject == SUBJECT
    await delivery.ack()
    await bus.publish(OTHER, b"y")
    assert [found.subject for found in await deliveries(bus, 1)] == [OTHER]
    assert await bus.last(subjects.ORDERS, SUBJECT) is not None


async def test_assets_that_are_ensured_again_change_nothing_and_a_deleted_stream_comes_back(
    broker: Broker, bus: Bus
) -> None:
    await bus.publish(SUBJECT, b"{}")
    await bus.ensure_assets()
    assert await bus.last(subjects.ORDERS, SUBJECT) == (1, b"{}")
    await broker.delete_stream(subjects.ORDERS)
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


# Before anything is there, and while nothing answers.


async def test_without_a_connection_every_call_says_so(broker: Broker) -> None:
    bus = broker.client("test")
    for call in (
        bus.publish(SUBJECT, b"x"),
        bus.announce("snap.event.x", b""),
        bus.last(subjects.ORDERS, SUBJECT),
        bus.entries(subjects.NODES_BUCKET),
        bus.request("snap.api.get", b""),
    ):
        with pytest.raises(BusUnavailable, match="not connected yet"):
            await call


async def test_without_streams_nothing_is_stored_and_nothing_is_found(broker: Broker) -> None:
    bus = await broker.client("test").connect()
    for call in (
        bus.publish(SUBJECT, b"x"),
        bus.subjects_in(subjects.ORDERS, ">"),
        bus.delete(subjects.ORDERS, 1),
        bus.replay(subjects.ORDERS, ">"),
        bus.put(subjects.NODES_BUCKET, "node-1", b"x"),
        bus.remove(subjects.NODES_BUCKET, "node-1"),
        bus.entries(subjects.NODES_BUCKET),
    ):
        with pytest.raises(BusUnavailable):
            await call
    assert await bus.last(subjects.ORDERS, SUBJECT) is None
    await bus.close()


async def test_a_publish_while_the_server_is_down_is_refused_and_not_stored_after_its_return(
    broker: Broker, bus: Bus
) -> None:
    """Its return is told to everybody who waits for one."""
    events = [bus.reconnections() for _ in range(2)]
    await broker.crash()
    assert not bus.is_connected
    async with asyncio.timeout(0.5):
        with pytest.raises(BusUnavailable):
            await bus.publish(SUBJECT, b"buffered?")
    assert not any(event.is_set() for event in events)
    await broker.start()
    for event in events:
        await asyncio.wait_for(event.wait(), 10)
    assert bus.is_connected
    await bus.publish(OTHER, b"after")
    assert await bus.last(subjects.ORDERS, SUBJECT) is None


def calls_of(bus: Bus, delivery: Delivery) -> Sequence[Callable[[], Awaitable[object]]]:
    """Return the calls that a server has to answer."""
    return (
        delivery.ack,
        bus.ensure_assets,
        lambda: bus.last(subjects.ORDERS, SUBJECT),
        lambda: bus.subjects_in(subjects.ORDERS, ">"),
        lambda: bus.delete(subjects.ORDERS, 1),
        lambda: bus.replay(subjects.ORDERS, ">"),
        lambda: bus.put(subjects.NODES_BUCKET, "node-1", b"x"),
        lambda: bus.entries(subjects.NODES_BUCKET),
        lambda: bus.request("snap.api.get", b"", timeout_s=1.0),
    )


async def test_every_call_is_refused_at_once_while_the_server_is_down(
    broker: Broker, bus: Bus
) -> None:
    await bus.publish(SUBJECT, b"x")
    (delivery,) = await deliveries(bus, 1)
    await broker.crash()
    for call in calls_of(bus, delivery):
        async with asyncio.timeout(0.5):
            with pytest.raises(BusUnavailable):
                await call()
    await bus.announce("snap.event.x", b"nobody hears this")


@pytest.mark.waits
async def test_a_publish_that_timed_out_may_be_stored(broker: Broker, bus: Bus) -> None:
    broker.freeze()
    try:
        with pytest.raises(BusUnavailable):
            await bus.publish(SUBJECT, b"unknown", expected_last=0)
        assert bus.is_connected
    finally:
        broker.thaw()
    with pytest.raises(Conflict):
        await bus.publish(SUBJECT, b"again", expected_last=0)
    assert await bus.last(subjects.ORDERS, SUBJECT) == (1, b"unknown")


@pytest.mark.waits
async def test_every_call_to_a_frozen_server_ends_in_time(broker: Broker, bus: Bus) -> None:
    await bus.publish(SUBJECT, b"x")
    (delivery,) = await deliveries(bus, 1)
    broker.freeze()
    calls = calls_of(bus, delivery)
    try:
        results = await asyncio.gather(*(call() for call in calls), return_exceptions=True)
    finally:
        broker.thaw()
    assert [type(result) for result in results] == [BusUnavailable] * len(calls)


# Expected sequences, limits, names.


async def test_a_newer_attempt_replaces_an_older_one_and_a_stale_expectation_changes_nothing(
    bus: Bus,
) -> None:
    first = await bus.publish(SUBJECT, b"one", expected_last=0)
    second = await bus.publish(SUBJECT, b"two", expected_last=first)
    assert await bus.subjects_in(subjects.ORDERS, "snap.order.>") == {SUBJECT: 1}
    with pytest.raises(Conflict):
        await bus.publish(SUBJECT, b"late", expected_last=first)
    assert await bus.last(subjects.ORDERS, SUBJECT) == (second, b"two")


async def test_deleting_by_sequence_spares_a_newer_message_and_may_be_repeated(bus: Bus) -> None:
    await bus.delete(subjects.ORDERS, 99)
    first = await bus.publish(SUBJECT, b"one")
    second = await bus.publish(SUBJECT, b"two", expected_last=first)
    await bus.delete(subjects.ORDERS, first)
    assert await bus.last(subjects.ORDERS, SUBJECT) == (second, b"two")
    for _ in range(2):
        await bus.delete(subjects.ORDERS, second)
    assert await bus.last(subjects.ORDERS, SUBJECT) is None
    assert await bus.publish(SUBJECT, b"as new", expected_last=0) > second


async def test_of_two_publishers_at_once_exactly_one_wins(bus: Bus, other: Bus) -> None:
    results = await asyncio.gather(
        *(each.publish(SUBJECT, b"x", expected_last=0) for each in (bus, other) for _ in range(5)),
        return_exceptions=True,
    )
    assert sorted(type(result).__name__ for result in results) == ["Conflict"] * 9 + ["int"]


async def test_the_last_message_is_read_from_the_leader(bus: Bus, other: Bus) -> None:
    expected = 0
    for index in range(50):
        expected = await bus.publish(SUBJECT, str(index).encode(), expected_last=expected)
        assert await other.last(subjects.ORDERS, SUBJECT) == (expected, str(index).encode())


async def test_a_full_stream_of_orders_refuses_new_ones_and_loses_none(
    broker: Broker, bus: Bus
) -> None:
    assert await bus.fill(subjects.ORDERS) == 0.0
    await broker.limit(subjects.ORDERS, max_msgs=2)
    first = await bus.publish(SUBJECT, b"one")
    assert await bus.fill(subjects.ORDERS) == 0.5
    second = await bus.publish(OTHER, b"two")
    third = SUBJECT[:-1] + "3"
    with pytest.raises(BusUnavailable, match="maximum messages exceeded"):
        await bus.publish(third, b"three", expected_last=0)
    assert await bus.subjects_in(subjects.ORDERS, ">") == {SUBJECT: 1, OTHER: 1}
    await bus.publish(SUBJECT, b"a newer attempt still fits", expected_last=first)
    await bus.delete(subjects.ORDERS, second)
    assert await bus.fill(subjects.ORDERS) == 0.5
    await bus.publish(third, b"three", expected_last=0)


async def test_a_stream_of_orders_that_is_full_by_bytes_refuses_too(
    broker: Broker, bus: Bus
) -> None:
    await broker.limit(subjects.ORDERS, max_bytes=2048)
    await bus.publish(SUBJECT, b"x" * 1500)
    assert 0.5 < await bus.fill(subjects.ORDERS) < 1.0
    with pytest.raises(BusUnavailable, match="maximum bytes exceeded"):
        await bus.publish(OTHER, b"x" * 1500)
    assert await bus.subjects_in(subjects.ORDERS, ">") == {SUBJECT: 1}


async def test_a_full_stream_of_reports_drops_the_oldest_and_progress_is_its_last_value(
    broker: Broker, bus: Bus
) -> None:
    await broker.limit(subjects.REPORTS, max_msgs=2)
    for stream, subject, kept in (
        (subjects.REPORTS, REPORT, [b"two", b"three"]),
        (subjects.PROGRESS, subjects.progress(NODE, ORDER), [b"three"]),
    ):
        for word in (b"one", b"two", b"three"):
            await bus.publish(subject, word)
        assert [found.data for found in await bus.replay(stream, ">")] == kept


@pytest.mark.parametrize("wildcard", ["*", ">"])
async def test_wildcards_in_the_subject_of_a_message_are_stored_literally(
    bus: Bus, wildcard: str
) -> None:
    literal = f"snap.order.node-1.agent.{wildcard}"
    await bus.publish(SUBJECT, b"good")
    await bus.publish(literal, b"bad")
    assert await bus.subjects_in(subjects.ORDERS, "snap.order.>") == {SUBJECT: 1, literal: 1}
    assert await bus.last(subjects.ORDERS, SUBJECT) == (1, b"good")


@each(
    ("subject", "why"),
    [
        ("snap.order.node-1.agent", "no response from stream"),
        (f"{SUBJECT}.more", "no response from stream"),
        ("snap.order.node-1.agent.", "no response from stream"),
        ("snap.other", "no response from stream"),
        ("", "invalid subject"),
        ("snap.order.node-1.agent.a b", "invalid subject"),
        ("snap.order\r\nPUB x 0", "invalid subject"),
    ],
)
async def test_no_stream_takes_a_subject_of_another_shape(bus: Bus, subject: str, why: str) -> None:
    with pytest.raises(BusUnavailable, match=why):
        await bus.publish(subject, b"x")


@each("key", ["", "a b", "*", ">", "../x y", ".a", "a.", "\u00e9"])
async def test_keys_outside_their_alphabet_are_refused(bus: Bus, key: str) -> None:
    with pytest.raises(InvalidName):
        await bus.put(subjects.NODES_BUCKET, key, b"x")
    assert await bus.entries(subjects.NODES_BUCKET) == {}


async def test_a_message_that_is_too_large_with_its_headers_is_refused_with_the_reason(
    bus: Bus,
) -> None:
    with pytest.raises(BusUnavailable, match="maximum payload exceeded"):
        await bus.publish(REPORT, b"x" * (1024 * 1024 + 1))
    with pytest.raises(BusUnavailable, match="message size exceeds"):
        await bus.publish(SUBJECT, b"x" * (256 * 1024 - 10), headers={"traceparent": "0" * 55})
    await bus.publish(SUBJECT, b"x" * (256 * 1024 - 10))


# Message ids.


async def test_an_id_is_known_for_its_stream_even_after_its_message_was_deleted(bus: Bus) -> None:
    """A wanted publish with a known id is dropped without a word; orders carry none therefore."""
    first = await bus.publish(REPORT, b"a", message_id="dump.1.1")
    assert await bus.publish(REPORT, b"a", message_id="dump.1.1") == first
    await bus.publish(subjects.dead(NODE), b"b", message_id="dump.1.1")
    assert await bus.last(subjects.DEAD, subjects.dead(NODE)) is not None
    await bus.delete(subjects.REPORTS, first)
    assert await bus.publish(REPORT, b"a", message_id="dump.1.1") == first
    assert await bus.last(subjects.REPORTS, REPORT) is None


@pytest.mark.parametrize("is_deleted", [False, True])
async def test_a_crash_forgets_the_id_of_a_deleted_message_and_not_that_of_a_stored_one(
    broker: Broker, bus: Bus, is_deleted: bool
) -> None:
    first = await bus.publish(REPORT, b"a", message_id="dump.1.1")
    if is_deleted:
        await bus.delete(subjects.REPORTS, first)
    await restarted(broker, bus)
    again = await bus.publish(REPORT, b"a", message_id="dump.1.1")
    assert (again > first) is is_deleted


# Deliveries and acks.


async def test_orders_come_in_the_order_in_which_they_were_published_with_their_headers(
    bus: Bus,
) -> None:
    await publish_numbers(bus, 9)
    await bus.publish(f"{SUBJECT[:-1]}9", b"9", headers={"Snapback-Schema": "1"})
    found = await deliveries(bus, 10)
    assert [int(delivery.data) for delivery in found] == list(range(10))
    assert found[9].headers["Snapback-Schema"] == "1"


@pytest.mark.waits
async def test_an_order_without_an_ack_comes_again_and_again_also_after_its_consumer_died(
    broker: Broker, bus: Bus
) -> None:
    await bus.publish(SUBJECT, b"x")
    first = await broker.client("first").connect()
    found = await deliveries(first, 2)
    await first.close()
    found += await deliveries(bus, 1)
    assert [delivery.sequence for delivery in found] == [1, 1, 1]


async def test_what_was_pulled_and_not_used_comes_again_at_once(bus: Bus) -> None:
    await publish_numbers(bus, 10)
    async with consuming(bus) as source:
        used = [await asyncio.wait_for(anext(source), 10) for _ in range(4)]
        await asyncio.sleep(0.1)
    loop = asyncio.get_running_loop()
    began = loop.time()
    rest = await deliveries(bus, 6)
    assert {int(found.data) for found in (*used, *rest)} == set(range(10))
    assert loop.time() - began < ACK_WAIT_S


async def test_what_comes_while_the_consumer_is_cancelled_is_not_lost(bus: Bus) -> None:
    for index in range(20):
        waiting = asyncio.ensure_future(deliveries(bus, 1))
        await asyncio.sleep(0.01)
        publishing = asyncio.ensure_future(bus.publish(SUBJECT, str(index).encode()))
        await asyncio.sleep(0.0002 * index)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        await publishing
        (found,) = waiting.result() if not waiting.cancelled() else await deliveries(bus, 1)
        assert int(found.data) == index
        await found.ack()


async def test_more_orders_than_are_pulled_at_a_time_come_once_each(bus: Bus) -> None:
    publishing = asyncio.ensure_future(publish_numbers(bus, 200))
    found = []
    async with consuming(bus) as source:
        async with asyncio.timeout(20):
            while len(found) < 200:
                found.append(await anext(source))
                await found[-1].ack()
    await publishing
    assert [int(each.data) for each in found] == list(range(200))
    assert await nothing_comes(bus, within_s=0.2)


@pytest.mark.waits
async def test_an_order_does_not_come_again_before_the_ack_is_overdue(bus: Bus) -> None:
    await bus.publish(SUBJECT, b"x")
    await deliveries(bus, 1)
    assert await nothing_comes(bus, within_s=ACK_WAIT_S / 2)
    assert len(await deliveries(bus, 1)) == 1


@pytest.mark.waits
async def test_the_ack_of_an_older_delivery_settles_and_harms_nothing(bus: Bus) -> None:
    await bus.publish(SUBJECT, b"x")
    first, second = await deliveries(bus, 2)
    await first.ack()
    await second.ack()
    assert await bus.last(subjects.ORDERS, SUBJECT) == (1, b"x")
    assert await nothing_comes(bus, within_s=ACK_WAIT_S * 1.5)


async def test_the_ack_of_an_older_attempt_does_not_settle_the_newer(bus: Bus) -> None:
    first = await bus.publish(SUBJECT, b"one")
    (old,) = await deliveries(bus, 1)
    await bus.publish(SUBJECT, b"two", expected_last=first)
    await old.ack()
    (new,) = await deliveries(bus, 1)
    assert new.data == b"two"


@pytest.mark.waits
async def test_an_order_that_was_replaced_or_deleted_is_not_delivered_again(bus: Bus) -> None:
    replaced = await bus.publish(SUBJECT, b"one")
    deleted = await bus.publish(OTHER, b"other")
    await deliveries(bus, 2)
    await bus.publish(SUBJECT, b"two", expected_last=replaced)
    await bus.delete(subjects.ORDERS, deleted)
    (new,) = await deliveries(bus, 1)
    await new.ack()
    assert await nothing_comes(bus, within_s=ACK_WAIT_S * 1.5)


async def test_an_ack_is_refused_that_was_given_before_or_whose_stream_is_gone(
    broker: Broker, bus: Bus
) -> None:
    await bus.publish(SUBJECT, b"x")
    await bus.publish(OTHER, b"y")
    first, second = await deliveries(bus, 2)
    await first.ack()
    with pytest.raises(BusUnavailable, match="already acknowledged"):
        await first.ack()
    await broker.delete_stream(subjects.ORDERS)
    with pytest.raises(BusUnavailable):
        await second.ack()


@pytest.mark.waits
@pytest.mark.parametrize("lost", ["store", "stream"])
async def test_the_ack_of_a_lost_stream_settles_nothing_of_the_one_created_after_it(
    broker: Broker, bus: Bus, lost: str
) -> None:
    await bus.publish(SUBJECT, b"before")
    async with consuming(bus) as source:
        old = await asyncio.wait_for(anext(source), 10)
        waiting = asyncio.ensure_future(anext(source))
        await asyncio.sleep(0.3)
        await (broker.wipe() if lost == "store" else broker.delete_stream(subjects.ORDERS))
        await bus.wait_connected()
        await bus.ensure_assets()
        assert await bus.publish(SUBJECT, b"after") == old.sequence
        assert (await asyncio.wait_for(waiting, 20)).data == b"after"
        with pytest.raises(BusUnavailable, match="may be gone"):
            await old.ack()
        assert (await asyncio.wait_for(anext(source), 10)).data == b"after"


async def test_too_many_orders_without_an_ack_stop_the_delivery_without_a_word(bus: Bus) -> None:
    await bus.publish(SUBJECT, b"one")
    await bus.publish(OTHER, b"two")
    source = bus.consume(subjects.ORDERS, DURABLE, MINE, max_pending=1)
    async with aclosing(source):
        first = await asyncio.wait_for(anext(source), 10)
        waiting = asyncio.ensure_future(anext(source))
        done, _ = await asyncio.wait({waiting}, timeout=ACK_WAIT_S / 2)
        assert not done
        await first.ack()
        assert (await asyncio.wait_for(waiting, 10)).data == b"two"


async def test_two_clients_of_one_durable_share_its_orders(bus: Bus, other: Bus) -> None:
    async with consuming(bus) as left, consuming(other) as right:
        waiting = [asyncio.ensure_future(anext(source)) for source in (left, right)]
        # One that asks alone is sent both.
        await asyncio.sleep(0.3)
        await bus.publish(SUBJECT, b"one")
        await bus.publish(OTHER, b"two")
        found = [await asyncio.wait_for(each, 10) for each in waiting]
        assert {delivery.data for delivery in found} == {b"one", b"two"}


async def test_who_inspects_the_orders_takes_none_from_the_durable(bus: Bus) -> None:
    await bus.publish(SUBJECT, b"x")
    assert [found.data for found in await bus.replay(subjects.ORDERS, "snap.order.>")] == [b"x"]
    (spied,) = await deliveries(bus, 1, durable="spy")
    await spied.ack()
    (mine,) = await deliveries(bus, 1)
    assert mine.data == b"x"


# Crashes and losses of the server.


async def test_after_a_crash_what_was_acked_stays_settled_and_the_rest_comes_again(
    broker: Broker, bus: Bus
) -> None:
    await bus.publish(SUBJECT, b"acked")
    await bus.publish(OTHER, b"not acked")
    await bus.publish(subjects.progress(NODE, ORDER), b"50")
    first, _ = await deliveries(bus, 2)
    await first.ack()
    # A server writes down what was acked every 100 ms at most; younger acks go with it.
    await asyncio.sleep(0.3)
    await restarted(broker, bus)
    assert await bus.last(subjects.ORDERS, SUBJECT) == (1, b"acked")
    (again,) = await deliveries(bus, 1)
    assert again.data == b"not acked"
    # The stream of progress is in memory.
    with pytest.raises(BusUnavailable):
        await bus.subjects_in(subjects.PROGRESS, ">")
    await bus.ensure_assets()
    assert await bus.subjects_in(subjects.PROGRESS, ">") == {}


@pytest.mark.waits
@pytest.mark.parametrize("lost", ["connection", "store", "stream"])
async def test_a_consumer_goes_on_after_a_crash_a_loss_of_the_store_and_of_its_stream(
    broker: Broker, bus: Bus, lost: str
) -> None:
    await bus.publish(SUBJECT, b"before")
    async with consuming(bus) as source:
        await (await asyncio.wait_for(anext(source), 10)).ack()
        waiting = asyncio.ensure_future(anext(source))
        await asyncio.sleep(0.3)
        if lost == "connection":
            await restarted(broker, bus)
        else:
            await (broker.wipe() if lost == "store" else broker.delete_stream(subjects.ORDERS))
            await bus.wait_connected()
            assert await bus.last(subjects.ORDERS, SUBJECT) is None
            await bus.ensure_assets()
        assert await bus.publish(SUBJECT, b"again") == (2 if lost == "connection" else 1)
        assert (await asyncio.wait_for(waiting, 20)).data == b"again"


@pytest.mark.waits
async def test_assets_that_are_kept_come_back_after_a_wipe(broker: Broker, bus: Bus) -> None:
    keeper = asyncio.create_task(bus.keep_assets())
    again = bus.reconnections()
    await broker.wipe()
    await asyncio.wait_for(again.wait(), 10)
    async with asyncio.timeout(10):
        while True:
            try:
                await bus.publish(SUBJECT, b"x")
                break
            except BusUnavailable:
                await asyncio.sleep(0.05)
    keeper.cancel()


@pytest.mark.waits
async def test_a_stream_that_a_consumer_misses_comes_back_at_once(broker: Broker, bus: Bus) -> None:
    keeper = asyncio.create_task(bus.keep_assets())
    try:
        async with consuming(bus) as source:
            waiting = asyncio.ensure_future(anext(source))
            await asyncio.sleep(0.3)
            again = bus.reconnections()
            await broker.delete_stream(subjects.ORDERS)
            # Long before the assets are looked at again, which is every 30 s.
            await asyncio.wait_for(again.wait(), 10)
            assert await bus.publish(SUBJECT, b"again") == 1
            assert (await asyncio.wait_for(waiting, 10)).data == b"again"
    finally:
        keeper.cancel()


# Buckets.


async def test_bucket_entries_can_be_listed_changed_and_removed_which_is_heard(bus: Bus) -> None:
    async with bus.listening(f"$KV.{subjects.NODES_BUCKET}.>") as queue:
        assert await bus.entries(subjects.NODES_BUCKET) == {}
        assert await bus.revision(subjects.NODES_BUCKET, "node-1") is None
        first = await bus.put(subjects.NODES_BUCKET, "node-1", b"one")
        second = await bus.put(subjects.NODES_BUCKET, "node-1", b"two")
        assert first < second == await bus.revision(subjects.NODES_BUCKET, "node-1")
        assert await bus.entries(subjects.NODES_BUCKET) == {"node-1": b"two"}
        for _ in range(2):
            await bus.remove(subjects.NODES_BUCKET, "node-1")
            assert await bus.entries(subjects.NODES_BUCKET) == {}
        heard = [await asyncio.wait_for(queue.get(), 10) for _ in range(3)]
    assert {found.subject for found in heard} == {"$KV.snap_nodes.node-1"}
    assert [found.data for found in heard] == [b"one", b"two", b""]


async def test_nothing_stays_for_ever_of_a_key_that_was_removed(
    bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams, "MARKER_TTL_S", 2.0)
    stream = subjects.stream_of_bucket(subjects.OBJECTS_BUCKET)
    filter_ = subjects.bucket_key(subjects.OBJECTS_BUCKET, ">")
    for key in ("pods.default.gone", "pods.default.new", "pods.default.stays"):
        await bus.put(subjects.OBJECTS_BUCKET, key, b"{}")
    for key in ("pods.default.gone", "pods.default.new"):
        await bus.remove(subjects.OBJECTS_BUCKET, key)
    await bus.put(subjects.OBJECTS_BUCKET, "pods.default.new", b"new")
    assert len(await bus.replay(stream, filter_)) == 3
    for _ in range(100):
        if len(await bus.replay(stream, filter_)) == 2:
            break
        await asyncio.sleep(0.2)
    assert len(await bus.replay(stream, filter_)) == 2
    kept = {"pods.default.new": b"new", "pods.default.stays": b"{}"}
    assert await bus.entries(subjects.OBJECTS_BUCKET) == kept


@pytest.mark.waits
async def test_a_key_that_is_not_written_again_expires(bus: Bus) -> None:
    await bus.put(subjects.NODES_BUCKET, "node-1", b"x")
    await bus.put(subjects.SCHEMAS_BUCKET, "kept", b"y")
    await asyncio.sleep(TTL_S * 0.6)
    await bus.put(subjects.NODES_BUCKET, "node-2", b"x")
    await asyncio.sleep(TTL_S * 0.7)
    assert await bus.entries(subjects.NODES_BUCKET) == {"node-2": b"x"}
    assert await bus.revision(subjects.NODES_BUCKET, "node-1") is None
    assert await bus.entries(subjects.SCHEMAS_BUCKET) == {"kept": b"y"}


# Core messages and services.


async def test_announcements_reach_those_who_listen_in_order(bus: Bus, other: Bus) -> None:
    async with other.listening("snap.event.>") as queue:
        for index in range(10):
            await bus.announce(f"snap.event.snapshots.-.{index}", str(index).encode())
        await bus.announce("snap.other", b"not for us")
        heard = [await asyncio.wait_for(queue.get(), 10) for _ in range(10)]
        assert [int(found.data) for found in heard] == list(range(10))
        assert queue.empty()


async def test_who_listens_before_or_during_a_crash_hears_after_it_and_not_what_was_said_meanwhile(
    broker: Broker, bus: Bus
) -> None:
    async with bus.listening("snap.event.>") as before:
        await broker.crash()
        async with asyncio.timeout(5), bus.listening("snap.event.>") as during:
            await bus.announce("snap.event.x", b"lost")
            await broker.start()
            await bus.wait_connected()
            await bus.announce("snap.event.x", b"heard")
            for queue in (before, during):
                assert (await asyncio.wait_for(queue.get(), 10)).data == b"heard"


@pytest.mark.waits
async def test_listening_to_a_frozen_server_begins_all_the_same(broker: Broker, bus: Bus) -> None:
    broker.freeze()
    try:
        async with bus.listening("snap.event.>") as queue:
            broker.thaw()
            async with asyncio.timeout(30):
                while queue.empty():
                    await bus.announce("snap.event.x", b"heard")
                    await asyncio.sleep(0.1)
    finally:
        broker.thaw()


async def test_a_service_answers_one_request_after_another(bus: Bus, other: Bus) -> None:
    running, most = 0, 0

    async def slow(data: bytes, headers: Mapping[str, str]) -> bytes:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.01)
        running -= 1
        return data + headers["who"].encode()

    await bus.serve("snap-test", "0.1.0", {}, {"snap.rpc.test": slow})
    answers = await asyncio.gather(
        *(other.request("snap.rpc.test", b"%d" % each, headers={"who": "me"}) for each in range(5))
    )
    assert answers == [b"0me", b"1me", b"2me", b"3me", b"4me"]
    assert most == 1


@pytest.mark.waits
async def test_a_service_that_fails_answers_nothing_and_one_that_hangs_is_unavailable(
    bus: Bus, other: Bus
) -> None:
    async def broken(_data: bytes, _headers: Mapping[str, str]) -> bytes:
        raise RuntimeError("a defect")

    async def never(_data: bytes, _headers: Mapping[str, str]) -> bytes:
        await asyncio.Event().wait()
        return b""

    await bus.serve("snap-test", "0.1.0", {}, {"snap.rpc.broken": broken, "snap.rpc.hangs": never})
    assert await other.request("snap.rpc.broken", b"") == b""
    with pytest.raises(BusUnavailable, match="timeout"):
        await other.request("snap.rpc.hangs", b"", timeout_s=0.2)


async def test_a_service_is_announced_goes_on_after_a_crash_and_ends_with_its_client(
    broker: Broker, bus: Bus
) -> None:
    server = await broker.client("server").connect()
    await server.serve("snap-test", "0.1.0", {"node": "node-1"}, {"snap.rpc.test": echo})
    assert b"snap-test" in await bus.request("$SRV.INFO.snap-test", b"")
    await restarted(broker, bus)
    await server.wait_connected()
    assert await bus.request("snap.rpc.test", b"x") == b"x"
    await server.close()
    with pytest.raises(NotFound, match="nothing answers"):
        await bus.request("snap.rpc.test", b"x")


async def test_a_service_answers_as_soon_as_it_serves(broker: Broker, bus: Bus) -> None:
    for index in range(20):
        server = await broker.client("server").connect()
        await server.serve("snap-test", "0.1.0", {}, {f"snap.rpc.{index}": echo})
        assert await bus.request(f"snap.rpc.{index}", b"x") == b"x"
        await server.close()
