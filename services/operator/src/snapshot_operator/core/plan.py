"""What a decision is: writes to the store, and when to decide again. One interpreter does them.

A decision is a pure function of a view. What gathers the view reads through a `Reader`, which
records every read: a change of what was read wakes the object, and an absence that was read is
confirmed by a live read before a plan that cannot be taken back is carried out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import msgspec
from msgspec.structs import replace

from snapshot_api.facts import Job, Pod
from snapshot_api.kinds import AnyObject
from snapshot_api.meta import OrderStatus, is_true
from snapshot_api.v1alpha1.checkpoint import DynamoCheckpoint
from snapshot_api.v1alpha1.content import SnapshotContent
from snapshot_api.v1alpha1.restore import SnapshotRestore
from snapshot_api.v1alpha1.snapshot import Snapshot
from snapshot_api.views import Ordered, is_answered, orders_of, with_columns
from snapshot_operator.core import fold
from snapshot_shared.errors import Failure
from snapshot_shared.transitions import Capture, Restore


class Reader(Protocol):
    """The objects of the store as this operator sees them: from memory, possibly late."""

    def get(self, kind: str, namespace: str | None, name: str, uid: str = "") -> AnyObject | None:
        """Return an object, if it has the uid when one is given; its changes wake the reader."""
        ...

    def by_uid(self, uid: str) -> AnyObject | None:
        """Return the object with a uid."""
        ...

    def by_index(self, index: str, value: str) -> list[AnyObject]:
        """Return the objects under a value of an index; changes of that set wake the reader."""
        ...

    def peek_index(self, index: str, value: str) -> list[AnyObject]:
        """Return the same, but wake nothing: for what is preferred and not waited for."""
        ...

    def is_first(self, index: str, value: str, me: AnyObject) -> bool:
        """Whether an object is the first under a value of a queue; who becomes it is woken."""
        ...

    @property
    def is_full(self) -> bool:
        """Whether the stream of orders has room only for what cleans up."""
        ...


class Create(msgspec.Struct, frozen=True):
    """Create an object; that it exists already is success, for names are derived.

    `refused` returns the plan to follow instead where the store does not accept this object, such
    as a Job with a template that Kubernetes finds wrong. What the plan has written before, stays.
    `waits` returns what says so where the store may accept it later, such as once a quota has room.
    """

    value: AnyObject
    refused: Callable[[Failure], Plan] | None = None
    waits: Callable[[Failure], Plan] | None = None


class SetStatus(msgspec.Struct, frozen=True):
    """Replace the status of `old` by that of `new`, if `old` is still what is stored.

    Orders that are new in `new` are published once this is stored.
    """

    old: AnyObject
    new: AnyObject


class Delete(msgspec.Struct, frozen=True):
    """Mark an object for deletion."""

    value: AnyObject


class Adopt(msgspec.Struct, frozen=True):
    """Put the operator's finalizer on: from here on something may be owed for this object."""

    value: AnyObject


class Finalize(msgspec.Struct, frozen=True):
    """Take the operator's finalizer off: nothing is owed for this object any more."""

    value: AnyObject


class Label(msgspec.Struct, frozen=True):
    """Set a label of an object, or remove it without a text."""

    value: AnyObject
    key: str
    text: str | None


class KeepSpec(msgspec.Struct, frozen=True):
    """Annotate a Snapshot with the spec of its pod, as the store has it now."""

    value: Snapshot
    pod: Pod


Write = Create | SetStatus | Delete | Adopt | Finalize | Label | KeepSpec


class Plan(NamedTuple):
    """The writes in their order, and the time (seconds since the epoch) of the next decision.

    `relies_on` are other objects that have to be stored still as they were read: what is known of
    them may be late.
    """

    writes: tuple[Write, ...] = ()
    wake_at: float | None = None
    relies_on: tuple[AnyObject, ...] = ()


NOTHING = Plan()
FINALIZER = "nvidia.com/snapback"


def status_plan(
    old: AnyObject, new: AnyObject, *before: Write, wake_at: float | None = None
) -> Plan:
    """Plan `before` and then the status with its columns, if it differs."""
    new = with_columns(new)
    changed = (SetStatus(old, new),) if old != new else ()
    return Plan((*before, *changed), wake_at)


def owing_plan(old: Ordered, status: Any, now: float, *, wake_at: float | None = None) -> Plan:
    """Plan a status with its obligations, and wake when an order is late or to be given again."""
    orders = status.orders
    obligations = sorted({item.verb for item in orders if not is_answered(item)})
    new: Any = replace(old, status=replace(status, obligations=obligations))
    at = fold.earliest(wake_at, fold.next_deadline(orders, now), fold.renewal_at(orders, now))
    return status_plan(old, new, wake_at=at)


def rebased(plan: Plan, stored: AnyObject, folded: AnyObject) -> Plan:
    """Return the plan of `folded` as one of `stored`, whose status differs by what was folded in.

    It has one write of the status, whether the decision had one or not. What concerns the rest of
    the object is left to the decision that this write wakes: it has a newer version then.
    """
    if folded is stored:
        return plan
    shown = SetStatus(stored, with_columns(folded))
    if any(isinstance(write, Adopt | Finalize) for write in plan.writes):
        return Plan((shown,))
    writes = tuple(
        SetStatus(stored, write.new)
        if isinstance(write, SetStatus) and write.old is folded
        else write
        for write in plan.writes
    )
    if not any(isinstance(write, SetStatus) and write.old is stored for write in writes):
        writes = (shown, *writes)
    return plan._replace(writes=writes)


def is_adopted(value: AnyObject) -> bool:
    """Whether the operator's finalizer is on an object."""
    return FINALIZER in value.metadata.finalizers


def new_orders(old: AnyObject | None, new: AnyObject) -> list[OrderStatus]:
    """Return the orders that `new` has and `old` has not."""
    known = {(item.order, item.attempt) for item in orders_of(old)} if old else set()
    return [item for item in orders_of(new) if (item.order, item.attempt) not in known]


def is_final(plan: Plan) -> bool:
    """Whether a plan cannot be taken back, or is costly to.

    It deletes, forgets, fails or gives something up, starts a worker or takes an artifact. If such
    a plan rests on the absence of an object, that is confirmed first: what is read from memory may
    be late.
    """
    return any(
        isinstance(write, Delete | Finalize)
        or (isinstance(write, Create) and _is_costly(write.value))
        or (isinstance(write, SetStatus) and _gives_up(write.old, write.new))
        for write in plan.writes
    )


def _is_costly(made: AnyObject) -> bool:
    """Whether an object starts a worker, or takes an artifact that another may have yet."""
    is_import = isinstance(made, SnapshotContent) and made.spec.source.artifact is not None
    return isinstance(made, Job) or is_import


def _gives_up(old: AnyObject, new: AnyObject) -> bool:
    if (_has_failed(new) and not _has_failed(old)) or _takes_back(old, new):
        return True
    if any(item.verb == "delete" for item in new_orders(old, new)):
        return True
    return _lost(new) > _lost(old) or _fewer_readers(old, new)


def _has_failed(value: AnyObject) -> bool:
    status = value.status
    match value:
        case DynamoCheckpoint() | Pod():
            return value.status.phase == "Failed"
        case SnapshotContent():
            return value.status.capture in (Capture.ABORTING, Capture.FAILED)
        case SnapshotRestore():
            return value.status.state in (Restore.DROPPING, Restore.FAILED)
        case _:
            return is_true(status.conditions, "Failed")


def _takes_back(old: AnyObject, new: AnyObject) -> bool:
    """Whether a checkpoint is not Ready any more, or gives its own capture up."""
    if not isinstance(old, DynamoCheckpoint) or not isinstance(new, DynamoCheckpoint):
        return False
    was_ready = old.status.phase == "Ready" and new.status.phase != "Ready"
    return was_ready or bool(old.status.job_name and not new.status.job_name)


def _lost(value: AnyObject) -> int:
    return sum(item.state == fold.LOST for item in orders_of(value))


def _fewer_readers(old: AnyObject, new: AnyObject) -> bool:
    if not isinstance(old, SnapshotContent) or not isinstance(new, SnapshotContent):
        return False
    return not set(old.status.readers) <= set(new.status.readers)
