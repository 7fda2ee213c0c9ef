"""The arguments and environments of processes, which are hostile input.

The kernel reads them from the memory of a process and takes a lock of that memory (`mmap_lock`) for
it. A process whose file system does not answer can hold that lock without limit, and who reads then
waits as long. So they are read in threads of their own, and a read that hangs is given up.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from typing import Any, Generic, TypeVar

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
        self._unfinished: list[_Reading[Any]] = []

    async def environments(
        self,
        take: Callable[[procfs.Stat, bytes], Iterable[T]],
        processes: Callable[[], Iterable[procfs.Stat]] = procfs.running,
    ) -> list[T]:
        """Return what is taken from the environments of processes, in a thread.

        Processes that hang are left out. DeadlineExceeded when too many do.
        """
        return await self._read("environ", processes, take)

    async def select(
        self,
        is_wanted: Callable[[procfs.Stat, bytes], bool],
        processes: Callable[[], Iterable[procfs.Stat]] = procfs.running,
    ) -> list[procfs.Stat]:
        """Return the processes that are wanted by their environments.

        As with `environments`.
        """
        return await self.environments(
            lambda process, environment: [process] if is_wanted(process, environment) else [],
            processes,
        )

    async def contents(self, process: Process, name: str) -> bytes:
        """Return `cmdline` or `environ` of a process, empty when it is gone.

        DeadlineExceeded when it hangs.
        """
        found = await self._read(name, lambda: _running(process), lambda _, data: [data])
        if any(each.at == process for each in self._unfinished):
            raise _no_answer([process])
        return b"".join(found)

    async def _read(
        self,
        name: str,
        processes: Callable[[], Iterable[procfs.Stat]],
        take: Callable[[procfs.Stat, bytes], Iterable[T]],
    ) -> list[T]:
        async with self._turn:
            while True:
                # A read that was cancelled may yet end: its process need not hang.
                self._unfinished = [each for each in self._unfinished if not await each.ends()]
                left_out = [each.at for each in self._unfinished if each.at is not None]
                if len(self._unfinished) >= THREADS:
                    raise _no_answer(left_out)
                reading = _Reading(self._threads, name, frozenset(left_out), processes, take)
                self._unfinished.append(reading)
                if await reading.ends():
                    self._unfinished.remove(reading)
                    return reading.call.result()
                if reading.at is None:
                    raise _no_answer([])


class _Reading(Generic[T]):
    """Reads one file of several processes, in a thread; `at` is the one that is being read."""

    def __init__(
        self,
        threads: Threads,
        name: str,
        left_out: frozenset[tuple[int, int]],
        processes: Callable[[], Iterable[procfs.Stat]],
        take: Callable[[procfs.Stat, bytes], Iterable[T]],
    ) -> None:
        self.at: tuple[int, int] | None = None
        self._name = name
        self._left_out = left_out
        self._hangs = self._is_given_up = False
        self.call = threads.begin(self._run, processes, take)

    def _run(
        self,
        processes: Callable[[], Iterable[procfs.Stat]],
        take: Callable[[procfs.Stat, bytes], Iterable[T]],
    ) -> list[T]:
        found: list[T] = []
        for process in processes():
            # A later read reads the others, and keeps a thread for each of them that hangs.
            if self._is_given_up:
                break
            if process.key not in self._left_out:
                self.at = process.key
                found += take(process, procfs.memory(process.pid, self._name))
        return found

    async def ends(self) -> bool:
        """Return whether the call ends; it is given up when it hangs, or this is cancelled."""
        try:
            while not (self.call.done() or self._hangs):
                before = self.at
                await asyncio.wait([self.call], timeout=HANGS_S)
                self._hangs = self.at == before and not self.call.done()
                if self._hangs and before is not None:
                    pid, _ = before
                    log.warning("the memory of process %d does not answer, and is left out", pid)
        finally:
            self._is_given_up = True
        return self.call.done()


def _running(process: Process) -> list[procfs.Stat]:
    found = procfs.read(process.pid)
    return [found] if found is not None and found.key == process else []


def _no_answer(processes: Iterable[tuple[int, int]]) -> DeadlineExceeded:
    pids = sorted(pid for pid, _ in processes)
    what = f"the memory of processes {pids} did not answer" if pids else "processes were not listed"
    return DeadlineExceeded(
        f"{what} within {HANGS_S:g} s",
        next_step="see what they wait for: /proc/<pid>/task/*/stack",
        budget_s=HANGS_S,
    )
