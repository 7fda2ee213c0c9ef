"""The commands on objects: apply, get, delete, wait, nodes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from snapshot_shared.api import Applied
from snapshot_shared.errors import DeadlineExceeded, Failure, NotFound, RemoteFailure
from snapshot_shared.objects import KINDS, AnyObject, Node
from snapshotctl.domain import formats, rows
from snapshotctl.domain.documents import Document
from snapshotctl.domain.exits import NeverTrue
from snapshotctl.domain.targets import Target
from snapshotctl.domain.waiting import Goal, Gone, Met, Never, Open, Verdict, judge
from snapshotctl.handlers import looking
from snapshotctl.handlers.watching import until
from snapshotctl.ports import Operator, Screen

if TYPE_CHECKING:
    from snapshot_shared.telemetry import Telemetry


class Sent(NamedTuple):
    """What an apply led to, and the trace that it began."""

    results: list[Applied]
    traceparent: str


async def send(operator: Operator, telemetry: Telemetry, documents: Sequence[Document]) -> Sent:
    """Store documents, all or none, under a root span of their own."""
    encoded = [document.encode() for document in documents]
    with telemetry.span("apply", attributes={"snapback.documents": len(encoded)}) as traceparent:
        return Sent(await operator.apply(encoded, traceparent), traceparent)


async def apply(
    operator: Operator, screen: Screen, telemetry: Telemetry, documents: Sequence[Document]
) -> None:
    """Store documents and say what became of each."""
    results = await store(operator, telemetry, documents)
    if not screen.wants_table:
        screen.value([msgspec.to_builtins(result) for result in results])
        return
    for result in results:
        screen.line(f"{result.kind.lower()}/{result.name} {result.action}")


async def store(
    operator: Operator, telemetry: Telemetry, documents: Sequence[Document]
) -> list[Applied]:
    """Store documents, all or none; problems name the place of each document."""
    try:
        return (await send(operator, telemetry, documents)).results
    except RemoteFailure as error:
        raise RemoteFailure(_placed(error, documents)) from error


def _placed(error: RemoteFailure, documents: Sequence[Document]) -> Failure:
    """Say file and line where the operator says the number of a document."""
    failure = error.failure
    problems = failure.values.get("problems")
    if not isinstance(problems, list):
        return failure
    if len(documents) == 1:
        placed = [f"{documents[0].where}: {problem}" for problem in problems]
    else:
        placed = [_with_place(str(problem), documents) for problem in problems]
    message = f"{len(placed)} problem{'' if len(placed) == 1 else 's'}; nothing was stored"
    values = {**failure.values, "problems": placed}
    return msgspec.structs.replace(
        failure, message=message, values=values, next_step="correct them and apply again"
    )


def _with_place(problem: str, documents: Sequence[Document]) -> str:
    for index, document in enumerate(documents):
        if problem.startswith(f"[{index}] "):
            return f"{document.where}: {problem.removeprefix(f'[{index}] ')}"
    return problem


async def get(
    operator: Operator, screen: Screen, target: Target, *, now: float, everywhere: bool
) -> None:
    """Show one object or all of a kind. `now` is seconds since the epoch."""
    if target.name is None:
        found = await operator.all_of(target.kind, target.namespace)
    else:
        found = [await existing(operator, target)]
    if not screen.wants_table:
        values = [formats.data(item) for item in found]
        screen.value(values if target.name is None else values[0])
    elif found:
        screen.table(rows.table_of(target.kind, found, now, with_namespace=everywhere))
    else:
        where = f" in namespace {target.namespace}" if target.namespace else ""
        screen.note(f"no {target.kind.plural}{where}")


async def existing(operator: Operator, target: Target) -> AnyObject:
    """Read an object that has to exist. NotFound."""
    found = await operator.get(target)
    if found is None:
        where = f" in namespace {target.namespace}" if target.namespace else ""
        raise NotFound(
            f"{target.kind.name} {target.name} does not exist{where}",
            next_step=f"list what there is: snapshotctl get {target.kind.plural}",
        )
    return found


async def delete(operator: Operator, screen: Screen, target: Target) -> None:
    """Mark an object for deletion."""
    found = await existing(operator, target)
    with looking.as_it_was_read(target):
        gone = await operator.delete(target, found.metadata.uid)
    if screen.wants_table:
        screen.line(f"{target} {'deleted' if gone else 'is being deleted'}")
        if not gone:
            screen.line(f"  wait until it is gone: snapshotctl wait {target} --for=delete")
        return
    screen.value({"kind": target.kind.name, "name": target.name, "gone": gone})


async def wait(
    operator: Operator, screen: Screen, target: Target, goal: Goal, *, within_s: float
) -> None:
    """Wait until a goal is met. NotFound at once, NeverTrue, DeadlineExceeded."""
    last: Verdict = Open("it was not looked at yet")

    def decide(found: AnyObject | None) -> Met | Never | None:
        nonlocal last
        last = judge(goal, found)
        return None if isinstance(last, Open) else last

    if not isinstance(goal, Gone):
        await existing(operator, target)
    try:
        answer: Met | Never = await until(
            operator, target, decide, within_s=within_s, what=f"waiting for {goal} of {target}"
        )
    except DeadlineExceeded as error:
        # mypy cannot see that `decide` has changed it.
        detail = last.detail if isinstance(last, Open) else ""
        raise DeadlineExceeded(
            f"{error.message}; last seen: {detail}", next_step=error.next_step, **error.values
        ) from None
    if isinstance(answer, Never):
        raise NeverTrue(
            f"{goal} of {target} cannot come true: {answer.detail}",
            next_step=f"the whole story: snapshotctl explain {target.typed}",
        )
    if screen.wants_table:
        screen.line(f"{target} {goal}: {answer.detail}")
    else:
        screen.value({"target": str(target), "goal": str(goal), "detail": answer.detail})


async def nodes(operator: Operator, screen: Screen, *, now: float) -> None:
    """Show the nodes and what they last said of themselves."""
    found = [n for n in await operator.all_of(KINDS["Node"], None) if isinstance(n, Node)]
    presence = await operator.presence()
    if not screen.wants_table:
        screen.value(
            [
                {
                    "node": formats.data(node),
                    "presence": msgspec.to_builtins(presence.get(node.metadata.name)),  # type: ignore[call-overload]  # a NodeName is a str
                }
                for node in found
            ]
        )
    elif found:
        screen.table(rows.table_of_nodes(found, presence, now))
    else:
        screen.note("no nodes")
