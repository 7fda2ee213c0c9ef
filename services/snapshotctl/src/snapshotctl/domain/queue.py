"""What was ordered, as people see it: the queue of each service, and the life of one order.

Three sources are put together: the stream of orders, the objects that own them, and progress.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from snapshot_shared import subjects
from snapshot_shared.errors import InvalidName
from snapshot_shared.ids import check_order_id
from snapshot_shared.objects import (
    AnyObject,
    OrderStatus,
    SnapshotContent,
    SnapshotRestore,
    kind_of,
)
from snapshot_shared.orders import (
    DeadLetter,
    Progress,
    Report,
    driver_of,
    envelope_of,
    order_in,
)
from snapshot_shared.spans import SpanRecord, order_context, parse_traceparent
from snapshot_shared.steps import STEPS, table
from snapshotctl.domain import formats
from snapshotctl.domain.exits import WrongArguments
from snapshotctl.domain.rows import Table


class Queued(NamedTuple):
    """A message of the stream of orders. `at` is when it was stored, seconds since the epoch."""

    subject: str
    sequence: int
    at: float
    payload: bytes


class Owned(NamedTuple):
    """An order as the object that it serves remembers it."""

    owner: AnyObject
    item: OrderStatus


Moving = Mapping[tuple[str, int], str]
"""The step at which an order is, and how much of it is done, by (order, attempt)."""


class Line(msgspec.Struct, frozen=True, kw_only=True):
    """One order in the queue of a service. `at` is when it was ordered, seconds since the epoch."""

    node: str
    service: str
    order: str
    verb: str
    attempt: int
    owner: str
    state: str
    at: float


class Letter(NamedTuple):
    """A dead letter and its number, which is its sequence in the stream DEAD."""

    number: int
    letter: DeadLetter


def owned_orders(owners: Iterable[AnyObject]) -> list[Owned]:
    """Give all orders that objects remember; most kinds have none."""
    return [Owned(owner, item) for owner in owners for item in getattr(owner.status, "orders", [])]


def owner_name(owner: AnyObject) -> str:
    """Name an object as people do: a content by its snapshot, a restore by its pod."""
    if isinstance(owner, SnapshotContent):
        return f"snapshot/{owner.spec.snapshot_ref.name}"
    if isinstance(owner, SnapshotRestore):
        return f"pod/{owner.spec.pod_ref.name}"
    return f"{kind_of(owner).name.lower()}/{owner.metadata.name}"


def lines(
    queued: Sequence[Queued],
    owned: Sequence[Owned],
    moving: Moving,
    now: float,
    *,
    answered: bool,
) -> list[Line]:
    """List what is on its way for each service, oldest first; with `answered` what ended, too."""
    on_stream = {message.subject.rpartition(".")[2]: message for message in queued}
    found: list[Line] = []
    known: set[str] = set()
    for owner, item in owned:
        message = on_stream.get(item.order)
        known.add(item.order)
        if answered or not is_answered(item):
            found.append(
                Line(
                    node=item.node,
                    service=item.service,
                    order=item.order,
                    verb=item.verb,
                    attempt=item.attempt,
                    owner=owner_name(owner),
                    state=state_of(item, message, moving.get((item.order, item.attempt), ""), now),
                    at=formats.seconds(item.ordered_at),
                )
            )
    found += [_unwanted(message) for name, message in on_stream.items() if name not in known]
    return sorted(found, key=lambda line: (line.node, line.service, line.at, line.order))


def is_answered(item: OrderStatus) -> bool:
    """Say whether the operator waits for nothing more of an order."""
    return item.final is not None or item.state == "lost"


def moving(
    progress: Iterable[Progress], owned: Sequence[Owned], spans: Iterable[SpanRecord]
) -> Moving:
    """Say at which step each order is, by (order, attempt).

    Bytes that move are told as they do. Of the other steps only the end is known, by its span: the
    order is at the one that follows the last that ended.
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
        steps = table(item.verb, driver) if item.verb in STEPS else ()
        left = [step for step in steps if step not in over]
        if over and left:
            found[item.order, item.attempt] = left[0]
    for told in progress:
        share = f" {100 * told.done // told.total}%" if told.total else ""
        key = (told.order, told.attempt)
        if found.get(key, told.step) == told.step:
            found[key] = told.step + share
    return found


def traces(owned: Sequence[Owned]) -> list[str]:
    """Give the traces of the orders that a service works on now."""
    working = [item for _, item in owned if not is_answered(item) and item.state != "ordered"]
    contexts = (parse_traceparent(_trace(item)) for item in working)
    return sorted({context.trace_id for context in contexts if context is not None})


def _trace(item: OrderStatus) -> str:
    return envelope_of(item.payload).traceparent


def state_of(item: OrderStatus, message: Queued | None, step: str, now: float) -> str:
    """Say in words where an order stands: queued, accepted, working, or answered, and how."""
    if is_answered(item):
        failure = item.final.failure if item.final else None
        return f"answered: {item.state}" + (f" ({failure.reason})" if failure else "")
    late = "" if now < formats.seconds(item.deadline) else ", late"
    if step:
        return f"working: {step}{late}"
    if item.state == "ordered":
        is_there = message is not None and envelope_of(message.payload).attempt == item.attempt
        return ("queued" if is_there else "not on the stream") + late
    return "accepted" + late


def _unwanted(message: Queued) -> Line:
    """Show a message that no object asks for; the operator's sweep removes it."""
    words = [*message.subject.split("."), "", "", "", "", ""]
    return Line(
        node=words[2].replace("_", "."),
        service=words[3],
        order=words[4],
        verb=words[4].partition("-")[0],
        attempt=envelope_of(message.payload).attempt,
        owner="-",
        state="not wanted",
        at=message.at,
    )


def table_of_lines(found: Sequence[Line], now: float) -> Table:
    """Lay out a queue. `now` is seconds since the epoch."""
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
    return Table(head, [tuple(map(formats.plain, row)) for row in rows])


# One order.


class Life(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """All that is known of one order: what was wished, and everything that was answered.

    `sequence` is that of its message in the stream ORDERS, where there still is one. `letters`
    are the numbers of its dead letters.
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
    letters: list[int]


def life(
    order: str,
    queued: Queued | None,
    owned: Sequence[Owned],
    reports: Sequence[Report],
    steps: Moving,
    letters: Sequence[Letter],
    now: float,
) -> Life | None:
    """Put one order's life together; None when nobody knows of it."""
    numbers = [found.number for found in letters if order_of(found.letter.subject) == order]
    mine = [found for found in owned if found.item.order == order]
    told = list({(r.attempt, r.n): r for r in reports}.values())
    told.sort(key=lambda report: (report.attempt, report.n))
    if mine:
        owner, item = max(mine, key=lambda found: found.item.attempt)
        step = steps.get((item.order, item.attempt), "")
        state, payload = state_of(item, queued, step, now), readable(bytes(item.payload))
        node, service, attempt = item.node, str(item.service), item.attempt
        name = owner_name(owner)
    elif queued is not None:
        line = _unwanted(queued)
        node, service, attempt, name = line.node, line.service, line.attempt, line.owner
        state, payload = line.state, readable(queued.payload)
    elif told:
        last = told[-1]
        node, service, attempt, name = last.node, str(last.service), last.attempt, "-"
        state, payload = f"answered: {last.kind}, its object is gone", None
    else:
        return None
    return Life(
        order=order,
        owner=name,
        attempt=attempt,
        node=node,
        service=service,
        state=state,
        sequence=queued.sequence if queued else None,
        payload=payload,
        reports=told,
        letters=numbers,
    )


def table_of_reports(reports: Sequence[Report]) -> Table:
    """Lay out reports in their order, with the seconds since the first."""
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
    """Give the order that a subject names, or an empty string when it names none."""
    try:
        return subjects.parse_order(subject)[2]
    except InvalidName:
        return ""


def order_id(text: str) -> str:
    """Return the id of an order. WrongArguments says how one looks."""
    try:
        return check_order_id(text)
    except InvalidName as error:
        raise WrongArguments(
            f"{text[:80]!r} is not the id of an order",
            next_step="list what is under way with: snapshotctl orders --all; an id is "
            "<verb>-<uid>[-<part>]",
        ) from error


def table_of_letters(letters: Sequence[Letter], now: float) -> Table:
    """Lay out dead letters. `now` is seconds since the epoch."""
    head = ("NUMBER", "NODE", "SERVICE", "REASON", "SUBJECT", "AGE")
    rows = [
        (
            str(number),
            letter.node,
            letter.service,
            letter.failure.reason,
            letter.subject,
            formats.age(now - letter.at),
        )
        for number, letter in letters
    ]
    return Table(head, [tuple(map(formats.plain, row)) for row in rows])


def readable(payload: bytes) -> Any:
    """Give what a payload says when it is JSON, and else its text with what is none replaced."""
    try:
        return msgspec.json.decode(payload)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return payload.decode("utf-8", "replace")


def shown_letter(found: Letter) -> dict[str, Any]:
    """Give a dead letter as a value that people can read."""
    value: dict[str, Any] = msgspec.to_builtins(found.letter)
    order = order_of(found.letter.subject)
    return (
        {"number": found.number, "order": order or None}
        | value
        | {"payload": readable(found.letter.payload)}
    )
