"""The spans and durations of what a change of a status has ended."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime

from snapshot_api import figures
from snapshot_api.facts import Pod
from snapshot_api.kinds import AnyObject
from snapshot_api.meta import TRACEPARENT, OrderStatus
from snapshot_api.v1alpha1.content import SnapshotContent
from snapshot_api.v1alpha1.restore import SnapshotRestore
from snapshot_api.views import is_answered, orders_of
from snapshot_operator.core import fold
from snapshot_operator.core.capture import capture_span, trace_parent
from snapshot_operator.core.ordering import order_span as order_context
from snapshot_shared import instruments
from snapshot_shared.errors import Failure
from snapshot_shared.metrics import OFF, Metrics
from snapshot_shared.orders import CLEANING
from snapshot_shared.spans import parse_traceparent
from snapshot_shared.steps import order_span
from snapshot_shared.telemetry import Telemetry
from snapshot_shared.transitions import CAPTURE, RESTORE


class Spans:
    """Records a span for each order, capture and restore that has ended."""

    def __init__(
        self, telemetry: Telemetry, now: Callable[[], float], metrics: Metrics = OFF
    ) -> None:
        """Use a tracer and the clock of decisions (seconds since the epoch)."""
        self._telemetry = telemetry
        self._now = now
        self._metrics = metrics

    def ended(self, old: AnyObject, new: AnyObject) -> None:
        """Record what this change has ended."""
        before = {(item.order, item.attempt): item for item in orders_of(old)}
        for item in orders_of(new):
            known = before.get((item.order, item.attempt))
            if is_answered(item) and (known is None or not is_answered(known)):
                self._order(new, item)
        match old, new:
            case SnapshotContent(), SnapshotContent():
                self._capture(old, new)
                self._pause(old, new)
            case SnapshotRestore(), SnapshotRestore():
                self._restoration(old, new)
            case _:
                return

    def _order(self, owner: AnyObject, item: OrderStatus) -> None:
        """Record the span of an order: from the decision until its answer is in the store."""
        failure = item.final.failure if item.final else None
        reason = "NodeLost" if item.state == fold.LOST else _reason(failure)
        ended = item.ended_at or item.ordered_at
        lasted = max((ended - item.ordered_at).total_seconds(), 0.0)
        self._metrics.record(instruments.ORDER_DURATION, lasted, item.verb, reason)
        parent = _span_over(owner, item)
        identity = parse_traceparent(order_context(parent, item.order, item.attempt))
        if identity is None:
            return
        self._telemetry.record(
            order_span(item.verb),
            parent=parent,
            identity=identity,
            start_ns=_ns(item.ordered_at.timestamp()),
            end_ns=_ns(self._now()),
            error=failure.message if failure else "",
            attributes={
                "snapback.order.id": item.order,
                "snapback.attempt": item.attempt,
                "snapback.verb": item.verb,
                "snapback.node": item.node,
                **_error_type(failure),
            },
        )

    def _capture(self, old: SnapshotContent, new: SnapshotContent) -> None:
        if old.status.capture in CAPTURE.terminal() or new.status.capture not in CAPTURE.terminal():
            return
        failure = new.status.failure
        size = new.status.committed.bytes if new.status.committed else 0
        began = _began(new.status.started_at, self._now())
        if new.spec.source.artifact is None:
            self._metrics.add(instruments.CAPTURE_IO, by=size)
            lasted = max(self._now() - began, 0.0)
            self._metrics.record(instruments.CAPTURE_DURATION, lasted, _reason(failure))
        self._telemetry.record(
            "capture",
            parent=trace_parent(new),
            identity=parse_traceparent(capture_span(new, new.status.attempt)),
            start_ns=_ns(began),
            end_ns=_ns(self._now()),
            error=failure.message if failure else "",
            attributes={
                "snapback.content": new.metadata.name,
                "snapback.bytes": size,
                **_error_type(failure),
            },
        )

    def _pause(self, old: SnapshotContent, new: SnapshotContent) -> None:
        """Record the pause once: the release may be answered before the seal or after it."""
        known = figures.capture_times(old.status).paused_s
        paused_s = figures.capture_times(new.status).paused_s
        if not paused_s or new.spec.source.artifact is not None:
            return
        was_over = old.status.capture in CAPTURE.terminal()
        if new.status.capture in CAPTURE.terminal() and not (was_over and known):
            self._metrics.record(instruments.CAPTURE_PAUSE, paused_s)

    def _restoration(self, old: SnapshotRestore, new: SnapshotRestore) -> None:
        before, after, ended = old.status, new.status, RESTORE.terminal()
        if before.state in ended or after.state not in ended or not after.traceparent:
            return
        began = _began(after.started_at, self._now())
        lasted = max(self._now() - began, 0.0)
        self._metrics.record(instruments.RESTORE_DURATION, lasted, _reason(after.failure))
        self._telemetry.record(
            "restoration",
            parent=new.metadata.annotations.get(TRACEPARENT, ""),
            identity=parse_traceparent(after.traceparent),
            start_ns=_ns(began),
            end_ns=_ns(self._now()),
            links=[after.capture_traceparent],
            error=after.failure.message if after.failure else "",
            attributes={
                "snapback.pod": new.spec.pod_ref.name,
                "snapback.content": after.content_name,
                **_error_type(after.failure),
            },
        )


def _span_over(owner: AnyObject, item: OrderStatus) -> str:
    """Return the span that an order's own span hangs below: it was the order's trace argument."""
    match owner:
        case SnapshotContent() if item.verb in ("verify", *CLEANING):
            return owner.status.traceparent
        case SnapshotContent():
            return capture_span(owner, item.attempt)
        case SnapshotRestore() | Pod():
            return owner.status.traceparent
        case _:
            return owner.metadata.annotations.get(TRACEPARENT, "")


def _began(at: datetime | None, now: float) -> float:
    return at.timestamp() if at is not None else now


def _reason(failure: Failure | None) -> str:
    return failure.reason if failure else ""


def _error_type(failure: Failure | None) -> dict[str, str]:
    return {instruments.ERROR: failure.reason} if failure else {}


def _ns(seconds: float) -> int:
    return int(seconds * 1_000_000_000)
