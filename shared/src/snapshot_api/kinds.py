"""The kinds of objects: how each is named, stored and decoded."""

from __future__ import annotations

from typing import Any, NamedTuple

from snapshot_api.facts import Job, Node, Pod
from snapshot_api.v1alpha1.checkpoint import DynamoCheckpoint
from snapshot_api.v1alpha1.content import SnapshotContent
from snapshot_api.v1alpha1.restore import SnapshotRestore
from snapshot_api.v1alpha1.snapshot import Snapshot
from snapshot_api.well_known import GROUP
from snapshot_shared.errors import NotFound

AnyObject = DynamoCheckpoint | Snapshot | SnapshotContent | SnapshotRestore | Job | Pod | Node


class Kind(NamedTuple):
    """How a kind is named, stored and decoded."""

    name: str
    api_version: str
    plural: str
    short: str
    type: type[Any]
    namespaced: bool = True
    appliable: bool = True
    others: tuple[str, ...] = ()


_ALL_KINDS = (
    Kind(
        "DynamoCheckpoint",
        GROUP,
        "dynamocheckpoints",
        "dckpt",
        DynamoCheckpoint,
        others=("ckpt", "checkpoint", "checkpoints"),
    ),
    Kind("Snapshot", GROUP, "snapshots", "snap", Snapshot),
    Kind(
        "SnapshotContent",
        GROUP,
        "snapshotcontents",
        "snapcontent",
        SnapshotContent,
        namespaced=False,
        appliable=False,
    ),
    Kind(
        "SnapshotRestore",
        GROUP,
        "snapshotrestores",
        "srestore",
        SnapshotRestore,
        appliable=False,
        others=("restore", "restores"),
    ),
    Kind("Job", "batch/v1", "jobs", "job", Job),
    Kind("Pod", "v1", "pods", "po", Pod),
    Kind("Node", "v1", "nodes", "no", Node, namespaced=False, appliable=False),
)

KINDS: dict[str, Kind] = {kind.name: kind for kind in _ALL_KINDS}


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
