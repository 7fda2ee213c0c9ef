"""Step names: one list for spans, journals, reports, progress and the fault switch.

A step is one named stage of carrying out an order. `table(verb, driver)` is the order in which
they run: a process driver may have steps of its own.
"""

from __future__ import annotations

from typing import NamedTuple

from snapshot_shared.errors import InvalidInput
from snapshot_shared.orders import Driver
from snapshot_shared.subjects import order_template

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
    "place": ("check", "restore-process"),
    "restore": ("check", "fill-state", "signal", "await-restored"),
    "abort": ("tombstone", "compensate"),
    "delete": ("tombstone", "remove"),
    "verify": ("read-all",),
}
"""The steps of each verb, for every driver that has no others."""

_BY_CRIU: tuple[Driver, ...] = ("criu", "criu+cuda")

OWN_STEPS: dict[tuple[str, Driver], tuple[str, ...]] = {
    ("dump", "respawn"): ("freeze", "copy-state", "replace", "stage"),
    ("restore", "respawn"): ("check", "replace", "signal", "await-restored"),
    **{("dump", driver): ("dump-process", "stage") for driver in _BY_CRIU},
    **{
        ("restore", driver): ("check", "restore-process", "signal", "await-restored")
        for driver in _BY_CRIU
    },
}
"""The steps of a verb that is carried out in another way by one driver."""

GMS_VERBS: tuple[str, ...] = ("save", "load", "commit", "drop", "abort")
AGENT_VERBS: tuple[str, ...] = tuple(verb for verb in STEPS if verb not in GMS_VERBS[:-1])
VERBS_OF: dict[str, tuple[str, ...]] = {"agent": AGENT_VERBS, "gms": GMS_VERBS}
"""The verbs that each service of a node carries out; both have their part in an abort."""

OPERATOR_STEPS: tuple[str, ...] = ("apply", "capture", "restoration")
"""Spans of the operator and of snapshotctl around the orders."""

GMS_STEPS: tuple[str, ...] = ("attach", "allocate", "export", "commit-layout", "transfer")
"""Spans of sessions that carry a traceparent, and of the processes that move bytes."""

CRIU_STEPS: tuple[str, ...] = (
    *("check-images", "check-pages"),
    *("write-images", "pack-files", "thaw-process"),
    *("read-images", "unpack-files", "restore-memory", "await-pages", "thaw-restored"),
    *("checkpoint-devices", "restore-devices"),
)
"""Spans of what happens within `dump-process` and `restore-process`."""

GMS_CALLS: tuple[str, ...] = tuple(
    f"gms-{call}"
    for call in (
        *("fence", "unfence", "drop-layout", "publish", "forget"),
        *("status", "watch", "save", "load"),
    )
)
"""Spans of calls over gRPC that carry a traceparent."""


def table(verb: str, driver: Driver | None = None) -> tuple[str, ...]:
    """Return the steps of a verb in their order, as this driver carries it out."""
    return STEPS[verb] if driver is None else OWN_STEPS.get((verb, driver), STEPS[verb])


def names(verb: str) -> tuple[str, ...]:
    """Return every step that a verb has with any driver."""
    own = (step for (of, _), steps in OWN_STEPS.items() if of == verb for step in steps)
    return tuple(dict.fromkeys((*STEPS[verb], *own)))


def order_span(verb: str) -> str:
    """Name the operator's span of one order: from the decision to the folded answer."""
    return f"order {verb}"


def message_span(operation: str, service: str, verb: str) -> str:
    """Name the span of sending (`publish`) or carrying out (`process`) orders of a verb."""
    return f"{operation} {order_template(service, verb)}"


class Place(NamedTuple):
    """One step of one verb, in the service that carries it out."""

    service: str
    verb: str
    step: str


def find(step: str, *, verb: str = "", service: str = "") -> list[Place]:
    """Find where a step is carried out; empty words leave the choice open.

    Without a service an abort is the agent's. InvalidInput lists the steps that there are.
    """
    if service and service not in VERBS_OF:
        raise InvalidInput(f"service {service!r} is not one of {', '.join(VERBS_OF)}")
    if verb and verb not in STEPS:
        raise InvalidInput(f"verb {verb!r} is not one of {', '.join(STEPS)}")
    verbs = [known for known in (VERBS_OF[service] if service else STEPS) if verb in ("", known)]
    if not verbs:
        raise InvalidInput(
            f"{verb} is not carried out by {service}, which does {', '.join(VERBS_OF[service])}"
        )
    found = [
        Place(service or ("agent" if known in AGENT_VERBS else "gms"), known, step)
        for known in verbs
        if step in names(known)
    ]
    if not found:
        listed = "; ".join(f"{known}: {', '.join(names(known))}" for known in verbs)
        where = f"the {service} has" if service else "there is"
        raise InvalidInput(f"{where} no step {step!r:.80}; the steps are {listed}")
    return found


def all_names() -> frozenset[str]:
    """Return every name that a span of the product may have: steps, orders and the rest."""
    found = {*OPERATOR_STEPS, *GMS_STEPS, *GMS_CALLS, *CRIU_STEPS}
    found.update(order_span(verb) for verb in STEPS)
    for service, verbs in VERBS_OF.items():
        for operation in ("publish", "process"):
            found.update(message_span(operation, service, verb) for verb in verbs)
    for verb in STEPS:
        found.update(names(verb))
    return frozenset(found)
