"""The command events: what happened to one object or to all, and what happens from now on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated

import typer

from snapshot_api.kinds import KINDS, AnyObject
from snapshot_shared.ids import OrderId, owner_of
from snapshot_shared.orders import Report
from snapshot_shared.spans import SpanRecord
from snapshotctl import objects
from snapshotctl.command import (
    AllNamespaces,
    Namespace,
    command,
    complete_explained,
    new_app,
)
from snapshotctl.domain import targets
from snapshotctl.domain.exits import WrongArguments
from snapshotctl.domain.targets import Target
from snapshotctl.ports import Operator
from snapshotctl.tools import Tools
from snapshotctl.views import related, timeline
from snapshotctl.views.related import ObjectChanged
from snapshotctl.views.timeline import Event

app = new_app()


@command(
    app,
    "snapshotctl events",
    "snapshotctl events demo-llm --follow",
    "snapshotctl events -A -o json | jq 'select(.reason == \"NodeLost\")'",
)
async def events(
    tools: Tools,
    name: Annotated[
        str,
        typer.Argument(
            metavar="[NAME]",
            help="A checkpoint, snapshot, content, pod or node; KIND/NAME.",
            autocompletion=complete_explained,
        ),
    ] = "",
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Go on with what happens from now on.")
    ] = False,
    namespace: Namespace = "default",
    everywhere: AllNamespaces = False,
) -> None:
    """Show what happened to one object and what belongs to it, or to all.

    Reports are kept for 14 days, spans for two; the rest is read from the objects. With -o json
    every event is one line.
    """
    if name and everywhere:
        raise WrongArguments(
            "a name and --all-namespaces exclude each other",
            next_step="leave one of them out: events -A",
        )
    wanted = targets.explained(name, namespace) if name else []
    space = None if everywhere else targets.checked_namespace(namespace)
    async with tools.operator(patiently=follow) as operator:
        if follow:
            await _follow(operator, tools, wanted, space)
            return
        found, _ = await _read(operator, wanted, space)
    if not tools.screen.wants_table:
        for event in found:
            tools.screen.entry(event.value())
    elif found:
        tools.screen.table(timeline.table(found))
    else:
        tools.screen.note("nothing has happened yet")


async def _follow(
    operator: Operator, tools: Tools, wanted: Sequence[Target], namespace: str | None
) -> None:
    """Show what happened, then what happens, until cancelled."""
    shown: set[tuple[object, ...]] = set()

    def show(found: Sequence[Event]) -> None:
        for event in found:
            if event.key in shown:
                continue
            shown.add(event.key)
            if tools.screen.wants_table:
                tools.screen.line(timeline.line(event))
            else:
                tools.screen.entry(event.value())

    # Subscribed before the events are read, so that none between the two is lost.
    async with operator.news() as news:
        found, names = await _read(operator, wanted, namespace)
        show(found)
        live = _Live(names, is_all=not wanted, namespace=namespace)
        async for item in news:
            if item is None:
                found, live.names = await _read(operator, wanted, namespace)
                show(found)
            elif isinstance(item, ObjectChanged):
                if live.concerns(item):
                    value = await operator.get(item.target)
                    show(live.changed(item, value, tools.now()))
            else:
                show(live.received(item))


async def _read(
    operator: Operator, wanted: Sequence[Target], namespace: str | None
) -> tuple[list[Event], dict[str, str]]:
    """Read the events, and the references by uid of the objects that they are about."""
    if wanted:
        root = await objects.find(operator, wanted)
        found = await objects.gather(operator, root)
        return await objects.timeline_of(operator, found), timeline.names_of(found.primary)
    values: list[AnyObject] = []
    for kind in KINDS.values():
        values += await operator.all_of(kind, None)
    ours = [value for value in values if related.is_in(value, namespace)]
    others = {value.metadata.uid for value in values} - {value.metadata.uid for value in ours}
    reports = [
        report
        for report in await operator.reports()
        if owner_of(OrderId(report.order)) not in others
    ]
    names = timeline.names_of(ours)
    return timeline.timeline(ours, reports, await operator.all_spans(), names), names


class _Live:
    """The news of some objects, or of all of a namespace; objects that they own are added."""

    def __init__(self, names: Mapping[str, str], *, is_all: bool, namespace: str | None) -> None:
        self.names = dict(names)
        self._is_all = is_all
        self._namespace = namespace

    def received(self, news: Report | SpanRecord) -> list[Event]:
        """Return the events of a report or a span."""
        if isinstance(news, Report):
            is_ours = owner_of(OrderId(news.order)) in self.names
            return [timeline.of_report(news, self.names)] if is_ours else []
        known = set(self.names.values())
        return [item for item in timeline.of_span(news, self.names) if item.object in known]

    def concerns(self, news: ObjectChanged) -> bool:
        """Whether an object that has changed may be one of them."""
        return self._is_all or news.concerns(self.names)

    def changed(self, news: ObjectChanged, value: AnyObject | None, now: float) -> list[Event]:
        """Return the events of an object as it is now, also known ones. None: it is gone."""
        if value is None or value.metadata.uid != news.uid:
            name = self.names.get(news.uid, str(news.target))
            is_known = news.uid in self.names and news.type == "DELETED"
            return [timeline.gone(name, news.uid, now)] if is_known else []
        if self._is_all and not related.is_in(value, self._namespace):
            return []
        self.names[news.uid] = related.reference(value)
        # The reason of a condition may be new while the time is that of its status.
        return [
            item._replace(at=now) if item.source == "condition" else item
            for item in timeline.of_object(value)
        ]
