"""The command leftovers: what local clusters left behind on this machine."""

from __future__ import annotations

from snapshotctl.command import command, new_app
from snapshotctl.domain import cluster
from snapshotctl.domain.exits import Exit
from snapshotctl.tools import Tools

app = new_app()


@command(app, "snapshotctl leftovers")
async def leftovers(tools: Tools) -> Exit:
    """Show what local clusters left behind.

    Lists processes, folders of sockets and folders of state that belong to no running cluster.
    """
    lines = cluster.leftovers(tools.folders.inventory())
    if not tools.screen.wants_table:
        tools.screen.value(lines)
    else:
        for line in lines or ["nothing left"]:
            tools.screen.line(line)
    return Exit.FAILED if lines else Exit.OK
