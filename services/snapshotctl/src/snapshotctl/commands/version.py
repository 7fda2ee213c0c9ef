"""The command version: what runs here, and in the cluster."""

from __future__ import annotations

import platform
from typing import Annotated

import typer

from snapshot_shared.errors import SnapbackError
from snapshotctl.command import command, new_app
from snapshotctl.tools import Tools
from snapshotctl.views.tables import Table

app = new_app()


@command(app, "snapshotctl version", "snapshotctl version --client -o json")
async def version(
    tools: Tools,
    client: Annotated[
        bool, typer.Option("--client", help="Of this program alone; no server is asked.")
    ] = False,
) -> None:
    """Show the versions of this program, of the services that answer, and of NATS.

    A server that cannot be reached is no error.
    """
    from snapshot_shared.service import VERSION  # noqa: PLC0415 - imports more than `--help` needs

    found = [("snapshotctl", VERSION, f"here, Python {platform.python_version()}")]
    if not client:
        try:
            async with tools.operator() as operator:
                found += await operator.versions()
        except SnapbackError as error:
            tools.screen.note(f"no server: {error.message}")
    if tools.screen.wants_table:
        tools.screen.table(Table(("PROGRAM", "VERSION", "WHERE"), list(found)))
    else:
        names = ("program", "version", "where")
        tools.screen.value([dict(zip(names, row, strict=True)) for row in found])
