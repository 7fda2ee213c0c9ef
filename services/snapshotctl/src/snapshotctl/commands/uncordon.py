"""The command uncordon: let new work begin on a node again."""

from __future__ import annotations

from snapshotctl.command import Node, command, new_app
from snapshotctl.commands.cordon import set_unschedulable
from snapshotctl.domain import targets
from snapshotctl.tools import Tools

app = new_app()


@command(app, "snapshotctl uncordon node-1")
async def uncordon(tools: Tools, node: Node) -> None:
    """Let new work begin on a node again."""
    name = targets.node_named(node)
    async with tools.operator() as operator:
        await set_unschedulable(operator, tools.screen, name, unschedulable=False)
