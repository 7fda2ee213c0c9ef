"""What the agent needs of its node. Adapters fill these; handlers know nothing else."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

from snapshot_agent.domain.control import Access, ContainerPaths
from snapshot_agent.domain.driving import AS_BEFORE, Phase, Phases, Release
from snapshot_agent.domain.gate import ObservedPod
from snapshot_agent.domain.spec import ProcessSpec
from snapshot_shared.api import FoundGeneration, InventoryReply
from snapshot_shared.artifact import Facts, FileEntry, PartManifest, RootManifest
from snapshot_shared.clocks import Clocks
from snapshot_shared.errors import NotEligible, StalePodReference
from snapshot_shared.journal import Journal
from snapshot_shared.ledger import Entry
from snapshot_shared.metrics import OFF, Metrics
from snapshot_shared.orders import ArtifactRef, Driver, LayoutRef, PodRef, PresenceDevice

Progress = Callable[[int], Awaitable[None]]
"""Is told how many bytes are done."""


class Process(NamedTuple):
    """One process for good: pids come again, a pid with its start time (clock ticks) does not."""

    pid: int
    start: int


@dataclass(frozen=True)
class Worker:
    """The process of one container. It leads a session of its own."""

    pod: PodRef
    process: Process
    paths: ContainerPaths


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
"""Takes a process as that of the container from here on; the same one again changes nothing."""


class Workers(Protocol):
    """The workers of this node, whatever has started them."""

    async def resolve(self, pod: PodRef) -> ResolvedContainer:
        """Find the process of a container by the pod's uid and the container's name."""
        ...

    def is_alive(self, process: Process) -> bool:
        """Whether a process runs."""
        ...

    async def ended(self, process: Process) -> int | None:
        """Wait for the end. The exit code (128 + n after signal n), None when it is not known."""
        ...

    async def end(self, worker: Worker) -> None:
        """Kill everything of one container."""
        ...

    async def end_pod(self, pod_uid: str, grace_s: float) -> None:
        """End everything of a pod; nothing left to end is success."""
        ...

    def replacing(self, worker: Worker) -> AbstractAsyncContextManager[SetProcess]:
        """Let a process end within a block without the end of its container.

        The container has ended with it after all unless the block names the next process.
        """
        ...


class Launcher(Protocol):
    """Starts the processes of containers, where no kubelet does. They outlive the agent."""

    async def spawn(self, spec: ProcessSpec) -> Process:
        """Start a process in a session of its own. NotFound when the program is not there."""
        ...

    def adopt(self, process: Process) -> bool:
        """Watch a process that an earlier agent started; False when it has ended."""
        ...

    async def ended(self, process: Process) -> int | None:
        """Wait for the end. The exit code (128 + n after signal n), None when it is not known."""
        ...

    async def terminate(
        self, process: Process | None, where: ContainerPaths, grace_s: float
    ) -> None:
        """Thaw, SIGTERM, SIGKILL after the grace period: the whole session, and what left it.

        Without a grace period there is only SIGKILL.
        """
        ...

    def find(self, where: ContainerPaths) -> Process | None:
        """Find the process of a container by its environment, or None."""
        ...

    def running(self, where: Path) -> list[str]:
        """Return the names of the containers below a pod's folder that have processes.

        As their environments say, which is hostile input.
        """
        ...

    async def folders(self, where: Path) -> list[str]:
        """Return the names of the folders in a folder; none when it is not there."""
        ...

    async def remove(self, where: Path) -> None:
        """Remove a folder and what is in it, however much that is. Absent is success."""
        ...


class ControlDirectory(Protocol):
    """The control directories of containers. What a worker puts there is hostile input."""

    def create(self, where: ContainerPaths) -> None:
        """Make an empty control directory with its `state` folder, if there is none."""
        ...

    def put(self, where: ContainerPaths, name: str, data: bytes) -> None:
        """Put a file in place, whole. A directory that is gone is no error."""
        ...

    def get(self, where: ContainerPaths, name: str) -> bytes | None:
        """Read a file; None when it is not there or is no plain file."""
        ...

    def remove(self, where: ContainerPaths, name: str) -> None:
        """Remove a file; an absent one is no error."""
        ...

    async def clear(self, where: ContainerPaths, *names: str) -> None:
        """Remove files and folders; absent ones are no error. `state` is emptied, not removed."""
        ...

    async def appears(
        self, where: ContainerPaths, name: str, accepts: Callable[[bytes], bool]
    ) -> None:
        """Wait until a file is there whose body is accepted. The caller sets the deadline."""
        ...


@dataclass
class Dump:
    """A dump under way, as the stages of a driver share it.

    `part` is a descriptor of the directory to write into, from the first stage that writes on.
    `deadline` is in seconds of the monotonic clock. A stage that replaces the process puts the next
    one into `worker`. `files` are those that were written.
    """

    worker: Worker
    attempt: int
    deadline: float
    progress: Progress
    part: int = -1
    files: Sequence[FileEntry] = field(default_factory=list)


@dataclass(frozen=True)
class Stage:
    """One step of a driver's dump. Without `budget_s` (seconds) it may take the order's.

    One that `writes` is never run again after an interruption. One that `replaces` ends the
    worker's process and leaves another one in `Dump.worker`.
    """

    name: str
    run: Callable[[Dump], Coroutine[Any, Any, None]]
    budget_s: float | None = None
    writes: bool = False
    replaces: bool = False
    phases: Phases = AS_BEFORE


class RestoreSource(NamedTuple):
    """What a process is brought back from.

    `part` is a descriptor of the directory that holds `files`. `devices` names the device here in
    place of each of the source, by UUID. `deadline` is in seconds of the monotonic clock.
    """

    part: int
    files: Sequence[FileEntry]
    devices: Mapping[str, str]
    deadline: float
    progress: Progress


class ProcessDriver(Protocol):
    """Captures the state of one worker and gives it back."""

    @property
    def name(self) -> Driver:
        """The name that orders call it by, and that is recorded in the artifact."""
        ...

    @property
    def stages(self) -> Sequence[Stage]:
        """The steps of a dump in their order, up to the one that finishes the part.

        After the first the worker stands still; after the last it is as it was before.
        """
        ...

    @property
    def restore_step(self) -> str:
        """The name of the step of a restore that `restore` is."""
        ...

    @property
    def replaces(self) -> bool:
        """Whether `restore` ends the placeholder's process."""
        ...

    async def size(self, worker: Worker) -> int:
        """Return how many bytes a dump will write, as far as can be known."""
        ...

    async def restore(self, placeholder: Worker, source: RestoreSource) -> Process:
        """Return a process with the saved state, which waits in the placeholder's place.

        ArtifactCorrupt before a bad byte gets to a worker.
        """
        ...

    def release(self, worker: Worker, phase: Phase) -> Release:
        """Return how a worker in this phase of a dump is let go."""
        ...


class GpuMemory(Protocol):
    """A GPU memory service: that of the node, and by `at` that of a pod."""

    def at(self, pod: PodRef) -> GpuMemory:
        """Return the service that has the memory of a pod."""
        ...

    async def fence(
        self, token: str, devices: Sequence[str], *, wait_s: float, deadline_s: float
    ) -> list[LayoutRef]:
        """Keep every session off these devices; what is committed on each, in their order."""
        ...

    async def unfence(self, token: str) -> None:
        """End a fence, or make sure that it never begins."""
        ...

    def unfencing(self, token: str) -> tuple[str, ...]:
        """Return a program that does the same where no agent is; empty when there is none."""
        ...

    async def devices(self, *, wait_s: float) -> list[PresenceDevice]:
        """List the devices, waiting up to `wait_s` for a service that is not up yet."""
        ...


class GuardSpec(NamedTuple):
    """What a guard watches, and what it does when nobody else can.

    `deadline` is in seconds of the monotonic clock of boot `boot_id`. `release` lets the worker go
    as long as the link names no other. `unfence` is the program that ends the fence on the worker's
    devices; empty when it has none. `order` and `traceparent` are for its log.
    """

    name: str
    process: Process
    control: Path
    attempt: int
    deadline: float
    boot_id: str
    on_failure: Literal["Resume", "Kill"]
    release: Release = Release()
    unfence: tuple[str, ...] = ()
    access: Access = Access()
    order: str = ""
    traceparent: str = ""


class GuardLink(Protocol):
    """The agent's end of a guard. When it breaks, the guard acts unless an agent comes back."""

    async def lost(self) -> None:
        """Wait until the guard is gone."""
        ...

    def release_by(self, release: Release) -> None:
        """Set how the guard lets the worker go from here on."""
        ...

    def follow(self, process: Process) -> None:
        """Name the process that the worker has from here on."""
        ...

    def thaw_by(self, deadline: float) -> None:
        """Say until when the worker may be frozen; infinite when it is not. A lost guard is told.

        `deadline` is in seconds of the monotonic clock. After it the guard acts as at the end of
        its duty, although the agent is there: it hangs.
        """
        ...

    async def dismiss(self) -> None:
        """End the guard without action."""
        ...

    def close(self) -> None:
        """Let go of the guard, as an agent does that ends."""
        ...


class Guard(Protocol):
    """Starts guards and finds those that an earlier agent started."""

    async def start(self, spec: GuardSpec) -> GuardLink:
        """Start a guard and return when it is armed. SourceExited when the worker is gone."""
        ...

    async def adopt(self, spec: GuardSpec) -> GuardLink | None:
        """Take over a guard that waits for a returning agent; None when there is none."""
        ...

    async def release(self, process: Process, release: Release) -> None:
        """Let a worker go now, in the way in which a guard does."""
        ...


class GenerationRef(NamedTuple):
    """One generation below the artifact root."""

    namespace: str
    content_uid: str
    generation: int


class Artifacts(Protocol):
    """The artifact root, which all nodes share. Everything it reads is hostile input."""

    async def require_space(self, own: int, weights: int) -> None:
        """NoSpace unless a worker's own state fits, and its weights where they come here, too."""
        ...

    def new_part(self, place: GenerationRef, part: str) -> AbstractAsyncContextManager[int]:
        """Create a part's directory and keep it open. ArtifactExists when it is there already."""
        ...

    def open_part(self, place: GenerationRef, part: str) -> AbstractAsyncContextManager[int]:
        """Keep a part's directory open for reading."""
        ...

    async def finish_part(self, directory: int, manifest: PartManifest) -> str:
        """Write the part manifest, last and durably; its digest."""
        ...

    async def read_part(self, place: GenerationRef, part: str) -> tuple[PartManifest, str]:
        """Read a part manifest and its digest; sizes and kinds of all files are checked."""
        ...

    async def check_bytes(
        self, place: GenerationRef, manifest: PartManifest, progress: Progress
    ) -> None:
        """Read every byte of a part. ArtifactCorrupt names file and chunk."""
        ...


class Generations(Protocol):
    """Whole generations below the artifact root."""

    async def parts(self, place: GenerationRef) -> list[str]:
        """Name the parts that a generation holds on disk."""
        ...

    async def seal(self, manifest: RootManifest) -> str:
        """Put the root manifest in place, never over another; its digest."""
        ...

    async def read_root(self, ref: ArtifactRef) -> RootManifest:
        """Read the root manifest. ArtifactCorrupt when its digest is not the one given."""
        ...

    async def remove(self, place: GenerationRef) -> None:
        """Remove a generation, its root manifest first. Absent is success."""
        ...


class Stray(NamedTuple):
    """Something below the artifact root that is no generation, and no folder above one.

    `path` has one to three names. `age_s` is how many seconds ago it last changed.
    """

    path: tuple[str, ...]
    age_s: float


class Listing(NamedTuple):
    """What lies below the artifact root."""

    generations: list[FoundGeneration]
    strays: list[Stray]


class Library(Protocol):
    """The artifact root as a whole. Links are never followed, and nothing is ever removed."""

    async def listing(self, now: float) -> Listing:
        """List everything but what is hidden; `now` is seconds since the epoch."""
        ...

    async def set_aside(self, path: Sequence[str], label: str) -> bool:
        """Move one entry, with its path, below `.quarantine/<label>`; False when it is gone.

        ArtifactExists when something stands there already.
        """
        ...

    async def count_set_aside(self) -> int:
        """Count what lies in quarantine."""
        ...


class Operator(Protocol):
    """What the agent asks the operator. All raise BusUnavailable, and NotFound without one."""

    async def spec(self, pod: PodRef) -> Any:
        """Return the spec of a pod as JSON values, waiting for an operator that is away.

        Specs hold secrets, so they never travel in orders. StalePodReference when the pod of this
        name has another uid.
        """
        ...

    async def unknown_pods(self, pods: Sequence[str]) -> list[str]:
        """Return which of these uids are of no Pod in the store."""
        ...

    async def judge(self, found: Sequence[FoundGeneration]) -> InventoryReply:
        """Return a verdict about each generation, which must have been listed before."""
        ...


class Locks(Protocol):
    """Exclusion between processes."""

    def take(self, path: Path) -> Callable[[], None] | None:
        """Lock a file; what gives it back, or None when somebody else has it."""
        ...


class Orders(Protocol):
    """What handlers need of the order book beyond the context of their own order."""

    journal: Journal

    async def report(self, entry: Entry, kind: str, **fields: Any) -> None:
        """Journal a report and have it published."""
        ...

    async def tombstone(self, subject: str, attempt: int) -> None:
        """Journal that no attempt up to this one of the named work may begin or go on."""
        ...

    def require_current(self, subject: str, attempt: int) -> None:
        """Superseded when the named work was aborted at this attempt or later."""
        ...

    async def cancel(self, order_id: str, attempt: int, within_s: float | None = None) -> bool:
        """Cancel a running order of at most this attempt; wait for its compensation.

        For `within_s` seconds at most, if given.
        """
        ...


@dataclass(frozen=True)
class Machine:
    """The node as handlers use it."""

    launcher: Launcher
    control: ControlDirectory
    drivers: Mapping[Driver, ProcessDriver]
    gpu_memory: GpuMemory
    guards: Guard
    artifacts: Artifacts
    generations: Generations
    operator: Operator
    locks: Locks
    clocks: Clocks
    facts: Facts
    metrics: Metrics = OFF

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
