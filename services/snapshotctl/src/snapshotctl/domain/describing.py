"""An object as `kubectl describe` shows one: titled lines and small tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from snapshot_shared.objects import (
    AnyObject,
    Pod,
    SnapshotContent,
    SnapshotRestore,
    kind_of,
)
from snapshotctl.domain import formats
from snapshotctl.domain.history import clock
from snapshotctl.domain.kin import orders_of
from snapshotctl.domain.rows import Table

INDENT = "  "
NAMES = 16
_HIDDEN = ("conditions", "orders", "obligations", "readers", "committed", "vector")
"""Parts of a status that have tables and lines of their own."""


class Section(NamedTuple):
    """A title with lines, or with a table below it."""

    title: str
    lines: Sequence[str] = ()
    table: Table | None = None


def sections(
    value: AnyObject,
    readers: Sequence[str],
    now: float,
    restore: SnapshotRestore | None = None,
) -> list[Section]:
    """Lay an object out.

    `readers` are the pods that restore from it, by name where known, and `restore` is its own.
    """
    found = [
        Section("", _identity(value, now)),
        Section("Spec:", _tree(formats.data(value.spec))),
        Section("Status:", _status(value)),
        Section("Conditions:", table=_conditions(value, now)),
    ]
    if isinstance(value, SnapshotContent):
        found.append(Section("Parts:", table=_parts(value)))
        found.append(Section("Readers:", readers))
    if restore is not None:
        about = [f"{'name:':<{NAMES}} {restore.metadata.name}", *_status(restore)]
        found.append(Section("Restore:", about))
        found.append(Section("Orders of the restore:", table=_orders(restore)))
    if isinstance(value, SnapshotContent | SnapshotRestore | Pod):
        found.append(Section("Orders:", table=_orders(value)))
        found.append(Section("Obligations:", value.status.obligations))
    return found


def _identity(value: AnyObject, now: float) -> list[str]:
    meta = value.metadata
    age = formats.age_of(meta.creation_timestamp, now)
    owners = [f"{owner.kind.lower()}/{owner.name}" for owner in meta.owner_references]
    rows = [
        ("Name", meta.name),
        ("Namespace", meta.namespace or ""),
        ("Kind", kind_of(value).name),
        ("UID", meta.uid),
        ("Created", f"{meta.creation_timestamp} ({age} ago)"),
        ("Deletion", meta.deletion_timestamp or ""),
        ("Owner", ", ".join(owners)),
        *(("Label", f"{key}={text}") for key, text in meta.labels.items()),
        *(("Annotation", f"{key}={text}") for key, text in meta.annotations.items()),
    ]
    return [f"{f'{title}:':<{NAMES}} {formats.plain(text)}" for title, text in rows if text]


def _status(value: AnyObject) -> list[str]:
    status: dict[str, Any] = formats.data(value.status)
    return _tree({key: item for key, item in status.items() if key not in _HIDDEN})


def _tree(value: Any) -> list[str]:
    """Write nested values as indented lines; what is empty is left out."""
    if isinstance(value, dict):
        lines = []
        for key, item in value.items():
            if item in ("", None, [], {}):
                continue
            if isinstance(item, dict | list):
                lines += [f"{key}:", *(INDENT + line for line in _tree(item))]
            else:
                lines.append(f"{key + ':':<{NAMES}} {formats.plain(str(item))}")
        return lines
    if all(not isinstance(item, dict | list) for item in value):
        return [formats.plain(" ".join(map(str, value)))]
    lines = []
    for item in value:
        first, *rest = _tree(item) or ["-"]
        lines += [f"- {first}", *(INDENT + line for line in rest)]
    return lines


def _conditions(value: AnyObject, now: float) -> Table:
    rows = [
        (
            item.type,
            item.status,
            item.reason,
            formats.age_of(item.last_transition_time, now),
            formats.plain(item.message),
        )
        for item in value.status.conditions
    ]
    return Table(("TYPE", "STATUS", "REASON", "SINCE", "MESSAGE"), list(rows))


def _parts(content: SnapshotContent) -> Table:
    committed = content.status.committed
    layouts = {entry.part: entry.layout for entry in content.status.vector}
    sizes = {part.part: part for part in committed.parts} if committed else {}
    rows = []
    for name, layout in layouts.items():
        part = sizes.get(name)
        rows.append(
            (
                name,
                formats.size(part.bytes) if part else "-",
                part.digest if part else "not staged",
                layout.device if layout else "-",
                layout.structure_hash[:16] if layout else "-",
            )
        )
    return Table(("PART", "SIZE", "DIGEST OF ITS MANIFEST", "DEVICE", "STRUCTURE"), list(rows))


def _orders(value: AnyObject) -> Table:
    rows = []
    for item in orders_of(value):
        failure = item.final.failure if item.final else None
        lasted = item.ended_at - item.ordered_at if item.ended_at else None
        rows.append(
            (
                item.order,
                str(item.attempt),
                f"{item.service}@{item.node}",
                item.state,
                clock(item.ordered_at.timestamp()),
                formats.span_time(lasted.total_seconds()) if lasted else "-",
                formats.plain(f"{failure.reason}: {failure.message}") if failure else "-",
            )
        )
    head = ("ORDER", "ATTEMPT", "WHERE", "STATE", "ORDERED", "TOOK", "FAILURE")
    return Table(head, list(rows))
