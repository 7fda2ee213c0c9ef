"""Waiting for what a process does, in an event loop and without being its parent."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from snapshot_agent.adapters import procfs
from snapshot_shared.errors import DeadlineExceeded

LOOK_AGAIN_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 1.0, 1.0, 1.0)
"""When a stop is looked for again. The first look nearly always finds it."""


async def ended(process: procfs.Stat) -> None:
    """Wait for the end of a process."""
    with procfs.opened(process.pid, process.start) as pidfd:
        if pidfd is None:
            return
        loop = asyncio.get_running_loop()
        end: asyncio.Future[None] = loop.create_future()
        loop.add_reader(pidfd, _settle, end)
        try:
            await end
        finally:
            loop.remove_reader(pidfd)


def _settle(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


async def stopped(process: procfs.Stat) -> None:
    """Wait until every thread of a process that was sent SIGSTOP has stopped, or it has ended.

    The kernel tells nobody but the parent that a process has stopped, so the state is read again
    while its end, of which it does tell, is waited for. DeadlineExceeded after five seconds.
    """
    for wait_s in LOOK_AGAIN_S:
        if procfs.has_stopped(process):
            return
        try:
            async with asyncio.timeout(wait_s):
                await ended(process)
        except TimeoutError:
            continue
        return
    if not procfs.has_stopped(process):
        raise DeadlineExceeded(
            f"process {process.pid} did not stop within {sum(LOOK_AGAIN_S):.0f} s",
            next_step="see what its threads wait for: /proc/<pid>/task/*/stack",
            step="freeze",
            budget_s=sum(LOOK_AGAIN_S),
        )


async def all_stopped(processes: Sequence[procfs.Stat]) -> None:
    """Do the same for many."""
    await asyncio.gather(*(stopped(process) for process in processes))
