"""The command describe: all that is known of one object."""

from __future__ import annotations

from collections.abc import Sequence

from snapshot_shared.objects import KINDS, AnyObject, Pod, SnapshotContent, SnapshotRestore
from snapshotctl.domain import describing, formats, history
from snapshotctl.domain.describing import INDENT
from snapshotctl.domain.rows import Table
from snapshotctl.domain.targets import Target
from snapshotctl.handlers import looking
from snapshotctl.handlers.objects import existing
from snapshotctl.ports import Operator, Screen


async def describe(operator: Operator, screen: Screen, target: Target, *, now: float) -> None:
    """Show one object with its conditions, orders and events. NotFound."""
    value = await existing(operator, target)
    gathered = await looking.gather(operator, value)
    happened = await looking.history_of(operator, gathered)
    readers = await _readers(operator, value)
    restore = gathered.restore if isinstance(value, Pod) else None
    if not screen.wants_table:
        events = [item.value() for item in happened]
        found = {"object": formats.data(value), "readers": readers, "events": events}
        screen.value(found | ({"restore": formats.data(restore)} if restore else {}))
        return
    for section in describing.sections(value, readers, now, restore):
        _show(screen, section.title, section.lines, section.table)
    _show(screen, "Events:", (), history.table(happened))


async def _readers(operator: Operator, value: AnyObject) -> Sequence[str]:
    """Name the pods that restore from a content; restores that are gone by their uids."""
    if not isinstance(value, SnapshotContent) or not value.status.readers:
        return []
    restores = await operator.all_of(KINDS["SnapshotRestore"], None)
    names = {
        restore.metadata.uid: f"{restore.metadata.namespace}: pod/{restore.spec.pod_ref.name}"
        for restore in restores
        if isinstance(restore, SnapshotRestore)
    }
    return [names.get(uid, f"(gone) {uid}") for uid in value.status.readers]


def _show(screen: Screen, title: str, lines: Sequence[str], table: Table | None) -> None:
    if title and not lines and (table is None or not table.rows):
        screen.line(f"{title:<{describing.NAMES}} none", strong=True)
        return
    if title:
        screen.line(title, strong=True)
    indent = INDENT if title else ""
    for line in lines:
        screen.line(f"{indent}{line}")
    if table is not None:
        screen.table(table, indent=indent)
