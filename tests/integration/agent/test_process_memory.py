"""Reads of the memory of processes that hang, of which some are given up."""

import asyncio
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from snapshot_agent.adapters import process_memory
from snapshot_agent.adapters.process_memory import ProcessMemory
from snapshot_shared.errors import DeadlineExceeded
from snapshot_shared.tasks import calls_under_way, yield_turn
from tests.support.hanging import HangingRoot, hanging_memory
from tests.support.waiting import until

SOON_S = 20.0


@pytest.fixture
def another() -> Iterator[int]:
    """The pid of one more process, which is read after the bystander."""
    with subprocess.Popen(["sleep", "600"]) as process:
        yield process.pid
        process.kill()


async def pids(memory: ProcessMemory) -> set[int]:
    async with asyncio.timeout(SOON_S):
        return {each.pid for each in await memory.select(lambda *_: True)}


async def cancelled(reading: asyncio.Task[set[int]]) -> None:
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading


async def test_reads_that_are_cancelled_keep_one_thread_for_a_process_that_hangs(
    bystander: int, another: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    hanging = hanging_memory(bystander, monkeypatch, 0.2, threads=2)
    memory = ProcessMemory()
    with hanging.hanging():
        for _ in range(3):
            reading = asyncio.create_task(pids(memory))
            await until(lambda: hanging.waiting, "a read that hangs")
            await yield_turn()
            await cancelled(reading)
        found = await pids(memory)
        assert (another in found, bystander in found, hanging.waiting) == (True, False, 1)


async def test_a_process_that_does_not_hang_is_read_after_a_read_of_it_was_cancelled(
    bystander: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = HangingRoot(Path(f"/proc/{bystander}/environ"), monkeypatch)
    memory = ProcessMemory()
    with slow.hanging():
        reading = asyncio.create_task(pids(memory))
        await until(lambda: slow.waiting, "a read that takes a while")
        await cancelled(reading)
        after = asyncio.create_task(pids(memory))
        await yield_turn()
    assert bystander in await after


async def test_a_process_that_answers_is_read_again_while_the_next_one_hangs(
    bystander: int, another: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_memory, "HANGS_S", 0.2)
    both = sorted((bystander, another))
    first, second = (HangingRoot(Path(f"/proc/{pid}/environ"), monkeypatch) for pid in both)
    memory = ProcessMemory()
    first.hang()
    second.hang()
    try:
        assert not await pids(memory) & set(both)
        first.answer()
        # The read of the first goes no further: that of the second is the one that is left.
        await until(lambda: len(calls_under_way()) == 1, "the end of the read of the first")
        assert await pids(memory) & set(both) == {both[0]}
        assert second.waiting == 1
    finally:
        first.answer()
        second.answer()


async def test_a_read_for_which_no_process_is_listed_in_time_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(process_memory, "HANGS_S", 0.2)
    listing = HangingRoot(Path("/proc"), monkeypatch)
    memory = ProcessMemory()
    with listing.hanging("listdir"), pytest.raises(DeadlineExceeded, match="not listed"):
        await pids(memory)
    assert await pids(memory)
