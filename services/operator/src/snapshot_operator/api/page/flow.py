"""One capture or restore as a picture: orders out, reports back, and the spans under a trace.

Times are seconds since the epoch, the operator's for orders and the reporter's for reports, so a
report is never drawn before its order.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from snapshot_operator.api.page.view import Entry, commands_of, heard, moved_part, open_order
from snapshot_operator.core import fold
from snapshot_operator.core.plan import orders_of
from snapshot_shared.objects import (
    AnyObject,
    DynamoCheckpoint,
    OrderStatus,
    Pod,
    SnapshotContent,
    SnapshotRestore,
)
from snapshot_shared.orders import Progress, Report
from snapshot_shared.spans import SpanRecord, layout
from snapshot_shared.views import mirrored

OPERATOR = "operator"
MOST_STEPS = 80
MOST_SPANS = 200
_BAD = ("failed", "rejected", fold.LOST)


class Step(NamedTuple):
    """One arrow: an order on its way out, or a report on its way back."""

    at: float
    after: int
    order: OrderStatus
    report: Report | None


class Known(NamedTuple):
    """What the details of an object are made of; `values` has the object first."""

    values: Sequence[AnyObject]
    reports: Sequence[Report]
    spans: Sequence[SpanRecord]
    progress: Mapping[str, Progress]


def details(entry: Entry, known: Known, context: str) -> dict[str, Any]:
    """Return everything that is shown of one object."""
    value = known.values[0]
    orders = [item for found in known.values for item in orders_of(found)]
    rows = value.status.conditions
    return {
        "key": entry.key,
        "kind": entry.kind,
        "namespace": entry.namespace,
        "name": entry.name,
        "phase": entry.phase,
        "state": entry.state,
        "reason": entry.reason,
        "message": entry.message,
        "next": entry.next,
        "created": entry.created,
        "facts": [[name, text] for name, text in _facts(known.values) if text],
        "conditions": [
            {"type": c.type, "status": c.status, "reason": c.reason, "message": c.message}
            for c in rows
        ],
        "parts": _parts(known.values, orders, known.progress),
        "flow": flow(orders, known.reports, known.progress),
        "trace": entry.trace,
        "waterfall": waterfall(known.spans),
        "commands": commands_of(entry, context),
        "object": mirrored(value),
    }


# The order flow.


def flow(
    orders: Sequence[OrderStatus], reports: Iterable[Report], progress: Mapping[str, Progress]
) -> dict[str, Any]:
    """Lay orders and reports out as a sequence diagram: lanes, arrows downwards, bars of work.

    `from` and `to` are indexes of lanes and `row` counts arrows. A bar without `end` is still
    being worked on.
    """
    steps = _steps(orders, reports)[-MOST_STEPS:]
    lanes = [OPERATOR]
    for step in steps:
        if (lane := _lane(step.order)) not in lanes:
            lanes.append(lane)
    began = steps[0].at if steps else 0.0
    arrows = [_arrow(step, lanes, began) for step in steps]
    bars = [bar for item in orders if (bar := _bar(item, steps, lanes, progress)) is not None]
    bars.sort(key=lambda bar: bar["start"])
    return {"lanes": lanes, "arrows": arrows, "bars": bars, "began": began}


def _lane(order: OrderStatus) -> str:
    return f"{order.service} {order.node}"


def _steps(orders: Sequence[OrderStatus], reports: Iterable[Report]) -> list[Step]:
    heard_of: dict[tuple[str, int], dict[int, Report]] = {}
    for report in reports:
        heard_of.setdefault((report.order, report.attempt), {})[report.n] = report
    steps = []
    for item in orders:
        found = heard_of.get((item.order, item.attempt), {})
        if item.final is not None:
            found.setdefault(item.final.n, item.final)
        at = item.ordered_at.timestamp()
        steps.append(Step(at, 0, item, None))
        for n in sorted(found):
            at = max(at, found[n].at)
            if found[n].kind == "accepted" and n != max(found):
                continue  # What came of it says that, too.
            steps.append(Step(at, n, item, found[n]))
    return sorted(steps, key=lambda step: (step.at, step.after, step.order.order))


def _arrow(step: Step, lanes: Sequence[str], began: float) -> dict[str, Any]:
    item, lane = step.order, lanes.index(_lane(step.order))
    arrow: dict[str, Any] = {"at": round(step.at - began, 3)}
    if step.report is None:
        return arrow | {"from": 0, "to": lane, "label": label(item), "state": _order_state(item)}
    kind = step.report.kind
    failure = step.report.failure
    state = "bad" if kind in _BAD else "ok" if fold.is_answered(item) else "busy"
    text = f"{kind}: {failure.reason}" if failure else kind
    return arrow | {"from": lane, "to": 0, "label": text, "state": state, "of": label(item)}


def label(item: OrderStatus) -> str:
    """Return the name of an order for people: verb, part, and its attempt after the first."""
    part = item.order[len(item.verb) + 38 :]
    again = f" #{item.attempt}" if item.attempt > 1 else ""
    return f"{item.verb} {part}".rstrip() + again


def _order_state(item: OrderStatus) -> str:
    if item.state in _BAD:
        return "bad"
    return "ok" if fold.is_answered(item) else "busy"


def _bar(
    item: OrderStatus, steps: Sequence[Step], lanes: Sequence[str], progress: Mapping[str, Progress]
) -> dict[str, Any] | None:
    mine = [row for row, step in enumerate(steps) if step.order is item]
    if not mine:
        return None
    bar: dict[str, Any] = {
        "lane": lanes.index(_lane(item)),
        "start": mine[0],
        "label": label(item),
        "state": _order_state(item),
    }
    if fold.is_answered(item):
        return bar | {"end": mine[-1]}
    found = heard(open_order(item), progress)
    return bar | ({"done": found.done, "total": found.total, "step": found.step} if found else {})


# Parts and facts.


def _parts(
    values: Sequence[AnyObject], orders: Sequence[OrderStatus], progress: Mapping[str, Progress]
) -> list[dict[str, Any]]:
    """Return the parts that are written or read, with their bytes; `done` is what is known of."""
    parts: dict[str, dict[str, Any]] = {}
    for value in values:
        if isinstance(value, SnapshotContent):
            parts |= _planned(value)
    for item in orders:
        name, size = _part_of(item)
        if name and (found := _part_now(name, size, item, progress)):
            parts[name] = found if found["total"] else found | {"total": _total(parts, name)}
    return [parts[name] for name in sorted(parts, key=lambda name: (name != "process", name))]


def _total(parts: Mapping[str, dict[str, Any]], name: str) -> int:
    return int(parts[name]["total"]) if name in parts else 0


def _planned(content: SnapshotContent) -> dict[str, dict[str, Any]]:
    held = content.status.committed
    if held is not None:
        return {part.part: _part(part.part, part.bytes, part.bytes, "ok") for part in held.parts}
    sizes = {e.part: e.layout.bytes if e.layout else 0 for e in content.status.vector}
    return {name: _part(name, 0, size, "waiting") for name, size in sizes.items()}


def _part_now(
    name: str, size: int, item: OrderStatus, progress: Mapping[str, Progress]
) -> dict[str, Any] | None:
    if item.state in _BAD:
        return _part(name, 0, 0, "bad")
    if item.final is not None:
        size = (item.final.part.bytes if item.final.part else item.final.bytes) or size
        return _part(name, size, size, "ok")
    found = heard(open_order(item), progress)
    if found is None:
        return None
    return _part(name, found.done, found.total, "busy") | {"step": found.step}


def _part(name: str, done: int, total: int, state: str) -> dict[str, Any]:
    return {"part": name, "done": done, "total": total, "state": state}


def _part_of(item: OrderStatus) -> tuple[str, int]:
    return ("process", 0) if item.verb in ("dump", "restore") else moved_part(item)


def _facts(values: Sequence[AnyObject]) -> Iterable[tuple[str, str]]:
    """Yield what identifies an object, as pairs of words."""
    first = values[0]
    if isinstance(first, DynamoCheckpoint):
        identity = first.spec.identity
        yield "model", identity.model
        yield "framework", f"{identity.backend_framework} {identity.dynamo_version}".strip()
    for value in values:
        yield from _facts_of(value)
    yield "labels", ", ".join(f"{k}={v}" for k, v in sorted(first.metadata.labels.items()))
    yield "uid", first.metadata.uid


def _facts_of(value: AnyObject) -> Iterable[tuple[str, str]]:
    match value:
        case Pod():
            yield "pod", value.metadata.name
            yield "node", value.status.node_name
            yield "GPUs", ", ".join(device.uuid for device in value.status.devices)
        case SnapshotRestore():
            yield "restores from", value.status.content_name
        case SnapshotContent():
            yield "content", value.metadata.name
            yield "attempt", str(value.status.attempt or "")
            yield "still owed", ", ".join(value.status.obligations)
            if value.status.committed is not None:
                yield "root digest", value.status.committed.root_digest
        case _:
            return


# The waterfall.


def waterfall(spans: Sequence[SpanRecord]) -> dict[str, Any]:
    """Lay finished spans out as bars. Times are seconds since the first began."""
    found = layout(spans)
    bars = [
        {
            "depth": min(bar.depth, 10),
            "name": bar.span.name,
            "service": bar.span.service,
            "node": bar.span.node,
            "start": round(bar.start_s, 6),
            "length": round(bar.duration_s, 6),
            "error": bar.span.error,
            "orphan": bar.orphan,
        }
        for bar in found.bars[:MOST_SPANS]
    ]
    return {"total": round(found.total_s, 6), "bars": bars, "all": len(found.bars)}
