"""Which objects are related to one: what it led to, and what it depends on."""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import NamedTuple

from snapshot_api.facts import Job, Node, Pod
from snapshot_api.kinds import KINDS, AnyObject, kind_of
from snapshot_api.meta import TRACEPARENT, ObjectMeta, OrderStatus
from snapshot_api.v1alpha1.checkpoint import DynamoCheckpoint
from snapshot_api.v1alpha1.content import SnapshotContent
from snapshot_api.v1alpha1.restore import SnapshotRestore, restore_name
from snapshot_api.v1alpha1.snapshot import Snapshot
from snapshot_api.views import orders_of
from snapshot_api.well_known import RESTORE_FROM, SNAPSHOT_UID
from snapshot_shared.spans import parse_traceparent
from snapshotctl.domain.targets import Target, place


class RelatedObjects(NamedTuple):
    """An object with all that are related to it; it is the first of `members` itself."""

    root: AnyObject
    members: Sequence[AnyObject]

    @property
    def primary(self) -> list[AnyObject]:
        """The members whose own events are those of the root.

        A pod and its restore share theirs, without those of the capture that is read; a node has
        its own alone.
        """
        if isinstance(self.root, Node):
            return [self.root]
        if _is_of_a_restore(self.root):
            return [value for value in self.members if _is_of_a_restore(value)]
        return list(self.members)

    @property
    def orders(self) -> list[tuple[AnyObject, OrderStatus]]:
        """All orders of the members, the oldest first, each with its object."""
        values = self.members if isinstance(self.root, Node) else self.primary
        found = [(value, item) for value in values for item in orders_of(value)]
        if isinstance(self.root, Node):
            name = self.root.metadata.name
            found = [(value, item) for value, item in found if item.node == name]
        return sorted(found, key=lambda pair: pair[1].ordered_at)

    @property
    def content(self) -> SnapshotContent | None:
        """The first content among the members."""
        return next((found for found in self.members if isinstance(found, SnapshotContent)), None)

    @property
    def restore(self) -> SnapshotRestore | None:
        """The restore that is the root, or that of the pod that is."""
        if not _is_of_a_restore(self.root):
            return None
        return next((found for found in self.members if isinstance(found, SnapshotRestore)), None)


class ObjectChanged(NamedTuple):
    """That an object was added, modified or deleted; what it is now has to be read.

    `owners` are the uids of what it belongs to.
    """

    type: str
    target: Target
    uid: str
    owners: frozenset[str]

    def concerns(self, uids: Container[str]) -> bool:
        """Whether it is one of these objects, or belongs to one."""
        return self.uid in uids or any(owner in uids for owner in self.owners)


def owners_of(meta: ObjectMeta) -> frozenset[str]:
    """Return the uids of what an object belongs to.

    A content is cluster-scoped and therefore has no owner; a label names its snapshot.
    """
    named = [meta.labels[SNAPSHOT_UID]] if SNAPSHOT_UID in meta.labels else []
    return frozenset([*(owner.uid for owner in meta.owner_references), *named])


def reference(value: AnyObject) -> str:
    """Return an object as people type it: `pod/worker`."""
    return f"{kind_of(value).name.lower()}/{value.metadata.name}"


def _namespace_of(value: AnyObject) -> str | None:
    """Return the namespace of an object; a content has its snapshot's, a node None."""
    if isinstance(value, SnapshotContent):
        return value.spec.snapshot_ref.namespace
    return value.metadata.namespace


def trace_of(value: AnyObject) -> str:
    """Return the id of the trace that an object belongs to, or an empty string."""
    candidates = [value.metadata.annotations.get(TRACEPARENT, "")]
    if isinstance(value, Pod | SnapshotContent | SnapshotRestore):
        candidates.insert(0, value.status.traceparent)
    contexts = (parse_traceparent(candidate) for candidate in candidates)
    return next((context.trace_id for context in contexts if context), "")


def is_in(value: AnyObject, namespace: str | None) -> bool:
    """Whether an object is in a namespace. All are in None, and nodes in each."""
    return namespace is None or _namespace_of(value) in (None, namespace)


def owns(owner: AnyObject, value: AnyObject) -> bool:
    """Whether an object is the owner of another, by uid."""
    return any(found.uid == owner.metadata.uid for found in value.metadata.owner_references)


def links(value: AnyObject, root: AnyObject) -> list[Target]:
    """Return the objects that `value` leads to when those related to `root` are gathered.

    A target without a name stands for those of that kind which `value` owns. What a restore reads
    is related to it; the worker that was captured is not.
    """
    found = _links(value, root)
    if _is_of_a_restore(root) and not _is_of_a_restore(value):
        return [target for target in found if target.kind.name not in ("Job", "Pod")]
    return found


def _is_of_a_restore(value: AnyObject) -> bool:
    return isinstance(value, Pod | SnapshotRestore)


def _links(value: AnyObject, root: AnyObject) -> list[Target]:
    space = value.metadata.namespace or "default"
    match value:
        case DynamoCheckpoint():
            status = value.status
            return [
                *_named("Job", space, status.job_name),
                *_named("Snapshot", space, status.snapshot_name),
            ]
        case Job():
            return _pods_of(value, root, space)
        case Snapshot():
            pod = value.spec.source.pod_ref
            return [
                *_named("Pod", space, pod.name if pod else ""),
                *_named("SnapshotContent", None, value.status.bound_snapshot_content_name or ""),
            ]
        case SnapshotContent():
            source = value.spec.source
            return _named("Pod", source.namespace, source.pod_ref.name if source.pod_ref else "")
        case Pod() if value is root and is_restored(value):
            return _named("SnapshotRestore", space, restore_name(value.metadata.uid))
        case SnapshotRestore():
            name = value.spec.pod_ref.name if value is root else ""
            return [*_named("Pod", space, name), *_restored_from(value, space)]
        case _:
            return []


def is_restored(pod: Pod) -> bool:
    """Whether a pod asks to be restored from something."""
    return RESTORE_FROM in pod.metadata.annotations


def _pods_of(job: Job, root: AnyObject, space: str) -> list[Target]:
    """Return the pods of a Job, unless the snapshot names the pod of its only try."""
    has_snapshot = isinstance(root, DynamoCheckpoint) and root.status.snapshot_name
    if has_snapshot and not job.status.failed:
        return []
    return [Target(KINDS["Pod"], space, None)]


def _restored_from(restore: SnapshotRestore, space: str) -> list[Target]:
    if restore.status.content_name:
        return _named("SnapshotContent", None, restore.status.content_name)
    name = restore.spec.source
    return [*_named("Snapshot", space, name), *_named("DynamoCheckpoint", space, name)]


def _named(kind: str, namespace: str | None, name: str) -> list[Target]:
    found = KINDS[kind]
    return [Target(found, place(found, namespace), name)] if name else []


def is_namesake(value: AnyObject, members: Sequence[AnyObject]) -> bool:
    """Whether a pod has the name of one that is related to the root, but another uid.

    The pod of a restore is its target, that of a capture its source or a failed try of its Job.
    """
    root = members[0]
    if not isinstance(value, Pod) or value is root:
        return False
    if isinstance(root, SnapshotRestore):
        return value.metadata.uid != root.spec.pod_ref.uid
    wanted = [
        found.spec.source.pod_ref.uid
        for found in members
        if isinstance(found, SnapshotContent) and found.spec.source.pod_ref is not None
    ]
    is_try = any(isinstance(found, Job) and owns(found, value) for found in members)
    return bool(wanted) and value.metadata.uid not in wanted and not is_try


def on_node(node: Node, values: Sequence[AnyObject]) -> list[AnyObject]:
    """Return the pods of a node, and the objects that have orders for it."""
    name = node.metadata.name
    return [
        value
        for value in values
        if (isinstance(value, Pod) and value.status.node_name == name)
        or any(item.node == name for item in orders_of(value))
    ]
