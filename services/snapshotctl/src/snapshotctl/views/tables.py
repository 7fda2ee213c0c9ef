"""Objects as rows of a table: the columns of each kind, and their cells."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

from snapshot_api.facts import Job, Node, Pod, gpus_wanted
from snapshot_api.kind import Kind
from snapshot_api.kinds import AnyObject
from snapshot_api.meta import is_true
from snapshot_api.v1alpha1.checkpoint import DynamoCheckpoint
from snapshot_api.v1alpha1.content import SnapshotContent
from snapshot_api.v1alpha1.restore import SnapshotRestore
from snapshot_api.v1alpha1.snapshot import Snapshot
from snapshot_api.views import held_back
from snapshot_api.well_known import RESTORE_FROM
from snapshot_shared.ids import NodeName
from snapshot_shared.orders import Presence, PresenceDevice
from snapshotctl.domain import formats
from snapshotctl.views import wide_columns
from snapshotctl.views.state import state_text


class Table(NamedTuple):
    """Headers and cells; every cell is plain text on one line.

    `spare` are the columns that a narrow terminal leaves out, in the order in which it does.
    """

    columns: tuple[str, ...]
    rows: list[tuple[str, ...]]
    spare: tuple[str, ...] = ()


def table_of(
    kind: Kind,
    found: Sequence[AnyObject],
    now: float,
    *,
    with_namespace: bool = False,
    is_wide: bool = False,
) -> Table:
    """Return the objects of one kind as a table. `now` is seconds since the epoch.

    With `is_wide` it has more columns, those that `kubectl get -o wide` shows in a cluster.
    """
    columns, cells = _LAYOUTS[kind.name]
    more, more_cells = wide_columns.WIDE[kind.name] if is_wide else ((), _nothing)
    show_namespace = with_namespace and kind.namespaced
    head = (("NAMESPACE",) if show_namespace else ()) + ("NAME", *columns, "AGE")
    rows = []
    for item in found:
        meta = item.metadata
        place = (meta.namespace or "-",) if show_namespace else ()
        age = formats.age_of(meta.creation_timestamp, now)
        shown = (*place, meta.name, *cells(item), age, *more_cells(item))
        rows.append(tuple(map(formats.plain, shown)))
    return Table(head + more, rows, tuple(name for name in _SPARE if name in columns))


def _nothing(_item: AnyObject) -> tuple[str, ...]:
    return ()


def table_of_nodes(
    nodes: Sequence[Node],
    presence: Mapping[NodeName, Presence],
    paused: Collection[str],
    now: float,
) -> Table:
    """Return nodes with their last presence as a table. `now` is seconds since the epoch.

    `paused` are durables of the stream of orders to which nothing is delivered.
    """
    head = ("NAME", "STATUS", "GPUS", "GPU-MEMORY", "DRIVERS", "FREE-DISK", "SLOTS", "SEEN", "AGE")
    rows = []
    for node in nodes:
        seen = presence.get(NodeName(node.metadata.name))
        devices = node.status.devices or (seen.devices if seen else [])
        cells = (
            node.metadata.name,
            state_text(node) + (",OrdersPaused" if held_back(node.metadata.name, paused) else ""),
            str(len(devices)),
            _memory(devices),
            ",".join(node.status.drivers) or "-",
            formats.size(seen.free_bytes) if seen else "-",
            str(node.status.slots),
            f"{formats.age(now - seen.at)} ago" if seen else "no",
            formats.age_of(node.metadata.creation_timestamp, now),
        )
        rows.append(tuple(map(formats.plain, cells)))
    return Table(head, rows, ("SLOTS", "DRIVERS"))


def _checkpoint(item: DynamoCheckpoint) -> tuple[str, ...]:
    status = item.status
    size = formats.size(status.bytes) if status.bytes else "-"
    return (state_text(item), item.spec.identity.model, status.snapshot_name or "-", size)


def _snapshot(item: Snapshot) -> tuple[str, ...]:
    status = item.status
    return (
        item.spec.source.pod_ref.name if item.spec.source.pod_ref else "(imported)",
        _truth(is_true(status.conditions, "Ready")),
        status.bound_snapshot_content_name or "-",
        formats.size(status.bytes) if status.bytes else "-",
    )


def _content(item: SnapshotContent) -> tuple[str, ...]:
    status = item.status
    committed = status.committed
    return (
        state_text(item),
        str(status.attempt),
        item.spec.source.node_name or "-",
        f"{item.spec.snapshot_ref.namespace}/{item.spec.snapshot_ref.name}",
        formats.size(committed.bytes) if committed else "-",
        f"gen-{committed.generation}" if committed else "-",
    )


def _restore(item: SnapshotRestore) -> tuple[str, ...]:
    status = item.status
    return (
        item.spec.pod_ref.name,
        item.spec.source,
        state_text(item),
        str(status.attempt),
        status.node_name or "-",
        str(len(status.devices)),
    )


def _job(item: Job) -> tuple[str, ...]:
    status = item.status
    counts = (status.active, status.ready, status.succeeded, status.failed)
    return tuple(map(str, counts))


def _pod(item: Pod) -> tuple[str, ...]:
    status = item.status
    ready = sum(container.ready for container in status.container_statuses)
    return (
        f"{ready}/{len(item.spec.containers)}",
        state_text(item),
        status.node_name or "-",
        str(gpus_wanted(item.spec)),
        item.metadata.annotations.get(RESTORE_FROM, "-"),
    )


def _node(item: Node) -> tuple[str, ...]:
    devices = item.status.devices
    return (
        state_text(item),
        str(len(devices)),
        _memory(devices),
        ",".join(item.status.drivers) or "-",
        item.status.version or "-",
    )


def _memory(devices: Sequence[PresenceDevice]) -> str:
    return formats.size(sum(device.capacity_bytes for device in devices)) if devices else "-"


def _truth(value: bool) -> str:
    return "True" if value else "False"


_SPARE = ("GENERATION", "ATTEMPT", "VERSION", "DRIVERS")
"""Columns that a narrow terminal leaves out, in this order."""

_LAYOUTS: dict[str, tuple[tuple[str, ...], Callable[[Any], tuple[str, ...]]]] = {
    "DynamoCheckpoint": (("PHASE", "MODEL", "SNAPSHOT", "SIZE"), _checkpoint),
    "Snapshot": (("POD", "READY", "CONTENT", "SIZE"), _snapshot),
    "SnapshotContent": (("CAPTURE", "ATTEMPT", "NODE", "SNAPSHOT", "SIZE", "GENERATION"), _content),
    "SnapshotRestore": (("POD", "SOURCE", "STATE", "ATTEMPT", "NODE", "GPUS"), _restore),
    "Job": (("ACTIVE", "READY", "SUCCEEDED", "FAILED"), _job),
    "Pod": (("READY", "STATUS", "NODE", "GPUS", "RESTORE-FROM"), _pod),
    "Node": (("STATUS", "GPUS", "GPU-MEMORY", "DRIVERS", "VERSION"), _node),
}
