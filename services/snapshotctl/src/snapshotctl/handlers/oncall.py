"""The commands cordon, uncordon, abort and schema."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from snapshot_shared.api import AbortReply
from snapshot_shared.ids import NodeName
from snapshot_shared.objects import KINDS, AnyObject, SnapshotContent
from snapshot_shared.transitions import Capture
from snapshotctl.domain.exits import NeverTrue
from snapshotctl.domain.rows import Table
from snapshotctl.domain.targets import Target
from snapshotctl.handlers import looking
from snapshotctl.handlers.objects import existing
from snapshotctl.handlers.watching import until
from snapshotctl.ports import OnCall, Screen


async def cordon(operator: OnCall, screen: Screen, node: NodeName, *, unschedulable: bool) -> None:
    """Let nothing new begin on a node, or let it again. NotFound, Conflict."""
    target = Target(KINDS["Node"], None, node)
    version = (await existing(operator, target)).metadata.resource_version
    with looking.as_it_was_read(target):
        reply = await operator.cordon(node, version, unschedulable=unschedulable)
    if not screen.wants_table:
        value = {"node": node, "unschedulable": unschedulable, "changed": reply.changed}
        screen.value(value)
        return
    word = "cordoned" if unschedulable else "uncordoned"
    screen.line(f"node/{node} {word if reply.changed else f'already {word}'}")


async def abort(
    operator: OnCall, screen: Screen, targets: Sequence[Target], *, by: str, within_s: float
) -> None:
    """End the capture behind the first target that exists, and wait until it has ended.

    NotFound, NeverTrue, DeadlineExceeded, and what the operator refuses.
    """
    asked = await _ask(operator, targets, by)
    content = Target(KINDS["SnapshotContent"], None, asked.content)

    def decide(found: AnyObject | None) -> SnapshotContent | None:
        if not isinstance(found, SnapshotContent):
            raise NeverTrue(f"{content} was deleted while its capture was aborted")
        is_over = found.status.capture in (Capture.FAILED, Capture.READY)
        return found if is_over else None

    ended = await until(operator, content, decide, within_s=within_s, what=f"aborting {content}")
    failure = ended.status.failure
    if ended.status.capture is Capture.READY or failure is None:
        raise NeverTrue(
            f"the capture of {content} was committed before the abort came",
            next_step=f"to remove it: snapshotctl delete {content}",
        )
    if screen.wants_table:
        screen.line(f"{content} {failure.reason}: {failure.message}")
    else:
        screen.value({"content": asked.content, "failure": msgspec.to_builtins(failure)})


async def _ask(operator: OnCall, targets: Sequence[Target], by: str) -> AbortReply:
    found = await looking.find(operator, targets)
    target = looking.target_of(found, targets)
    with looking.as_it_was_read(target):
        return await operator.abort(target, by, found.metadata.uid)


def list_schemas(screen: Screen, schemas: dict[str, Any]) -> None:
    """List the types of all messages and objects."""
    if not screen.wants_table:
        screen.value(sorted(schemas))
        return
    table = Table(("TYPE", "WHAT"), [])
    for name, schema in sorted(schemas.items()):
        table.rows.append((name, _about(schema)))
    screen.table(table)


def _about(schema: dict[str, Any]) -> str:
    """Give the first sentence that a type says of itself."""
    name = schema.get("$ref", "").rpartition("/")[2]
    text = schema.get("$defs", {}).get(name, schema).get("description", "")
    return str(text).partition("\n")[0] or "-"
