"""The ports of the agent: what handlers use of the node and of its neighbours."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import msgspec

from snapshot_agent.domain.control import Access, ContainerPaths
from snapshot_agent.domain.driving import AS_BEFORE, Phase, Phases, Release
from snapshot_agent.domain.gate import ObservedPod
from snapshot_agent.domain.spec import ProcessSpec
from snapshot_shared.api import FoundGeneration, InventoryReply
from snapshot_shared.artifact import Facts, FileEntry, PartManifest, RootManifest
from snapshot_shared.clocks import Clocks
from snapshot_shared.encrypting import PartCipher
from snapshot_shared.errors import Failure, NotEligible, SnapbackError, StalePodReference
from snapshot_shared.journal import Journal
from snapshot_shared.ledger import Entry
from snapshot_shared.metrics import OFF, Metrics
from snapshot_shared.orders import (
    ArtifactRef,
    Driver,
    LayoutRef,
    OnFailure,
    PodRef,
    PresenceDevice,
)

Progress = Callable[[int], Awaitable[None]]
"""Receives how many bytes are done."""


class Process(NamedTuple):
    """A process by pid and start time (clock ticks), because pids are used again."""

    pid: int
    start: int


@dataclass(frozen=True)
class Worker:
    """The process of one container, which leads a session.

    `gpus` are the uuids of those that the agent has started it with, in their order.
    `seccomp_profile` is the one that its pod's spec names, as the order of its capture has it.
    """

    pod: PodRef
    process: Process
    paths: ContainerPaths
    gpus: Sequence[str] = ()
    seccomp_profile: str = ""


class ResolvedContainer(NamedTuple):
    """A container as `Workers.resolve` finds it. `image` and `command` are those of its start."""

    pod: ObservedPod
    worker: Worker | None = None
    image: str = ""
    command: Sequence[str] = ()

    def running(self) -> Worker:
        """Return the worker. StalePodReference when the container is not on this node."""
        if self.worker is None:
            raise StalePodReference(f"pod {self.pod.wanted.name} does not run on this node")
        return self.worker


SetProcess = Callable[[Process], Awaitable[Worker]]
"""Sets the process of a container; to set the same one again changes nothing."""


class Workers(Protocol):
    """The workers of this node, whether the agent or a kubelet has started them."""

    async def resolve(self, pod: PodRef) -> ResolvedContainer:
        """Return a container by the uid of its pod and its name."""

    def is_alive(self, process: Process) -> bool:
        """Whether a process runs."""

    async def ended(self, process: Process) -> int | None:
        """Wait for the end; return the exit code (128 + n after signal n), None if unknown."""

    async def end(self, worker: Worker) -> None:
        """Kill all processes of one container."""

    async def end_pod(self, pod_uid: str, grace_s: float) -> None:
        """End all processes of a pod. A pod without any is success."""

    def replacing(self, worker: Worker) -> AbstractAsyncContextManager[SetProcess]:
        """Allow the process of a container to end within a block.

        The container ends with it unless the block sets another process.
        """


class Launcher(Protocol):
    """Starts the processes of containers on a node without a kubelet. They outlive the agent."""

    async def spawn(self, spec: ProcessSpec) -> Process:
        """Start a process in a session of its own. InvalidInput, NotFound."""

    def adopt(self, process: Process) -> bool:
        """Watch a process that an earlier agent started; whether it runs."""

    async def ended(self, process: Process) -> int | None:
        """Wait for the end; return the exit code (128 + n after signal n), None if unknown."""

    async def terminate(
        self, process: Process | None, where: ContainerPaths | None, grace_s: float
    ) -> None:
        """Send SIGTERM, and SIGKILL after the grace period; SIGKILL at once if that is 0.

        Frozen processes are thawed. All processes with the environment of the container at `where`
        are included, even if they have left its session; without it they are not looked for.
        DeadlineExceeded when too many processes hang to look for them; the session has ended then.
        """

    async def find(self, where: ContainerPaths) -> Process | None:
        """Return the process of a container, found by its environment, or None."""

    async def running(self, where: Path) -> list[str]:
        """Return the names of the containers below a pod's folder that have processes.

        They are read from environments, which are hostile input.
        """

    async def folders(self, where: Path) -> list[str]:
        """Return the names of the folders in a folder; none when it is not there."""

    async def remove(self, where: Path) -> None:
        """Remove a folder with its contents. An absent one is success."""


class ControlDirectory(Protocol):
    """The control directories of containers. What a worker writes there is hostile input."""

    def create(self, where: ContainerPaths) -> None:
        """Make an empty control directory with its `state` folder, if there is none."""

    def put(self, where: ContainerPaths, name: str, data: bytes) -> None:
        """Put a file in place by a rename. A directory that is gone is no error."""

    def get(self, where: ContainerPaths, name: str) -> bytes | None:
        """Return the contents of a file; None when it is absent or no regular file."""

    def remove(self, where: ContainerPaths, name: str) -> None:
        """Remove a file; an absent one is no error."""

    async def clear(self, where: ContainerPaths, *names: str) -> None:
        """Remove files and folders; absent ones are no error. `state` is emptied, not removed."""

    async def appears(
        self, where: ContainerPaths, name: str, accepts: Callable[[bytes], bool]
    ) -> None:
        """Wait until a file is there whose body is accepted, without a deadline."""


async def _unawaited() -> None:
    pass


@dataclass
class Dump:
    """The state of a dump, shared by the stages of a driver.

    `part` is a descriptor of the directory to write into, -1 before the first stage that writes;
    what is written there is encrypted by `cipher`, if there is one.
    `deadline` is in seconds of the monotonic clock. A stage that replaces the process sets
    `worker`. `files` are those that were written. `frozen_s` is for how many seconds the worker was
    stopped, where the driver knows it better than from the time of its stages. A stage awaits
    `goes_on` when it is done with the worker and has more to do.
    """

    worker: Worker
    attempt: int
    deadline: float
    progress: Progress
    part: int = -1
    cipher: PartCipher | None = None
    files: Sequence[FileEntry] = field(default_factory=list)
    frozen_s: float | None = None
    goes_on: Callable[[], Awaitable[None]] = _unawaited


@dataclass(frozen=True)
class Stage:
    """One step of a driver's dump. `budget_s` is in seconds, by default that of the order.

    One that `writes` is not run again after an interruption. One that `replaces` ends the process
    of the worker and leaves another one in `Dump.worker`.
    """

    name: str
    run: Callable[[Dump], Coroutine[Any, Any, None]]
    budget_s: float | None = None
    writes: bool = False
    replaces: bool = False
    phases: Phases = AS_BEFORE


class RestoreSource(NamedTuple):
    """The saved state that a process is restored from.

    `part` is a descriptor of the directory with `files`, and `folder` the names of the path to it
    below the artifact root. `cipher` decrypts the files, where they are encrypted. `devices` has
    the UUID of the device here by that of the source. `deadline` is in seconds of the monotonic
    clock.
    """

    part: int
    folder: Sequence[str]
    files: Sequence[FileEntry]
    devices: Mapping[str, str]
    deadline: float
    progress: Progress
    cipher: PartCipher | None = None


class DriverState(NamedTuple):
    """What a node has for a driver: `failure` is why it cannot be used now, None when it can.

    `criu` and `cuda_driver` are versions, empty where the driver needs none or they are not known.
    `seccomp_profile` is the one that the node has for its workers.
    """

    failure: Failure | None = None
    criu: str = ""
    cuda_driver: str = ""
    seccomp_profile: str = ""


class ProcessDriver(Protocol):
    """Dumps and restores the state of one worker."""

    @property
    def name(self) -> Driver:
        """The name of the driver in orders and artifacts."""

    @property
    def stages(self) -> Sequence[Stage]:
        """The steps of a dump in their order, without the one that finishes the part.

        The first stops the worker; after the last it runs again.
        """

    @property
    def needs_help(self) -> bool:
        """Whether the worker has to save its own state, when `quiesce` asks for it."""

    @property
    def restore_step(self) -> str:
        """The name of the step that calls `restore`."""

    @property
    def replaces(self) -> bool:
        """Whether `restore` ends the placeholder's process."""

    async def state(self, *, quick: bool = False) -> DriverState:
        """Return whether this node can use the driver now, and by which programs.

        With `quick` what would take long to find out is believed.
        """

    async def inspect(self, worker: Worker, *, quiet: bool) -> int:
        """Return an estimate of the bytes that a dump will write.

        NotEligible when the worker cannot be dumped. `quiet`: it has answered `quiesce`.
        """

    async def restore(self, placeholder: Worker, source: RestoreSource) -> Process:
        """Return a process with the saved state, which replaces the placeholder.

        ArtifactCorrupt before a bad byte is given to a worker.
        """

    def release(self, worker: Worker, phase: Phase) -> Release:
        """Return how to let a worker go in this phase of a dump."""


class GpuMemory(Protocol):
    """A GPU memory service: that of the node, or with `at` that of a pod."""

    def at(self, pod: PodRef) -> GpuMemory:
        """Return the service that owns the memory of a pod; its calls fail when there is none."""

    async def fence(
        self, token: str, devices: Sequence[str], *, wait_s: float, deadline_s: float
    ) -> list[LayoutRef]:
        """Keep all sessions off these devices; return what is committed on those that have it."""

    async def unfence(self, token: str) -> None:
        """End a fence; one that has not begun will not begin."""

    def unfencing(self, token: str) -> tuple[str, ...]:
        """Return the arguments of a program that ends the fence; empty when there is none."""

    async def devices(self, *, wait_s: float) -> list[PresenceDevice]:
        """Return the devices, waiting up to `wait_s` seconds for a service that starts."""


class NodeDevices(Protocol):
    """The devices of the node."""

    async def devices(self, *, wait_s: float) -> list[PresenceDevice]:
        """Return the devices, waiting up to `wait_s` seconds for a service that starts."""


class PodDevices(Protocol):
    """The devices of a pod that has no memory server."""

    async def of(self, pod: PodRef) -> list[PresenceDevice] | None:
        """Return those that a container was given, in their order; None where it is not known."""


class GuardSpec(NamedTuple):
    """What a guard watches, and what it does without its agent.

    `deadline` is in seconds of the monotonic clock of boot `boot_id`. `release` lets the worker go
    until `GuardLink.release_by` sets another. `unfence` is a program that ends the fence on the
    devices of the worker, or empty. `order` and `traceparent` are for the log.
    """

    name: str
    process: Process
    control: Path
    attempt: int
    deadline: float
    boot_id: str
    on_failure: OnFailure
    release: Release = Release()
    unfence: tuple[str, ...] = ()
    access: Access = Access()
    order: str = ""
    traceparent: str = ""


class GuardLink(Protocol):
    """The connection to a guard. When it breaks, the guard acts unless an agent adopts it."""

    async def lost(self) -> None:
        """Wait for the end of the guard."""

    def release_by(self, release: Release) -> None:
        """Set how the guard lets the worker go."""

    def follow(self, process: Process) -> None:
        """Set the process of the worker."""

    def thaw_by(self, deadline: float) -> None:
        """Set when the guard acts although the agent is connected, because the agent hangs.

        `deadline` is in seconds of the monotonic clock. A guard that is gone is no error.
        """

    async def confirm(self) -> None:
        """Return when the guard has answered that it holds the worker, or has ended.

        A guard that does not answer is killed. If it has let the worker go, `snapshot-aborted` is
        in the control directory when this returns.
        """

    async def dismiss(self) -> None:
        """End the guard without any action of it."""

    def close(self) -> None:
        """Close the connection; the guard then waits for the next agent."""


class Guard(Protocol):
    """Starts guards, and adopts those of an earlier agent."""

    async def start(self, spec: GuardSpec) -> GuardLink:
        """Start a guard and return when it is armed. SourceExited when the worker is gone."""

    async def adopt(self, spec: GuardSpec) -> GuardLink | None:
        """Connect to the guard of an earlier agent; None when there is none."""

    async def release(self, process: Process, release: Release) -> bool:
        """Let a worker go in the way of a guard; whether a program was run and has succeeded."""


class GenerationRef(NamedTuple):
    """One generation below the artifact root."""

    namespace: str
    content_uid: str
    generation: int


class Artifacts(Protocol):
    """Parts and generations below the artifact root, which all nodes share; hostile input."""

    async def require_space(self, own: int, weights: int) -> None:
        """Raise NoSpace unless this many bytes of a worker's own state and of weights fit."""

    def new_part(self, place: GenerationRef, part: str) -> AbstractAsyncContextManager[int]:
        """Create the directory of a part; yield a descriptor. ArtifactExists."""

    def open_part(self, place: GenerationRef, part: str) -> AbstractAsyncContextManager[int]:
        """Open the directory of a part; yield a descriptor. ArtifactMissing."""

    async def finish_part(self, directory: int, manifest: PartManifest) -> str:
        """Write the part manifest durably; return its digest."""

    async def read_part(self, place: GenerationRef, part: str) -> tuple[PartManifest, str]:
        """Return a part manifest and its digest; check the sizes and kinds of all files."""

    async def check_bytes(
        self, place: GenerationRef, manifest: PartManifest, progress: Progress
    ) -> None:
        """Read every byte of a part. ArtifactCorrupt names file and chunk."""

    async def parts(self, place: GenerationRef) -> list[str]:
        """Return the names of the parts of a generation on disk."""

    async def seal(self, manifest: RootManifest) -> str:
        """Put the root manifest in place, never over another one; return its digest.

        Where this node has a key to sign with, its signature is there before.
        """

    async def read_root(self, ref: ArtifactRef) -> RootManifest:
        """Return the root manifest. ArtifactCorrupt when its digest is another one."""

    async def check_signature(self, ref: ArtifactRef) -> None:
        """Raise NotTrusted unless an artifact is signed as this node wants it."""

    async def remove(self, place: GenerationRef) -> None:
        """Remove a generation, its root manifest first. Absent is success."""


class PartKeys(Protocol):
    """The keys by which the process parts of artifacts are encrypted."""

    async def new_cipher(self, place: GenerationRef, part: str) -> PartCipher | None:
        """Return a cipher for a new part; None where parts are not encrypted. KeyUnavailable."""

    async def cipher_of(self, manifest: PartManifest) -> PartCipher | None:
        """Return the cipher of a part, None where it is not encrypted. KeyUnavailable."""


class Stray(NamedTuple):
    """An entry below the artifact root that is neither a generation nor a folder above one.

    `path` has one to three names. `age_s` is the time since its last change, in seconds.
    """

    path: tuple[str, ...]
    age_s: float


class Listing(NamedTuple):
    """The entries below the artifact root."""

    generations: list[FoundGeneration]
    strays: list[Stray]


class Library(Protocol):
    """The artifact root as a whole. Links are not followed, and nothing is removed."""

    async def listing(self, now: float) -> Listing:
        """List all entries but hidden ones; `now` is in seconds since the epoch."""

    async def set_aside(self, path: Sequence[str], label: str) -> bool:
        """Move one entry, with its path, below `.quarantine/<label>`; False when it is gone.

        ArtifactExists when something stands there already.
        """

    async def count_set_aside(self) -> int:
        """Return the number of entries in quarantine."""


class Operator(Protocol):
    """What the agent asks the operator. All raise BusUnavailable, and NotFound without one."""

    async def spec(self, pod: PodRef) -> Any:
        """Return the spec of a pod as JSON values, waiting for an operator that is away.

        Specs hold secrets, so they never travel in orders. StalePodReference when the pod of this
        name has another uid.
        """

    async def unknown_pods(self, pods: Sequence[str]) -> list[str]:
        """Return which of these uids are of no Pod in the store."""

    async def judge(self, found: Sequence[FoundGeneration]) -> InventoryReply:
        """Return a verdict about each generation, which must have been listed before."""


class Locks(Protocol):
    """Exclusion between processes."""

    def take(self, path: Path) -> Callable[[], None] | None:
        """Lock a file; return what unlocks it, or None when another process has the lock."""


class Orders(Protocol):
    """The order book, as handlers use it beyond the context of their own order."""

    journal: Journal

    async def report(self, entry: Entry, kind: str, **fields: Any) -> None:
        """Journal a report and have it published."""

    async def tombstone(self, subject: str, attempt: int) -> None:
        """Journal that no attempt up to this one of the named work may begin or go on."""

    def require_current(self, subject: str, attempt: int) -> None:
        """Raise Superseded when the named work was aborted at this attempt or later."""

    async def cancel(
        self,
        order_id: str,
        attempt: int,
        within_s: float | None = None,
        why: SnapbackError | None = None,
    ) -> bool:
        """Cancel a running order of at most this attempt; whether there was one.

        Waits for its compensation, for `within_s` seconds at most if given. It fails with `why`, or
        else with Aborted.
        """


@dataclass(frozen=True)
class Machine:
    """All ports of one node."""

    launcher: Launcher
    control: ControlDirectory
    drivers: Mapping[Driver, ProcessDriver]
    gpu_memory: GpuMemory
    guards: Guard
    artifacts: Artifacts
    keys: PartKeys
    operator: Operator
    locks: Locks
    clocks: Clocks
    facts: Facts
    metrics: Metrics = OFF
    pod_devices: PodDevices | None = None

    async def facts_with(self, driver: ProcessDriver) -> Facts:
        """Return the facts of the node, with those of the programs that a driver uses."""
        state = await driver.state(quick=True)
        return msgspec.structs.replace(
            self.facts, driver=driver.name, criu=state.criu, cuda_driver=state.cuda_driver
        )

    def driver(self, name: Driver) -> ProcessDriver:
        """Return the driver that an order names. NotEligible when this node does not have it."""
        found = self.drivers.get(name)
        if found is None:
            raise NotEligible(
                f"driver {name} is not on this node, which has {', '.join(self.drivers)}",
                next_step="use a node that announces this driver, or another driver",
                expected=name,
                found=list(self.drivers),
            )
        return found
