"""Which pods there are, asked of the operator over NATS."""

from __future__ import annotations

from collections.abc import Sequence

from snapback_client.frames import error_of
from snapshot_shared import subjects
from snapshot_shared.api import PodsReply, PodsRequest
from snapshot_shared.bus import Bus
from snapshot_shared.codec import MAX_FRAME_BYTES, decode_json, encode_json
from snapshot_shared.ids import check_node


class OperatorPods:
    """The `KnownPods` port."""

    def __init__(self, bus: Bus, node: str) -> None:
        """Ask as `node`."""
        self._bus = bus
        self._node = node

    async def unknown(self, pods: Sequence[str]) -> list[str]:
        request = PodsRequest(node=self._node, pods=list(pods))
        subject = subjects.pods(check_node(self._node))
        data = await self._bus.request(subject, encode_json(request))
        reply = decode_json(data, PodsReply, limit=MAX_FRAME_BYTES)
        if reply.failure is not None:
            raise error_of(reply.failure)
        return reply.unknown
