"""The queue of each service, the history of one order, and the dead letters.

They are made of three sources: the stream of orders, the objects that own them, and progress.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from snapshot_api.kinds import AnyObject, kind_of
from snapshot_api.meta import OrderStatus
from snapshot_api.v1alpha1.content import SnapshotContent
from snapshot_api.v1alpha1.restore import SnapshotRestore
from snapshot_api.views import is_answered
from snapshot_shared import subjects
from snapshot_shared.errors import InvalidName
from snapshot_shared.ids import check_order_id
from snapshot_shared.orders import DeadLetter, Progress, Report, driver_of, envelope_of, order_in
from snapshot_shared.spans import SpanRecord, order_context, parse_traceparent
from snapshot_shared.steps import STEPS, table
from snapshotctl.domain import formats
from snapshotctl.domain.exits import WrongArguments
from snapshotctl.views.state import order_state
from snapshotctl.views.tables import Table


class Queued(NamedTuple):
    """A message of the stream of orders. `at` is when it was stored, seconds since the epoch."""

    subject: str
    sequence: int
    at: float
    payload: bytes


class Owned(NamedTuple):
    """An order in the status of the object that it serves."""

    owner: AnyObject
    item: OrderStatus


Steps = Mapping[tuple[str, int], str]
"""The step at which an order is, and how much of it is done, by (order, attempt)."""


class OrderLine(msgspec.Struct, frozen=True, kw_only=True):
    """One order in the queue of a service. `at` is when it was ordered, seconds since the epoch."""

    node: str
    service: str
    order: str
    verb: str
    attempt: int
    owner: str
    state: str
    at: float


class DeadMessage(NamedTuple):
    """A message that was no order, and its number, which is its sequence in the stream DEAD."""

    number: int
    content: DeadLetter


def owned_orders(owners: Iterable[AnyObject]) -> list[Owned]:
    """Return all orders in the statuses of objects; most kinds have none."""
    return [Owned(owner, item) for owner in owners for item in getattr(owner.status, "orders", [])]


def owner_name(owner: AnyObject) -> str:
    """Return an object as people name it: a content by its snapshot, a restore by its pod."""
    if isinstance(owner, SnapshotContent):
        return f"snapshot/{owner.spec.snapshot_ref.name}"
    if isinstance(owner, SnapshotRestore):
        return f"pod/{owner.spec.pod_ref.name}"
    return f"{kind_of(owner).name.lower()}/{owner.metadata.name}"


def order_lines(
    queued: Sequence[Queued], owned: Sequence[Owned], steps: Steps, now: float, *, answered: bool
) -> list[OrderLine]:
    """Return the orders of each service, oldest first; with `answered` those that ended, too."""
    on_stream = {message.subject.rpartition(".")[2]: message for message in queued}
    found: list[OrderLine] = []
    known: set[str] = set()
    for owner, item in owned:
        message = on_stream.get(item.order)
        known.add(item.order)
        if answered or not is_answered(item):
            found.append(
                OrderLine(
                    node=item.node,
                    service=item.service,
                    order=item.order,
                    verb=item.verb,
                    attempt=item.attempt,
                    owner=owner_name(owner),
                    state=_state(item, message, steps, now),
                    at=formats.seconds(item.ordered_at),
                )
            )
    found += [_unwanted(message) for name, message in on_stream.items() if name not in known]
    return sorted(found, key=lambda line: (line.node, line.service, line.at, line.order))


def current_steps(
    progress: Iterable[Progress], owned: Sequence[Owned], spans: Iterable[SpanRecord]
) -> Steps:
    """Return the step at which each order is, by (order, attempt).

    Steps that move bytes publish their progress. Of the others only the end is known, by its span:
    the order is at the step that follows the last that ended.
    """
    ended: dict[str, set[str]] = {}
    for span in spans:
        ended.setdefault(span.parent_id, set()).add(span.name)
    found: dict[tuple[str, int], str] = {}
    for _, item in owned:
        context = order_context(_trace(item), item.order, item.attempt)
        over = ended.get(context.span_id, set()) if context else set()
        order = order_in(item.payload)
        driver = driver_of(order) if order else None
        all_steps = table(item.verb, driver) if item.verb in STEPS else ()
        left = [step for step in all_steps if step not in over]
        if over and left:
            found[item.order, item.attempt] = left[0]
    for moved in progress:
        share = f" {100 * moved.done // moved.total}%" if moved.total else ""
        share += f" ({formats.plain(moved.awaits)})" if moved.awaits else ""
        key = (moved.order, moved.attempt)
        if found.get(key, moved.step) == moved.step:
            found[key] = moved.step + share
    return found


def traces(owned: Sequence[Owned]) -> list[str]:
    """Return the traces of the orders that a service works on."""
    working = [item for _, item in owned if not is_answered(item) and item.state != "ordered"]
    contexts = (parse_traceparent(_trace(item)) for item in working)
    return sorted({context.trace_id for context in contexts if context is not None})


def _trace(item: OrderStatus) -> str:
    return envelope_of(item.payload).traceparent


def _state(item: OrderStatus, message: Queued | None, steps: Steps, now: float) -> str:
    attempt = envelope_of(message.payload).attempt if message is not None else None
    step = steps.get((item.order, item.attempt), "")
    return order_state(item, step, now, is_on_stream=attempt == item.attempt)


def _unwanted(message: Queued) -> OrderLine:
    """Return the line of a message that no object requests; the operator's sweep removes it."""
    # Any subject below `snap.order.` may be there, also a short one.
    words = [*message.subject.split("."), "", "", "", "", ""]
    return OrderLine(
        # Subjects have underscores for the dots of node names.
        node=words[2].replace("_", "."),
        service=words[3],
        order=words[4],
        verb=words[4].partition("-")[0],
        attempt=envelope_of(message.payload).attempt,
        owner="-",
        state="not wanted",
        at=message.at,
    )


def table_of_lines(found: Sequence[OrderLine], now: float) -> Table:
    """Return a queue as a table. `now` is seconds since the epoch."""
    head = ("NODE", "SERVICE", "ORDER", "ATTEMPT", "OWNER", "STATE", "AGE")
    rows = [
        (
            line.node,
            line.service,
            line.order,
            str(line.attempt),
            line.owner,
            line.state,
            formats.age(now - line.at),
        )
        for line in found
    ]
    return Table(head, [tuple(map(formats.plain, row)) for row in rows], ("ATTEMPT", "SERVICE"))


# One order.


class OrderHistory(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """All that is known of one order: its payload, and every report.

    `sequence` is that of its message in the stream ORDERS, where there still is one. `dead` are the
    numbers of its dead letters.
    """

    order: str
    owner: str
    attempt: int
    node: str
    service: str
    state: str
    sequence: int | None
    payload: Any
    reports: list[Report]
    dead: list[int]


def order_history(
    order: str,
    queued: Queued | None,
    owned: Sequence[Owned],
    reports: Sequence[Report],
    steps: Steps,
    dead: Sequence[DeadMessage],
    now: float,
) -> OrderHistory | None:
    """Return the history of one order; None when no source has it."""
    numbers = [found.number for found in dead if order_of(found.content.subject) == order]
    mine = [found for found in owned if found.item.order == order]
    # The stream may hold a report twice: it is sent until it is acknowledged.
    known = list({(r.attempt, r.n): r for r in reports}.values())
    known.sort(key=lambda report: (report.attempt, report.n))
    if mine:
        owner, item = max(mine, key=lambda found: found.item.attempt)
        state, payload = _state(item, queued, steps, now), readable(bytes(item.payload))
        node, service, attempt = item.node, str(item.service), item.attempt
        name = owner_name(owner)
    elif queued is not None:
        line = _unwanted(queued)
        node, service, attempt, name = line.node, line.service, line.attempt, line.owner
        state, payload = line.state, readable(queued.payload)
    elif known:
        last = known[-1]
        node, service, attempt, name = last.node, str(last.service), last.attempt, "-"
        state, payload = f"answered: {last.kind}, its object is gone", None
    else:
        return None
    return OrderHistory(
        order=order,
        owner=name,
        attempt=attempt,
        node=node,
        service=service,
        state=state,
        sequence=queued.sequence if queued else None,
        payload=payload,
        reports=known,
        dead=numbers,
    )


def table_of_reports(reports: Sequence[Report]) -> Table:
    """Return reports in their order as a table, with the seconds since the first."""
    first = min((report.at for report in reports), default=0.0)
    rows = [
        (
            str(report.attempt),
            str(report.n),
            report.kind,
            f"+{report.at - first:.2f} s",
            "; ".join(_details(report)) or "-",
        )
        for report in reports
    ]
    head = ("ATTEMPT", "N", "REPORT", "AT", "WHAT")
    return Table(head, [tuple(map(formats.plain, row)) for row in rows])


def _details(report: Report) -> Iterable[str]:
    if report.failure is not None:
        yield str(report.failure)
    if report.steps:
        yield ", ".join(f"{s.step} {formats.span_time(s.seconds)}" for s in report.steps)
    if report.part is not None:
        yield f"part {report.part.part}, {formats.size(report.part.bytes)}"
    if report.exit_code is not None:
        yield f"exit code {report.exit_code}"
    if report.unconfirmed:
        yield "unconfirmed"
    if report.message:
        yield report.message


# Dead letters.


def order_of(subject: str) -> str:
    """Return the order that a subject names, or an empty string when it names none."""
    try:
        return subjects.parse_order(subject)[2]
    except InvalidName:
        return ""


def order_id(text: str) -> str:
    """Return the id of an order. WrongArguments when it is none."""
    try:
        return check_order_id(text)
    except InvalidName as error:
        raise WrongArguments(
            f"{text[:80]!r} is not the id of an order",
            next_step="list what is under way with: snapshotctl orders --all; an id is "
            "<verb>-<uid>[-<part>]",
        ) from error


def table_of_dead(dead: Sequence[DeadMessage], now: float) -> Table:
    """Return dead letters as a table. `now` is seconds since the epoch."""
    head = ("NUMBER", "NODE", "SERVICE", "REASON", "SUBJECT", "AGE")
    rows = [
        (
            str(number),
            content.node,
            content.service,
            content.failure.reason,
            content.subject,
            formats.age(now - content.at),
        )
        for number, content in dead
    ]
    return Table(head, [tuple(map(formats.plain, row)) for row in rows])


def readable(payload: bytes) -> Any:
    """Return a payload decoded from JSON, or where it is none its text."""
    try:
        return msgspec.json.decode(payload)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return payload.decode("utf-8", "replace")


def dead_value(found: DeadMessage) -> dict[str, Any]:
    """Return a dead letter as `-o json` prints it."""
    value: dict[str, Any] = msgspec.to_builtins(found.content)
    order = order_of(found.content.subject)
    return (
        {"number": found.number, "order": order or None}
        | value
        | {"payload": readable(found.content.payload)}
    )
