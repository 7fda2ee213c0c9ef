"""What people see of our assets and services with the tools of NATS alone."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping

import nats
import pytest
from nats.aio.client import Client

from snapshot_operator.api.answering import answering
from snapshot_shared import subjects
from snapshot_shared.api import GetReply, GetRequest
from snapshot_shared.bus import Bus
from snapshot_shared.errors import NotFound


@pytest.fixture
async def bus(nats_url: str) -> AsyncIterator[Bus]:
    found = Bus(nats_url, "test")
    await found.connect()
    await found.ensure_assets()
    yield found
    await found.close()


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
