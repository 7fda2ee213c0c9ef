"""Tasks that go on after the order that began them, and waits for whichever comes first."""

import asyncio

import pytest

from snapshot_agent.handlers.background import first

OFTEN = 3


async def test_whoever_waits_for_the_first_is_not_gone_before_all_have_ended() -> None:
    goes, cleaning = asyncio.Event(), asyncio.Event()
    told = 0

    async def slow_to_end() -> None:
        nonlocal told
        while not goes.is_set():
            try:
                await goes.wait()
            except asyncio.CancelledError:
                told += 1
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
    assert told == 1
