"""The command wait: its goals, and whether they are met, may be met later, or never can be."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import typer

from snapshot_api.facts import Pod
from snapshot_api.kinds import AnyObject
from snapshot_api.meta import condition
from snapshot_shared.errors import DeadlineExceeded, NotFound
from snapshotctl import objects
from snapshotctl.command import (
    KindAndName,
    Namespace,
    Timeout,
    command,
    complete_goals,
    new_app,
)
from snapshotctl.domain import formats, targets
from snapshotctl.domain.exits import NeverTrue, WrongArguments
from snapshotctl.domain.targets import Target
from snapshotctl.ports import Operator
from snapshotctl.tools import Tools
from snapshotctl.views.state import failure_of, reason_of

app = new_app()


@command(
    app,
    "snapshotctl wait dynamocheckpoint/demo-llm --for condition=Ready --timeout 5m",
    "snapshotctl wait pod my-worker --for delete",
)
async def wait(
    tools: Tools,
    words: KindAndName,
    goal: Annotated[
        str,
        typer.Option(
            "--for",
            metavar="GOAL",
            help="condition=TYPE, condition=TYPE=False, delete.",
            autocompletion=complete_goals,
        ),
    ] = "condition=Ready",
    timeout: Timeout = "5m",
    namespace: Namespace = "default",
) -> None:
    """Wait until a condition comes true, or cannot any more.

    What does not exist counts as deleted where its kind is named, as in pod/my-worker.
    """
    named = targets.meant_one(words, namespace)
    wanted, within_s = parse_goal(goal), formats.parse_duration(timeout)
    async with tools.operator(patiently=True) as operator:
        shown, met = await _resolved_and_met(operator, named, wanted, within_s)
    if tools.screen.wants_table:
        tools.screen.line(f"{shown} {wanted}: {met.detail}")
    else:
        tools.screen.value({"target": shown, "goal": str(wanted), "detail": met.detail})


_CONDITION = re.compile(
    r"condition=([a-z][-a-z0-9._/]{0,316})(?:=(true|false|unknown))?", re.IGNORECASE
)
_STATUS = {"true": "True", "false": "False", "unknown": "Unknown"}


@dataclass(frozen=True)
class ConditionIs:
    """A condition of this type has this status."""

    type: str
    status: str = "True"

    def __str__(self) -> str:
        """Return it as it is typed."""
        return f"condition={self.type}" + ("" if self.status == "True" else f"={self.status}")


@dataclass(frozen=True)
class Gone:
    """The object is gone."""

    def __str__(self) -> str:
        """Return it as it is typed."""
        return "delete"


Goal = ConditionIs | Gone


@dataclass(frozen=True)
class Met:
    """The goal is met."""

    detail: str


@dataclass(frozen=True)
class Open:
    """The goal may be met later."""

    detail: str


@dataclass(frozen=True)
class Never:
    """The goal cannot be met any more."""

    detail: str


Outcome = Met | Open | Never


def parse_goal(text: str) -> Goal:
    """Return the goal of `condition=Ready`, `condition=Ready=False` or `delete`. WrongArguments."""
    if text == "delete":
        return Gone()
    found = _CONDITION.fullmatch(text)
    if found is None:
        raise WrongArguments(
            f"--for {text!r} is not understood",
            next_step="use condition=Ready, condition=Failed, condition=Ready=False or delete",
        )
    return ConditionIs(found[1], _STATUS[(found[2] or "true").lower()])


def judge(goal: Goal, found: AnyObject | None) -> Outcome:
    """Return whether a goal is met by an object (None: it does not exist), or never can be."""
    match goal:
        case Gone():
            return Met("it is gone") if found is None else Open("it still exists")
        case ConditionIs(type_, status):
            return Never("it was deleted") if found is None else _judge(type_, status, found)


def _judge(type_: str, status: str, found: AnyObject) -> Outcome:
    conditions = found.status.conditions
    held = next((c for c in conditions if c.type.lower() == type_.lower()), None)
    if held is not None and held.status == status:
        return Met(reason_of(held))
    if status == "True" and type_.lower() != "failed" and (why := failure_of(found)):
        return Never(why)
    is_over = isinstance(found, Pod) and found.status.phase == "Succeeded"
    if is_over and (type_.lower(), status) == ("ready", "True"):
        return Never("it has ended: every container exited with code 0")
    if held is None:
        placed = condition(conditions, "PodScheduled")
        is_stuck = placed is not None and placed.status == "False"
        why = f": {reason_of(placed)}" if placed is not None and is_stuck else ""
        return Open(f"it has no condition {type_} yet{why}")
    return Open(f"{held.type} is {held.status}: {reason_of(held)}")


async def _resolved_and_met(
    operator: Operator, named: Sequence[Target], goal: Goal, within_s: float
) -> tuple[str, Met]:
    """Wait until a goal is met; return of what as well, as it is typed."""
    try:
        target = await objects.resolved(operator, named)
    except NotFound as error:
        if not isinstance(goal, Gone):
            raise
        # Of what kind it was is not known, so it may as well be misspelt.
        raise NotFound(
            error.message,
            next_step=f"name the kind where it may be gone already, as in pod/{named[0].name}",
        ) from None
    return str(target), await _met(operator, target, goal, within_s)


async def _met(operator: Operator, target: Target, goal: Goal, within_s: float) -> Met:
    """Wait until a goal is met. NotFound at once, NeverTrue, DeadlineExceeded."""
    last = ""

    def decide(found: AnyObject | None) -> Met | Never | None:
        nonlocal last
        outcome = judge(goal, found)
        last = outcome.detail
        return None if isinstance(outcome, Open) else outcome

    if not isinstance(goal, Gone):
        await objects.existing(operator, target)
    try:
        answer: Met | Never = await objects.until(
            operator, target, decide, within_s=within_s, what=f"waiting for {goal} of {target}"
        )
    except DeadlineExceeded as error:
        raise DeadlineExceeded(
            f"{error.message}; last seen: {last or 'it was never read'}",
            next_step=error.next_step,
            **error.values,
        ) from None
    if isinstance(answer, Never):
        why, _, step = answer.detail.partition(". Next: ")
        story = f"see why: snapshotctl explain {target.typed}"
        raise NeverTrue(
            f"{goal} of {target} cannot come true: {why}",
            next_step=f"{step}; {story}" if step else story,
        )
    return answer
