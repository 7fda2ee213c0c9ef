"""The workers of a local cluster: programs that run beside them, as in their container."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import NamedTuple

from snapshot_shared.errors import InvalidInput, NotFound
from snapshot_shared.objects.kinds import KINDS
from snapshot_shared.objects.kubernetes import Pod
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
        process = await self._start(found, program)
        return await ended(process)

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
        async with self._connect() as operator:
            seen = await operator.get(Target(KINDS["Pod"], namespace, pod))
        everyone = _outers(self._run)
        ours: dict[str, _Outer] = {}
        if isinstance(seen, Pod) and seen.status.node_name:
            home = self._paths.node(seen.status.node_name, "agent") / "pods" / seen.metadata.uid
            ours = {
                control.parent.name: min(outers)
                for control, outers in everyone.items()
                if control.parent.parent == home
            }
        if not ours:
            places = {
                outer.place
                for control, outers in everyone.items()
                if control.is_relative_to(self._paths.state)
                for outer in outers
            }
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


async def ended(process: asyncio.subprocess.Process) -> int:
    """Return the exit code of a program that has our terminal; end it where we are interrupted."""
    try:
        code = await process.wait()
    except asyncio.CancelledError:
        await _end(process)
        raise
    return code if code >= 0 else 128 - code


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
