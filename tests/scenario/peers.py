"""Clients of a GPU memory service that take more than their share."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

from snapback_client.frames import Attach, ListAllocations, LockMode, MemoryDomain
from snapshot_shared.errors import SnapbackError
from tests.scenario.door import HOSTILE
from tests.scenario.gpu import SimLease

if TYPE_CHECKING:
    from tests.scenario.loop import Process
    from tests.scenario.node import SimNode

FLOODERS, FRAMES = 2, 50
"""How many processes send how many frames ahead, on each connection."""
PROCESSES, SESSIONS = 3, 20
"""How many processes open how many sessions each."""
LOCK_S = 2.0


def begin_flood(node: SimNode, connections: int) -> None:
    """Have processes send frames on several connections as fast as the service takes them."""
    for _ in range(FLOODERS):
        process = node.process(HOSTILE)
        process.spawn(_flood(node, process, connections))


def begin_crowd(node: SimNode, hold_s: float) -> None:
    """Have processes open many sessions, and end with what they have of them."""
    for _ in range(PROCESSES):
        process = node.process(HOSTILE)
        for index in range(SESSIONS):
            process.spawn(_held(node, index, hold_s))
        node.loop.in_world(hold_s, process.kill, 0)


async def _flood(node: SimNode, process: Process, connections: int) -> None:
    await asyncio.gather(*(_sent(node, index) for index in range(connections)))
    process.kill(0)


async def _sent(node: SimNode, index: int) -> None:
    with contextlib.suppress(SnapbackError):
        lease = await _attached(node, index, LOCK_S)
        await lease.call(*[ListAllocations()] * FRAMES)


async def _held(node: SimNode, index: int, hold_s: float) -> None:
    with contextlib.suppress(SnapbackError):
        await _attached(node, index, hold_s)


async def _attached(node: SimNode, index: int, deadline_s: float) -> SimLease:
    request = Attach(
        device=f"GPU-{node.name}-{index % node.gpus}",
        domain=MemoryDomain.WEIGHTS,
        lock=LockMode.RO,
        deadline_s=deadline_s,
        client=HOSTILE,
    )
    return await SimLease.attach(node, request)
