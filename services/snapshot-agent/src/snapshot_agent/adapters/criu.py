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
from typing import NamedTuple

from asyncinotify import Inotify, Mask

from snapback_client.frames import error_of
from snapshot_agent.adapters import procfs, settling
from snapshot_agent.adapters.copying import (
    ByteCounter,
    WriteBack,
    copied,
    digested,
    read_checked,
)
from snapshot_agent.adapters.kubelet import is_restored, restored_below
from snapshot_agent.adapters.scratch import Scratch
from snapshot_agent.domain.driving import Phase, Phases, Release
from snapshot_agent.domain.helping import (
    MAX_MESSAGE_BYTES,
    WHOLE,
    Begun,
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
from snapshot_agent.domain.mounts import Mount, mounts_in
from snapshot_agent.domain.spec import INSIDE, nodes_mounts
from snapshot_agent.ports import DriverState, Dump, Process, RestoreSource, Stage, Worker
from snapshot_agent.ports import Progress as Report
from snapshot_shared.artifact import FileEntry
from snapshot_shared.codec import decode_json, encode_json
from snapshot_shared.encrypting import PartCipher
from snapshot_shared.errors import NotEligible, SnapbackError, SourceExited
from snapshot_shared.orders import Driver
from snapshot_shared.tasks import end_all, in_thread
from snapshot_shared.volumes import CONTROL_VOLUME

INSPECTED_S = 30.0
"""How long an inspection may take, in seconds."""

CONNECTED_S = 5.0
STARTS_S = 30.0
"""How long a helper is waited for that does not listen yet, in seconds.

The pod of an upgraded node starts its containers one after another, and an order that was under way
goes on as soon as the agent runs.
"""

_PAGES = "pages-"
"""How the names of images begin that have memory and nothing else."""

_REFUSED = b"0"

READY_S = 2.0
"""How long the helper may take to say that CRIU is there, in seconds."""


Span = Callable[[str], contextlib.AbstractContextManager[object]]
"""Records a block as a span of a name in `CRIU_STEPS`."""


class HelperUnavailable(SnapbackError):
    """The helper of this node does not answer, so nothing was done to the worker."""

    retryable = True
    default_next_step = (
        "see why the helper of this node does not run; in a cluster it is a container of the "
        "agent's pod"
    )


class HelperLost(SnapbackError):
    """The helper of this node has ended while it worked on a worker."""


class Target(NamedTuple):
    """A process to dump, mounts that need not be captured, and the one with its control files."""

    process: Process
    ours: list[str]
    control: list[str]


class Criu:
    """The `ProcessDriver` port over the helper of a node."""

    name: Driver = "criu"
    needs_help = False
    restore_step = "restore-process"
    replaces = False
    plain = False
    """Whether workers have the root and the network of the node."""
    settled_s = settling.ANSWER_S
    """How long the helper may take to settle a worker, in seconds."""

    def __init__(
        self,
        helper: Path,
        monotonic: Callable[[], float],
        scratch: Scratch | None = None,
        span: Span = contextlib.nullcontext,
    ) -> None:
        """Ask the helper at the socket `helper`; `monotonic` is the clock of all deadlines.

        CRIU writes below the artifact root itself, unless that wants a `scratch` folder. `span`
        records a block as a span of this name.
        """
        self._helper = helper
        self._monotonic = monotonic
        self._scratch = scratch
        self._span = span
        self.stages: Sequence[Stage] = (
            Stage(
                "dump-process",
                self.dump,
                writes=True,
                phases=Phases(during=Phase.BEGUN, after=Phase.SIGNAL),
            ),
        )

    async def state(self, *, quick: bool = False) -> DriverState:
        return await self.ping(cuda=False, within_s=READY_S)

    async def inspect(self, worker: Worker, *, quiet: bool) -> int:
        target = await in_thread(self.target, worker)
        pid, start = target.process
        gpus = await self.gpus(worker)
        request = Inspect(
            pid=pid,
            start=start,
            ours=target.ours,
            quiet=quiet,
            gpus=gpus,
            scratch=await self._wanted() is not None,
            plain=self.plain,
            seccomp_profile=worker.seccomp_profile,
        )
        async with asyncio.timeout(INSPECTED_S):
            return (await self._ask(request)).bytes

    async def dump(self, dump: Dump) -> None:
        """Dump the worker, which goes on, and read what was written for its digests."""
        target = await in_thread(self.target, dump.worker)
        pid, start = target.process
        scratch = await self._wanted(dump.cipher)
        request = DumpRequest(
            pid=pid,
            start=start,
            within_s=dump.deadline - self._monotonic(),
            ours=target.ours,
            control=target.control,
            gpus=await self.gpus(dump.worker),
            scratch=scratch is not None,
            plain=self.plain,
        )
        counter = ByteCounter(dump.progress)
        if scratch is not None:
            async with scratch.place() as place:
                done = await self._ask(request, (place.fd,), dump.progress)
                dump.frozen_s = done.frozen_s
                await dump.goes_on()
                dump.files = await copied(place.fd, dump.part, counter, dump.cipher)
            return
        write_back = WriteBack(dump.part)

        async def grown(done: int) -> None:
            write_back.go_on()
            await dump.progress(done)

        try:
            dump.frozen_s = (await self._ask(request, (dump.part,), grown)).frozen_s
            await dump.goes_on()
        finally:
            await write_back.over()
        dump.files = await digested(dump.part, counter)

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
        if await in_thread(is_restored, folder):
            return placeholder.process
        counter = ByteCounter(source.progress)
        scratch = await self._wanted(source.cipher)
        if scratch is None:
            # CRIU, which is root, parses all images but those of pages. It may read pages while
            # they are checked, as long as no process runs on them (docs/adr/0055).
            pages = [entry for entry in source.files if entry.name.startswith(_PAGES)]
            others = [entry for entry in source.files if not entry.name.startswith(_PAGES)]
            with self._span("check-images"):
                await read_checked(source.part, others, counter)
            return await self._restored(placeholder, folder, source, pages, counter)
        async with scratch.place(sum(entry.size for entry in source.files)) as place:
            with self._span("check-images"):
                await read_checked(
                    source.part, source.files, counter, place.fd, cipher=source.cipher
                )
            return await self._restored(placeholder, folder, source, [], counter, place.name)

    async def _restored(
        self,
        placeholder: Worker,
        init: Path,
        source: RestoreSource,
        pages: Sequence[FileEntry],
        counter: ByteCounter,
        scratch: str = "",
    ) -> Process:
        """Restore the process while its pages are checked. Raise ArtifactCorrupt if one is wrong.

        `init` is the folder of the first program. The images are in the folder `scratch` of the
        scratch folder, if it has a name, and otherwise in the artifact.
        """
        pid, start = await in_thread(self.process, placeholder)
        request = RestoreRequest(
            pid=pid,
            start=start,
            within_s=source.deadline - self._monotonic(),
            folder=[scratch] if scratch else list(source.folder),
            init=str(init),
            scratch=bool(scratch),
            gpus=await self.gpus(placeholder),
            chosen=dict(source.devices),
        )

        async def check() -> None:
            with self._span("check-pages"):
                await read_checked(source.part, pages, counter)

        reader, writer = socket.socketpair()
        with reader, writer:
            checking = asyncio.ensure_future(check())
            asked = asyncio.ensure_future(self._ask(request, (reader.fileno(),)))
            try:
                await asyncio.wait((asked, checking), return_when=asyncio.FIRST_COMPLETED)
                if checking.done():
                    writer.send(WHOLE if checking.exception() is None else _REFUSED)
                    # The helper undoes a restore that was refused, and says that it failed.
                    await asyncio.gather(asked, return_exceptions=True)
                    await checking
                done = await asked
                # A helper of an earlier release waits for no verdict.
                await checking
            finally:
                await end_all(asked, checking)
        return Process(done.pid, done.start)

    async def _wanted(self, cipher: PartCipher | None = None) -> Scratch | None:
        """Return the scratch folder where CRIU has to use it. NotEligible: there is none."""
        if self._scratch is None and cipher is not None:
            raise NotEligible(
                "the artifact is encrypted, and this node has no scratch folder where CRIU could "
                "read it",
                next_step="set SNAPBACK_SCRATCH_DIR of the agent and of its helper",
            )
        if self._scratch is not None and (cipher or await self._scratch.is_wanted()):
            return self._scratch
        return None

    def release(self, worker: Worker, phase: Phase) -> Release:
        if phase is not Phase.BEGUN:
            return Release()
        pid, start = map(str, self.process(worker))
        module, within_s = settling.__name__, self.settled_s
        words = (str(self._helper), pid, start, str(within_s))
        return Release((sys.executable, "-m", module, *words), settling.RETURN_S + within_s)

    def process(self, worker: Worker) -> Process:
        """Return the process that is dumped, or below which one is restored. SourceExited."""
        return worker.process

    def target(self, worker: Worker) -> Target:
        """Return what of a worker is dumped. SourceExited."""
        process = self.process(worker)
        mounts = _mounts_of(process)
        control = own_mounts(mounts, worker.pod.uid, [CONTROL_VOLUME])
        return Target(process, own_mounts(mounts, worker.pod.uid), control)

    async def gpus(self, worker: Worker) -> list[str] | None:
        """Return the uuids of a container's GPUs for the helper; None where it has to use none."""
        return None

    async def ping(self, *, cuda: bool, within_s: float) -> DriverState:
        """Return what the helper says of this node."""
        try:
            async with asyncio.timeout(within_s):
                done = await self._ask(Ping(cuda=cuda), waits=False)
        except TimeoutError:
            silent = HelperUnavailable(f"the helper did not answer within {within_s:g} s")
            return DriverState(silent.to_failure())
        except SnapbackError as error:
            return DriverState(error.to_failure())
        return DriverState(done.unfit, done.criu, done.cuda_driver, done.seccomp_profile)

    async def _connect(self, caller: socket.socket, *, waits: bool) -> None:
        """Connect to the helper, also if it `waits` to be started. OSError, TimeoutError."""
        loop = asyncio.get_running_loop()
        with Inotify() as changes:
            # A helper renames its socket to this name once it listens.
            changes.add_watch(self._helper.parent, Mask.MOVED_TO)
            async with asyncio.timeout(STARTS_S if waits else CONNECTED_S):
                while True:
                    try:
                        return await loop.sock_connect(caller, str(self._helper))
                    except (FileNotFoundError, ConnectionRefusedError):
                        if not waits:
                            raise
                    await changes.get()

    async def _ask(
        self,
        request: Request,
        descriptors: Sequence[int] = (),
        report: Report | None = None,
        *,
        waits: bool = True,
    ) -> Done:
        """Send a request and return its answer. The helper ends the work when this is cancelled.

        A helper that does not listen yet is waited for, unless `waits` is False.
        """
        loop = asyncio.get_running_loop()
        with (
            socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as caller,
            contextlib.ExitStack() as under_way,
        ):
            caller.setblocking(False)  # noqa: FBT003 - its only form
            try:
                await self._connect(caller, waits=waits)
                socket.send_fds(caller, [encode_json(request)], list(descriptors))
            except OSError as error:
                # That of a timeout has no text.
                why = str(error) or "it was waited for in vain"
                raise HelperUnavailable(f"no helper answers at {self._helper}: {why}") from error
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
                if isinstance(reply, Begun):
                    under_way.close()
                    under_way.enter_context(self._span(reply.step))
                elif report is not None:
                    await report(reply.done)


class PlainCriu(Criu):
    """The `ProcessDriver` port for workers that the agent has started, each in its namespaces.

    The agent follows the process that has started them, for that one ends as they do.
    """

    plain = True

    def process(self, worker: Worker) -> Process:
        found = procfs.child_of(worker.process.pid)
        if found is None:
            raise SourceExited("the worker has ended")
        first = Process(*found.key)
        placeholder = worker.paths.placeholder
        return (placeholder and restored_below(first, placeholder)) or first

    def target(self, worker: Worker) -> Target:
        process = self.process(worker)
        return Target(process, nodes_mounts(_mounts_of(process)), [str(INSIDE / "control")])

    async def restore(self, placeholder: Worker, source: RestoreSource) -> Process:
        await super().restore(placeholder, source)
        return placeholder.process

    def release(self, worker: Worker, phase: Phase) -> Release:
        try:
            return super().release(worker, phase)
        except SourceExited:
            return Release()


def _mounts_of(process: Process) -> list[Mount]:
    try:
        return mounts_in(procfs.contents(process.pid, "mountinfo").decode(errors="surrogateescape"))
    except (FileNotFoundError, ProcessLookupError) as error:
        raise SourceExited("the worker has ended") from error
