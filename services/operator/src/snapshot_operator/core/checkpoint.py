"""Decides for one DynamoCheckpoint: its Job, then its Snapshot, then what became of that.

Or, where another one of its identity captures, what became of the capture of that (`sharing`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from msgspec.structs import replace

from snapshot_api.facts import Job, JobSpec, Pod
from snapshot_api.meta import condition, is_true
from snapshot_api.v1alpha1.checkpoint import DynamoCheckpoint, DynamoCheckpointStatus
from snapshot_api.v1alpha1.content import SnapshotContent
from snapshot_api.v1alpha1.snapshot import PodSource, Snapshot, SnapshotSource, SnapshotSpec
from snapshot_api.well_known import CAPTURE_DRIVER, CHECKPOINT_ID
from snapshot_operator.core import conditions, nodes
from snapshot_operator.core.capture import CONTAINER_FAILED, container_failure
from snapshot_operator.core.conditions import REFUSED
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
from snapshot_operator.core.sharing import (
    artifact_of,
    conflict,
    has_begun,
    identity_hash,
    owner_for,
)
from snapshot_shared.errors import Failure
from snapshot_shared.ids import MAX_LABEL, short_hash

READY_FILE = "ready-for-snapshot"
"""The file by which a worker says that it may be captured, in its control directory."""

SLOW_S = 300
"""How long a worker may run before its checkpoint names the file that is waited for."""


class CheckpointView(NamedTuple):
    """What a decision about a checkpoint reads. `pod` is the last pod of its Job.

    `no_agent` says why no agent can capture the pod where it is or will be, if none can.
    `owner` is the other checkpoint that captures for this one, if one does, and `shared` the
    artifact that this one shares or may share: it is there and stays.
    """

    checkpoint: DynamoCheckpoint
    job: Job | None = None
    pod: Pod | None = None
    no_agent: str = ""
    snapshot: Snapshot | None = None
    owner: DynamoCheckpoint | None = None
    shared: SnapshotContent | None = None


def gather(reader: Reader, checkpoint: DynamoCheckpoint) -> CheckpointView:
    """Read what a decision about a checkpoint depends on."""
    space, name = checkpoint.metadata.namespace, checkpoint.metadata.name
    is_going, status = bool(checkpoint.metadata.deletion_timestamp), checkpoint.status
    if status.shares and not is_going and (shared := artifact_of(reader, checkpoint)):
        return CheckpointView(checkpoint, shared=shared)
    snapshot = reader.get("Snapshot", space, name)
    view = CheckpointView(checkpoint, snapshot=snapshot if isinstance(snapshot, Snapshot) else None)
    if _is_over(status) and not is_going:
        return view
    job = reader.get("Job", space, job_name(checkpoint))
    view = view._replace(job=job if isinstance(job, Job) else None)
    return view if is_going or view.snapshot is not None else _before_snapshot(reader, view)


def _is_over(status: DynamoCheckpointStatus) -> bool:
    return status.phase == "Failed" or (status.phase == "Ready" and not status.shares)


def _before_snapshot(reader: Reader, view: CheckpointView) -> CheckpointView:
    owner = owner_for(reader, view.checkpoint)
    if owner is not None:
        return view._replace(owner=owner, shared=artifact_of(reader, owner))
    if view.job is None:
        return view
    pod = _pod_of(reader, view.job)
    return view._replace(pod=pod, no_agent=nodes.without_agent(reader, pod))


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


def reconcile(view: CheckpointView, now: float) -> Plan:
    """Return the next step of a checkpoint. Same input, same plan."""
    checkpoint = view.checkpoint
    if checkpoint.metadata.deletion_timestamp:
        children = [child for child in (view.snapshot, view.job) if owned_by(child, checkpoint)]
        return delete_children(checkpoint, children)
    if not is_adopted(checkpoint):
        return Plan((Adopt(checkpoint),))
    if _is_over(checkpoint.status):
        return _captured(view, now)
    if view.shared is not None and view.owner is None:
        return _mirrors(checkpoint, checkpoint.status, view.shared, now)
    base = _undecided(checkpoint)
    if view.snapshot is not None:
        return _capturing(view, view.snapshot, base, now)
    if view.owner is not None:
        return _sharing(view, view.owner, base, now)
    return _before_capture(view, base, now)


def _undecided(checkpoint: DynamoCheckpoint) -> DynamoCheckpointStatus:
    """Return the status of a checkpoint without what it may have shared."""
    base = replace(checkpoint.status, checkpoint_id=identity_hash(checkpoint), phase="Creating")
    if not base.shares:
        return base
    return replace(base, shares="", snapshot_name="", content_name="", created_at="", bytes=0)


def _captured(view: CheckpointView, now: float) -> Plan:
    """Mirror whether what was captured may be used, until it is gone for good.

    That it was captured stays true as long as its artifact is there.
    """
    checkpoint, snapshot, status = view.checkpoint, view.snapshot, view.checkpoint.status
    if status.phase == "Failed" or snapshot is None or not owned_by(snapshot, checkpoint):
        return NOTHING
    ended = condition(snapshot.status.conditions, "Failed")
    if ended is not None and ended.status == "True":
        failure = Failure(reason=ended.reason, message=ended.message)
        return _failed(checkpoint, status, failure, now)
    return _mirrors(checkpoint, status, snapshot, now)


def _mirrors(
    checkpoint: DynamoCheckpoint,
    base: DynamoCheckpointStatus,
    captured: Snapshot | SnapshotContent,
    now: float,
) -> Plan:
    ready = condition(captured.status.conditions, "Ready")
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
        failure = taken("Snapshot", snapshot)
        return _failed(checkpoint, base, failure, now)._replace(relies_on=(snapshot,))
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


def _sharing(
    view: CheckpointView, owner: DynamoCheckpoint, base: DynamoCheckpointStatus, now: float
) -> Plan:
    """Share the artifact of the owner, wait for it, or say why that cannot be."""
    checkpoint, job, lent = view.checkpoint, view.job, owner.status
    message = f"checkpoint {owner.metadata.name} of the same identity is being captured"
    if has_begun(checkpoint) or _is_running(job, checkpoint):
        # Both began before they saw each other. The status is first: a Job that is deleted while
        # the status names it counts as failed.
        given_up = replace(base, job_name="", snapshot_name="", content_name="")
        plan = _waits(checkpoint, given_up, "SharesIdentity", message, now)
        ending = (Delete(job),) if job is not None and _is_running(job, checkpoint) else ()
        return Plan((*plan.writes, *ending), relies_on=(owner,))
    if failure := conflict(checkpoint, owner):
        return _failed(checkpoint, base, failure, now)._replace(relies_on=(owner,))
    if view.shared is None:
        return _waits(checkpoint, base, "SharesIdentity", message, now)
    shares = replace(
        base,
        phase="Ready",
        shares=lent.shares or owner.metadata.name,
        snapshot_name=lent.snapshot_name,
        content_name=lent.content_name,
        created_at=lent.created_at,
        bytes=lent.bytes,
    )
    return _mirrors(checkpoint, shares, view.shared, now)


def _is_running(job: Job | None, checkpoint: DynamoCheckpoint) -> bool:
    return job is not None and owned_by(job, checkpoint) and not job.metadata.deletion_timestamp


def deadline_of(checkpoint: DynamoCheckpoint, job: Job) -> float:
    """Return when a worker has to have been captured, in seconds since the epoch.

    It counts from the creation of its Job: a checkpoint may have shared an artifact before.
    """
    created = conditions.seconds(job.metadata.creation_timestamp)
    return created + checkpoint.spec.job.active_deadline_seconds


# Why a checkpoint fails before its capture begins: the first of these that holds.


def _snapshot_gone(view: CheckpointView, _now: float) -> Failure | None:
    status = view.checkpoint.status
    is_own = status.snapshot_name and not status.shares
    return gone("Snapshot", status.snapshot_name) if is_own else None


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


def _container_failed(view: CheckpointView, _now: float) -> Failure | None:
    """A pod that lacks a container never gets ready, and its Job waits for the others."""
    return container_failure(view.pod)


def _too_late(view: CheckpointView, now: float) -> Failure | None:
    if view.job is None or now < deadline_of(view.checkpoint, view.job):
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
    _container_failed,
    _too_late,
)


def _before_capture(view: CheckpointView, base: DynamoCheckpointStatus, now: float) -> Plan:
    checkpoint, job, pod = view.checkpoint, view.job, view.pod
    if job is not None and not base.job_name and owned_by(job, checkpoint):
        if job.metadata.deletion_timestamp:
            message = "the worker that was given up for an older checkpoint is being ended"
            return _waits(checkpoint, base, "WorkerEnding", message, now)
        base = replace(base, job_name=job.metadata.name)
    if failure := next((found for check in _ENDS if (found := check(view, now))), None):
        going = [Delete(job)] if job is not None and _is_running(job, checkpoint) else []
        is_stuck = failure.reason in ("DeadlineExceeded", CONTAINER_FAILED)
        plan = _failed(checkpoint, base, failure, now, *(going if is_stuck else []))
        if job is not None and not owned_by(job, checkpoint):
            return plan._replace(relies_on=(job,))
        return plan
    if job is None:
        named = replace(base, job_name=job_name(checkpoint))
        made = Create(
            _job(checkpoint),
            refused=lambda found: _refused(checkpoint, base, found, now),
            waits=lambda found: _not_taken(checkpoint, base, found, now),
        )
        return _status(checkpoint, named, made)
    if pod is None or view.no_agent or not is_true(pod.status.conditions, "Ready"):
        at = deadline_of(checkpoint, job)
        reason, message, again_at = _pod_wait(view, now)
        return _waits(checkpoint, base, reason, message, now, wake_at=min(at, again_at))
    named = replace(base, snapshot_name=checkpoint.metadata.name)
    made = Create(
        _snapshot(checkpoint, job, pod, now),
        waits=lambda found: _not_taken(checkpoint, base, found, now),
    )
    return _status(checkpoint, named, made)


class Stuck(NamedTuple):
    """Why a container does not start: as the kubelet says it, and what to do."""

    words: tuple[str, ...]
    next_step: str


STUCK = {
    "PodTemplateInvalid": Stuck(
        (
            "CreateContainerConfigError",
            "CreateContainerError",
            "InvalidImageName",
            "RunContainerError",
        ),
        "make what it names, or correct spec.job.podTemplateSpec of the checkpoint: delete it "
        "and apply it again",
    ),
    # The kubelet goes from one to the other and back.
    "ImagePullBackOff": Stuck(
        ("ErrImagePull", "ImagePullBackOff"),
        "see that the nodes can pull the image, or correct it in spec.job.podTemplateSpec: "
        "delete the checkpoint and apply it again",
    ),
    "CrashLoopBackOff": Stuck(
        ("CrashLoopBackOff",),
        "read the container's log: kubectl logs POD --container NAME --previous",
    ),
}
"""Why a pod of a cluster does not start its containers, by the reason that a checkpoint gives."""


def _pod_wait(view: CheckpointView, now: float) -> tuple[str, str, float]:
    """Return what is waited for, why, and when that will be said in another way."""
    pod, never = view.pod, float("inf")
    if pod is None:
        return "PodPending", "the pod is being created", never
    if pod.status.phase == "Unknown":
        return "NodeSilent", pod.status.message, never
    if view.no_agent:
        return "NoAgentOnNode", view.no_agent, never
    scheduled = condition(pod.status.conditions, "PodScheduled")
    if scheduled is not None and scheduled.status == "False":
        return scheduled.reason, scheduled.message, never
    if stuck := STUCK.get(pod.status.reason):
        return pod.status.reason, f"{pod.status.message}. Next: {stuck.next_step}", never
    target = view.checkpoint.spec.job.target_container_name
    started = (c.started_at for c in pod.status.container_statuses if c.name == target)
    late_at = conditions.seconds(next(started, "")) + SLOW_S
    if now < late_at:
        return "WorkerStarting", "the worker is not ready for a snapshot yet", late_at
    message = (
        f"container {target} of pod {pod.metadata.name} has run for {SLOW_S // 60} minutes and "
        f"has not written {READY_FILE}. Next: see in its log what it does, and that it calls "
        "Worker.ready() once its weights are loaded; without snapback_client it writes that file "
        "into $SNAPSHOT_CONTROL_DIR"
    )
    return "WorkerNotReady", message, never


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


def _refused(
    checkpoint: DynamoCheckpoint, base: DynamoCheckpointStatus, found: Failure, now: float
) -> Plan:
    """End a checkpoint whose Job cannot be made of its template."""
    failure = replace(
        found,
        reason="PodTemplateInvalid" if found.reason == "InvalidManifest" else found.reason,
        next_step=found.next_step or "correct spec.job.podTemplateSpec and apply it again",
    )
    return _failed(checkpoint, base, failure, now)


def _not_taken(
    checkpoint: DynamoCheckpoint, base: DynamoCheckpointStatus, found: Failure, now: float
) -> Plan:
    """Say why an object of a checkpoint cannot be made now; the condition is as old as that.

    It is tried again for as long as its worker could have run, and once more after that.
    """
    rows = [row for row in base.conditions if row.type != "Ready" or row.reason == REFUSED]
    first, limit = condition(rows, "Ready"), checkpoint.spec.job.active_deadline_seconds
    if first is not None and now >= conditions.seconds(first.last_transition_time) + limit:
        failure = Failure(
            reason="DeadlineExceeded",
            message=f"the worker could not be started within {limit} s: {found.message}",
            values={"activeDeadlineSeconds": limit},
            next_step="see to what the message says, delete the checkpoint and apply it again",
        )
        return _failed(checkpoint, base, failure, now)
    return _waits(checkpoint, replace(base, conditions=rows), REFUSED, found.message, now)


def _status(
    checkpoint: DynamoCheckpoint,
    status: DynamoCheckpointStatus,
    *before: Write,
    wake_at: float | None = None,
) -> Plan:
    return status_plan(checkpoint, replace(checkpoint, status=status), *before, wake_at=wake_at)


def job_name(checkpoint: DynamoCheckpoint) -> str:
    """Return the name of the Job of a checkpoint: the value of a label, too, so of 63 at most."""
    name = checkpoint.metadata.name
    if len(name) <= MAX_LABEL:
        return name
    suffix = short_hash("job", name)
    return f"{name[: MAX_LABEL - 1 - len(suffix)].rstrip('-.')}-{suffix}"


def _job(checkpoint: DynamoCheckpoint) -> Job:
    spec = checkpoint.spec.job
    limit = None if spec.source_policy == "Resume" else spec.active_deadline_seconds
    return Job(
        metadata=child_meta(
            checkpoint,
            job_name(checkpoint),
            labels={CHECKPOINT_ID: identity_hash(checkpoint)},
            annotations={CAPTURE_DRIVER: spec.driver},
        ),
        spec=JobSpec(
            template=spec.pod_template_spec,
            active_deadline_seconds=limit,
            backoff_limit=spec.backoff_limit,
        ),
    )


def _snapshot(checkpoint: DynamoCheckpoint, job: Job, pod: Pod, now: float) -> Snapshot:
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
            driver=spec.driver,
            deletion_policy=checkpoint.spec.deletion_policy,
            deadline_seconds=max(1, int(deadline_of(checkpoint, job) - now)),
        ),
    )
