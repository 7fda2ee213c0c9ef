"""How reports change what the operator remembers of an order.

The highest rank wins, a terminal report absorbs, older attempts are ignored. Only `ready` and
`exited` follow the terminal report of a `run`: they are life signs of the processes.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from datetime import datetime

from msgspec.structs import replace

from snapshot_api.meta import OrderStatus, time_of
from snapshot_api.views import is_answered
from snapshot_shared.errors import Failure, NodeBusy, NoGuard, ServiceStopped, UnsupportedVersion
from snapshot_shared.orders import CLEANING, MAX_ATTEMPT, SCHEMAS, TERMINAL, Report

_END = "any terminal report"
_AFTER = ("ready", "exited")
_RANKED = ("ordered", "accepted", "leased", _END, *_AFTER)
LOST = "lost"
REST_S = 30.0
"""How long a cleaning order rests after its first failure, in seconds; it grows with each."""
MAX_REST_S = 600.0
RESTS_S = (1.0, 5.0, 30.0)
"""How long after the begin of an attempt the next one begins at the earliest, in seconds.

The last of these counts for all later attempts.
"""
OF_A_NODE = frozenset({ServiceStopped.reason, NoGuard.reason, NodeBusy.reason})
"""Failures of a node that is busy, or whose services are stopped or started, as in an upgrade.

They leave the worker as it was, and count as no attempt: a capture has its deadline.
"""
MAX_CLAIM = MAX_ATTEMPT // 2
"""The highest attempt that a node is believed to know of an order."""
ANSWER_GRACE_S = 15.0
"""Added to an order's own budget before the operator gives up on the answer, in seconds."""


def rank(state: str) -> int:
    """Return the rank of an order's state; a terminal report ranks above all progress."""
    return _RANKED.index(state if state in _RANKED else _END)


def fold(orders: Sequence[OrderStatus], report: Report, now: float) -> list[OrderStatus] | None:
    """Fold one report in; None when nothing changes.

    Nothing changes for an unknown order, another attempt, a lower rank, a kind that the verb does
    not have, and a report of another node or service than the order went to.
    """
    for index, item in enumerate(orders):
        if item.order == report.order and item.attempt == report.attempt:
            changed = _fold_one(item, report, now) if _is_for(item, report) else None
            if changed is None:
                return None
            return [*orders[:index], changed, *orders[index + 1 :]]
    return None


def fold_all(
    orders: Sequence[OrderStatus], reports: Iterable[Report], now: float
) -> list[OrderStatus]:
    """Fold reports in one after another; those that change nothing are left out."""
    folded = list(orders)
    for report in reports:
        folded = fold(folded, report, now) or folded
    return folded


def _is_for(item: OrderStatus, report: Report) -> bool:
    kinds = {"accepted", "leased", TERMINAL[item.verb], "failed", "rejected"}
    if item.verb == "run":
        kinds |= set(_AFTER)
    sender = (report.node, report.service)
    return report.kind in kinds and sender == (item.node, item.service)


def _fold_one(item: OrderStatus, report: Report, now: float) -> OrderStatus | None:
    leased = item.leased or report.kind == "leased"
    if rank(report.kind) <= rank(item.state):
        return replace(item, leased=leased) if leased != item.leased else None
    if report.is_terminal:
        return replace(
            item,
            state=report.kind,
            leased=leased,
            final=_whole(item, report),
            ended_at=time_of(now),
        )
    if report.kind in _AFTER and item.final is None:
        # The life sign overtook the terminal report; it proves that the processes were started.
        return replace(item, state=report.kind, final=report, ended_at=time_of(now))
    if report.kind in _AFTER:
        exit_report = report if report.kind == "exited" else item.final
        return replace(item, state=report.kind, final=exit_report)
    return replace(item, state=report.kind, leased=leased)


def _whole(item: OrderStatus, report: Report) -> Report:
    """Return the report, or the same one as a failure.

    That is when its version is unknown here, or when it lacks what its kind promises.
    """
    if report.schema not in SCHEMAS:
        unknown = UnsupportedVersion(
            f"{item.service} on {item.node} reported {report.kind} for {item.order} in schema "
            f"{report.schema}, the operator reads {', '.join(map(str, SCHEMAS))}",
            found=report.schema,
            supported=list(SCHEMAS),
        )
        return replace(report, failure=unknown.to_failure())
    lacks = {
        "failed": report.failure is None,
        "rejected": report.failure is None,
        "prepared": not report.vector,
        "staged": report.part is None,
        "sealed": report.root_digest is None,
    }
    if not lacks.get(report.kind):
        return report
    failure = Failure(
        reason="InvalidReport",
        message=f"{item.service} on {item.node} reported {report.kind} for {item.order} without "
        "what belongs to it",
        values={"order": item.order, "kind": report.kind},
        next_step="upgrade the older of the two programs",
    )
    return replace(report, failure=failure)


def succeeded(item: OrderStatus) -> bool:
    """Whether an order ended as its verb is meant to."""
    if item.final is None or item.final.failure is not None:
        return False
    return item.final.kind in (TERMINAL[item.verb], *_AFTER)


def failure_in(orders: Iterable[OrderStatus], now: float) -> Failure | None:
    """Return the first failure among orders: a bad report, a node that is gone, a deadline."""
    for item in orders:
        if item.final is not None and item.final.failure is not None:
            return item.final.failure
        if item.state == LOST:
            return Failure(
                reason="NodeLost",
                message=f"node {item.node} is gone, and order {item.order} with it",
                values={"node": item.node},
                next_step="apply the object again; it will use the nodes that are there",
            )
        if is_late(item, now):
            return Failure(
                reason="AgentUnresponsive",
                message=f"{item.service} on {item.node} did not end {item.order} in time",
                retryable=True,
                values={"node": item.node, "order": item.order, "attempt": item.attempt},
                next_step=f"look at the {item.service}'s log on {item.node}",
            )
    return None


def is_late(item: OrderStatus, now: float) -> bool:
    """Whether an order is unanswered and its deadline has passed."""
    return not is_answered(item) and now >= item.deadline.timestamp()


def resumed(orders: Sequence[OrderStatus], started_at: float, now: float) -> list[OrderStatus]:
    """Return orders with the deadlines that an operator which started at a time judges them by.

    While it was away it received no answers, so that none is late before it could arrive; and a
    clock that was set back meanwhile gives no order more than its whole time again.
    """
    return [
        item
        if is_answered(item) or started_at <= item.ordered_at.timestamp() <= now
        else _resumed(item, started_at)
        for item in orders
    ]


def _resumed(item: OrderStatus, started_at: float) -> OrderStatus:
    ordered_at, deadline = item.ordered_at.timestamp(), item.deadline.timestamp()
    latest = started_at + deadline - ordered_at
    judged_at = min(max(deadline, started_at + ANSWER_GRACE_S), latest)
    return replace(
        item, ordered_at=time_of(min(ordered_at, started_at)), deadline=time_of(judged_at)
    )


def next_deadline(orders: Iterable[OrderStatus], now: float) -> float | None:
    """Return the earliest deadline to come among unanswered orders; a passed one was judged."""
    times = (item.deadline.timestamp() for item in orders if not is_answered(item))
    return min((at for at in times if at > now), default=None)


def earliest(*times: float | None) -> float | None:
    """Return the earliest of the times that are there."""
    return min((at for at in times if at is not None), default=None)


def mark_lost(
    orders: Sequence[OrderStatus], now: float, known: Container[str]
) -> list[OrderStatus]:
    """Settle the orders of nodes whose Node object is gone: nothing will answer them.

    A node that is only silent keeps its orders. Their deadlines judge its work, and what cleans up
    stays owed until it returns.
    """
    return [
        replace(item, state=LOST, ended_at=time_of(now))
        if not is_answered(item) and item.node not in known
        else item
        for item in orders
    ]


def is_done(item: OrderStatus) -> bool:
    """Whether a cleaning order has done its work, or its node is gone for good."""
    return succeeded(item) or item.state == LOST


def due_at(item: OrderStatus) -> float | None:
    """Return when a cleaning order is to be given again, in seconds since the epoch.

    That is after a rest when it failed, and after its deadline when it was not answered: a report
    can be lost with its stream. None when it is done. An attempt that the node knows a higher one
    of is given again at once: this store is older than the node's journal.
    """
    if is_done(item):
        return None
    if not is_answered(item):
        return item.deadline.timestamp()
    if superseding(item):
        return _seconds(item.ended_at)
    return _seconds(item.ended_at) + min(REST_S * item.tries, MAX_REST_S)


def rested_at(orders: Iterable[OrderStatus]) -> float:
    """Return when the attempt after the one of these orders may begin, in seconds since the epoch.

    0 without orders. What an attempt met, such as a service that is being started, is there for the
    next one as well if that begins at once.
    """
    began = [(item.ordered_at.timestamp(), item.attempt) for item in orders]
    if not began:
        return 0.0
    at, attempt = min(began)
    return at + RESTS_S[min(attempt, len(RESTS_S)) - 1]


def superseding(item: OrderStatus) -> int:
    """Return the attempt that the node holds against this one, if it refused it for that; or 0.

    A claim that leaves no room for later attempts is no reason: an order with a number above
    MAX_ATTEMPT could not be stored.
    """
    failure = item.final.failure if item.final is not None else None
    if failure is None or failure.reason != "Superseded":
        return 0
    known = failure.values.get("attempt", 0)
    # True is an int, and could not be stored as one.
    is_number = isinstance(known, int) and not isinstance(known, bool)
    return known if is_number and item.attempt <= known <= MAX_CLAIM else 0


def next_attempt(item: OrderStatus) -> int:
    """Return the attempt of the next try of an order."""
    return max(item.attempt, superseding(item)) + 1


def renewal_at(orders: Iterable[OrderStatus], now: float) -> float | None:
    """Return when the next cleaning order is to be given again; what is due now was judged.

    One that is due and was not given again, such as a `delete` without a node for it, waits for
    what the decision has read.
    """
    times = (due_at(item) for item in orders if item.verb in CLEANING)
    return min((at for at in times if at is not None and at > now), default=None)


def _seconds(at: datetime | None) -> float:
    return at.timestamp() if at is not None else 0.0


def replaced(orders: Sequence[OrderStatus], new: OrderStatus) -> list[OrderStatus]:
    """Return the orders with `new` in place of all earlier attempts of the same order."""
    return [*(item for item in orders if item.order != new.order), new]


def find(orders: Iterable[OrderStatus], verb: str, attempt: int | None = None) -> list[OrderStatus]:
    """Return the orders of a verb, of one attempt if it is given."""
    return [
        item
        for item in orders
        if item.verb == verb and (attempt is None or item.attempt == attempt)
    ]
