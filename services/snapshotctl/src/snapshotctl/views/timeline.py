"""What happened to objects, and when: the store, the reports and the spans as one list.

The store has when an object was made, when its conditions changed last, and its orders with their
last reports. The stream of reports has every report of the last 14 days, also of objects that are
gone. The spans have the steps that failed.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from snapshot_api.kinds import AnyObject
from snapshot_api.meta import Condition, OrderStatus, condition
from snapshot_api.views import orders_of, part_of
from snapshot_shared.ids import OrderId, owner_of, verb_of
from snapshot_shared.orders import Report
from snapshot_shared.spans import SpanRecord
from snapshot_shared.steps import STEPS, names
from snapshotctl.domain import formats
from snapshotctl.views.related import reference
from snapshotctl.views.state import again
from snapshotctl.views.tables import Table

_STEPS = frozenset(step for verb in STEPS for step in names(verb))
_WHOLE = ("capture", "restoration")
_SILENT = (("Failed", "False"), ("Lost", "False"), ("Quarantined", "False"))
"""Conditions that every object without trouble has."""

_EXITS = ("Completed", "ContainerExited")
"""Reasons of a pod whose end is in a report."""
_PLACED = "PodScheduled is True"
_DERIVED = re.compile(
    r"snapshot(content|restore)/(?:snapshotcontent|restore)-([0-9a-f]{8})[0-9a-f-]{28}"
)
_RANKS = {"object": 0, "order": 1, "report": 2, "span": 3, "condition": 4}


class Event(NamedTuple):
    """One thing that happened. `at` is seconds since the epoch; those of the store are whole.

    `source` is object, condition, order, report or span. `key` is the same for the same thing,
    wherever it was read.
    """

    at: float
    source: str
    object: str
    what: str
    reason: str = ""
    message: str = ""
    node: str = ""
    order: str = ""
    attempt: int = 0
    key: tuple[Any, ...] = ()

    @property
    def head(self) -> str:
        """What happened, with its reason where it has one."""
        return formats.plain(": ".join(filter(None, (self.what, self.reason))))

    @property
    def text(self) -> str:
        """What happened, with its reason and message where it has them."""
        return formats.plain(": ".join(filter(None, (self.what, self.reason, self.message))))

    @property
    def where(self) -> str:
        """The object, shortened: the names of contents and restores hold a whole uid."""
        return formats.plain(_DERIVED.sub(r"\1 \2…", self.object))

    def value(self) -> dict[str, Any]:
        """Return what `-o json` prints: an RFC 3339 time, and the fields that are set."""
        found = {"time": formats.stamp(self.at), **self._asdict()}
        return {name: item for name, item in found.items() if item and name not in ("at", "key")}


def names_of(objects: Iterable[AnyObject]) -> dict[str, str]:
    """Return the references of objects by their uids."""
    return {value.metadata.uid: reference(value) for value in objects}


def timeline(
    objects: Iterable[AnyObject],
    reports: Iterable[Report],
    spans: Iterable[SpanRecord],
    names: Mapping[str, str],
) -> list[Event]:
    """Return everything that happened, the oldest first, each event once.

    `names` are references by uid, also of objects whose own events are left out.
    """
    found: dict[tuple[Any, ...], Event] = {}
    for value in objects:
        for event in of_object(value):
            found.setdefault(event.key, event)
    for report in reports:
        event = of_report(report, names)
        found.setdefault(event.key, event)
    for span in spans:
        for event in of_span(span, names):
            found.setdefault(event.key, event)
    return sorted(found.values(), key=_moment)


def _moment(event: Event) -> tuple[float, int]:
    # A condition's time is cut to the second in which it changed; the causes come before it.
    is_cut = event.source == "condition" and not event.at % 1
    if is_cut and event.what == _PLACED:
        # Everything else that is done for a pod comes after this one.
        return (event.at, _RANKS["object"])
    return (event.at + (0.999 if is_cut else 0.0), _RANKS[event.source])


def of_object(value: AnyObject) -> Iterator[Event]:
    """Yield what the store has of one object."""
    meta, name = value.metadata, reference(value)
    created = formats.instant(meta.creation_timestamp)
    if created is not None:
        yield Event(created, "object", name, "created", key=(meta.uid, "created"))
    deleted = formats.instant(meta.deletion_timestamp or "")
    if deleted is not None:
        what = "deletion was asked for"
        yield Event(deleted, "object", name, what, key=(meta.uid, "deleted"))
    failed = condition(value.status.conditions, "Failed")
    for item in value.status.conditions:
        at = formats.instant(item.last_transition_time)
        # Ready was False before, too: its time is not that of the failure, or of the end.
        is_echo = item.type == "Ready" and (_is_same_failure(item, failed) or item.reason in _EXITS)
        if at is not None and (item.type, item.status) not in _SILENT and not is_echo:
            yield Event(
                at,
                "condition",
                name,
                f"{item.type} is {item.status}",
                item.reason,
                item.message,
                key=(meta.uid, item.type, item.status, item.reason, item.last_transition_time),
            )
    for order in orders_of(value):
        yield from _of_order(order, name, {meta.uid: name})


def _is_same_failure(ready: Condition, failed: Condition | None) -> bool:
    return failed is not None and failed.status == "True" and ready.reason == failed.reason


def gone(name: str, uid: str, at: float) -> Event:
    """Return the event that an object is gone."""
    return Event(at, "object", name, "gone", key=(uid, "gone"))


def _of_order(item: OrderStatus, name: str, names: Mapping[str, str]) -> Iterator[Event]:
    yield Event(
        formats.seconds(item.ordered_at),
        "order",
        name,
        f"{_subject(item.order)} ordered from {item.service}@{item.node}{again(item.attempt)}",
        node=item.node,
        order=item.order,
        attempt=item.attempt,
        key=(item.order, item.attempt, "ordered"),
    )
    if item.final is not None:
        yield of_report(item.final, names)
    if item.state == "lost":
        yield Event(
            formats.seconds(item.ended_at),
            "order",
            name,
            f"{_subject(item.order)} was lost with its node",
            "NodeLost",
            node=item.node,
            order=item.order,
            attempt=item.attempt,
            key=(item.order, item.attempt, "lost"),
        )


def of_report(report: Report, names: Mapping[str, str]) -> Event:
    """Return the event of a report. An object that is gone is named by its uid."""
    uid = owner_of(OrderId(report.order))
    failure = report.failure
    return Event(
        report.at,
        "report",
        names.get(uid, f"(gone) {uid}"),
        f"{_subject(report.order)} {report.kind} by {report.service}@{report.node}"
        f"{again(report.attempt)}{_result(report)}",
        failure.reason if failure else "",
        failure.message if failure else report.message,
        node=report.node,
        order=report.order,
        attempt=report.attempt,
        key=(report.order, report.attempt, "report", report.n),
    )


def _result(report: Report) -> str:
    if report.kind == "exited":
        return f" with exit code {'unknown' if report.exit_code is None else report.exit_code}"
    if report.unconfirmed:
        return ", unconfirmed"
    size = report.part.bytes if report.part else report.bytes
    return f", {formats.size(size)}" if size else ""


def is_about(span: SpanRecord, objects: Iterable[AnyObject]) -> bool:
    """Whether a span is about one of some objects; their trace may hold what others did."""
    known = list(objects)
    if order := str(span.attributes.get("snapback.order.id", "")):
        return owner_of(OrderId(order)) in {value.metadata.uid for value in known}
    if span.name in _WHOLE:
        key = "snapback.content" if span.name == "capture" else "snapback.pod"
        return span.attributes.get(key) in {value.metadata.name for value in known}
    return True


def of_span(span: SpanRecord, names: Mapping[str, str]) -> Iterator[Event]:
    """Yield what reports do not have: failed steps, and how long a capture or restore took."""
    order = str(span.attributes.get("snapback.order.id", ""))
    took = formats.span_time((span.end_ns - span.start_ns) / 1e9)
    if span.name in _STEPS and span.error and order:
        what = f"step {span.name} of {_subject(order)} failed after {took}"
        served = owner_of(OrderId(order))
        name = names.get(served, f"(gone) {served}")
    elif span.name in _WHOLE:
        what = f"the {span.name} {'failed' if span.error else 'ended'} after {took}"
        kind = "snapshotcontent" if span.name == "capture" else "pod"
        owner = span.attributes.get(
            "snapback.content" if span.name == "capture" else "snapback.pod"
        )
        name = f"{kind}/{owner or '?'}"
    else:
        return
    yield Event(
        span.end_ns / 1e9,
        "span",
        name,
        what,
        message=span.error,
        node=span.node,
        order=order,
        key=(span.trace_id, span.span_id),
    )


def _subject(order: str) -> str:
    part = part_of(order)
    return f"{verb_of(OrderId(order))} {part}" if part else verb_of(OrderId(order))


def table(events: Iterable[Event]) -> Table:
    """Return events as a table."""
    cells = (
        (formats.stamp(item.at)[:10], formats.clock(item.at), item.where, item.text)
        for item in events
    )
    return Table(("DATE", "TIME", "OBJECT", "WHAT"), list(cells))


def line(event: Event) -> str:
    """Return one event as one line, for lists that grow."""
    at = f"{formats.stamp(event.at)[:10]} {formats.clock(event.at):<12}"
    return f"{at}   {event.where}   {event.text}"
