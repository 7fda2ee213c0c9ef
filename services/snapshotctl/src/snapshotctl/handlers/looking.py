"""Reading all that belongs to the story of one object."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

from msgspec.structs import replace

from snapshot_shared.errors import NotFound, RemoteFailure
from snapshot_shared.objects import KINDS, AnyObject, Node, kind_of
from snapshot_shared.spans import SpanRecord
from snapshotctl.domain import history, kin
from snapshotctl.domain.history import Happening
from snapshotctl.domain.kin import Kin
from snapshotctl.domain.targets import Target
from snapshotctl.handlers.traces import trace_of
from snapshotctl.ports import Operator


async def find(operator: Operator, targets: Sequence[Target]) -> AnyObject:
    """Read the first of the targets that exists. NotFound lists them all."""
    for target in targets:
        found = await operator.get(target)
        if found is not None:
            return found
    raise NotFound(
        f"there is no {', no '.join(map(str, targets))}",
        next_step="list what there is, for example: snapshotctl get dynamocheckpoints -A",
    )


def target_of(found: AnyObject, targets: Sequence[Target]) -> Target:
    """Return which of the targets was found."""
    return next(target for target in targets if target.kind is kind_of(found))


@contextlib.contextmanager
def as_it_was_read(target: Target) -> Iterator[None]:
    """Say of a Conflict within the block how to decide again about an object that has changed."""
    try:
        yield
    except RemoteFailure as error:
        if error.failure.reason != "Conflict":
            raise
        step = f"look at it again: snapshotctl describe {target.typed}; then repeat the command"
        raise RemoteFailure(replace(error.failure, next_step=step)) from error


async def gather(operator: Operator, root: AnyObject) -> Kin:
    """Read what belongs to the story of an object."""
    if isinstance(root, Node):
        values: list[AnyObject] = []
        for kind in ("Pod", "SnapshotContent", "SnapshotRestore"):
            values += await operator.all_of(KINDS[kind], None)
        return Kin(root, [root, *kin.on_node(root, values)])
    members: list[AnyObject] = [root]
    for value in members:
        for target in kin.links(value, root):
            known = {member.metadata.uid for member in members}
            linked = await _linked(operator, value, target)
            members += [found for found in linked if found.metadata.uid not in known]
    return Kin(root, [value for value in members if not kin.is_strange(value, members)])


async def _linked(operator: Operator, value: AnyObject, target: Target) -> list[AnyObject]:
    """Read what a link of `value` leads to: one object, or those of a kind that it owns."""
    if target.name is None:
        found = await operator.all_of(target.kind, target.namespace)
        return [item for item in found if kin.owns(value, item)]
    one = await operator.get(target)
    return [] if one is None else [one]


async def history_of(operator: Operator, found: Kin) -> list[Happening]:
    """Read what happened in a story, also what the store has forgotten."""
    orders = {item.order for _, item in found.orders}
    reports = await operator.reports(sorted(orders))
    spans: list[SpanRecord] = []
    if isinstance(found.root, Node):
        reports = [report for report in reports if report.node == found.root.metadata.name]
    else:
        traces = {trace_of(value) for value in found.told} - {""}
        for trace in sorted(traces):
            spans += await operator.spans(trace)
    names = history.names_of(found.members)
    return history.history(found.told, reports, spans, names)
