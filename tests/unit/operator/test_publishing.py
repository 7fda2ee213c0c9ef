"""Orders on the stream: a higher attempt always wins, however late. And the mirror of objects."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest

from snapshot_api.kinds import kind_of
from snapshot_api.meta import OrderStatus
from snapshot_api.views import mirrored
from snapshot_operator.runtime.nats import COMPARE_EVERY_S, RETRY_S, ChangePublisher, NatsOrders
from snapshot_shared import subjects
from snapshot_shared.codec import encode_json
from snapshot_shared.ids import NodeName, OrderId
from snapshot_shared.tasks import end_all
from snapshot_shared.telemetry import Telemetry
from tests.scenario.bus import SimBus
from tests.scenario.streams import Stream
from tests.support import builders
from tests.support.objects import checkpoint_document
from tests.support.operator_world import world_of

UID = "00000000-0000-0000-0000-000000000001"
ORDER = f"prepare-{UID}"
SUBJECT = subjects.order(NodeName("node-1"), "agent", OrderId(ORDER))

TRACE = f"00-{'a' * 32}-{'b' * 16}-01"


def order(attempt: int, **more: str) -> OrderStatus:
    payload = builders.payload(order=ORDER, attempt=attempt, **more)
    return builders.order("prepare", UID, attempt=attempt, payload=payload)


@pytest.fixture
def orders(bus: SimBus) -> NatsOrders:
    return NatsOrders(bus)  # type: ignore[arg-type]


async def stored(bus: SimBus) -> tuple[Any, int]:
    """Return the order on the stream, and how many were stored."""
    found = await bus.last(subjects.ORDERS, SUBJECT)
    assert found is not None
    return msgspec.json.decode(found[1]), found[0]


@pytest.mark.parametrize(
    ("published", "repeated", "left"),
    [
        pytest.param((2, 1), None, (2, 1), id="an older one that is late does not replace it"),
        pytest.param((1, 2), None, (2, 2), id="a newer one does"),
        pytest.param((1, 1), None, (1, 1), id="the same one is stored once"),
        pytest.param((1,), 1, (1, 2), id="repeated and so delivered again"),
        pytest.param((2,), 1, (2, 1), id="an older one that is repeated does not replace it"),
    ],
)
async def test_the_highest_attempt_that_was_published_is_on_the_stream(
    bus: SimBus,
    orders: NatsOrders,
    published: tuple[int, ...],
    repeated: int | None,
    left: tuple[int, int],
) -> None:
    for attempt in published:
        await orders.publish(order(attempt))
    if repeated is not None:
        await orders.repeat(order(repeated))
    found, count = await stored(bus)
    assert (found["attempt"], count) == left


async def test_an_order_that_was_withdrawn_before_it_is_repeated_stays_withdrawn(
    bus: SimBus, orders: NatsOrders, monkeypatch: pytest.MonkeyPatch
) -> None:
    await orders.publish(order(1))
    last = bus.last

    async def withdrawn_meanwhile(stream: str, subject: str) -> tuple[int, bytes] | None:
        found = await last(stream, subject)
        assert found is not None
        await bus.delete(stream, found[0])
        return found

    monkeypatch.setattr(bus, "last", withdrawn_meanwhile)
    await orders.repeat(order(1))
    assert await last(subjects.ORDERS, SUBJECT) is None


async def test_an_order_that_stands_on_the_stream_already_adds_no_span_to_its_trace(
    bus: SimBus,
) -> None:
    """A node that is lost never accepts its orders, and the sweep comes by every 30 s."""
    telemetry = Telemetry("snap-operator", "operator", "0")
    orders = NatsOrders(bus, telemetry)  # type: ignore[arg-type]
    await orders.publish(order(1, traceparent=TRACE))
    for _ in range(3):
        await orders.ensure(order(1, traceparent=TRACE))
    assert len(list(telemetry._outbox.records)) == 1
    await orders.ensure(order(2, traceparent=TRACE))
    assert (await stored(bus))[0]["attempt"] == 2


async def test_replacing_puts_an_order_in_place_of_whatever_stands_there(
    bus: SimBus, orders: NatsOrders
) -> None:
    await orders.replace(order(1))
    # Poison that claims to be newer than every order.
    await bus.publish(SUBJECT, b'{"attempt": 1000000}')
    await orders.publish(order(1))
    assert (await stored(bus))[0] == {"attempt": 1000000}
    await orders.replace(order(1))
    assert (await stored(bus))[0] == {"order": ORDER, "attempt": 1}


class Mirrored:
    """The objects of a world, and their mirror on a server that comes and goes."""

    def __init__(self, bus: SimBus) -> None:
        self.bus, self.server = bus, bus._server

    async def start(self) -> None:
        self.world = await world_of(1, answered=())
        await self.bus.put(subjects.OBJECTS_BUCKET, "pods.default.gone", b"{}")
        changes = ChangePublisher(self.bus, "one", self.world.cluster)  # type: ignore[arg-type]
        self.world.cluster.subscribe(changes.watcher)
        works = (changes.run(), changes.keep_mirror(), self.bus.keep_assets())
        self.tasks = [asyncio.ensure_future(work) for work in works]
        await asyncio.sleep(1.0)

    @property
    def stream(self) -> Stream:
        return self.server.streams[subjects.stream_of_bucket(subjects.OBJECTS_BUCKET)]

    def limit(self, most: int) -> None:
        """Have the server take no value of more bytes; -1 for any."""
        self.stream.config = self.stream.config.evolve(max_msg_size=most)

    async def miss(self, name: str) -> None:
        """Have the server take nothing from now on, not even a new checkpoint."""
        self.limit(1)
        await self.world.apply(checkpoint_document(name))

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


@pytest.fixture
async def mirror(bus: SimBus) -> AsyncIterator[Mirrored]:
    found = Mirrored(bus)
    await found.start()
    yield found
    await end_all(*found.tasks)


async def test_the_mirror_has_at_start_what_is_there_and_nothing_else(mirror: Mirrored) -> None:
    assert await mirror.differences() == set()


async def test_the_mirror_agrees_again_after_nats_was_away(mirror: Mirrored) -> None:
    mirror.server.crash()
    await asyncio.sleep(1.0)
    world = mirror.world
    await world.answer("run")
    await world.remove("DynamoCheckpoint", "llm")
    assert not world.cluster.page("Pod")
    await world.apply(checkpoint_document(name="other"))
    mirror.server.restart()
    await asyncio.sleep(60.0)
    assert await mirror.differences() == set()


async def test_the_mirror_is_filled_again_after_nats_has_lost_it(mirror: Mirrored) -> None:
    mirror.server.crash()
    mirror.server.wipe()
    mirror.server.restart()
    await asyncio.sleep(60.0)
    assert await mirror.differences() == set()


async def test_a_write_that_nats_did_not_take_is_done_again(mirror: Mirrored) -> None:
    mirror.server.delete_stream(mirror.stream.config.name or "")
    await mirror.world.answer_well(mirror.world.open("run")[0])
    await asyncio.sleep(120.0)
    assert await mirror.differences() == set()


async def test_what_has_not_changed_is_not_written_again_after_a_reconnection(
    mirror: Mirrored,
) -> None:
    before = mirror.stream.last_sequence
    for _ in range(3):
        mirror.server.crash()
        await asyncio.sleep(1.0)
        mirror.server.restart()
        await asyncio.sleep(60.0)
    await asyncio.sleep(2 * 3600.0)
    assert mirror.stream.last_sequence == before
    # That the stray key was removed has been shown for its hour.
    assert len(mirror.stream.counts("$KV.snap_objects.>")) == len(await mirror.world.everything())


async def test_what_can_never_be_written_is_tried_less_and_less_often(mirror: Mirrored) -> None:
    await asyncio.sleep(2 * RETRY_S)
    times = mirror.comparisons()
    await mirror.miss("other")
    await asyncio.sleep(86400.0)
    gaps = [after - before for before, after in itertools.pairwise(times)]
    assert gaps[0] == pytest.approx(RETRY_S, abs=0.5)
    assert gaps == pytest.approx(sorted(gaps), abs=0.5)
    assert gaps[-1] == pytest.approx(COMPARE_EVERY_S, abs=0.5)


async def test_what_could_not_be_written_for_long_is_tried_again_soon_after_a_reconnection(
    mirror: Mirrored,
) -> None:
    await mirror.miss("other")
    await asyncio.sleep(7200.0)
    mirror.server.crash()
    mirror.server.restart()
    await asyncio.sleep(2.0)
    mirror.limit(-1)
    await asyncio.sleep(2 * RETRY_S)
    assert await mirror.differences() == set()


async def test_a_write_that_fails_after_the_mirror_was_written_again_is_tried_again_soon(
    mirror: Mirrored,
) -> None:
    await mirror.miss("other")
    await asyncio.sleep(7200.0)
    mirror.limit(-1)
    await asyncio.sleep(COMPARE_EVERY_S)
    assert await mirror.differences() == set()
    await mirror.miss("third")
    await asyncio.sleep(1.0)
    assert await mirror.differences() != set()
    mirror.limit(-1)
    await asyncio.sleep(2 * RETRY_S)
    assert await mirror.differences() == set()


async def test_a_mirror_that_takes_nothing_is_logged_once_a_comparison(
    mirror: Mirrored, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="snapshot_operator.runtime.nats")
    await mirror.miss("other")
    await asyncio.sleep(1.0)
    assert len(await mirror.differences()) > 2
    times = mirror.comparisons()
    caplog.clear()
    await asyncio.sleep(600.0)
    assert 0 < len(caplog.records) <= len(times)
