"""Programs of services that start without their imports: a process that has them is forked.

`start` gives a real process, which is signalled, killed and waited for like one that was started by
`python -m`. But /proc shows the command line and the environment of the process that was forked,
and variables that Python or the dynamic linker read at the start have no effect.

The first call of a test process starts the process that forks, which ends with it.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import functools
import gc
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
from pathlib import Path

from snapshot_shared.service import run

PROGRAMS = ("snapshot_agent.main", "snapshot_agent.guard_starter", "gms.main")
LONGEST = 1 << 17
"""The most bytes of a request, which has an environment in it."""


class Forked:
    """A process as that of `asyncio.create_subprocess_exec`, without pipes."""

    def __init__(self, pid: int, said: socket.socket) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._said = said
        self._end = asyncio.create_task(self._ended())

    async def _ended(self) -> None:
        with self._said:
            status = await asyncio.get_running_loop().sock_recv(self._said, 16)
        self.returncode = int(status)

    async def wait(self) -> int:
        await asyncio.shield(self._end)
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


async def start(program: str, environment: dict[str, str], log: Path) -> Forked:
    """Start a program of PROGRAMS; what it logs is added to a file."""
    said, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    said.setblocking(False)
    with theirs:
        request = json.dumps([program, environment, str(log), str(Path.cwd())]).encode()
        socket.send_fds(_forker(), [request], [theirs.fileno()])
    return Forked(int(await asyncio.get_running_loop().sock_recv(said, 16)), said)


@functools.cache
def _forker() -> socket.socket:
    requests, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        process = subprocess.Popen([sys.executable, "-P", __file__], stdin=theirs)

    def end() -> None:
        requests.close()
        process.wait()

    atexit.register(end)
    return requests


def fork_on_request() -> str:
    """Fork for each request, and tell of each end; in a child return the program to run."""
    requests = socket.socket(fileno=os.dup(0))
    poll = select.poll()
    poll.register(requests, select.POLLIN)
    running: dict[int, tuple[int, socket.socket]] = {}
    while True:
        for fd, _ in poll.poll():
            if fd in running:
                pid, teller = running.pop(fd)
                poll.unregister(fd)
                os.close(fd)
                _, status = os.waitpid(pid, 0)
                with teller, contextlib.suppress(BrokenPipeError):
                    teller.sendall(b"%d" % os.waitstatus_to_exitcode(status))
                continue
            data, fds, _, _ = socket.recv_fds(requests, LONGEST, 1)
            if not data:
                sys.exit()
            pid = os.fork()
            if pid == 0:
                return _settled(*json.loads(data))
            teller = socket.socket(fileno=fds[0])
            teller.sendall(b"%d" % pid)
            pidfd = os.pidfd_open(pid)
            running[pidfd] = pid, teller
            poll.register(pidfd, select.POLLIN)


def _settled(program: str, environment: dict[str, str], log: str, folder: str) -> str:
    """Leave all that is the forking process's."""
    os.closerange(3, 4096)
    with Path(os.devnull).open() as nothing, Path(log).open("ab") as file:
        os.dup2(nothing.fileno(), 0)
        os.dup2(file.fileno(), 2)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    sys.argv = [program]
    return program


if __name__ == "__main__":
    modules = {name: importlib.import_module(name) for name in PROGRAMS}
    gc.freeze()
    sys.exit(run(modules[fork_on_request()].serve))
