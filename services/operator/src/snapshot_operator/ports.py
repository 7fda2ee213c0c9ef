"""What the operator needs from the world."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Any, Literal, NamedTuple, Protocol

from snapshot_api.facts import Pod
from snapshot_api.kinds import AnyObject
from snapshot_api.meta import OrderStatus

Document = dict[str, Any]
"""An object of Kubernetes as its API takes it."""

Change = Literal["ADDED", "MODIFIED", "DELETED"]


class Event(NamedTuple):
    """One change of one object. Of a deleted one `value` is the last that was stored."""

    change: Change
    value: AnyObject


class Store(Protocol):
    """The object store: what a kube-apiserver can promise, and no more.

    Each write concerns one object, and is a compare-and-swap: it names the uid and the
    resourceVersion that were read, and raises Conflict when the object has changed since, NotFound
    when it is gone. Status and the rest are written apart. There is no order between objects and
    no promise that no other writer was active. StoreBusy and NoSpace: nothing was written.
    """

    async def list(self, kind: str) -> list[AnyObject]:
        """Return all objects of a kind as they are stored now."""

    async def read(self, kind: str, namespace: str | None, name: str) -> AnyObject | None:
        """Return an object as it is stored now."""

    async def find(self, uid: str) -> AnyObject | None:
        """Return the object with a uid as it is stored now."""

    async def spec_of(self, pod: Pod) -> dict[str, Any] | None:
        """Return the whole spec of a pod as it is stored now; None if the pod is gone.

        `read` returns less of it in a cluster, because decisions need less.
        """

    async def read_document(self, named: Document) -> Document | None:
        """Return the whole object of the kind, namespace and name of a document, as it is stored.

        None if there is none. `read` returns less of it in a cluster.
        """

    async def create_document(self, document: Document) -> AnyObject | None:
        """Store a new object, and return it as it is kept in memory; None if its kind is not kept.

        AlreadyExists when the name is taken.
        """

    async def create(self, value: AnyObject) -> AnyObject:
        """Store a new object and return it as stored. AlreadyExists when the name is taken."""

    async def update_status(self, value: AnyObject) -> AnyObject:
        """Replace the status; spec and metadata are kept."""

    async def update_spec(self, value: AnyObject) -> AnyObject:
        """Replace the spec, and raise the generation; status and metadata are kept."""

    async def annotate(self, value: AnyObject, key: str, text: str) -> AnyObject:
        """Set one annotation."""

    async def label(self, value: AnyObject, key: str, text: str | None) -> AnyObject:
        """Set one label, or remove it without a text."""

    async def add_finalizer(self, value: AnyObject, finalizer: str) -> AnyObject:
        """Put a finalizer on. Conflict, too, when the object is being deleted."""

    async def remove_finalizer(self, value: AnyObject, finalizer: str) -> AnyObject | None:
        """Take a finalizer off. None when the object is gone with it."""

    async def delete(self, value: AnyObject) -> AnyObject | None:
        """Mark the object with this uid for deletion. None when it is gone.

        Only the uid is compared: whatever else has changed, this incarnation is to end.
        """

    def subscribe(self, listener: Callable[[Event], None]) -> None:
        """Report every change from now on, of an object in order, and late at will.

        Several changes of an object may be reported as one. Those of this process are among them.
        """


class OrderBus(Protocol):
    """Where orders go."""

    async def publish(self, order: OrderStatus) -> None:
        """Publish one order; a higher attempt replaces a lower, an equal one is left alone."""

    async def ensure(self, order: OrderStatus) -> None:
        """Publish one order unless the stream has this attempt of it, or a later one."""

    async def repeat(self, order: OrderStatus) -> None:
        """Have one order delivered again, if the stream has this attempt of it."""

    async def replace(self, order: OrderStatus) -> None:
        """Publish one order in place of whatever stands on its subject. BusUnavailable."""

    async def withdraw(self, order: OrderStatus) -> None:
        """Delete the message of an answered order; absent is success."""

    async def published(self) -> dict[str, str]:
        """Return the subjects of all orders that the stream holds now, by order id."""

    async def fill(self) -> float:
        """Return the share of the stream's room that is taken, from 0 to 1."""
        ...

    async def remove(self, subject: str) -> None:
        """Delete the message on a subject; absent is success."""


class Leadership(Protocol):
    """What makes one operator of several the active one."""

    def held(self) -> AbstractAsyncContextManager[asyncio.Event]:
        """Wait until this operator is the active one, and stay it for the length of the block.

        The event is set when that cannot be kept any longer; the block ends its work then.
        """
        ...
