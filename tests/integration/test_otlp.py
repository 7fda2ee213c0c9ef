"""With an OTLP endpoint set, spans and metrics go there too, over HTTP."""

from __future__ import annotations

import socket

from snapshot_shared import instruments
from snapshot_shared.metrics import Metrics
from snapshot_shared.telemetry import Telemetry
from tests.support.collector import running_collector

PARENT = "00-" + "a" * 32 + "-" + "b" * 16 + "-01"


def test_spans_reach_the_collector_as_the_stream_keeps_them() -> None:
    with running_collector() as collector:
        telemetry = Telemetry("snap-agent", "node-1", "0.1.0", otlp_endpoint=collector.endpoint)
        with telemetry.span("dump", parent=PARENT, kind="consumer", links=[PARENT]):
            pass
        kept = list(telemetry._outbox.records)
        telemetry.shutdown()
        assert collector.spans == kept
        assert kept[0].trace_id == "a" * 32
        assert kept[0].parent_id == "b" * 16


async def test_metrics_reach_the_collector_at_the_end_at_the_latest() -> None:
    with running_collector() as collector:
        metrics = Metrics("snap-agent", "node-1", "0.1.0", otlp_endpoint=collector.endpoint)
        async with metrics.running():
            metrics.add(instruments.ACCEPTED, "dump")
            metrics.observe(instruments.HELD, lambda: {(): 1})
        names = collector.metrics["snap-agent"]
        assert {"snapback.order.accepted", "snapback.worker.held", "process.cpu.time"} <= names


def test_a_collector_that_is_down_stops_nothing() -> None:
    telemetry = Telemetry("snap-agent", "node-1", "0.1.0", otlp_endpoint="http://127.0.0.1:9")
    with telemetry.span("dump", parent=PARENT):
        pass
    assert [span.name for span in telemetry._outbox.records] == ["dump"]


async def test_a_collector_that_accepts_and_never_answers_holds_up_neither_work_nor_the_end() -> (
    None
):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        endpoint = f"http://127.0.0.1:{silent.getsockname()[1]}"
        metrics = Metrics("snap-agent", "node-1", "0.1.0", otlp_endpoint=endpoint)
        async with metrics.running():
            for _ in range(5):
                metrics._push()
        assert metrics._sender is not None
        assert metrics._sender._thread.is_alive()
