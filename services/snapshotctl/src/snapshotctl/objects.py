"""Objects read, stored and waited for through the operator."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from msgspec.structs import replace

from snapshot_api import revisions
from snapshot_api.facts import Node
from snapshot_api.kind import Kind, converted
from snapshot_api.kinds import KINDS, AnyObject, kind_of
from snapshot_shared.api import Applied
from snapshot_shared.errors import (
    BusUnavailable,
    DeadlineExceeded,
    Failure,
    NotFound,
    RemoteFailure,
)
from snapshot_shared.spans import SpanRecord
from snapshot_shared.units import counted
from snapshotctl.domain import formats
from snapshotctl.domain.documents import Document
from snapshotctl.domain.exits import Ambiguous, WrongArguments
from snapshotctl.domain.targets import Target, kinds_like, names_like
from snapshotctl.ports import Operator
from snapshotctl.views import related, timeline
from snapshotctl.views.related import RelatedObjects, trace_of
from snapshotctl.views.timeline import Event

if TYPE_CHECKING:
    from snapshot_shared.telemetry import Telemetry

T = TypeVar("T")


async def existing(operator: Operator, target: Target) -> AnyObject:
    """Read an object that has to exist. NotFound."""
    return await find(operator, [target])


async def resolved(operator: Operator, targets: Sequence[Target]) -> Target:
    """Return the target that is meant. NotFound, Ambiguous where that is one of several.

    A single one is not read: what it names need not exist.
    """
    return targets[0] if len(targets) == 1 else target_of(await find(operator, targets), targets)


async def find(operator: Operator, targets: Sequence[Target]) -> AnyObject:
    """Read the one of the targets that exists. NotFound lists them all.

    What another one owns is not meant, such as the snapshot of a checkpoint of the same name.
    Ambiguous lists what is left, where that is more than one.
    """
    read = [await operator.get(target) for target in targets]
    found = [value for value in read if value is not None]
    uids = {value.metadata.uid for value in found}
    roots = [value for value in found if not related.owners_of(value.metadata) & uids] or found
    if len(roots) == 1:
        return roots[0]
    if roots:
        named = [target_of(value, targets).typed for value in roots]
        raise Ambiguous(
            f"{targets[0].name!r} may be any of {len(named)} objects: {', '.join(named)}",
            next_step=f"name the kind as well, as in {named[0]}",
            candidates=named,
        )
    raise await _revised(operator, targets) or _none_of(targets, await like(operator, targets))


async def _revised(operator: Operator, wanted: Sequence[Target]) -> NotFound | None:
    """Return that the name is one of revisions, of which each has a name of its own."""
    for target in wanted:
        if target.kind.name != "Snapshot" or target.name is None:
            continue
        snapshots = await operator.all_of(target.kind, target.namespace)
        found = revisions.ordered(snapshots, target.name)
        if newest := revisions.newest(found, target.name):
            one = target._replace(name=newest.metadata.name)
            how = "captured" if revisions.is_captured(newest) else "not captured yet"
            return NotFound(
                f"{target.name} is the name of {counted(len(found), 'revision')}, of which the "
                f"newest is {newest.metadata.name} ({how})",
                next_step=f"name one of them: {one.typed}",
            )
    return None


async def like(operator: Operator, wanted: Sequence[Target]) -> list[Target]:
    """Return the objects there that have a name much like that of targets of one name."""
    there = [
        Target(each.kind, each.namespace, value.metadata.name)
        for each in wanted
        for value in await operator.all_of(each.kind, each.namespace)
    ]
    return names_like(wanted[0].name or "", there)


def _none_of(targets: Sequence[Target], similar: Sequence[Target]) -> NotFound:
    meant = f"did you mean {' or '.join(each.typed for each in similar)}?" if similar else ""
    if len(targets) == 1:
        found = targets[0]
        where = f" in namespace {found.namespace}" if found.namespace else ""
        return NotFound(
            f"{found.kind.name} {found.name} does not exist{where}",
            next_step=meant or f"list what there is: snapshotctl get {found.kind.plural}",
        )
    if meant:
        return NotFound(f"no object is called {targets[0].name}", next_step=meant)
    close = kinds_like(targets[0].name or "")
    return NotFound(
        f"there is no {', no '.join(map(str, targets))}",
        next_step=f"did you mean the kind {' or '.join(close)}?"
        if close
        else "list what there is, for example: snapshotctl get dynamocheckpoints -A",
    )


def target_of(found: AnyObject, targets: Sequence[Target]) -> Target:
    """Return which of the targets was found."""
    return next(target for target in targets if target.kind is kind_of(found))


@contextlib.contextmanager
def unchanged(target: Target) -> Iterator[None]:
    """Add the next step to a Conflict within the block, after a change since the read."""
    try:
        yield
    except RemoteFailure as error:
        if error.failure.reason != "Conflict":
            raise
        step = f"look at it again: snapshotctl describe {target.typed}; then repeat the command"
        raise RemoteFailure(replace(error.failure, next_step=step)) from error


async def gather(operator: Operator, root: AnyObject) -> RelatedObjects:
    """Read the objects that are related to one."""
    if isinstance(root, Node):
        values: list[AnyObject] = []
        for kind in ("Pod", "SnapshotContent", "SnapshotRestore"):
            values += await operator.all_of(KINDS[kind], None)
        return RelatedObjects(root, [root, *related.on_node(root, values)])
    members: list[AnyObject] = [root]
    # The list grows while it is walked, so that links of links are followed.
    for value in members:
        for target in related.links(value, root):
            known = {member.metadata.uid for member in members}
            linked = await _linked(operator, value, target)
            members += [found for found in linked if found.metadata.uid not in known]
    return RelatedObjects(
        root, [value for value in members if not related.is_namesake(value, members)]
    )


async def _linked(operator: Operator, value: AnyObject, target: Target) -> list[AnyObject]:
    """Read what a link of `value` leads to: one object, or those of a kind that it owns."""
    if target.name is None:
        found = await operator.all_of(target.kind, target.namespace)
        return [item for item in found if related.owns(value, item)]
    one = await operator.get(target)
    return [] if one is None else [one]


async def timeline_of(operator: Operator, found: RelatedObjects) -> list[Event]:
    """Read what happened to related objects, also what the store has forgotten."""
    orders = {item.order for _, item in found.orders}
    reports = await operator.reports(sorted(orders))
    spans: list[SpanRecord] = []
    if isinstance(found.root, Node):
        reports = [report for report in reports if report.node == found.root.metadata.name]
    else:
        traces = {trace_of(value) for value in found.primary} - {""}
        for trace in sorted(traces):
            whole = await operator.spans(trace)
            spans += [span for span in whole if timeline.is_about(span, found.members)]
    names = timeline.names_of(found.members)
    return timeline.timeline(found.primary, reports, spans, names)


async def until(
    operator: Operator,
    target: Target,
    decide: Callable[[AnyObject | None], T | None],
    *,
    within_s: float,
    what: str,
) -> T:
    """Return what `decide` returns for an object once that is not None. DeadlineExceeded.

    It is called with None when the object does not exist. A server that does not answer is waited
    for.
    """
    try:
        # Subscribed before it is read, so that no change between the two is lost.
        async with asyncio.timeout(within_s), operator.watching(target) as changes:
            while True:
                with contextlib.suppress(BusUnavailable):
                    answer = decide(await operator.get(target))
                    if answer is not None:
                        return answer
                await changes.wait()
    except TimeoutError:
        raise DeadlineExceeded(
            f"{what}: not within {within_s:g} s",
            next_step=f"see where it is: snapshotctl explain {target.typed}",
            step=what,
            budget_s=within_s,
        ) from None


async def request(
    operator: Operator, wanted: Sequence[Target], ask: Callable[[Target, str], Awaitable[T]]
) -> T:
    """Return what `ask` returns for the first target that exists. NotFound, Conflict."""
    found = await find(operator, wanted)
    target = target_of(found, wanted)
    with unchanged(target):
        return await ask(target, found.metadata.uid)


class Sent(NamedTuple):
    """What an apply led to, and the trace that it began."""

    results: list[Applied]
    traceparent: str


async def tried(operator: Operator, documents: Sequence[Document]) -> list[Applied]:
    """Return what a `store` would do; nothing is stored. Problems name the place of each."""
    encoded = [document.encode() for document in documents]
    try:
        return await operator.apply(encoded, "", dry_run=True)
    except RemoteFailure as error:
        raise RemoteFailure(_placed(error.failure, documents)) from error


async def send(operator: Operator, telemetry: Telemetry, documents: Sequence[Document]) -> Sent:
    """Store documents, all or none, under a root span of their own."""
    encoded = [document.encode() for document in documents]
    with telemetry.span("apply", attributes={"snapback.documents": len(encoded)}) as traceparent:
        return Sent(await operator.apply(encoded, traceparent), traceparent)


async def store(
    operator: Operator, telemetry: Telemetry, documents: Sequence[Document]
) -> list[Applied]:
    """Store documents, all or none; problems name the place of each document."""
    try:
        return (await send(operator, telemetry, documents)).results
    except RemoteFailure as error:
        raise RemoteFailure(_placed(error.failure, documents)) from error


def _placed(failure: Failure, documents: Sequence[Document]) -> Failure:
    """Put file and line where the operator has the number of a document."""
    problems = failure.values.get("problems")
    if not isinstance(problems, list):
        return failure
    if len(documents) == 1:
        placed = [documents[0].placed(problem) for problem in problems]
    else:
        placed = [_with_place(str(problem), documents) for problem in problems]
    message = f"{len(placed)} problem{'' if len(placed) == 1 else 's'}; nothing was stored"
    values = {**failure.values, "problems": placed}
    return replace(
        failure, message=message, values=values, next_step="correct them and apply again"
    )


def _with_place(problem: str, documents: Sequence[Document]) -> str:
    for index, document in enumerate(documents):
        if problem.startswith(f"[{index}] "):
            return document.placed(problem.removeprefix(f"[{index}] "))
    return problem


def in_version(kind: Kind, name: str) -> Callable[[Any], dict[str, Any]]:
    """Return the function that writes objects of a kind in one of its versions. WrongArguments."""
    version = next((each for each in kind.versions if each.name == name), None)
    if version is None:
        names = " or ".join(each.name for each in kind.versions)
        raise WrongArguments(
            f"--version: {kind.name} has no version {name!r}", next_step=f"use {names}"
        )
    return lambda value: converted(kind, formats.data(value), version)
