"""Captures and restores as bars on one axis of time, from the orders that their objects remember.

A run is one capture or one restore: the current attempt of a content or of a SnapshotRestore. All
of its times are seconds since its first order, so that runs of different days can be compared.
A content of an imported artifact has no run: it was captured elsewhere, and is only verified here.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any

from snapshot_api import figures, views
from snapshot_api.kinds import AnyObject
from snapshot_api.meta import OrderStatus
from snapshot_api.v1alpha1.content import SnapshotContent
from snapshot_api.v1alpha1.restore import SnapshotRestore

PHASES = {
    "prepare": "prepare",
    "dump": "write",
    "save": "write",
    "seal": "seal",
    "load": "load",
    "place": "load",
    "commit": "commit",
    "restore": "resume",
}
"""The phase that an order belongs to, by its verb. What cleans up or lets go belongs to none."""


def label(order: OrderStatus) -> str:
    """Return the name of an order for people: verb, part, and its attempt after the first."""
    again = f" #{order.attempt}" if order.attempt > 1 else ""
    return f"{order.verb} {views.part_of(order.order)}".rstrip() + again


def order_state(order: OrderStatus, kind: str) -> views.State:
    """Return how an order is once a report of this kind has come; `ordered` before the first."""
    if kind in views.BAD_ORDERS:
        return "bad"
    if views.is_answered(order):
        return "ok"
    # As `snapshotctl orders` has it: nothing is under way before the order is accepted.
    return "waiting" if kind == "ordered" else "busy"


def figure(value: AnyObject) -> str:
    """Return what a capture or a restore has cost, as far as it is known; empty for the rest."""
    match value:
        case SnapshotContent(status=status):
            return figures.capture_text(value) or figures.pause_text(status)
        case SnapshotRestore(status=status):
            return figures.restore_text(status)
        case _:
            return ""


def started_at(value: AnyObject) -> datetime | None:
    """Return when the run of an object began; None where it has none, or none has begun."""
    match value:
        case SnapshotContent(spec=spec, status=status) if spec.source.artifact is None:
            return status.started_at
        case SnapshotRestore(status=status):
            return status.started_at
        case _:
            return None


def run_of(value: AnyObject) -> dict[str, Any] | None:
    """Return the run of an object; None where it has none, or none has begun.

    `at` is seconds since the epoch. The `length` is None until the run is `over`, and later too
    where neither the object nor an order has an end.
    """
    first = started_at(value)
    if first is None:
        return None
    match value:
        case SnapshotContent(status=status, spec=spec):
            kind, name, node = "capture", spec.snapshot_ref.name, spec.source.node_name or ""
            known_s = figures.capture_times(status).captured_s
        case SnapshotRestore(status=status, spec=spec):
            kind, name, node = "restore", spec.pod_ref.name, status.node_name
            known_s = figures.restored_seconds(status)
        case _:
            return None
    began = first.timestamp()
    steps = [
        _step(order, began)
        for order in status.orders
        if order.verb in PHASES and order.attempt == status.attempt
    ]
    ends = [step["start"] + step["length"] for step in steps if step["length"] is not None]
    lasted = known_s or max(ends, default=None)
    state = views.state(value)
    is_over = state in ("ok", "bad") or bool(value.metadata.deletion_timestamp)
    return {
        "kind": kind,
        "name": name,
        "node": node,
        "phase": views.phase(value),
        "state": state,
        "at": began,
        "over": is_over,
        "length": round(lasted, 6) if is_over and lasted is not None else None,
        "figure": figure(value),
        "phases": _phases(steps, lasted),
        "steps": sorted(steps, key=lambda step: (step["start"], step["label"])),
    }


def _step(order: OrderStatus, began: float) -> dict[str, Any]:
    start = max(order.ordered_at.timestamp() - began, 0.0)
    length = None
    if views.is_answered(order):
        ended = order.ended_at.timestamp() - began if order.ended_at is not None else start
        length = round(max(ended - start, 0.0), 6)
    return {
        "label": label(order),
        "phase": PHASES[order.verb],
        "where": f"{order.service} {order.node}",
        "start": round(start, 6),
        "length": length,
        "state": order_state(order, order.state),
    }


def _phases(steps: Sequence[dict[str, Any]], lasted: float | None) -> list[dict[str, Any]]:
    """Return one bar a phase, from its first order to the last end; one bar where none is known."""
    found: dict[str, list[dict[str, Any]]] = {}
    for step in steps:
        found.setdefault(step["phase"], []).append(step)
    if not found and lasted:
        return [{"phase": "all", "start": 0.0, "length": lasted, "state": "ok"}]
    bars = []
    for phase, group in found.items():
        start = min(step["start"] for step in group)
        is_over = all(step["length"] is not None for step in group)
        end = max(step["start"] + (step["length"] or 0.0) for step in group)
        states = {step["state"] for step in group}
        bars.append(
            {
                "phase": phase,
                "start": start,
                "length": round(end - start, 6) if is_over else None,
                "state": "bad" if "bad" in states else "ok" if states == {"ok"} else "busy",
            }
        )
    return sorted(bars, key=lambda bar: bar["start"])
