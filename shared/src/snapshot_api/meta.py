"""What all objects have: metadata, conditions and the orders that serve them.

Times are RFC 3339.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from snapshot_shared.orders import Label, Name, Report, UidStr

QUANTITY_PATTERN = r"^[0-9]{1,15}(\.[0-9]{1,6})?(m|[kKMGTP]i?)?\Z"
VARIABLE_PATTERN = r"^[A-Za-z_][A-Za-z0-9_]{0,127}\Z"

TRACEPARENT = "nvidia.com/traceparent"
"""Annotation that carries the trace in which an object was applied."""

Quantity = Annotated[str, Meta(pattern=QUANTITY_PATTERN, max_length=24)]

Amount = Annotated[int, Meta(ge=0, le=2**50)]

EnvName = Annotated[str, Meta(pattern=VARIABLE_PATTERN)]

Argument = Annotated[str, Meta(max_length=32768, pattern=r"^[^\x00]*\Z")]

LabelKey = Annotated[str, Meta(max_length=316, pattern=r"^[A-Za-z0-9./_-]+\Z")]

LabelValue = Annotated[str, Meta(max_length=63)]

AnnotationValue = Annotated[str, Meta(max_length=16384)]


class OwnerReference(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """The object that this one belongs to; it is deleted with it."""

    api_version: str
    kind: str
    name: str
    uid: UidStr
    controller: bool = True


class ObjectMeta(msgspec.Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True):
    """Identity. Everything from `uid` on is set by the store and ignored in manifests."""

    name: Name
    namespace: Label | None = None
    labels: dict[LabelKey, LabelValue] = {}
    annotations: dict[LabelKey, AnnotationValue] = {}
    uid: str = ""
    resource_version: str = ""
    generation: int = 0
    creation_timestamp: str = ""
    deletion_timestamp: str | None = None
    finalizers: list[str] = []
    owner_references: list[OwnerReference] = []


class Condition(msgspec.Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True):
    """A Kubernetes condition."""

    type: str
    status: Literal["True", "False", "Unknown"]
    reason: str
    message: str = ""
    observed_generation: int = 0
    last_transition_time: str = ""


class OrderStatus(msgspec.Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True):
    """One order as the operator remembers it on the object that it serves.

    `payload` is the order as it is published; `orders.order_in` decodes it. `state` is `ordered`,
    the kind of the last report folded, or `lost` when its node is gone. `final` is the terminal
    report. `tries` counts the attempts at a cleaning order, this one included.
    """

    order: str
    verb: str
    attempt: int
    node: str
    service: Literal["agent", "gms"]
    payload: msgspec.Raw
    ordered_at: datetime
    deadline: datetime
    state: str = "ordered"
    final: Report | None = None
    leased: bool = False
    ended_at: datetime | None = None
    tries: int = 1


def time_of(seconds: float) -> datetime:
    """Return the time of an object's field for seconds since the epoch."""
    return datetime.fromtimestamp(seconds, UTC)


def condition(conditions: list[Condition], type_: str) -> Condition | None:
    """Find a condition by its type."""
    return next((found for found in conditions if found.type == type_), None)


def is_true(conditions: list[Condition], type_: str) -> bool:
    """Whether a condition is there and True."""
    found = condition(conditions, type_)
    return found is not None and found.status == "True"


def set_condition(conditions: list[Condition], new: Condition, now: str) -> list[Condition]:
    """Replace one condition; its transition time moves only when its status changes."""
    old = condition(conditions, new.type)
    since = old.last_transition_time if old and old.status == new.status else now
    changed = msgspec.structs.replace(new, last_transition_time=since)
    if old is None:
        return [*conditions, changed]
    return [changed if found.type == new.type else found for found in conditions]
