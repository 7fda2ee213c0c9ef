"""What `wait` waits for, and whether it has come true, may still, or never can."""

from __future__ import annotations

import re
from dataclasses import dataclass

from snapshot_shared.objects import (
    AnyObject,
    Condition,
    DynamoCheckpoint,
    Job,
    Node,
    Pod,
    Snapshot,
    SnapshotContent,
    SnapshotRestore,
    condition,
)
from snapshot_shared.transitions import Capture, Restore
from snapshotctl.domain.exits import WrongArguments

_CONDITION = re.compile(
    r"condition=([A-Za-z][A-Za-z0-9]{0,62})(?:=(true|false|unknown))?", re.IGNORECASE
)
RESTORED = "nvidia.com/Restored"
"""Condition of a Pod: how the restore into it has ended."""
_STATUS = {"true": "True", "false": "False", "unknown": "Unknown"}


@dataclass(frozen=True)
class ConditionIs:
    """A condition of this type has this status."""

    type: str
    status: str = "True"

    def __str__(self) -> str:
        """Write as it is typed."""
        return f"condition={self.type}" + ("" if self.status == "True" else f"={self.status}")


@dataclass(frozen=True)
class Gone:
    """The object is no more."""

    def __str__(self) -> str:
        """Write as it is typed."""
        return "delete"


Goal = ConditionIs | Gone


@dataclass(frozen=True)
class Met:
    """It has come true."""

    detail: str


@dataclass(frozen=True)
class Open:
    """Not yet."""

    detail: str


@dataclass(frozen=True)
class Never:
    """It cannot come true any more."""

    detail: str


Verdict = Met | Open | Never


def parse_goal(text: str) -> Goal:
    """Read `condition=Ready`, `condition=Ready=False` or `delete`. WrongArguments else."""
    if text == "delete":
        return Gone()
    found = _CONDITION.fullmatch(text)
    if found is None:
        raise WrongArguments(
            f"--for {text!r} is not understood",
            next_step="use condition=Ready, condition=Failed, condition=Ready=False or delete",
        )
    return ConditionIs(found[1], _STATUS[(found[2] or "true").lower()])


def judge(goal: Goal, found: AnyObject | None) -> Verdict:
    """Compare a goal with an object as it is now (None: it does not exist)."""
    match goal:
        case Gone():
            return Met("it is gone") if found is None else Open("it still exists")
        case ConditionIs(type_, status):
            return Never("it was deleted") if found is None else _judge(type_, status, found)


def _judge(type_: str, status: str, found: AnyObject) -> Verdict:
    conditions = conditions_of(found)
    held = next((c for c in conditions if c.type.lower() == type_.lower()), None)
    if held is not None and held.status == status:
        return Met(_reason(held))
    if status == "True" and type_.lower() != "failed" and (why := failure_of(found)):
        return Never(why)
    if held is None:
        return Open(f"it has no condition {type_} yet")
    return Open(f"{held.type} is {held.status}: {_reason(held)}")


def conditions_of(found: AnyObject) -> list[Condition]:
    """Give the conditions of any object."""
    return found.status.conditions


def failure_of(found: AnyObject) -> str:
    """Say why an object has failed for good, or give an empty string."""
    failed = condition(conditions_of(found), "Failed")
    if failed is not None and failed.status == "True":
        return _reason(failed)
    match found:
        case DynamoCheckpoint():
            return found.status.message or "it failed" if found.status.phase == "Failed" else ""
        case SnapshotContent():
            failure = found.status.failure
            if found.status.capture is not Capture.FAILED:
                return ""
            return str(failure) if failure else "the capture failed"
        case SnapshotRestore():
            return _restore_failure(found)
        case Pod():
            return _pod_failure(found)
        case Job():
            return "its pod failed" if found.status.failed else ""
        case Snapshot() | Node():
            return ""


def _restore_failure(found: SnapshotRestore) -> str:
    if found.status.state is not Restore.FAILED:
        return ""
    return str(found.status.failure) if found.status.failure else "the restore failed"


def _pod_failure(pod: Pod) -> str:
    restored = condition(pod.status.conditions, RESTORED)
    if restored is not None and restored.status == "False":
        return _reason(restored)
    if pod.status.phase == "Failed":
        return ": ".join(filter(None, (pod.status.reason, pod.status.message))) or "the pod failed"
    return ""


def _reason(held: Condition) -> str:
    return f"{held.reason}: {held.message}" if held.message else held.reason
