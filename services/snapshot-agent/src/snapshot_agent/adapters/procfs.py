"""Processes as /proc shows them. The guard uses this module, so it imports little.

The kernel gives the pid of an ended process to another one. So every signal goes through a pidfd
that was opened before the start time was compared.
"""

# /proc is read by formatted names, hundreds at a time; pathlib would take longer.
# ruff: noqa: PTH123, PTH208

from __future__ import annotations

import contextlib
import errno
import os
import signal
from collections.abc import Iterator
from pathlib import Path

MEMORY_BYTES = 6 * 1024 * 1024
"""How much the kernel lets arguments and environment be at exec, together. A process can let them
be more later (PR_SET_MM_MAP), which is not read."""


class Stat:
    """One line of /proc/<pid>/stat. `start` is field 22, in clock ticks since boot."""

    __slots__ = ("parent", "pid", "session", "start", "state")

    def __init__(self, pid: int, state: str, parent: int, session: int, start: int) -> None:
        """Use the values of one line."""
        self.pid = pid
        self.state = state
        self.parent = parent
        self.session = session
        self.start = start

    @property
    def key(self) -> tuple[int, int]:
        """What no other process of this boot has: pid and start."""
        return self.pid, self.start

    @property
    def is_running(self) -> bool:
        """Whether the process has not ended; a zombie has."""
        return self.state not in "ZXx"


def read(pid: int) -> Stat | None:
    """Read one process; None when it is gone."""
    return _stat(f"/proc/{pid}/stat", pid)


def _stat(path: str, pid: int) -> Stat | None:
    try:
        with open(path, "rb") as file:
            line = file.read()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The command is in parentheses and may contain any character, parentheses included.
    try:
        fields = line[line.rindex(b")") + 2 :].split()
        return Stat(pid, fields[0].decode(), *(int(fields[at]) for at in (1, 3, 19)))
    except (ValueError, IndexError):
        from snapshot_shared.proc import malformed  # noqa: PLC0415 - the guard imports little

        malformed(path, line.decode(errors="replace"))


def is_alive(pid: int, start: int) -> bool:
    """Whether the process with this pid and start time runs."""
    found = read(pid)
    return found is not None and found.start == start and found.is_running


def running() -> Iterator[Stat]:
    """Yield every process that runs."""
    for name in os.listdir("/proc"):
        if name.isdigit() and (found := read(int(name))) and found.is_running:
            yield found


def family_of(leader: int, start: int) -> list[Stat]:
    """Return this process, the running ones of the session it leads, and what descends from them.

    The first process of a container adopts its orphans, which may lead sessions of their own.
    """
    # The kernel gives no pid again while a session has its number, so the session is still this
    # one unless another process has the pid.
    found = read(leader)
    if found is not None and found.start != start:
        return []
    children: dict[int, list[Stat]] = {}
    family: dict[int, Stat] = {}
    for process in running():
        children.setdefault(process.parent, []).append(process)
        if leader in (process.session, process.pid):
            family[process.pid] = process
    unseen = list(family)
    while unseen:
        for child in children.get(unseen.pop(), ()):
            if child.pid not in family:
                family[child.pid] = child
                unseen.append(child.pid)
    return list(family.values())


def child_of(parent: int) -> Stat | None:
    """Return a child of a process, of several the first; None when it has none."""
    children = [process for process in running() if process.parent == parent]
    return min(children, key=lambda child: child.start, default=None)


def contents(pid: int, name: str) -> bytes:
    """Return a file of a process. FileNotFoundError or ProcessLookupError: it is gone, or ends."""
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except OSError as error:
        # So it is with the mounts of a process that has left its namespaces.
        if error.errno == errno.EINVAL:
            raise ProcessLookupError(error.errno, error.strerror, error.filename) from None
        raise


def program_of(pid: int) -> str:
    """Return the name of the program that a process runs; empty when the process is gone."""
    try:
        return Path(f"/proc/{pid}/exe").readlink().name
    except (FileNotFoundError, ProcessLookupError):
        return ""


def cwd_of(pid: int) -> Path | None:
    """Return the working directory of a process; None when the process is gone."""
    try:
        return Path(f"/proc/{pid}/cwd").readlink()
    except (FileNotFoundError, ProcessLookupError):
        return None


def child_in(parent: int, inside: int) -> Stat | None:
    """Return the child of a process that has the pid `inside` in the pid namespace of its parent.

    None when there is none.
    """
    depth = len(_namespace_pids(parent))
    for process in running():
        if process.parent == parent and _namespace_pids(process.pid)[depth - 1 : depth] == [inside]:
            return process
    return None


def _namespace_pids(pid: int) -> list[int]:
    """Return the pids of a process in its namespaces, outermost first; empty when it is gone."""
    try:
        with open(f"/proc/{pid}/status", "rb") as file:
            for line in file:
                if line.startswith(b"NSpid:"):
                    return [int(word) for word in line.split()[1:]]
    except (FileNotFoundError, ProcessLookupError):
        pass
    return []


def carrying(entry: str) -> list[Stat]:
    """Return the running processes that were started with this entry in their environment.

    It hangs with any process that does (see `memory`).
    """
    return [process for process in running() if carries(memory(process.pid, "environ"), entry)]


def carries(environment: bytes, entry: str) -> bool:
    """Whether an environment has an entry."""
    return b"\0" + os.fsencode(entry) + b"\0" in b"\0" + environment


def memory(pid: int, name: str) -> bytes:
    """Return `cmdline` or `environ` of a process; empty when it is gone or may not be read.

    Both are memory of the process, where it can hold readers up without limit.
    """
    try:
        with open(f"/proc/{pid}/{name}", "rb") as file:
            return file.read(MEMORY_BYTES)
    except (FileNotFoundError, PermissionError, ProcessLookupError):
        return b""


def has_stopped(process: Stat) -> bool:
    """Whether every thread of a process has stopped or ended."""
    try:
        threads = os.listdir(f"/proc/{process.pid}/task")
    except (FileNotFoundError, ProcessLookupError):
        return True
    for thread in threads:
        found = _stat(f"/proc/{process.pid}/task/{thread}/stat", int(thread))
        if found is not None and found.state not in "TtZXx":
            return False
    return True


@contextlib.contextmanager
def opened(pid: int, start: int) -> Iterator[int | None]:
    """Yield a pidfd of this process; None when it is gone."""
    fd = open_pidfd(pid, start)
    try:
        yield fd
    finally:
        if fd is not None:
            os.close(fd)


def open_pidfd(pid: int, start: int) -> int | None:
    """Open a pidfd of this process; None when it is gone. A zombie still has one."""
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return None
    found = read(pid)
    if found is None or found.start != start:
        os.close(fd)
        return None
    return fd


def send(process: Stat, number: int) -> None:
    """Send a signal to this process; one that has ended is no error."""
    with opened(process.pid, process.start) as fd:
        if fd is not None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(fd, number)
