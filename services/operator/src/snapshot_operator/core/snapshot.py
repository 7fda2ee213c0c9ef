"""Decides for one Snapshot: bound to a content once its pod is ready, then what became of that."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from msgspec.structs import replace

from snapshot_api.facts import FINISHED, Pod
from snapshot_api.meta import ObjectMeta, condition, is_true
from snapshot_api.v1alpha1.checkpoint import DynamoCheckpoint
from snapshot_api.v1alpha1.content import (
    ContentSource,
    SnapshotContent,
    SnapshotContentSpec,
    SnapshotRef,
)
from snapshot_api.v1alpha1.snapshot import PodSource, Snapshot
from snapshot_api.well_known import POD_SPEC, SNAPSHOT_UID
from snapshot_operator.core import conditions
from snapshot_operator.core.capture import container_failure
from snapshot_operator.core.conditions import REFUSED
from snapshot_operator.core.content import content_name
from snapshot_operator.core.owning import delete_children, gone, owned_by, taken, traced
from snapshot_operator.core.plan import (
    FINALIZER,
    NOTHING,
    Adopt,
    Create,
    KeepSpec,
    Plan,
    Reader,
    is_adopted,
    status_plan,
)
from snapshot_shared.errors import Failure, Internal


class SnapshotView(NamedTuple):
    """What a decision about a snapshot reads.

    `maker` is the content that made the artifact which is to be imported, while it is there.
    """

    snapshot: Snapshot
    pod: Pod | None
    content: SnapshotContent | None
    maker: SnapshotContent | None = None

    @property
    def source(self) -> PodSource:
        """The pod that is to be captured. Internal for an import, which captures none."""
        found = self.snapshot.spec.source.pod_ref
        if found is None:
            raise Internal(f"snapshot {self.snapshot.metadata.name} captures no pod")
        return found


def gather(reader: Reader, snapshot: Snapshot) -> SnapshotView:
    """Read what a decision about a snapshot depends on: its source only until it is bound."""
    found = reader.get("SnapshotContent", None, content_name(snapshot))
    content = found if isinstance(found, SnapshotContent) else None
    if content is not None or snapshot.status.bound_snapshot_content_name:
        return SnapshotView(snapshot, None, content)
    source = snapshot.spec.source
    if source.artifact is not None:
        maker = reader.by_uid(source.artifact.content_uid)
        space = snapshot.metadata.namespace or "default"
        # A uid of another namespace names other files than those of its content.
        if not isinstance(maker, SnapshotContent) or maker.spec.source.namespace != space:
            maker = None
        return SnapshotView(snapshot, None, None, maker)
    name = source.pod_ref.name if source.pod_ref is not None else ""
    pod = reader.get("Pod", snapshot.metadata.namespace, name)
    return SnapshotView(snapshot, pod if isinstance(pod, Pod) else None, None)


def reconcile(view: SnapshotView, now: float) -> Plan:
    """Return the next step of a snapshot. Same input, same plan."""
    snapshot, content = view.snapshot, view.content
    if snapshot.metadata.deletion_timestamp:
        return delete_children(snapshot, [content if owned_by(content, snapshot) else None])
    if not is_adopted(snapshot):
        return Plan((Adopt(snapshot),))
    if is_true(snapshot.status.conditions, "Failed"):
        return NOTHING
    if content is not None and (owned_by(content, snapshot) or not snapshot.spec.source.artifact):
        return _mirror(snapshot, content, now)
    if snapshot.status.bound_snapshot_content_name:
        failure = gone(
            "SnapshotContent",
            snapshot.status.bound_snapshot_content_name,
            is_captured=is_true(snapshot.status.conditions, "Ready"),
        )
        return _failed(snapshot, failure, now)
    return _import(view, now) if snapshot.spec.source.artifact else _bind(view, now)


def deadline_of(snapshot: Snapshot) -> float:
    """Return when the capture has to be done, in seconds since the epoch."""
    created = conditions.seconds(snapshot.metadata.creation_timestamp)
    return created + snapshot.spec.deadline_seconds


# Why a snapshot can never be taken: the first of these that holds.


def _other_incarnation(view: SnapshotView, _now: float) -> Failure | None:
    source, pod = view.source, view.pod
    if pod is None or source.uid is None or source.uid == pod.metadata.uid:
        return None
    return Failure(
        reason="StalePodReference",
        message=f"pod {source.name} has uid {pod.metadata.uid}, the snapshot names {source.uid}",
        values={"expected": source.uid, "found": pod.metadata.uid},
        next_step="take a snapshot of the pod that runs now",
    )


def _ended(view: SnapshotView, _now: float) -> Failure | None:
    pod = view.pod
    if pod is None or not (pod.status.phase in FINISHED or pod.metadata.deletion_timestamp):
        return None
    return Failure(
        reason="SourcePodGone",
        message=f"pod {pod.metadata.name} has ended ({pod.status.phase})",
        next_step="start the worker again",
    )


def _container_failed(view: SnapshotView, _now: float) -> Failure | None:
    return container_failure(view.pod)


def _no_such_container(view: SnapshotView, _now: float) -> Failure | None:
    if view.pod is None:
        return None
    wanted = view.source.containers[0]
    names = [container.name for container in view.pod.spec.containers]
    if wanted in names:
        return None
    return Failure(
        reason="InvalidTargetContainer",
        message=f"pod {view.pod.metadata.name} has no container {wanted} (found "
        f"{', '.join(names)})",
        next_step="name one of the pod's containers",
    )


def _too_late(view: SnapshotView, now: float) -> Failure | None:
    if now < deadline_of(view.snapshot):
        return None
    source, limit = view.source, view.snapshot.spec.deadline_seconds
    if view.pod is None:
        return Failure(
            reason="SourcePodNotFound",
            message=f"no pod {source.name} in namespace {view.snapshot.metadata.namespace} within "
            f"deadlineSeconds ({limit})",
            next_step="name a running pod in spec.source.podRef.name",
        )
    return Failure(
        reason="DeadlineExceeded",
        message=f"pod {source.name} was not ready for a snapshot within deadlineSeconds ({limit})",
        values={"deadlineSeconds": limit},
        next_step="look at the worker's log, or raise spec.deadlineSeconds",
    )


_ENDS: tuple[Callable[[SnapshotView, float], Failure | None], ...] = (
    _other_incarnation,
    _container_failed,
    _ended,
    _no_such_container,
    _too_late,
)


def _bind(view: SnapshotView, now: float) -> Plan:
    snapshot, pod, source = view.snapshot, view.pod, view.source
    if failure := next((found for check in _ENDS if (found := check(view, now))), None):
        return _failed(snapshot, failure, now)
    if pod is None:
        # A pod that is applied together with its snapshot may come later than it.
        return _waits(snapshot, "SourcePodNotFound", f"there is no pod {source.name} yet", now)
    if pod.status.phase == "Unknown" or not is_true(pod.status.conditions, "Ready"):
        message = f"pod {source.name} is not ready for a snapshot yet"
        return _waits(snapshot, "WaitingForPod", message, now)
    # A checkpoint has the spec in its own template.
    owners = snapshot.metadata.owner_references
    is_of_checkpoint = any(owner.kind == DynamoCheckpoint.__name__ for owner in owners)
    if POD_SPEC not in snapshot.metadata.annotations and not is_of_checkpoint:
        return Plan((KeepSpec(snapshot, pod),))
    bound = ContentSource(
        pod_ref=replace(source, uid=pod.metadata.uid),
        namespace=snapshot.metadata.namespace or "default",
        node_name=pod.status.node_name,
        devices=pod.status.devices,
        memory_server=pod.status.memory_server != "none",
        seccomp_profile=pod.status.seccomp_profiles.get(source.containers[0], "")[:256],
    )
    return _bound(snapshot, bound, now)


def _waits(snapshot: Snapshot, reason: str, message: str, now: float) -> Plan:
    rows = conditions.pending(snapshot.status.conditions, snapshot, now, reason, message)
    status = replace(snapshot.status, conditions=rows)
    return status_plan(snapshot, replace(snapshot, status=status), wake_at=deadline_of(snapshot))


def _import(view: SnapshotView, now: float) -> Plan:
    """Bind a snapshot to a content of its own, once no other one has the files."""
    snapshot, holder = view.snapshot, view.content or view.maker
    if holder is None and now < deadline_of(snapshot):
        space = snapshot.metadata.namespace or "default"
        source = ContentSource(namespace=space, artifact=snapshot.spec.source.artifact)
        return _bound(snapshot, source, now)
    if holder is None:
        limit = snapshot.spec.deadline_seconds
        failure = Failure(
            reason="DeadlineExceeded",
            message=f"the import did not begin within deadlineSeconds ({limit})",
            values={"deadlineSeconds": limit},
            next_step="apply it again, or raise spec.deadlineSeconds",
        )
        return _failed(snapshot, failure, now)
    owner, name = holder.spec.snapshot_ref, holder.metadata.name
    message = f"SnapshotContent {name} of snapshot {owner.name} has the artifact"
    if now < deadline_of(snapshot):
        return _waits(snapshot, "ArtifactInUse", message, now)
    is_kept = holder.spec.deletion_policy == "Retain"
    advice = "; or delete that, which leaves the artifact, and apply this again" if is_kept else ""
    failure = Failure(
        reason="ArtifactInUse",
        message=message,
        values={"content": name, "snapshot": owner.name},
        next_step=f"restore from {owner.name}{advice}",
    )
    return _failed(snapshot, failure, now)


def _bound(snapshot: Snapshot, source: ContentSource, now: float) -> Plan:
    """Plan the content of a snapshot; what is left of the snapshot's time is its own."""
    content = SnapshotContent(
        metadata=ObjectMeta(
            name=content_name(snapshot),
            finalizers=[FINALIZER],
            labels={SNAPSHOT_UID: snapshot.metadata.uid},
            annotations=traced(snapshot),
        ),
        spec=SnapshotContentSpec(
            snapshot_ref=SnapshotRef(
                namespace=source.namespace, name=snapshot.metadata.name, uid=snapshot.metadata.uid
            ),
            source=source,
            source_policy=snapshot.spec.source_policy,
            driver=snapshot.spec.driver,
            deletion_policy=snapshot.spec.deletion_policy,
            deadline_seconds=max(1, int(deadline_of(snapshot) - now)),
        ),
    )
    made = Create(content, waits=lambda found: _waits(snapshot, REFUSED, found.message, now))
    if source.artifact is not None:
        # The name may have been taken meanwhile, by another import of the same.
        return Plan((made,), deadline_of(snapshot))
    status = replace(snapshot.status, bound_snapshot_content_name=content.metadata.name)
    return status_plan(snapshot, replace(snapshot, status=status), made)


def _mirror(snapshot: Snapshot, content: SnapshotContent, now: float) -> Plan:
    if not owned_by(content, snapshot):
        return _failed(snapshot, taken("SnapshotContent", content), now)
    status = snapshot.status
    found = condition(content.status.conditions, "Ready")
    if is_true(content.status.conditions, "Failed") and content.status.failure is not None:
        return _failed(snapshot, content.status.failure, now)
    committed = content.status.committed
    if found is not None and committed is not None:
        rows = conditions.mirrored(status.conditions, snapshot, now, found)
        status = replace(status, conditions=rows, bytes=committed.bytes)
    elif found is not None:
        rows = conditions.pending(status.conditions, snapshot, now, found.reason, found.message)
        status = replace(status, conditions=rows)
    status = replace(status, bound_snapshot_content_name=content.metadata.name)
    return status_plan(snapshot, replace(snapshot, status=status))


def _failed(snapshot: Snapshot, failure: Failure, now: float) -> Plan:
    rows = conditions.failed(snapshot.status.conditions, snapshot, now, failure)
    return status_plan(
        snapshot, replace(snapshot, status=replace(snapshot.status, conditions=rows))
    )
