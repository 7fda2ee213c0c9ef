"""The driver of workers that are started again from their own state, with no privilege.

A dump copies the saved state, ends the process and starts the same program again with
`--resume-from <folder>`; a restore starts the program of the placeholder in the same way.
Arguments, environment and working directory are those of the process, read from /proc. The folder
is `state/` of the control directory: a worker never gets at the artifact.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable
from dataclasses import replace

from snapshot_agent.adapters import ending, procfs
from snapshot_agent.adapters.cooperative import FREEZE_S, Cooperative
from snapshot_agent.adapters.process_memory import ProcessMemory
from snapshot_agent.domain import control
from snapshot_agent.domain.driving import Phase, Phases, Release
from snapshot_agent.domain.spec import RESUME_FROM, ProcessSpec, resumed
from snapshot_agent.ports import (
    ControlDirectory,
    Dump,
    Launcher,
    Process,
    RestoreSource,
    Stage,
    Worker,
)
from snapshot_shared.errors import DeadlineExceeded, SourceExited
from snapshot_shared.orders import Driver

SOFT_S = 2.0
"""The grace period of the release program, in seconds."""

RELEASE_S = 8.0
"""How long the release program may take, in seconds."""


class Respawn(Cooperative):
    """The `ProcessDriver` port for workers that can be started again from their state."""

    name: Driver = "respawn"
    restore_step = "replace"
    replaces = True

    def __init__(
        self, launcher: Launcher, controls: ControlDirectory, monotonic: Callable[[], float]
    ) -> None:
        """Start processes by `launcher`; `monotonic` is the clock of all deadlines."""
        self._launcher = launcher
        self._control = controls
        self._monotonic = monotonic
        self._memory = ProcessMemory()
        self.stages = (
            Stage("freeze", self.freeze, FREEZE_S),
            Stage("copy-state", self.copy, writes=True),
            Stage(
                "replace",
                self._replace,
                writes=True,
                replaces=True,
                phases=Phases(during=Phase.BEGUN, after=Phase.SIGNAL),
            ),
        )

    async def _replace(self, dump: Dump) -> None:
        """End the worker and start it again; wait until it has written `quiesced`."""
        worker = dump.worker
        process = await self._restart(worker, is_standby=False)
        dump.worker = replace(worker, process=process)
        quiet = asyncio.ensure_future(
            self._control.appears(
                worker.paths, control.QUIESCED, lambda data: control.is_of(data, dump.attempt)
            )
        )
        end = asyncio.ensure_future(self._launcher.ended(process))
        try:
            await asyncio.wait(
                [quiet, end],
                timeout=max(0.0, dump.deadline - self._monotonic()),
                return_when=asyncio.FIRST_COMPLETED,
            )
            _require_back(worker, quiet, end)
        finally:
            for task in (quiet, end):
                task.cancel()
            await asyncio.gather(quiet, end, return_exceptions=True)

    async def restore(self, placeholder: Worker, source: RestoreSource) -> Process:
        await self.fill(placeholder, source)
        return await self._restart(placeholder, is_standby=True)

    async def _restart(self, worker: Worker, *, is_standby: bool) -> Process:
        spec = resumed(await self._spec_of(worker), is_standby=is_standby)
        await self._launcher.terminate(worker.process, worker.paths, 0.0)
        if not is_standby:
            self._control.remove(worker.paths, control.QUIESCED)
        return await self._launcher.spawn(spec)

    async def _spec_of(self, worker: Worker) -> ProcessSpec:
        """Return how a process was started. SourceExited when it is gone."""
        argv = _strings(await self._memory.contents(worker.process, "cmdline"))
        entries = _strings(await self._memory.contents(worker.process, "environ"))
        cwd = procfs.cwd_of(worker.process.pid)
        if not (argv and entries and cwd):
            raise SourceExited("the worker ended before it could be started again")
        environment = {name: value for name, _, value in (each.partition("=") for each in entries)}
        return ProcessSpec(argv, environment, cwd, worker.paths)

    def release(self, worker: Worker, phase: Phase) -> Release:
        if phase is not Phase.BEGUN:
            return Release()
        program = (sys.executable, "-m", ending.__name__, worker.paths.marker, repr(SOFT_S))
        return Release(program, RELEASE_S, ends=True, stays=True)


def _require_back(
    worker: Worker, quiet: asyncio.Future[None], end: asyncio.Future[int | None]
) -> None:
    """Raise unless the worker has written `quiesced`."""
    if quiet.done():
        quiet.result()
        return
    advice = f"the program must read its state from the folder after {RESUME_FROM} and then write "
    advice += f"{control.QUIESCED}; see the container's log"
    if end.done():
        raise SourceExited(
            f"container {worker.pod.container} ended with {end.result()} when it was started again",
            next_step=advice,
            exit_code=end.result(),
        )
    raise DeadlineExceeded(
        f"container {worker.pod.container} was started again and did not become quiet",
        next_step=advice,
    )


def _strings(data: bytes) -> list[str]:
    return [os.fsdecode(entry) for entry in data.split(b"\0")[:-1]]
