"""Decides for one Job of the local cluster: its pod, started again when it fails, and its end."""

from __future__ import annotations

from typing import NamedTuple

from msgspec.structs import replace

from snapshot_api.facts import Job, Pod
from snapshot_api.meta import is_true
from snapshot_api.well_known import CAPTURE_DRIVER
from snapshot_operator.core import conditions
from snapshot_operator.core.owning import child_meta, delete_children, owned_by
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
from snapshot_shared.ids import short_hash

JOB_NAME_LABEL = "batch.kubernetes.io/job-name"


class JobView(NamedTuple):
    """What a decision about a Job reads: `pod` is the one of its current try, `pods` are all."""

    job: Job
    pod: Pod | None
    pods: list[Pod]


def gather(reader: Reader, job: Job) -> JobView:
    """Read what a decision about a Job depends on."""
    found = reader.get("Pod", job.metadata.namespace, pod_name(job))
    pods = reader.by_index("pods-by-owner", job.metadata.uid)
    return JobView(
        job,
        found if isinstance(found, Pod) else None,
        [pod for pod in pods if isinstance(pod, Pod)],
    )


def pod_name(job: Job) -> str:
    """Return the name of the pod of the current try of a Job."""
    tries = (str(job.status.failed),) if job.status.failed else ()
    suffix = short_hash("pod", job.metadata.uid, *tries, length=5)
    return f"{job.metadata.name[:57]}-{suffix}"


def reconcile(view: JobView, now: float) -> Plan:
    """Return the next step of a Job. Same input, same plan."""
    job, pod = view.job, view.pod
    if job.metadata.deletion_timestamp:
        return delete_children(job, view.pods)
    if not is_adopted(job):
        return Plan((Adopt(job),))
    status = job.status
    if is_true(status.conditions, "Complete") or is_true(status.conditions, "Failed"):
        return NOTHING
    if pod is None and status.active:
        return _ended(job, "Failed", "PodDeleted", f"pod {pod_name(job)} is gone", now)
    if pod is None:
        started = replace(job, status=replace(status, active=1))
        return status_plan(job, started, Create(_pod(job)))
    if not owned_by(pod, job):
        message = f"pod {pod.metadata.name} exists and belongs to something else"
        return _ended(job, "Failed", "PodNameConflict", message, now)
    return _follows(job, pod, now)


def _pod(job: Job) -> Pod:
    template, driver = job.spec.template, job.metadata.annotations.get(CAPTURE_DRIVER)
    marks = {CAPTURE_DRIVER: driver} if driver else {}
    return Pod(
        metadata=child_meta(
            job,
            pod_name(job),
            labels={**template.metadata.labels, JOB_NAME_LABEL: job.metadata.name},
            annotations={**template.metadata.annotations, **marks},
        ),
        spec=template.spec,
    )


def _follows(job: Job, pod: Pod, now: float) -> Plan:
    if pod.status.phase == "Succeeded":
        return _ended(job, "Complete", "Completed", "", now)
    if pod.status.phase == "Failed" and job.status.failed < job.spec.backoff_limit:
        again = replace(job.status, active=0, ready=0, failed=job.status.failed + 1)
        return status_plan(job, replace(job, status=again))
    if pod.status.phase == "Failed":
        return _ended(job, "Failed", pod.status.reason or "PodFailed", pod.status.message, now)
    limit = job.spec.active_deadline_seconds
    wake_at = None
    if limit is not None:
        wake_at = conditions.seconds(job.metadata.creation_timestamp) + limit
        if now >= wake_at:
            message = f"active for longer than activeDeadlineSeconds ({limit})"
            before = [] if pod.metadata.deletion_timestamp else [Delete(pod)]
            return _ended(job, "Failed", "DeadlineExceeded", message, now, *before)
    is_ready = int(is_true(pod.status.conditions, "Ready"))
    followed = replace(job.status, active=1, ready=is_ready)
    return status_plan(job, replace(job, status=followed), wake_at=wake_at)


def _ended(job: Job, type_: str, reason: str, message: str, now: float, *before: Write) -> Plan:
    done = type_ == "Complete"
    rows = conditions.with_conditions(
        job.status.conditions, job, now, (type_, True, reason, message)
    )
    status = replace(
        job.status,
        active=0,
        ready=0,
        succeeded=int(done),
        failed=job.status.failed + int(not done),
        conditions=rows,
    )
    return status_plan(job, replace(job, status=status), *before)
