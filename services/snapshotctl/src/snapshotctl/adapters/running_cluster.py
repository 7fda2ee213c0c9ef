"""A cluster that the demo has not started, such as that of docker-compose.yaml.

Its nodes have their sockets below one folder, and the processes of the node that the demo kills
are visible here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path

from snapshotctl.adapters import processes
from snapshotctl.adapters.operator_client import OperatorClient
from snapshotctl.domain import demo_script
from snapshotctl.domain.cluster import ClusterAccess, NodeSpec
from snapshotctl.domain.exits import DemoFailed, Unready

READY_S = 60.0

Connect = Callable[[], AbstractAsyncContextManager[OperatorClient]]


class RunningCluster:
    """The port `DemoCluster` on it. `run` is SNAPBACK_RUN in the environment of its processes."""

    def __init__(self, sockets: Path, run: str, connect: Connect, access: ClusterAccess) -> None:
        """Read nothing yet."""
        self._sockets = sockets
        self._run = run
        self._connect = connect
        self.access = access

    def sockets(self, node: str) -> Path:
        return self._sockets / node

    async def start(self, nodes: Sequence[NodeSpec]) -> None:
        async with self._connect() as operator:
            try:
                async with asyncio.timeout(READY_S):
                    await operator.nodes_ready(nodes, 0.0)
            except TimeoutError:
                names = " and ".join(node.name for node in nodes)
                raise Unready(
                    f"{names} were not ready with {nodes[0].gpus} GPUs each within {READY_S:.0f} s",
                    next_step=f"look at them: {self.access.snapshotctl} nodes",
                ) from None
            presence = await operator.presence()
        sizes = {
            str(name): [device.capacity_bytes for device in found.devices]
            for name, found in presence.items()
        }
        if problems := demo_script.too_small(nodes, sizes):
            raise Unready(
                "; ".join(problems),
                next_step="take less with --size-mib, or give the GPUs more: SNAPBACK_DEVICE_BYTES",
                problems=problems,
            )

    async def add_node(self, node: NodeSpec) -> bool:
        return False

    async def kill_node(self, node: str) -> list[str]:
        handles = [
            (pod or member.command.rpartition(" ")[2], processes.opened_member(member))
            for pod, member in processes.members_on(node, self._run)
        ]
        killed = [(name, handle) for name, handle in handles if handle is not None]
        if not killed:
            raise DemoFailed(
                f"no process of {node} is visible here",
                next_step=f"run the demo where the processes of {node} are visible, with their "
                "SNAPBACK_RUN and as their user",
            )
        await processes.end([handle for _, handle in killed], grace_s=0)
        return [f"{name} (pid {handle.pid})" for name, handle in killed]

    async def stop(self, *, purge: bool) -> None:
        """Do nothing: what has started it ends it."""

    def keep(self) -> None:
        """Do nothing: it runs on in any case."""
