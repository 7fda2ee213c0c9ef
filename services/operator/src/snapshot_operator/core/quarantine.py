"""Damage of a committed artifact: its quarantine, and the verification that lifts it.

A load, a restore or a verification may find an artifact damaged. It is then in quarantine: nothing
is deleted, and no restore from it begins. Verifications are numbered; only one that was asked for
after the last damage was found, and that found none, lifts the quarantine.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from msgspec.structs import replace

from snapshot_api.meta import Condition, OrderStatus, condition, is_true
from snapshot_api.v1alpha1.content import Committed, SnapshotContent, SnapshotContentStatus
from snapshot_api.well_known import VERIFY
from snapshot_operator.core import conditions, fold, ordering
from snapshot_operator.core.conditions import Wait
from snapshot_operator.core.interventions import requested
from snapshot_shared.errors import DAMAGE, Failure
from snapshot_shared.orders import order_in
from snapshot_shared.units import size

QUARANTINED = "Quarantined"
VERIFIED = "Verified"

_READING = ("load", "place", "restore", "verify")
_LATE = "AgentUnresponsive"


def is_quarantined(content: SnapshotContent) -> bool:
    """Whether no restore from a content may begin."""
    return is_true(content.status.conditions, QUARANTINED)


class Damage(NamedTuple):
    """What was found damaged, and the order that found it."""

    order: OrderStatus
    failure: Failure


def damage_in(orders: Iterable[OrderStatus]) -> Damage | None:
    """Find the first order that failed because what it read is damaged."""
    for item in orders:
        failure = item.final.failure if item.final is not None else None
        if item.verb in _READING and failure is not None and failure.reason in DAMAGE:
            return Damage(item, failure)
    return None


def quarantined(
    content: SnapshotContent, damage: Damage, finder: str, now: float
) -> SnapshotContentStatus:
    """Return the status of a content whose damage `finder` has found."""
    failure = damage.failure
    message = _finding(damage, finder)
    rows = conditions.with_conditions(
        content.status.conditions,
        content,
        now,
        (QUARANTINED, True, failure.reason, message),
        ("Ready", False, failure.reason, f"quarantined: {message}"),
    )
    return replace(content.status, conditions=rows, doubted=content.status.verifications)


def _finding(damage: Damage, finder: str) -> str:
    item, failure = damage
    order = order_in(item.payload)
    part = failure.values.get("part") or getattr(order, "part", "")
    where = f"part {part}: " if part else ""
    return f"{where}{failure.message} (found by {finder} on {item.node})"


def refusal(content: SnapshotContent, name: str) -> Failure | None:
    """Return why no restore from what is called `name` may begin; None when one may."""
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


def asked(content: SnapshotContent) -> SnapshotContent:
    """Return the content with a new value of the annotation obeyed; one under way is joined."""
    request, status = requested(content, VERIFY), content.status
    if request == status.verify_request:
        return content
    number = max(status.verifications, status.verified + 1)
    obeyed = replace(status, verify_request=request, verifications=number)
    return replace(content, status=obeyed)


def verification(
    content: SnapshotContent, committed: Committed, node: str | Wait, now: float
) -> SnapshotContentStatus:
    """Return the status after the next step of a verification.

    `node` is one that can read now, or why there is none.
    """
    status = content.status
    last = _last(status)
    if last is not None and not _is_judged(status, last):
        return _judged(content, committed, last, now)
    if status.verifications <= status.verified:
        return status
    if last is not None and last.attempt == status.verifications:
        return status
    if isinstance(node, Wait):
        return _shown(content, "Unknown", node.reason, node.message, now)
    order = ordering.verify(content, committed, node, now, attempt=status.verifications)
    begun = _shown(content, "Unknown", "Verifying", f"{node} reads all bytes", now)
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


def _judged(
    content: SnapshotContent, committed: Committed, item: OrderStatus, now: float
) -> SnapshotContentStatus:
    """Return the status after an answer to a verification; unchanged while there is none."""
    status = content.status
    failure = fold.failure_in([item], now)
    if failure is None and not fold.succeeded(item):
        return status
    if failure is None:
        return _passed(content, committed, item, now)
    if attempt := fold.superseding(item):
        return replace(status, verifications=attempt + 1, verified=attempt)
    if failure.reason not in DAMAGE:
        shown = _shown(content, "Unknown", failure.reason, failure.message, now)
        return replace(shown, verified=item.attempt)
    damage, finder = Damage(item, failure), "a verification"
    marked = replace(content, status=quarantined(content, damage, finder, now))
    shown = _shown(marked, "False", failure.reason, _finding(damage, finder), now)
    return replace(shown, verified=item.attempt)


def _passed(
    content: SnapshotContent, committed: Committed, item: OrderStatus, now: float
) -> SnapshotContentStatus:
    status = content.status
    if is_quarantined(content) and item.attempt <= status.doubted:
        # Damage was found while this one read: what it says may be of before.
        return replace(status, verifications=item.attempt + 1, verified=item.attempt)
    message = f"{item.node} read {size(committed.bytes)}"
    shown = _shown(content, "True", "DigestsMatch", message, now)
    done = replace(shown, verified=item.attempt)
    if not is_quarantined(content):
        return done
    lifted = conditions.with_conditions(
        done.conditions, content, now, (QUARANTINED, False, "DigestsMatch", "")
    )
    return replace(done, conditions=conditions.captured(lifted, content, committed, now))


def _shown(
    content: SnapshotContent, truth: conditions.Truth, reason: str, message: str, now: float
) -> SnapshotContentStatus:
    rows: list[Condition] = conditions.with_truth(
        content.status.conditions, content, now, VERIFIED, truth, reason, message
    )
    return replace(content.status, conditions=rows)
