"""How tasks of asyncio give way, and how they are ended."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any, TypeVar

T = TypeVar("T")


async def yield_turn() -> None:
    """Let whatever else is ready run first."""
    turn = asyncio.Event()
    asyncio.get_running_loop().call_soon(turn.set)
    await turn.wait()


async def end_all(*tasks: asyncio.Future[Any], again_s: float = 0.2) -> None:
    """Cancel tasks that have no end and wait for them.

    More than once, if need be: nats-py can swallow a cancellation. `wait_for` of Python 3.11, which
    it uses, forgets one that comes together with the result it waits for, and a pull then takes
    a status message as a reason to wait on.
    """
    pending = {task for task in tasks if not task.done()}
    while pending:
        for task in pending:
            task.cancel()
        _, pending = await asyncio.wait(pending, timeout=again_s)
    await asyncio.gather(*tasks, return_exceptions=True)


async def heeding(work: Awaitable[T]) -> T:
    """Return what an awaitable returns; raise CancelledError for a cancellation that it swallowed.

    `wait_for` of Python 3.11 returns a result that comes together with the cancellation.
    """
    task = asyncio.current_task()
    before = task.cancelling() if task else 0
    result = await work
    if task is not None and task.cancelling() > before:
        raise asyncio.CancelledError
    return result
