"""What happened to objects, and when: from the store, the reports and the spans, as one list.

The store knows when an object was made, when its conditions changed last, and its orders with
their last reports. The stream of reports knows every report of the last 14 days, also of objects
that are gone. The spans say which steps failed.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from datetime import UTC, datetime
from typing import Any, NamedTuple

from snapshot_shared.ids import OrderId, owner_of, verb_of
from snapshot_shared.objects import AnyObject, Condition, OrderStatus, condition
from snapshot_shared.orders import Report
from snapshot_shared.spans import SpanRecord
from snapshot_shared.steps import STEPS, names
from snapshotctl.domain import formats
from snapshotctl.domain.kin import orders_of, reference
from snapshotctl.domain.rows import Table

_STEPS = frozenset(step for verb in STEPS for step in names(verb))
FORGET_ATTEMPT = 1000
"""From here on attempts number the ways to end a pod, not tries."""

_WHOLE = ("capture", "restoration")
_SILENT = (("Failed", "False"), ("Lost", "False"), ("Quarantined", "False"))
"""What goes without saying."""

_DERIVED = re.compile(
    r"snapshot(content|restore)/(?:snapshotcontent|restore)-([0-9a-f]{8})[0-9a-f-]{28}"
)
_RANKS = {"object": 0, "order": 1, "report": 2, "span": 3, "condition": 4}


class Happening(NamedTuple):
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
        """Whose it is, short enough for a line: names of contents and restores hold a whole uid."""
        return formats.plain(_DERIVED.sub(r"\1 \2…", self.object))

    def value(self) -> dict[str, Any]:
        """Give what a program reads: an RFC 3339 time, and what is known."""
        found = {"time": stamp(self.at), **self._asdict()}
        return {name: item for name, item in found.items() if item and name not in ("at", "key")}


def stamp(at: float) -> str:
    """Write seconds since the epoch as RFC 3339 with milliseconds."""
    return datetime.fromtimestamp(at, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def clock(at: float) -> str:
    """Write the time of day with milliseconds, or without where none are known."""
    return stamp(at)[11:23] if at % 1 else stamp(at)[11:19]


def names_of(objects: Iterable[AnyObject]) -> dict[str, str]:
    """Give the objects' references by their uids."""
    return {value.metadata.uid: reference(value) for value in objects}


def history(
    objects: Iterable[AnyObject],
    reports: Iterable[Report],
    spans: Iterable[SpanRecord],
    names: Mapping[str, str],
) -> list[Happening]:
    """Merge all that is known into one list, the oldest first, each thing once.

    `names` are references by uid, also of objects whose own history is not asked for.
    """
    found: dict[tuple[Any, ...], Happening] = {}
    for value in objects:
        for happening in of_object(value):
            found.setdefault(happening.key, happening)
    for report in reports:
        happening = of_report(report, names)
        found.setdefault(happening.key, happening)
    for span in spans:
        for happening in of_span(span, names):
            found.setdefault(happening.key, happening)
    return sorted(found.values(), key=_moment)


def _moment(happening: Happening) -> tuple[float, int]:
    # A condition's time is cut to the second in which it changed; the causes come before it.
    late = 0.999 if happening.source == "condition" and not happening.at % 1 else 0.0
    return (happening.at + late, _RANKS[happening.source])


def of_object(value: AnyObject) -> Iterator[Happening]:
    """Give what the store knows of one object."""
    meta, name = value.metadata, reference(value)
    created = formats.instant(meta.creation_timestamp)
    if created is not None:
        yield Happening(created, "object", name, "created", key=(meta.uid, "created"))
    deleted = formats.instant(meta.deletion_timestamp or "")
    if deleted is not None:
        what = "deletion was asked for"
        yield Happening(deleted, "object", name, what, key=(meta.uid, "deleted"))
    failed = condition(value.status.conditions, "Failed")
    for item in value.status.conditions:
        at = formats.instant(item.last_transition_time)
        # It was not ready before either, so that its time is not the one of the failure.
        is_echo = item.type == "Ready" and _is_same_failure(item, failed)
        if at is not None and (item.type, item.status) not in _SILENT and not is_echo:
            yield Happening(
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


def gone(name: str, uid: str, at: float) -> Happening:
    """Say that an object is no more."""
    return Happening(at, "object", name, "gone", key=(uid, "gone"))


def _of_order(item: OrderStatus, name: str, names: Mapping[str, str]) -> Iterator[Happening]:
    yield Happening(
        formats.seconds(item.ordered_at),
        "order",
        name,
        f"{_subject(item.order)} ordered from {item.service}@{item.node}{_again(item.attempt)}",
        node=item.node,
        order=item.order,
        attempt=item.attempt,
        key=(item.order, item.attempt, "ordered"),
    )
    if item.final is not None:
        yield of_report(item.final, names)
    if item.state == "lost":
        yield Happening(
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


def of_report(report: Report, names: Mapping[str, str]) -> Happening:
    """Give what a report tells. An object that is gone is named by its uid."""
    uid = owner_of(OrderId(report.order))
    failure = report.failure
    return Happening(
        report.at,
        "report",
        names.get(uid, f"(gone) {uid}"),
        f"{_subject(report.order)} {report.kind} by {report.service}@{report.node}"
        f"{_again(report.attempt)}{_result(report)}",
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
        return " without being told"
    size = report.part.bytes if report.part else report.bytes
    return f", {formats.size(size)}" if size else ""


def of_span(span: SpanRecord, names: Mapping[str, str]) -> Iterator[Happening]:
    """Give what a span tells that reports do not: failed steps, and how long the whole took."""
    order = str(span.attributes.get("snapback.order.id", ""))
    took = formats.span_time((span.end_ns - span.start_ns) / 1e9)
    if span.name in _STEPS and span.error and order:
        what = f"step {span.name} of {_subject(order)} failed after {took}"
        name = names.get(owner_of(OrderId(order)), f"(gone) {order}")
    elif span.name in _WHOLE:
        what = f"the {span.name} {'failed' if span.error else 'ended'} after {took}"
        kind = "snapshotcontent" if span.name == "capture" else "pod"
        owner = span.attributes.get(
            "snapback.content" if span.name == "capture" else "snapback.pod"
        )
        name = f"{kind}/{owner or '?'}"
    else:
        return
    yield Happening(
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
    part = order.partition("-")[2][37:]
    return f"{verb_of(OrderId(order))} {part}" if part else verb_of(OrderId(order))


def _again(attempt: int) -> str:
    return f" (attempt {attempt})" if 1 < attempt < FORGET_ATTEMPT else ""


def table(happenings: Iterable[Happening]) -> Table:
    """Lay out happenings in rows."""
    cells = ((stamp(item.at)[:10], clock(item.at), item.where, item.text) for item in happenings)
    return Table(("DATE", "TIME", "OBJECT", "WHAT"), list(cells))


def line(happening: Happening) -> str:
    """Write one happening as one line, for lists that grow."""
    at = f"{stamp(happening.at)[:10]} {clock(happening.at):<12}"
    return f"{at}   {happening.where}   {happening.text}"
