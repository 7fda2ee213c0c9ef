"""The command trace: the spans of a trace as a waterfall."""

from __future__ import annotations

import re
from collections.abc import Sequence

import msgspec

from snapshot_api.kinds import AnyObject
from snapshot_shared.errors import NotFound
from snapshot_shared.spans import Bar, SpanRecord, Waterfall, layout, parse_traceparent, shown_name
from snapshotctl.command import Namespace, Traced, command, new_app
from snapshotctl.domain import formats, targets
from snapshotctl.domain.targets import Target
from snapshotctl.ports import Operator, Screen
from snapshotctl.tools import Tools
from snapshotctl.views import related
from snapshotctl.views.related import trace_of

NAME_WIDTH = 34
WHERE_WIDTH = 26
MIN_BAR = 10
_TIMES = 24
"""Columns of the two times and the edges."""
BAR = "█"
EDGE = "▏"

_FOLLOWED = ("Snapshot", "SnapshotContent", "SnapshotRestore")
_TRACE_ID = re.compile(r"[0-9a-f]{32}")

app = new_app()


@command(
    app,
    "snapshotctl trace demo-llm",
    "snapshotctl trace pod/demo-llm-restored",
    "snapshotctl trace demo-llm -o json | jq '.[].name'",
)
async def trace(tools: Tools, name: Traced, namespace: Namespace = "default") -> None:
    """Show what was done for an object as a waterfall of spans.

    NAME may also be the id of a trace, or a traceparent as `get -o wide` shows it.

    A pause that is longer than all the work together is left out of the bars.
    """
    async with tools.operator() as operator:
        trace_id = _trace_id_in(name) or await _find(operator, name, namespace)
        spans = await operator.spans(trace_id)
    if not spans:
        raise NotFound(
            f"no spans of trace {trace_id} are kept",
            next_step="spans are kept for two days; work that has just begun has none yet",
        )
    if tools.screen.wants_table:
        show(tools.screen, trace_id, spans)
    else:
        tools.screen.value([msgspec.to_builtins(span) for span in spans])


def _trace_id_in(text: str) -> str:
    """Return the id of a trace from itself or from a traceparent; empty for another text."""
    context = parse_traceparent(text)
    found = context.trace_id if context is not None else text
    return found if _TRACE_ID.fullmatch(found) else ""


async def _find(operator: Operator, name: str, namespace: str) -> str:
    wanted = targets.traced(name, namespace)
    untraced: list[Target] = []
    for target in wanted:
        found = await operator.get(target)
        if found is None:
            continue
        if trace_id := await _trace_of(operator, found):
            return trace_id
        untraced.append(target)
    if untraced:
        raise NotFound(f"{untraced[0]} carries no trace: nothing was begun for it")
    kinds = ", ".join(target.kind.name for target in wanted)
    raise NotFound(
        f"no {kinds} is called {name!r} in namespace {namespace}",
        next_step="list what there is, for example: snapshotctl get dynamocheckpoints -A",
    )


async def _trace_of(operator: Operator, found: AnyObject) -> str:
    """Return the id of the trace of an object, else of its capture or restore.

    They have one also where the object was applied by a program that knows of no traces.
    """
    if trace_id := trace_of(found):
        return trace_id
    for target in related.links(found, found):
        if target.kind.name in _FOLLOWED and (linked := await operator.get(target)) is not None:
            return await _trace_of(operator, linked)
    return ""


def show(screen: Screen, trace_id: str, spans: Sequence[SpanRecord]) -> None:
    """Print a trace."""
    found = layout(spans)
    screen.line(
        f"trace {trace_id}: {formats.counted(len(found.bars), 'span')}, "
        f"{formats.span_time(found.total_s)}, services {', '.join(found.services)}",
        strong=True,
    )
    for line in lines(found, screen.width):
        screen.line(line)


def lines(found: Waterfall, width: int) -> list[str]:
    """Return a waterfall in lines of at most `width` characters, if that is 80 or more."""
    names = [_name(bar) for bar in found.bars]
    wheres = [formats.plain(f"{bar.span.service}@{bar.span.node}") for bar in found.bars]
    where_width = min(WHERE_WIDTH, max(map(len, wheres), default=0))
    name_width = min(NAME_WIDTH, max(map(len, names), default=0))
    name_width = min(name_width, max(16, width - where_width - MIN_BAR - _TIMES))
    room = max(MIN_BAR, width - name_width - where_width - _TIMES)
    drawn = [
        f"{_cut(name, name_width)} {_cut(where, where_width)} "
        f"{formats.span_time(bar.start_s):>9} {formats.span_time(bar.duration_s):>9} "
        f"|{_drawn(bar, found.drawn_s, room)}|"
        for bar, name, where in zip(found.bars, names, wheres, strict=True)
    ]
    for bar in found.bars:
        drawn += _remarks(bar)
    drawn += [
        f"  after {formats.span_time(at)} nothing was done for {formats.span_time(lasted)}; "
        "the bars leave that out"
        for at, lasted in found.pauses
    ]
    captures = _captures(found.bars)
    return drawn + [
        f"  restored from what trace {trace} captured: snapshotctl trace {trace}"
        if trace in captures
        else f"  linked to trace {trace}"
        for trace in found.links
    ]


def _captures(bars: Sequence[Bar]) -> set[str]:
    """Return the traces of the captures of what was restored."""
    links = (link for bar in bars if bar.span.name == "restoration" for link in bar.span.links)
    return {context.trace_id for link in links if (context := parse_traceparent(link))}


def _remarks(bar: Bar) -> list[str]:
    name = formats.plain(shown_name(bar.span))
    failed = [f"  failed: {name}: {formats.plain(bar.span.error)}"] if bar.span.error else []
    return failed + ([f"  {name}: its parent has not ended"] if bar.orphan else [])


def _name(bar: Bar) -> str:
    return "  " * min(bar.depth, 10) + formats.plain(shown_name(bar.span))


def _cut(text: str, width: int) -> str:
    return text.ljust(width) if len(text) <= width else text[: width - 1] + "…"


def _drawn(bar: Bar, drawn_s: float, room: int) -> str:
    scale = room / drawn_s if drawn_s > 0 else 0.0
    begin = min(room - 1, int(bar.drawn_s * scale))
    length = round(bar.duration_s * scale)
    length = min(length, room - begin)
    return " " * begin + (BAR * length if length else EDGE) + " " * (room - begin - max(length, 1))
