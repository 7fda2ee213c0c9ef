"""The presence of a node, written every ten seconds under its key in `snap_nodes`.

NATS drops a key that is not written for 30 s, and others act upon the silence of a node later than
that. So a node whose last presence is gone doubts its last answer about its pods. A clock of the
node would not show the silence: the clocks of a virtual machine stand still while it is paused.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable

from snapshot_agent.ports import NodeDevices
from snapshot_shared import subjects
from snapshot_shared.bus import Bus
from snapshot_shared.codec import encode_json
from snapshot_shared.errors import BusUnavailable, GmsUnavailable, NotPermitted, SnapbackError
from snapshot_shared.ids import token
from snapshot_shared.orders import Presence, PresenceDevice

log = logging.getLogger(__name__)

EVERY_S = 10.0
AGAIN_S = 0.5
"""How long to wait after presence could not be written, in seconds."""


class PresencePublisher:
    """Writes presence until `stop` is set."""

    def __init__(
        self,
        bus: Bus,
        node: str,
        node_devices: NodeDevices,
        describe: Callable[[list[PresenceDevice]], Awaitable[Presence]],
        stop: asyncio.Event,
        may_offer: asyncio.Event,
        *,
        doubt: Callable[[], None],
        every_s: float | None = None,
    ) -> None:
        """Write what `describe` returns for the devices of `node`.

        The list of devices is empty until `may_offer` is set. `doubt` is called after a silence,
        and may clear it. Presence is written every `every_s` seconds, or EVERY_S.
        """
        self._bus = bus
        self._key = token(node)
        self._node_devices = node_devices
        self._describe = describe
        self._stop = stop
        self._may_offer = may_offer
        self._doubt = doubt
        self._every_s = EVERY_S if every_s is None else every_s
        self._revision: int | None = None
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
        try:
            if self._revision is not None and await self._is_gone(self._revision):
                self._doubt()
                if not self._may_offer.is_set():
                    self._devices, self._has_answer = [], False
            value = await self._describe(self._devices)
            self._revision = await self._bus.put(
                subjects.NODES_BUCKET, self._key, encode_json(value)
            )
        except BusUnavailable as error:
            log.info("presence is not written: %s", error)
            return False
        return True

    async def _is_gone(self, revision: int) -> bool:
        try:
            found = await self._bus.revision(subjects.NODES_BUCKET, self._key)
        except NotPermitted as error:
            # A nats-server whose permissions are older than this agent, as within an upgrade.
            log.warning("a silence of this node would not be seen: %s", error)
            return False
        if found != revision:
            log.warning("the last presence of this node is gone: it was silent, or NATS was lost")
        return found != revision

    async def _pause(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._stop.wait()
