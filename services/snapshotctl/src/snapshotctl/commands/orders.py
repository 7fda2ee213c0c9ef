"""The command orders: the orders of each service, and the history of one."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated

import msgspec
import typer

from snapshot_api.kinds import KINDS, AnyObject
from snapshot_shared.errors import NotFound
from snapshot_shared.spans import SpanRecord
from snapshotctl import objects
from snapshotctl.command import command, complete_nodes, new_app
from snapshotctl.domain import formats, targets
from snapshotctl.domain.exits import WrongArguments
from snapshotctl.domain.targets import Target
from snapshotctl.ports import Operator, Screen
from snapshotctl.tools import Tools
from snapshotctl.views import queue
from snapshotctl.views.queue import OrderHistory, Owned, Steps

MAX_TRACES = 32
"""How many traces are read for the steps of orders; the others are shown as accepted."""

app = new_app()


def _complete(context: typer.Context) -> list[str]:
    return [] if context.params.get("words") else ["show", *complete_nodes(context)]


@command(
    app,
    "snapshotctl orders",
    "snapshotctl orders node-1 --all",
    "snapshotctl orders show dump-0a1b2c3d-0000-4000-8000-000000000000",
)
async def orders(
    tools: Tools,
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="NODE | show ORDER",
            help="Of one node; or one order's life.",
            autocompletion=_complete,
        ),
    ] = None,
    answered: Annotated[bool, typer.Option("--all", help="Show answered orders, too.")] = False,
) -> None:
    """Show the orders under way, and the state of each.

    By node and service. An order is queued until its service has it in the journal, then accepted,
    working at a step, and answered. `show` prints all that is known of one: its payload, and every
    report.
    """
    match words or []:
        case []:
            await _show_queue(tools, None, answered=answered)
        case ["show", order]:
            await _show_order(tools, queue.order_id(order))
        case ["show"]:
            raise WrongArguments(
                "which order? its id is missing",
                next_step="list them with: snapshotctl orders --all",
            )
        case [node]:
            await _show_queue(tools, node, answered=answered)
        case others:
            raise WrongArguments(
                f"expected a node, or show ORDER, found {len(others)} words",
                next_step="for example: snapshotctl orders node-1",
            )


async def _show_queue(tools: Tools, name: str | None, *, answered: bool) -> None:
    node, now, screen = targets.node_named(name) if name else None, tools.now(), tools.screen
    async with tools.operator() as operator:
        everything = queue.owned_orders(await _owners(operator))
        owned = [own for own in everything if node in (None, own.item.node)]
        messages = await operator.queued(node)
        if node and not owned and not messages:
            await objects.existing(operator, Target(KINDS["Node"], None, node))
        steps = await _steps(operator, owned)
    found = queue.order_lines(messages, owned, steps, now, answered=answered)
    if not screen.wants_table:
        screen.value([msgspec.to_builtins(line) for line in found])
    elif found:
        screen.table(queue.table_of_lines(found, now))
    else:
        where = f" on {node}" if node else ""
        screen.note(f"no orders under way{where}; --all shows answered ones")


async def _show_order(tools: Tools, order: str) -> None:
    """Show all that is known of one order. NotFound."""
    async with tools.operator() as operator:
        messages = [m for m in await operator.queued(None) if m.subject.endswith(f".{order}")]
        everything = queue.owned_orders(await _owners(operator))
        owned = [own for own in everything if own.item.order == order]
        found = queue.order_history(
            order,
            messages[-1] if messages else None,
            owned,
            await operator.reports([order]),
            await _steps(operator, owned),
            await operator.dead(None),
            tools.now(),
        )
    if found is None:
        raise NotFound(
            f"there is no order {order}",
            next_step="list what there is: snapshotctl orders --all; reports are kept for 14 days",
        )
    if tools.screen.wants_table:
        _show_history(tools.screen, found)
    else:
        tools.screen.value(msgspec.to_builtins(found))


def _show_history(screen: Screen, found: OrderHistory) -> None:
    screen.line(f"{found.order}, attempt {found.attempt}", strong=True)
    screen.line(f"  for      {found.owner}, by {found.service} on {found.node}")
    screen.line(f"  state    {formats.plain(found.state)}")
    where = f"sequence {found.sequence}" if found.sequence else "not there (any more)"
    screen.line(f"  stream   ORDERS: {where}")
    if found.dead:
        numbers = ", ".join(map(str, found.dead))
        screen.line(f"  dead     messages {numbers}: snapshotctl dead show {found.dead[-1]}")
    if found.payload is not None:
        for line in json.dumps(found.payload, indent=2).splitlines():
            screen.line(f"  {line}")
    screen.line()
    screen.table(queue.table_of_reports(found.reports))


async def _steps(operator: Operator, owned: Sequence[Owned]) -> Steps:
    """Read at which step each of these orders is."""
    spans: list[SpanRecord] = []
    for trace_id in queue.traces(owned)[:MAX_TRACES]:
        spans += await operator.spans(trace_id)
    return queue.current_steps(await operator.progress_now(None), owned, spans)


async def _owners(operator: Operator) -> list[AnyObject]:
    kinds = ("SnapshotContent", "SnapshotRestore", "Pod")
    found = [await operator.all_of(KINDS[kind], None) for kind in kinds]
    return [value for values in found for value in values]
