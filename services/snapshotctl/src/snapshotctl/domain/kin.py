"""Which objects belong to the story of one: what it led to, and what it stands on."""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import NamedTuple

from snapshot_shared.objects import (
    KINDS,
    RESTORE_FROM,
    AnyObject,
    DynamoCheckpoint,
    Job,
    Node,
    OrderStatus,
    Pod,
    Snapshot,
    SnapshotContent,
    kind_of,
)
from snapshotctl.domain.targets import Target, place


class Kin(NamedTuple):
    """An object with all that belongs to its story; it is the first of `members` itself."""

    root: AnyObject
    members: Sequence[AnyObject]

    @property
    def told(self) -> list[AnyObject]:
        """The members whose own history belongs to it.

        A pod is not concerned with the capture that it is restored from, nor a node with what
        its pods wait for elsewhere.
        """
        return [self.root] if isinstance(self.root, Pod | Node) else list(self.members)

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


class Changed(NamedTuple):
    """News that an object was added, modified or deleted; what it is now has to be read."""

    type: str
    target: Target
    uid: str
    owners: frozenset[str]

    def is_of(self, uids: Container[str]) -> bool:
        """Say whether it is one of these objects, or belongs to one."""
        return self.uid in uids or any(owner in uids for owner in self.owners)


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
    return value.status.orders if isinstance(value, SnapshotContent | Pod) else []


def links(value: AnyObject, root: AnyObject) -> list[Target]:
    """Name the objects that come next in the story of `root` after `value`."""
    space = value.metadata.namespace or "default"
    match value:
        case DynamoCheckpoint():
            status = value.status
            return [
                *_named("Job", space, status.job_name),
                *_named("Snapshot", space, status.snapshot_name),
            ]
        case Job():
            return _named("Pod", space, value.status.pod_name)
        case Snapshot():
            return [
                *_named("Pod", space, value.spec.source.pod_ref.name),
                *_named("SnapshotContent", None, value.status.bound_snapshot_content_name or ""),
            ]
        case SnapshotContent() if not isinstance(root, Pod):
            source = value.spec.source
            return _named("Pod", source.namespace, source.pod_ref.name)
        case Pod() if value is root:
            return _restored_from(value, space)
        case _:
            return []


def _restored_from(pod: Pod, space: str) -> list[Target]:
    if pod.status.restore is not None:
        return _named("SnapshotContent", None, pod.status.restore.content_name)
    name = pod.metadata.annotations.get(RESTORE_FROM, "")
    return [*_named("Snapshot", space, name), *_named("DynamoCheckpoint", space, name)]


def _named(kind: str, namespace: str | None, name: str) -> list[Target]:
    found = KINDS[kind]
    return [Target(found, place(found, namespace), name)] if name else []


def is_strange(value: AnyObject, members: Sequence[AnyObject]) -> bool:
    """Say whether a pod only has the name of the one that was captured, and is another one."""
    wanted = [
        found.spec.source.pod_ref.uid for found in members if isinstance(found, SnapshotContent)
    ]
    is_source = isinstance(value, Pod) and value is not members[0]
    return is_source and bool(wanted) and value.metadata.uid not in wanted


def on_node(node: Node, values: Sequence[AnyObject]) -> list[AnyObject]:
    """Choose what has to do with a node: the pods there, and whatever has orders for it."""
    name = node.metadata.name
    return [
        value
        for value in values
        if (isinstance(value, Pod) and value.status.node_name == name)
        or any(item.node == name for item in orders_of(value))
    ]
