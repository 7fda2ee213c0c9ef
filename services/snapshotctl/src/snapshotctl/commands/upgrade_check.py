"""The command upgrade-check: what an upgrade would meet."""

from __future__ import annotations

from snapshot_api.kinds import KINDS
from snapshotctl.command import command, new_app
from snapshotctl.commands.doctor import show
from snapshotctl.domain.exits import Exit
from snapshotctl.tools import Tools
from snapshotctl.views.upgrade import upgrade_findings

app = new_app()


@command(
    app,
    "snapshotctl upgrade-check",
    "snapshotctl upgrade-check --context production && helm upgrade snapback ...",
    name="upgrade-check",
)
async def upgrade_check(tools: Tools) -> Exit:
    """Say what an upgrade of the cluster would meet now.

    Run it from the release that you upgrade to. Captures and restores under way are named: an
    upgrade ends none for good, but a worker may pause once more. It ends with exit code 1 if a node
    does not answer or reads no message of this release.
    """
    async with tools.operator() as operator:
        kinds = ("SnapshotContent", "SnapshotRestore", "Node")
        objects = [each for kind in kinds for each in await operator.all_of(KINDS[kind], None)]
    return show(tools, list(upgrade_findings(objects)))
