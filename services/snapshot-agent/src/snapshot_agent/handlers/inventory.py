"""Compares artifact root and pods of the node with the objects of the operator.

What is here is listed first, and the operator asked after that, or else an object that was made in
between would count as unknown. Artifacts without an owner are moved into quarantine, where they
keep their paths, and never deleted. Pods without an object are ended.
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
"""How long to wait after a comparison of the root that failed, in seconds."""

PODS_AGAIN_S = (0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
"""The same for the pods; the last value repeats. It is short, for until the first answer the node
offers no device."""


class Counts(NamedTuple):
    """How many entries have no owner and were left in place, and how many are in quarantine."""

    unknown: int = 0
    quarantined: int = 0


class Inventory:
    """Compares the artifact root at the start and then every hour. `counts` is the last result."""

    def __init__(
        self,
        library: Library,
        operator: Operator,
        node: str,
        wall: Callable[[], float],
        *,
        every_s: float = EVERY_S,
    ) -> None:
        """Compare as `node`; `wall` returns seconds since the epoch."""
        self._library = library
        self._operator = operator
        self._node = node
        self._wall = wall
        self._every_s = every_s
        self.counts = Counts()

    async def run(self, stop: asyncio.Event) -> None:
        """Compare until `stop` is set; a comparison that fails is tried again."""

        async def look() -> None:
            await abandoning(self.look())

        await repeated(look, stop, "the artifact root is listed", self._every_s, (AGAIN_S,))

    async def look(self) -> None:
        """List, ask, and quarantine. BusUnavailable, NotFound, OSError."""
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
        """Move one entry; False when it could not be moved. One that is gone counts as moved."""
        shown = "/".join(path)
        try:
            if await self._library.set_aside(path, label):
                log.warning("%r is moved into %s/%s: it has no owner", shown, QUARANTINE, label)
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
    """Compares the pods at the start and then every hour.

    `is_known` is set when every pod here is known to the operator or was ended. After an outage of
    the node other pods may have been given the devices of those that still run here, so a node that
    was silent doubts what it knew.
    """

    def __init__(self, pods: Pods, operator: Operator, *, every_s: float = EVERY_S) -> None:
        """Compare `pods` with the objects of `operator`."""
        self._pods = pods
        self._operator = operator
        self._every_s = every_s
        self.is_known = asyncio.Event()
        self._doubted = asyncio.Event()
        self._doubts = 0

    async def run(self, stop: asyncio.Event) -> None:
        """Compare until `stop` is set; a comparison that fails is tried again."""
        what = "the pods are asked about"
        await repeated(self.look, stop, what, self._every_s, PODS_AGAIN_S, due=self._doubted)

    def doubt(self) -> None:
        """Know nothing of the pods until they are compared again, which is due now."""
        self.is_known.clear()
        self._doubts += 1
        self._doubted.set()

    async def look(self) -> None:
        """List, ask, and end unknown pods. BusUnavailable, NotFound, OutcomeUnknown."""
        doubts = self._doubts
        listed = await self._pods.all_uids()
        for start in range(0, max(len(listed), 1), MAX_PODS):
            asked = listed[start : start + MAX_PODS]
            unknown = await self._operator.unknown_pods(asked)
            if foreign := sorted(set(unknown) - set(asked)):
                raise InvalidMessage(f"the operator named {foreign[0]}, which was not asked about")
            if not all(await asyncio.gather(*map(self._is_ended, unknown))):
                raise OutcomeUnknown("not every pod that is unknown could be ended")
        # An answer from before a silence says nothing of the time after it.
        if doubts == self._doubts:
            self.is_known.set()

    async def _is_ended(self, uid: str) -> bool:
        """End one pod; whether it has ended. An error must not keep the other pods running."""
        log.warning("pod %s has no object any more and is ended", uid)
        try:
            await self._pods.discard(uid)
        except Exception as error:  # noqa: BLE001 - what a worker leaves behind may be of any kind
            log.warning("pod %s could not be ended: %r", uid, error)
            return False
        return True
