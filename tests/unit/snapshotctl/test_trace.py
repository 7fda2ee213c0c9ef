"""A trace as a trace, and the check that one has to pass."""

from typing import Any

from snapshot_shared.spans import SpanRecord, layout
from snapshotctl.commands import trace
from tests.support import builders


def _span(span_id: str, parent: str, start_ms: int, end_ms: int, **more: Any) -> SpanRecord:
    times = {"start_ns": start_ms * 1_000_000, "end_ns": end_ms * 1_000_000}
    ids = {"trace_id": "t" * 32, "span_id": span_id, "parent_id": parent}
    return builders.span(**{"name": span_id, **ids, **times, **more})


def _link(trace_id: str = "a" * 32) -> str:
    return f"00-{trace_id}-{'b' * 16}-01"


def test_parents_come_first_and_siblings_by_their_start() -> None:
    spans = [
        _span("late", "root", 60, 90),
        _span("early", "root", 10, 50),
        _span("root", "", 0, 100),
    ]
    found = layout([*spans, _span("leaf", "early", 20, 30)])
    assert [(bar.span.name, bar.depth) for bar in found.bars] == [
        ("root", 0),
        ("early", 1),
        ("leaf", 2),
        ("late", 1),
    ]


def test_times_count_from_the_begin_of_the_trace_and_what_came_twice_is_drawn_once() -> None:
    found = layout([_span("root", "", 1000, 1500), _span("child", "root", 1100, 1200)] * 2)
    assert [(bar.start_s, bar.duration_s) for bar in found.bars] == [(0.0, 0.5), (0.1, 0.1)]
    assert found.total_s == 0.5


def test_a_span_whose_parent_has_not_ended_is_drawn_and_named() -> None:
    found = layout([_span("child", "missing", 0, 10)])
    assert found.bars[0].orphan
    assert any("its parent has not ended" in line for line in trace.lines(found, 100))


def test_bars_stand_where_the_spans_are() -> None:
    spans = [_span("root", "", 0, 100), _span("second half", "root", 50, 100)]
    root, half = trace.lines(layout(spans), 120)
    assert abs(root.count("█") - 2 * half.count("█")) <= 1
    assert half.index("█") - root.index("█") == root.count("█") - half.count("█")
    spans = [_span("root", "", 0, 100_000), _span("blink", "root", 50_000, 50_001)]
    assert trace.EDGE in trace.lines(layout(spans), 100)[1]


def test_a_pause_is_left_out_of_the_bars_and_named_if_it_is_longer_than_all_the_work() -> None:
    capture, verify = _span("capture", "", 0, 8_000), _span("verify", "", 600_000, 608_000)
    found = layout([capture, verify])
    assert found.total_s == 608.0
    assert found.pauses == [(8.0, 592.0)]
    first, second, remark = trace.lines(found, 120)
    assert first.count("█") == second.count("█") > 10
    assert "10m 00s" in second
    assert "after 8.00 s nothing was done for 9m 52s" in remark
    spans = [_span("run", "", 0, 1_000), _span("capture", "", 5_000, 10_000)]
    found = layout(spans)
    assert (found.pauses, found.drawn_s) == ([], 10.0)
    assert [bar.drawn_s for bar in found.bars] == [0.0, 5.0]


def test_no_line_is_wider_than_the_terminal() -> None:
    spans = [_span("root", "", 0, 100), _span("x" * 200, "root", 99, 100, service="y" * 100)]
    for width in (80, 100, 200):
        assert {len(line) for line in trace.lines(layout(spans), width)} == {width}


def test_a_restore_names_the_trace_of_the_capture_that_it_is_from() -> None:
    spans = [_span(name, "", 0, 1, links=[_link()]) for name in ("restoration", "other")]
    assert trace.lines(layout(spans), 90)[-1] == (
        f"  restored from what trace {'a' * 32} captured: snapshotctl trace {'a' * 32}"
    )
    own = _span("restoration", "", 0, 1, links=[_link("t" * 32)])
    assert len(trace.lines(layout([own]), 90)) == 1


def test_errors_and_links_stand_below_and_without_spans_nothing() -> None:
    lines = trace.lines(layout([_span("r", "", 0, 1, error="boom", links=[_link()])]), 90)
    assert lines[1:] == ["  failed: r: boom", f"  linked to trace {'a' * 32}"]
    for spans in ([], [_span("a", "b", 0, 1), _span("b", "a", 0, 1)]):
        assert trace.lines(layout(spans), 80) == []


def test_a_message_is_called_by_its_verb_and_a_link_within_the_trace_is_not_shown() -> None:
    of_dump = {"messaging.operation.name": "process", "snapback.verb": "dump"}
    more = {"trace_id": "a" * 32, "links": [_link()], "attributes": of_dump}
    (line,) = trace.lines(layout([_span("r", "", 0, 1, name="process snap.order.x", **more)]), 90)
    assert line.startswith("process dump ")
