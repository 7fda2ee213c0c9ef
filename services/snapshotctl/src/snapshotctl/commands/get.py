"""The command get: objects as a table, as JSON or as YAML."""

from __future__ import annotations

from snapshotctl import objects
from snapshotctl.command import AllNamespaces, KindAndMaybeName, Namespace, command, new_app
from snapshotctl.domain import formats, targets
from snapshotctl.tools import Tools
from snapshotctl.views import tables

app = new_app()


@command(
    app,
    "snapshotctl get dynamocheckpoints",
    "snapshotctl get pod my-worker -o yaml",
    "snapshotctl get snapshots -A",
)
async def get(
    tools: Tools,
    words: KindAndMaybeName,
    namespace: Namespace = "default",
    everywhere: AllNamespaces = False,
) -> None:
    """Show one object, or all of a kind.

    The kinds are dynamocheckpoints, snapshots, snapshotcontents, restores, jobs, pods and nodes.
    A pod is Unknown while its node is silent: its worker may well run.
    """
    target = targets.target(words, namespace)
    if everywhere:
        target = targets.everywhere(target)
    async with tools.operator() as operator:
        if target.name is None:
            found = await operator.all_of(target.kind, target.namespace)
        else:
            found = [await objects.existing(operator, target)]
    if not tools.screen.wants_table:
        values = [formats.data(item) for item in found]
        tools.screen.value(values if target.name is None else values[0])
    elif found:
        now = tools.now()
        tools.screen.table(tables.table_of(target.kind, found, now, with_namespace=everywhere))
    else:
        where = f" in namespace {target.namespace}" if target.namespace else ""
        tools.screen.note(f"no {target.kind.plural}{where}")
