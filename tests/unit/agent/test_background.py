"""Tasks that go on after the order that began them, and waits for whichever comes first."""

import asyncio

import pytest

from snapshot_agent.handlers.background import abandoning, compensated, first

OFTEN = 3


async def test_a_wait_for_the_first_does_not_end_before_all_have_ended() -> None:
    goes, cleaning = asyncio.Event(), asyncio.Event()
    cancellations = 0

    async def slow_to_end() -> None:
        nonlocal cancellations
        while not goes.is_set():
            try:
                await goes.wait()
            except asyncio.CancelledError:
                cancellations += 1
                cleaning.set()

    task = asyncio.create_task(first(slow_to_end(), asyncio.Event().wait()))
    await asyncio.sleep(0)
    for _ in range(OFTEN):
        task.cancel()
        await cleaning.wait()
        await asyncio.sleep(0)
    assert not task.done()
    goes.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert cancellations == 1


async def test_work_that_heeds_its_cancellation_is_not_compensated() -> None:
    compensations: list[str] = []

    async def compensate() -> None:
        compensations.append("done")

    task = asyncio.create_task(compensated(asyncio.Event().wait(), compensate))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert compensations == []


async def test_work_that_is_abandoned_is_cancelled_and_not_waited_for() -> None:
    ends, is_cancelled = asyncio.Event(), asyncio.Event()

    async def hangs() -> None:
        try:
            await ends.wait()
        except asyncio.CancelledError:
            is_cancelled.set()
            await ends.wait()

    task = asyncio.create_task(abandoning(hangs()))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await is_cancelled.wait()
    ends.set()
