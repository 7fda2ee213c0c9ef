"""Objects of a kind as they change: what is new between two reads, and rows below one head."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

from snapshot_api.kind import Kind
from snapshot_api.kinds import AnyObject
from snapshotctl.views.tables import table_of

Change = Literal["ADDED", "MODIFIED", "DELETED"]
GONE = "(deleted)"
"""What stands behind the last row of an object."""
GAP = 3


def changes(
    before: Sequence[AnyObject], after: Sequence[AnyObject]
) -> Iterator[tuple[Change, AnyObject]]:
    """Yield what differs between two reads. An object is another one when its uid is."""
    old = {item.metadata.uid: item for item in before}
    new = {item.metadata.uid: item for item in after}
    for uid, item in old.items():
        if uid not in new:
            yield "DELETED", item
    for uid, item in new.items():
        if uid not in old:
            yield "ADDED", item
        elif item.metadata.resource_version != old[uid].metadata.resource_version:
            yield "MODIFIED", item


class ChangingTable:
    """Rows that come one after another. A column is as wide as its widest cell until then."""

    def __init__(self, kind: Kind, *, with_namespace: bool, is_wide: bool) -> None:
        """Show objects of `kind`, with the columns of `tables.table_of`."""
        self._kind = kind
        self._with_namespace = with_namespace
        self._is_wide = is_wide
        self._widths: list[int] = []
        self.is_first = True
        """Whether the last lines began with the head."""

    def lines(self, found: Sequence[AnyObject], now: float, *, is_gone: bool) -> list[str]:
        """Return the rows of objects, below the head where they are the first."""
        if not found:
            return []
        table = table_of(
            self._kind,
            found,
            now,
            with_namespace=self._with_namespace,
            is_wide=self._is_wide,
        )
        self.is_first = not self._widths
        rows = [table.columns, *table.rows] if self.is_first else table.rows
        known = self._widths or [0] * len(table.columns)
        widest = [max(len(row[index]) for row in rows) for index in range(len(known))]
        self._widths = list(map(max, known, widest))
        tail = f"{' ' * GAP}{GONE}" if is_gone else ""
        return [(" " * GAP).join(map(str.ljust, row, self._widths)).rstrip() + tail for row in rows]
