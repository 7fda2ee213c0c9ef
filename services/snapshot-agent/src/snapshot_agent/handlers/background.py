"""Tasks that outlive the order that started them, and ways to wait for work."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, Literal, TypeVar

from snapshot_agent.domain.gate import source_exited
from snapshot_agent.ports import Worker, Workers
from snapshot_shared.errors import SnapbackError
from snapshot_shared.tasks import any_set, over, undisturbed

log = logging.getLogger(__name__)

T = TypeVar("T")

HANGS_S = 2.0
"""How long the release of a worker waits for work on a disk that hangs, in seconds."""


class Slots(asyncio.Semaphore):
    """A semaphore that counts how many of its `limit` are taken."""

    def __init__(self, limit: int) -> None:
        """Allow `limit` holders at a time."""
        super().__init__(limit)
        self.limit = limit
        self.used = 0

    async def acquire(self) -> Literal[True]:
        await super().acquire()
        self.used += 1
        return True

    def release(self) -> None:
        self.used -= 1
        super().release()

    async def turn(self, within_s: float) -> Callable[[], None]:
        """Wait for a slot; return what frees it, once. TimeoutError."""
        async with asyncio.timeout(within_s):
            await self.acquire()
        with contextlib.ExitStack() as freeing:
            freeing.callback(self.release)
            return freeing.pop_all().close


class Background:
    """Owns tasks. One that fails is logged and ends alone."""

    def __init__(self) -> None:
        """Start without tasks."""
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        """Start a task."""
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()):
            log.error("%s ended: %r", task.get_name(), error, exc_info=error)

    async def close(self) -> None:
        """Cancel what runs and wait for it."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def repeated(
    work: Callable[[], Awaitable[None]],
    stop: asyncio.Event,
    what: str,
    every_s: float,
    again_s: Sequence[float],
    *,
    due: asyncio.Event | None = None,
) -> None:
    """Do work at once and then every `every_s` seconds, until `stop` is set; sooner if it is `due`.

    Work that fails is tried again after the seconds of `again_s`, in turn; the last repeats. `what`
    names the work in the log.
    """
    due = due or asyncio.Event()
    failures = 0
    while not stop.is_set():
        pause_s = every_s
        due.clear()
        try:
            await work()
            failures = 0
        except (SnapbackError, OSError) as error:
            log.info("%s later: %s", what, error)
            pause_s = min(again_s[min(failures, len(again_s) - 1)], every_s)
            failures += 1
        await any_set(pause_s, stop, due)


async def pause(seconds: float) -> None:
    """Wait between two tries of what does not report when it works again."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await asyncio.Event().wait()


async def abandoning(work: Coroutine[Any, Any, T]) -> T:
    """Return the result of work. A cancellation cancels the work and does not wait for its end.

    For work that may hang and whose end nothing depends on.
    """
    task = asyncio.ensure_future(work)
    # Or else asyncio logs the error of a task whose result is not read.
    task.add_done_callback(lambda done: done.cancelled() or done.exception())
    try:
        await asyncio.wait([task])
    finally:
        task.cancel()
    return task.result()


async def compensated(
    work: Coroutine[Any, Any, None], compensate: Callable[[], Awaitable[None]]
) -> None:
    """Do work. If it hangs when cancelled, compensate after HANGS_S / 2, then wait for its end."""
    task = asyncio.ensure_future(work)
    try:
        await asyncio.wait([task])
    finally:
        if not task.done():
            task.cancel()
            await undisturbed(_compensated_before(task, compensate))
    task.result()


async def _compensated_before(
    task: asyncio.Future[None], compensate: Callable[[], Awaitable[None]]
) -> None:
    await asyncio.wait([task], timeout=HANGS_S / 2)
    try:
        if not task.done():
            await compensate()
    except (SnapbackError, OSError):
        log.exception("work that hangs could not be compensated")
    finally:
        await over(task)


async def first(*works: Coroutine[Any, Any, T]) -> tuple[int, T]:
    """Run all until one has ended; its index and its result. The others are cancelled.

    All have ended when this does. When several end together, the first given counts.
    """
    tasks = [asyncio.create_task(work) for work in works]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        index = next(index for index, task in enumerate(tasks) if task.done())
        return index, tasks[index].result()
    finally:
        for task in tasks:
            task.cancel()
        await over(*tasks)


async def while_alive(workers: Workers, worker: Worker, work: Coroutine[Any, Any, object]) -> None:
    """Wait for work. SourceExited, with the exit code, when the worker ends before."""
    index, code = await first(work, workers.ended(worker.process))
    if index == 1:
        raise source_exited(worker.pod, code if isinstance(code, int) else None)
