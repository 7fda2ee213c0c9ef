"""One capture or restore in detail: orders out, reports back, and the spans of its trace.

Times are seconds since the epoch, the operator's for orders and the reporter's for reports, so a
report is never drawn before its order.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from snapshot_api import views
from snapshot_api.facts import Pod
from snapshot_api.kinds import AnyObject
from snapshot_api.meta import OrderStatus
from snapshot_api.v1alpha1.checkpoint import DynamoCheckpoint
from snapshot_api.v1alpha1.content import SnapshotContent
from snapshot_api.v1alpha1.restore import SnapshotRestore
from snapshot_page.domain.timeline import figure, label, order_state
from snapshot_page.domain.view import Entry, runs_of
from snapshot_shared.orders import Progress, Report
from snapshot_shared.spans import SpanRecord, layout, shown_name

OPERATOR = "operator"
MAX_STEPS = 80
MAX_SPANS = 200


class Arrow(NamedTuple):
    """An order on its way out (`report` is None), or a report on its way back."""

    at: float
    order: OrderStatus
    report: Report | None


def details(
    entry: Entry,
    values: Sequence[AnyObject],
    reports: Sequence[Report],
    spans: Sequence[SpanRecord],
    received: Mapping[str, Progress],
) -> dict[str, Any]:
    """Return everything that is shown of one object; `values` has it first, then what it led to.

    `received` is the last progress of each order.
    """
    orders = [order for value in values for order in views.orders_of(value)]
    return entry.row | {
        "next": entry.next,
        "figures": [text for value in values if (text := figure(value))],
        "runs": runs_of(values),
        "facts": [[name, text] for name, text in _facts(values) if text],
        "conditions": [
            {"type": c.type, "status": c.status, "reason": c.reason, "message": c.message}
            for c in entry.value.status.conditions
        ],
        "parts": [part._asdict() for part in views.progress(values, received)],
        "flow": flow(orders, reports, received),
        "trace": entry.trace,
        "waterfall": waterfall(spans),
        "object": views.mirrored(entry.value),
    }


# The order flow.


def flow(
    orders: Sequence[OrderStatus], reports: Iterable[Report], received: Mapping[str, Progress]
) -> dict[str, Any]:
    """Return orders and reports as a sequence diagram: lanes, arrows downwards, bars of work.

    `from` and `to` are indexes of lanes, `start` and `end` indexes of arrows. A bar without `end`
    is under way.
    """
    arrows = _arrows(orders, reports)[-MAX_STEPS:]
    lanes = list(dict.fromkeys([OPERATOR, *(_lane(arrow.order) for arrow in arrows)]))
    began = arrows[0].at if arrows else 0.0
    bars = [bar for order in orders if (bar := _bar(order, arrows, lanes, received)) is not None]
    return {
        "lanes": lanes,
        "arrows": [_drawn(arrow, lanes, began) for arrow in arrows],
        "bars": sorted(bars, key=lambda bar: bar["start"]),
        "began": began,
    }


def _lane(order: OrderStatus) -> str:
    return f"{order.service} {order.node}"


def _arrows(orders: Sequence[OrderStatus], reports: Iterable[Report]) -> list[Arrow]:
    by_order: dict[tuple[str, int], dict[int, Report]] = {}
    for report in reports:
        by_order.setdefault((report.order, report.attempt), {})[report.n] = report
    arrows = []
    for order in orders:
        found = by_order.get((order.order, order.attempt), {})
        if order.final is not None:
            found.setdefault(order.final.n, order.final)
        at = order.ordered_at.timestamp()
        arrows.append(Arrow(at, order, None))
        for n in sorted(found):
            # The clock of a node may be behind that of the operator.
            at = max(at, found[n].at)
            # A later report implies that the order was accepted.
            if found[n].kind != "accepted" or n == max(found):
                arrows.append(Arrow(at, order, found[n]))
    return sorted(arrows, key=lambda a: (a.at, a.report.n if a.report else 0, a.order.order))


def _drawn(arrow: Arrow, lanes: Sequence[str], began: float) -> dict[str, Any]:
    order, lane, report = arrow.order, lanes.index(_lane(arrow.order)), arrow.report
    drawn: dict[str, Any] = {"at": round(arrow.at - began, 3)}
    if report is None:
        return drawn | {
            "from": 0,
            "to": lane,
            "label": label(order),
            "state": order_state(order, order.state),
        }
    state = order_state(order, report.kind)
    text = f"{report.kind}: {report.failure.reason}" if report.failure else report.kind
    return drawn | {"from": lane, "to": 0, "label": text, "state": state, "of": label(order)}


def _bar(
    order: OrderStatus,
    arrows: Sequence[Arrow],
    lanes: Sequence[str],
    received: Mapping[str, Progress],
) -> dict[str, Any] | None:
    rows = [row for row, arrow in enumerate(arrows) if arrow.order is order]
    if not rows:
        return None
    bar: dict[str, Any] = {
        "lane": lanes.index(_lane(order)),
        "start": rows[0],
        "label": label(order),
        "state": order_state(order, order.state),
    }
    if views.is_answered(order):
        return bar | {"end": rows[-1]}
    last = views.received_for(order, received)
    if last is None:
        return bar
    return bar | {"state": "busy", "done": last.done, "total": last.total, "step": last.step}


# Facts.


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
    """Return finished spans as bars. Times are seconds since the first began.

    `total` and `start` leave out `paused`: long pauses in which nothing was done.
    """
    found = layout(spans)
    bars = [
        {
            "depth": min(bar.depth, 10),
            "name": shown_name(bar.span),
            "service": bar.span.service,
            "node": bar.span.node,
            "start": round(bar.drawn_s, 6),
            "length": round(bar.duration_s, 6),
            "error": bar.span.error,
            "orphan": bar.orphan,
        }
        for bar in found.bars[:MAX_SPANS]
    ]
    paused = sum(lasted for _, lasted in found.pauses)
    return {
        "total": round(found.drawn_s, 6),
        "paused": round(paused, 6),
        "bars": bars,
        "all": len(found.bars),
    }
