"""Orders on the stream: a higher attempt always wins, however late. And the mirror of objects."""

from __future__ import annotations

import asyncio
import itertools
import logging
from typing import Any

import msgspec
import pytest

from snapshot_operator.runtime.nats import (
    COMPARE_EVERY_S,
    RETRY_S,
    ChangePublisher,
    NatsOrders,
)
from snapshot_shared import subjects
from snapshot_shared.codec import encode_json
from snapshot_shared.ids import NodeName, OrderId
from snapshot_shared.objects.kinds import kind_of
from snapshot_shared.objects.meta import OrderStatus, time_of
from snapshot_shared.tasks import end_all
from snapshot_shared.telemetry import Telemetry
from snapshot_shared.views import mirrored
from tests.scenario.bus import SimBus, SimServer
from tests.scenario.streams import Stream
from tests.support.brokers import VirtualLoop
from tests.support.objects import checkpoint_document, presence
from tests.support.operator_world import World

ORDER = "prepare-00000000-0000-0000-0000-000000000001"
SUBJECT = subjects.order(NodeName("node-1"), "agent", OrderId(ORDER))

TRACE = f"00-{'a' * 32}-{'b' * 16}-01"


def order(attempt: int, **more: str) -> OrderStatus:
    return OrderStatus(
        order=ORDER,
        verb="prepare",
        attempt=attempt,
        node="node-1",
        service="agent",
        payload=msgspec.Raw(msgspec.json.encode({"order": ORDER, "attempt": attempt, **more})),
        ordered_at=time_of(0.0),
        deadline=time_of(1.0),
    )


async def attempts_left_by(*published: int, repeated: int | None = None) -> tuple[int, int]:
    """Publish attempts one after another; the one on the stream, and how many were stored."""
    bus = await SimBus(SimServer(), "operator").connect()
    await bus.ensure_assets()
    orders = NatsOrders(bus)  # type: ignore[arg-type]
    for attempt in published:
        await orders.publish(order(attempt))
    if repeated is not None:
        await orders.repeat(order(repeated))
    found = await bus.last(subjects.ORDERS, SUBJECT)
    assert found is not None
    sequence, data = found
    return msgspec.json.decode(data)["attempt"], sequence


def run(*published: int, repeated: int | None = None) -> tuple[int, int]:
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(attempts_left_by(*published, repeated=repeated))


def test_an_older_attempt_that_is_published_late_does_not_replace_the_newer() -> None:
    assert run(2, 1) == (2, 1)


def test_a_newer_attempt_replaces_the_older() -> None:
    assert run(1, 2) == (2, 2)


def test_the_same_attempt_is_stored_once() -> None:
    assert run(1, 1) == (1, 1)


def test_an_order_that_is_repeated_is_stored_again_and_so_delivered_again() -> None:
    assert run(1, repeated=1) == (1, 2)


def test_an_older_attempt_that_is_repeated_does_not_replace_the_newer() -> None:
    assert run(2, repeated=1) == (2, 1)


def test_an_order_that_was_withdrawn_before_it_is_repeated_stays_withdrawn() -> None:
    async def left() -> object:
        bus = await SimBus(SimServer(), "operator").connect()
        await bus.ensure_assets()
        orders = NatsOrders(bus)  # type: ignore[arg-type]
        await orders.publish(order(1))
        last = bus.last

        async def withdrawn_meanwhile(stream: str, subject: str) -> tuple[int, bytes] | None:
            found = await last(stream, subject)
            assert found is not None
            await bus.delete(stream, found[0])
            return found

        bus.last = withdrawn_meanwhile  # type: ignore[method-assign]
        await orders.repeat(order(1))
        return await last(subjects.ORDERS, SUBJECT)

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        assert runner.run(left()) is None


def test_an_order_that_stands_on_the_stream_already_adds_no_span_to_its_trace() -> None:
    """A node that is lost never accepts its orders, and the sweep comes by every 30 s."""

    async def spans_and_attempt() -> tuple[int, int]:
        bus = await SimBus(SimServer(), "operator").connect()
        await bus.ensure_assets()
        telemetry = Telemetry("snap-operator", "operator", "0")
        orders = NatsOrders(bus, telemetry)  # type: ignore[arg-type]
        await orders.publish(order(1, traceparent=TRACE))
        for _ in range(3):
            await orders.ensure(order(1, traceparent=TRACE))
        told = len(list(telemetry._outbox.records))
        await orders.ensure(order(2, traceparent=TRACE))
        found = await bus.last(subjects.ORDERS, SUBJECT)
        assert found is not None
        return told, msgspec.json.decode(found[1])["attempt"]

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        assert runner.run(spans_and_attempt()) == (1, 2)


def test_replacing_puts_an_order_in_place_of_whatever_stands_there() -> None:
    async def replaced() -> list[bytes]:
        bus = await SimBus(SimServer(), "operator").connect()
        await bus.ensure_assets()
        orders = NatsOrders(bus)  # type: ignore[arg-type]
        await orders.replace(order(1))
        # Poison that claims to be newer than every order.
        await bus.publish(SUBJECT, b'{"attempt": 1000000}')
        await orders.publish(order(1))
        before = await bus.last(subjects.ORDERS, SUBJECT)
        await orders.replace(order(1))
        after = await bus.last(subjects.ORDERS, SUBJECT)
        assert before is not None
        assert after is not None
        return [before[1], after[1]]

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        before, after = runner.run(replaced())
    assert msgspec.json.decode(before) == {"attempt": 1000000}
    assert msgspec.json.decode(after) == {"order": ORDER, "attempt": 1}


class Mirrored:
    """The objects of a world, and their mirror on a server that comes and goes."""

    async def start(self) -> None:
        self.world = World()
        await self.world.join(presence("node-1"))
        await self.world.apply(checkpoint_document())
        self.server = SimServer()
        self.bus = await SimBus(self.server, "operator").connect()
        await self.bus.ensure_assets()
        await self.bus.put(subjects.OBJECTS_BUCKET, "pods.default.gone", b"{}")
        changes = ChangePublisher(self.bus, "one", self.world.cluster)  # type: ignore[arg-type]
        self.world.cluster.subscribe(changes.watcher)
        works = (changes.run(), changes.keep_mirror(), self.bus.keep_assets())
        self.tasks = [asyncio.ensure_future(work) for work in works]
        await asyncio.sleep(1.0)

    async def stop(self) -> None:
        await end_all(*self.tasks)

    @property
    def stream(self) -> Stream:
        return self.server.streams[subjects.stream_of_bucket(subjects.OBJECTS_BUCKET)]

    def limit(self, most: int) -> None:
        """Have the server take no value of more bytes; -1 for any."""
        self.stream.config = self.stream.config.evolve(max_msg_size=most)

    def comparisons(self) -> list[float]:
        """Return the times at which the mirror is listed from now on, in seconds."""
        times: list[float] = []
        listed, loop = self.bus.subjects_in, asyncio.get_running_loop()

        async def listing(stream: str, filter_: str) -> dict[str, int]:
            times.append(loop.time())
            return await listed(stream, filter_)

        self.bus.subjects_in = listing  # type: ignore[method-assign]
        return times

    async def differences(self) -> set[str]:
        """Return the keys that are missing, stray, or not what the object is."""
        found = await self.bus.entries(subjects.OBJECTS_BUCKET)
        wanted = {
            subjects.object_key(kind_of(v).plural, v.metadata.namespace, v.metadata.name): v
            for v in await self.world.everything()
        }
        assert len(wanted) >= 4
        is_equal = {key: found.get(key) == encode_json(mirrored(v)) for key, v in wanted.items()}
        return {key for key in found | wanted if not is_equal.get(key)}


def mirror(story: Any) -> None:
    async def told() -> None:
        found = Mirrored()
        await found.start()
        try:
            await story(found)
        finally:
            await found.stop()

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        runner.run(told())


def test_the_mirror_has_at_start_what_is_there_and_nothing_else() -> None:
    async def story(found: Mirrored) -> None:
        assert await found.differences() == set()

    mirror(story)


def test_the_mirror_agrees_again_after_nats_was_away() -> None:
    async def story(found: Mirrored) -> None:
        found.server.crash()
        await asyncio.sleep(1.0)
        world = found.world
        await world.answer_well(world.open("run")[0])
        await world.cluster.delete(await world.get("DynamoCheckpoint", "llm"))
        await world.settle()
        await world.answer_all()
        assert not world.cluster.page("Pod")
        await world.apply(checkpoint_document(name="other"))
        found.server.restart()
        await asyncio.sleep(60.0)
        assert await found.differences() == set()

    mirror(story)


def test_the_mirror_is_filled_again_after_nats_has_lost_it() -> None:
    async def story(found: Mirrored) -> None:
        found.server.crash()
        found.server.wipe()
        found.server.restart()
        await asyncio.sleep(60.0)
        assert await found.differences() == set()

    mirror(story)


def test_a_write_that_nats_did_not_take_is_done_again() -> None:
    async def story(found: Mirrored) -> None:
        found.server.delete_stream(found.stream.config.name or "")
        await found.world.answer_well(found.world.open("run")[0])
        await asyncio.sleep(120.0)
        assert await found.differences() == set()

    mirror(story)


def test_what_has_not_changed_is_not_written_again_after_a_reconnection() -> None:
    async def story(found: Mirrored) -> None:
        before = found.stream.last_sequence
        for _ in range(3):
            found.server.crash()
            await asyncio.sleep(1.0)
            found.server.restart()
            await asyncio.sleep(60.0)
        await asyncio.sleep(2 * 3600.0)
        assert found.stream.last_sequence == before
        # That the stray key was removed has been shown for its hour.
        assert len(found.stream.counts("$KV.snap_objects.>")) == len(await found.world.everything())

    mirror(story)


def test_what_can_never_be_written_is_tried_less_and_less_often() -> None:
    async def story(found: Mirrored) -> None:
        await asyncio.sleep(2 * RETRY_S)
        times = found.comparisons()
        found.limit(1)
        await found.world.apply(checkpoint_document(name="other"))
        await asyncio.sleep(86400.0)
        gaps = [after - before for before, after in itertools.pairwise(times)]
        assert gaps[0] == pytest.approx(RETRY_S, abs=0.5)
        assert gaps == pytest.approx(sorted(gaps), abs=0.5)
        assert gaps[-1] == pytest.approx(COMPARE_EVERY_S, abs=0.5)

    mirror(story)


def test_what_could_not_be_written_for_long_is_tried_again_soon_after_a_reconnection() -> None:
    async def story(found: Mirrored) -> None:
        found.limit(1)
        await found.world.apply(checkpoint_document(name="other"))
        await asyncio.sleep(7200.0)
        found.server.crash()
        found.server.restart()
        await asyncio.sleep(2.0)
        found.limit(-1)
        await asyncio.sleep(2 * RETRY_S)
        assert await found.differences() == set()

    mirror(story)


def test_a_write_that_fails_after_the_mirror_was_written_again_is_tried_again_soon() -> None:
    async def story(found: Mirrored) -> None:
        found.limit(1)
        await found.world.apply(checkpoint_document(name="other"))
        await asyncio.sleep(7200.0)
        found.limit(-1)
        await asyncio.sleep(COMPARE_EVERY_S)
        assert await found.differences() == set()
        found.limit(1)
        await found.world.apply(checkpoint_document(name="third"))
        await asyncio.sleep(1.0)
        assert await found.differences() != set()
        found.limit(-1)
        await asyncio.sleep(2 * RETRY_S)
        assert await found.differences() == set()

    mirror(story)


def test_a_mirror_that_takes_nothing_is_logged_once_a_comparison(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def story(found: Mirrored) -> None:
        found.limit(1)
        await found.world.apply(checkpoint_document(name="other"))
        await asyncio.sleep(1.0)
        assert len(await found.differences()) > 2
        times = found.comparisons()
        caplog.clear()
        await asyncio.sleep(600.0)
        assert 0 < len(caplog.records) <= len(times)

    with caplog.at_level(logging.INFO, logger="snapshot_operator.runtime.nats"):
        mirror(story)
