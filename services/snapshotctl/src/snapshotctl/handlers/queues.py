"""The commands orders and dead: what was ordered, what became of it, and what nobody could take."""

from __future__ import annotations

import json
from collections.abc import Sequence

import msgspec

from snapshot_shared.errors import NotEligible, NotFound
from snapshot_shared.ids import NodeName
from snapshot_shared.objects import KINDS, AnyObject
from snapshot_shared.spans import SpanRecord
from snapshotctl.domain import formats, queue
from snapshotctl.domain.queue import Letter, Moving, Owned
from snapshotctl.ports import OnCall, Screen

MAX_TRACES = 32
"""How many traces are read for the steps of orders; the others are shown as accepted."""


async def orders(
    operator: OnCall, screen: Screen, node: NodeName | None, *, now: float, answered: bool
) -> None:
    """Show what is queued for each service, of one node or of all."""
    everything = queue.owned_orders(await _owners(operator))
    owned = [own for own in everything if node in (None, own.item.node)]
    found = queue.lines(
        await operator.queued(node),
        owned,
        await _moving(operator, owned),
        now,
        answered=answered,
    )
    if not screen.wants_table:
        screen.value([msgspec.to_builtins(line) for line in found])
    elif found:
        screen.table(queue.table_of_lines(found, now))
    else:
        screen.note(
            f"no orders under way{f' on {node}' if node else ''}; --all shows answered ones"
        )


async def show_order(operator: OnCall, screen: Screen, order: str, *, now: float) -> None:
    """Show the whole life of one order. NotFound."""
    messages = [m for m in await operator.queued(None) if m.subject.endswith(f".{order}")]
    everything = queue.owned_orders(await _owners(operator))
    owned = [own for own in everything if own.item.order == order]
    found = queue.life(
        order,
        messages[-1] if messages else None,
        owned,
        await operator.reports([order]),
        await _moving(operator, owned),
        await operator.letters(None),
        now,
    )
    if found is None:
        raise NotFound(
            f"nobody knows of an order {order}",
            next_step="list what there is: snapshotctl orders --all; reports are kept for 14 days",
        )
    if not screen.wants_table:
        screen.value(msgspec.to_builtins(found))
        return
    screen.line(f"{found.order}, attempt {found.attempt}", strong=True)
    screen.line(f"  for      {found.owner}, by {found.service} on {found.node}")
    screen.line(f"  state    {formats.plain(found.state)}")
    where = f"sequence {found.sequence}" if found.sequence else "not there (any more)"
    screen.line(f"  stream   ORDERS: {where}")
    if found.letters:
        numbers = ", ".join(map(str, found.letters))
        screen.line(f"  dead     letters {numbers}: snapshotctl dead show {found.letters[-1]}")
    if found.payload is not None:
        for line in json.dumps(found.payload, indent=2).splitlines():
            screen.line(f"  {line}")
    screen.line()
    screen.table(queue.table_of_reports(found.reports))


async def _moving(operator: OnCall, owned: Sequence[Owned]) -> Moving:
    """Find out at which step each of these orders is."""
    spans: list[SpanRecord] = []
    for trace_id in queue.traces(owned)[:MAX_TRACES]:
        spans += await operator.spans(trace_id)
    return queue.moving(await operator.progress_now(None), owned, spans)


async def _owners(operator: OnCall) -> list[AnyObject]:
    kinds = ("SnapshotContent", "SnapshotRestore", "Pod")
    found = [await operator.all_of(KINDS[kind], None) for kind in kinds]
    return [value for values in found for value in values]


async def dead(operator: OnCall, screen: Screen, node: NodeName | None, *, now: float) -> None:
    """List the dead letters of one node or of all."""
    found = await operator.letters(node)
    if not screen.wants_table:
        screen.value([queue.shown_letter(letter) for letter in found])
    elif found:
        screen.table(queue.table_of_letters(found, now))
        screen.line()
        screen.line(f"look at one: snapshotctl dead show {found[-1].number}")
    else:
        screen.note(f"no dead letters{f' of {node}' if node else ''}")


async def show_dead(operator: OnCall, screen: Screen, number: int, *, now: float) -> None:
    """Show one dead letter: why it was refused, and what it says. NotFound."""
    found = await _letter(operator, number)
    value = queue.shown_letter(found)
    if not screen.wants_table:
        screen.value(value)
        return
    letter, order = found.letter, value["order"]
    screen.line(f"dead letter {number} of {letter.service} on {letter.node}", strong=True)
    screen.line(f"  came     {formats.age(now - letter.at)} ago on {formats.plain(letter.subject)}")
    screen.line(f"  refused  {formats.plain(str(letter.failure))}")
    for line in json.dumps(value["payload"], indent=2).splitlines():
        screen.line(f"  {line}")
    if order:
        screen.line()
        screen.line(f"its order      snapshotctl orders show {order}")
        screen.line(f"send it again  snapshotctl dead requeue {number}")


async def requeue(operator: OnCall, screen: Screen, number: int) -> None:
    """Have the operator publish its own order anew. NotFound, and NotEligible when nobody waits."""
    found = await _letter(operator, number)
    order = queue.order_of(found.letter.subject)
    if not order:
        raise NotEligible(
            f"dead letter {number} came on {formats.plain(found.letter.subject)[:200]!r}, which "
            "names no order",
            next_step=f"look at it: snapshotctl dead show {number}",
        )
    reply = await operator.requeue(order)
    if screen.wants_table:
        screen.line(
            f"{reply.order}, attempt {reply.attempt}, is queued for {reply.service} on "
            f"{reply.node} again"
        )
        screen.line(f"  follow it  snapshotctl orders show {reply.order}")
    else:
        screen.value(msgspec.to_builtins(reply))


async def _letter(operator: OnCall, number: int) -> Letter:
    found = {letter.number: letter for letter in await operator.letters(None)}
    if number not in found:
        raise NotFound(
            f"there is no dead letter {number}",
            next_step="list those that there are: snapshotctl dead ls",
        )
    return found[number]
