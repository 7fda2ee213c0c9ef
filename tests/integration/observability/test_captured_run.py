"""What people see of a capture and a restore: metrics, traces and logs of a real cluster."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import pytest
from prometheus_client.parser import text_string_to_metric_families

from snapshot_api.facts import Pod
from snapshot_api.meta import is_true
from snapshot_api.v1alpha1.content import SnapshotContent
from snapshot_api.v1alpha1.restore import SnapshotRestore
from snapshot_shared.instruments import TABLE, Shape
from snapshot_shared.spans import SpanRecord
from snapshot_shared.steps import Place, all_names
from snapshotctl.views.related import trace_of
from tests.integration.observability.test_faults import RECORDED_ELSEWHERE
from tests.support.collector import Collector, running_collector
from tests.support.live_cluster import LiveCluster, checkpoint, find, pod

NODES = ("node-1", "node-2")
PORT = re.compile(r"HTTP on \S+ port (\d+)")

pytestmark = pytest.mark.waits


class Run(NamedTuple):
    """What a cluster in which a worker was captured and restored has left behind."""

    collector: Collector
    exposed: dict[str, str]
    spans: list[SpanRecord]
    logs: list[dict[str, Any]]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    home = tmp_path_factory.mktemp("seen")
    with running_collector() as collector:
        cluster = LiveCluster(home)
        cluster.environment |= {
            "SNAPBACK_HTTP_ADDRESS": "127.0.0.1:0",
            "SNAPBACK_OTLP_ENDPOINT": collector.endpoint,
        }
        yield asyncio.run(_play(cluster, collector))


async def _play(cluster: LiveCluster, collector: Collector) -> Run:
    await cluster.up(*NODES, gpus=2)
    logs = ""
    try:
        async with cluster.session() as session:
            await session.apply(checkpoint("seen", NODES[0]))
            await session.until(
                lambda values: is_true(
                    find(values, "DynamoCheckpoint", "seen").status.conditions, "Ready"
                ),
                "the capture",
            )
            await session.apply(pod("again", NODES[1], "seen"))
            values = await session.until(
                lambda values: is_true(find(values, "Pod", "again").status.conditions, "Ready"),
                "the restore",
            )
            exposed = await _exposed_with_objects(cluster)
            traces = {
                trace_of(value)
                for value in values
                if isinstance(value, Pod | SnapshotContent | SnapshotRestore)
            }
            spans = [span for trace in traces for span in await session.client.spans(trace)]
            await session.arm(NODES[0], Place("agent", "dump", "copy-state"), "fail")
            await session.apply(checkpoint("unseen", NODES[0]))
            await session.until(
                lambda values: is_true(
                    find(values, "DynamoCheckpoint", "unseen").status.conditions, "Failed"
                ),
                "the failure",
            )
        logs = "\n".join(Path(found.log).read_text() for found in cluster.record.processes)
    finally:
        if not logs:
            print(cluster.logs())
        left = await cluster.down()
    assert left == []
    lines = [json.loads(line) for line in logs.splitlines() if line.startswith("{")]
    return Run(collector, exposed, spans, lines)


async def _exposed_with_objects(cluster: LiveCluster) -> dict[str, str]:
    """Scrape every service; the operator counts its objects every 10 s."""
    never = asyncio.Event()
    async with asyncio.timeout(30):
        while True:
            exposed = await _exposed(cluster)
            if 'snapback_phase="Ready"' in exposed["operator"]:
                return exposed
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(never.wait(), 0.5)


async def _exposed(cluster: LiveCluster) -> dict[str, str]:
    found = {}
    async with aiohttp.ClientSession() as web:
        for process in cluster.record.processes:
            if match := PORT.search(Path(process.log).read_text()):
                async with web.get(f"http://127.0.0.1:{match[1]}/metrics") as answer:
                    assert answer.status == 200
                    found[process.name] = await answer.text()
    return found


def _families(run: Run) -> set[str]:
    found = set()
    for text in run.exposed.values():
        for family in text_string_to_metric_families(text):
            name = f"{family.name}_total" if family.type == "counter" else family.name
            if family.samples:
                found.add(name)
    return found - {"target_info", "target"}


def test_what_is_in_the_table_is_recorded_in_a_run_or_by_the_test_of_its_fault(run: Run) -> None:
    assert len(run.exposed) == 6
    families = _families(run)
    assert families <= {instrument.prometheus for instrument in TABLE}
    silent = {found.name for found in TABLE if found.prometheus not in families}
    assert silent == {instrument.name for instrument in RECORDED_ELSEWHERE}


def test_labels_are_those_of_the_table_and_name_no_order_or_object(run: Run) -> None:
    known = {name: found for found in TABLE for name in found.series}
    for text in run.exposed.values():
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if sample.name in known and known[sample.name].shape is not Shape.HISTOGRAM:
                    assert set(sample.labels) <= set(known[sample.name].labels), sample
                for value in sample.labels.values():
                    assert not re.search(r"seen|again|-[0-9a-f]{8}-[0-9a-f]{4}-4", value), sample


def test_numbers_add_up(run: Run) -> None:
    assert _total(run, "snapback_order_finished_total") == _total(
        run, "snapback_order_accepted_total"
    )
    assert _total(run, "snapback_capture_io_bytes_total") > 4 * 2**20
    assert _total(run, "snapback_worker_freeze_duration_seconds_count") == 1
    assert _total(run, "snapback_worker_hold_duration_seconds_count") == 1
    assert _total(run, "snapback_worker_frozen") == 0
    assert _total(run, "snapback_nats_connected") == 6
    moved = "snapback_transfer_io_bytes_total"
    assert _total(run, moved, snapback_verb="save") == _total(run, moved, snapback_verb="load")


def _total(run: Run, name: str, **labels: str) -> float:
    return sum(
        sample.value
        for text in run.exposed.values()
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == name and labels.items() <= sample.labels.items()
    )


def test_every_service_sends_its_metrics_to_the_collector_as_well(run: Run) -> None:
    services = {"snap-operator", "snap-agent", "snap-gms", "snap-page"}
    assert set(run.collector.metrics) == services


def test_the_collector_has_the_same_tree_as_the_stream(run: Run) -> None:
    traces = {span.trace_id for span in run.spans}
    kept = {span.span_id: span for span in run.spans}
    sent = {span.span_id: span for span in run.collector.spans if span.trace_id in traces}
    assert len(kept) > 50
    assert {name: span.name for name, span in sent.items()} == {
        name: span.name for name, span in kept.items()
    }
    assert sent == kept


def test_every_span_has_a_name_of_ours_and_the_capture_is_covered(run: Run) -> None:
    assert {span.name for span in run.spans} <= all_names()
    assert "restoration" in {span.name for span in run.spans}
    (whole,) = [span for span in run.spans if span.name == "capture"]
    children = [span for span in run.spans if span.parent_id == whole.span_id]
    reached, busy = whole.start_ns, 0
    for child in sorted(children, key=lambda found: found.start_ns):
        start, end = max(child.start_ns, reached), min(child.end_ns, whole.end_ns)
        busy += max(0, end - start)
        reached = max(reached, end)
    assert busy >= 0.95 * (whole.end_ns - whole.start_ns)


def test_an_order_is_sent_by_a_producer_and_carried_out_by_a_consumer(run: Run) -> None:
    by_id = {span.span_id: span for span in run.spans}
    consumers = [span for span in run.spans if span.kind == "consumer"]
    assert len(consumers) >= 9
    for span in consumers:
        (link,) = span.links
        producer = by_id[link.split("-")[2]]
        assert producer.kind == "producer"
        assert producer.parent_id == span.parent_id
        assert span.name == f"process {span.attributes['messaging.destination.template']}"
        assert producer.name == f"publish {span.attributes['messaging.destination.template']}"
        for name in ("messaging.message.id", "snapback.order.id", "snapback.attempt"):
            assert producer.attributes[name] == span.attributes[name]
        assert span.attributes["messaging.system"] == "nats"
        assert span.attributes["messaging.operation.type"] == "process"
        assert producer.attributes["messaging.operation.type"] == "send"


def test_what_a_service_logs_of_an_order_names_it_with_its_attempt_and_its_span(run: Run) -> None:
    (line,) = [line for line in run.logs if "dump ended at copy-state" in line["message"]]
    assert line["service"] == "snap-agent"
    assert line["order_id"].startswith("dump-")
    assert line["attempt"] == 1
    kept = {span.span_id: span for span in run.collector.spans}
    span = kept[line["span_id"]]
    assert span.trace_id == line["trace_id"]
    assert span.attributes["snapback.order.id"] == line["order_id"]


def test_what_a_transfer_process_logs_names_its_order_too(run: Run) -> None:
    lines = [line for line in run.logs if line["service"] == "snap-transfer"]
    assert {line["order_id"].partition("-")[0] for line in lines} == {"save", "load"}
    kept = {span.span_id: span for span in run.collector.spans}
    for line in lines:
        assert line["attempt"] == 1
        assert kept[line["span_id"]].trace_id == line["trace_id"]


def test_what_failed_says_why_in_every_span_over_the_failure(run: Run) -> None:
    failed = {
        span.name: span.attributes.get("error.type")
        for span in run.collector.spans
        if span.error and span.service in ("snap-agent", "snap-operator")
    }
    assert failed["copy-state"] == "InjectedFault"
    assert failed["process snap.order.{node}.agent.dump-{owner}"] == "InjectedFault"
    assert failed["order dump"] == "InjectedFault"
    assert failed["capture"]
    assert None not in failed.values()
