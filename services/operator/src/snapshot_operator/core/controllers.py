"""The controllers of our own kinds, and the indexes through which they find what they read.

A controller is a value: a new kind is one entry here, and one in `snapshot_api`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from snapshot_api.facts import Pod
from snapshot_api.v1alpha1.content import SnapshotContent
from snapshot_api.v1alpha1.restore import SnapshotRestore
from snapshot_api.v1alpha1.snapshot import Snapshot
from snapshot_operator.core import capture, checkpoint, content, nodes, restore, sharing, snapshot
from snapshot_operator.core.plan import Plan, Reader
from snapshot_shared.transitions import RESTORE


class Controller(NamedTuple):
    """How objects of a kind are decided about: what is read, and the pure decision over that.

    `claims` says whether a plan takes what the plan for another object may take, too. One such plan
    is carried out at a time; the next is decided when it is stored, and so sees what is taken.
    """

    kind: str
    gather: Callable[[Reader, Any], Any]
    reconcile: Callable[[Any, float], Plan]
    claims: Callable[[Plan], bool] = lambda _: False


class Index(NamedTuple):
    """Under which values objects of a kind are found.

    Who has read a value is woken when an object comes or goes under it; with `by_change` also when
    one of them changes. Under a value of a queue the objects are in the order in which they came,
    and only the first is woken, when it becomes that.
    """

    name: str
    kind: str
    keys: Callable[[Any], Iterable[str]]
    by_change: bool = False
    is_queue: bool = False


def _captures(value: SnapshotContent) -> list[str]:
    return [] if capture.is_settled(value) else content.capture_keys(value)


def _reading(value: SnapshotRestore) -> list[str]:
    name, has_place = value.status.content_name, bool(value.status.node_name)
    if not name or not has_place or value.status.state in RESTORE.terminal():
        return []
    return [name, content.damaged_key(name)] if restore.has_found_damage(value) else [name]


def _revisions(value: Snapshot) -> list[str]:
    name = value.spec.revision_of
    return [restore.revisions_key(value.metadata.namespace, name)] if name else []


def _owners(value: Pod) -> list[str]:
    return [owner.uid for owner in value.metadata.owner_references]


CONTROLLERS = (
    Controller("DynamoCheckpoint", checkpoint.gather, checkpoint.reconcile),
    Controller("Snapshot", snapshot.gather, snapshot.reconcile),
    Controller("SnapshotContent", content.gather, content.reconcile),
    Controller("SnapshotRestore", restore.gather, restore.reconcile),
)

INDEXES = (
    Index("nodes", "Node", lambda _: ("",), by_change=True),
    Index("agents", "Node", nodes.agents),
    Index("pods-by-owner", "Pod", _owners, by_change=True),
    Index("captures", "SnapshotContent", _captures),
    Index("identities", "DynamoCheckpoint", sharing.identity_keys),
    Index("layouts", "SnapshotContent", content.layout_keys),
    Index("revisions", "Snapshot", _revisions, by_change=True),
    Index("reading", "SnapshotRestore", _reading),
)
