"""Damage of a committed artifact: its quarantine, and the verification that lifts it.

Whoever reads an artifact may find it damaged: a load, a restore, or a verification. It is then in
quarantine: nothing is deleted, nobody begins to restore from it. Verifications are numbered; only
one that was asked for after the last damage was found, and that found none, lifts the quarantine.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from msgspec.structs import replace

from snapshot_operator.domain import conditions, fold, ordering
from snapshot_shared.errors import Failure
from snapshot_shared.objects import (
    Condition,
    OrderStatus,
    SnapshotContent,
    SnapshotContentStatus,
    condition,
    is_true,
)

QUARANTINED = "Quarantined"
VERIFIED = "Verified"
DAMAGE = frozenset({"ArtifactCorrupt", "ArtifactMissing", "ArtifactError"})
"""Reasons that speak about the artifact itself; `Incompatible` speaks about the target."""

_READING = ("load", "restore", "verify")
_LATE = "AgentUnresponsive"


class Wait(NamedTuple):
    """Why a verification cannot begin yet."""

    reason: str
    message: str


def is_quarantined(content: SnapshotContent) -> bool:
    """Say whether nobody may begin to restore from a content."""
    return is_true(content.status.conditions, QUARANTINED)


def damage_in(orders: Iterable[OrderStatus]) -> OrderStatus | None:
    """Find the first order that failed because what it read is damaged."""
    for item in orders:
        failure = item.final.failure if item.final is not None else None
        if item.verb in _READING and failure is not None and failure.reason in DAMAGE:
            return item
    return None


def quarantined(
    content: SnapshotContent, item: OrderStatus, finder: str, now: float
) -> SnapshotContentStatus:
    """Give the status of a content whose damage `finder` has found with an order."""
    failure = item.final.failure if item.final is not None else None
    if failure is None:
        return content.status
    message = _finding(item, failure, finder)
    rows = conditions.with_conditions(
        content.status.conditions,
        content,
        now,
        (QUARANTINED, True, failure.reason, message),
        ("Ready", False, failure.reason, f"quarantined: {message}"),
    )
    return replace(content.status, conditions=rows, doubted=content.status.verifications)


def _finding(item: OrderStatus, failure: Failure, finder: str) -> str:
    part = failure.values.get("part") or item.payload.get("part")
    where = f"part {part}: " if part else ""
    return f"{where}{failure.message} (found by {finder} on {item.node})"


def refusal(content: SnapshotContent, name: str) -> Failure | None:
    """Say why nobody may begin to restore from what is called `name`; None when one may."""
    found = condition(content.status.conditions, QUARANTINED)
    if found is None or found.status != "True":
        return None
    return Failure(
        reason=QUARANTINED,
        message=f"{name} is quarantined: {found.reason}: {found.message}",
        values={"content": content.metadata.name, "reason": found.reason},
        next_step=f"restore another snapshot; if the storage was repaired: snapshotctl verify "
        f"{name}",
    )


def asked(content: SnapshotContent) -> SnapshotContentStatus:
    """Give the status after somebody asked for a verification; one under way is joined."""
    status = content.status
    if status.verifications > status.verified:
        return status
    return replace(status, verifications=status.verifications + 1)


def verification(content: SnapshotContent, node: str | Wait, now: float) -> SnapshotContentStatus:
    """Give the status after the next step of a verification.

    `node` is one that can read now, or why there is none.
    """
    status = content.status
    last = _last(status)
    if last is not None and not _is_judged(status, last):
        return _judged(content, last, now)
    if status.verifications <= status.verified:
        return status
    if last is not None and last.attempt == status.verifications:
        return status
    if status.committed is None:
        return status
    if isinstance(node, Wait):
        return _told(content, "Unknown", node.reason, node.message, now)
    order = ordering.verify(content, status.committed, node, now, attempt=status.verifications)
    begun = _told(content, "Unknown", "Verifying", f"{node} reads all bytes", now)
    others = [item for item in status.orders if item.verb != "verify"]
    return replace(begun, orders=[*others, order])


def _last(status: SnapshotContentStatus) -> OrderStatus | None:
    return max(fold.find(status.orders, "verify"), key=lambda item: item.attempt, default=None)


def _is_judged(status: SnapshotContentStatus, item: OrderStatus) -> bool:
    if status.verified < item.attempt:
        return False
    shown = condition(status.conditions, VERIFIED)
    came_late = shown is not None and shown.reason == _LATE and item.final is not None
    return not came_late


def _judged(content: SnapshotContent, item: OrderStatus, now: float) -> SnapshotContentStatus:
    """Give the status after an answer to a verification; unchanged while there is none."""
    status = content.status
    failure = fold.failure_in([item], now)
    if failure is None and not fold.succeeded(item):
        return status
    if failure is None:
        return _passed(content, item, now)
    if failure.reason not in DAMAGE:
        told = _told(content, "Unknown", failure.reason, failure.message, now)
        return replace(told, verified=item.attempt)
    finder = "a verification"
    marked = replace(content, status=quarantined(content, item, finder, now))
    message = _finding(item, failure, finder)
    told = _told(marked, "False", failure.reason, message, now)
    return replace(told, verified=item.attempt)


def _passed(content: SnapshotContent, item: OrderStatus, now: float) -> SnapshotContentStatus:
    status = content.status
    if is_quarantined(content) and item.attempt <= status.doubted:
        # Damage was found while this one read: what it says may be of before.
        return replace(status, verifications=item.attempt + 1, verified=item.attempt)
    size = status.committed.bytes if status.committed is not None else 0
    told = _told(content, "True", "DigestsMatch", f"{item.node} read {size} bytes", now)
    done = replace(told, verified=item.attempt)
    if not is_quarantined(content):
        return done
    lifted = conditions.with_conditions(
        done.conditions, content, now, (QUARANTINED, False, "DigestsMatch", "")
    )
    return replace(done, conditions=conditions.captured(lifted, content, status.committed, now))


def _told(
    content: SnapshotContent, truth: conditions.Truth, reason: str, message: str, now: float
) -> SnapshotContentStatus:
    rows: list[Condition] = conditions.with_truth(
        content.status.conditions, content, now, VERIFIED, truth, reason, message
    )
    return replace(content.status, conditions=rows)
