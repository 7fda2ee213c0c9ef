"""The command describe: all that is known of one object, in titled lines and tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from snapshot_api.facts import Pod
from snapshot_api.kinds import KINDS, AnyObject, kind_of
from snapshot_api.v1alpha1.content import SnapshotContent
from snapshot_api.v1alpha1.restore import SnapshotRestore
from snapshot_api.views import orders_of
from snapshotctl import objects
from snapshotctl.command import KindAndName, Namespace, command, new_app
from snapshotctl.domain import formats, targets
from snapshotctl.ports import Operator, Screen
from snapshotctl.tools import Tools
from snapshotctl.views import timeline
from snapshotctl.views.tables import Table

INDENT = "  "
NAMES = 16
_HIDDEN = ("conditions", "orders", "obligations", "readers", "committed", "vector")
"""Parts of a status that have tables and lines of their own."""

app = new_app()


@command(
    app,
    "snapshotctl describe dynamocheckpoint demo-llm",
    "snapshotctl describe pod/demo-llm-restored",
    "snapshotctl describe node node-1 -o json",
)
async def describe(tools: Tools, words: KindAndName, namespace: Namespace = "default") -> None:
    """Show all that is known of one object, and what happened to it."""
    wanted = targets.meant_one(words, namespace)
    async with tools.operator() as operator:
        value = await objects.find(operator, wanted)
        found = await objects.gather(operator, value)
        events = await objects.timeline_of(operator, found)
        readers = await _readers(operator, value)
    restore = found.restore if isinstance(value, Pod) else None
    if not tools.screen.wants_table:
        shown = {
            "object": formats.data(value),
            "readers": readers,
            "events": [event.value() for event in events],
        }
        tools.screen.value(shown | ({"restore": formats.data(restore)} if restore else {}))
        return
    for section in sections(value, readers, tools.now(), restore):
        _show(tools.screen, section)
    _show(tools.screen, Section("Events:", table=timeline.table(events)))


async def _readers(operator: Operator, value: AnyObject) -> Sequence[str]:
    """Return the pods that restore from a content; restores that are gone by their uids."""
    if not isinstance(value, SnapshotContent) or not value.status.readers:
        return []
    restores = await operator.all_of(KINDS["SnapshotRestore"], None)
    names = {
        restore.metadata.uid: f"{restore.metadata.namespace}: pod/{restore.spec.pod_ref.name}"
        for restore in restores
        if isinstance(restore, SnapshotRestore)
    }
    return [names.get(uid, f"(gone) {uid}") for uid in value.status.readers]


class Section(NamedTuple):
    """A title with lines, or with a table below it."""

    title: str
    lines: Sequence[str] = ()
    table: Table | None = None


def sections(
    value: AnyObject, readers: Sequence[str], now: float, restore: SnapshotRestore | None = None
) -> list[Section]:
    """Return what is printed of an object.

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
    """Return nested values as indented lines; what is empty is left out."""
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
                formats.clock(item.ordered_at.timestamp()),
                formats.span_time(lasted.total_seconds()) if lasted else "-",
                formats.plain(f"{failure.reason}: {failure.message}") if failure else "-",
            )
        )
    head = ("ORDER", "ATTEMPT", "WHERE", "STATE", "ORDERED", "TOOK", "FAILURE")
    return Table(head, list(rows))


def _show(screen: Screen, section: Section) -> None:
    title, lines, table = section
    if title and not lines and (table is None or not table.rows):
        screen.line(f"{title:<{NAMES}} none", strong=True)
        return
    if title:
        screen.line(title, strong=True)
    indent = INDENT if title else ""
    for line in lines:
        screen.line(f"{indent}{line}")
    if table is not None:
        screen.table(table, indent=indent)
