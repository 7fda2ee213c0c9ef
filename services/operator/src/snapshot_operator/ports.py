"""What the operator needs from the world."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, Protocol

from snapshot_shared.objects import AnyObject, OrderStatus
from snapshot_shared.orders import Presence

Change = Literal["ADDED", "MODIFIED", "DELETED"]
Listener = Callable[[Change, AnyObject], None]


class Cluster(Protocol):
    """The object store, with the rules of the Kubernetes API.

    Objects have uid, resourceVersion and generation; a write with a stale resourceVersion is
    Conflict. Status and the rest are written apart: a status write keeps spec and metadata.
    """

    async def get(self, kind: str, namespace: str | None, name: str) -> AnyObject | None:
        """Read one object."""

    async def by_uid(self, uid: str) -> AnyObject | None:
        """Read the object with this uid."""

    async def list(
        self, kind: str, namespace: str | None = None, *, after: str = "", limit: int = 100_000
    ) -> list[AnyObject]:
        """Read the objects of a kind in the order of their keys, those after a key only."""

    async def create(self, value: AnyObject) -> AnyObject:
        """Store a new object and give it as stored. AlreadyExists when the name is taken."""

    async def update_status(self, value: AnyObject, *, as_of: int | None = None) -> AnyObject:
        """Replace the status. Conflict when stale, NotFound when gone.

        With `as_of` also Conflict when another operator wrote anything since that version: what
        was decided may rest on more objects than the one that is written.
        """

    async def update_spec(self, value: AnyObject) -> AnyObject:
        """Replace the spec; its generation rises. Conflict when stale, NotFound when gone."""

    async def delete(self, value: AnyObject) -> bool:
        """Mark for deletion; without finalizers the object is gone at once (True)."""

    async def remove_finalizer(self, value: AnyObject, finalizer: str) -> None:
        """Take one finalizer off; a deleted object without finalizers is gone."""

    def as_of(self) -> int:
        """Give the version of the store now: what is read next is at least as new."""
        ...

    def others_since(self, as_of: int) -> bool:
        """Say whether another operator has written since that version."""
        ...

    def subscribe(self, listener: Listener) -> None:
        """Have every change told, after it is durable, in the order of the writes."""


class OrderBus(Protocol):
    """Where orders go."""

    async def publish(self, order: OrderStatus) -> None:
        """Publish one order; a higher attempt replaces a lower, an equal one is left alone."""

    async def replace(self, order: OrderStatus) -> None:
        """Publish one order in place of whatever stands on its subject. BusUnavailable."""

    async def withdraw(self, order: OrderStatus) -> None:
        """Delete the message of an answered order; absent is success."""

    async def published(self) -> dict[str, str]:
        """List the subjects of all orders that the stream holds now, by order id."""

    async def fill(self) -> float:
        """Give the share of the stream's room that is taken, from 0 to 1."""
        ...

    async def remove(self, subject: str) -> None:
        """Delete the message on a subject; absent is success."""


class Nodes(Protocol):
    """Who is there."""

    async def present(self) -> dict[str, Presence]:
        """Read the presence of every node that has one."""
