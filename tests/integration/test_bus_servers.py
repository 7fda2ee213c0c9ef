"""A bus of several servers, and what people see of ours with the tools of NATS alone."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from pathlib import Path
from typing import TypeVar

import nats
import pytest
from nats.aio.client import Client

from snapshot_operator.api.answering import answering
from snapshot_shared import subjects
from snapshot_shared.api import GetReply, GetRequest
from snapshot_shared.bus import Bus
from snapshot_shared.errors import BusUnavailable, NotFound
from snapshot_shared.tasks import end_all
from tests.chaos.machines import SERVERS, machines
from tests.support.nats_server import running_nats_server
from tests.support.waiting import until

T = TypeVar("T", bound=Bus)
ALONE = (
    "--name=alone",
    "--cluster_name=alone",
    "--cluster=nats://127.0.0.1:-1",
    "--routes=nats://127.0.0.1:1",
)
"""A member of a cluster whose other members never come, so that JetStream has no leader."""


@contextlib.asynccontextmanager
async def connected(bus: T) -> AsyncIterator[T]:
    await bus.connect()
    try:
        yield bus
    finally:
        await bus.close()


async def test_a_server_that_is_away_is_passed_over(nats_url: str) -> None:
    async with connected(Bus(f"nats://127.0.0.1:1,{nats_url}", "test")) as bus:
        await bus.ensure_assets()
        assert await bus.subjects_in(subjects.ORDERS, ">") == {}


async def test_jetstream_without_a_leader_is_unavailable_and_no_defect(tmp_path: Path) -> None:
    async with (
        running_nats_server(tmp_path / "nats", arguments=ALONE) as server,
        connected(Bus(server.url, "test")) as bus,
    ):
        with pytest.raises(BusUnavailable):
            await bus.ensure_assets()


async def test_a_consumer_goes_on_at_once_when_its_leader_changes() -> None:
    with machines(0) as found:
        bus = Bus(found.url, "test", credentials=found.root, replicas=3)
        try:
            found.start(*SERVERS)
            await bus.connect()
            await _at_last(bus.ensure_assets)
            deliveries = bus.consume(subjects.ORDERS, "agent-n", "snap.order.n.agent.*")
            first = asyncio.ensure_future(anext(deliveries))
            await _stored(bus, "snap.order.n.agent.stop-1")
            await (await first).ack()
            waiting = asyncio.ensure_future(anext(deliveries))
            step_down = f"$JS.API.CONSUMER.LEADER.STEPDOWN.{subjects.ORDERS}.agent-n"
            async with bus.listening("$JS.EVENT.ADVISORY.CONSUMER.LEADER_ELECTED.>") as elected:
                # News of a subscription takes its time from server to server: ask on.
                async with asyncio.timeout(30.0):
                    while elected.empty():
                        await bus.request(step_down, b"")
                        await asyncio.sleep(1.0)
            await _stored(bus, "snap.order.n.agent.stop-2")
            async with asyncio.timeout(8.0):
                assert (await waiting).subject.endswith("stop-2")
            await deliveries.aclose()  # type: ignore[attr-defined]
        finally:
            await bus.close()
            await found.end()


async def _at_last(call: Callable[[], Awaitable[object]]) -> None:
    """Call again and again until the bus is there."""
    async with asyncio.timeout(30.0):
        while True:
            try:
                await call()
                return
            except BusUnavailable:
                await asyncio.sleep(0.2)


async def _stored(bus: Bus, subject: str) -> None:
    await _at_last(lambda: bus.publish(subject, b"{}"))


async def test_assets_that_could_not_be_ensured_are_ensured_again_soon(nats_url: str) -> None:
    class Electing(Bus):
        """A bus whose JetStream has no leader at the first try."""

        tries = 0

        async def ensure_assets(self) -> bool:
            self.tries += 1
            if self.tries == 1:
                raise BusUnavailable("no leader")
            return await super().ensure_assets()

    async with connected(Electing(nats_url, "test")) as bus:
        keeping = asyncio.ensure_future(bus.keep_assets())
        try:
            await until(lambda: bus.tries == 2, "the second try", within_s=5.0)
            await _stored(bus, "snap.order.n.agent.stop-1")
        finally:
            await end_all(keeping)


async def test_who_listens_hears_on_a_connection_that_was_built_again(nats_url: str) -> None:
    async with (
        connected(Bus(nats_url, "test")) as bus,
        connected(Bus(nats_url, "other")) as other,
        bus.listening("snap.event.>") as heard,
        asyncio.timeout(10.0),
    ):
        again = bus.reconnections()
        # As nats-py does it when the server says that a user is revoked or too much was sent.
        await bus.client.close()
        await again.wait()
        await bus.client.flush()
        await other.announce("snap.event.pods.default.x", b"news")
        assert (await heard.get()).data == b"news"


@pytest.fixture
async def bus(nats_url: str) -> AsyncIterator[Bus]:
    async with connected(Bus(nats_url, "test")) as found:
        await found.ensure_assets()
        yield found


@pytest.fixture
async def person(nats_url: str) -> AsyncIterator[Client]:
    client = await nats.connect(nats_url)
    yield client
    await client.close()


async def test_streams_buckets_and_consumers_say_what_they_are_for(
    bus: Bus, person: Client
) -> None:
    stream = person.jetstream()
    for info in await stream.streams_info():
        assert info.config.description, info.config.name
    values = await stream.key_value(subjects.NODES_BUCKET)
    assert "node" in ((await values.status()).stream_info.config.description or "")
    deliveries = bus.consume(subjects.ORDERS, "agent-node-1", "snap.order.node-1.agent.*")
    waiting = asyncio.ensure_future(anext(deliveries))
    await stream.publish("snap.order.node-1.agent.stop-1", b"{}")
    await (await waiting).ack()
    consumer = await stream.consumer_info(subjects.ORDERS, "agent-node-1")
    assert consumer.config.description == ("ORDERS for agent-node-1: snap.order.node-1.agent.*")


async def test_a_description_that_is_missing_is_added(bus: Bus, person: Client) -> None:
    manager = person.jetstream()
    config = (await manager.stream_info(subjects.DEAD)).config
    await manager.update_stream(config.evolve(description=""))
    await bus.ensure_assets()
    assert (await manager.stream_info(subjects.DEAD)).config.description


async def _get(request: GetRequest) -> GetReply:
    if request.name:
        raise NotFound(f"Pod {request.name} does not\nexist in Köln", next_step="look again")
    return GetReply()


async def test_a_failed_answer_has_the_headers_of_an_error_and_is_counted(
    bus: Bus, person: Client
) -> None:
    endpoints = {subjects.api("get"): answering(GetRequest, GetReply, _get)}
    await bus.serve("snap-operator", "1.2.3", {"node": "operator"}, endpoints)
    good = await person.request("snap.api.get", b'{"kind": "Pod"}')
    assert (good.headers, json.loads(good.data)) == (None, {"items": []})
    bad = await person.request("snap.api.get", b'{"kind": "Pod", "name": "x"}')
    assert json.loads(bad.data)["failure"]["next_step"] == "look again"
    headers: Mapping[str, str] = bad.headers or {}
    assert headers["Nats-Service-Error-Code"] == "404"
    assert headers["Nats-Service-Error"] == "NotFound: Pod x does not exist in K?ln"
    noise = await person.request("snap.api.get", b"noise")
    assert (noise.headers or {})["Nats-Service-Error-Code"] == "400"
    stats = json.loads((await person.request("$SRV.STATS.snap-operator", b"")).data)
    [endpoint] = stats["endpoints"]
    assert (endpoint["name"], endpoint["num_requests"], endpoint["num_errors"]) == ("get", 3, 2)
    assert endpoint["last_error"].startswith("400:InvalidMessage")
    info = json.loads((await person.request("$SRV.INFO.snap-operator", b"")).data)
    assert "snap.api.VERB" in info["description"]
