"""Decides for a content of an artifact that exists: read as a whole once, then as one captured.

Nothing is written below the artifact root for it, and a failed import removes nothing.
"""

from __future__ import annotations

from msgspec.structs import replace

from snapshot_api.meta import OrderStatus, time_of
from snapshot_api.v1alpha1.content import Committed, SnapshotContent
from snapshot_api.v1alpha1.snapshot import ArtifactSource
from snapshot_operator.core import capture, conditions, fold, ordering, quarantine
from snapshot_operator.core.capture import ContentView
from snapshot_operator.core.conditions import Wait
from snapshot_operator.core.plan import Plan, owing_plan
from snapshot_shared.errors import Failure
from snapshot_shared.transitions import CaptureEvent
from snapshot_shared.units import size


def step(view: ContentView, artifact: ArtifactSource, node: str | Wait, now: float) -> Plan:
    """Return the next step of an import; `node` is one that can read now, or why there is none."""
    content, status = view.content, view.content.status
    if end := capture.end_of(view, now):
        return capture.given_up(content, end, now)
    last = next(reversed(fold.find(status.orders, "verify")), None)
    if last is None or last.state == fold.LOST or fold.superseding(last):
        return _begin(content, artifact, node, last, now, retries=status.retries)
    if failure := fold.failure_in([last], now):
        if failure.retryable and status.retries < capture.MAX_RETRIES:
            return _begin(content, artifact, node, last, now, retries=status.retries + 1)
        return capture.given_up(content, failure, now)
    if not fold.succeeded(last):
        return owing_plan(content, status, now, wake_at=capture.deadline_of(content))
    return _imported(content, artifact, last, now)


def _begin(
    content: SnapshotContent,
    artifact: ArtifactSource,
    node: str | Wait,
    last: OrderStatus | None,
    now: float,
    *,
    retries: int,
) -> Plan:
    status, wake_at = content.status, capture.deadline_of(content)
    if isinstance(node, Wait):
        rows = conditions.pending(status.conditions, content, now, node.reason, node.message)
        return owing_plan(content, replace(status, conditions=rows), now, wake_at=wake_at)
    attempt = fold.next_attempt(last) if last else 1
    trace = capture.capture_span(content, status.attempt)
    begun = replace(
        content,
        status=replace(status, traceparent=trace, started_at=status.started_at or time_of(now)),
    )
    order = ordering.verify(begun, artifact, node, now, attempt=attempt, budget_s=wake_at - now)
    message = f"{node} reads all bytes of the artifact"
    changed = replace(
        begun.status,
        retries=retries,
        orders=fold.replaced(status.orders, order),
        conditions=conditions.pending(status.conditions, content, now, "Importing", message),
    )
    return owing_plan(content, changed, now, wake_at=wake_at)


def _imported(
    content: SnapshotContent, artifact: ArtifactSource, item: OrderStatus, now: float
) -> Plan:
    proven = item.final.proven if item.final is not None else None
    if proven is None:
        failure = Failure(
            reason="InvalidReport",
            message=f"{item.node} read the artifact and did not say what it holds",
            next_step="upgrade the snapshot agent of that node",
        )
        return capture.given_up(content, failure, now)
    committed = Committed(
        generation=artifact.generation,
        root_digest=artifact.root_digest,
        bytes=proven.bytes,
        parts=proven.parts,
        vector=proven.vector,
        driver=proven.driver,
    )
    message = f"{item.node} read {size(proven.bytes)}"
    rows = conditions.with_conditions(
        content.status.conditions,
        content,
        now,
        (quarantine.VERIFIED, True, "DigestsMatch", message),
    )
    status = capture.moved(
        content,
        CaptureEvent.IMPORTED,
        committed=committed,
        generations=[artifact.generation],
        verifications=item.attempt,
        verified=item.attempt,
        conditions=conditions.captured(rows, content, committed, now),
    )
    return owing_plan(content, status, now)
