"""Spans, with ids from identity and errors with their reason; and the table of metrics."""

from __future__ import annotations

import json
import logging
import re
import time
from importlib import import_module
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from snapshot_shared.errors import NoSpace
from snapshot_shared.instruments import ACCEPTED, ERROR, JOURNAL_DURATION, TABLE, Instrument, Shape
from snapshot_shared.metrics import OFF, Metrics
from snapshot_shared.spans import (
    SpanRecord,
    derived_context,
    message_attributes,
    order_context,
    parse_traceparent,
)
from snapshot_shared.telemetry import Telemetry, current_traceparent, log_to_stderr

PARENT = "00-" + "a" * 32 + "-" + "b" * 16 + "-01"


def finished(telemetry: Telemetry) -> list[SpanRecord]:
    return list(telemetry._outbox.records)


@pytest.fixture
def telemetry() -> Telemetry:
    return Telemetry("snap-agent", "node-1", "0")


@pytest.fixture
def metrics() -> Metrics:
    return Metrics("snap-agent", "node-1", "0", scraped=True)


def test_a_step_is_the_child_of_the_span_around_it(telemetry: Telemetry) -> None:
    with telemetry.span("dump", parent=PARENT), telemetry.span("freeze"):
        pass
    freeze, dump = finished(telemetry)
    assert (dump.trace_id, dump.parent_id) == ("a" * 32, "b" * 16)
    assert freeze.parent_id == dump.span_id
    assert freeze.start_ns >= dump.start_ns
    assert current_traceparent() == ""


def test_a_span_with_an_identity_has_the_same_id_in_every_process() -> None:
    identity = order_context(PARENT, "dump-x", 1)
    for telemetry in (Telemetry("one", "n", "0"), Telemetry("two", "n", "0")):
        with telemetry.span("dump", parent=PARENT, identity=identity):
            pass
        assert identity is not None
        assert finished(telemetry)[0].span_id == identity.span_id


def test_a_span_can_be_recorded_after_it_happened(telemetry: Telemetry) -> None:
    identity = derived_context("a" * 32, "capture")
    telemetry.record("capture", parent=PARENT, identity=identity, start_ns=5, end_ns=9, error="no")
    (span,) = finished(telemetry)
    assert (span.start_ns, span.end_ns, span.error) == (5, 9, "no")


def test_a_failed_block_keeps_its_reason(telemetry: Telemetry) -> None:
    with pytest.raises(NoSpace), telemetry.span("write"):
        raise NoSpace("the disk is full")
    (span,) = finished(telemetry)
    assert span.error == "the disk is full"
    assert span.attributes["error.type"] == "NoSpace"


@pytest.mark.parametrize(
    "bad", ["", "x", PARENT + "0", PARENT.upper(), "00-" + "0" * 32 + "-" + "b" * 16 + "-01"]
)
def test_a_bad_traceparent_is_no_context_and_stops_nothing(telemetry: Telemetry, bad: str) -> None:
    assert parse_traceparent(bad) is None
    with telemetry.span("dump", parent=bad):
        pass
    assert finished(telemetry)[0].parent_id == ""


def test_an_error_that_repeats_fills_no_disk_and_is_counted(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    root = logging.getLogger()
    monkeypatch.setattr(root, "handlers", [])
    monkeypatch.setattr(root, "level", root.level)
    log_to_stderr("agent", "node-a", "INFO")
    log = logging.getLogger("snapshot_shared.test")
    now = 600.0
    monkeypatch.setattr(time, "time", lambda: now)

    def written() -> list[Any]:
        return [json.loads(line) for line in capsys.readouterr().err.splitlines()]

    def fail(error: Exception, times: int) -> None:
        for index in range(times):
            log.error("no %d", index, exc_info=error)

    fail(OSError(), 100)
    log.error("another place")
    log.warning("no error")
    lines = written()
    assert [line["message"] for line in lines[-2:]] == ["another place", "no error"]
    assert len(lines) == 12
    fail(ValueError(), 1)
    assert [line["message"] for line in written()] == ["no 0"]
    now += 60
    fail(OSError(), 2)
    first, second = written()
    assert first["left_out"] == 90
    assert "left_out" not in second


# https://ucum.org/ucum: seconds, bytes, one, or a thing that is counted in braces.
UNIT = re.compile(r"s|By|1|\{[a-z_]+\}")

MESSAGES = "opentelemetry.semconv._incubating.metrics.messaging_metrics"
PROCESS = "opentelemetry.semconv._incubating.metrics.process_metrics"
ATTRIBUTES = (
    "opentelemetry.semconv._incubating.attributes.messaging_attributes",
    "opentelemetry.semconv._incubating.attributes.cpu_attributes",
    "opentelemetry.semconv.attributes.error_attributes",
    "opentelemetry.semconv.attributes.http_attributes",
)


def constants(*modules: str) -> set[Any]:
    return {
        value
        for module in modules
        for value in vars(import_module(module)).values()
        if isinstance(value, str)
    }


def test_names_are_different_in_both_forms() -> None:
    assert len({found.name for found in TABLE}) == len(TABLE)
    assert len({found.prometheus for found in TABLE}) == len(TABLE)


def test_a_name_is_of_the_conventions_or_ours() -> None:
    conventional = constants(MESSAGES, PROCESS)
    wrong = [
        (found.name, found.unit)
        for found in TABLE
        if not re.fullmatch(r"[a-z]+(\.[a-z_]+)+", found.name)
        or not UNIT.fullmatch(found.unit)
        or not (found.name.startswith("snapback.") or found.name in conventional)
    ]
    assert wrong == []


def test_an_attribute_is_of_the_conventions_or_ours() -> None:
    known = constants(*ATTRIBUTES)
    wrong = [
        (found.name, name)
        for found in TABLE
        for name in (*found.attributes, *(name for name, _ in found.fixed))
        if not (name.startswith("snapback.") or name in known)
    ]
    assert wrong == []
    assert [found.name for found in TABLE if ERROR in found.attributes[:-1]] == []


def test_attributes_of_message_spans_are_of_the_conventions() -> None:
    found = message_attributes("process", "a.b.c", client="c", order="run-1", attempt=1)
    conventional = {name for name in found if not name.startswith("snapback.")}
    assert conventional <= constants(*ATTRIBUTES)


def shown(found: Instrument) -> set[tuple[str, frozenset[str]]]:
    """What Prometheus is shown of a metric that has one value: the names, with their labels."""
    metrics = Metrics("snap-agent", "node-1", "0", scraped=True)
    values = tuple("x" for _ in found.attributes)
    match found.shape:
        case Shape.COUNTER:
            metrics.add(found, *values)
        case Shape.HISTOGRAM:
            metrics.record(found, 0.5, *values)
        case _:
            metrics.observe(found, lambda: {values: 2})
    families = text_string_to_metric_families(metrics.text().decode())
    samples = [sample for family in families for sample in family.samples]
    return {
        (sample.name, frozenset(sample.labels) - {"le"})
        for sample in samples
        if sample.name in found.series
    }


def test_what_prometheus_is_shown_has_the_names_that_the_table_says() -> None:
    wrong = {
        found.name: series
        for found in TABLE
        if (series := shown(found)) != {(name, frozenset(found.labels)) for name in found.series}
    }
    assert wrong == {}


def test_a_reason_is_an_attribute_only_where_something_failed(metrics: Metrics) -> None:
    with metrics.timed(JOURNAL_DURATION):
        pass
    assert "error_type" not in metrics.text().decode()
    with pytest.raises(NoSpace), metrics.timed(JOURNAL_DURATION):
        raise NoSpace("full")
    assert 'error_type="NoSpace"' in metrics.text().decode()


def test_values_must_be_as_many_as_the_attributes_of_the_table(metrics: Metrics) -> None:
    with pytest.raises(ValueError, match="zip"):
        metrics.add(ACCEPTED, "run", "order-1")


def test_metrics_that_nobody_reads_record_nothing_and_show_nothing() -> None:
    for found in TABLE:
        OFF.add(found)
        OFF.record(found, 1.0)
        OFF.observe(found, lambda: {(): 1 / 0})
    assert OFF.text() == b""
    assert OFF.routes() == []
    assert not OFF.is_on
