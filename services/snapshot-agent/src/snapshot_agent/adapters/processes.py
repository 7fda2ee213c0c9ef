"""Containers as local processes, each the leader of a session, watched by pidfd.

They outlive the agent, and a later agent adopts them by pid and start time. It cannot read their
exit codes, because the kernel gives those to the parent alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import shutil
import signal
import stat
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from snapshot_agent.adapters import procfs
from snapshot_agent.adapters.process_memory import HANGS_S, ProcessMemory
from snapshot_agent.domain.control import CONTROL_DIR, ContainerPaths
from snapshot_agent.domain.spec import INIT, INSIDE, ProcessSpec
from snapshot_agent.ports import Process
from snapshot_shared.errors import DeadlineExceeded, InvalidInput, NotFound
from snapshot_shared.files import open_root, opened, remove_tree
from snapshot_shared.tasks import Threads, in_thread, undisturbed

log = logging.getLogger(__name__)

KILLED_WITHIN_S = 10.0
"""How long the kernel may take to end a process after SIGKILL, in seconds."""

_STARTS = Threads(8, "start")
"""Threads that start processes: a working directory may be on a file system that hangs."""

_MARKER_INSIDE = f"{CONTROL_DIR}={INSIDE}/control"

LOOK_AGAIN_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 1.0, 1.0, 1.0)
"""Seconds between two reads of the state of a process that was sent SIGSTOP."""


class _Watched(NamedTuple):
    pidfd: int
    is_child: bool
    end: asyncio.Future[int | None]


class LocalProcesses:
    """The `Launcher` port. Use it from one event loop; `close` leaves the processes running."""

    def __init__(self) -> None:
        """Watch no process before `spawn` or `adopt`."""
        self._watched: dict[Process, _Watched] = {}
        self._memory = ProcessMemory()

    async def spawn(self, spec: ProcessSpec) -> Process:
        # A cancellation waits until the process is watched; else nothing would ever reap it.
        return await undisturbed(self._spawn(spec))

    async def _spawn(self, spec: ProcessSpec) -> Process:
        process, pidfd = await _STARTS.run(_start, spec)
        self._watch(process, pidfd, is_child=True)
        if spec.paths.placeholder is not None:
            await self._waits(process)
        return process

    async def _waits(self, placeholder: Process) -> None:
        """Wait until a placeholder waits: what prepares its namespaces becomes another program.

        Nothing reports that, so it is looked at between waits for the end.
        """
        for wait_s in LOOK_AGAIN_S:
            first = procfs.child_of(placeholder.pid)
            if first is not None and procfs.program_of(first.pid) == INIT:
                return
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await self.ended(placeholder)
                    return

    def adopt(self, process: Process) -> bool:
        if process in self._watched:
            return not self._watched[process].end.done()
        pidfd = procfs.open_pidfd(*process)
        if pidfd is None:
            return False
        self._watch(process, pidfd, is_child=False)
        return procfs.is_alive(*process)

    def _watch(self, process: Process, pidfd: int, *, is_child: bool) -> None:
        loop = asyncio.get_running_loop()
        self._watched[process] = _Watched(pidfd, is_child, loop.create_future())
        loop.add_reader(pidfd, self._on_end, process)

    def _on_end(self, process: Process) -> None:
        watched = self._watched[process]
        asyncio.get_running_loop().remove_reader(watched.pidfd)
        code = _reap(watched.pidfd) if watched.is_child else None
        os.close(watched.pidfd)
        watched.end.set_result(code)

    async def ended(self, process: Process) -> int | None:
        if process not in self._watched and not self.adopt(process):
            return None
        return await asyncio.shield(self._watched[process].end)

    async def terminate(
        self, process: Process | None, where: ContainerPaths | None, grace_s: float
    ) -> None:
        if grace_s > 0 and process is not None and procfs.is_alive(*process):
            family = procfs.family_of(*process)
            for member in family:
                procfs.send(member, signal.SIGCONT)
            # As in a container, where the first process alone is asked, and ends the others.
            apart = await self._begun_apart(process, family) if where is not None else []
            for member in apart or family:
                procfs.send(member, signal.SIGTERM)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(grace_s):
                    await self.ended(process)
        # How long the search takes depends on other processes: it comes last, and is not counted.
        # A dying process may have forked just before, so list again until none is left.
        left_s = KILLED_WITHIN_S
        while rest := _family(process) or await self._outside(where):
            begun = time.monotonic()
            for member in rest:
                procfs.send(member, signal.SIGKILL)
            async with asyncio.timeout(left_s):
                await asyncio.gather(*(ended(member) for member in rest))
            left_s -= time.monotonic() - begun
        if process is not None:
            async with asyncio.timeout(left_s):
                await self.ended(process)

    async def _begun_apart(
        self, process: Process, family: Sequence[procfs.Stat]
    ) -> list[procfs.Stat]:
        """Return the children of a process that are the first ones of namespaces of their own.

        Empty when that cannot be read soon.
        """
        with contextlib.suppress(DeadlineExceeded, TimeoutError):
            async with asyncio.timeout(HANGS_S):
                return await self._memory.select(
                    lambda _, environment: procfs.carries(environment, _MARKER_INSIDE),
                    lambda: (each for each in family if each.parent == process.pid),
                )
        return []

    async def _outside(self, where: ContainerPaths | None) -> list[procfs.Stat]:
        """Return the processes that have the environment of a container."""
        if where is None:
            return []
        return await self._memory.select(lambda each, environment: _is_of(each, environment, where))

    async def find(self, where: ContainerPaths) -> Process | None:
        marked = await self._memory.select(
            lambda _, environment: procfs.carries(environment, where.marker)
        )
        leaders = (Process(*each.key) for each in marked if each.session == each.pid)
        return next(leaders, None)

    async def running(self, where: Path) -> list[str]:
        prefix = os.fsencode(f"{CONTROL_DIR}={where}/")
        names = await self._memory.environments(
            lambda _, environment: (
                os.fsdecode(entry.removeprefix(prefix).partition(b"/")[0])
                for entry in environment.split(b"\0")
                if entry.startswith(prefix)
            )
        )
        return sorted(set(names))

    async def folders(self, where: Path) -> list[str]:
        return await in_thread(_folders, where)

    async def remove(self, where: Path) -> None:
        await in_thread(_remove, where)

    def close(self) -> None:
        """Stop watching."""
        for watched in self._watched.values():
            if not watched.end.done():
                asyncio.get_running_loop().remove_reader(watched.pidfd)
                os.close(watched.pidfd)
                watched.end.cancel()
        self._watched.clear()


def _start(spec: ProcessSpec) -> tuple[Process, int]:
    """Start a process; return it with a pidfd, which the caller closes."""
    _require_startable(spec)
    _make_folders(spec.paths)
    with opened(_open_log(spec.paths.log)) as output:
        try:
            child = subprocess.Popen(
                [*spec.before, *spec.argv],
                env=spec.env,
                cwd=spec.cwd,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                # That of a container runtime; the agent itself has 077.
                umask=0o022,
            )
        except OSError as error:
            raise _not_startable(spec, error) from error
    # It is reaped by its pidfd; a return code keeps Popen from doing so.
    child.returncode = 0
    found = procfs.read(child.pid)
    return Process(child.pid, found.start if found else 0), os.pidfd_open(child.pid)


def _folders(where: Path) -> list[str]:
    try:
        with os.scandir(where) as entries:
            return sorted(entry.name for entry in entries if entry.is_dir(follow_symlinks=False))
    except FileNotFoundError:
        return []


def _remove(where: Path) -> None:
    with contextlib.suppress(FileNotFoundError), opened(open_root(where.parent)) as parent:
        remove_tree(parent, where.name, durable=False)


def _require_startable(spec: ProcessSpec) -> None:
    if not spec.cwd.is_dir():
        raise InvalidInput(
            f"the working directory {spec.cwd} does not exist on this node",
            next_step="correct workingDir, or SNAPBACK_WORKDIR of the agent",
        )
    # As execvp does it: a name with a slash is taken from the working directory.
    name = spec.argv[0]
    program = str(spec.cwd / name) if "/" in name else name
    if shutil.which(program, path=spec.env["PATH"]) is None:
        raise NotFound(
            f"program {name[:200]!r} is not on this node",
            next_step="correct the container's command or install the program",
        )


def _open_log(log: Path) -> int:
    """Open a log for appending. InvalidInput when it is no regular file."""
    # O_NONBLOCK: to open a FIFO that a worker has put there would wait for a reader.
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        fd = os.open(log, flags, 0o600)
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.ENXIO):
            raise
    else:
        if stat.S_ISREG(os.fstat(fd).st_mode):
            return fd
        os.close(fd)
    raise InvalidInput(f"{log} is no plain file", next_step="remove it")


def _make_folders(where: ContainerPaths) -> None:
    where.home.mkdir(mode=0o700, parents=True, exist_ok=True)
    where.sockets.mkdir(mode=0o700, parents=True, exist_ok=True)
    if where.placeholder is not None:
        where.placeholder.mkdir(mode=0o700, exist_ok=True)


def _not_startable(spec: ProcessSpec, error: OSError) -> InvalidInput:
    reason = "too long" if error.errno == errno.E2BIG else error.strerror
    return InvalidInput(f"{spec.argv[0][:200]!r} cannot be started: {reason}")


def _reap(pidfd: int) -> int | None:
    try:
        found = os.waitid(os.P_PIDFD, pidfd, os.WEXITED)
    except ChildProcessError:
        return None
    if found is None:
        return None
    return found.si_status if found.si_code == os.CLD_EXITED else 128 + found.si_status


def _family(process: Process | None) -> list[procfs.Stat]:
    return procfs.family_of(*process) if process else []


def _is_of(process: procfs.Stat, environment: bytes, where: ContainerPaths) -> bool:
    """Whether a process has the environment of a container.

    A worker in namespaces of its own is found by its control directory when nothing else is left.
    """
    return procfs.carries(environment, where.marker) or (
        procfs.carries(environment, _MARKER_INSIDE) and _has_control(process.pid, where)
    )


def _has_control(pid: int, where: ContainerPaths) -> bool:
    try:
        return Path(f"/proc/{pid}/root{INSIDE}/control").samefile(where.control)
    except OSError:
        return False


async def ended(process: procfs.Stat) -> None:
    """Wait for the end of a process."""
    with procfs.opened(process.pid, process.start) as pidfd:
        if pidfd is None:
            return
        loop = asyncio.get_running_loop()
        end: asyncio.Future[None] = loop.create_future()
        loop.add_reader(pidfd, _settle, end)
        try:
            await end
        finally:
            loop.remove_reader(pidfd)


def _settle(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


async def stop(members: Callable[[], Sequence[procfs.Stat]]) -> None:
    """Send SIGSTOP to processes, and return when every thread of theirs has stopped or ended.

    `members` lists them; it is asked again until it returns no process that was not found stopped
    before, because a process can fork until it has stopped. DeadlineExceeded after about five
    seconds.
    """
    found: Sequence[procfs.Stat] = ()
    running: set[int] = set()
    halted: set[tuple[int, int]] = set()
    for wait_s in LOOK_AGAIN_S:
        found = members()
        if {member.key for member in found} <= halted:
            return
        for member in found:
            procfs.send(member, signal.SIGSTOP)
        # The kernel reports a stop to the parent alone, so the state is read again between waits
        # for the end, which a pidfd does report.
        running = {member.pid for member in found if not procfs.has_stopped(member)}
        halted = {member.key for member in found if member.pid not in running}
        for member in found:
            # A parent that waits in vfork cannot stop before this child calls exec or ends.
            if member.parent in running and member.pid not in running:
                procfs.send(member, signal.SIGCONT)
                halted.discard(member.key)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                await asyncio.gather(*(ended(each) for each in found if each.pid in running))
    raise DeadlineExceeded(
        f"processes {sorted(running)} did not stop within {sum(LOOK_AGAIN_S):.0f} s",
        next_step="see what their threads wait for: /proc/<pid>/task/*/stack",
        step="freeze",
        budget_s=sum(LOOK_AGAIN_S),
    )
