"""The command delete: mark an object for deletion."""

from __future__ import annotations

from snapshotctl import objects
from snapshotctl.command import KindAndName, Namespace, command, new_app
from snapshotctl.domain import targets
from snapshotctl.domain.targets import Target
from snapshotctl.ports import Operator
from snapshotctl.tools import Tools

app = new_app()


@command(
    app,
    "snapshotctl delete pod my-worker",
    "snapshotctl delete snap/demo",
    "snapshotctl delete my-worker",
)
async def delete(tools: Tools, words: KindAndName, namespace: Namespace = "default") -> None:
    """Delete an object and what belongs to it."""
    wanted = targets.meant_one(words, namespace)
    async with tools.operator() as operator:
        target = await objects.resolved(operator, wanted)
        gone = await delete_as_read(operator, target)
    if not tools.screen.wants_table:
        tools.screen.value({"kind": target.kind.name, "name": target.name, "gone": gone})
        return
    tools.screen.line(f"{target} {'deleted' if gone else 'is being deleted'}")
    if not gone:
        tools.screen.line(f"  wait until it is gone: snapshotctl wait {target} --for=delete")


async def delete_as_read(operator: Operator, target: Target) -> bool:
    """Mark the object that has the name now for deletion. Return whether it is gone. Conflict."""
    found = await objects.existing(operator, target)
    with objects.unchanged(target):
        return await operator.delete(target, found.metadata.uid)
