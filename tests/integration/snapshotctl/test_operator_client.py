"""The client of the operator's service, on a real server that stops, lies or is empty."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path

import msgspec
import pytest

from snapshot_shared import subjects
from snapshot_shared.bus import Bus
from snapshot_shared.errors import BusUnavailable, InvalidMessage
from snapshot_shared.objects.kinds import KINDS
from snapshotctl.adapters.operator_client import SAFETY_S, connected
from snapshotctl.domain.servers import Server
from snapshotctl.domain.targets import Target
from snapshotctl.views.related import ObjectChanged
from tests.support.nats_server import running_nats_server

POD = Target(KINDS["Pod"], "default", "x")


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
async def test_an_answer_that_makes_no_sense_is_refused(nats_url: str, answer: bytes) -> None:
    async def lie(_data: bytes, _headers: Mapping[str, str]) -> bytes:
        return answer

    liar = await Bus(nats_url, "liar").connect()
    try:
        await liar.serve("liar", "0.0.1", {}, {subjects.api("get"): lie})
        async with connected(Server(nats_url, "--server")) as client:
            with pytest.raises(InvalidMessage):
                await client.get(POD)
    finally:
        await liar.close()


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


async def test_spans_that_do_not_decode_are_left_out(nats_url: str) -> None:
    bus = await Bus(nats_url, "writer").connect()
    try:
        await bus.ensure_assets()
        trace_id = "a" * 32
        for payload in (b"no json", b'{"type": "snapback.v1.span"}'):
            await bus.publish(subjects.span("cli", trace_id), payload)
        async with connected(Server(nats_url, "--server")) as client:
            assert await client.spans(trace_id) == []
            assert await client.spans("b" * 32) == []
            assert await client.presence() == {}
    finally:
        await bus.close()


async def test_news_of_an_object_with_a_long_history_is_received(nats_url: str) -> None:
    meta = {"name": "x", "namespace": "default", "uid": "u"}
    status = {"orders": ["o" * 1000] * 400}
    event = {"type": "MODIFIED", "object": {"kind": "Pod", "metadata": meta, "status": status}}
    bus = await Bus(nats_url, "writer").connect()
    try:
        async with connected(Server(nats_url, "--server")) as client, client.news() as news:
            await bus.announce(subjects.event("pods", "default", "x"), msgspec.json.encode(event))
            async with asyncio.timeout(10):
                received = await anext(news)
        assert isinstance(received, ObjectChanged)
        assert received.target == POD
    finally:
        await bus.close()
