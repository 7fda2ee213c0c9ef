"""Processes: started in sessions of their own, waited for by pidfd, found by their run id.

A pid may be used again by another process at any time. A recorded process is therefore identified
by its pid and start time, and a signal goes through a pidfd whose process was examined after the
pidfd was opened.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from snapshot_shared.proc import stat_words
from snapshot_shared.tasks import readable
from snapshotctl.domain.cluster import ProcessRecord, RunProcess

RUN_VARIABLE = "SNAPBACK_RUN"
_SEED_VARIABLE = "SNAPBACK_NATS_CREDENTIALS"
_REAPERS = ("init", "systemd")
"""Programs that adopt what others left behind; that of a session of a user is a systemd, too."""
_ENVIRON_BYTES = 1024 * 1024
_PROC = Path("/proc")


def ending_with_us() -> list[str]:
    """Return words before a command line that end the program with this process, if there are any.

    It is for programs that are ended in any case: this process may be killed.
    """
    setpriv = shutil.which("setpriv")
    return [setpriv, "--pdeathsig", "TERM"] if setpriv else []


def spawn(
    name: str, arguments: Sequence[str], environment: Mapping[str, str], log: Path
) -> ProcessRecord:
    """Start a program in a new session, with its output appended to a log."""
    log.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    append = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    pid = os.posix_spawn(
        arguments[0],
        list(arguments),
        dict(environment),
        file_actions=[
            (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
            (os.POSIX_SPAWN_OPEN, 1, str(log), append, 0o600),
            (os.POSIX_SPAWN_DUP2, 1, 2),
        ],
        # A session of its own: the terminal's Ctrl-C must reach us alone.
        setsid=True,
        # Python ignores SIGPIPE, and what is ignored is inherited.
        setsigdef=[signal.SIGPIPE, signal.SIGINT, signal.SIGQUIT],
    )
    return ProcessRecord(name=name, pid=pid, started=started(pid) or 0, log=str(log))


def started(pid: int) -> int | None:
    """Return a process's start time in ticks since boot; None if it ended or is a zombie."""
    try:
        line = (_PROC / str(pid) / "stat").read_bytes()
    except OSError:
        return None
    words = stat_words(line, f"/proc/{pid}/stat")
    return None if words[0] in (b"Z", b"X") else int(words[19])


def is_alive(record: ProcessRecord) -> bool:
    """Whether exactly this process still runs."""
    return started(record.pid) == record.started


def this_process(name: str) -> ProcessRecord:
    """Return the record of the current process."""
    return ProcessRecord(name=name, pid=os.getpid(), started=started(os.getpid()) or 0)


def boot_id() -> str:
    """Return the id of this boot; pids and start times mean nothing after another."""
    return (_PROC / "sys/kernel/random/boot_id").read_text("ascii").strip()


def members(run: str | None = None) -> list[RunProcess]:
    """Return the processes of this user with a run id, or with exactly this one.

    The current process and its ancestors are left out.
    """
    # A shell or a test that started this command may have the same run id.
    spared = set(_ancestors())
    return [
        found
        for entry in _PROC.iterdir()
        if entry.name.isdigit()
        and int(entry.name) not in spared
        and (found := _member(int(entry.name))) is not None
        and run in (None, found.run)
    ]


def supervised(found: Iterable[RunProcess]) -> frozenset[str]:
    """Return the runs of which a process is a child of a living program of no run.

    What a program has left behind when it ended is adopted by the first process of the machine or
    of the user's session instead.
    """
    listed = list(found)
    own = {member.pid for member in listed}
    return frozenset(
        member.run
        for member in listed
        if (parent := _parent(member.pid)) is not None and parent not in own and not _adopts(parent)
    )


def state_folders(found: Iterable[RunProcess]) -> set[Path]:
    """Return the state folders of the local clusters that processes belong to.

    The nkey seed of a service is in `<state folder>/keys`.
    """
    seeds = (environment_of(member.pid).get(_SEED_VARIABLE, "") for member in found)
    return {Path(seed).parent.parent for seed in seeds if seed.startswith("/")}


def descendants(pid: int) -> list[int]:
    """Return what a process has started, directly or not: the nearest first, then by age."""
    children: dict[int, list[int]] = {}
    for entry in _PROC.iterdir():
        if entry.name.isdigit() and (parent := _parent(int(entry.name))) is not None:
            children.setdefault(parent, []).append(int(entry.name))
    found: list[int] = []
    for each in (generation := [pid]):
        young = sorted(children.get(each, ()), key=lambda child: (started(child) or 0, child))
        generation += young
        found += young
    return found


def command_of(pid: int) -> str:
    """Return the name of a process as the kernel has it, of 15 bytes; empty when it is gone."""
    try:
        return (_PROC / str(pid) / "comm").read_text("utf-8", "replace").strip()
    except OSError:
        return ""


def _adopts(pid: int) -> bool:
    return pid == 1 or command_of(pid) in _REAPERS


def _parent(pid: int) -> int | None:
    try:
        line = (_PROC / str(pid) / "stat").read_bytes()
    except OSError:
        return None
    return int(stat_words(line, f"/proc/{pid}/stat")[1])


def _member(pid: int) -> RunProcess | None:
    folder = _PROC / str(pid)
    try:
        if folder.stat().st_uid != os.getuid():
            return None
        command = (folder / "cmdline").read_bytes()[:200].replace(b"\0", b" ")
    except OSError:
        return None
    run = environment_of(pid).get(RUN_VARIABLE)
    return RunProcess(pid, run, command.decode("utf-8", "replace").strip()) if run else None


def environment_of(pid: int) -> dict[str, str]:
    """Return a process's environment; empty when it is gone."""
    try:
        with (_PROC / str(pid) / "environ").open("rb") as file:
            data = file.read(_ENVIRON_BYTES)
    except OSError:
        return {}
    pairs = [item.decode("utf-8", "replace").partition("=") for item in data.split(b"\0")]
    # Of a name that is there twice the first one counts, as for getenv.
    return {name: value for name, _, value in reversed(pairs) if name}


def members_on(node: str, run: str) -> list[tuple[str | None, RunProcess]]:
    """Return the processes of a run that belong to a node, each with its pod if it has one."""
    found: list[tuple[str | None, RunProcess]] = []
    for member in members(run):
        environment = environment_of(member.pid)
        if node in (environment.get("SNAPBACK_NODE"), environment.get("NODE_NAME")):
            found.append((environment.get("POD_NAME"), member))
    return found


def _ancestors() -> Iterator[int]:
    pid: int | None = os.getpid()
    while pid:
        yield pid
        pid = _parent(pid)


class ProcessHandle:
    """A process by its pidfd, which never refers to another one."""

    def __init__(self, pid: int, fd: int) -> None:
        """Use the pidfd `fd` of `pid`; `opened` and `opened_member` make one."""
        self.pid = pid
        self._fd = fd

    def send(self, number: signal.Signals) -> None:
        """Send a signal; a process that is gone is no error."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._fd, number)

    async def ended(self) -> None:
        """Return when the process has ended; collect it when it is our child."""
        await readable(self._fd)
        with contextlib.suppress(ChildProcessError):
            os.waitid(os.P_PIDFD, self._fd, os.WEXITED | os.WNOHANG)  # noqa: ASYNC222 - does not wait

    def close(self) -> None:
        """Close the pidfd."""
        os.close(self._fd)


def opened(record: ProcessRecord) -> ProcessHandle | None:
    """Return the handle of a recorded process; None when it is gone."""
    return _opened(record.pid, lambda: is_alive(record))


def opened_member(member: RunProcess) -> ProcessHandle | None:
    """Return the handle of a process with a run id; None when it is gone."""
    return _opened(member.pid, lambda: _member(member.pid) == member)


def _opened(pid: int, is_meant: Callable[[], bool]) -> ProcessHandle | None:
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return None
    # From here on the pid cannot become that of another process.
    if is_meant():
        return ProcessHandle(pid, fd)
    os.close(fd)
    return None


def reload(record: ProcessRecord) -> None:
    """Send SIGHUP to a process to have it read its configuration again, unless it is gone."""
    if handle := opened(record):
        handle.send(signal.SIGHUP)
        handle.close()


async def end(handles: Iterable[ProcessHandle], *, grace_s: float) -> None:
    """Send SIGTERM, and SIGKILL to what runs after the grace; wait, and close all handles.

    Without a grace SIGKILL is sent at once.
    """
    waiting = list(handles)
    try:
        if grace_s > 0:
            for handle in waiting:
                handle.send(signal.SIGTERM)
            if await _all_ended(waiting, grace_s):
                return
        for handle in waiting:
            handle.send(signal.SIGKILL)
        # A killed process ends unless the kernel itself is stuck in its behalf.
        await _all_ended(waiting, 10.0)
    finally:
        for handle in waiting:
            handle.close()


async def _all_ended(handles: Sequence[ProcessHandle], within_s: float) -> bool:
    try:
        async with asyncio.timeout(within_s):
            await asyncio.gather(*(handle.ended() for handle in handles))
    except TimeoutError:
        return False
    return True


async def to_the_end(work: Coroutine[Any, Any, None]) -> None:
    """Await work that an interrupt must not cut short; raise the interrupt afterwards."""
    task = asyncio.ensure_future(work)
    interrupt: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError as error:
            interrupt = error
    await task
    if interrupt is not None:
        raise interrupt
