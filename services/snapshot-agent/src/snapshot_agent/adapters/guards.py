"""Starts guards, or has them started, and connects to those that an earlier agent started.

In a cluster a guard has to outlive the container of its agent: there it is a child of
`snapshot_agent.guard_starter`, which runs in a container of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import snapshot_agent
from snapshot_agent.adapters import guard, processes, procfs
from snapshot_agent.domain import control
from snapshot_agent.domain.driving import Release
from snapshot_agent.ports import GuardLink, GuardSpec, Process
from snapshot_shared.errors import DeadlineExceeded, Failure, NoGuard, SourceExited
from snapshot_shared.files import open_root, opened
from snapshot_shared.spans import parse_traceparent

log = logging.getLogger(__name__)

ARMED_WITHIN_S = 5.0
GONE_WITHIN_S = 2.0
ANSWERS_WITHIN_S = 2.0
MARGIN_S = 2.0
"""How much later than a healthy agent a guard acts at a deadline, in seconds."""

_SOURCES = str(Path(snapshot_agent.__file__).parents[1])
_ABORTED = Failure(reason="AgentLost", message="the capture was given up by its guard")


class Guards:
    """The `Guard` port. Sockets and the log of all guards are in one folder."""

    def __init__(
        self, folder: Path, run: str, *, node: str = "", starter: Path | None = None
    ) -> None:
        """Use `folder`; `run` marks the processes of a local cluster, `node` is for the log.

        With `starter`, the socket of one, guards are its children and not ours.
        """
        self._folder = folder
        self._starter = starter
        self._run = run
        self._node = node

    async def start(self, spec: GuardSpec) -> GuardLink:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)  # noqa: FBT003 - its only form
        try:
            child = await self._started(self._task(spec).arguments(), theirs)
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        link = _Link(ours, self._folder / _socket_name(spec), child)
        try:
            link.send_spec(spec)
            answer = await link.receive(ARMED_WITHIN_S)
        except BaseException:
            await link.kill()
            raise
        if answer == guard.ARMED:
            return link
        await link.kill()
        if answer == guard.GONE:
            raise SourceExited("the worker ended before its guard was armed")
        raise DeadlineExceeded(
            f"the guard was not armed within {ARMED_WITHIN_S} s",
            next_step=f"look at {self._folder / 'log'}",
            budget_s=ARMED_WITHIN_S,
        )

    async def _started(self, words: list[str], theirs: socket.socket) -> procfs.Stat | None:
        """Start the program, which inherits the connection."""
        if self._starter is None:
            return procfs.read(spawn(self._folder, self._run, words, theirs.fileno()))
        loop = asyncio.get_running_loop()
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as caller:
                caller.setblocking(False)  # noqa: FBT003 - its only form
                async with asyncio.timeout(ARMED_WITHIN_S):
                    await loop.sock_connect(caller, str(self._starter))
                    socket.send_fds(caller, [guard.joined(words)], [theirs.fileno()])
                    pid = int(await loop.sock_recv(caller, 32) or b"0")
        except (OSError, TimeoutError) as error:
            raise NoGuard(
                f"no guard can be started at {self._starter}: {error or 'it does not answer'}",
                next_step="see why the container guards of the agent's pod does not run",
            ) from error
        return procfs.read(pid)

    def _task(self, spec: GuardSpec) -> guard.GuardTask:
        return guard.GuardTask(
            socket=_socket_name(spec),
            pid=spec.process.pid,
            start=spec.process.start,
            control=str(spec.control),
            deadline=spec.deadline + MARGIN_S,
            boot_id=spec.boot_id,
            kill=spec.on_failure == "Kill",
            says=control.ABORTED,
            body=control.body(spec.attempt, _ABORTED).decode(),
            ends=control.QUIESCE,
            unless=control.COMPLETE,
            uid=spec.access.uid,
            gid=spec.access.gid,
            mode=spec.access.file_mode,
            node=self._node,
            order=spec.order,
            attempt=spec.attempt,
            trace=":".join(parse_traceparent(spec.traceparent) or ()),
        )

    async def adopt(self, spec: GuardSpec) -> GuardLink | None:
        path = self._folder / _socket_name(spec)
        caller = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        caller.setblocking(False)  # noqa: FBT003 - its only form
        with contextlib.suppress(OSError):
            # The path of a unix socket has at most 107 bytes, and the folder may be deep.
            with opened(open_root(str(self._folder))) as folder:
                caller.connect(f"/proc/self/fd/{folder}/{path.name}")
            link = _Link(caller, path, _peer(caller))
            if await link.receive(ARMED_WITHIN_S) == guard.ARMED:
                return link
            link.close()
        caller.close()
        path.unlink(missing_ok=True)
        return None

    async def release(self, process: Process, release: Release) -> bool:
        succeeded = bool(release.program) and await _run(release.program, release.within_s)
        guard.let_go(process, ends=release.ends)
        return succeeded


def spawn(folder: Path, run: str, words: Sequence[str], link: int) -> int:
    """Start a guard with these arguments, in `folder`, and return its pid. It logs there."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    with (folder / "log").open("ab") as output:
        child = subprocess.Popen(
            # -S: without site-packages a start takes a third of the time.
            [sys.executable, "-S", "-m", guard.__name__, *words],
            env={"PYTHONPATH": _SOURCES, "SNAPBACK_RUN": run},
            cwd=folder,
            stdin=link,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    # It is reaped when its connection ends; a return code keeps Popen from doing so.
    child.returncode = 0
    return child.pid


async def _run(program: Sequence[str], within_s: float) -> bool:
    """Run a program, and kill it after `within_s`; whether it succeeded."""
    try:
        child = await asyncio.create_subprocess_exec(*program, stdin=subprocess.DEVNULL)
    except OSError:
        log.exception("%s could not be started", program)
        return False
    try:
        async with asyncio.timeout(within_s):
            return await child.wait() == 0
    except TimeoutError:
        log.warning("%s took longer than %s s", program, within_s)
        return False
    finally:
        if child.returncode is None:
            child.kill()
            await child.wait()


class _Link:
    """A connection to a guard, whose process may be a child of this agent or of an earlier one."""

    def __init__(self, sock: socket.socket, path: Path, process: procfs.Stat | None) -> None:
        self._sock = sock
        self._path = path
        self._process = process
        self._said: asyncio.Queue[bytes] = asyncio.Queue()
        self._is_over = asyncio.Event()
        asyncio.get_running_loop().add_reader(sock, self._read)

    def _read(self) -> None:
        try:
            message = self._sock.recv(guard.MESSAGE_BYTES)
        except BlockingIOError:
            return
        except OSError:
            message = b""
        if message:
            self._said.put_nowait(message)
        else:
            self._hang_up()

    def _hang_up(self) -> None:
        if not self._is_over.is_set():
            self._is_over.set()
            self._said.put_nowait(b"")
            asyncio.get_running_loop().remove_reader(self._sock)

    async def receive(self, within_s: float) -> bytes:
        """Return the next message; empty when the connection or the time has ended."""
        if self._is_over.is_set() and self._said.empty():
            return b""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                return await self._said.get()
        return b""

    async def lost(self) -> None:
        await self._is_over.wait()
        await self._gone()

    async def confirm(self) -> None:
        with contextlib.suppress(OSError):
            self._sock.send(guard.CONFIRM)
        if await self.receive(ANSWERS_WITHIN_S) != guard.HELD:
            await self.kill()

    def send_spec(self, spec: GuardSpec) -> None:
        """Send what is longer than arguments may be, before the guard reads."""
        if spec.unfence:
            self._sock.send(guard.UNFENCE + guard.joined(list(spec.unfence)))
        if spec.release != Release():
            self.release_by(spec.release)

    def release_by(self, release: Release) -> None:
        words = guard.WireRelease(
            list(release.program), release.within_s, ends=release.ends, stays=release.stays
        ).words()
        with contextlib.suppress(OSError):
            self._sock.send(words)

    def follow(self, process: Process) -> None:
        with contextlib.suppress(OSError):
            self._sock.send(guard.FOLLOW + f"{process.pid} {process.start}".encode())

    def thaw_by(self, deadline: float) -> None:
        with contextlib.suppress(OSError):
            self._sock.send(guard.THAW_BY + repr(deadline + MARGIN_S).encode())

    async def dismiss(self) -> None:
        with contextlib.suppress(OSError):
            self._sock.send(guard.DISMISS)
        try:
            async with asyncio.timeout(GONE_WITHIN_S):
                await self.lost()
        except TimeoutError:
            log.warning("guard %s did not go when dismissed", self._path.name)
            await self.kill()
        self.close()

    async def kill(self) -> None:
        """Kill a guard that does not answer."""
        self.close()
        if self._process is not None:
            procfs.send(self._process, signal.SIGKILL)
            await self._gone()
        self._path.unlink(missing_ok=True)

    async def _gone(self) -> None:
        if self._process is not None:
            await processes.ended(self._process)
            _reap(self._process)
            self._process = None

    def close(self) -> None:
        self._hang_up()
        self._sock.close()


def _reap(process: procfs.Stat) -> None:
    """Reap a child that has ended; that of an earlier agent belongs to init."""
    with contextlib.suppress(ChildProcessError):
        os.waitpid(process.pid, os.WNOHANG)


def _peer(sock: socket.socket) -> procfs.Stat | None:
    """Return the process that listens at the other end."""
    return procfs.read(guard.peer_of(sock)[0])


def _socket_name(spec: GuardSpec) -> str:
    return f"{spec.name}.sock"
