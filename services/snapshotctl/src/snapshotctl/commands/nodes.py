"""The command nodes: the nodes and their presence."""

from __future__ import annotations

import msgspec

from snapshot_api import views
from snapshot_api.facts import Node
from snapshot_api.kinds import KINDS
from snapshot_shared.ids import NodeName
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
        paused = await operator.paused()
    held = [views.held_back(node.metadata.name, paused) for node in found]
    if not tools.screen.wants_table:
        last = [presence.get(NodeName(node.metadata.name)) for node in found]
        tools.screen.value(
            [
                {
                    "node": formats.data(node),
                    "presence": msgspec.to_builtins(seen),
                    "paused": [each.service for each in back],
                }
                for node, seen, back in zip(found, last, held, strict=True)
            ]
        )
    elif found:
        tools.screen.table(tables.table_of_nodes(found, presence, paused, tools.now()))
        for node, back in zip(found, held, strict=True):
            whys = [why for why, _ in unready(node.status.unready)]
            whys += [f"{each.message}; {each.next_step}" for each in back]
            for why in whys:
                tools.screen.line(f"{node.metadata.name} {formats.plain(why)}")
    else:
        tools.screen.note("no nodes")
