"""The workers of a node whose containers a kubelet has started: the port `Workers`.

The agent is in the process namespace of the node and has the kubelet's folder of pods. It asks
neither the API server nor the runtime.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from snapshot_agent.adapters import procfs
from snapshot_agent.adapters.process_memory import ProcessMemory
from snapshot_agent.domain.control import Access, ContainerPaths
from snapshot_agent.domain.gate import ObservedPod
from snapshot_agent.domain.helping import RESTORED
from snapshot_agent.domain.kubelet import (
    SeenProcess,
    access_of,
    command_of,
    container_in,
    first_processes,
    name_in,
    restored_pid,
)
from snapshot_agent.ports import Launcher, Process, ResolvedContainer, SetProcess, Worker
from snapshot_api.well_known import CAPTURABLE
from snapshot_shared.errors import DeadlineExceeded, NotEligible, SnapbackError
from snapshot_shared.files import open_own, opened, read_bounded
from snapshot_shared.ids import Uid, check_label, check_uid
from snapshot_shared.orders import PodRef
from snapshot_shared.pod_logs import check_pod
from snapshot_shared.tasks import in_thread
from snapshot_shared.volumes import CONTROL_VOLUME, INIT_VOLUME, folder_of

COMMAND_BYTES = 64 * 1024
"""How much of the arguments of a worker is noted; a word that is cut there is left out."""

_GONE = (FileNotFoundError, ProcessLookupError, PermissionError)


class _Container(NamedTuple):
    process: Process
    access: Access


class KubeletPods:
    """The `Workers` port. A pod is the kubelet's: what ends here is started again by its policy."""

    def __init__(
        self, launcher: Launcher, kubelet_dir: Path, pod_logs_dir: Path, state_dir: Path
    ) -> None:
        """Use `<kubelet_dir>/pods` and the kubelet's logs of pods.

        The locks of containers are below `state_dir`.
        """
        self._launcher = launcher
        self._kubelet_dir = kubelet_dir
        self._pods = kubelet_dir / "pods"
        self._pod_logs_dir = pod_logs_dir
        self._homes = state_dir / "pods"
        self._memory = ProcessMemory()

    async def resolve(self, pod: PodRef) -> ResolvedContainer:
        found, first = await in_thread(self._resolve, pod)
        return found._replace(command=await self._command(first)) if first else found

    async def _command(self, first: Process) -> Sequence[str]:
        """Return the arguments of a process; none where it hangs, which is no error of a pod."""
        with contextlib.suppress(DeadlineExceeded):
            return command_of((await self._memory.contents(first, "cmdline"))[:COMMAND_BYTES])
        return ()

    def _resolve(self, pod: PodRef) -> tuple[ResolvedContainer, Process | None]:
        """Return a container, and its first process if it runs."""
        uid, name = check_uid(pod.uid), check_label(pod.container)
        self._forget_the_gone()
        if started := _names(self._pods / uid / "containers"):
            check_pod(pod, self._pod_logs_dir)
        running = _containers(uid)
        found = running.get(name)
        seen = ObservedPod(
            pod,
            pod if started else None,
            containers=tuple(started),
            alive=found is not None,
            # The operator has read it in the spec of the pod, which is not to be seen here.
            standby=True,
        )
        if found is None:
            return ResolvedContainer(seen), None
        paths = ContainerPaths(
            home=self._homes / uid / name,
            sockets=self._homes / uid / name,
            access=found.access,
            volume=Path(folder_of(self._kubelet_dir, uid, CONTROL_VOLUME), name),
            placeholder=self._placeholder(uid, name),
        )
        if not paths.control.is_dir():
            raise NotEligible(
                f"container {name} of pod {pod.name} has no control directory",
                next_step=f'create the pod again with the annotation {CAPTURABLE}: "true"; without '
                f"webhooks mount the emptyDir {CONTROL_VOLUME} with subPath {name}",
                expected=str(paths.control),
            )
        process = found.process
        if paths.placeholder is not None:
            process = restored_below(process, paths.placeholder) or process
        return ResolvedContainer(seen, Worker(pod, process, paths)), found.process

    def _placeholder(self, uid: Uid, name: str) -> Path | None:
        folder = Path(folder_of(self._kubelet_dir, uid, INIT_VOLUME), name)
        # A link that others have put in its place is refused by what opens it.
        return folder if folder.is_symlink() or folder.is_dir() else None

    def _forget_the_gone(self) -> None:
        """Remove the locks of pods that the kubelet has removed."""
        there = set(_names(self._pods))
        # The pod of this agent is one of them: without any the folder cannot be seen.
        for uid in set(_names(self._homes)) - there if there else ():
            shutil.rmtree(self._homes / uid, ignore_errors=True)

    def is_alive(self, process: Process) -> bool:
        return self._launcher.adopt(process)

    async def ended(self, process: Process) -> int | None:
        return await self._launcher.ended(process)

    async def end(self, worker: Worker) -> None:
        # The environments of a pod have paths in the pod, by which no container is found.
        await self._launcher.terminate(worker.process, None, 0.0)

    async def end_pod(self, pod_uid: str, grace_s: float) -> None:
        found = await in_thread(_containers, check_uid(pod_uid))
        await asyncio.gather(
            *(self._launcher.terminate(each.process, None, grace_s) for each in found.values())
        )

    @contextlib.asynccontextmanager
    async def replacing(self, worker: Worker) -> AsyncIterator[SetProcess]:
        async def set_process(process: Process) -> Worker:
            # The container ends with its first process, which has adopted this one.
            return replace(worker, process=process)

        yield set_process


def _names(folder: Path) -> list[str]:
    try:
        return sorted(path.name for path in folder.iterdir())
    except FileNotFoundError:
        return []


def _containers(uid: Uid) -> dict[str, _Container]:
    """Return the containers of a pod that run, by name."""
    found = {}
    for first in first_processes(_processes(uid)):
        with contextlib.suppress(*_GONE):
            mounts = procfs.contents(first.pid, "mountinfo").decode(errors="surrogateescape")
            name = name_in(mounts, uid)
            if name is not None:
                found[name] = _Container(
                    Process(first.pid, first.start),
                    access_of(
                        procfs.contents(first.pid, "status").decode(errors="replace"),
                        procfs.contents(first.pid, "uid_map").decode(),
                        procfs.contents(first.pid, "gid_map").decode(),
                    ),
                )
    return found


def restored_below(first: Process, folder: Path) -> Process | None:
    """Return the restored process that the first one of a placeholder has adopted, or None."""
    with contextlib.suppress(*_GONE, SnapbackError), opened(open_own(folder)) as opening:
        inside = restored_pid(read_bounded(opening, RESTORED, 64))
        found = procfs.child_in(first.pid, inside) if inside else None
        return Process(*found.key) if found else None
    return None


def is_restored(folder: Path) -> bool:
    """Whether a process was announced to the first program of a placeholder, in its `folder`."""
    with contextlib.suppress(*_GONE, SnapbackError), opened(open_own(folder)) as opening:
        os.stat(RESTORED, dir_fd=opening, follow_symlinks=False)
        return True
    return False


def _processes(uid: Uid) -> Iterator[SeenProcess]:
    for process in procfs.running():
        with contextlib.suppress(*_GONE):
            cgroups = procfs.contents(process.pid, "cgroup").decode(errors="replace")
            if container := container_in(cgroups, uid):
                yield SeenProcess(process.pid, process.start, container)
