"""The command events: what happened to one object or to all, and what happens from now on."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from snapshot_shared.ids import OrderId, owner_of
from snapshot_shared.objects import KINDS, AnyObject
from snapshot_shared.orders import Report
from snapshot_shared.spans import SpanRecord
from snapshotctl.domain import history, kin
from snapshotctl.domain.history import Happening
from snapshotctl.domain.kin import Changed
from snapshotctl.domain.targets import Target
from snapshotctl.handlers import looking
from snapshotctl.ports import Operator, Screen


async def events(
    operator: Operator, screen: Screen, targets: Sequence[Target], namespace: str | None
) -> None:
    """Show the history of the first target that exists, or without targets of everything."""
    happened, _ = await _read(operator, targets, namespace)
    if screen.wants_table and happened:
        screen.table(history.table(happened))
    elif screen.wants_table:
        screen.note("nothing has happened yet")
    for item in happened if not screen.wants_table else []:
        screen.entry(item.value())


async def follow(
    operator: Operator,
    screen: Screen,
    targets: Sequence[Target],
    namespace: str | None,
    wall: Callable[[], float],
) -> None:
    """Show the history, then what happens, for ever. `wall` is the clock, since the epoch."""
    shown: set[tuple[object, ...]] = set()

    def show(found: Sequence[Happening]) -> None:
        for item in found:
            if item.key in shown:
                continue
            shown.add(item.key)
            if screen.wants_table:
                screen.line(history.line(item))
            else:
                screen.entry(item.value())

    async with operator.news() as news:
        happened, names = await _read(operator, targets, namespace)
        show(happened)
        live = _Live(names, is_all=not targets, namespace=namespace)
        async for item in news:
            if item is None:
                happened, live.names = await _read(operator, targets, namespace)
                show(happened)
            elif isinstance(item, Changed):
                if live.concerns(item):
                    value = await operator.get(item.target)
                    show(live.changed(item, value, wall()))
            else:
                show(live.heard(item))


async def _read(
    operator: Operator, targets: Sequence[Target], namespace: str | None
) -> tuple[list[Happening], dict[str, str]]:
    """Read a history, and the references by uid of the objects that it is about."""
    if targets:
        root = await looking.find(operator, targets)
        found = await looking.gather(operator, root)
        return await looking.history_of(operator, found), history.names_of(found.told)
    values: list[AnyObject] = []
    for kind in KINDS.values():
        values += await operator.all_of(kind, None)
    ours = [value for value in values if kin.is_in(value, namespace)]
    strange = {value.metadata.uid for value in values} - {value.metadata.uid for value in ours}
    reports = [
        report
        for report in await operator.reports()
        if owner_of(OrderId(report.order)) not in strange
    ]
    names = history.names_of(ours)
    return history.history(ours, reports, await operator.all_spans(), names), names


class _Live:
    """What of the news belongs to a history, whose objects grow in number."""

    def __init__(self, names: Mapping[str, str], *, is_all: bool, namespace: str | None) -> None:
        self.names = dict(names)
        self._is_all = is_all
        self._namespace = namespace

    def heard(self, news: Report | SpanRecord) -> list[Happening]:
        """Give what a report or a span tells."""
        if isinstance(news, Report):
            is_ours = owner_of(OrderId(news.order)) in self.names
            return [history.of_report(news, self.names)] if is_ours else []
        known = set(self.names.values())
        return [item for item in history.of_span(news, self.names) if item.object in known]

    def concerns(self, news: Changed) -> bool:
        """Say whether an object that has changed may belong to it."""
        return self._is_all or news.is_of(self.names)

    def changed(self, news: Changed, value: AnyObject | None, now: float) -> list[Happening]:
        """Give what is new of an object, as it is now; None when it is gone."""
        if value is None or value.metadata.uid != news.uid:
            name = self.names.get(news.uid, str(news.target))
            is_known = news.uid in self.names and news.type == "DELETED"
            return [history.gone(name, news.uid, now)] if is_known else []
        if self._is_all and not kin.is_in(value, self._namespace):
            return []
        self.names[news.uid] = kin.reference(value)
        # Its condition may have another reason since a moment, and the same status for long.
        return [
            item._replace(at=now) if item.source == "condition" else item
            for item in history.of_object(value)
        ]
