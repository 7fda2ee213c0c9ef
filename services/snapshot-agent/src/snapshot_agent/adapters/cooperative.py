"""The driver of workers that save their own state: it copies the folder `state/`, and no more.

The worker is stopped by signals while its files are copied, so that they do not change. Its process
stays the same; a restore fills the folder of a worker in standby. No privilege is needed.
"""

from __future__ import annotations

import signal
from collections.abc import Sequence

from snapshot_agent.adapters import processes, procfs
from snapshot_agent.adapters.control_dir import hand_over, opened_control, workers_own
from snapshot_agent.adapters.copying import ROOT, ByteCounter, copied, listed, read_checked
from snapshot_agent.domain import control
from snapshot_agent.domain.driving import Phase, Release
from snapshot_agent.ports import DriverState, Dump, Process, RestoreSource, Stage, Worker
from snapshot_shared.artifact import FileEntry
from snapshot_shared.errors import SourceExited
from snapshot_shared.files import make_dir, open_dir, open_regular, opened, remove_tree
from snapshot_shared.orders import Driver
from snapshot_shared.tasks import in_thread

FREEZE_S = 15.0
THAW_S = 15.0


class Cooperative:
    """The `ProcessDriver` port for cooperative workers."""

    name: Driver = "cooperative"
    needs_help = True
    restore_step = "fill-state"
    replaces = False

    def __init__(self) -> None:
        """Use the processes and files of this node; nothing has to be given."""
        self.stages: Sequence[Stage] = (
            Stage("freeze", self.freeze, FREEZE_S),
            Stage("copy-state", self.copy, writes=True),
            Stage("thaw", self.thaw, THAW_S, writes=True),
        )

    async def state(self, *, quick: bool = False) -> DriverState:
        return DriverState()

    async def inspect(self, worker: Worker, *, quiet: bool) -> int:
        return await in_thread(_size, worker) if quiet else 0

    async def freeze(self, dump: Dump) -> None:
        """Stop every thread of the worker and return when all have stopped."""
        worker = dump.worker
        await processes.stop(lambda: _members(worker))
        if not procfs.is_alive(*worker.process):
            raise SourceExited("the worker ended while it was frozen")

    async def copy(self, dump: Dump) -> None:
        """Write the state of a frozen worker durably into the part."""
        counter = ByteCounter(dump.progress)
        async with ROOT.opened(_state, dump.worker) as state:
            dump.files = await copied(state, dump.part, counter, dump.cipher)

    async def thaw(self, dump: Dump) -> None:
        """Let the worker run. SIGCONT changes nothing for a process that runs."""
        for member in _members(dump.worker):
            procfs.send(member, signal.SIGCONT)

    async def restore(self, placeholder: Worker, source: RestoreSource) -> Process:
        await self.fill(placeholder, source)
        return placeholder.process

    async def fill(self, worker: Worker, source: RestoreSource) -> None:
        """Put saved state into `state/`. ArtifactCorrupt before a bad byte is written there."""
        async with ROOT.opened(_fresh_state, worker) as state:
            counter = ByteCounter(source.progress)
            await read_checked(source.part, source.files, counter, state, cipher=source.cipher)
            await ROOT.run(_hand_over, worker, state, source.files)

    def release(self, worker: Worker, phase: Phase) -> Release:
        return Release()


def _size(worker: Worker) -> int:
    with opened(_state(worker)) as state:
        return sum(found for _, found in listed(state))


def _fresh_state(worker: Worker) -> int:
    with workers_own(), opened_control(worker.paths) as folder:
        remove_tree(folder, control.STATE, durable=False)
        return make_dir(folder, [control.STATE], exclusive=True)


def _hand_over(worker: Worker, state: int, files: Sequence[FileEntry]) -> None:
    access = worker.paths.access
    for entry in files:
        with opened(open_regular(state, entry.name)) as file:
            hand_over(file, access, access.file_mode)
    hand_over(state, access, access.folder_mode)


def _members(worker: Worker) -> list[procfs.Stat]:
    return procfs.family_of(*worker.process)


def _state(worker: Worker) -> int:
    with opened_control(worker.paths) as folder:
        return open_dir(folder, [control.STATE])
