"""Conditions as values: building them and carrying their transition times."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Literal, NamedTuple

from snapshot_api.kinds import AnyObject
from snapshot_api.meta import Condition, set_condition
from snapshot_api.v1alpha1.content import Committed
from snapshot_shared.errors import Failure
from snapshot_shared.units import size

REFUSED = "Refused"
"""Why something waits for an object that is not taken now, for a quota or the word of a webhook."""

Truth = Literal["True", "False", "Unknown"]


class Wait(NamedTuple):
    """Why something cannot begin yet: the reason and the message of a condition."""

    reason: str
    message: str


def timestamp(now: float) -> str:
    """Write seconds since the epoch as Kubernetes writes times."""
    return datetime.fromtimestamp(int(now), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def seconds(stamp: str) -> float:
    """Return a time stamp as seconds since the epoch; what is none is never reached."""
    try:
        return datetime.fromisoformat(stamp).timestamp()
    except ValueError:
        return float("inf")


def with_conditions(
    conditions: list[Condition],
    owner: AnyObject,
    now: float,
    *rows: tuple[str, bool, str, str],
) -> list[Condition]:
    """Set several conditions, each a row of type, status, reason, message."""
    for type_, is_true, reason, message in rows:
        truth: Truth = "True" if is_true else "False"
        conditions = with_truth(conditions, owner, now, type_, truth, reason, message)
    return conditions


def with_truth(
    conditions: list[Condition],
    owner: AnyObject,
    now: float,
    type_: str,
    truth: Truth,
    reason: str,
    message: str,
) -> list[Condition]:
    """Set one condition, which may also be unknown."""
    new = Condition(
        type=type_,
        status=truth,
        reason=reason,
        message=message[:4096],
        observed_generation=owner.metadata.generation,
    )
    return set_condition(conditions, new, timestamp(now))


def ready(
    conditions: list[Condition], owner: AnyObject, now: float, reason: str, message: str
) -> list[Condition]:
    """Return the conditions of what is done."""
    return with_conditions(
        conditions, owner, now, ("Ready", True, reason, message), ("Failed", False, reason, "")
    )


def mirrored(
    conditions: list[Condition], owner: AnyObject, now: float, ready: Condition
) -> list[Condition]:
    """Return the conditions of what was captured, with `ready` as its condition `Ready`.

    That it was captured stays true when the artifact is found damaged, even if it was not verified
    while it was ready.
    """
    return with_conditions(
        conditions,
        owner,
        now,
        ("Ready", ready.status == "True", ready.reason, ready.message),
        ("Failed", False, "Captured", ""),
    )


def pending(
    conditions: list[Condition], owner: AnyObject, now: float, reason: str, message: str
) -> list[Condition]:
    """Return the conditions of what waits."""
    return with_conditions(conditions, owner, now, ("Ready", False, reason, message))


def text_of(failure: Failure) -> str:
    """Return what went wrong and what to do."""
    message = failure.message.rstrip(".")
    return f"{message}. Next: {failure.next_step}" if failure.next_step else message


def failed(
    conditions: list[Condition], owner: AnyObject, now: float, failure: Failure
) -> list[Condition]:
    """Return the conditions of what failed: what went wrong and what to do."""
    message = text_of(failure)
    return with_conditions(
        conditions,
        owner,
        now,
        ("Ready", False, failure.reason, message),
        ("Failed", True, failure.reason, message),
    )


def captured(
    conditions: list[Condition], owner: AnyObject, committed: Committed, now: float
) -> list[Condition]:
    """Return the conditions of an artifact that is committed and may be used."""
    message = f"generation {committed.generation}, {size(committed.bytes)}"
    return ready(conditions, owner, now, "Captured", message)
