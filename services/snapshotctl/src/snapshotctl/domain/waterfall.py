"""A trace as a waterfall: spans as an indented tree, each with its place in time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from snapshot_shared.spans import SpanRecord, parse_traceparent
from snapshotctl.domain import formats

NANOSECONDS = 1e9
NAME_WIDTH = 34
WHERE_WIDTH = 26
MIN_BAR = 10
_TIMES = 24
"""Columns of the two times and the edges."""
BAR = "█"
EDGE = "▏"


class Bar(NamedTuple):
    """One span of a waterfall. Times are seconds; `start_s` counts from the trace's begin.

    `orphan` says that its parent is not there, for example because it has not ended yet.
    """

    depth: int
    span: SpanRecord
    start_s: float
    duration_s: float
    orphan: bool


class Waterfall(NamedTuple):
    """A whole trace in the order in which it is drawn, and how long it took in seconds.

    `links` are the ids of other traces that it is linked to.
    """

    bars: list[Bar]
    total_s: float
    links: list[str]

    @property
    def services(self) -> list[str]:
        """Name the services that took part."""
        return sorted({bar.span.service for bar in self.bars})


def layout(spans: Sequence[SpanRecord]) -> Waterfall:
    """Order spans parents first, siblings by their start. A repeated span counts once."""
    known = {span.span_id: span for span in spans}
    begin = min((span.start_ns for span in known.values()), default=0)
    end = max((span.end_ns for span in known.values()), default=0)
    children: dict[str, list[SpanRecord]] = {}
    for span in known.values():
        parent = span.parent_id if span.parent_id in known else ""
        children.setdefault(parent, []).append(span)
    for siblings in children.values():
        siblings.sort(key=lambda span: (span.start_ns, -span.end_ns, span.span_id), reverse=True)
    bars: list[Bar] = []
    waiting = [(0, span) for span in children.get("", [])]
    while waiting:
        depth, span = waiting.pop()
        start, length = span.start_ns - begin, span.end_ns - span.start_ns
        orphan = bool(span.parent_id) and span.parent_id not in known
        bars.append(Bar(depth, span, start / NANOSECONDS, length / NANOSECONDS, orphan))
        waiting += [(depth + 1, child) for child in children.get(span.span_id, [])]
    own = {span.trace_id for span in known.values()}
    contexts = {parse_traceparent(link) for span in known.values() for link in span.links}
    links = sorted({context.trace_id for context in contexts if context} - own)
    return Waterfall(bars, (end - begin) / NANOSECONDS, links)


def lines(found: Waterfall, width: int) -> list[str]:
    """Draw a waterfall in lines of at most `width` characters, if that is 80 or more."""
    names = [_name(bar) for bar in found.bars]
    wheres = [formats.plain(f"{bar.span.service}@{bar.span.node}") for bar in found.bars]
    where_width = min(WHERE_WIDTH, max(map(len, wheres), default=0))
    name_width = min(NAME_WIDTH, max(map(len, names), default=0))
    name_width = min(name_width, max(16, width - where_width - MIN_BAR - _TIMES))
    room = max(MIN_BAR, width - name_width - where_width - _TIMES)
    drawn = [
        f"{_cut(name, name_width)} {_cut(where, where_width)} "
        f"{formats.span_time(bar.start_s):>9} {formats.span_time(bar.duration_s):>9} "
        f"|{_drawn(bar, found.total_s, room)}|"
        for bar, name, where in zip(found.bars, names, wheres, strict=True)
    ]
    for bar in found.bars:
        drawn += _remarks(bar)
    return drawn + [f"  linked to trace {trace}" for trace in found.links]


def _remarks(bar: Bar) -> list[str]:
    name = shown_name(bar.span)
    failed = [f"  failed: {name}: {formats.plain(bar.span.error)}"] if bar.span.error else []
    return failed + ([f"  {name}: its parent has not ended"] if bar.orphan else [])


def _name(bar: Bar) -> str:
    return "  " * min(bar.depth, 10) + shown_name(bar.span)


def shown_name(span: SpanRecord) -> str:
    """Name a span for people: that of a message is long and hides the verb, so say only this."""
    operation = span.attributes.get("messaging.operation.name")
    verb = span.attributes.get("snapback.verb")
    return formats.plain(f"{operation} {verb}" if operation and verb else span.name)


def _cut(text: str, width: int) -> str:
    return text.ljust(width) if len(text) <= width else text[: width - 1] + "…"


def _drawn(bar: Bar, total_s: float, room: int) -> str:
    scale = room / total_s if total_s > 0 else 0.0
    begin = min(room - 1, int(bar.start_s * scale))
    length = round(bar.duration_s * scale)
    length = min(length, room - begin)
    return " " * begin + (BAR * length if length else EDGE) + " " * (room - begin - max(length, 1))
