"""How reports change what the operator remembers of an order.

The highest rank wins, a terminal report absorbs, older attempts are ignored. Only `ready` and
`exited` follow the terminal report of a `run`: they are life signs of the processes.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence

from msgspec.structs import replace

from snapshot_shared.errors import Failure, UnsupportedVersion
from snapshot_shared.objects import OrderStatus
from snapshot_shared.orders import SCHEMAS, TERMINAL, Report

_RANKS = {"ordered": 0, "accepted": 1, "leased": 2}
_TERMINAL_RANK = 10
_AFTER = {"ready": 11, "exited": 12}
LOST = "lost"


def rank(state: str) -> int:
    """Give the rank of an order's state; a terminal report ranks above all progress."""
    return _RANKS.get(state) or _AFTER.get(state) or (0 if state == "ordered" else _TERMINAL_RANK)


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
            item, state=report.kind, leased=leased, final=_whole(item, report), ended_at=now
        )
    if report.kind in _AFTER and item.final is None:
        # The life sign overtook the terminal report; it proves that the processes were started.
        return replace(item, state=report.kind, final=report, ended_at=now)
    if report.kind in _AFTER:
        exit_report = report if report.kind == "exited" else item.final
        return replace(item, state=report.kind, final=exit_report)
    return replace(item, state=report.kind, leased=leased)


def _whole(item: OrderStatus, report: Report) -> Report:
    """Give the report, or the same one as a failure.

    That is when nobody here knows what its version means, or it lacks what its kind promises.
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


def is_answered(item: OrderStatus) -> bool:
    """Say whether nothing more is owed for an order: it ended, or its node is gone."""
    return item.final is not None or item.state == LOST


def succeeded(item: OrderStatus) -> bool:
    """Say whether an order ended as its verb wishes."""
    if item.final is None or item.final.failure is not None:
        return False
    return item.final.kind in (TERMINAL[item.verb], *_AFTER)


def failure_in(orders: Iterable[OrderStatus], now: float) -> Failure | None:
    """Give the first failure among orders: a bad report, a lost node, or a passed deadline."""
    for item in orders:
        if item.final is not None and item.final.failure is not None:
            return item.final.failure
        if item.state == LOST:
            return Failure(
                reason="NodeLost",
                message=f"node {item.node} was lost while it had order {item.order}",
                values={"node": item.node},
                next_step="bring the node back or delete the object",
            )
        if item.final is None and now >= item.deadline:
            return Failure(
                reason="AgentUnresponsive",
                message=f"{item.service} on {item.node} did not end {item.order} in time",
                retryable=True,
                values={"node": item.node, "order": item.order, "attempt": item.attempt},
                next_step=f"look at the {item.service}'s log on {item.node}",
            )
    return None


def next_deadline(orders: Iterable[OrderStatus], now: float) -> float | None:
    """Give the earliest deadline to come among unanswered orders; a passed one was judged."""
    times = (item.deadline for item in orders if not is_answered(item) and item.deadline > now)
    return min(times, default=None)


CLEANING = frozenset({"release", "stop", "drop", "abort", "delete"})
"""Verbs that stay owed when a node is lost: if it returns, it must still clean up."""


def mark_lost(
    orders: Sequence[OrderStatus], now: float, *, lost: Container[str], known: Container[str]
) -> list[OrderStatus]:
    """Settle what nodes can no longer answer.

    The work of a lost node is over. What cleans up stays owed until the node returns, or until
    its Node object is gone and with it the hope.
    """
    return [
        replace(item, state=LOST, ended_at=now)
        if not is_answered(item)
        and (item.node not in known or (item.node in lost and item.verb not in CLEANING))
        else item
        for item in orders
    ]


def retry_attempt(orders: Sequence[OrderStatus], now: float) -> int | None:
    """Give the attempt of the next try of a cleaning order, or None while one is open or resting.

    Tries rest for 30 s times their number, up to 10 minutes.
    """
    if not orders:
        return 1
    last = max(orders, key=lambda item: item.attempt)
    if succeeded(last) or not is_answered(last):
        return None
    return last.attempt + 1 if now >= retry_at(orders) else None


def retry_at(orders: Sequence[OrderStatus]) -> float:
    """Give when the next try of a cleaning order is due, in seconds since the epoch."""
    last = max(orders, key=lambda item: item.attempt)
    return last.ended_at + min(30.0 * len(orders), 600.0)


def find(orders: Iterable[OrderStatus], verb: str, attempt: int | None = None) -> list[OrderStatus]:
    """Give the orders of a verb, of one attempt if it is given."""
    return [
        item
        for item in orders
        if item.verb == verb and (attempt is None or item.attempt == attempt)
    ]
