"""Children that do one part of a request, which their parent can end at any moment.

A child that carries out a request has a folder for what CRIU writes meanwhile, named by its pid.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn

from snapback_client.frames import error_of
from snapshot_agent.adapters import procfs
from snapshot_agent.helper import syscalls
from snapshot_agent.helper.caller import Caller
from snapshot_shared.codec import decode_json, encode_json
from snapshot_shared.errors import (
    Aborted,
    DeadlineExceeded,
    Failure,
    Internal,
    SnapbackError,
)

LOOK_S = 0.1
"""How often progress is reported, in seconds: the agent has the disk write what was added."""

MAX_FAILURE_BYTES = 64 * 1024

KDAT = Path("/run/criu.kdat.tmp")
"""CRIU does not write its cache of the kernel's features while this is there."""

_FOLDERS = KDAT.parent
_FOLDER = "criu-"


class ChildKilled(SnapbackError):
    """A process of the helper was killed while it worked, for example for lack of memory."""

    default_next_step = "look at the kernel's log of this node, and raise the limits of memory"


@contextlib.contextmanager
def work_folder() -> Iterator[Path]:
    """Make a folder for a block, in which a child of the helper has CRIU work."""
    prefix = f"{_FOLDER}{os.getpid()}-"
    with tempfile.TemporaryDirectory(prefix=prefix, dir=_FOLDERS) as folder:
        yield Path(folder)


def remove_work_folders() -> None:
    """Remove the folders of children that were killed, and the rest of CRIU's cache."""
    KDAT.unlink(missing_ok=True)
    for folder in _FOLDERS.glob(f"{_FOLDER}*-*"):
        pid = folder.name.removeprefix(_FOLDER).partition("-")[0]
        found = procfs.read(int(pid)) if pid.isdigit() else None
        if found is None or not found.is_running:
            shutil.rmtree(folder, ignore_errors=True)


class Watch:
    """Until when a request may take, and whether its agent still wants it."""

    def __init__(self, caller: Caller, what: str, within_s: float) -> None:
        """`what` is the name of the work in errors; the time begins now."""
        self._caller = caller
        self._what = what
        self._within_s = within_s
        self._limit = time.monotonic() + within_s

    @property
    def left_s(self) -> float:
        """How many seconds are left, never less than none."""
        return max(0.0, self._limit - time.monotonic())

    def wait(self, *wanted: int, look: Callable[[], None] = lambda: None) -> set[int]:
        """Wait until one of these descriptors is readable; return those that are.

        `look` is called now and then. Aborted, DeadlineExceeded.
        """
        poll = select.poll()
        for fd in {*wanted, *self._caller.sources}:
            poll.register(fd, select.POLLIN)
        while True:
            left = self._limit - time.monotonic()
            if left <= 0:
                raise DeadlineExceeded(
                    f"{self._what} took longer than {self._within_s:g} s",
                    step=self._what,
                    budget_s=self._within_s,
                )
            ready = {fd for fd, _ in poll.poll(min(left, LOOK_S) * 1000)}
            if found := ready.intersection(wanted):
                return found
            if ready:
                raise Aborted(f"{self._what} was given up")
            look()


def in_child(work: Callable[[], None], watch: Watch) -> None:
    """Do some work in a child, which is killed when the time is over or its agent is gone."""
    results, result = os.pipe()
    child = os.fork()
    if child == 0:
        _end(work, result)
    os.close(result)
    pidfd = os.pidfd_open(child)
    try:
        watch.wait(pidfd)
    finally:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        os.close(pidfd)
        _, status = os.waitpid(child, 0)
        said = os.read(results, MAX_FAILURE_BYTES)
        os.close(results)
    if said:
        raise error_of(decode_json(said, Failure, limit=MAX_FAILURE_BYTES))
    if status:
        raise ChildKilled(f"a child of the helper ended with {os.waitstatus_to_exitcode(status)}")


def _end(work: Callable[[], None], result: int) -> NoReturn:
    status = 1
    try:
        syscalls.end_with_parent()
        work()
        status = 0
    except SnapbackError as error:
        os.write(result, encode_json(error.to_failure()))
    except Exception as error:  # noqa: BLE001 - the parent raises it
        os.write(result, encode_json(Internal(f"{type(error).__name__}: {error}").to_failure()))
    finally:
        os._exit(status)
