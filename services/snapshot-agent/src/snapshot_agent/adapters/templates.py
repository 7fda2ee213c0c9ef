"""Pod specs from the operator, asked for by name and uid over NATS."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from typing import Any

from snapback_client.frames import error_of
from snapshot_shared import subjects
from snapshot_shared.api import TemplateReply, TemplateRequest
from snapshot_shared.bus import Bus
from snapshot_shared.codec import MAX_FRAME_BYTES, decode_json, encode_json
from snapshot_shared.errors import BusUnavailable, NotFound
from snapshot_shared.ids import check_node
from snapshot_shared.orders import PodRef

log = logging.getLogger(__name__)

AGAIN_S = (0.1, 0.2, 0.5, 1.0, 2.0)
"""When the operator is asked again after it did not answer; the last value repeats."""


class OperatorTemplates:
    """The `Templates` port. An operator or a bus that is away is waited for."""

    def __init__(self, bus: Bus, node: str) -> None:
        """Ask as `node`."""
        self._bus = bus
        self._node = node
        self._returned = bus.reconnections()

    async def spec(self, pod: PodRef) -> Any:
        request = TemplateRequest(
            namespace=pod.namespace, name=pod.name, uid=pod.uid, node=self._node
        )
        data = await self._ask(encode_json(request))
        reply = decode_json(data, TemplateReply, limit=MAX_FRAME_BYTES)
        if reply.failure is not None:
            raise error_of(reply.failure)
        return reply.spec

    async def _ask(self, request: bytes) -> bytes:
        delays = itertools.chain(AGAIN_S, itertools.repeat(AGAIN_S[-1]))
        while True:
            try:
                return await self._bus.request(subjects.template(check_node(self._node)), request)
            except (BusUnavailable, NotFound) as error:
                log.info("the operator does not answer: %s", error)
            self._returned.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(next(delays)):
                    await self._returned.wait()
