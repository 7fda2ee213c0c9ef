"""The operator as the agent asks it, over NATS."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections.abc import Sequence
from typing import Any, Protocol, TypeVar

from snapback_client.frames import error_of
from snapshot_shared import subjects
from snapshot_shared.api import (
    FoundGeneration,
    InventoryReply,
    InventoryRequest,
    PodsReply,
    PodsRequest,
    TemplateReply,
    TemplateRequest,
)
from snapshot_shared.bus import Bus
from snapshot_shared.codec import MAX_FRAME_BYTES, decode_json, encode_json
from snapshot_shared.errors import BusUnavailable, Failure, NotFound
from snapshot_shared.ids import check_node
from snapshot_shared.orders import PodRef

log = logging.getLogger(__name__)

AGAIN_S = (0.1, 0.2, 0.5, 1.0, 2.0)
"""Seconds between two requests for a pod spec while nothing answers; the last repeats."""


class _Reply(Protocol):
    @property
    def failure(self) -> Failure | None: ...


R = TypeVar("R", bound=_Reply)


class OperatorClient:
    """The `Operator` port."""

    def __init__(self, bus: Bus, node: str) -> None:
        """Send requests by `bus` as the node `node`."""
        self._bus = bus
        self._node = check_node(node)
        self._returned = bus.reconnections()

    async def spec(self, pod: PodRef) -> Any:
        request = TemplateRequest(
            namespace=pod.namespace, name=pod.name, uid=pod.uid, node=self._node
        )
        delays = itertools.chain(AGAIN_S, itertools.repeat(AGAIN_S[-1]))
        while True:
            try:
                data = await self._bus.request(subjects.template(self._node), encode_json(request))
            except (BusUnavailable, NotFound) as error:
                log.info("the operator does not answer: %s", error)
            else:
                return _checked(data, TemplateReply).spec
            self._returned.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(next(delays)):
                    await self._returned.wait()

    async def unknown_pods(self, pods: Sequence[str]) -> list[str]:
        request = encode_json(PodsRequest(node=self._node, pods=list(pods)))
        data = await self._bus.request(subjects.pods(self._node), request)
        return _checked(data, PodsReply).unknown

    async def judge(self, found: Sequence[FoundGeneration]) -> InventoryReply:
        request = encode_json(InventoryRequest(node=self._node, generations=list(found)))
        data = await self._bus.request(subjects.inventory(self._node), request)
        return _checked(data, InventoryReply)


def _checked(data: bytes, type_: type[R]) -> R:
    """Decode a reply; raise the error that it carries."""
    reply = decode_json(data, type_, limit=MAX_FRAME_BYTES)
    if reply.failure is not None:
        raise error_of(reply.failure)
    return reply
