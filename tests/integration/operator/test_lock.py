"""One operator is active: the next takes over when the first ends, however it ends."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

from snapshot_operator.local.lock import FileLock

HOLDER = """
import asyncio, sys
from pathlib import Path
from snapshot_operator.local.lock import FileLock

async def hold():
    async with FileLock(Path(sys.argv[1])).held():
        print("held", flush=True)
        await asyncio.Event().wait()

asyncio.run(hold())
"""
PATIENCE_S = 20.0


@contextlib.asynccontextmanager
async def holder(path: Path) -> AsyncIterator[asyncio.subprocess.Process]:
    """Another process that holds the lock, or waits for it."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", HOLDER, str(path), stdout=asyncio.subprocess.PIPE
    )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


async def holds(process: asyncio.subprocess.Process) -> None:
    assert process.stdout is not None
    async with asyncio.timeout(PATIENCE_S):
        assert await process.stdout.readline() == b"held\n"


async def test_a_standby_takes_over_at_once_when_the_active_one_is_killed(tmp_path: Path) -> None:
    path = tmp_path / "operator.lock"
    async with holder(path) as active, holder(path) as other:
        waiting = {asyncio.ensure_future(holds(p)): p for p in (active, other)}
        done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        winner = waiting[done.pop()]
        winner.kill()
        await asyncio.gather(*waiting)


async def test_one_that_is_only_stopped_keeps_the_lock(tmp_path: Path) -> None:
    path = tmp_path / "operator.lock"
    async with holder(path) as active:
        await holds(active)
        active.send_signal(signal.SIGSTOP)
        taken = asyncio.Event()

        async def take() -> None:
            async with FileLock(path).held():
                taken.set()

        waiting = asyncio.ensure_future(take())
        await asyncio.sleep(0.3)
        assert not taken.is_set()
        active.kill()
        async with asyncio.timeout(PATIENCE_S):
            await waiting


async def test_one_that_stands_by_can_be_ended_and_leaves_the_lock_to_others(
    tmp_path: Path,
) -> None:
    path = tmp_path / "operator.lock"
    async with FileLock(path).held(), holder(path) as standby:
        await asyncio.sleep(0.5)
        standby.terminate()
        async with asyncio.timeout(PATIENCE_S):
            await standby.wait()
    async with asyncio.timeout(PATIENCE_S), FileLock(path).held():
        pass
