"""Which objects belong to the story of one: what it led to, and what it stands on."""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import NamedTuple

from snapshot_shared.objects import (
    KINDS,
    RESTORE_FROM,
    SNAPSHOT_UID,
    AnyObject,
    DynamoCheckpoint,
    Job,
    Node,
    ObjectMeta,
    OrderStatus,
    Pod,
    Snapshot,
    SnapshotContent,
    SnapshotRestore,
    kind_of,
    restore_name,
)
from snapshotctl.domain.targets import Target, place


class Kin(NamedTuple):
    """An object with all that belongs to its story; it is the first of `members` itself."""

    root: AnyObject
    members: Sequence[AnyObject]

    @property
    def told(self) -> list[AnyObject]:
        """The members whose own history belongs to it.

        To a pod and its restore belongs each other's, but not that of the capture that is read;
        to a node not what its pods wait for elsewhere.
        """
        if isinstance(self.root, Node):
            return [self.root]
        if _is_of_a_restore(self.root):
            return [value for value in self.members if _is_of_a_restore(value)]
        return list(self.members)

    @property
    def orders(self) -> list[tuple[AnyObject, OrderStatus]]:
        """All orders of the members, the oldest first, each with its object."""
        values = self.members if isinstance(self.root, Node) else self.told
        found = [(value, item) for value in values for item in orders_of(value)]
        if isinstance(self.root, Node):
            name = self.root.metadata.name
            found = [(value, item) for value, item in found if item.node == name]
        return sorted(found, key=lambda pair: pair[1].ordered_at)

    @property
    def content(self) -> SnapshotContent | None:
        """The content, when there is exactly one to speak of."""
        return next((found for found in self.members if isinstance(found, SnapshotContent)), None)

    @property
    def restore(self) -> SnapshotRestore | None:
        """The restore that a story is about: its root, or that of the pod at its root."""
        if not _is_of_a_restore(self.root):
            return None
        return next((found for found in self.members if isinstance(found, SnapshotRestore)), None)


class Changed(NamedTuple):
    """News that an object was added, modified or deleted; what it is now has to be read.

    `owners` are the uids of what it belongs to.
    """

    type: str
    target: Target
    uid: str
    owners: frozenset[str]

    def is_of(self, uids: Container[str]) -> bool:
        """Say whether it is one of these objects, or belongs to one."""
        return self.uid in uids or any(owner in uids for owner in self.owners)


def owners_of(meta: ObjectMeta) -> frozenset[str]:
    """Return the uids of what an object belongs to.

    A content has no owner, for it belongs to no namespace; a label names its snapshot.
    """
    named = [meta.labels[SNAPSHOT_UID]] if SNAPSHOT_UID in meta.labels else []
    return frozenset([*(owner.uid for owner in meta.owner_references), *named])


def reference(value: AnyObject) -> str:
    """Write an object as people type it: `pod/worker`."""
    return f"{kind_of(value).name.lower()}/{value.metadata.name}"


def space_of(value: AnyObject) -> str | None:
    """Give the namespace that an object belongs to, a content to its snapshot's; None for nodes."""
    if isinstance(value, SnapshotContent):
        return value.spec.snapshot_ref.namespace
    return value.metadata.namespace


def is_in(value: AnyObject, namespace: str | None) -> bool:
    """Say whether an object belongs to a namespace; all do to None, and nodes to each."""
    return namespace is None or space_of(value) in (None, namespace)


def orders_of(value: AnyObject) -> list[OrderStatus]:
    """Give the orders that serve an object."""
    if isinstance(value, SnapshotContent | SnapshotRestore | Pod):
        return value.status.orders
    return []


def owns(owner: AnyObject, value: AnyObject) -> bool:
    """Whether an object is the owner of another, by uid."""
    return any(found.uid == owner.metadata.uid for found in value.metadata.owner_references)


def links(value: AnyObject, root: AnyObject) -> list[Target]:
    """Name the objects that come next in the story of `root` after `value`.

    A target without a name stands for those of that kind which `value` owns. To the story of a
    restore belongs what it reads, not the worker of which that was captured.
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
    """Name the pods of a Job; that of the only try is also named by the snapshot of it."""
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


def is_strange(value: AnyObject, members: Sequence[AnyObject]) -> bool:
    """Whether a pod only has the name of the one of the story, and is another one.

    The story of a restore is about its target, that of a capture about its source; a try of its
    Job that failed belongs to it, too.
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
    """Choose what has to do with a node: the pods there, and whatever has orders for it."""
    name = node.metadata.name
    return [
        value
        for value in values
        if (isinstance(value, Pod) and value.status.node_name == name)
        or any(item.node == name for item in orders_of(value))
    ]
