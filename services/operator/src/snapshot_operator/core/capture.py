"""Decides for a capture under way: from PENDING to READY or FAILED, by `transitions.CAPTURE`.

Attempt n is set by compare-and-swap with the state that begins it; every order, directory and
manifest carries it. Attempt n+1 exists only when n failed retryably before the worker was frozen
and every part of n has answered.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from msgspec.structs import replace

from snapshot_api.facts import FINISHED, Node, Pod
from snapshot_api.meta import TRACEPARENT, OrderStatus, time_of
from snapshot_api.v1alpha1.content import Committed, SnapshotContent, SnapshotContentStatus
from snapshot_api.v1alpha1.restore import SnapshotRestore
from snapshot_api.views import is_answered
from snapshot_api.well_known import ABORT, CAPTURE_ON_DRAIN, CHECKPOINT_ID
from snapshot_operator.core import backpressure, conditions, fold, ordering, quarantine
from snapshot_operator.core.conditions import Wait
from snapshot_operator.core.interventions import requested
from snapshot_operator.core.plan import Plan, owing_plan
from snapshot_shared.errors import AgentSilent, Failure, HoldDeadline, Superseded
from snapshot_shared.orders import (
    DEVICE_DRIVERS,
    ArtifactRef,
    OnFailure,
    PartResult,
    VectorEntry,
    version_gap,
)
from snapshot_shared.spans import derived_context, derived_trace, parse_traceparent
from snapshot_shared.transitions import CAPTURE, Capture, CaptureEvent
from snapshot_shared.units import sizes

MAX_RETRIES = 3
MAX_BYTES = 2**50
UNDER_WAY = (Capture.PREPARING, Capture.STAGING, Capture.SEALING)
CORDONED = "NodeCordoned"
CONTAINER_FAILED = "CheckpointContainerFailed"
NO_DRIVER = "DriverUnavailable"


class ContentView(NamedTuple):
    """What a decision about a content reads.

    `known` are the nodes with unanswered orders that have a Node object. `nodes` are all nodes,
    where one is to be chosen. `rivals` are unsettled captures of the same container, `parents`
    artifacts with layouts that a save may share with, `readers` the restores that name this
    content, and `gone` the registered readers that have no object any more. `source` is the
    captured pod while the capture needs it.
    """

    content: SnapshotContent
    home: Node | None
    known: frozenset[str] = frozenset()
    nodes: Sequence[Node] = ()
    rivals: Sequence[SnapshotContent] = ()
    parents: Sequence[SnapshotContent] = ()
    readers: Sequence[SnapshotRestore] = ()
    gone: frozenset[str] = frozenset()
    source: Pod | None = None
    is_full: bool = False


def capture_span(content: SnapshotContent, attempt: int) -> str:
    """Return the traceparent of the span over one whole attempt.

    It is derived from the identity, so that any process can begin, extend or end it.
    """
    uid = content.metadata.uid
    context = parse_traceparent(trace_parent(content))
    trace_id = context.trace_id if context else derived_trace(uid)
    return derived_context(trace_id, "capture", uid, str(attempt)).traceparent


def trace_parent(content: SnapshotContent) -> str:
    """Return the span that asked for this content."""
    return content.metadata.annotations.get(TRACEPARENT, "")


def current(content: SnapshotContent, verb: str | None = None) -> list[OrderStatus]:
    """Return the orders of the current attempt, of one verb if it is given."""
    attempt = content.status.attempt
    return [
        item
        for item in content.status.orders
        if item.attempt == attempt and verb in (None, item.verb)
    ]


def is_settled(content: SnapshotContent) -> bool:
    """Whether the capture is over and the worker no longer held for it."""
    return content.status.capture in CAPTURE.terminal() and all(
        is_answered(item) for item in content.status.orders if item.verb not in ("delete", "verify")
    )


def moved(
    content: SnapshotContent, event: CaptureEvent, **changes: object
) -> SnapshotContentStatus:
    """Return the status after an event of the table, with other changes."""
    status = content.status
    return replace(status, capture=CAPTURE.next(status.capture, event), **changes)


def failed(
    content: SnapshotContent, failure: Failure, now: float, on_failure: OnFailure = "Resume"
) -> Plan:
    """End the attempt: tombstone it wherever it may have begun."""
    trace = content.status.traceparent
    orders = [
        *content.status.orders,
        *ordering.abort_capture(content, str(failure), trace, now, on_failure),
    ]
    return owing_plan(
        content, moved(content, CaptureEvent.FAILED, failure=failure, orders=orders), now
    )


def step(view: ContentView, now: float) -> Plan:
    """Return the next step of a capture that is not over."""
    content = view.content
    end = end_of(view, now)
    match content.status.capture:
        case Capture.PENDING if end:
            return given_up(content, end, now)
        case Capture.PENDING:
            return _begin(view, now)
        case Capture.ABORTING:
            return aborting(view, end, now)
        case _ if end:
            return failed(content, end, now, on_failure=_on_failure(view, end))
        case Capture.PREPARING:
            return _preparing(view, now)
        case Capture.STAGING:
            return _staging(content, now)
        case Capture.SEALING:
            return _sealing(content, now)
        case _:
            return Plan()


# Why a capture ends before it is done: the first of these that holds.


def _deleted(view: ContentView, _now: float) -> Failure | None:
    if view.content.metadata.deletion_timestamp is None:
        return None
    return Failure(reason="Deleted", message="the snapshot was deleted during its capture")


def _aborted(view: ContentView, _now: float) -> Failure | None:
    by = requested(view.content, ABORT)
    if not by:
        return None
    return Failure(
        reason="Aborted",
        message=f"the capture was aborted by {by}",
        values={"by": by},
        next_step="delete it, and apply it again when the worker may be captured",
    )


def _too_late(view: ContentView, now: float) -> Failure | None:
    limit = view.content.spec.deadline_seconds
    if now < deadline_of(view.content):
        return None
    return Failure(
        reason="DeadlineExceeded",
        message=f"the capture was not done within deadlineSeconds ({limit})",
        values={"deadlineSeconds": limit},
        next_step="look at what took so long: snapshotctl explain snapshot "
        f"{view.content.spec.snapshot_ref.name}",
    )


def container_failure(pod: Pod | None) -> Failure | None:
    """Return that a container of a pod has failed, for good, while others of it run."""
    if pod is None or pod.status.phase != "Running":
        return None
    ended = [each for each in pod.status.container_statuses if each.state == "terminated"]
    found = next((each for each in ended if each.exit_code), None)
    if found is None:
        return None
    return Failure(
        reason=CONTAINER_FAILED,
        message=f"container {found.name} of pod {pod.metadata.name} ended with exit code "
        f"{found.exit_code}",
        values={"container": found.name, "exit_code": found.exit_code},
        next_step="read its log, correct it and start the pod again",
    )


def _container_failed(view: ContentView, _now: float) -> Failure | None:
    """A pod that lacks a container is not the worker that was to be captured."""
    return container_failure(view.source) if _needs_process(view.content) else None


def _on_failure(view: ContentView, end: Failure) -> OnFailure:
    """Return what becomes of a worker whose capture ends: it goes on.

    One that was started to be captured alone would wait for what never comes.
    """
    is_made = view.source is not None and CHECKPOINT_ID in view.source.metadata.labels
    ends = is_made and view.content.spec.source_policy == "Terminate"
    return "Kill" if ends and end.reason == CONTAINER_FAILED else "Resume"


def _needs_process(content: SnapshotContent) -> bool:
    """Whether the process of the worker is still to be staged."""
    needed = (Capture.PENDING, Capture.PREPARING, Capture.STAGING)
    is_staged = any(fold.succeeded(item) for item in current(content, "dump"))
    return content.status.capture in needed and not is_staged


def _source_ended(view: ContentView, _now: float) -> Failure | None:
    """Without its process there is nothing to dump; once that is staged, the worker may end."""
    content, pod = view.content, view.source
    if not _needs_process(content):
        return None
    source = content.spec.source.pod_ref
    if source is None:
        return None
    if pod is None:
        return Failure(
            reason="SourcePodGone",
            message=f"pod {source.name} with uid {source.uid} is gone",
            next_step="take a snapshot of a pod that runs",
        )
    if pod.status.phase not in FINISHED:
        return None
    is_lost = pod.status.reason == "NodeLost"
    return Failure(
        reason="NodeLost" if is_lost else "SourceExited",
        message=f"pod {source.name} ended ({pod.status.phase}): {pod.status.message}",
        next_step="look at the worker's log, and start it again",
    )


_ENDS: tuple[Callable[[ContentView, float], Failure | None], ...] = (
    _deleted,
    _aborted,
    _container_failed,
    _source_ended,
    _too_late,
)


def end_of(view: ContentView, now: float) -> Failure | None:
    """Return why the capture is to end now, if it is."""
    return next((found for check in _ENDS if (found := check(view, now))), None)


def deadline_of(content: SnapshotContent) -> float:
    """Return when the capture has to be done, in seconds since the epoch."""
    return conditions.seconds(content.metadata.creation_timestamp) + content.spec.deadline_seconds


# Why a capture does not begin yet: the first of these that holds.


def _cordoned(view: ContentView) -> Wait | None:
    if view.home is None or not view.home.spec.unschedulable:
        return None
    if view.source is not None and is_drained(view.source):
        return None
    name = view.home.metadata.name
    return Wait(CORDONED, f"node {name} is cordoned: no capture begins there")


def is_drained(pod: Pod) -> bool:
    """Whether a pod is captured from a cordoned node as well: a drain cordons the node first."""
    return pod.metadata.labels.get(CAPTURE_ON_DRAIN) == "true"


def _no_driver(view: ContentView) -> Wait | None:
    driver, home = view.content.spec.driver, view.home
    # Without any the node has not said yet what it has.
    if home is None or not home.status.drivers or driver in home.status.drivers:
        return None
    name = home.metadata.name
    why = next((each.why for each in home.status.unready if each.driver == driver), None)
    if why is None:
        has = ", ".join(home.status.drivers)
        return Wait(
            NO_DRIVER,
            f"node {name} does not have the driver {driver}, it has {has}. Next: capture with one "
            "of these, or run the pod on a node with it: snapshotctl nodes",
        )
    step = f". Next: {why.next_step}" if why.next_step else ""
    return Wait(NO_DRIVER, f"node {name} cannot use the driver {driver}: {why.message}{step}")


def _behind_another(view: ContentView) -> Wait | None:
    if not _is_queued_behind(view.content, view.rivals):
        return None
    return Wait("WaitingForCapture", "an older capture of the same container is not settled yet")


def _no_room(view: ContentView) -> Wait | None:
    return Wait(backpressure.REASON, backpressure.MESSAGE) if view.is_full else None


def _no_common_version(view: ContentView) -> Wait | None:
    if view.home is None or not (gap := version_gap(view.home.status.schemas)):
        return None
    message = f"{view.home.metadata.name} cannot be ordered anything: {gap}"
    return Wait("UnsupportedVersion", message)


_WAITS: tuple[Callable[[ContentView], Wait | None], ...] = (
    _cordoned,
    _no_driver,
    _behind_another,
    _no_room,
    _no_common_version,
)


def _begin(view: ContentView, now: float) -> Plan:
    content, status = view.content, view.content.status
    if now < (at := fold.rested_at(current(content))):
        # The condition says why there is another attempt.
        return owing_plan(content, status, now, wake_at=min(at, deadline_of(content)))
    if wait := next((found for check in _WAITS if (found := check(view))), None):
        rows = conditions.pending(status.conditions, content, now, wait.reason, wait.message)
        waiting = replace(status, conditions=rows)
        return owing_plan(content, waiting, now, wake_at=deadline_of(content))
    attempt = max([status.attempt, *(item.attempt for item in status.orders)]) + 1
    trace = capture_span(content, attempt)
    left = [item for item in status.orders if not is_answered(item)]
    begun = moved(
        content,
        CaptureEvent.BEGIN,
        attempt=attempt,
        started_at=time_of(now),
        traceparent=trace,
        failure=None,
        vector=[],
        orders=[*left, ordering.prepare(content, view.source, attempt, trace, now)],
        conditions=conditions.pending(
            status.conditions, content, now, "Capturing", f"attempt {attempt} is under way"
        ),
    )
    return owing_plan(content, begun, now, wake_at=deadline_of(content))


def _is_queued_behind(content: SnapshotContent, rivals: Iterable[SnapshotContent]) -> bool:
    """Captures of one container run one after another, oldest content first.

    One that has begun is waited for whatever its age: time stamps have whole seconds.
    """
    mine = (content.metadata.creation_timestamp, content.metadata.name)
    return any(
        other.status.capture is not Capture.PENDING
        or (other.metadata.creation_timestamp, other.metadata.name) < mine
        for other in rivals
        if other.metadata.uid != content.metadata.uid
        and (other.status.capture is not Capture.PENDING or not other.metadata.deletion_timestamp)
    )


def given_up(content: SnapshotContent, failure: Failure, now: float) -> Plan:
    """End a capture of which nothing is under way."""
    rows = conditions.failed(content.status.conditions, content, now, failure)
    ended = moved(content, CaptureEvent.FAILED, failure=failure, conditions=rows)
    return owing_plan(content, ended, now)


def _preparing(view: ContentView, now: float) -> Plan:
    content = view.content
    orders = current(content, "prepare")
    if failure := fold.failure_in(orders, now):
        return failed(content, failure, now)
    final = orders[0].final
    if final is None:
        return owing_plan(content, content.status, now, wake_at=deadline_of(content))
    if failure := _vector_failure(content, [entry.part for entry in final.vector]):
        return failed(content, failure, now)
    status = content.status
    parents = _parents(content, final.vector, view.parents)
    staged = ordering.stage(content, final.vector, parents, status.traceparent, now)
    planned = moved(
        content,
        CaptureEvent.PREPARED,
        vector=final.vector,
        generations=[*status.generations, status.attempt],
        orders=[*status.orders, *staged],
    )
    return owing_plan(content, planned, now, wake_at=deadline_of(content))


def prepared_layouts(content: SnapshotContent) -> list[tuple[str, str]]:
    """Return part and structure hash of each layout, once `prepare` has answered and not before."""
    orders = current(content, "prepare") if content.status.capture is Capture.PREPARING else []
    return [
        (entry.part, entry.layout.structure_hash)
        for item in orders
        if item.final is not None
        for entry in item.final.vector
        if entry.layout is not None
    ]


def _parents(
    content: SnapshotContent, vector: Sequence[VectorEntry], candidates: Sequence[SnapshotContent]
) -> dict[str, ArtifactRef]:
    """Return for each part the artifact that a save may share with: its layout has to be equal.

    That of the same worker or snapshot name comes first, then the newest of the namespace.
    """
    source, name = content.spec.source, content.spec.snapshot_ref.name

    def closeness(other: SnapshotContent) -> tuple[bool, str, str]:
        is_worker = source.pod_ref is not None and other.spec.source.pod_ref == source.pod_ref
        is_kin = is_worker or other.spec.snapshot_ref.name == name
        return is_kin, other.metadata.creation_timestamp, other.metadata.name

    found: dict[str, ArtifactRef] = {}
    for other in sorted(candidates, key=closeness):
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
    source = content.spec.source
    ordinals: Iterable[int] = (device.ordinal for device in source.devices)
    if source.memory_server:
        # It serves devices 0, 1, ...: how many is its own to say.
        ordinals = range(max(len(parts) - 1, 1))
    wanted = ["process", *(f"gpu-{ordinal}" for ordinal in ordinals)]
    if content.spec.driver in DEVICE_DRIVERS:
        # What no memory service has on a device comes with the process.
        wanted = [part for part in wanted if part in parts or part == "process"]
    if sorted(parts) == sorted(wanted):
        return None
    return Failure(
        reason="PlanMismatch",
        message=f"the agent prepared parts {sorted(parts)}, the pod's devices need {wanted}",
        values={"found": sorted(parts), "expected": wanted},
    )


def _staging(content: SnapshotContent, now: float) -> Plan:
    parts = [*current(content, "dump"), *current(content, "save")]
    if failure := fold.failure_in(parts, now):
        return failed(content, failure, now)
    trace = content.status.traceparent
    orders = [*content.status.orders, *_early_release(content, parts, trace, now)]
    results = [item.final.part for item in parts if item.final and item.final.part]
    wake_at = deadline_of(content)
    if len(results) < len(parts):
        return owing_plan(content, replace(content.status, orders=orders), now, wake_at=wake_at)
    orders.append(ordering.seal(content, results, trace, now))
    sealing = moved(content, CaptureEvent.STAGED, orders=orders)
    return owing_plan(content, sealing, now, wake_at=wake_at)


def _early_release(
    content: SnapshotContent, parts: list[OrderStatus], trace: str, now: float
) -> list[OrderStatus]:
    """A worker that goes on may do so once its own part is staged and every save reads."""
    wants_on = content.spec.source_policy == "Resume" and not fold.find(
        content.status.orders, "release"
    )
    is_safe = all(
        fold.succeeded(item) if item.verb == "dump" else item.leased or fold.succeeded(item)
        for item in parts
    )
    return [ordering.release(content, trace, now)] if wants_on and is_safe else []


def _sealing(content: SnapshotContent, now: float) -> Plan:
    orders = current(content, "seal")
    if failure := fold.failure_in(orders, now):
        return failed(content, failure, now)
    final = orders[0].final
    if final is None or final.root_digest is None:
        return owing_plan(content, content.status, now, wake_at=deadline_of(content))
    parts: list[PartResult] = [
        item.final.part
        for item in current(content)
        if item.verb in ("dump", "save") and item.final and item.final.part
    ]
    total = sum(part.bytes for part in parts)
    if total > MAX_BYTES:
        failure = Failure(
            reason="InvalidReport",
            message="the parts have {} together, the limit is {}".format(*sizes(total, MAX_BYTES)),
        )
        return failed(content, failure, now)
    committed = Committed(
        generation=content.status.attempt,
        root_digest=final.root_digest,
        bytes=total,
        parts=sorted(parts, key=lambda part: part.part),
        vector=content.status.vector,
        driver=content.spec.driver,
    )
    rows = conditions.captured(content.status.conditions, content, committed, now)
    status = moved(content, CaptureEvent.SEALED, committed=committed, conditions=rows)
    return owing_plan(content, status, now)


def aborting(view: ContentView, end: Failure | None, now: float) -> Plan:
    """Wait until every part of the attempt has answered, then try again or give up."""
    content = view.content
    status = content.status
    attempt = current(content)
    waiting = [item for item in attempt if not is_answered(item) and not fold.is_late(item, now)]
    if waiting:
        return owing_plan(content, status, now)
    failure = end or status.failure or Failure(reason="Aborted", message="the capture was aborted")
    if end is None and _may_retry(content, attempt, failure):
        message = f"attempt {status.attempt} failed, and its worker goes on: {failure.message}"
        rows = conditions.pending(status.conditions, content, now, "Retrying", message)
        known = max((fold.superseding(item) for item in attempt), default=0)
        again = moved(
            content,
            CaptureEvent.RETRY,
            conditions=rows,
            retries=status.retries + (failure.reason not in fold.OF_A_NODE),
            attempt=max(status.attempt, known),
        )
        return owing_plan(content, again, now)
    rows = conditions.failed(status.conditions, content, now, failure)
    ended = moved(content, CaptureEvent.ABORTED, failure=failure, conditions=rows)
    return owing_plan(content, ended, now)


_LEFT_ALONE = frozenset({HoldDeadline.reason, Superseded.reason, AgentSilent.reason})
"""Why a dump ends whose worker was let go without it: it came too late, or no agent was there."""


def _was_left_alone(dump: OrderStatus) -> bool:
    failure = dump.final.failure if dump.final is not None else None
    return failure is not None and failure.reason in _LEFT_ALONE


def _may_retry(content: SnapshotContent, attempt: Sequence[OrderStatus], failure: Failure) -> bool:
    """Only what failed before the freeze, and has answered in all its parts, is tried again.

    A worker that was frozen would pause once more for an attempt that may fail in the same way. A
    service that was stopped says nothing of the next attempt, so that one is made. An attempt that
    the node knows a higher one of has not begun, whatever else its failure says.
    """
    of_node = failure.reason in fold.OF_A_NODE
    was_frozen = not of_node and any(
        item.verb == "dump" and not _was_left_alone(item) for item in attempt
    )
    # What cleans up after an attempt has a higher number once it was given again.
    number = content.status.attempt
    all_answered = all(is_answered(i) for i in content.status.orders if i.attempt >= number)
    is_old = any(fold.superseding(item) for item in attempt)
    may = failure.retryable or is_old
    is_left = of_node or content.status.retries < MAX_RETRIES
    return may and not was_frozen and all_answered and is_left
