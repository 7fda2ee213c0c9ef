"""How tasks of asyncio are ended, and what they have threads do."""

import asyncio
import os
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
import pytest_asyncio

from snapshot_shared.tasks import (
    Changes,
    Threads,
    heeding,
    in_thread,
    over,
    readable,
    undisturbed,
    writable,
)

OFTEN = 3


async def _swallowing(answer: asyncio.Future[str]) -> str:
    try:
        return await answer
    except asyncio.CancelledError:
        return answer.result()


async def test_a_cancellation_that_comes_with_the_result_is_not_lost() -> None:
    answer = asyncio.get_running_loop().create_future()
    task = asyncio.create_task(heeding(_swallowing(answer)))
    await asyncio.sleep(0)
    answer.set_result("there")
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_result_arrives_also_while_what_was_cancelled_cleans_up() -> None:
    async def cleaning_up() -> str:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            return await heeding(asyncio.sleep(0, "clean"))
        raise AssertionError

    task = asyncio.create_task(cleaning_up())
    await asyncio.sleep(0)
    task.cancel()
    assert await task == "clean"


async def test_a_deadline_inside_is_no_cancellation_of_the_task() -> None:
    async def late() -> str:
        try:
            async with asyncio.timeout(0.001):
                await asyncio.Event().wait()
        except TimeoutError:
            return "late"
        raise AssertionError

    assert await heeding(late()) == "late"


async def test_a_deadline_outside_whose_cancellation_was_swallowed_is_a_deadline() -> None:
    async def deaf() -> str:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            return "too late"
        raise AssertionError

    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.001):
            await heeding(deaf())


class Held:
    """A call that hangs until it is let go."""

    def __init__(self) -> None:
        self.begins = asyncio.Event()
        self.goes = threading.Event()
        self._loop = asyncio.get_running_loop()

    def __call__(self, result: int = 0) -> int:
        self._loop.call_soon_threadsafe(self.begins.set)
        self.goes.wait(60)
        return result


@pytest_asyncio.fixture
async def held() -> AsyncIterator[Held]:
    made = Held()
    yield made
    made.goes.set()


async def cancelled_often(task: asyncio.Task[None]) -> None:
    for _ in range(OFTEN):
        task.cancel()
        for _ in range(OFTEN):
            await asyncio.sleep(0)
    assert not task.done()


async def ends_with(
    held: Held, task: asyncio.Task[None], meanwhile: Callable[[], object] = lambda: None
) -> None:
    """Cancel a task often while its call hangs: it ends when the call does, cancelled."""
    await held.begins.wait()
    await cancelled_often(task)
    meanwhile()
    held.goes.set()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_call_in_a_thread_ends_before_its_caller_however_often_that_is_cancelled(
    held: Held,
) -> None:
    await ends_with(held, asyncio.create_task(in_thread(held)))


async def test_a_descriptor_is_open_as_long_as_a_thread_works_on_it(
    held: Held, tmp_path: Path
) -> None:
    threads = Threads(1)
    opened: list[int] = []

    async def work() -> None:
        async with threads.opened(os.open, tmp_path, os.O_RDONLY) as fd:
            opened.append(fd)
            await threads.run(held, fd)

    await ends_with(held, asyncio.create_task(work()), lambda: os.fstat(opened[0]))
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(opened[0])


async def test_a_descriptor_that_is_opened_too_late_is_closed(held: Held, tmp_path: Path) -> None:
    fd = os.open(tmp_path, os.O_RDONLY)
    threads = Threads(1)

    async def work() -> None:
        async with threads.opened(held, fd):
            raise AssertionError

    await ends_with(held, asyncio.create_task(work()))
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


async def test_calls_that_hang_in_threads_of_their_own_hold_nobody_else_up() -> None:
    threads, held = Threads(2), Held()
    hanging = [threads.begin(held) for _ in range(100)]
    assert await asyncio.wait_for(in_thread(lambda: "there"), 10) == "there"
    held.goes.set()
    await over(*hanging)


async def test_what_a_call_raises_is_raised_and_a_cancellation_comes_first(held: Held) -> None:
    def fail() -> None:
        held()
        raise ValueError("full")

    held.goes.set()
    with pytest.raises(ValueError, match="full"):
        await in_thread(fail)
    held.begins.clear()
    held.goes.clear()
    await ends_with(held, asyncio.create_task(in_thread(fail)))


async def test_a_deadline_of_a_call_is_told_when_the_call_is_over(held: Held) -> None:
    async def call() -> None:
        async with asyncio.timeout(0.01):
            await in_thread(held)

    task = asyncio.create_task(call())
    await held.begins.wait()
    await asyncio.wait([task], timeout=0.1)
    assert not task.done()
    held.goes.set()
    with pytest.raises(TimeoutError):
        await task


async def test_what_is_undisturbed_is_not_even_told_of_a_cancellation() -> None:
    goes, ends = asyncio.Event(), asyncio.Event()

    async def work() -> None:
        await goes.wait()
        ends.set()

    task = asyncio.create_task(undisturbed(work()))
    await asyncio.sleep(0)
    await cancelled_often(task)
    goes.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ends.is_set()


async def test_who_waits_for_the_next_change_is_woken_by_that_one_alone() -> None:
    changes = Changes()
    seen, changed = changes.next, asyncio.create_task(changes.next.wait())
    changes.notify()
    assert await changed
    assert seen.is_set()
    assert not changes.next.is_set()


async def test_a_descriptor_is_waited_for_until_it_can_be_read_or_written() -> None:
    ends = os.pipe()
    for end in ends:
        os.set_blocking(end, False)
    reading = asyncio.create_task(readable(ends[0]))
    await asyncio.sleep(0)
    assert not reading.done()
    written = os.write(ends[1], bytes(2**20))
    await reading
    writing = asyncio.create_task(writable(ends[1]))
    await asyncio.sleep(0)
    assert not writing.done()
    assert os.read(ends[0], 2**20) == bytes(written)
    await writing
    for end in ends:
        assert not asyncio.get_running_loop().remove_reader(end)
        os.close(end)
