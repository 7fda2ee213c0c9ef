"""The command delete: mark an object for deletion."""

from __future__ import annotations

from snapshot_api.kinds import KINDS, AnyObject
from snapshot_api.v1alpha1.checkpoint import DynamoCheckpoint
from snapshot_api.v1alpha1.content import SnapshotContent
from snapshot_api.v1alpha1.restore import SnapshotRestore
from snapshot_api.v1alpha1.snapshot import Snapshot
from snapshot_api.views import warning_of_readers
from snapshotctl import objects
from snapshotctl.command import KindAndNames, Namespace, command, new_app
from snapshotctl.domain import targets
from snapshotctl.domain.targets import Target
from snapshotctl.ports import Operator
from snapshotctl.tools import Tools

app = new_app()


@command(
    app,
    "snapshotctl delete pod my-worker",
    "snapshotctl delete snap/demo",
    "snapshotctl delete pod/my-worker pod/another",
)
async def delete(tools: Tools, words: KindAndNames, namespace: Namespace = "default") -> None:
    """Delete objects and what belongs to them.

    If no object has one of the names, or several have it, all objects stay.
    """
    wanted = targets.several(words, namespace)
    async with tools.operator() as operator:
        found = [await objects.find(operator, each) for each in wanted]
        for value in found:
            await _warn(tools, operator, value)
        named = {objects.target_of(*each): each[0] for each in zip(found, wanted, strict=True)}
        gone = {each: await delete_as_read(operator, each, named[each]) for each in named}
    if not tools.screen.wants_table:
        about = [{"kind": t.kind.name, "name": t.name, "gone": gone[t]} for t in gone]
        tools.screen.value(about if len(about) > 1 else about[0])
        return
    for target, is_gone in gone.items():
        tools.screen.line(f"{target} {'deleted' if is_gone else 'is being deleted'}")
        if not is_gone:
            tools.screen.line(f"  wait until it is gone: snapshotctl wait {target} --for=delete")


async def _warn(tools: Tools, operator: Operator, value: AnyObject) -> None:
    """Name the pods that are restored from the object."""
    if not isinstance(value, DynamoCheckpoint | Snapshot | SnapshotContent):
        return
    namespace, name = value.metadata.namespace, value.metadata.name
    restores = await operator.all_of(KINDS["SnapshotRestore"], namespace or None)
    found = [each for each in restores if isinstance(each, SnapshotRestore)]
    if text := warning_of_readers(type(value).__name__, namespace, name, found):
        tools.screen.note(text)


async def delete_as_read(operator: Operator, target: Target, found: AnyObject) -> bool:
    """Mark an object for deletion. Return whether it is gone. Conflict if another has its name."""
    with objects.unchanged(target):
        return await operator.delete(target, found.metadata.uid)
