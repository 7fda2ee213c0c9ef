"""How tasks of asyncio give way, how they are ended, and what they have threads do."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import functools
import os
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


async def yield_turn() -> None:
    """Let other tasks that are ready run first."""
    turn = asyncio.Event()
    asyncio.get_running_loop().call_soon(turn.set)
    await turn.wait()


async def any_set(within_s: float, *events: asyncio.Event) -> bool:
    """Wait until an event is set, or for `within_s` seconds. Return whether one was set in time."""
    if len(events) > 1:
        waiters = [asyncio.ensure_future(event.wait()) for event in events]
        try:
            ended = asyncio.FIRST_COMPLETED
            return bool((await asyncio.wait(waiters, timeout=within_s, return_when=ended))[0])
        finally:
            for waiter in waiters:
                waiter.cancel()
    try:
        async with asyncio.timeout(within_s):
            await next(iter(events), asyncio.Event()).wait()
    except TimeoutError:
        return False
    return True


class Changes:
    """Wakes those who wait for a change: `next` is set with it, and another takes its place."""

    def __init__(self) -> None:
        """Begin before the first."""
        self.next = asyncio.Event()

    def notify(self) -> None:
        """Say that something has changed."""
        changed, self.next = self.next, asyncio.Event()
        changed.set()


async def readable(descriptor: int) -> None:
    """Wait until a descriptor can be read; a pidfd can when the process has ended."""
    loop = asyncio.get_running_loop()
    await _ready(descriptor, loop.add_reader, loop.remove_reader)


async def writable(descriptor: int) -> None:
    """Wait until a descriptor can be written."""
    loop = asyncio.get_running_loop()
    await _ready(descriptor, loop.add_writer, loop.remove_writer)


async def _ready(
    descriptor: int, add: Callable[..., object], remove: Callable[[int], object]
) -> None:
    ready = asyncio.Event()
    add(descriptor, ready.set)
    try:
        await ready.wait()
    finally:
        remove(descriptor)


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


async def over(*works: asyncio.Future[Any]) -> None:
    """Return when all are done. A cancellation meanwhile, however often, waits for that, too.

    What they raise is left in them.
    """
    cancelled: asyncio.CancelledError | None = None
    while pending := [work for work in works if not work.done()]:
        try:
            await asyncio.wait(pending)
        except asyncio.CancelledError as error:
            cancelled = error
    for work in works:
        # Retrieve the exception, or asyncio logs it.
        work.cancelled() or work.exception()
    if cancelled is not None:
        raise cancelled


async def undisturbed(work: Awaitable[T]) -> T:
    """Return what an awaitable returns. A cancellation is raised when that is over, not before."""
    task = asyncio.ensure_future(work)
    await over(task)
    return task.result()


_under_way: weakref.WeakSet[asyncio.Future[Any]] = weakref.WeakSet()


def calls_under_way() -> set[asyncio.Future[Any]]:
    """Return the calls that threads make for this event loop."""
    loop = asyncio.get_running_loop()
    return {call for call in _under_way if call.get_loop() is loop and not call.done()}


class Threads:
    """Threads for calls that may block. No call is left behind: what it works on stays open.

    With a `limit` there are so many of its own, so that calls that hang take none from others;
    without one they are those of the event loop, which the journal needs, too.
    """

    def __init__(self, limit: int | None = None, name: str = "") -> None:
        """Begin with none; `name` is for those who look at the process."""
        self._executor = None if limit is None else ThreadPoolExecutor(limit, name)

    def begin(
        self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs
    ) -> asyncio.Future[T]:
        """Return what will have the result. To cancel it does not end the call."""
        call = functools.partial(contextvars.copy_context().run, function, *args, **kwargs)
        under_way = asyncio.get_running_loop().run_in_executor(self._executor, call)
        _under_way.add(under_way)
        return under_way

    async def run(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Return what a function returns; a cancellation is raised when the call is over."""
        return await undisturbed(self.begin(function, *args, **kwargs))

    @contextlib.asynccontextmanager
    async def opened(
        self, function: Callable[P, int], /, *args: P.args, **kwargs: P.kwargs
    ) -> AsyncIterator[int]:
        """Keep the descriptor that a function opens open for the length of a block."""
        opening = self.begin(function, *args, **kwargs)
        try:
            yield await undisturbed(opening)
        finally:
            if opening.exception() is None:
                # What is written over a network may be sent no sooner than now.
                await self.run(os.close, opening.result())


in_thread = Threads().run
"""Calls a function in a thread of the event loop. For what cannot hang, but may take a while."""
