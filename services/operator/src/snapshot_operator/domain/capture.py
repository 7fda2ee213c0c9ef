"""Decides for one SnapshotContent: the capture's next step, its release, its deletion.

The states are `transitions.CAPTURE`. Attempt n is set by compare-and-swap with the state that
begins it; every order, directory and manifest carries it. Attempt n+1 exists only when n failed
retryably before the worker was frozen and every part of n has answered.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import NamedTuple

from msgspec.structs import replace

from snapshot_operator.domain import backpressure, conditions, fold, ordering, quarantine
from snapshot_operator.domain.nodes import lost_nodes
from snapshot_operator.domain.plan import Finalize, Plan, status_plan
from snapshot_operator.domain.scheduler import unusable_for_new_work
from snapshot_shared.errors import Failure
from snapshot_shared.objects import (
    TRACEPARENT,
    Committed,
    Node,
    OrderStatus,
    SnapshotContent,
    SnapshotContentStatus,
    is_true,
)
from snapshot_shared.orders import ArtifactRef, PartResult, VectorEntry, version_gap
from snapshot_shared.spans import derived_context, derived_trace, parse_traceparent
from snapshot_shared.transitions import CAPTURE, Capture, CaptureEvent

MAX_ATTEMPTS = 3
MAX_BYTES = 2**50
_SETTLED = (Capture.READY, Capture.FAILED)
_UNDER_WAY = (Capture.PREPARING, Capture.STAGING, Capture.SEALING)
CORDONED = "NodeCordoned"
_ABORTED = Failure(reason="Aborted", message="the capture was aborted")


class CaptureView(NamedTuple):
    """What a decision about a content looks at. `pods` are the uids of all pods.

    While `is_full` nothing new begins: the stream of orders has room only for what cleans up.
    """

    content: SnapshotContent
    siblings: Sequence[SnapshotContent]
    nodes: Sequence[Node]
    pods: Container[str]
    is_full: bool = False


def reconcile_content(view: CaptureView, now: float) -> Plan:
    """Give the next step of a content. Same input, same plan; a settled content plans nothing."""
    content = view.content
    known = {node.metadata.name for node in view.nodes}
    orders = fold.mark_lost(content.status.orders, now, lost=lost_nodes(view.nodes), known=known)
    if orders != content.status.orders:
        return _plan(content, replace(content.status, orders=orders), now)
    if content.metadata.deletion_timestamp:
        return _deletion(view, now)
    if (failure := _wanted_end(content)) and content.status.capture in _UNDER_WAY:
        return _failed(content, failure, now)
    return _step(view, now)


def _step(view: CaptureView, now: float) -> Plan:
    content = view.content
    match content.status.capture:
        case Capture.PENDING:
            return _begin(view, now)
        case Capture.PREPARING:
            return _preparing(view, now)
        case Capture.STAGING:
            return _staging(content, now)
        case Capture.SEALING:
            return _sealing(content, now)
        case Capture.ABORTING:
            return _aborting(view, now)
        case Capture.READY:
            return _ready(view, now)
        case Capture.FAILED:
            return _clean(view, now)


def capture_span(content: SnapshotContent, attempt: int) -> str:
    """Give the traceparent of the span over one whole attempt."""
    return span_of(trace_parent(content), content.metadata.uid, attempt)


def span_of(parent: str, uid: str, attempt: int) -> str:
    """Derive it from the identity, so that any process can begin, extend or end it."""
    context = parse_traceparent(parent)
    trace_id = context.trace_id if context else derived_trace(uid)
    return derived_context(trace_id, "capture", uid, str(attempt)).traceparent


def trace_parent(content: SnapshotContent) -> str:
    """Give the span that asked for this content."""
    return content.metadata.annotations.get(TRACEPARENT, "")


def _current(content: SnapshotContent, verb: str | None = None) -> list[OrderStatus]:
    attempt = content.status.attempt
    return [
        item
        for item in content.status.orders
        if item.attempt == attempt and verb in (None, item.verb)
    ]


def _moved(
    content: SnapshotContent, event: CaptureEvent, **changes: object
) -> SnapshotContentStatus:
    status = content.status
    return replace(status, capture=CAPTURE.next(status.capture, event), **changes)


def _plan(content: SnapshotContent, status: SnapshotContentStatus, now: float) -> Plan:
    obligations = sorted({item.verb for item in status.orders if not fold.is_answered(item)})
    new = replace(content, status=replace(status, obligations=obligations))
    return status_plan(content, new, wake_at=fold.next_deadline(status.orders, now))


def _wanted_end(content: SnapshotContent) -> Failure | None:
    """Say that somebody wants the capture to end, if somebody does."""
    by = content.status.abort_requested_by
    if not by:
        return None
    return Failure(
        reason="Aborted",
        message=f"the capture was aborted by {by}",
        values={"by": by},
        next_step="delete it, and apply it again when the worker may be captured",
    )


def _begin(view: CaptureView, now: float) -> Plan:
    content = view.content
    if failure := _wanted_end(content):
        # Nothing was begun, or all that was has answered.
        rows = conditions.failed(content.status.conditions, content, now, failure)
        ended = _moved(content, CaptureEvent.FAILED, failure=failure, conditions=rows)
        return _plan(content, ended, now)
    home = content.spec.source.node_name
    if any(node.metadata.name == home and node.spec.unschedulable for node in view.nodes):
        return _waits(content, CORDONED, f"node {home} is cordoned: no capture begins there", now)
    if _is_queued_behind(content, view.siblings):
        message = "an older capture of the same container is not settled yet"
        return _waits(content, "WaitingForCapture", message, now)
    if view.is_full:
        return _waits(content, backpressure.REASON, backpressure.MESSAGE, now)
    if gap := _version_gap(view):
        return _waits(content, "UnsupportedVersion", gap, now)
    attempt = content.status.attempt + 1
    trace = capture_span(content, attempt)
    status = _moved(
        content,
        CaptureEvent.BEGIN,
        attempt=attempt,
        started_at=now,
        traceparent=trace,
        failure=None,
        vector=[],
        orders=[*content.status.orders, ordering.prepare(content, attempt, trace, now)],
        conditions=conditions.pending(
            content.status.conditions, content, now, "Capturing", f"attempt {attempt} is under way"
        ),
    )
    return _plan(content, status, now)


def _version_gap(view: CaptureView) -> str:
    home = view.content.spec.source.node_name
    for node in view.nodes:
        if node.metadata.name == home and (gap := version_gap(node.status.schemas)):
            return f"{home} cannot be ordered anything: {gap}"
    return ""


def _waits(content: SnapshotContent, reason: str, message: str, now: float) -> Plan:
    waiting = conditions.pending(content.status.conditions, content, now, reason, message)
    return _plan(content, replace(content.status, conditions=waiting), now)


def _is_queued_behind(content: SnapshotContent, siblings: Sequence[SnapshotContent]) -> bool:
    """Captures of one container run one after another, oldest content first.

    One that has begun is waited for whatever its age: time stamps have whole seconds.
    """
    mine = (content.metadata.creation_timestamp, content.metadata.name)
    rivals = [
        other
        for other in siblings
        if other.metadata.uid != content.metadata.uid
        and other.spec.source.pod_ref == content.spec.source.pod_ref
        and not is_settled(other)
    ]
    return any(
        other.status.capture is not Capture.PENDING
        or (other.metadata.creation_timestamp, other.metadata.name) < mine
        for other in rivals
        if other.status.capture is not Capture.PENDING or not other.metadata.deletion_timestamp
    )


def is_settled(content: SnapshotContent) -> bool:
    """Say whether the capture is over and the worker no longer held for it."""
    return content.status.capture in _SETTLED and all(
        fold.is_answered(item)
        for item in content.status.orders
        if item.verb not in ("delete", "verify")
    )


def _failed(content: SnapshotContent, failure: Failure, now: float) -> Plan:
    orders = [
        *content.status.orders,
        *ordering.abort_capture(content, str(failure), content.status.traceparent, now),
    ]
    return _plan(content, _moved(content, CaptureEvent.FAILED, failure=failure, orders=orders), now)


def _preparing(view: CaptureView, now: float) -> Plan:
    content = view.content
    orders = _current(content, "prepare")
    if failure := fold.failure_in(orders, now):
        return _failed(content, failure, now)
    final = orders[0].final
    if final is None:
        return Plan(wake_at=fold.next_deadline(orders, now))
    if failure := _vector_failure(content, [entry.part for entry in final.vector]):
        return _failed(content, failure, now)
    trace = content.status.traceparent
    parents = _parents(content, final.vector, view.siblings)
    staged = ordering.stage(content, final.vector, parents, trace, now)
    status = _moved(
        content,
        CaptureEvent.PREPARED,
        vector=final.vector,
        orders=[*content.status.orders, *staged],
    )
    return _plan(content, status, now)


def _parents(
    content: SnapshotContent, vector: Sequence[VectorEntry], siblings: Sequence[SnapshotContent]
) -> dict[str, ArtifactRef]:
    """Choose for each device the artifact that a save may share with: its layout has to be equal.

    That of the same worker or snapshot name comes first, then the newest of the namespace.
    """
    source, name = content.spec.source, content.spec.snapshot_ref.name

    def closeness(other: SnapshotContent) -> tuple[bool, str, str]:
        is_kin = other.spec.source.pod_ref == source.pod_ref or other.spec.snapshot_ref.name == name
        return is_kin, other.metadata.creation_timestamp, other.metadata.name

    found: dict[str, ArtifactRef] = {}
    for other in sorted(siblings, key=closeness):
        committed = other.status.committed
        is_usable = not (other.metadata.deletion_timestamp or quarantine.is_quarantined(other))
        if committed is None or not is_usable or other.spec.source.namespace != source.namespace:
            continue
        there = {e.part: e.layout.structure_hash for e in committed.vector if e.layout}
        for entry in vector:
            if entry.layout and there.get(entry.part) == entry.layout.structure_hash:
                found[entry.part] = ordering.artifact_ref(other, committed)
    return found


def _vector_failure(content: SnapshotContent, parts: list[str]) -> Failure | None:
    wanted = ["process", *(f"gpu-{device.ordinal}" for device in content.spec.source.devices)]
    if sorted(parts) == sorted(wanted):
        return None
    return Failure(
        reason="PlanMismatch",
        message=f"the agent prepared parts {sorted(parts)}, the pod's devices need {wanted}",
        values={"found": sorted(parts), "expected": wanted},
    )


def _staging(content: SnapshotContent, now: float) -> Plan:
    parts = [*_current(content, "dump"), *_current(content, "save")]
    if failure := fold.failure_in(parts, now):
        return _failed(content, failure, now)
    trace = content.status.traceparent
    orders = [*content.status.orders, *_early_release(content, parts, trace, now)]
    results = [item.final.part for item in parts if item.final and item.final.part]
    if len(results) < len(parts):
        return _plan(content, replace(content.status, orders=orders), now)
    orders.append(ordering.seal(content, results, trace, now))
    return _plan(content, _moved(content, CaptureEvent.STAGED, orders=orders), now)


def _early_release(
    content: SnapshotContent, parts: list[OrderStatus], trace: str, now: float
) -> list[OrderStatus]:
    """A worker that goes on may do so once its own part is staged and every save reads."""
    wants_on = content.spec.source_policy == "Resume" and not _current(content, "release")
    is_safe = all(
        fold.succeeded(item) if item.verb == "dump" else item.leased or fold.succeeded(item)
        for item in parts
    )
    if not (wants_on and is_safe):
        return []
    return [ordering.release(content, trace, now, attempt=content.status.attempt)]


def _sealing(content: SnapshotContent, now: float) -> Plan:
    orders = _current(content, "seal")
    if failure := fold.failure_in(orders, now):
        return _failed(content, failure, now)
    final = orders[0].final
    if final is None or final.root_digest is None:
        return Plan(wake_at=fold.next_deadline(content.status.orders, now))
    parts: list[PartResult] = [
        item.final.part
        for item in _current(content)
        if item.verb in ("dump", "save") and item.final and item.final.part
    ]
    total = sum(part.bytes for part in parts)
    if total > MAX_BYTES:
        failure = Failure(
            reason="InvalidReport",
            message=f"the parts have {total} bytes together, the limit is {MAX_BYTES}",
        )
        return _failed(content, failure, now)
    committed = Committed(
        generation=content.status.attempt,
        root_digest=final.root_digest,
        bytes=total,
        parts=sorted(parts, key=lambda part: part.part),
        vector=content.status.vector,
    )
    status = _moved(
        content,
        CaptureEvent.SEALED,
        committed=committed,
        conditions=conditions.captured(content.status.conditions, content, committed, now),
    )
    return _plan(content, status, now)


def _ready(view: CaptureView, now: float) -> Plan:
    """The worker first, then whoever wants to know whether the artifact is whole."""
    content = view.content
    released = _release(content, now)
    if released.writes:
        return released
    checked = quarantine.verification(content, _reader(view), now)
    return released if checked == content.status else _plan(content, checked, now)


def _reader(view: CaptureView) -> str | quarantine.Wait:
    if view.is_full:
        return quarantine.Wait(backpressure.REASON, backpressure.MESSAGE)
    wait = quarantine.Wait("NoNode", "no node is ready to read the artifact, and not cordoned")
    open_ = [node for node in view.nodes if not unusable_for_new_work(node)]
    return _reading_node(view._replace(nodes=open_)) or wait


def _release(content: SnapshotContent, now: float) -> Plan:
    """Ready is durable before the worker is released; nothing else is left to order."""
    status = content.status
    releases = _releases(content)
    attempt = fold.retry_attempt(releases, now) if releases else status.attempt
    if attempt is None:
        plan = _plan(content, status, now)
        last = max(releases, key=lambda item: item.attempt)
        is_resting = fold.is_answered(last) and not fold.succeeded(last)
        return Plan(plan.writes, fold.retry_at(releases)) if is_resting else plan
    order = ordering.release(content, status.traceparent, now, attempt=attempt)
    return _plan(content, replace(status, orders=[*status.orders, order]), now)


def _releases(content: SnapshotContent) -> list[OrderStatus]:
    """Give the releases of the current attempt; a failed one is ordered again with a higher."""
    orders = fold.find(content.status.orders, "release")
    return [item for item in orders if item.attempt >= content.status.attempt]


def _is_done(item: OrderStatus) -> bool:
    """Say whether a cleaning order has done its work, or its node is gone for good."""
    return fold.succeeded(item) or item.state == fold.LOST


def _clean(view: CaptureView, now: float) -> Plan:
    """Have removed what failed attempts may have written; nobody ever saw it."""
    content = view.content
    begun = {item.attempt for item in content.status.orders if item.verb in ("dump", "save")}
    for generation in sorted(begun):
        if not _is_removed(content, generation):
            return _remove(view, generation, now)
    return _plan(content, content.status, now)


def _aborting(view: CaptureView, now: float) -> Plan:
    """Wait until every part of the attempt has answered, then try again or give up."""
    content = view.content
    status = content.status
    lost = lost_nodes(view.nodes)
    current = [item for item in _current(content) if item.node not in lost]
    waiting = [item for item in current if not fold.is_answered(item) and now < item.deadline]
    if waiting:
        return Plan(wake_at=fold.next_deadline(waiting, now))
    failure = _wanted_end(content) or status.failure or _ABORTED
    was_frozen = any(item.verb == "dump" for item in current)
    all_answered = all(fold.is_answered(item) for item in current)
    may_retry = failure.retryable and not was_frozen and not content.metadata.deletion_timestamp
    if may_retry and all_answered and status.attempt < MAX_ATTEMPTS:
        again = conditions.pending(
            status.conditions,
            content,
            now,
            "Retrying",
            f"attempt {status.attempt} failed before the freeze: {failure.message}",
        )
        return _plan(content, _moved(content, CaptureEvent.RETRY, conditions=again), now)
    gave_up = conditions.failed(status.conditions, content, now, failure)
    ended = _moved(content, CaptureEvent.ABORTED, failure=failure, conditions=gave_up)
    return _plan(content, ended, now)


def _deletion(view: CaptureView, now: float) -> Plan:
    content = view.content
    status = content.status
    if status.capture in _UNDER_WAY:
        failure = Failure(reason="Deleted", message="the snapshot was deleted during its capture")
        return _failed(content, failure, now)
    if status.capture is Capture.ABORTING:
        return _aborting(view, now)
    if status.capture is Capture.PENDING:
        return Plan((Finalize(content),))
    lost = lost_nodes(view.nodes)
    is_held = not any(_is_done(item) or item.node in lost for item in _releases(content))
    if status.capture is Capture.READY and is_held:
        return _release(content, now)
    readers = [reader for reader in status.readers if reader in view.pods]
    if readers:
        message = f"restored by {', '.join(readers)}"
        return _deletion_waits(content, "ReadersRegistered", message, now)
    owed = [i for i in _current(content) if i.node not in lost and i.verb != "verify"]
    if not all(fold.is_answered(item) or now >= item.deadline for item in owed):
        return _plan(content, status, now)
    return _removal(view, now)


def _deletion_waits(content: SnapshotContent, reason: str, message: str, now: float) -> Plan:
    rows = conditions.with_conditions(
        content.status.conditions, content, now, ("Deleting", False, reason, message)
    )
    return _plan(content, replace(content.status, conditions=rows), now)


def _removal(view: CaptureView, now: float) -> Plan:
    """Remove every generation that may stand on disk, then let the object go."""
    content = view.content
    begun = {item.attempt for item in content.status.orders if item.verb in ("dump", "save")}
    keep = content.status.committed if content.spec.deletion_policy == "Retain" else None
    for generation in sorted(begun):
        kept = keep is not None and generation == keep.generation
        if not kept and not _is_removed(content, generation):
            return _remove(view, generation, now)
    return Plan((Finalize(content),))


def _deletes(content: SnapshotContent, generation: int) -> list[OrderStatus]:
    return [
        item
        for item in content.status.orders
        if item.verb == "delete" and item.payload["generation"] == generation
    ]


def _is_removed(content: SnapshotContent, generation: int) -> bool:
    return any(fold.succeeded(item) for item in _deletes(content, generation))


def _remove(view: CaptureView, generation: int, now: float) -> Plan:
    """Have one generation removed, by any node: all reach the artifact root. Failures rest."""
    content = view.content
    orders = _deletes(content, generation)
    attempt = fold.retry_attempt(orders, now)
    if attempt is None:
        last = max(orders, key=lambda item: item.attempt)
        if not fold.is_answered(last):
            return _plan(content, content.status, now)
        cause = last.final.failure if last.final else None
        message = cause.message if cause else f"node {last.node} is gone"
        waiting = _deletion_waits(content, "DeleteFailed", message, now)
        return Plan(waiting.writes, fold.retry_at(orders))
    node = _reading_node(view)
    if node is None:
        return _deletion_waits(content, "NoNode", "no node is ready to remove the artifact", now)
    order = ordering.delete(
        content, generation, node, content.status.traceparent, now, attempt=attempt
    )
    return _plan(content, replace(content.status, orders=[*content.status.orders, order]), now)


def _reading_node(view: CaptureView) -> str | None:
    ready = [
        node.metadata.name
        for node in view.nodes
        if is_true(node.status.conditions, "Ready") and not version_gap(node.status.schemas)
    ]
    home = view.content.spec.source.node_name
    return home if home in ready else next(iter(sorted(ready)), None)


def content_name(snapshot_uid: str) -> str:
    """Name the content of a snapshot."""
    return f"snapshotcontent-{snapshot_uid}"[:63]
