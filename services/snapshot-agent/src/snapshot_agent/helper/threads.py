"""Settings of threads that CRIU 4.2 neither dumps nor restores: CPUs, timer slack, I/O priority.

Engines bind their threads to CPUs, one each, and are slow if two share one. So the settings are
read before a dump, and set again from outside when a process was restored. CPUs are recorded only
if the thread has fewer than its container: those of the new container may be others.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from snapshot_agent.adapters import procfs
from snapshot_agent.domain.criu_seen import SeenTree
from snapshot_agent.domain.criu_source import MAX_THREADS, SourceThread
from snapshot_agent.helper import observe

log = logging.getLogger(__name__)

_GONE = (FileNotFoundError, ProcessLookupError)
_DEFAULT_SLACK_NS = 50_000
_WHO_PROCESS = 1
_IOPRIO = {"x86_64": (251, 252), "aarch64": (30, 31)}
"""The numbers of ioprio_set(2) and ioprio_get(2), which the C library has no functions for."""

_libc = ctypes.CDLL(None, use_errno=True)


def settings(seen: SeenTree, cgroups: Path) -> list[SourceThread]:
    """Return the threads of a tree whose settings CRIU would lose.

    `cgroups` is where the cgroup file system of the node is mounted.
    """
    root = seen.root
    listed = Path(f"/proc/{root.pid}/cgroup").read_text()
    allowed = observe.allowed_cpus(root.pid, listed, cgroups)
    found = []
    for process in seen.processes:
        for tid, status in _threads(process.pid):
            inside = _inside(status, len(root.pids))
            with contextlib.suppress(*_GONE):
                thread = _thread(tid, inside, status["Cpus_allowed_list"], allowed)
                if thread != SourceThread(tid=inside):
                    found.append(thread)
    if len(found) > MAX_THREADS:
        log.warning("the settings of %d threads are not kept", len(found) - MAX_THREADS)
    return found[:MAX_THREADS]


def _thread(tid: int, inside: int, cpus: str, allowed: set[int]) -> SourceThread:
    slack = int(Path(f"/proc/{tid}/timerslack_ns").read_text())
    return SourceThread(
        tid=inside,
        cpus=cpus if observe.numbers(cpus) < allowed else "",
        timer_slack_ns=0 if slack == _DEFAULT_SLACK_NS else slack,
        io_priority=_io_priority(tid),
    )


def give_back(root: procfs.Stat, threads: Sequence[SourceThread]) -> None:
    """Set the settings of the source again, for the threads of a restored process and its family.

    A setting that is not possible here, such as a CPU that the container lacks, stays as it is.
    """
    if not threads:
        return
    wanted = {thread.tid: thread for thread in threads}
    try:
        depth = len(observe.fields(f"/proc/{root.pid}/status")["NSpid"].split())
    except _GONE:
        return
    for process in procfs.family_of(root.pid, root.start):
        for tid, status in _threads(process.pid):
            if thread := wanted.get(_inside(status, depth)):
                try:
                    _give_back(tid, thread)
                except _GONE:
                    continue
                except OSError as error:
                    log.warning("thread %d lacks a setting of its source: %s", thread.tid, error)


def _give_back(tid: int, thread: SourceThread) -> None:
    if thread.timer_slack_ns:
        Path(f"/proc/{tid}/timerslack_ns").write_text(str(thread.timer_slack_ns))
    if thread.io_priority:
        _set_io_priority(tid, thread.io_priority)
    cpus = observe.numbers(thread.cpus)
    if cpus and cpus <= os.sched_getaffinity(tid):
        os.sched_setaffinity(tid, cpus)
    elif cpus:
        log.warning("thread %d had CPUs %s, the container lacks some", thread.tid, thread.cpus)


def _threads(pid: int) -> Iterator[tuple[int, Mapping[str, str]]]:
    """Yield the threads of a process, each with its /proc/<tid>/status."""
    with contextlib.suppress(*_GONE):
        for tid in map(int, os.listdir(f"/proc/{pid}/task")):  # noqa: PTH208 - names alone
            with contextlib.suppress(*_GONE):
                yield tid, observe.fields(f"/proc/{tid}/status")


def _inside(status: Mapping[str, str], depth: int) -> int:
    """Return the id of a thread in the pid namespace at a depth."""
    return int(status["NSpid"].split()[depth - 1])


def _io_priority(tid: int) -> int:
    _, number = _IOPRIO.get(os.uname().machine, (0, 0))
    return max(0, _libc.syscall(number, _WHO_PROCESS, tid)) if number else 0


def _set_io_priority(tid: int, priority: int) -> None:
    number, _ = _IOPRIO.get(os.uname().machine, (0, 0))
    if number and _libc.syscall(number, _WHO_PROCESS, tid, priority) < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"ioprio_set: {os.strerror(code)}")
