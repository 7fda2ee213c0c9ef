"""Decides for the objects that people write: DynamoCheckpoint, Job and Snapshot."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import NamedTuple

from msgspec.structs import replace

from snapshot_operator.domain import conditions
from snapshot_operator.domain.capture import content_name
from snapshot_operator.domain.plan import (
    FINALIZER,
    NOTHING,
    Create,
    Delete,
    Finalize,
    Plan,
    Write,
    status_plan,
)
from snapshot_operator.domain.pods import FINISHED
from snapshot_shared import identity
from snapshot_shared.errors import Failure
from snapshot_shared.ids import short_hash
from snapshot_shared.objects import (
    KINDS,
    TRACEPARENT,
    AnyObject,
    ContentSource,
    DynamoCheckpoint,
    DynamoCheckpointStatus,
    Job,
    JobSpec,
    ObjectMeta,
    OwnerReference,
    Pod,
    PodSource,
    Snapshot,
    SnapshotContent,
    SnapshotContentSpec,
    SnapshotRef,
    SnapshotSource,
    SnapshotSpec,
    condition,
    is_true,
)


class CheckpointView(NamedTuple):
    """What a decision about a checkpoint looks at."""

    checkpoint: DynamoCheckpoint
    job: Job | None
    pod: Pod | None
    snapshot: Snapshot | None


def _owned_meta(
    owner: AnyObject, name: str, *, namespaced: bool = True, **more: object
) -> ObjectMeta:
    kind = KINDS[type(owner).__name__]
    reference = OwnerReference(
        api_version=kind.api_version,
        kind=kind.name,
        name=owner.metadata.name,
        uid=owner.metadata.uid,
    )
    trace = owner.metadata.annotations.get(TRACEPARENT)
    annotations = {TRACEPARENT: trace} if trace else {}
    return ObjectMeta(
        name=name,
        namespace=owner.metadata.namespace if namespaced else None,
        owner_references=[reference],
        finalizers=[FINALIZER],
        annotations={**annotations, **more.get("annotations", {})},  # type: ignore[dict-item]
        labels=more.get("labels", {}),  # type: ignore[arg-type]
    )


def owned_by(value: AnyObject | None, owner: AnyObject) -> bool:
    """Say whether an object belongs to this very incarnation of its owner."""
    return value is not None and any(
        reference.uid == owner.metadata.uid for reference in value.metadata.owner_references
    )


def identity_hash(checkpoint: DynamoCheckpoint) -> str:
    """Return the id that checkpoints of equal identity share."""
    return identity.identity_hash(checkpoint.spec.identity)


def reconcile_checkpoint(view: CheckpointView, now: float) -> Plan:
    """Give the next step of a DynamoCheckpoint: Job, then Snapshot, then mirror its result."""
    checkpoint = view.checkpoint
    if checkpoint.metadata.deletion_timestamp:
        children = [child for child in (view.snapshot, view.job) if owned_by(child, checkpoint)]
        return _delete_children(checkpoint, children)
    status = checkpoint.status
    if status.phase == "Failed":
        return NOTHING
    if status.phase == "Ready":
        return _checkpoint_captured(view, now)
    base = replace(status, checkpoint_id=identity_hash(checkpoint), phase="Creating")
    if view.job is None:
        if status.job_name:
            return _checkpoint_failed(checkpoint, base, _gone("Job", status.job_name), now)
        named = replace(base, job_name=checkpoint.metadata.name)
        return _checkpoint_status(checkpoint, named, Create(_job(checkpoint)))
    if not owned_by(view.job, checkpoint):
        return _checkpoint_failed(checkpoint, base, _taken("Job", view.job), now)
    return _checkpoint_capture(view, base, now)


def _checkpoint_captured(view: CheckpointView, now: float) -> Plan:
    """Mirror whether what was captured may be used; that it was captured stays true."""
    checkpoint, snapshot = view.checkpoint, view.snapshot
    if snapshot is None or not owned_by(snapshot, checkpoint):
        return NOTHING
    return _checkpoint_mirrors(checkpoint, checkpoint.status, snapshot, now)


def _checkpoint_mirrors(
    checkpoint: DynamoCheckpoint, base: DynamoCheckpointStatus, snapshot: Snapshot, now: float
) -> Plan:
    ready = condition(snapshot.status.conditions, "Ready")
    if ready is None:
        return NOTHING
    rows = conditions.mirrored(checkpoint.status.conditions, checkpoint, now, ready)
    message = "" if ready.status == "True" else ready.message
    return _checkpoint_status(checkpoint, replace(base, conditions=rows, message=message))


def _checkpoint_capture(view: CheckpointView, base: DynamoCheckpointStatus, now: float) -> Plan:
    checkpoint, snapshot = view.checkpoint, view.snapshot
    if snapshot is not None and not owned_by(snapshot, checkpoint):
        return _checkpoint_failed(checkpoint, base, _taken("Snapshot", snapshot), now)
    if snapshot is None:
        return _checkpoint_before_capture(view, base, now)
    bound = snapshot.status.bound_snapshot_content_name or ""
    base = replace(base, snapshot_name=snapshot.metadata.name, content_name=bound)
    found = condition(snapshot.status.conditions, "Failed")
    if found is None:
        return _checkpoint_waits(checkpoint, base, "Capturing", "the worker is being captured", now)
    if found.status == "True":
        failure = Failure(reason=found.reason, message=found.message)
        return _checkpoint_failed(checkpoint, base, failure, now)
    at, size = conditions.timestamp(now), snapshot.status.bytes
    done = replace(base, phase="Ready", created_at=at, bytes=size)
    return _checkpoint_mirrors(checkpoint, done, snapshot, now)


def _checkpoint_before_capture(
    view: CheckpointView, base: DynamoCheckpointStatus, now: float
) -> Plan:
    checkpoint, pod, job = view.checkpoint, view.pod, view.job
    if base.snapshot_name:
        return _checkpoint_failed(checkpoint, base, _gone("Snapshot", base.snapshot_name), now)
    limit = checkpoint.spec.job.active_deadline_seconds
    deadline = seconds(checkpoint.metadata.creation_timestamp) + limit
    if job is not None and is_true(job.status.conditions, "Failed"):
        found = condition(job.status.conditions, "Failed")
        failure = Failure(
            reason=found.reason if found else "JobFailed",
            message=f"the worker failed before it was captured: {found.message if found else ''}",
            next_step="read the worker's log, correct it and apply the checkpoint again",
        )
        return _checkpoint_failed(checkpoint, base, failure, now)
    if now >= deadline:
        failure = Failure(
            reason="DeadlineExceeded",
            message=f"the worker was not ready for a capture within {limit} s",
            values={"activeDeadlineSeconds": limit},
            next_step="look at the worker's log, or raise spec.job.activeDeadlineSeconds",
        )
        jobs = [Delete(job)] if job is not None and not job.metadata.deletion_timestamp else []
        return _checkpoint_failed(checkpoint, base, failure, now, *jobs)
    if pod is None or not is_true(pod.status.conditions, "Ready"):
        reason, message = _pod_wait(pod)
        return _checkpoint_waits(checkpoint, base, reason, message, now, wake_at=deadline)
    named = replace(base, snapshot_name=checkpoint.metadata.name)
    return _checkpoint_status(checkpoint, named, Create(_snapshot(checkpoint, pod)))


def _pod_wait(pod: Pod | None) -> tuple[str, str]:
    if pod is None:
        return "PodPending", "the pod is being created"
    scheduled = condition(pod.status.conditions, "PodScheduled")
    if scheduled is not None and scheduled.status == "False":
        return scheduled.reason, scheduled.message
    return "WorkerStarting", "the worker is not ready for a snapshot yet"


def seconds(stamp: str) -> float:
    """Read a time stamp as seconds since the epoch; what is none is never reached."""
    try:
        return datetime.fromisoformat(stamp).timestamp()
    except ValueError:
        return float("inf")


def _gone(kind: str, name: str) -> Failure:
    return Failure(
        reason=f"{kind}Deleted",
        message=f"{kind} {name} was deleted before the capture was done",
        next_step="delete the checkpoint and apply it again",
    )


def _taken(kind: str, value: AnyObject) -> Failure:
    return Failure(
        reason=f"{kind}NameConflict",
        message=f"{kind} {value.metadata.name} exists and belongs to something else",
        next_step="rename the checkpoint or delete the other object",
    )


def _checkpoint_waits(
    checkpoint: DynamoCheckpoint,
    base: DynamoCheckpointStatus,
    reason: str,
    message: str,
    now: float,
    *,
    wake_at: float | None = None,
) -> Plan:
    rows = conditions.pending(base.conditions, checkpoint, now, reason, message)
    return _checkpoint_status(
        checkpoint, replace(base, conditions=rows, message=message), wake_at=wake_at
    )


def _checkpoint_failed(
    checkpoint: DynamoCheckpoint,
    base: DynamoCheckpointStatus,
    failure: Failure,
    now: float,
    *before: Write,
) -> Plan:
    rows = conditions.failed(base.conditions, checkpoint, now, failure)
    status = replace(base, phase="Failed", message=failure.message, conditions=rows)
    return _checkpoint_status(checkpoint, status, *before)


def _checkpoint_status(
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
        metadata=_owned_meta(checkpoint, checkpoint.metadata.name),
        spec=JobSpec(template=spec.pod_template_spec, active_deadline_seconds=limit),
    )


def _snapshot(checkpoint: DynamoCheckpoint, pod: Pod) -> Snapshot:
    spec = checkpoint.spec.job
    source = PodSource(
        name=pod.metadata.name, uid=pod.metadata.uid, containers=[spec.target_container_name]
    )
    return Snapshot(
        metadata=_owned_meta(checkpoint, checkpoint.metadata.name),
        spec=SnapshotSpec(
            source=SnapshotSource(pod_ref=source),
            source_policy=spec.source_policy,
            deletion_policy=checkpoint.spec.deletion_policy,
        ),
    )


def _delete_children(owner: AnyObject, children: Sequence[AnyObject | None]) -> Plan:
    """Delete what is left of an owner's children; when none is left, let the owner go."""
    left = [child for child in children if child is not None]
    if not left:
        return Plan((Finalize(owner),))
    return Plan(tuple(Delete(child) for child in left if not child.metadata.deletion_timestamp))


def pod_name(job: Job) -> str:
    """Name the one pod of a Job."""
    suffix = short_hash("pod", job.metadata.uid, length=5)
    return f"{job.metadata.name[:57]}-{suffix}"


def reconcile_job(job: Job, pod: Pod | None, now: float) -> Plan:
    """Give the next step of a Job: its pod, then mirror how it ends."""
    if job.metadata.deletion_timestamp:
        return _delete_children(job, [pod if owned_by(pod, job) else None])
    status = job.status
    if is_true(status.conditions, "Complete") or is_true(status.conditions, "Failed"):
        return NOTHING
    if pod is None:
        if status.pod_name:
            return _job_ended(job, "Failed", "PodDeleted", f"pod {status.pod_name} is gone", now)
        template = job.spec.template
        new = Pod(
            metadata=_owned_meta(
                job,
                pod_name(job),
                labels={
                    **template.metadata.labels,
                    "batch.kubernetes.io/job-name": job.metadata.name,
                },
                annotations=template.metadata.annotations,
            ),
            spec=template.spec,
        )
        named = replace(status, pod_name=new.metadata.name, active=1)
        return status_plan(job, replace(job, status=named), Create(new))
    return _job_mirrors(job, pod, now)


def _job_mirrors(job: Job, pod: Pod, now: float) -> Plan:
    if pod.status.phase == "Succeeded":
        return _job_ended(job, "Complete", "Completed", "", now)
    if pod.status.phase == "Failed":
        return _job_ended(job, "Failed", pod.status.reason or "PodFailed", pod.status.message, now)
    limit = job.spec.active_deadline_seconds
    wake_at = None
    if limit is not None:
        wake_at = seconds(job.metadata.creation_timestamp) + limit
        if now >= wake_at:
            message = f"active for longer than activeDeadlineSeconds ({limit})"
            before = [] if pod.metadata.deletion_timestamp else [Delete(pod)]
            return _job_ended(job, "Failed", "DeadlineExceeded", message, now, *before)
    is_ready = int(is_true(pod.status.conditions, "Ready"))
    mirrored = replace(job.status, pod_name=pod.metadata.name, active=1, ready=is_ready)
    return status_plan(job, replace(job, status=mirrored), wake_at=wake_at)


def _job_ended(job: Job, type_: str, reason: str, message: str, now: float, *before: Write) -> Plan:
    done = type_ == "Complete"
    rows = conditions.with_conditions(
        job.status.conditions, job, now, (type_, True, reason, message)
    )
    status = replace(
        job.status, active=0, ready=0, succeeded=int(done), failed=int(not done), conditions=rows
    )
    return status_plan(job, replace(job, status=status), *before)


def reconcile_snapshot(
    snapshot: Snapshot, pod: Pod | None, content: SnapshotContent | None, now: float
) -> Plan:
    """Give the next step of a Snapshot: bind it to a content, then mirror that."""
    if snapshot.metadata.deletion_timestamp:
        return _delete_children(snapshot, [content if owned_by(content, snapshot) else None])
    if is_true(snapshot.status.conditions, "Failed"):
        return NOTHING
    if content is not None:
        return _mirror(snapshot, content, now)
    if snapshot.status.bound_snapshot_content_name:
        failure = _gone("SnapshotContent", snapshot.status.bound_snapshot_content_name)
        return _snapshot_failed(snapshot, failure, now)
    return _bind(snapshot, pod, now)


def _bind(snapshot: Snapshot, pod: Pod | None, now: float) -> Plan:
    source = snapshot.spec.source.pod_ref
    if failure := _source_failure(snapshot, pod):
        return _snapshot_failed(snapshot, failure, now)
    if pod is None or not is_true(pod.status.conditions, "Ready"):
        message = f"pod {source.name} is not ready for a snapshot yet"
        rows = conditions.pending(
            snapshot.status.conditions, snapshot, now, "WaitingForPod", message
        )
        status = replace(snapshot.status, conditions=rows)
        return status_plan(snapshot, replace(snapshot, status=status))
    name = content_name(snapshot.metadata.uid)
    content = SnapshotContent(
        metadata=_owned_meta(snapshot, name, namespaced=False),
        spec=SnapshotContentSpec(
            snapshot_ref=SnapshotRef(
                namespace=snapshot.metadata.namespace or "default",
                name=snapshot.metadata.name,
                uid=snapshot.metadata.uid,
            ),
            source=ContentSource(
                pod_ref=replace(source, uid=pod.metadata.uid),
                namespace=snapshot.metadata.namespace or "default",
                node_name=pod.status.node_name,
                devices=pod.status.devices,
            ),
            source_policy=snapshot.spec.source_policy,
            deletion_policy=snapshot.spec.deletion_policy,
        ),
    )
    status = replace(snapshot.status, bound_snapshot_content_name=name)
    return status_plan(snapshot, replace(snapshot, status=status), Create(content))


def _source_failure(snapshot: Snapshot, pod: Pod | None) -> Failure | None:
    """Check that the pod is the one that was meant and that it still lives."""
    source = snapshot.spec.source.pod_ref
    if pod is None:
        return Failure(
            reason="SourcePodNotFound",
            message=f"no pod {source.name} in namespace {snapshot.metadata.namespace}",
            next_step="name a running pod in spec.source.podRef.name",
        )
    if source.uid is not None and source.uid != pod.metadata.uid:
        return Failure(
            reason="StalePodReference",
            message=f"pod {source.name} has uid {pod.metadata.uid}, the snapshot names "
            f"{source.uid}",
            values={"expected": source.uid, "found": pod.metadata.uid},
            next_step="take a snapshot of the pod that runs now",
        )
    if pod.status.phase in FINISHED or pod.metadata.deletion_timestamp:
        return Failure(
            reason="SourcePodGone",
            message=f"pod {source.name} has ended ({pod.status.phase})",
            next_step="start the worker again",
        )
    names = [container.name for container in pod.spec.containers]
    if source.containers[0] not in names:
        return Failure(
            reason="InvalidTargetContainer",
            message=f"pod {source.name} has no container {source.containers[0]} (found "
            f"{', '.join(names)})",
            next_step="name one of the pod's containers",
        )
    return None


def _mirror(snapshot: Snapshot, content: SnapshotContent, now: float) -> Plan:
    if not owned_by(content, snapshot):
        return _snapshot_failed(snapshot, _taken("SnapshotContent", content), now)
    status = snapshot.status
    found = condition(content.status.conditions, "Ready")
    if is_true(content.status.conditions, "Failed") and content.status.failure is not None:
        return _snapshot_failed(snapshot, content.status.failure, now)
    committed = content.status.committed
    if found is not None and committed is not None:
        rows = conditions.mirrored(status.conditions, snapshot, now, found)
        status = replace(status, conditions=rows, bytes=committed.bytes)
    elif found is not None:
        rows = conditions.pending(status.conditions, snapshot, now, found.reason, found.message)
        status = replace(status, conditions=rows)
    status = replace(status, bound_snapshot_content_name=content.metadata.name)
    return status_plan(snapshot, replace(snapshot, status=status))


def _snapshot_failed(snapshot: Snapshot, failure: Failure, now: float) -> Plan:
    rows = conditions.failed(snapshot.status.conditions, snapshot, now, failure)
    return status_plan(
        snapshot, replace(snapshot, status=replace(snapshot.status, conditions=rows))
    )
