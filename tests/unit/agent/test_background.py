"""Tasks that go on after the order that began them, and waits for whichever comes first."""

import asyncio

import pytest

from snapshot_agent.handlers.background import abandoning, compensated, first
from snapshot_agent.handlers.inventory import PodInventory

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


class NoPods:
    async def all_uids(self) -> list[str]:
        return []


class SlowOperator:
    """Answers about pods once it is told to."""

    def __init__(self) -> None:
        self.answers = asyncio.Event()
        self.asked = asyncio.Event()

    async def unknown_pods(self, _asked: list[str]) -> list[str]:
        self.asked.set()
        await self.answers.wait()
        return []


async def test_an_answer_about_pods_from_before_a_doubt_does_not_count() -> None:
    operator = SlowOperator()
    inventory = PodInventory(NoPods(), operator)  # type: ignore[arg-type]
    looking = asyncio.create_task(inventory.look())
    await operator.asked.wait()
    inventory.doubt()
    operator.answers.set()
    await looking
    assert not inventory.is_known.is_set(), "is_known"
    await inventory.look()
    assert inventory.is_known.is_set()
