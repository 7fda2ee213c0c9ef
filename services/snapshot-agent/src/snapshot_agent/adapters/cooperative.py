"""The driver of workers that save their own state: it copies the folder `state/`, and no more.

The worker is stopped while the copy is made, so that nothing changes under it. Its process stays
the same; a restore fills the folder of a worker that waits for it.
"""

from __future__ import annotations

from snapshot_agent.adapters import own_state
from snapshot_agent.adapters.own_state import FREEZE_S
from snapshot_agent.domain.driving import Phase, Release
from snapshot_agent.ports import Dump, Process, Restoring, Stage, Worker
from snapshot_shared.orders import Driver

THAW_S = 15.0


class Cooperative:
    """The `ProcessDriver` port for cooperative workers."""

    name: Driver = "cooperative"
    restore_step = "fill-state"
    replaces = False

    def __init__(self) -> None:
        """Need nothing of the node but its processes and files."""
        self.stages = (
            Stage("freeze", self.freeze, FREEZE_S),
            Stage("copy-state", self.copy, writes=True),
            Stage("thaw", self.thaw, THAW_S, writes=True),
        )

    async def size(self, worker: Worker) -> int:
        return await own_state.size(worker)

    async def freeze(self, dump: Dump) -> None:
        """Stop the worker."""
        await own_state.freeze(dump.worker)

    async def copy(self, dump: Dump) -> None:
        """Copy what the worker has saved."""
        await own_state.copy(dump)

    async def thaw(self, dump: Dump) -> None:
        """Let the worker run."""
        own_state.thaw(dump.worker)

    async def restore(self, placeholder: Worker, restoring: Restoring) -> Process:
        await own_state.fill(placeholder, restoring.part, restoring.files, restoring.progress)
        return placeholder.process

    def release(self, _worker: Worker, _phase: Phase) -> Release:
        return Release()
