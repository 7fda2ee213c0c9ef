"""The commands of `dead`: messages that no service could take as an order."""

from __future__ import annotations

import json
from typing import Annotated

import msgspec
import typer

from snapshot_shared.errors import NotEligible, NotFound
from snapshotctl.command import command, complete_nodes, new_app
from snapshotctl.domain import formats, targets
from snapshotctl.ports import Operator
from snapshotctl.tools import Tools
from snapshotctl.views import queue
from snapshotctl.views.queue import DeadMessage

MaybeNode = Annotated[
    str | None,
    typer.Argument(
        metavar="NODE",
        help="Only those of this node.",
        show_default=False,
        autocompletion=complete_nodes,
    ),
]
Number = Annotated[
    int, typer.Argument(metavar="NUMBER", min=1, help="Its number, as in: snapshotctl dead ls.")
]

app = new_app(
    "dead",
    "Look at messages that no service could take as an order.",
    "snapshotctl dead ls",
    "snapshotctl dead show 3",
    "snapshotctl dead requeue 3",
)


@command(app, "snapshotctl dead ls", "snapshotctl dead ls node-1 -o json", name="ls")
async def list_(tools: Tools, node: MaybeNode = None) -> None:
    """List the dead letters: copies of what was no order."""
    wanted = targets.node_named(node) if node else None
    async with tools.operator() as operator:
        found = await operator.dead(wanted)
    if not tools.screen.wants_table:
        tools.screen.value([queue.dead_value(message) for message in found])
    elif found:
        tools.screen.table(queue.table_of_dead(found, tools.now()))
        tools.screen.line()
        tools.screen.line(f"look at one: snapshotctl dead show {found[-1].number}")
    else:
        tools.screen.note(f"no dead letters{f' of {node}' if node else ''}")


@command(app, "snapshotctl dead show 3", "snapshotctl dead show 3 -o yaml")
async def show(tools: Tools, number: Number) -> None:
    """Show one dead letter, and why it was refused."""
    screen = tools.screen
    async with tools.operator() as operator:
        found = await _message(operator, number)
    value = queue.dead_value(found)
    if not screen.wants_table:
        screen.value(value)
        return
    content, order = found.content, value["order"]
    age = formats.age(tools.now() - content.at)
    screen.line(f"dead letter {number} of {content.service} on {content.node}", strong=True)
    screen.line(f"  came     {age} ago on {formats.plain(content.subject)}")
    screen.line(f"  refused  {formats.plain(str(content.failure))}")
    for line in json.dumps(value["payload"], indent=2).splitlines():
        screen.line(f"  {line}")
    if order:
        screen.line()
        screen.line(f"its order      snapshotctl orders show {order}")
        screen.line(f"send it again  snapshotctl dead requeue {number}")


@command(app, "snapshotctl dead requeue 3")
async def requeue(tools: Tools, number: Number) -> None:
    """Have the order of a dead letter sent again.

    The operator publishes its own current order, never the contents of the message, and refuses
    when it waits for no answer to that order.
    """
    async with tools.operator() as operator:
        found = await _message(operator, number)
        order = queue.order_of(found.content.subject)
        if not order:
            raise NotEligible(
                f"dead letter {number} came on {formats.plain(found.content.subject)[:200]!r}, "
                "which names no order",
                next_step=f"look at it: snapshotctl dead show {number}",
            )
        reply = await operator.requeue(order)
    if not tools.screen.wants_table:
        tools.screen.value(msgspec.to_builtins(reply))
        return
    tools.screen.line(
        f"{reply.order}, attempt {reply.attempt}, is queued for {reply.service} on "
        f"{reply.node} again"
    )
    tools.screen.line(f"  follow it  snapshotctl orders show {reply.order}")


async def _message(operator: Operator, number: int) -> DeadMessage:
    found = {message.number: message for message in await operator.dead(None)}
    if number not in found:
        raise NotFound(
            f"there is no dead letter {number}",
            next_step="list those that there are: snapshotctl dead ls",
        )
    return found[number]
