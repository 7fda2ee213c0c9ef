"""Ends what runs here of pods that are no objects any more.

An agent may come back after its node was given up, when other pods have been given its devices. The
pods are listed first and the operator asked after that, and until it has answered once the node
offers no device.
"""

from __future__ import annotations

import asyncio
import logging

from snapshot_agent.handlers.background import repeated
from snapshot_agent.handlers.pods import Pods
from snapshot_agent.ports import KnownPods
from snapshot_shared.api import MAX_PODS
from snapshot_shared.errors import InvalidMessage, OutcomeUnknown

log = logging.getLogger(__name__)

EVERY_S = 3600.0
AGAIN_S = (0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
"""How long to wait after a question that was not answered, in seconds; the last value repeats."""


class PodInventory:
    """Looks at once, and then every hour. `is_known` is set when all pods of the start are."""

    def __init__(self, pods: Pods, operator: KnownPods, *, every_s: float = EVERY_S) -> None:
        """Ask `operator` about `pods`."""
        self._pods = pods
        self._operator = operator
        self._every_s = every_s
        self.is_known = asyncio.Event()

    async def run(self, stop: asyncio.Event) -> None:
        """Look until `stop` is set; a look that fails is made again."""
        await repeated(self.look, stop, "the pods are asked about", self._every_s, AGAIN_S)

    async def look(self) -> None:
        """List, ask, and end what is unknown. BusUnavailable, NotFound, OSError."""
        listed = await self._pods.all_uids()
        for start in range(0, max(len(listed), 1), MAX_PODS):
            asked = listed[start : start + MAX_PODS]
            unknown = await self._operator.unknown(asked)
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
