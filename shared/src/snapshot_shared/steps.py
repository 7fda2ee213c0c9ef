"""Step names: one list for spans, journals, reports, progress and the fault switch.

A step is one named stage of carrying out an order. `STEPS[verb]` is the order in which they run.
"""

from __future__ import annotations

STEPS: dict[str, tuple[str, ...]] = {
    "run": ("resolve", "spawn"),
    "stop": ("terminate",),
    "prepare": ("gate", "guard", "quiesce", "fence", "facts"),
    "dump": ("freeze", "copy-state", "thaw", "stage"),
    "save": ("lease", "write"),
    "seal": ("check-parts", "write-root"),
    "release": ("signal",),
    "load": ("check", "read"),
    "commit": ("publish",),
    "drop": ("forget",),
    "restore": ("check", "fill-state", "signal", "await-restored"),
    "abort": ("tombstone", "compensate"),
    "delete": ("tombstone", "remove"),
    "verify": ("read-all",),
}

OPERATOR_STEPS: tuple[str, ...] = ("apply", "capture", "restoration")
"""Spans of the operator and of snapshotctl around the orders."""

GMS_STEPS: tuple[str, ...] = ("attach", "allocate", "export", "commit-layout", "transfer")
"""Spans of sessions that carry a traceparent, and of the processes that move bytes."""


def order_span(verb: str) -> str:
    """Name the operator's span of one order: from the decision to the folded answer."""
    return f"order {verb}"


def all_names() -> frozenset[str]:
    """Give every name that a span of the product may have: verbs, steps and the rest."""
    names = set(STEPS) | set(OPERATOR_STEPS) | set(GMS_STEPS)
    names.update(order_span(verb) for verb in STEPS)
    for steps in STEPS.values():
        names.update(steps)
    return frozenset(names)
