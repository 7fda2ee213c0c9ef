"""A trace as a waterfall: spans as an indented tree, each with its place in time."""

from __future__ import annotations

from snapshot_shared.spans import Bar, SpanRecord, Waterfall
from snapshotctl.domain import formats

NAME_WIDTH = 34
WHERE_WIDTH = 26
MIN_BAR = 10
_TIMES = 24
"""Columns of the two times and the edges."""
BAR = "█"
EDGE = "▏"


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
