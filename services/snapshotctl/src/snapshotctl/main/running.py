"""Running a command to its end: interrupts that let it clean up, and errors as exit codes."""

from __future__ import annotations

import asyncio
import os
import signal
import traceback
from collections.abc import Coroutine
from typing import Any

from snapshot_shared.errors import Failure, SnapbackError, failure_of
from snapshotctl.domain.exits import Exit, exit_of
from snapshotctl.ports import Screen

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
SHOW_TRACEBACKS = "SNAPBACK_TRACEBACK"


def example(*lines: str) -> str:
    """Write examples as they stand below the help of a command."""
    shown = "\n".join(f"  {line}" for line in lines)
    return (
        f"\b\nExamples:\n{shown}\n\n"
        "--server, --cluster and --output (see snapshotctl --help) may stand here as well."
    )


def carry_out(work: Coroutine[Any, Any, Exit | None], screen: Screen) -> Exit:
    """Run a command. The first interrupt cancels it, and its own clean-up is waited for."""
    try:
        return asyncio.run(_interruptible(work, screen))
    except BrokenPipeError:
        raise
    except Exception as error:  # noqa: BLE001 - here every error becomes a line and a code
        return failed(error, screen)


def failed(error: Exception, screen: Screen) -> Exit:
    """Show an error; give its exit code."""
    failure = _described(error)
    screen.failure(failure)
    if os.environ.get(SHOW_TRACEBACKS):
        screen.note("".join(traceback.format_exception(error)))
    return exit_of(failure)


def _described(error: Exception) -> Failure:
    if isinstance(error, OSError) and not isinstance(error, TimeoutError):
        where = f": {error.filename}" if error.filename else ""
        return Failure(reason="OSError", message=f"{error.strerror or error}{where}")
    failure = failure_of(error)
    if isinstance(error, SnapbackError | TimeoutError):
        return failure
    return Failure(
        reason=failure.reason,
        message=f"this is a defect of snapshotctl: {failure.message}",
        next_step=f"run it again with {SHOW_TRACEBACKS}=1 and report what it prints",
    )


async def _interruptible(work: Coroutine[Any, Any, Exit | None], screen: Screen) -> Exit:
    loop = asyncio.get_running_loop()
    task = asyncio.ensure_future(work)
    interrupted = False

    def interrupt() -> None:
        nonlocal interrupted
        if interrupted:
            screen.note("cleaning up, please wait")
            return
        interrupted = True
        task.cancel()

    for number in _SIGNALS:
        loop.add_signal_handler(number, interrupt)
    try:
        return await task or Exit.OK
    except asyncio.CancelledError:
        if not interrupted:
            raise
        screen.note("interrupted")
        return Exit.INTERRUPTED
