"""The arguments and environments of processes, which are hostile input.

The kernel reads them from the memory of a process and takes a lock of that memory (`mmap_lock`) for
it. A process whose file system does not answer can hold that lock without limit, and who reads then
waits as long. So they are read in threads of their own, and a read that hangs is given up.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from snapshot_agent.adapters import procfs
from snapshot_agent.ports import Process
from snapshot_shared.errors import DeadlineExceeded
from snapshot_shared.tasks import Threads

log = logging.getLogger(__name__)

T = TypeVar("T")

HANGS_S = 2.0
"""A read of one process that takes longer hangs, in seconds."""

THREADS = 16
"""How many processes may hang before no other is read."""


class ProcessMemory:
    """Reads arguments and environments. Use it from one event loop."""

    def __init__(self) -> None:
        """Know of no process that hangs."""
        self._threads = Threads(THREADS, "proc")
        # One reads at a time, so that each process that hangs keeps one thread.
        self._turn = asyncio.Lock()
        self._hanging: dict[tuple[int, int], asyncio.Future[Any]] = {}

    async def environments(self, take: Callable[[procfs.Stat, bytes], Iterable[T]]) -> list[T]:
        """Return what is taken from the environments of all running processes, in a thread.

        Processes that hang are left out. DeadlineExceeded when too many do.
        """
        return await self._read("environ", procfs.running, take)

    async def select(self, is_wanted: Callable[[procfs.Stat, bytes], bool]) -> list[procfs.Stat]:
        """Return the running processes that are wanted by their environments.

        As with `environments`.
        """
        return await self.environments(
            lambda process, environment: [process] if is_wanted(process, environment) else []
        )

    async def contents(self, process: Process, name: str) -> bytes:
        """Return `cmdline` or `environ` of a process, empty when it is gone.

        DeadlineExceeded when it hangs.
        """
        found = await self._read(name, lambda: _running(process), lambda _, data: [data])
        if process in self._hanging:
            raise _hang(process.pid)
        return b"".join(found)

    async def _read(
        self,
        name: str,
        processes: Callable[[], Iterable[procfs.Stat]],
        take: Callable[[procfs.Stat, bytes], Iterable[T]],
    ) -> list[T]:
        async with self._turn:
            while True:
                self._hanging = {
                    key: call for key, call in self._hanging.items() if not call.done()
                }
                if len(self._hanging) >= THREADS:
                    raise _hang(*(pid for pid, _ in self._hanging))
                reading = _Reading(name, frozenset(self._hanging))
                call = self._threads.begin(reading.run, processes, take)
                hanging = await _hanging(call, reading)
                if hanging is None:
                    return call.result()
                log.warning("the memory of process %d does not answer, and is left out", hanging[0])
                self._hanging[hanging] = call


class _Reading:
    """Reads one file of several processes, in a thread; `at` is the one that is being read."""

    def __init__(self, name: str, without: frozenset[tuple[int, int]]) -> None:
        self.at: tuple[int, int] | None = None
        self._name = name
        self._without = without

    def run(
        self,
        processes: Callable[[], Iterable[procfs.Stat]],
        take: Callable[[procfs.Stat, bytes], Iterable[T]],
    ) -> list[T]:
        found: list[T] = []
        for process in processes():
            if process.key not in self._without:
                self.at = process.key
                found += take(process, procfs.memory(process.pid, self._name))
        return found


async def _hanging(call: asyncio.Future[Any], reading: _Reading) -> tuple[int, int] | None:
    """Return the process at which a call hangs; None when the call is over."""
    while not call.done():
        before = reading.at
        await asyncio.wait([call], timeout=HANGS_S)
        if before is not None and reading.at == before and not call.done():
            return before
    return None


def _running(process: Process) -> list[procfs.Stat]:
    found = procfs.read(process.pid)
    return [found] if found is not None and found.key == process else []


def _hang(*pids: int) -> DeadlineExceeded:
    return DeadlineExceeded(
        f"the memory of processes {sorted(pids)} did not answer within {HANGS_S:g} s",
        next_step="see what they wait for: /proc/<pid>/task/*/stack",
        budget_s=HANGS_S,
    )
