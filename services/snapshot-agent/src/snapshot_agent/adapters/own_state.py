"""What is common to the drivers of workers that save their own state into the folder `state/`.

It needs no privilege: a worker is stopped by signals, and its files are copied.
"""

from __future__ import annotations

import signal
from collections.abc import Sequence

from snapshot_agent.adapters import procfs, procwait
from snapshot_agent.adapters.control_dir import hand_over, workers_own
from snapshot_agent.adapters.copying import ROOT, Counter, copy_in, listed, read_checked
from snapshot_agent.domain import control
from snapshot_agent.ports import Dump, Progress, Worker
from snapshot_shared.artifact import FileEntry
from snapshot_shared.errors import SourceExited
from snapshot_shared.files import make_dir, open_dir, open_regular, open_root, opened, remove_tree
from snapshot_shared.tasks import in_thread

FREEZE_S = 15.0


async def size(worker: Worker) -> int:
    """Return how many bytes the worker's state has."""
    return await in_thread(_size, worker)


def _size(worker: Worker) -> int:
    with opened(_state(worker)) as state:
        return sum(found for _, found in listed(state))


async def freeze(worker: Worker) -> None:
    """Stop every thread of the worker and return when all have stopped."""
    done: set[tuple[int, int]] = set()
    # A process forks until it has stopped: look again until no new one is found.
    while fresh := [m for m in _members(worker) if (m.pid, m.start) not in done]:
        for member in fresh:
            procfs.send(member, signal.SIGSTOP)
        await procwait.all_stopped(fresh)
        done.update((member.pid, member.start) for member in fresh)
    if not procfs.is_alive(*worker.process):
        raise SourceExited("the worker ended while it was frozen")


def thaw(worker: Worker) -> None:
    """Let a worker run again; one that is not frozen is left alone."""
    for member in _members(worker):
        procfs.send(member, signal.SIGCONT)


async def copy(dump: Dump) -> None:
    """Write the state of a frozen worker durably into the part."""
    counter = Counter(dump.progress)
    async with ROOT.opened(_state, dump.worker) as state:
        names = await ROOT.run(listed, state)
        dump.files = [await copy_in(state, dump.part, name, counter) for name, _ in names]


async def fill(worker: Worker, part: int, files: Sequence[FileEntry], progress: Progress) -> None:
    """Put saved state into `state/`. ArtifactCorrupt before a bad byte gets there."""
    async with ROOT.opened(_fresh_state, worker) as state:
        await read_checked(part, files, Counter(progress), state)
        await ROOT.run(_hand_over, worker, state, files)


def _fresh_state(worker: Worker) -> int:
    with workers_own(), opened(open_root(str(worker.places.control))) as folder:
        remove_tree(folder, control.STATE, durable=False)
        return make_dir(folder, [control.STATE], exclusive=True)


def _hand_over(worker: Worker, state: int, files: Sequence[FileEntry]) -> None:
    access = worker.places.access
    for entry in files:
        with opened(open_regular(state, entry.name)) as file:
            hand_over(file, access, access.file_mode)
    hand_over(state, access, access.folder_mode)


def _members(worker: Worker) -> list[procfs.Stat]:
    return procfs.session_of(*worker.process)


def _state(worker: Worker) -> int:
    with opened(open_root(str(worker.places.control))) as folder:
        return open_dir(folder, [control.STATE])
