"""The command cordon: let nothing new begin on a node."""

from __future__ import annotations

from snapshot_api.kinds import KINDS
from snapshot_shared.ids import NodeName
from snapshotctl import objects
from snapshotctl.command import Node, command, new_app
from snapshotctl.domain import targets
from snapshotctl.domain.targets import Target
from snapshotctl.ports import Operator, Screen
from snapshotctl.tools import Tools

app = new_app()


@command(app, "snapshotctl cordon node-1")
async def cordon(tools: Tools, node: Node) -> None:
    """Let nothing new begin on a node; what runs there goes on.

    No pod is placed there, no capture and no verification begins, until it is uncordoned. What the
    command drain captures is captured all the same.
    """
    name = targets.node_named(node)
    async with tools.operator() as operator:
        await set_unschedulable(operator, tools.screen, name, unschedulable=True)


async def set_unschedulable(
    operator: Operator, screen: Screen, node: NodeName, *, unschedulable: bool
) -> None:
    """Let nothing new begin on a node, or let it again. NotFound, Conflict."""
    changed = await mark(operator, node, unschedulable=unschedulable)
    if not screen.wants_table:
        screen.value({"node": node, "unschedulable": unschedulable, "changed": changed})
        return
    word = "cordoned" if unschedulable else "uncordoned"
    screen.line(f"node/{node} {word if changed else f'already {word}'}")


async def mark(operator: Operator, node: NodeName, *, unschedulable: bool) -> bool:
    """Cordon a node or uncordon it; return whether that changed it. NotFound, Conflict."""
    target = Target(KINDS["Node"], None, node)
    version = (await objects.existing(operator, target)).metadata.resource_version
    with objects.unchanged(target):
        reply = await operator.cordon(node, version, unschedulable=unschedulable)
    return reply.changed
