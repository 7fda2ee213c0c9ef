"""The columns of `get -o wide`: those that `kubectl get -o wide` has for the same kind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from snapshot_api.facts import Job, Node, Pod
from snapshot_api.meta import condition
from snapshot_api.v1alpha1.checkpoint import DynamoCheckpoint
from snapshot_api.v1alpha1.content import SnapshotContent
from snapshot_api.v1alpha1.restore import SnapshotRestore
from snapshot_api.v1alpha1.snapshot import Snapshot
from snapshotctl.domain import formats
from snapshotctl.views.related import trace_of

Layout = tuple[tuple[str, ...], Callable[[Any], tuple[str, ...]]]


def _checkpoint(item: DynamoCheckpoint) -> tuple[str, ...]:
    status, engine = item.status, item.spec.identity.backend_framework
    driver = item.spec.job.driver if item.spec.job else ""
    return _shown(
        engine, _reason(item), status.checkpoint_id, driver, status.content_name, trace_of(item)
    )


def _snapshot(item: Snapshot) -> tuple[str, ...]:
    return _shown(_reason(item), item.spec.driver, item.spec.revision_of or "", trace_of(item))


def _content(item: SnapshotContent) -> tuple[str, ...]:
    committed = item.status.committed
    digest = committed.root_digest if committed else ""
    paused, took = _seconds(item.status.paused_seconds), _seconds(item.status.captured_seconds)
    return _shown(_reason(item), paused, took, item.spec.driver, digest, trace_of(item))


def _restore(item: SnapshotRestore) -> tuple[str, ...]:
    status = item.status
    took = _seconds(status.restored_seconds)
    return _shown(_reason(item), took, status.driver, status.content_name, trace_of(item))


def _job(item: Job) -> tuple[str, ...]:
    containers = item.spec.template.spec.containers
    return _shown(",".join(found.name for found in containers))


def _pod(item: Pod) -> tuple[str, ...]:
    devices = item.status.devices
    containers = ",".join(found.name for found in item.spec.containers)
    return _shown(",".join(device.uuid for device in devices), containers, trace_of(item))


def _node(item: Node) -> tuple[str, ...]:
    status = item.status
    return _shown(_reason(item), status.criu, str(status.slots), status.artifact_root)


def _reason(item: Any) -> str:
    held = condition(item.status.conditions, "Ready")
    return held.reason if held else ""


def _seconds(value: float) -> str:
    return formats.span_time(value) if value else ""


def _shown(*cells: str) -> tuple[str, ...]:
    return tuple(cell or "-" for cell in cells)


WIDE: dict[str, Layout] = {
    "DynamoCheckpoint": (
        ("BACKEND", "REASON", "CHECKPOINTID", "DRIVER", "ARTIFACT", "TRACE"),
        _checkpoint,
    ),
    "Snapshot": (("REASON", "DRIVER", "REVISION-OF", "TRACE"), _snapshot),
    "SnapshotContent": (("REASON", "PAUSED", "TOOK", "DRIVER", "ARTIFACT", "TRACE"), _content),
    "SnapshotRestore": (("REASON", "TOOK", "DRIVER", "ARTIFACT", "TRACE"), _restore),
    "Job": (("CONTAINERS",), _job),
    "Pod": (("DEVICES", "CONTAINERS", "TRACE"), _pod),
    "Node": (("REASON", "CRIU", "SLOTS", "ARTIFACTS"), _node),
}
"""The heads and the cells of each kind, behind those that it always has."""
