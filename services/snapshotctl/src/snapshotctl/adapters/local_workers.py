"""The workers of a local cluster: programs that run beside them, as in their container."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import termios
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any, NamedTuple

from snapshot_api.facts import Pod
from snapshot_api.kinds import KINDS
from snapshot_shared.errors import BusUnavailable, InvalidInput, NotFound
from snapshotctl.adapters import processes
from snapshotctl.domain.cluster import INIT, ClusterPaths, ClusterRecord
from snapshotctl.domain.exits import WrongArguments
from snapshotctl.domain.targets import Target
from snapshotctl.ports import Operator, Ran

Connect = Callable[[], AbstractAsyncContextManager[Operator]]

CONTROL_DIR = "SNAPSHOT_CONTROL_DIR"
_OF_PLACE = ("NODE_NAME", "SNAPBACK_RUN")
"""What a process does not keep, beside `POD_*`, when it is restored elsewhere."""
_SPACES = ("mnt", "uts", "ipc", "pid")
END_S = 5.0


class _Found(NamedTuple):
    pid: int
    is_apart: bool
    environment: dict[str, str]


class _Outer(NamedTuple):
    """The first process of a container, which the agent has started."""

    started: int
    pid: int
    environment: dict[str, str]

    @property
    def place(self) -> tuple[str, str]:
        """The namespace and the name of its pod."""
        return self.environment.get("POD_NAMESPACE", ""), self.environment.get("POD_NAME", "")


class LocalWorkers:
    """The port `Workers` on processes of this machine.

    A process that was restored keeps the environment of its source, so that a container is found by
    the process that its agent has started.
    """

    python = sys.executable

    def __init__(self, record: ClusterRecord, connect: Connect) -> None:
        """Use the workers of a local cluster, whose operator `connect` reaches."""
        self._run = record.run
        self._name = record.name
        self._paths = ClusterPaths(Path(record.state_dir), Path(record.socket_dir))
        self._connect = connect

    async def run(
        self, namespace: str, pod: str, container: str | None, program: Sequence[str]
    ) -> int:
        found = await self._worker(namespace, pod, container)
        return await ended(self._start(found, program))

    async def answer(
        self, namespace: str, pod: str, container: str | None, program: Sequence[str]
    ) -> Ran:
        found = await self._worker(namespace, pod, container)
        pipe = asyncio.subprocess.PIPE
        nowhere = asyncio.subprocess.DEVNULL
        process = await self._start(found, program, nowhere, pipe, pipe)
        return await answered(process)

    async def _worker(self, namespace: str, pod: str, container: str | None) -> _Found:
        """Return the process of a container. NotFound, WrongArguments."""
        try:
            home = await self._home(namespace, pod)
            everyone = self._containers()
        except BusUnavailable:
            # Their processes go on without an operator, and each says whose it is.
            everyone = self._containers()
            known = [
                (outer, control)
                for control, outer in everyone.items()
                if outer.place == (namespace, pod)
            ]
            home = max(known)[1].parent.parent if known else None
        ours = {
            control.parent.name: outer
            for control, outer in everyone.items()
            if control.parent.parent == home
        }
        if not ours:
            places = {outer.place for outer in everyone.values()}
            names = sorted(name for space, name in places if space == namespace and name)
            raise NotFound(
                f"no process of pod {pod} in namespace {namespace} runs in local cluster "
                f"{self._name}",
                next_step=f"name a pod that runs: {', '.join(names)}"
                if names
                else "see the pods, and which have ended: snapshotctl get pods -A",
            )
        names = sorted(ours)
        if container is None and len(names) > 1:
            raise WrongArguments(
                f"pod {pod} has several containers",
                next_step=f"name one with --container: {', '.join(names)}",
            )
        chosen = ours.get(names[0] if container is None else container)
        if chosen is None:
            raise WrongArguments(
                f"pod {pod} has no container {container!r} that runs",
                next_step=f"name one of: {', '.join(names)}",
            )
        return _within(chosen)

    async def _home(self, namespace: str, pod: str) -> Path | None:
        """Return the folder of a pod on its node, as the operator has it. BusUnavailable."""
        async with self._connect() as operator:
            seen = await operator.get(Target(KINDS["Pod"], namespace, pod))
        if not isinstance(seen, Pod) or not seen.status.node_name:
            return None
        return self._paths.node(seen.status.node_name, "agent") / "pods" / seen.metadata.uid

    def _containers(self) -> dict[Path, _Outer]:
        """Return the first process of each container by its control directory."""
        return {
            control: min(outers)
            for control, outers in _outers(self._run).items()
            if control.is_relative_to(self._paths.state)
        }

    async def _start(
        self,
        found: _Found,
        program: Sequence[str],
        stdin: int | None = None,
        stdout: int | None = None,
        stderr: int | None = None,
    ) -> asyncio.subprocess.Process:
        enter: list[str] = []
        cwd = "/"
        if found.is_apart:
            # Without a value --wd is the folder of the target, as it is seen from within.
            enter = ["nsenter", f"--target={found.pid}", *_entered(found.pid), "--wd", "--"]
        else:
            cwd = str(Path(f"/proc/{found.pid}/cwd").readlink())
        try:
            return await asyncio.create_subprocess_exec(
                *enter,
                *program,
                cwd=cwd,
                env=found.environment,
                stdin=stdin,
                stdout=stdout,
                stderr=stderr,
            )
        except FileNotFoundError:
            raise NotFound(
                f"program {(enter or program)[0]!r} is not on this machine",
                next_step="install it, or name another one",
            ) from None
        except PermissionError as error:
            raise InvalidInput(f"{program[0]!r} cannot be run: {error.strerror}") from error


async def answered(process: asyncio.subprocess.Process) -> Ran:
    """Return what a program has printed, once it has ended."""
    try:
        out, err = await process.communicate()
    except asyncio.CancelledError:
        await _end(process)
        raise
    return Ran(process.returncode or 0, out, err.decode("utf-8", "replace"))


async def ended(starting: Awaitable[asyncio.subprocess.Process]) -> int:
    """Start a program that has our terminal, and return its exit code.

    What is typed is for the program alone, as of a shell. It ends with us where we are ended
    otherwise, by an interrupt too where we have no terminal.
    """
    with _terminal_lent():
        process = await starting
        try:
            code = await process.wait()
        except asyncio.CancelledError:
            await _end(process)
            raise
    return code if code >= 0 else 128 - code


@contextlib.contextmanager
def _terminal_lent() -> Iterator[None]:
    """Let go of the terminal, if we have one, and have it back as it was."""
    if not _is_in_front():
        yield
        return
    terminal = sys.stdin.fileno()
    attributes = termios.tcgetattr(terminal)
    for number in (signal.SIGINT, signal.SIGQUIT):
        # Not SIG_IGN, which the program would inherit. The command ends with the program.
        asyncio.get_running_loop().add_signal_handler(number, _ignored)
    try:
        yield
    finally:
        # The terminal may be gone with its window.
        with contextlib.suppress(OSError, termios.error):
            _take_back(terminal, attributes)


def _take_back(terminal: int, attributes: list[Any]) -> None:
    """Have the terminal as it was, unless a shell has put another job in front meanwhile."""
    front = os.tcgetpgrp(terminal)
    if front != os.getpgrp() and _has_processes(front):
        return
    # A program that was killed leaves it raw, and its own group in front; to change that from
    # behind would stop us.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTTOU])
    try:
        os.tcsetpgrp(terminal, os.getpgrp())
        termios.tcsetattr(terminal, termios.TCSADRAIN, attributes)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _has_processes(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def _is_in_front() -> bool:
    """Return whether standard input is a terminal that is ours now."""
    # A program that is started with it closed has none.
    if sys.stdin is None or not sys.stdin.isatty():
        return False
    try:
        return os.tcgetpgrp(sys.stdin.fileno()) == os.getpgrp()
    except OSError:  # It is not the terminal of this session.
        return False


def _ignored() -> None:
    """Do nothing."""


async def _end(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(END_S):
                await process.wait()
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


def _outers(run: str) -> dict[Path, list[_Outer]]:
    """Return the processes of a run by their control directories, `pods/<uid>/<container>/control`.

    Those within namespaces of their own have another one.
    """
    found: dict[Path, list[_Outer]] = {}
    for member in processes.members(run):
        environment = processes.environment_of(member.pid)
        started = processes.started(member.pid)
        control = environment.get(CONTROL_DIR)
        if control is not None and started is not None:
            outer = _Outer(started, member.pid, environment)
            found.setdefault(Path(control), []).append(outer)
    return found


def _within(outer: _Outer) -> _Found:
    """Return the process of a container by the one that the agent has started, often the same."""
    if not _entered(outer.pid):
        return _Found(outer.pid, False, outer.environment)
    # What starts a worker that has namespaces of its own is not within all of them.
    apart = [pid for pid in processes.descendants(outer.pid) if "--pid" in _entered(pid)]
    restored = [pid for pid in apart if processes.command_of(pid) != INIT]
    pid = next(iter(restored or apart), outer.pid)
    own = {
        name: value
        for name, value in outer.environment.items()
        if name.startswith("POD_") or name in _OF_PLACE
    }
    return _Found(pid, True, processes.environment_of(pid) | own)


def _entered(pid: int) -> list[str]:
    """Return the options of nsenter for the namespaces in which a process is and we are not."""
    words = {"mnt": "--mount", "uts": "--uts", "ipc": "--ipc", "pid": "--pid"}
    found = []
    for space in _SPACES:
        with contextlib.suppress(OSError):
            if (
                Path(f"/proc/{pid}/ns/{space}").readlink()
                != Path(f"/proc/self/ns/{space}").readlink()
            ):
                found.append(words[space])
    return found
