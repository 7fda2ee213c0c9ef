"""The driver of workers that save their own state: it copies the folder `state/`, and no more.

It needs no privilege. The worker is stopped while the copy is made, so that nothing changes under
it.
"""

from __future__ import annotations

import signal
from collections.abc import Sequence

from snapshot_agent.adapters import procfs, procwait
from snapshot_agent.adapters.control_dir import workers_own
from snapshot_agent.adapters.copying import Counter, copy_in, in_thread, listed, read_checked
from snapshot_agent.domain import control
from snapshot_agent.ports import Progress, Worker
from snapshot_shared.artifact import FileEntry
from snapshot_shared.errors import SourceExited
from snapshot_shared.files import make_dir, open_dir, open_root, opened, remove_tree


class Cooperative:
    """The `ProcessDriver` port for cooperative workers."""

    name = "cooperative"

    async def size(self, worker: Worker) -> int:
        with opened(_state(worker)) as state:
            return sum(size for _, size in await in_thread(listed, state))

    async def freeze(self, worker: Worker) -> None:
        done: set[tuple[int, int]] = set()
        # A process forks until it has stopped: look again until nobody new is found.
        while fresh := [m for m in _members(worker) if (m.pid, m.start) not in done]:
            for member in fresh:
                procfs.send(member, signal.SIGSTOP)
            await procwait.all_stopped(fresh)
            done.update((member.pid, member.start) for member in fresh)
        if not procfs.is_alive(*worker.process):
            raise SourceExited("the worker ended while it was frozen")

    async def dump(self, worker: Worker, part: int, progress: Progress) -> list[FileEntry]:
        counter = Counter(progress)
        with opened(_state(worker)) as state:
            names = await in_thread(listed, state)
            return [await copy_in(state, part, name, counter) for name, _ in names]

    async def thaw(self, worker: Worker) -> None:
        for member in _members(worker):
            procfs.send(member, signal.SIGCONT)

    async def fill(
        self, worker: Worker, part: int, files: Sequence[FileEntry], progress: Progress
    ) -> None:
        with workers_own(), opened(open_root(str(worker.places.control))) as folder:
            await in_thread(remove_tree, folder, control.STATE)
            state = make_dir(folder, [control.STATE], exclusive=True)
        with opened(state):
            await read_checked(part, files, Counter(progress), state)


def _members(worker: Worker) -> list[procfs.Stat]:
    return procfs.session_of(*worker.process)


def _state(worker: Worker) -> int:
    with opened(open_root(str(worker.places.control))) as folder:
        return open_dir(folder, [control.STATE])
