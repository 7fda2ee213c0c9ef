"""The command trace: from a name to its trace, and the trace as a waterfall."""

from __future__ import annotations

import re
from collections.abc import Sequence

import msgspec

from snapshot_shared.errors import NotFound
from snapshot_shared.objects import (
    TRACEPARENT,
    AnyObject,
    Pod,
    SnapshotContent,
    SnapshotRestore,
)
from snapshot_shared.spans import SpanRecord, layout, parse_traceparent
from snapshotctl.domain import kin, waterfall
from snapshotctl.domain.formats import span_time
from snapshotctl.domain.targets import Target, traced
from snapshotctl.ports import Operator, Screen

_TRACE_ID = re.compile(r"[0-9a-f]{32}")


async def trace(operator: Operator, screen: Screen, name: str, namespace: str) -> None:
    """Show the trace of an object, or one by its id. NotFound."""
    trace_id = name if _TRACE_ID.fullmatch(name) else await _find(operator, name, namespace)
    spans = await operator.spans(trace_id)
    if not spans:
        raise NotFound(
            f"no spans of trace {trace_id} are kept",
            next_step="spans are kept for two days; work that has just begun has none yet",
        )
    if screen.wants_table:
        show(screen, trace_id, spans)
    else:
        screen.value([msgspec.to_builtins(span) for span in spans])


def show(screen: Screen, trace_id: str, spans: Sequence[SpanRecord]) -> None:
    """Draw a trace."""
    found = layout(spans)
    screen.line(
        f"trace {trace_id}: {len(found.bars)} spans, {span_time(found.total_s)}, "
        f"services {', '.join(found.services)}",
        strong=True,
    )
    for line in waterfall.lines(found, screen.width):
        screen.line(line)


async def _find(operator: Operator, name: str, namespace: str) -> str:
    wanted = traced(name, namespace)
    untraced: list[Target] = []
    for target in wanted:
        found = await operator.get(target)
        if found is None:
            continue
        if trace_id := trace_of(found) or await _trace_of_restore(operator, found):
            return trace_id
        untraced.append(target)
    if untraced:
        raise NotFound(f"{untraced[0]} carries no trace: nothing was begun for it")
    kinds = ", ".join(target.kind.name for target in wanted)
    raise NotFound(
        f"no {kinds} is called {name!r} in namespace {namespace}",
        next_step="list what there is, for example: snapshotctl get dynamocheckpoints -A",
    )


async def _trace_of_restore(operator: Operator, found: AnyObject) -> str:
    """Return the id of the trace of a pod's restore: it has one also where the pod has none."""
    linked = kin.links(found, found) if isinstance(found, Pod) else []
    restores = [await operator.get(target) for target in linked]
    return next((trace_of(restore) for restore in restores if restore is not None), "")


def trace_of(found: AnyObject) -> str:
    """Give the id of the trace that an object belongs to, or an empty string."""
    candidates = [found.metadata.annotations.get(TRACEPARENT, "")]
    if isinstance(found, Pod | SnapshotContent | SnapshotRestore):
        candidates.insert(0, found.status.traceparent)
    contexts = (parse_traceparent(candidate) for candidate in candidates)
    return next((context.trace_id for context in contexts if context), "")
