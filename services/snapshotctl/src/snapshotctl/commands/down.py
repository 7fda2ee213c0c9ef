"""The command down: end a local cluster."""

from __future__ import annotations

from typing import Annotated

import typer

from snapshotctl.command import ClusterName, command, new_app
from snapshotctl.tools import Tools

app = new_app()


@command(app, "snapshotctl down", "snapshotctl down --cluster big --purge")
async def down(
    tools: Tools,
    name: ClusterName = None,
    purge: Annotated[
        bool, typer.Option("--purge", help="Remove its state, logs and artifacts, too.")
    ] = False,
) -> None:
    """End a local cluster and its workers.

    Its state stays for the next `up`, unless --purge removes it.
    """
    cluster, screen = tools.local_cluster(name), tools.screen
    if purge and cluster.forget():
        screen.note("it has never run; what its start had left is removed")
        if not screen.wants_table:
            screen.value({"name": name, "purged": True})
        return
    record = cluster.record
    await cluster.stop(purge=purge)
    if not screen.wants_table:
        screen.value({"name": record.name, "purged": purge})
    elif purge:
        screen.line(f"Local cluster {record.name!r} is down and its state is removed.")
    else:
        screen.line(
            f"Local cluster {record.name!r} is down; its state stays in {record.state_dir}."
        )
