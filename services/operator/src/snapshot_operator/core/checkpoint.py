"""Decides for one DynamoCheckpoint: its Job, then its Snapshot, then what became of that."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from msgspec.structs import replace

from snapshot_operator.core import conditions
from snapshot_operator.core.owning import child_meta, delete_children, gone, owned_by, taken
from snapshot_operator.core.plan import (
    NOTHING,
    Adopt,
    Create,
    Delete,
    Plan,
    Reader,
    Write,
    is_adopted,
    status_plan,
)
from snapshot_shared.errors import Failure
from snapshot_shared.identity import identity_hash as hash_of
from snapshot_shared.objects import (
    DynamoCheckpoint,
    DynamoCheckpointStatus,
    Job,
    JobSpec,
    Pod,
    PodSource,
    Snapshot,
    SnapshotSource,
    SnapshotSpec,
    condition,
    is_true,
)


class CheckpointView(NamedTuple):
    """What a decision about a checkpoint reads. `pod` is the last pod of its Job."""

    checkpoint: DynamoCheckpoint
    job: Job | None
    pod: Pod | None
    snapshot: Snapshot | None


def gather(reader: Reader, checkpoint: DynamoCheckpoint) -> CheckpointView:
    """Read what a decision about a checkpoint depends on."""
    space, name = checkpoint.metadata.namespace, checkpoint.metadata.name
    snapshot = reader.get("Snapshot", space, name)
    is_over = checkpoint.status.phase in ("Ready", "Failed")
    if is_over and not checkpoint.metadata.deletion_timestamp:
        job, pod = None, None
    else:
        job = reader.get("Job", space, name)
        pod = _pod_of(reader, job) if isinstance(job, Job) and snapshot is None else None
    return CheckpointView(
        checkpoint,
        job if isinstance(job, Job) else None,
        pod,
        snapshot if isinstance(snapshot, Snapshot) else None,
    )


def _pod_of(reader: Reader, job: Job) -> Pod | None:
    """Return the pod that a Job has started last: of those that failed there may be several."""
    pods = [
        found
        for found in reader.by_index("pods-by-owner", job.metadata.uid)
        if isinstance(found, Pod)
    ]
    return max(
        pods,
        key=lambda pod: (pod.status.phase != "Failed", pod.metadata.creation_timestamp),
        default=None,
    )


def identity_hash(checkpoint: DynamoCheckpoint) -> str:
    """Return the id that equal identities share."""
    return hash_of(checkpoint.spec.identity)


def reconcile(view: CheckpointView, now: float) -> Plan:
    """Return the next step of a checkpoint. Same input, same plan."""
    checkpoint = view.checkpoint
    if checkpoint.metadata.deletion_timestamp:
        children = [child for child in (view.snapshot, view.job) if owned_by(child, checkpoint)]
        return delete_children(checkpoint, children)
    if not is_adopted(checkpoint):
        return Plan((Adopt(checkpoint),))
    status = checkpoint.status
    if status.phase == "Failed":
        return NOTHING
    if status.phase == "Ready":
        return _captured(view, now)
    base = replace(status, checkpoint_id=identity_hash(checkpoint), phase="Creating")
    if view.snapshot is not None:
        return _capturing(view, view.snapshot, base, now)
    return _before_capture(view, base, now)


def _captured(view: CheckpointView, now: float) -> Plan:
    """Mirror whether what was captured may be used; that it was captured stays true."""
    checkpoint, snapshot = view.checkpoint, view.snapshot
    if snapshot is None or not owned_by(snapshot, checkpoint):
        return NOTHING
    return _mirrors(checkpoint, checkpoint.status, snapshot, now)


def _mirrors(
    checkpoint: DynamoCheckpoint, base: DynamoCheckpointStatus, snapshot: Snapshot, now: float
) -> Plan:
    ready = condition(snapshot.status.conditions, "Ready")
    if ready is None:
        return NOTHING
    rows = conditions.mirrored(checkpoint.status.conditions, checkpoint, now, ready)
    message = "" if ready.status == "True" else ready.message
    return _status(checkpoint, replace(base, conditions=rows, message=message))


def _capturing(
    view: CheckpointView, snapshot: Snapshot, base: DynamoCheckpointStatus, now: float
) -> Plan:
    checkpoint = view.checkpoint
    if not owned_by(snapshot, checkpoint):
        return _failed(checkpoint, base, taken("Snapshot", snapshot), now)
    bound = snapshot.status.bound_snapshot_content_name or ""
    base = replace(base, snapshot_name=snapshot.metadata.name, content_name=bound)
    found = condition(snapshot.status.conditions, "Failed")
    if found is None:
        return _waits(checkpoint, base, "Capturing", "the worker is being captured", now)
    if found.status == "True":
        failure = Failure(reason=found.reason, message=found.message)
        return _failed(checkpoint, base, failure, now)
    at, size = conditions.timestamp(now), snapshot.status.bytes
    done = replace(base, phase="Ready", created_at=at, bytes=size)
    return _mirrors(checkpoint, done, snapshot, now)


def deadline_of(checkpoint: DynamoCheckpoint) -> float:
    """Return when the artifact has to exist, in seconds since the epoch."""
    created = conditions.seconds(checkpoint.metadata.creation_timestamp)
    return created + checkpoint.spec.job.active_deadline_seconds


# Why a checkpoint fails before its capture begins: the first of these that holds.


def _snapshot_gone(view: CheckpointView, _now: float) -> Failure | None:
    name = view.checkpoint.status.snapshot_name
    return gone("Snapshot", name) if name else None


def _job_gone(view: CheckpointView, _now: float) -> Failure | None:
    name = view.checkpoint.status.job_name
    return gone("Job", name) if name and view.job is None else None


def _job_taken(view: CheckpointView, _now: float) -> Failure | None:
    if view.job is None or owned_by(view.job, view.checkpoint):
        return None
    return taken("Job", view.job)


def _job_failed(view: CheckpointView, _now: float) -> Failure | None:
    found = condition(view.job.status.conditions, "Failed") if view.job is not None else None
    if found is None or found.status != "True":
        return None
    return Failure(
        reason=found.reason,
        message=f"the worker failed before it was captured: {found.message}",
        next_step="read the worker's log, correct it and apply the checkpoint again",
    )


def _too_late(view: CheckpointView, now: float) -> Failure | None:
    if now < deadline_of(view.checkpoint):
        return None
    limit = view.checkpoint.spec.job.active_deadline_seconds
    return Failure(
        reason="DeadlineExceeded",
        message=f"the worker was not ready for a capture within {limit} s",
        values={"activeDeadlineSeconds": limit},
        next_step="look at the worker's log, or raise spec.job.activeDeadlineSeconds",
    )


_ENDS: tuple[Callable[[CheckpointView, float], Failure | None], ...] = (
    _snapshot_gone,
    _job_gone,
    _job_taken,
    _job_failed,
    _too_late,
)


def _before_capture(view: CheckpointView, base: DynamoCheckpointStatus, now: float) -> Plan:
    checkpoint, job, pod = view.checkpoint, view.job, view.pod
    if failure := next((found for check in _ENDS if (found := check(view, now))), None):
        is_ours = job is not None and owned_by(job, checkpoint)
        going = [Delete(job)] if job and is_ours and not job.metadata.deletion_timestamp else []
        is_late = failure.reason == "DeadlineExceeded"
        return _failed(checkpoint, base, failure, now, *(going if is_late else []))
    if job is None:
        named = replace(base, job_name=checkpoint.metadata.name)
        return _status(checkpoint, named, Create(_job(checkpoint)))
    if pod is None or not is_true(pod.status.conditions, "Ready"):
        reason, message = _pod_wait(pod)
        at = deadline_of(checkpoint)
        return _waits(checkpoint, base, reason, message, now, wake_at=at)
    named = replace(base, snapshot_name=checkpoint.metadata.name)
    return _status(checkpoint, named, Create(_snapshot(checkpoint, pod, now)))


def _pod_wait(pod: Pod | None) -> tuple[str, str]:
    if pod is None:
        return "PodPending", "the pod is being created"
    if pod.status.phase == "Unknown":
        return "NodeSilent", pod.status.message
    scheduled = condition(pod.status.conditions, "PodScheduled")
    if scheduled is not None and scheduled.status == "False":
        return scheduled.reason, scheduled.message
    return "WorkerStarting", "the worker is not ready for a snapshot yet"


def _waits(
    checkpoint: DynamoCheckpoint,
    base: DynamoCheckpointStatus,
    reason: str,
    message: str,
    now: float,
    *,
    wake_at: float | None = None,
) -> Plan:
    rows = conditions.pending(base.conditions, checkpoint, now, reason, message)
    waiting = replace(base, conditions=rows, message=message)
    return _status(checkpoint, waiting, wake_at=wake_at)


def _failed(
    checkpoint: DynamoCheckpoint,
    base: DynamoCheckpointStatus,
    failure: Failure,
    now: float,
    *before: Write,
) -> Plan:
    rows = conditions.failed(base.conditions, checkpoint, now, failure)
    status = replace(base, phase="Failed", message=failure.message, conditions=rows)
    return _status(checkpoint, status, *before)


def _status(
    checkpoint: DynamoCheckpoint,
    status: DynamoCheckpointStatus,
    *before: Write,
    wake_at: float | None = None,
) -> Plan:
    return status_plan(checkpoint, replace(checkpoint, status=status), *before, wake_at=wake_at)


def _job(checkpoint: DynamoCheckpoint) -> Job:
    spec = checkpoint.spec.job
    limit = None if spec.source_policy == "Resume" else spec.active_deadline_seconds
    return Job(
        metadata=child_meta(checkpoint, checkpoint.metadata.name),
        spec=JobSpec(
            template=spec.pod_template_spec,
            active_deadline_seconds=limit,
            backoff_limit=spec.backoff_limit,
        ),
    )


def _snapshot(checkpoint: DynamoCheckpoint, pod: Pod, now: float) -> Snapshot:
    """Return the snapshot of the worker; what is left of the checkpoint's time is its own."""
    spec = checkpoint.spec.job
    source = PodSource(
        name=pod.metadata.name, uid=pod.metadata.uid, containers=[spec.target_container_name]
    )
    return Snapshot(
        metadata=child_meta(checkpoint, checkpoint.metadata.name, is_ours=True),
        spec=SnapshotSpec(
            source=SnapshotSource(pod_ref=source),
            source_policy=spec.source_policy,
            deletion_policy=checkpoint.spec.deletion_policy,
            deadline_seconds=max(1, int(deadline_of(checkpoint) - now)),
        ),
    )
