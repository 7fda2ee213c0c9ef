"""Looks through the artifact root for what belongs to nobody, and moves it aside.

The root is listed first and the operator asked after that. Nothing is deleted, and whatever is
moved keeps its path below the quarantine, so that it can be moved back.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from typing import NamedTuple

from snapshot_agent.handlers.background import abandoning, repeated
from snapshot_agent.handlers.pods import Pods
from snapshot_agent.ports import Library, Listing, Operator
from snapshot_shared.api import MAX_FOUND, MAX_PODS, InventoryReply, Verdict
from snapshot_shared.artifact import QUARANTINE, generation_path
from snapshot_shared.errors import InvalidMessage, OutcomeUnknown, SnapbackError

log = logging.getLogger(__name__)

EVERY_S = 3600.0
AGAIN_S = 30.0
"""How long to wait after nobody could say, in seconds."""


PODS_AGAIN_S = (0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
"""How long to wait after a question that was not answered, in seconds; the last value repeats."""


class Counts(NamedTuple):
    """What is nobody's and was left where it is, and what lies in quarantine."""

    unknown: int = 0
    quarantined: int = 0


class Inventory:
    """Looks at once, and then every hour. `counts` is what it found last."""

    def __init__(
        self,
        library: Library,
        operator: Operator,
        node: str,
        wall: Callable[[], float],
        *,
        every_s: float = EVERY_S,
    ) -> None:
        """Look as `node`; `wall` gives seconds since the epoch."""
        self._library = library
        self._operator = operator
        self._node = node
        self._wall = wall
        self._every_s = every_s
        self.counts = Counts()

    async def run(self, stop: asyncio.Event) -> None:
        """Look until `stop` is set; a look that fails is made again."""

        async def look() -> None:
            await abandoning(self.look())

        await repeated(look, stop, "the artifact root is listed", self._every_s, (AGAIN_S,))

    async def look(self) -> None:
        """List, ask, and move aside what is to be moved. BusUnavailable, NotFound, OSError."""
        now = self._wall()
        listing = await self._library.listing(now)
        label = f"{datetime.fromtimestamp(now, UTC):%Y%m%dT%H%M%SZ}-{self._node}"
        unknown = 0
        for path, verdict in await self._judged(listing):
            is_left = verdict == "tell"
            if verdict == "quarantine":
                is_left = not await self._set_aside(path, label)
            unknown += is_left
        if unknown:
            log.warning("%d below the artifact root belong to no SnapshotContent", unknown)
        self.counts = Counts(unknown, await self._library.count_set_aside())

    async def _judged(self, listing: Listing) -> list[tuple[tuple[str, ...], Verdict]]:
        found: list[tuple[tuple[str, ...], Verdict]] = []
        for start in range(0, max(len(listing.generations), 1), MAX_FOUND):
            asked = listing.generations[start : start + MAX_FOUND]
            if not asked and not listing.strays:
                continue
            reply = await self._operator.judge(asked)
            if len(reply.verdicts) != len(asked):
                raise InvalidMessage(
                    f"the operator gave {len(reply.verdicts)} verdicts about {len(asked)}"
                )
            found += [
                (generation_path(item.namespace, item.content_uid, item.generation), verdict)
                for item, verdict in zip(asked, reply.verdicts, strict=True)
            ]
            if start == 0:
                found += _of_strays(listing, reply)
        return found

    async def _set_aside(self, path: tuple[str, ...], label: str) -> bool:
        """Move one entry; False when it stays. One that is gone meanwhile needs no moving."""
        shown = "/".join(path)
        try:
            if await self._library.set_aside(path, label):
                log.warning("%r is moved into %s/%s: it is nobody's", shown, QUARANTINE, label)
        except (SnapbackError, OSError) as error:
            log.warning("%r cannot be moved into %s: %s", shown, QUARANTINE, error)
            return False
        return True


def _of_strays(
    listing: Listing, reply: InventoryReply
) -> Iterator[tuple[tuple[str, ...], Verdict]]:
    for stray in listing.strays:
        if stray.age_s >= reply.after_s:
            yield stray.path, reply.others


class PodInventory:
    """Looks at once, and then every hour. `is_known` is set when all pods of the start are."""

    def __init__(self, pods: Pods, operator: Operator, *, every_s: float = EVERY_S) -> None:
        """Ask `operator` about `pods`."""
        self._pods = pods
        self._operator = operator
        self._every_s = every_s
        self.is_known = asyncio.Event()

    async def run(self, stop: asyncio.Event) -> None:
        """Look until `stop` is set; a look that fails is made again."""
        await repeated(self.look, stop, "the pods are asked about", self._every_s, PODS_AGAIN_S)

    async def look(self) -> None:
        """List, ask, and end what is unknown. BusUnavailable, NotFound, OSError."""
        listed = await self._pods.all_uids()
        for start in range(0, max(len(listed), 1), MAX_PODS):
            asked = listed[start : start + MAX_PODS]
            unknown = await self._operator.unknown_pods(asked)
            if foreign := sorted(set(unknown) - set(asked)):
                raise InvalidMessage(f"the operator named {foreign[0]}, which was not asked about")
            if not all(await asyncio.gather(*map(self._is_ended, unknown))):
                raise OutcomeUnknown("not every pod that is unknown could be ended")
        self.is_known.set()

    async def _is_ended(self, uid: str) -> bool:
        """End one pod; what stands in its way must not keep the others here."""
        log.warning("pod %s is no object any more and is ended", uid)
        try:
            await self._pods.discard(uid)
        except Exception as error:  # noqa: BLE001 - what a worker leaves behind may be of any kind
            log.warning("pod %s could not be ended: %r", uid, error)
            return False
        return True
