"""The driver of workers that need not help: the helper of the node has CRIU dump their processes.

A worker is let go by the helper, too. A dump under way is made to fail, after which CRIU sets the
worker free; one that had to be killed has broken it, and it is ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from snapback_client.frames import error_of
from snapshot_agent.adapters import settling
from snapshot_agent.adapters.copying import ByteCounter, WriteBack, digested, read_checked
from snapshot_agent.domain.driving import Phase, Phases, Release
from snapshot_agent.domain.helping import (
    MAX_MESSAGE_BYTES,
    RESTORED,
    Done,
    DumpRequest,
    Failed,
    Inspect,
    Ping,
    Reply,
    Request,
    RestoreRequest,
)
from snapshot_agent.domain.kubelet import own_mounts
from snapshot_agent.domain.mounts import mounts_in
from snapshot_agent.ports import Dump, Process, RestoreSource, Stage, Worker
from snapshot_agent.ports import Progress as Report
from snapshot_shared.codec import decode_json, encode_json
from snapshot_shared.errors import NotEligible, SnapbackError, SourceExited
from snapshot_shared.orders import Driver
from snapshot_shared.tasks import in_thread

INSPECTED_S = 30.0
"""How long an inspection may take, in seconds."""

CONNECTED_S = 5.0

READY_S = 2.0
"""How long the helper may take to say that CRIU is there, in seconds."""


class HelperUnavailable(SnapbackError):
    """The helper of this node does not answer, so nothing was done to the worker."""

    retryable = True
    default_next_step = "see why the container helper of the agent's pod does not run"


class HelperLost(SnapbackError):
    """The helper of this node has ended while it worked on a worker."""


class Criu:
    """The `ProcessDriver` port over the helper of a node."""

    name: Driver = "criu"
    needs_help = False
    restore_step = "restore-process"
    replaces = False
    settled_s = settling.ANSWER_S
    """How long the helper may take to settle a worker, in seconds."""

    def __init__(self, helper: Path, monotonic: Callable[[], float]) -> None:
        """Ask the helper at the socket `helper`; `monotonic` is the clock of all deadlines."""
        self._helper = helper
        self._monotonic = monotonic
        self.stages: Sequence[Stage] = (
            Stage(
                "dump-process",
                self.dump,
                writes=True,
                phases=Phases(during=Phase.BEGUN, after=Phase.SIGNAL),
            ),
        )

    async def is_ready(self) -> bool:
        return await self.ping(cuda=False, within_s=READY_S)

    async def inspect(self, worker: Worker, *, quiet: bool) -> int:
        pid, start = worker.process
        ours = await in_thread(_ours, worker)
        gpus = await self.gpus(worker)
        request = Inspect(pid=pid, start=start, ours=ours, quiet=quiet, gpus=gpus)
        async with asyncio.timeout(INSPECTED_S):
            return (await self._ask(request)).bytes

    async def dump(self, dump: Dump) -> None:
        """Dump the worker, which goes on, and read what was written for its digests."""
        pid, start = dump.worker.process
        within_s = dump.deadline - self._monotonic()
        ours = await in_thread(_ours, dump.worker)
        gpus = await self.gpus(dump.worker)
        request = DumpRequest(pid=pid, start=start, within_s=within_s, ours=ours, gpus=gpus)
        write_back = WriteBack(dump.part)

        async def grown(done: int) -> None:
            write_back.go_on()
            await dump.progress(done)

        try:
            dump.frozen_s = (await self._ask(request, (dump.part,), grown)).frozen_s
        finally:
            await write_back.over()
        dump.files = await digested(dump.part, ByteCounter(dump.progress))

    async def restore(self, placeholder: Worker, source: RestoreSource) -> Process:
        folder = placeholder.paths.placeholder
        if folder is None:
            raise NotEligible(
                f"container {placeholder.pod.container} of pod {placeholder.pod.name} was started "
                "as it is in its image, where a process cannot be restored",
                next_step="create the pod with the annotation nvidia.com/restore-from, and see "
                "that the webhook for pods answers",
            )
        # The last thing that a restore does; then `placeholder` is the restored process.
        if await in_thread((folder / RESTORED).exists):
            return placeholder.process
        await read_checked(source.part, source.files, ByteCounter(source.progress))
        pid, start = placeholder.process
        request = RestoreRequest(
            pid=pid,
            start=start,
            within_s=source.deadline - self._monotonic(),
            folder=list(source.folder),
            init=str(folder),
            gpus=await self.gpus(placeholder),
            chosen=dict(source.devices),
        )
        done = await self._ask(request)
        return Process(done.pid, done.start)

    def release(self, worker: Worker, phase: Phase) -> Release:
        if phase is not Phase.BEGUN:
            return Release()
        pid, start = map(str, worker.process)
        module, within_s = settling.__name__, self.settled_s
        words = (str(self._helper), pid, start, str(within_s))
        return Release((sys.executable, "-m", module, *words), settling.RETURN_S + within_s)

    async def gpus(self, worker: Worker) -> list[str] | None:
        """Return the uuids of a container's GPUs for the helper; None where it has to use none."""
        return None

    async def ping(self, *, cuda: bool, within_s: float) -> bool:
        """Return whether the helper says that this node is fit."""
        try:
            async with asyncio.timeout(within_s):
                await self._ask(Ping(cuda=cuda))
        except (SnapbackError, TimeoutError):
            return False
        return True

    async def _ask(
        self, request: Request, descriptors: Sequence[int] = (), report: Report | None = None
    ) -> Done:
        """Send a request and return its answer. The helper ends the work when this is cancelled."""
        loop = asyncio.get_running_loop()
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as caller:
            caller.setblocking(False)  # noqa: FBT003 - its only form
            try:
                async with asyncio.timeout(CONNECTED_S):
                    await loop.sock_connect(caller, str(self._helper))
                socket.send_fds(caller, [encode_json(request)], list(descriptors))
            except (OSError, TimeoutError) as error:
                raise HelperUnavailable(f"no helper answers at {self._helper}: {error}") from error
            while True:
                data = b""
                with contextlib.suppress(ConnectionError):
                    data = await loop.sock_recv(caller, MAX_MESSAGE_BYTES)
                if not data:
                    raise HelperLost("the helper of this node ended while it worked")
                reply: Reply = decode_json(data, Reply, limit=MAX_MESSAGE_BYTES)  # type: ignore[arg-type]
                if isinstance(reply, Failed):
                    raise error_of(reply.failure)
                if isinstance(reply, Done):
                    return reply
                if report is not None:
                    await report(reply.done)


def _ours(worker: Worker) -> list[str]:
    """Return the mounts of a container by which it meets the services of its node."""
    try:
        with open(f"/proc/{worker.process.pid}/mountinfo", encoding="utf-8") as file:  # noqa: PTH123
            return own_mounts(mounts_in(file.read()), worker.pod.uid)
    except (FileNotFoundError, ProcessLookupError) as error:
        raise SourceExited("the worker has ended") from error
