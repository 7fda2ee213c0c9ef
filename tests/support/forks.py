"""Python code in processes that start at once: forks of a process that has the imports.

An interpreter with the imports of a client takes a fifth of a second of CPU to start, that of a
service or a transfer half a second. The process that forks has one thread, so that every fork is
sound. It starts with the first call of a test process, and ends with it.

A fork is signalled, killed and waited for like any process. But /proc shows the command line and
the environment of the process that was forked, and variables that Python or the dynamic linker read
at the start have no effect.
"""

from __future__ import annotations

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
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

if __name__ != "__main__":
    # A fork has imported what its code asks for and little more, of which tests make sure.
    import asyncio

ROOT = Path(__file__).resolve().parents[2]
WITHIN_S = 60.0
PROGRAMS = ("snapshot_agent.main", "snapshot_agent.guard_starter", "gms.main")
_MESSAGE = 128 * 1024
"""The most bytes of an order, which has an environment in it."""
_SERVE = """
import importlib, sys
from snapshot_shared.service import run
sys.exit(run(importlib.import_module(sys.argv[0]).serve))
"""
# The end of an interpreter takes as long as all that a piece of code does here.
_END = """
import os, sys
sys.stdout.flush()
os._exit(0)
"""


class Forks:
    """A process that has imported some modules, and forks for each piece of code."""

    def __init__(self, *modules: str) -> None:
        self._orders, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.support.forks", *modules],
                cwd=ROOT,
                # Some tests end all processes that have a setting of theirs in the environment.
                env={name: text for name, text in os.environ.items() if "SNAPBACK" not in name}
                | {"OPENBLAS_NUM_THREADS": "1"},
                stdin=theirs,
                stdout=subprocess.DEVNULL,
            )

    def begin(
        self, code: str, argv: Sequence[str], environment: Mapping[str, str], *files: int
    ) -> socket.socket:
        """Begin to run code on three files; return what tells its pid, and then how it ends."""
        told, teller = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        told.settimeout(WITHIN_S)
        order = [code, [*argv], dict(environment), str(Path.cwd())]
        with teller:
            data = json.dumps(order).encode()
            socket.send_fds(self._orders, [data], [teller.fileno(), *files])
        return told

    def run(
        self,
        code: str,
        *arguments: str,
        stdin: bytes = b"",
        environment: Mapping[str, str] = os.environ,
    ) -> subprocess.CompletedProcess[bytes]:
        """Run code as `python -c` does, in the environment of this process unless told another.

        Its standard input is a pipe with these bytes, which stays open until it ends.
        """
        with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
            given, giving = os.pipe()
            try:
                assert os.write(giving, stdin) == len(stdin)
                files = (given, out.fileno(), err.fileno())
                with self.begin(code + _END, ["-c", *arguments], environment, *files) as told:
                    told.recv(16)
                    status = int(told.recv(16))
            except TimeoutError as error:
                for name in ("stat", "wchan", "syscall"):
                    text = Path(f"/proc/{self._process.pid}/{name}").read_text()
                    error.add_note(f"{name} of the process that forks: {text.strip()}")
                raise
            finally:
                os.close(given)
                os.close(giving)
            out.seek(0)
            err.seek(0)
            return subprocess.CompletedProcess(code, status, out.read(), err.read())

    def close(self) -> None:
        self._orders.close()
        self._process.wait()


@functools.cache
def forks(*modules: str) -> Forks:
    """Return the process that has these imports, one for all tests of this process."""
    found = Forks(*modules)
    atexit.register(found.close)
    return found


class Forked:
    """A process as that of `asyncio.create_subprocess_exec`, without pipes."""

    def __init__(self, pid: int, told: socket.socket) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._told = told
        self._end = asyncio.create_task(self._ended())

    async def _ended(self) -> None:
        with self._told:
            status = await asyncio.get_running_loop().sock_recv(self._told, 16)
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


def _begun(program: str, environment: Mapping[str, str], log: Path) -> socket.socket:
    with Path(os.devnull).open("r+b") as nothing, log.open("ab") as file:
        files = (nothing.fileno(), nothing.fileno(), file.fileno())
        told = forks(*PROGRAMS).begin(_SERVE, [program], environment, *files)
    told.setblocking(False)
    return told


async def start(program: str, environment: Mapping[str, str], log: Path) -> Forked:
    """Start a program of PROGRAMS; what it logs is added to a file."""
    told = _begun(program, environment, log)
    return Forked(int(await asyncio.get_running_loop().sock_recv(told, 16)), told)


def _fork_on_order() -> str:
    """Fork for each order, and tell of each end; in a child return the code to run."""
    orders = socket.socket(fileno=os.dup(0))
    poll = select.poll()
    poll.register(orders, select.POLLIN)
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
            data, fds, _, _ = socket.recv_fds(orders, _MESSAGE, 4)
            if not data:
                sys.exit()
            if (pid := os.fork()) == 0:
                return _settled(fds[1:], *json.loads(data))
            teller = socket.socket(fileno=fds[0])
            teller.sendall(b"%d" % pid)
            for file in fds[1:]:
                os.close(file)
            pidfd = os.pidfd_open(pid)
            running[pidfd] = pid, teller
            poll.register(pidfd, select.POLLIN)


def _settled(
    files: list[int], code: str, argv: list[str], environment: dict[str, str], folder: str
) -> str:
    """Leave all that is the forking process's."""
    for number, file in enumerate(files):
        os.dup2(file, number)
    os.closerange(3, 4096)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    sys.argv = argv
    return code


if __name__ == "__main__":
    for name in sys.argv[1:]:
        importlib.import_module(name)
    gc.freeze()
    exec(compile(_fork_on_order(), "<string>", "exec"), {"__name__": "__main__"})
