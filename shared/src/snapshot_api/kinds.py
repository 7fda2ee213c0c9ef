"""The kinds of objects: how each is named, stored and decoded."""

from __future__ import annotations

from snapshot_api import facts
from snapshot_api.facts import Job, Node, Pod
from snapshot_api.kind import Kind
from snapshot_api.v1alpha1 import checkpoint, content, restore, snapshot
from snapshot_api.v1alpha1.checkpoint import DynamoCheckpoint
from snapshot_api.v1alpha1.content import SnapshotContent
from snapshot_api.v1alpha1.restore import SnapshotRestore
from snapshot_api.v1alpha1.snapshot import Snapshot
from snapshot_shared.errors import NotFound

AnyObject = DynamoCheckpoint | Snapshot | SnapshotContent | SnapshotRestore | Job | Pod | Node


_ALL = (
    *(checkpoint.KIND, snapshot.KIND, content.KIND, restore.KIND),
    *(facts.JOB, facts.POD, facts.NODE),
)

KINDS: dict[str, Kind] = {kind.name: kind for kind in _ALL}


def kind_of(value: AnyObject) -> Kind:
    """Return the kind of an object."""
    return KINDS[type(value).__name__]


def find_kind(name: str) -> Kind:
    """Find a kind by its name, plural, singular, short or other name, in any case. NotFound."""
    wanted = name.lower()
    for kind in KINDS.values():
        if wanted in (kind.name.lower(), kind.plural, kind.short, *kind.others):
            return kind
    known = ", ".join(kind.plural for kind in KINDS.values())
    raise NotFound(f"no kind is called {name!r}", next_step=f"use one of: {known}")
