"""The fault switches of the nodes of a simulated cluster, over NATS."""

from __future__ import annotations

from typing import TYPE_CHECKING

from snapshot_shared import subjects
from snapshot_shared.api import Fault, SimReply, SimRequest
from snapshot_shared.codec import decode_json, encode_json
from snapshot_shared.errors import NotFound, RemoteFailure
from snapshot_shared.ids import check_node

if TYPE_CHECKING:
    from snapshot_shared.bus import Bus


class FaultSwitch:
    """Talks to the services of all nodes behind one server."""

    def __init__(self, bus: Bus) -> None:
        """Use a bus that is connected."""
        self._bus = bus

    async def arm(self, node: str, service: str, fault: Fault) -> list[Fault]:
        return await self._ask(node, service, SimRequest(arm=fault))

    async def clear(self, node: str, service: str) -> list[Fault]:
        return await self._ask(node, service, SimRequest(clear=True))

    async def _ask(self, node: str, service: str, request: SimRequest) -> list[Fault]:
        subject = subjects.rpc(check_node(node), service, "sim")
        try:
            answer = await self._bus.request(subject, encode_json(request))
        except NotFound as error:
            raise NotFound(
                f"no fault switch of {service} on {node} answers",
                next_step=f"if it was killed: snapshotctl sim restart {node}; the nodes are in "
                "snapshotctl nodes, and only those of a local cluster have the switch",
            ) from error
        reply = decode_json(answer, SimReply)
        if reply.failure is not None:
            raise RemoteFailure(reply.failure)
        return reply.armed
