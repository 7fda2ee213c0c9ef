"""What a decision is: writes to the store, and when to look again. One interpreter does them."""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from snapshot_shared.objects import AnyObject, OrderStatus


class Create(msgspec.Struct, frozen=True):
    """Create an object; that it exists already is success, for names are derived."""

    value: AnyObject


class SetStatus(msgspec.Struct, frozen=True):
    """Replace the status of `old` by that of `new`, if `old` is still what is stored.

    Orders that are new in `new` are published once this is stored.
    """

    old: AnyObject
    new: AnyObject


class Delete(msgspec.Struct, frozen=True):
    """Mark an object for deletion."""

    value: AnyObject


class Finalize(msgspec.Struct, frozen=True):
    """Take the operator's finalizer off: nothing is owed for this object any more."""

    value: AnyObject


Write = Create | SetStatus | Delete | Finalize


class Plan(NamedTuple):
    """The writes in their order, and the time (seconds since the epoch) of the next look."""

    writes: tuple[Write, ...] = ()
    wake_at: float | None = None


NOTHING = Plan()
FINALIZER = "nvidia.com/snapback"


def status_plan(
    old: AnyObject, new: AnyObject, *before: Write, wake_at: float | None = None
) -> Plan:
    """Plan `before` and then the status, if it differs."""
    changed = (SetStatus(old, new),) if old != new else ()
    return Plan((*before, *changed), wake_at)


def new_orders(old: AnyObject | None, new: AnyObject) -> list[OrderStatus]:
    """Give the orders that `new` has and `old` has not."""
    known = {(item.order, item.attempt) for item in orders_of(old)} if old else set()
    return [item for item in orders_of(new) if (item.order, item.attempt) not in known]


def orders_of(value: AnyObject | None) -> list[OrderStatus]:
    """Give the orders on an object; most kinds have none."""
    return getattr(value.status, "orders", []) if value is not None else []
