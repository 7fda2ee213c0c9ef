"""What every service's `main` does around its own parts: signals, tasks, an orderly end."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import time
import traceback
from collections.abc import Awaitable, Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

from snapshot_shared.clocks import Clocks
from snapshot_shared.errors import SnapbackError, StorageFailed
from snapshot_shared.tasks import calls_under_way, end_all

log = logging.getLogger(__name__)

VERSION = version("snapback-shared")
"""The version of the product: its packages are released together."""

HUNG_S = 1.0
"""How long what a service has left running may take to end, in seconds."""

HELD_S = 0.02
"""With PYTHONASYNCIODEBUG=1 asyncio logs each callback that holds the loop for longer."""

Main = Callable[[asyncio.Event], Awaitable[None]]


def run(main: Main) -> int:
    """Run a service until SIGTERM or SIGINT and give its exit status.

    `main` gets an event that is set when the service has to stop. A SnapbackError, and a file or
    folder that the system refuses, end with one line on standard error and status 1. What the
    service writes is for its own user alone, unless it says otherwise.
    """
    os.umask(0o077)
    try:
        asyncio.run(_with_signals(main))
    except KeyboardInterrupt:
        return 130
    except Exception as error:  # noqa: BLE001 - the process ends with it
        return _status_of(error)
    return 0


def _status_of(error: Exception | None) -> int:
    """Return the exit status of a service that ended with this error, and print the error."""
    if error is None:
        return 0
    if isinstance(error, OSError) and error.filename is not None:
        error = StorageFailed(
            f"{error.filename}: {error.strerror}",
            next_step="check this path and its rights, and the SNAPBACK_ settings that name it",
        )
    if isinstance(error, SnapbackError):
        sys.stderr.write(f"{error.to_failure()}\n")
    else:
        traceback.print_exception(error)
    return 1


async def _with_signals(main: Main) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.slow_callback_duration = HELD_S
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    error: Exception | None = None
    try:
        await main(stop)
    except Exception as raised:  # noqa: BLE001 - raised below
        error = raised
    if hung := await _hung():
        log.warning("%d calls or tasks hang; the process ends without them", len(hung))
        # asyncio.run and the interpreter would wait for the threads, which may be in a file
        # system whose server is away.
        os._exit(_status_of(error))
    if error is not None:
        raise error


async def _hung() -> set[asyncio.Future[Any]]:
    """Cancel all other tasks; return what has not ended HUNG_S later."""
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    waiting: set[asyncio.Future[Any]] = {*tasks, *calls_under_way()}
    return (await asyncio.wait(waiting, timeout=HUNG_S))[1] if waiting else set()


async def until_stopped(stop: asyncio.Event, *tasks: Awaitable[None]) -> None:
    """Run tasks that have no end until `stop` is set; the first that fails ends all."""
    running = [asyncio.ensure_future(task) for task in tasks]
    waiter = asyncio.ensure_future(stop.wait())
    try:
        done, _ = await asyncio.wait([waiter, *running], return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            if task is not waiter:
                await task
    finally:
        await end_all(waiter, *running, again_s=1.0)


def system_clocks() -> Clocks:
    """Return the clocks of this machine and its boot id."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return Clocks(time.monotonic, time.time, boot)
