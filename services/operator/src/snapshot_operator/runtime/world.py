"""What differs between standalone mode and a cluster, besides the store and who is active."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from snapshot_api.facts import Node
from snapshot_api.kinds import AnyObject
from snapshot_operator.core.controllers import Controller
from snapshot_operator.ports import Document
from snapshot_operator.runtime.cluster import Cluster
from snapshot_shared.errors import Failure

Changed = Callable[[AnyObject, AnyObject], None]
Warned = Callable[[AnyObject, Failure], None]

Shape = Callable[[Any, Document, Iterable[Node]], Sequence[Document]]
"""Returns the documents to create for an object that a plan creates, in their order.

It gets the object, the document of its owner, and the nodes. The object itself is the last one.
"""


async def _until_cancelled() -> None:
    await asyncio.Event().wait()


async def _nothing(_: Cluster) -> None:
    pass


async def _at_once() -> None:
    pass


def unsaid(_old: AnyObject, _new: AnyObject) -> None:
    """Do nothing: no one follows the changes."""


def unwarned(_value: AnyObject, _failure: Failure) -> None:
    """Do nothing: the log says it."""


class Readiness:
    """Why an operator cannot do its work; empty when it can, as far as its world goes."""

    def __init__(self) -> None:
        self.why = ""


class Selection:
    """The namespaces whose objects are reconciled: all of them."""

    def has(self, namespace: str) -> bool:
        """Whether a namespace is selected now."""
        return True

    def subscribe(self, listener: Callable[[str], None]) -> None:
        """Report each namespace that is selected from now on."""


ALL = Selection()


class World(NamedTuple):
    """One of the two worlds.

    `tidy` is done with every sweep. `follow` has the store report what others change, until it is
    cancelled. `prepare` returns once the store has what it needs, before anything is read of it.
    `changed` gets each status that was written, before and after, and `warned` what was refused or
    left out about an object and stands in no condition. `is_cluster` says whether people write
    objects with kubectl and rights of their own. `shapes` say by kind how objects look in this
    world, if a plan does not say all of it.
    """

    controllers: Sequence[Controller]
    tidy: Callable[[Cluster], Awaitable[None]] = _nothing
    follow: Callable[[], Awaitable[None]] = _until_cancelled
    prepare: Callable[[], Awaitable[None]] = _at_once
    namespaces: Selection = ALL
    changed: Changed = unsaid
    warned: Warned = unwarned
    is_cluster: bool = False
    shapes: Mapping[str, Shape] = {}
