"""The command clusters: the local clusters of this machine."""

from __future__ import annotations

from snapshotctl.command import command, new_app
from snapshotctl.domain.cluster import SeenCluster, seen_cluster
from snapshotctl.tools import Tools
from snapshotctl.views.tables import Table

app = new_app()


@command(app, "snapshotctl clusters", "snapshotctl clusters -o wide")
async def clusters(tools: Tools) -> None:
    """Show the local clusters of this machine: state, processes, address, folder.

    Those of another XDG_STATE_HOME are found by their processes. Nothing is connected to.
    """
    found = [seen_cluster(*pair) for pair in tools.folders.inventory().clusters]
    found.sort(key=lambda cluster: cluster.name)
    screen = tools.screen
    if not screen.wants_table:
        screen.value([cluster.value() for cluster in found])
        return
    if not found:
        screen.note("no local clusters; start one with: snapshotctl up")
        return
    more = ("PAGE", "PIDS") if screen.wants_wide else ()
    rows = [_row(cluster)[: len(HEAD) + len(more)] for cluster in found]
    screen.table(Table((*HEAD, *more), rows))


HEAD = ("NAME", "STATE", "RUNNING", "ADDRESS", "PATH")


def _row(cluster: SeenCluster) -> tuple[str, ...]:
    running, ended = len(cluster.pids), len(cluster.ended)
    pids = " ".join(f"{name}={pid}" for name, pid in cluster.pids.items())
    count = f"{running}/{running + ended}"
    about = (cluster.name, cluster.state, count, cluster.url, cluster.path, cluster.page, pids)
    return tuple(cell or "-" for cell in about)
