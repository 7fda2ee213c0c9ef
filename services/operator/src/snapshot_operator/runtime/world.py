"""What differs between standalone mode and a cluster, besides the store and who is active."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple

from snapshot_operator.core.controllers import Controller
from snapshot_operator.runtime.cluster import Cluster


async def _until_cancelled() -> None:
    await asyncio.Event().wait()


async def _nothing(_: Cluster) -> None:
    pass


class World(NamedTuple):
    """One of the two worlds.

    `tidy` is done with every sweep. `follow` has the store report what others change, until it is
    cancelled.
    """

    controllers: Sequence[Controller]
    tidy: Callable[[Cluster], Awaitable[None]] = _nothing
    follow: Callable[[], Awaitable[None]] = _until_cancelled
