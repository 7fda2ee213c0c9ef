"""A worker whose processes use CUDA, around its dump and its restore.

The driver is asked in children of the request, so that it can be given up at any moment. Whatever
becomes of a dump, the processes are let go after it; where that fails they are the business of
`settling`, as they are when CRIU was killed: processes that it has stopped would not be answered
for.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator, Sequence
from functools import partial
from typing import NamedTuple

from snapshot_agent.adapters import procfs
from snapshot_agent.domain import cuda as rules
from snapshot_agent.domain.criu_source import SourceCuda, SourceGpu
from snapshot_agent.domain.cuda import (
    Capture,
    CudaProcess,
    CudaStuck,
    Gpu,
    Placement,
    Version,
)
from snapshot_agent.domain.gate import refuse
from snapshot_agent.helper import cuda, cuda_facts
from snapshot_agent.helper.children import Watch, in_child
from snapshot_shared.errors import Incompatible, OutcomeUnknown

LOCK_S = 10.0
"""How long the calls of CUDA that a quiet worker has under way may take, in seconds."""

NVIDIA_SMI_S = 10.0


class OnCuda(NamedTuple):
    """The processes of a worker that use CUDA, its devices, and the bytes that it has on them."""

    pids: Sequence[int]
    driver: Version
    gpus: Sequence[Gpu]
    bytes: int = 0

    @property
    def undo_s(self) -> float:
        """How long the way back may take."""
        return cuda.undo_s(self.bytes)

    @property
    def facts(self) -> SourceCuda:
        """What its restore has to know."""
        gpus = [SourceGpu(uuid=gpu.uuid, product=gpu.product) for gpu in self.gpus]
        return SourceCuda(processes=len(self.pids), driver=self.driver, gpus=gpus)


def check_node() -> None:
    """Raise why no process that uses CUDA can be dumped on this node.

    CudaMissing, CudaTimedOut, NotEligible.
    """
    refuse(rules.CAPTURE_CHECKS, Capture(cuda_facts.driver(), ()))
    # This process is none of CUDA, which the driver has to be there to say.
    cuda.processes([os.getpid()])


def look(pids: Sequence[int], uuids: Sequence[str], *, quiet: bool) -> OnCuda:
    """Return what a worker has of CUDA; `uuids` are its devices. NotEligible, and of the driver.

    What it has on devices is looked for with `quiet` alone, for other workers drop much of it.
    """
    driver = cuda_facts.driver()
    gpus = _gpus(uuids)
    refuse(rules.CAPTURE_CHECKS, Capture(driver, gpus))
    processes = _processes(cuda_facts.observe(pids, ()))
    refuse(rules.CAPTURE_CHECKS, Capture(driver, gpus, processes))
    uses = [process.pid for process in processes if process.is_cuda]
    on_devices = cuda_facts.used_bytes(uses, NVIDIA_SMI_S) if quiet and uses else 0
    return OnCuda(uses, driver or (), gpus, on_devices)


def _gpus(uuids: Sequence[str]) -> list[Gpu]:
    return rules.gpus_of(uuids, cuda_facts.gpus(NVIDIA_SMI_S)) if uuids else []


def _processes(seen: Sequence[CudaProcess]) -> list[CudaProcess]:
    # The driver is never asked for a process that is stopped.
    uses = set(cuda.processes([process.pid for process in seen if not process.stopped]))
    uses.update(process.pid for process in seen if process.stopped and process.has_device)
    return [process._replace(is_cuda=process.pid in uses) for process in seen]


@contextlib.contextmanager
def held(worker: OnCuda, watch: Watch) -> Iterator[None]:
    """Have what a worker has on devices in its memory within a block; then it is let go.

    OutcomeUnknown and CudaStuck leave it as it is.
    """
    pids, undo_s = worker.pids, worker.undo_s
    try:
        in_child(partial(cuda.lock_all, pids, LOCK_S, undo_s=undo_s), watch)
        in_child(partial(cuda.checkpoint_all, pids, watch.left_s, undo_s=undo_s), watch)
        yield
    except (CudaStuck, OutcomeUnknown):
        raise
    except BaseException as error:
        if left := rules.stuck(cuda.let_go(pids, undo_s)):
            raise left from error
        raise
    if left := rules.stuck(cuda.let_go(pids, undo_s)):
        raise left


def placed(source: SourceCuda, uuids: Sequence[str], chosen: dict[str, str]) -> dict[str, str]:
    """Return the device here of each device of a source, by uuid. Incompatible, NotEligible."""
    here = {gpu.uuid: gpu for gpu in _gpus(uuids)}
    found = rules.placed([gpu.uuid for gpu in source.gpus], uuids, chosen)
    there = {n: Gpu(gpu.uuid, gpu.product) for n, gpu in enumerate(source.gpus)}
    places = {n: here[found[gpu.uuid]] for n, gpu in there.items()}
    refuse(rules.RESTORE_CHECKS, Placement(source.driver, cuda_facts.driver(), there, places))
    return found


def bring_back(root: procfs.Stat, processes: int, devices: dict[str, str], watch: Watch) -> None:
    """Bring the processes of a restored tree to their devices, and let them run; or end the tree.

    `processes` is how many of them use CUDA.
    """
    tree = [process.pid for process in procfs.family_of(*root.key)]
    try:
        in_child(partial(_bring_back, tree, processes, devices, watch.left_s), watch)
    except BaseException:
        # The first process of its namespace: all others end with it.
        procfs.send(root, signal.SIGKILL)
        raise


def _bring_back(
    tree: Sequence[int], processes: int, devices: dict[str, str], within_s: float
) -> None:
    pids = cuda.processes(tree)
    if len(pids) != processes:
        raise Incompatible(
            f"{processes} processes of the source used CUDA, {len(pids)} of those restored do",
            next_step="capture a new worker, and look at the restored one's log",
            expected=processes,
            found=len(pids),
        )
    cuda.restore_all(pids, devices, within_s)
    cuda.unlock_all(pids)
