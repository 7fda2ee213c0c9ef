"""What every service's `main` does around its own parts: signals, tasks, an orderly end."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import time
from collections.abc import Awaitable, Callable
from importlib.metadata import version
from pathlib import Path

from snapshot_shared.clocks import Clocks
from snapshot_shared.errors import SnapbackError, StorageFailed
from snapshot_shared.tasks import end_all

log = logging.getLogger(__name__)

VERSION = version("snapback-shared")
"""The version of the product: its packages are released together."""

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
    except SnapbackError as error:
        sys.stderr.write(f"{error.to_failure()}\n")
        return 1
    except OSError as error:
        if error.filename is None:
            raise
        refused = StorageFailed(
            f"{error.filename}: {error.strerror}",
            next_step="check this path and its rights, and the SNAPBACK_ settings that name it",
        )
        sys.stderr.write(f"{refused.to_failure()}\n")
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


async def _with_signals(main: Main) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    await main(stop)


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
