"""Counts of what the store holds, for the metrics."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from snapshot_api.facts import Node
from snapshot_api.kinds import AnyObject, kind_of
from snapshot_api.meta import is_true
from snapshot_api.v1alpha1.content import SnapshotContent
from snapshot_api.views import phase
from snapshot_operator.core.quarantine import QUARANTINED

NODE_STATES = ("ready", "not-ready", "lost")


class Census(NamedTuple):
    """Numbers of objects by (kind, phase) and of nodes by (state,); readers; damaged artifacts."""

    objects: Mapping[tuple[str, ...], float]
    nodes: Mapping[tuple[str, ...], float]
    readers: int
    quarantined: int


def census(values: Iterable[AnyObject]) -> Census:
    """Return the counts of some objects."""
    objects: Counter[tuple[str, ...]] = Counter()
    nodes: Counter[tuple[str, ...]] = Counter({(state,): 0 for state in NODE_STATES})
    readers = quarantined = 0
    for value in values:
        if isinstance(value, Node):
            rows = value.status.conditions
            is_ready, is_lost = is_true(rows, "Ready"), is_true(rows, "Lost")
            nodes[("lost" if is_lost else "ready" if is_ready else "not-ready",)] += 1
        else:
            objects[(kind_of(value).name, phase(value))] += 1
        if isinstance(value, SnapshotContent):
            readers += len(value.status.readers)
            quarantined += is_true(value.status.conditions, QUARANTINED)
    return Census(objects, nodes, readers, quarantined)
