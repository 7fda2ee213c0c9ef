"""The presence of a node, written every ten seconds under its key in `snap_nodes`."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable

from snapshot_agent.ports import NodeDevices
from snapshot_shared import subjects
from snapshot_shared.bus import Bus
from snapshot_shared.codec import encode_json
from snapshot_shared.errors import BusUnavailable, GmsUnavailable, SnapbackError
from snapshot_shared.ids import token
from snapshot_shared.orders import Presence, PresenceDevice

log = logging.getLogger(__name__)

EVERY_S = 10.0
AGAIN_S = 0.5
"""How long to wait after presence could not be written, in seconds."""

SILENT_S = 60.0
"""After so many seconds without presence a node doubts its last answer about its pods. The operator
acts on the silence later: it takes the node for lost after 90 s."""


class PresencePublisher:
    """Writes presence until `stop` is set."""

    def __init__(
        self,
        bus: Bus,
        node_devices: NodeDevices,
        describe: Callable[[list[PresenceDevice]], Awaitable[Presence]],
        stop: asyncio.Event,
        may_offer: asyncio.Event,
        *,
        now: Callable[[], float],
        doubt: Callable[[], None],
        every_s: float | None = None,
    ) -> None:
        """Write what `describe` returns for the devices of the node.

        The list of devices is empty until `may_offer` is set. `doubt` is called after a silence,
        and may clear it. `now` returns seconds. Presence is written every `every_s`, or EVERY_S.
        """
        self._bus = bus
        self._node_devices = node_devices
        self._describe = describe
        self._stop = stop
        self._may_offer = may_offer
        self._now = now
        self._doubt = doubt
        self._every_s = EVERY_S if every_s is None else every_s
        self._heard = now()
        self._is_silent = False
        self._devices: list[PresenceDevice] = []
        self._has_answer = False

    async def run(self) -> None:
        """Write presence at once, again when there are devices to offer, then every `every_s`."""
        while not self._stop.is_set():
            if not await self._publish():
                await self._pause(AGAIN_S)
            elif self._has_answer:
                await self._pause(self._every_s)
                await self._update_devices(wait_s=0.0)
            else:
                await self._update_devices(wait_s=self._every_s)

    async def _update_devices(self, *, wait_s: float) -> None:
        if not await self._is_offered(wait_s):
            return
        try:
            self._devices = await self._node_devices.devices(wait_s=wait_s)
            self._has_answer = True
        except GmsUnavailable:
            self._devices, self._has_answer = [], False
            await self._pause(AGAIN_S)
        except SnapbackError as error:
            # The service is slow but there, so its last answer still holds.
            log.info("the devices may have changed: %s", error)

    async def _is_offered(self, wait_s: float) -> bool:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                await self._may_offer.wait()
        return self._may_offer.is_set()

    async def _publish(self) -> bool:
        began = self._now()
        was_silent, self._is_silent = self._is_silent, began - self._heard > SILENT_S
        if self._is_silent and not was_silent:
            log.warning("the node was silent for %.0f s", began - self._heard)
        # Once a silence, and again if the pods became known while presence could not be written.
        if self._is_silent and (not was_silent or self._may_offer.is_set()):
            self._doubt()
            if not self._may_offer.is_set():
                self._devices, self._has_answer = [], False
        value = await self._describe(self._devices)
        try:
            await self._bus.put(subjects.NODES_BUCKET, token(value.node), encode_json(value))
        except BusUnavailable as error:
            log.info("presence is not written: %s", error)
            return False
        self._heard = began
        return True

    async def _pause(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._stop.wait()
