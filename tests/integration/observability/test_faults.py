"""What goes wrong is counted: each fault of the table below, brought about and read."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer
from kubernetes_asyncio.client import Configuration
from prometheus_client.parser import text_string_to_metric_families

from gms.adapters.lease_socket import LeaseServer
from gms.adapters.simulated import SimulatedDevice
from gms.handlers.memory_server import MemoryServer
from gms.handlers.sessions import LeaseSessions
from snapshot_operator.kube.admission import Admission
from snapshot_operator.kube.webhooks import OBJECTS, PATHS
from snapshot_shared import instruments
from snapshot_shared.bus import Bus
from snapshot_shared.errors import NotFound
from snapshot_shared.http import Guests
from snapshot_shared.instruments import Instrument
from snapshot_shared.kube_client import KubeClient
from snapshot_shared.metrics import Metrics
from snapshot_shared.telemetry import MAX_WAITING_SPANS, Telemetry
from tests.integration.test_courier import NODE, OWNER, Desk, order
from tests.support.collector import running_collector
from tests.support.nats_server import running_nats_server
from tests.support.objects import checkpoint_document, presence
from tests.support.operator_world import World
from tests.support.waiting import until

RECORDED_ELSEWHERE: dict[Instrument, str] = {
    instruments.RECONNECTIONS: "test_a_connection_that_comes_back_is_counted",
    instruments.SPANS_DROPPED: "test_spans_that_nobody_could_take_are_counted",
    instruments.REPEATED: "test_a_repeated_order_is_counted_and_not_accepted_again",
    instruments.DEAD_LETTERS: "test_a_dead_letter_is_counted_by_its_reason",
    instruments.UNPUBLISHED: "test_an_order_that_waits_for_the_sweep_is_counted",
    instruments.API_REQUEST_DURATION: "test_a_request_to_the_kubernetes_api_is_counted",
    instruments.ADMISSION_DURATION: "test_an_admission_is_counted_by_its_webhook_and_outcome",
    instruments.CLIENTS_REFUSED: "test_a_client_without_a_session_is_counted_by_its_reason",
}
"""Metrics that a good standalone run does not record, with the tests that do."""


def scraped(name: str = "snap-agent") -> Metrics:
    return Metrics(name, NODE, "0", scraped=True)


def read(metrics: Metrics, instrument: Instrument, **labels: str) -> float:
    """The sum of a metric over the labels that are not given."""
    return sum(
        sample.value
        for family in text_string_to_metric_families(metrics.text().decode())
        for sample in family.samples
        if sample.name in instrument.series and labels.items() <= sample.labels.items()
    )


@pytest.fixture
async def desk(nats_url: str, tmp_path: Path) -> AsyncIterator[Desk]:
    """A service that deletes nothing and counts what it does."""
    metrics = scraped()
    bus = await Bus(nats_url, "test", metrics=metrics).connect()
    await bus.ensure_assets()
    yield Desk(bus, tmp_path / "journal", metrics)
    await bus.close()


def test_each_fault_has_its_test() -> None:
    assert set(RECORDED_ELSEWHERE.values()) <= set(globals())


async def test_a_dead_letter_is_counted_by_its_reason(desk: Desk) -> None:
    async with desk.courier():
        await desk.send(order(node="node-2"))
        await until(lambda: read(desk.metrics, instruments.DEAD_LETTERS) > 0)
    assert read(desk.metrics, instruments.DEAD_LETTERS, error_type="WrongNode") == 1
    assert read(desk.metrics, instruments.ACCEPTED) == 0


async def test_a_repeated_order_is_counted_and_not_accepted_again(desk: Desk) -> None:
    metrics = desk.metrics
    async with desk.courier():
        await desk.send(order())
        await until(lambda: read(metrics, instruments.FINISHED) == 1)
        # The stream keeps one message a subject: only now is the second one a repeat.
        await desk.send(order())
        await until(lambda: read(metrics, instruments.REPEATED, snapback_verb="delete") == 1)
    assert read(metrics, instruments.ACCEPTED, snapback_verb="delete") == 1
    assert read(metrics, instruments.FINISHED, snapback_outcome="done") == 1


async def test_a_connection_that_comes_back_is_counted(tmp_path: Path) -> None:
    metrics = scraped()
    async with running_nats_server(tmp_path / "nats") as server:
        bus = await Bus(server.url, "test", metrics=metrics).connect()
        assert read(metrics, instruments.CONNECTED) == 1
        await asyncio.to_thread(server.stop)
        await until(lambda: read(metrics, instruments.CONNECTED) == 0)
        await server.start_async()
        await until(lambda: read(metrics, instruments.CONNECTED) == 1)
        await until(lambda: read(metrics, instruments.RECONNECTIONS) == 1)
        await bus.close()


async def test_spans_that_nobody_could_take_are_counted() -> None:
    metrics = scraped()
    telemetry = Telemetry("snap-agent", NODE, "0", metrics=metrics)
    for _ in range(MAX_WAITING_SPANS + 3):
        with telemetry.span("dump"):
            pass
    assert read(metrics, instruments.SPANS_DROPPED, snapback_outcome="too-many") == 3
    await telemetry.flush(Bus("nats://127.0.0.1:9", "test"))
    lost = read(metrics, instruments.SPANS_DROPPED, snapback_outcome="not-published")
    assert lost == MAX_WAITING_SPANS


async def test_an_order_that_waits_for_the_sweep_is_counted() -> None:
    metrics = scraped("snap-operator")
    world = World()
    world.interpreter._metrics = metrics
    world.orders.most = 0
    await world.join(presence(NODE))
    await world.apply(checkpoint_document())
    assert read(metrics, instruments.UNPUBLISHED, snapback_verb="run") == 1


@pytest.mark.parametrize(
    ("sent", "reason"), [(b"noise", "InvalidMessage"), (b"", "")], ids=["noise", "nothing"]
)
async def test_a_client_without_a_session_is_counted_by_its_reason(
    tmp_path: Path, sent: bytes, reason: str
) -> None:
    metrics = scraped("snap-gms")
    devices = [SimulatedDevice(node=NODE, index=0, capacity=4 * 2**20)]
    gms = MemoryServer(node=NODE, incarnation=OWNER, devices=devices, metrics=metrics)
    server = LeaseServer(tmp_path, LeaseSessions(gms), metrics=metrics)
    server.start()
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as client:
            client.setblocking(False)
            loop = asyncio.get_running_loop()
            await loop.sock_connect(client, str(tmp_path / "gms.sock"))
            if sent:
                await loop.sock_sendall(client, sent)
                await loop.sock_recv(client, 65536)
        refused = read(metrics, instruments.CLIENTS_REFUSED, error_type=reason)
        assert refused == (1 if reason else 0)
        assert read(metrics, instruments.MEMORY_FREE) == 4 * 2**20
    finally:
        await server.close()
        devices[0].close()


async def test_a_request_to_the_kubernetes_api_is_counted() -> None:
    async def answer(request: web.Request) -> web.Response:
        return web.json_response({"kind": "Status", "code": 404}, status=404)

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    metrics = scraped("snap-operator")
    async with TestServer(app) as server:
        configuration = Configuration(host=str(server.make_url("")))
        async with KubeClient(configuration, metrics) as client:
            with pytest.raises(NotFound):
                await client.request("GET", "/api/v1/namespaces/a/pods/b")
    labels = {"snapback_resource": "pods", "http_response_status_code": "404"}
    assert read(metrics, instruments.API_REQUEST_DURATION, **labels) > 0


async def test_an_admission_is_counted_by_its_webhook_and_outcome() -> None:
    metrics = scraped("snap-operator")
    request = {"uid": "u", "operation": "CREATE", "object": {"kind": "Snapshot"}}
    path = f"/secret{PATHS[OBJECTS]}"
    async with KubeClient(Configuration()) as api:
        app = Admission(api, metrics).app("secret".__eq__, Guests())
        async with TestClient(TestServer(app)) as client:
            async with client.post(path, json={"request": request}) as response:
                assert (await response.json())["response"]["allowed"] is False
            async with client.post(path, data="no review") as response:
                assert response.status == 400
    for outcome in ("denied", "failed"):
        labels = {"snapback_webhook": OBJECTS, "snapback_outcome": outcome}
        assert read(metrics, instruments.ADMISSION_DURATION, **labels) > 0


def test_a_collector_that_is_down_stops_nothing() -> None:
    telemetry = Telemetry("snap-agent", NODE, "0", otlp_endpoint="http://127.0.0.1:9")
    with telemetry.span("dump"):
        pass
    assert [span.name for span in telemetry._outbox.records] == ["dump"]


async def test_a_collector_that_never_answers_holds_up_neither_work_nor_the_end() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        endpoint = f"http://127.0.0.1:{silent.getsockname()[1]}"
        metrics = Metrics("snap-agent", NODE, "0", otlp_endpoint=endpoint)
        async with metrics.running():
            for _ in range(5):
                metrics._push()
        assert metrics._sender is not None
        assert metrics._sender._thread.is_alive()


async def test_metrics_reach_the_collector_at_the_end_at_the_latest() -> None:
    with running_collector() as collector:
        metrics = Metrics("snap-agent", NODE, "0", otlp_endpoint=collector.endpoint)
        async with metrics.running():
            metrics.add(instruments.ACCEPTED, "dump")
            metrics.observe(instruments.HELD, lambda: {(): 1})
        names = collector.metrics["snap-agent"]
        assert {"snapback.order.accepted", "snapback.worker.held", "process.cpu.time"} <= names
