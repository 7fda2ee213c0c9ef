"""Spans: ids from identity, parents across processes, errors with their reason."""

from __future__ import annotations

import json
import logging
import time
from typing import Any

import pytest

from snapshot_shared.errors import NoSpace
from snapshot_shared.spans import SpanRecord, derived_context, order_context, parse_traceparent
from snapshot_shared.telemetry import Telemetry, current_traceparent, log_to_stderr

PARENT = "00-" + "a" * 32 + "-" + "b" * 16 + "-01"


def finished(telemetry: Telemetry) -> list[SpanRecord]:
    return list(telemetry._outbox.records)


def test_a_step_is_the_child_of_the_span_around_it() -> None:
    telemetry = Telemetry("snap-agent", "node-1", "0")
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


def test_a_span_can_be_recorded_after_it_happened() -> None:
    telemetry = Telemetry("snap-operator", "operator", "0")
    identity = derived_context("a" * 32, "capture")
    telemetry.record("capture", parent=PARENT, identity=identity, start_ns=5, end_ns=9, error="no")
    (span,) = finished(telemetry)
    assert (span.start_ns, span.end_ns, span.error) == (5, 9, "no")


def test_a_failed_block_keeps_its_reason() -> None:
    telemetry = Telemetry("snap-agent", "node-1", "0")
    with pytest.raises(NoSpace), telemetry.span("write"):
        raise NoSpace("the disk is full")
    (span,) = finished(telemetry)
    assert span.error == "the disk is full"
    assert span.attributes["error.type"] == "NoSpace"


@pytest.mark.parametrize(
    "bad", ["", "x", PARENT + "0", PARENT.upper(), "00-" + "0" * 32 + "-" + "b" * 16 + "-01"]
)
def test_a_bad_traceparent_is_no_context_and_stops_nothing(bad: str) -> None:
    assert parse_traceparent(bad) is None
    telemetry = Telemetry("snap-agent", "node-1", "0")
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
