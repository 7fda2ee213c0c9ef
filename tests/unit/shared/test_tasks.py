"""How tasks of asyncio are ended."""

import asyncio

import pytest

from snapshot_shared.tasks import heeding


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
