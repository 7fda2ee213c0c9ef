"""The client of the operator's service, on a real server that stops, lies, or is overtaken."""

from __future__ import annotations

import asyncio
import io
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

import msgspec
import pytest

from snapshot_api.kinds import KINDS, AnyObject
from snapshot_shared import subjects
from snapshot_shared.bus import Bus
from snapshot_shared.errors import BusUnavailable, InvalidMessage, RemoteFailure
from snapshot_shared.ids import NodeName
from snapshotctl import objects
from snapshotctl.adapters.operator_client import SAFETY_S, OperatorClient, connected
from snapshotctl.adapters.terminal import Terminal
from snapshotctl.commands.cordon import set_unschedulable
from snapshotctl.commands.delete import delete_as_read
from snapshotctl.domain.servers import Server
from snapshotctl.domain.targets import Target
from snapshotctl.views.related import ObjectChanged
from tests.support.nats_server import running_nats_server
from tests.support.objects import pod_template, presence
from tests.support.operator_world import World

POD = Target(KINDS["Pod"], "default", "x")


@pytest.fixture
async def bus(nats_url: str) -> AsyncIterator[Bus]:
    """The bus of somebody else."""
    found = await Bus(nats_url, "other").connect()
    yield found
    await found.close()


async def test_a_server_without_an_operator_says_so(nats_url: str) -> None:
    async with connected(Server(nats_url, "--server")) as client:
        with pytest.raises(BusUnavailable, match="no operator answers") as refused:
            await client.get(POD)
    assert "snapshotctl up" in refused.value.next_step


async def test_nothing_at_an_address_is_found_out_at_once(tmp_path: Path) -> None:
    async with asyncio.timeout(8):
        with pytest.raises(BusUnavailable, match="from --server"):
            async with connected(Server("nats://127.0.0.1:1", "--server"), patiently=True):
                pass


@pytest.mark.parametrize("answer", [b"", b"[]", b'{"items": 3}', b'{"items": [{"kind": "Pod"}]}'])
async def test_an_answer_that_makes_no_sense_is_refused(
    bus: Bus, nats_url: str, answer: bytes
) -> None:
    async def lie(_data: bytes, _headers: Mapping[str, str]) -> bytes:
        return answer

    await bus.serve("liar", "0.0.1", {}, {subjects.api("get"): lie})
    async with connected(Server(nats_url, "--server")) as client:
        with pytest.raises(InvalidMessage):
            await client.get(POD)


async def test_a_change_is_seen_before_and_after_the_server_restarts(tmp_path: Path) -> None:
    async with (
        asyncio.timeout(SAFETY_S - 1),
        running_nats_server(tmp_path / "nats") as server,
        connected(Server(server.url, "--server"), patiently=True) as client,
        client.watching(POD) as changes,
    ):
        other = await Bus(server.url, "other").connect()
        subject = subjects.event("pods", "default", "x")
        try:
            await other.announce(subject, b"{}")
            await changes.wait()
            waiting = asyncio.create_task(changes.wait())
            await asyncio.to_thread(server.stop)
            await server.start_async()
            await waiting
            await other.wait_connected()
            await other.announce(subject, b"{}")
            await changes.wait()
        finally:
            await other.close()


async def test_messages_about_other_objects_end_no_wait(nats_url: str) -> None:
    async with connected(Server(nats_url, "--server")) as client, client.watching(POD) as changes:
        await client.bus.announce(subjects.event("pods", "default", "y"), b"{}")
        await client.bus.announce(subjects.event("pods", "elsewhere", "x"), b"{}")
        waiting = asyncio.create_task(changes.wait())
        await client.bus.client.flush()
        assert not waiting.done()
        await client.bus.announce(subjects.event("pods", "default", "x"), b"{}")
        async with asyncio.timeout(SAFETY_S - 1):
            await waiting


async def test_spans_that_do_not_decode_are_left_out(bus: Bus, nats_url: str) -> None:
    await bus.ensure_assets()
    trace_id = "a" * 32
    for payload in (b"no json", b'{"type": "snapback.v1.span"}'):
        await bus.publish(subjects.span("cli", trace_id), payload)
    async with connected(Server(nats_url, "--server")) as client:
        assert await client.spans(trace_id) == []
        assert await client.spans("b" * 32) == []
        assert await client.presence() == {}


async def test_news_of_an_object_with_a_long_history_is_received(bus: Bus, nats_url: str) -> None:
    meta = {"name": "x", "namespace": "default", "uid": "u"}
    status = {"orders": ["o" * 1000] * 400}
    event = {"type": "MODIFIED", "object": {"kind": "Pod", "metadata": meta, "status": status}}
    async with connected(Server(nats_url, "--server")) as client, client.news() as news:
        await bus.announce(subjects.event("pods", "default", "x"), msgspec.json.encode(event))
        async with asyncio.timeout(10):
            received = await anext(news)
    assert isinstance(received, ObjectChanged)
    assert received.target == POD


# Requests to the API of an operator: how old they are, and what they are about.

DOCUMENT = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}, **pod_template()}


@pytest.fixture
async def world() -> World:
    """An operator with one pod, for which there is no node."""
    made = World()
    await made.apply(DOCUMENT)
    return made


@pytest.fixture
async def served(bus: Bus, world: World) -> Bus:
    answers = world.api.endpoints() | world.operations.endpoints()
    endpoints = {subjects.api(verb): handler for verb, handler in answers.items()}
    await bus.serve("operator", "0.0.1", {}, endpoints)
    return bus


class Overtaken(OperatorClient):
    """A client of whom others always get ahead between its reading and its writing."""

    def __init__(self, bus: Bus, world: World) -> None:
        super().__init__(bus, Server("", "test"), world.clock)
        self._world = world

    async def get(self, target: Target) -> AnyObject | None:
        found = await super().get(target)
        if target.kind.name == "Node":
            await super().cordon(NodeName(target.name or ""), unschedulable=True)
        else:
            await super().delete(target)
            await self._world.settle()
            await self._world.apply(DOCUMENT)
        return found


def _screen() -> Terminal:
    return Terminal("json", io.StringIO(), io.StringIO())


async def test_a_request_in_time_is_carried_out_and_a_late_one_is_not(
    served: Bus, world: World
) -> None:
    client = OperatorClient(served, Server("", "test"), lambda: world.now - 60)
    with pytest.raises(RemoteFailure) as refused:
        await client.delete(POD)
    assert refused.value.failure.reason == "RequestExpired"
    assert "compare the clocks" in refused.value.failure.next_step
    assert not (await world.get("Pod", "x")).metadata.deletion_timestamp
    client = OperatorClient(served, Server("", "test"), lambda: world.now - 1)
    await client.delete(POD)
    assert (await world.get("Pod", "x")).metadata.deletion_timestamp


async def test_what_was_made_again_since_it_was_read_is_not_deleted(
    served: Bus, world: World
) -> None:
    before = (await world.get("Pod", "x")).metadata.uid
    overtaken = Overtaken(served, world)
    found = await objects.existing(overtaken, POD)
    with pytest.raises(RemoteFailure) as refused:
        await delete_as_read(overtaken, POD, found)
    assert refused.value.failure.reason == "Conflict"
    assert "snapshotctl describe pod/x" in refused.value.failure.next_step
    found = (await world.get("Pod", "x")).metadata
    assert found.uid != before
    assert found.deletion_timestamp is None


async def test_a_node_that_was_cordoned_meanwhile_is_not_uncordoned(
    served: Bus, world: World
) -> None:
    await world.join(presence("node-1"))
    node = NodeName("node-1")
    with pytest.raises(RemoteFailure) as refused:
        await set_unschedulable(Overtaken(served, world), _screen(), node, unschedulable=False)
    assert refused.value.failure.reason == "Conflict"
    assert "snapshotctl describe node/node-1" in refused.value.failure.next_step
    client = OperatorClient(served, Server("", "test"), world.clock)
    await set_unschedulable(client, _screen(), node, unschedulable=False)
    (found,) = world.cluster.all("Node")
    assert not found.spec.unschedulable
