"""The command nodes: the nodes and their presence."""

from __future__ import annotations

import msgspec

from snapshot_shared.ids import NodeName
from snapshot_shared.objects.kinds import KINDS
from snapshot_shared.objects.kubernetes import Node
from snapshotctl.command import command, new_app
from snapshotctl.domain import formats
from snapshotctl.tools import Tools
from snapshotctl.views import tables
from snapshotctl.views.state import unready

app = new_app()


@command(app, "snapshotctl nodes")
async def nodes(tools: Tools) -> None:
    """Show the nodes, their GPUs, and when each was last seen."""
    async with tools.operator() as operator:
        found = [n for n in await operator.all_of(KINDS["Node"], None) if isinstance(n, Node)]
        presence = await operator.presence()
    if not tools.screen.wants_table:
        last = [presence.get(NodeName(node.metadata.name)) for node in found]
        tools.screen.value(
            [
                {"node": formats.data(node), "presence": msgspec.to_builtins(seen)}
                for node, seen in zip(found, last, strict=True)
            ]
        )
    elif found:
        tools.screen.table(tables.table_of_nodes(found, presence, tools.now()))
        for node in found:
            for why, _ in unready(node.status.unready):
                tools.screen.line(f"{node.metadata.name} {formats.plain(why)}")
    else:
        tools.screen.note("no nodes")
