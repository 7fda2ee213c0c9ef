"""What the store holds, counted for the metrics."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from snapshot_operator.core.quarantine import QUARANTINED
from snapshot_shared.objects import (
    AnyObject,
    DynamoCheckpoint,
    Job,
    Node,
    Pod,
    Snapshot,
    SnapshotContent,
    SnapshotRestore,
    is_true,
    kind_of,
)


class Census(NamedTuple):
    """Numbers of objects by (kind, phase) and of nodes by (state,); readers; damaged artifacts."""

    objects: Mapping[tuple[str, ...], float]
    nodes: Mapping[tuple[str, ...], float]
    readers: int
    quarantined: int


def census(values: Iterable[AnyObject]) -> Census:
    """Count objects."""
    objects: Counter[tuple[str, ...]] = Counter()
    nodes: Counter[tuple[str, ...]] = Counter({(state,): 0 for state in NODE_STATES})
    readers = quarantined = 0
    for value in values:
        if isinstance(value, Node):
            nodes[(_state(value),)] += 1
        else:
            objects[(kind_of(value).name, _phase(value))] += 1
        if isinstance(value, SnapshotContent):
            readers += len(value.status.readers)
            quarantined += is_true(value.status.conditions, QUARANTINED)
    return Census(objects, nodes, readers, quarantined)


NODE_STATES = ("ready", "not-ready", "lost")


def _state(node: Node) -> str:
    rows = node.status.conditions
    if is_true(rows, "Lost"):
        return "lost"
    return "ready" if is_true(rows, "Ready") else "not-ready"


def _phase(
    value: DynamoCheckpoint | Snapshot | SnapshotContent | SnapshotRestore | Job | Pod,
) -> str:
    match value:
        case DynamoCheckpoint() | Pod():
            return value.status.phase
        case SnapshotContent():
            return value.status.capture.value
        case SnapshotRestore():
            return value.status.state.value
        case Snapshot():
            rows = value.status.conditions
            return next((name for name in ("Failed", "Ready") if is_true(rows, name)), "Pending")
        case Job(status=status):
            if status.succeeded or status.failed:
                return "Succeeded" if status.succeeded else "Failed"
            return "Active" if status.active else "Pending"
