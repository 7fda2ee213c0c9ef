"""What all objects have: metadata, conditions and the orders that serve them.

Times are RFC 3339.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from snapshot_api.schema.marks import list_map
from snapshot_shared.model import Model
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


class OwnerReference(Model, omit_defaults=False):
    """The object that this one belongs to; it is deleted with it."""

    api_version: str
    kind: str
    name: str
    uid: UidStr
    controller: bool = True


class ObjectMeta(Model):
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


class Condition(Model):
    """A Kubernetes condition."""

    type: str
    """What this is about."""
    status: Literal["True", "False", "Unknown"]
    """Whether it holds."""
    reason: str
    """Why, in CamelCase; stable."""
    message: str = ""
    """What it means, for people, and what to do."""
    observed_generation: int = 0
    """The generation of the object that this is about."""
    last_transition_time: str = ""
    """When the status changed last."""


Conditions = Annotated[list[Condition], list_map("type")]


class OrderStatus(Model):
    """One order as the operator remembers it on the object that it serves."""

    order: str
    """The id: `<verb>-<owner uid>[-<part>]`."""
    verb: str
    """The verb of the order."""
    attempt: int
    """The attempt that it belongs to."""
    node: str
    """The node that has to do it."""
    service: Literal["agent", "gms"]
    """The service that has to do it."""
    payload: msgspec.Raw
    """The order as it is published."""
    ordered_at: datetime
    """When the order was decided."""
    deadline: datetime
    """When the order fails."""
    state: str = "ordered"
    """`ordered`, the kind of the last report, or `lost` with its node."""
    final: Report | None = None
    """The report that ended it."""
    leased: bool = False
    """Whether the save holds its lease, so that the worker may go on."""
    ended_at: datetime | None = None
    """When it was answered."""
    tries: int = 1
    """How often an order that cleans up was given, this time included."""


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
