"""The numbers of a capture and a restore, computed in one place for all that show them.

How long a worker was paused, what was captured in which time, and how long a restore took. A time
of 0 is one that is not known.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import NamedTuple

from snapshot_api.meta import OrderStatus
from snapshot_api.v1alpha1.content import SnapshotContent, SnapshotContentStatus
from snapshot_api.v1alpha1.restore import SnapshotRestoreStatus
from snapshot_shared.transitions import Restore
from snapshot_shared.units import rate, size, span_time


class CaptureTimes(NamedTuple):
    """Seconds for which the worker was paused, and those from the first order to the seal."""

    paused_s: float = 0.0
    captured_s: float = 0.0


def capture_times(status: SnapshotContentStatus) -> CaptureTimes:
    """Return the times of the current attempt, also once its orders are forgotten."""
    known = CaptureTimes(status.paused_seconds, status.captured_seconds)
    if status.committed is None:
        known = CaptureTimes()
    release = _ended(status.orders, "release", status.attempt)
    seal = _ended(status.orders, "seal", status.attempt)
    paused_s, captured_s = known
    if release is not None and release.final is not None and release.final.paused_s:
        paused_s = release.final.paused_s
    if status.committed is not None and seal is not None:
        captured_s = _until_end(status.started_at, seal)
    return CaptureTimes(round(paused_s, 6), round(captured_s, 6))


def restored_seconds(status: SnapshotRestoreStatus) -> float:
    """Return the seconds from the first order to the worker that serves again."""
    if status.state is not Restore.RESTORED:
        return 0.0
    last = _ended(status.orders, "restore", status.attempt)
    found = _until_end(status.started_at, last) if last is not None else 0.0
    return round(found or status.restored_seconds, 6)


def capture_text(content: SnapshotContent) -> str:
    """Return what was captured, how fast, and the pause; empty while nothing is."""
    committed = content.status.committed
    if committed is None or content.spec.source.artifact is not None:
        return ""
    times = capture_times(content.status)
    text = f"captured {size(committed.bytes)}"
    if times.captured_s:
        speed = rate(committed.bytes, times.captured_s)
        text += f" in {span_time(times.captured_s)} ({speed})"
    return f"{text}; {pause_text(content.status)}" if times.paused_s else text


def pause_text(status: SnapshotContentStatus) -> str:
    """Return how long the worker was paused; empty where that is not known."""
    paused_s = capture_times(status).paused_s
    return f"worker paused for {span_time(paused_s)}" if paused_s else ""


def restore_text(status: SnapshotRestoreStatus) -> str:
    """Return how long a restore took; empty before its end."""
    lasted_s = restored_seconds(status)
    return f"restored in {span_time(lasted_s)}" if lasted_s else ""


def speed(done: int, total: int, seconds: float) -> str:
    """Return the rate of what moves and how long the rest will take; empty before it moves.

    `done` and `total` are bytes; a total of 0 is not known. Less than a second is not worth a word.
    """
    if done <= 0 or seconds <= 0:
        return ""
    left = (total - done) * seconds / done
    if left < 1:
        return rate(done, seconds)
    shown = f"{left:.0f} s" if left < 100 else span_time(left)
    return f"{rate(done, seconds)}, {shown} left"


def comparison(cold_s: float, restored_s: float) -> str:
    """Return how a restore compares with a cold start, both in seconds to the first answer."""
    if restored_s <= 0 or cold_s <= 0:
        return "not measured"
    times = cold_s / restored_s
    if times >= 1.1:
        return f"{times:.1f} times as fast as the cold start"
    if times > 1 / 1.1:
        return "as fast as the cold start"
    return f"slower than the cold start: it took {1 / times:.1f} times as long"


def _ended(orders: Sequence[OrderStatus], verb: str, attempt: int) -> OrderStatus | None:
    """Return the order of an attempt that was carried out, or None."""
    for each in orders:
        if (each.verb, each.attempt) == (verb, attempt) and each.final is not None:
            return None if each.final.failure is not None else each
    return None


def _until_end(started_at: datetime | None, order: OrderStatus) -> float:
    if started_at is None or order.ended_at is None:
        return 0.0
    return max((order.ended_at - started_at).total_seconds(), 0.0)
