"""The workers of a local cluster: programs that run beside them, as in their container."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from snapshot_shared.errors import InvalidInput, NotFound
from snapshotctl.adapters import processes
from snapshotctl.domain.cluster import ClusterRecord
from snapshotctl.domain.exits import WrongArguments
from snapshotctl.ports import Ran

CONTROL_DIR = "SNAPSHOT_CONTROL_DIR"
_SPACES = ("mnt", "uts", "ipc", "pid")
END_S = 5.0


class _Found(NamedTuple):
    pid: int
    started: int
    container: str
    environment: dict[str, str]
    is_apart: bool


class LocalWorkers:
    """The port `Workers` on processes of this machine, found by their environment."""

    python = sys.executable

    def __init__(self, record: ClusterRecord) -> None:
        """Use the workers of a local cluster."""
        self._run = record.run
        self._name = record.name

    async def run(
        self, namespace: str, pod: str, container: str | None, program: Sequence[str]
    ) -> int:
        found = self._worker(namespace, pod, container)
        process = await self._start(found, program)
        return await ended(process)

    async def answer(
        self, namespace: str, pod: str, container: str | None, program: Sequence[str]
    ) -> Ran:
        found = self._worker(namespace, pod, container)
        pipe = asyncio.subprocess.PIPE
        nowhere = asyncio.subprocess.DEVNULL
        process = await self._start(found, program, nowhere, pipe, pipe)
        return await answered(process)

    def _worker(self, namespace: str, pod: str, container: str | None) -> _Found:
        """Return the first process of a container. NotFound, WrongArguments."""
        everyone = [
            (place, found)
            for place, found in _workers(self._run)
            if place[0] == namespace or place == (namespace, pod)
        ]
        ours = [found for place, found in everyone if place == (namespace, pod)]
        if not ours:
            names = sorted({name for (_, name), _ in everyone})
            raise NotFound(
                f"no process of pod {pod} in namespace {namespace} runs in local cluster "
                f"{self._name}",
                next_step=f"name a pod that runs: {', '.join(names)}"
                if names
                else "see the pods, and which have ended: snapshotctl get pods -A",
            )
        names = sorted({found.container for found in ours})
        if container is None and len(names) > 1:
            raise WrongArguments(
                f"pod {pod} has several containers",
                next_step=f"name one with --container: {', '.join(names)}",
            )
        chosen = [found for found in ours if container in (None, found.container)]
        if not chosen:
            raise WrongArguments(
                f"pod {pod} has no container {container!r} that runs",
                next_step=f"name one of: {', '.join(names)}",
            )
        # What starts a worker that has namespaces of its own is not within them.
        return min(chosen, key=lambda found: (not found.is_apart, found.started, found.pid))

    async def _start(
        self,
        found: _Found,
        program: Sequence[str],
        stdin: int | None = None,
        stdout: int | None = None,
        stderr: int | None = None,
    ) -> asyncio.subprocess.Process:
        enter: list[str] = []
        cwd = str(Path(f"/proc/{found.pid}/cwd").readlink())
        if found.is_apart:
            enter = ["nsenter", f"--target={found.pid}", *_entered(found.pid), f"--wd={cwd}", "--"]
        try:
            return await asyncio.create_subprocess_exec(
                *enter,
                *program,
                cwd="/" if enter else cwd,
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


def _workers(run: str) -> list[tuple[tuple[str, str], _Found]]:
    """Return the processes of all pods of a run, each with the namespace and name of its pod."""
    found = []
    for member in processes.members(run):
        environment = processes.environment_of(member.pid)
        started = processes.started(member.pid)
        control = environment.get(CONTROL_DIR)
        if control is None or "POD_NAME" not in environment or started is None:
            continue
        place = (environment.get("POD_NAMESPACE", "default"), environment["POD_NAME"])
        # Its control directory is <pod>/<container>/control.
        worker = _Found(
            member.pid,
            started,
            Path(control).parent.name,
            environment,
            bool(_entered(member.pid)),
        )
        found.append((place, worker))
    return found


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
