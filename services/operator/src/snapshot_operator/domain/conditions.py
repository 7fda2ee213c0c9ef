"""Conditions as values: building them and carrying their transition times."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Literal

from snapshot_shared.errors import Failure
from snapshot_shared.objects import AnyObject, Condition, set_condition


def timestamp(now: float) -> str:
    """Write seconds since the epoch as Kubernetes writes times."""
    return datetime.fromtimestamp(int(now), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def with_conditions(
    conditions: list[Condition],
    owner: AnyObject,
    now: float,
    *rows: tuple[str, bool, str, str],
) -> list[Condition]:
    """Set several conditions, each a row of type, status, reason, message."""
    for type_, is_true, reason, message in rows:
        status: Literal["True", "False"] = "True" if is_true else "False"
        new = Condition(
            type=type_,
            status=status,
            reason=reason,
            message=message[:4096],
            observed_generation=owner.metadata.generation,
        )
        conditions = set_condition(conditions, new, timestamp(now))
    return conditions


def ready(
    conditions: list[Condition], owner: AnyObject, now: float, reason: str, message: str
) -> list[Condition]:
    """Say that it is done."""
    return with_conditions(
        conditions, owner, now, ("Ready", True, reason, message), ("Failed", False, reason, "")
    )


def pending(
    conditions: list[Condition], owner: AnyObject, now: float, reason: str, message: str
) -> list[Condition]:
    """Say what is being waited for."""
    return with_conditions(conditions, owner, now, ("Ready", False, reason, message))


def failed(
    conditions: list[Condition], owner: AnyObject, now: float, failure: Failure
) -> list[Condition]:
    """Say what went wrong and what to do."""
    message = failure.message.rstrip(".")
    if failure.next_step:
        message += f". Next: {failure.next_step}"
    return with_conditions(
        conditions,
        owner,
        now,
        ("Ready", False, failure.reason, message),
        ("Failed", True, failure.reason, message),
    )
