"""The check that a trace has to pass."""

import io
import json
import sys

import msgspec
import pytest

from snapshot_shared.spans import SpanRecord
from tests.support import builders, check_trace
from tests.unit.tables import each

SERVICES = ("snapshotctl", "snap-operator", "snap-agent", "snap-gms", "snap-transfer")


def _span(span_id: str, parent: str, name: str, start: int, end: int, number: int) -> SpanRecord:
    return builders.span(
        span_id=span_id,
        parent_id=parent,
        name=name,
        service=SERVICES[number],
        start_ns=start,
        end_ns=end,
    )


def _good() -> list[SpanRecord]:
    return [
        _span("root", "", "apply", 0, 10, 0),
        _span("cap", "root", "capture", 10, 110, 1),
        _span("prep", "cap", "order prepare", 10, 50, 2),
        _span("save", "cap", "order save", 45, 108, 3),
        _span("write", "save", "write", 50, 100, 4),
    ]


def _wrong(spans: list[SpanRecord]) -> str:
    return "\n".join(check_trace.problems(spans))


def test_a_whole_trace_passes() -> None:
    assert _wrong(_good()) == ""


@each(
    ("index", "change", "problem"),
    [
        (4, {"trace_id": "b" * 32}, "2 trace ids"),
        (2, {"parent_id": ""}, "2 roots"),
        (4, {"parent_id": "missing"}, "its parent is missing"),
        (4, {"name": "invented"}, "no step has this name"),
        (4, {"service": "snap-gms"}, "4 services"),
        (3, {"end_ns": 90}, "children cover 80.0% of capture"),
        (1, {"name": "apply"}, "no span is called capture"),
    ],
)
def test_each_thing_that_is_wrong_is_named(
    index: int, change: dict[str, object], problem: str
) -> None:
    spans = _good()
    spans[index] = msgspec.structs.replace(spans[index], **change)
    assert problem in _wrong(spans)


def test_a_gap_between_children_counts_as_uncovered() -> None:
    whole = _span("w", "", "capture", 0, 100, 0)
    children = [_span("a", "w", "x", -50, 30, 0), _span("b", "w", "x", 70, 200, 0)]
    assert check_trace.covered(whole, children) == pytest.approx(0.6)


def test_time_that_two_children_share_counts_once() -> None:
    whole = _span("w", "", "capture", 0, 100, 0)
    children = [_span("a", "w", "x", 0, 50, 0), _span("b", "w", "x", 0, 40, 0)]
    assert check_trace.covered(whole, children) == pytest.approx(0.5)


@pytest.mark.parametrize(("text", "code"), [(None, 0), ("[]", 1), ("no json", 1), ("{}", 1)])
def test_the_exit_code_is_that_of_the_check(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], text: str | None, code: int
) -> None:
    good = json.dumps([msgspec.to_builtins(span) for span in [*_good(), _good()[0]]])
    stdin = io.TextIOWrapper(io.BytesIO((good if text is None else text).encode()))
    monkeypatch.setattr(sys, "stdin", stdin)
    assert check_trace.main() == code
    assert capsys.readouterr().out
