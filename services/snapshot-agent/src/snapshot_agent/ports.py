"""What the agent needs of its node. Adapters fill these; handlers know nothing else."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

from snapshot_agent.domain.spec import Launch, Places
from snapshot_shared.api import FoundGeneration, InventoryReply
from snapshot_shared.artifact import Facts, FileEntry, PartManifest, RootManifest
from snapshot_shared.clocks import Clocks
from snapshot_shared.journal import Journal
from snapshot_shared.ledger import Entry
from snapshot_shared.metrics import OFF, Metrics
from snapshot_shared.orders import ArtifactRef, LayoutRef, PodRef, PresenceDevice

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
    places: Places


class Runtime(Protocol):
    """Processes of containers. They outlive the agent."""

    def spawn(self, launch: Launch) -> Process:
        """Start a process in a session of its own. NotFound when the program is not there."""
        ...

    def adopt(self, process: Process) -> bool:
        """Watch a process that an earlier agent started; False when it has ended."""
        ...

    async def ended(self, process: Process) -> int | None:
        """Wait for the end. The exit code (128 + n after signal n), None when nobody saw it."""
        ...

    async def terminate(self, process: Process | None, where: Places, grace_s: float) -> None:
        """Thaw, SIGTERM, SIGKILL after the grace period: the whole session, and what left it."""
        ...

    def find(self, where: Places) -> Process | None:
        """Find the process of a container by its environment, or None."""
        ...

    def forget(self, where: Places) -> None:
        """Remove the sockets of a pod that has ended."""
        ...


class ControlDirectory(Protocol):
    """The control directories of containers. What a worker puts there is hostile input."""

    def create(self, where: Path) -> None:
        """Make an empty control directory with its `state` folder, if there is none."""
        ...

    def put(self, where: Path, name: str, data: bytes) -> None:
        """Put a file in place, whole. A directory that is gone is no error."""
        ...

    def get(self, where: Path, name: str) -> bytes | None:
        """Read a file; None when it is not there or is no plain file."""
        ...

    def remove(self, where: Path, *names: str) -> None:
        """Remove files and folders; absent ones are no error. `state` is emptied, not removed."""
        ...

    async def appears(self, where: Path, name: str, accepts: Callable[[bytes], bool]) -> None:
        """Wait until a file is there whose body is accepted. The caller sets the deadline."""
        ...


class ProcessDriver(Protocol):
    """Captures the state of one worker and gives it back. `name` is recorded in the artifact."""

    name: str

    async def size(self, worker: Worker) -> int:
        """Say how many bytes `dump` will write, as far as can be known."""
        ...

    async def freeze(self, worker: Worker) -> None:
        """Stop every thread of the worker and return when all have stopped."""
        ...

    async def dump(self, worker: Worker, part: int, progress: Progress) -> list[FileEntry]:
        """Write the state of a frozen worker durably into the directory `part` (a descriptor)."""
        ...

    async def thaw(self, worker: Worker) -> None:
        """Let a worker run again; one that is not frozen is left alone."""
        ...

    async def fill(
        self, worker: Worker, part: int, files: Sequence[FileEntry], progress: Progress
    ) -> None:
        """Hand saved state to a waiting worker. ArtifactCorrupt before a bad byte gets there."""
        ...


class GpuMemory(Protocol):
    """The GPU memory service of this node."""

    async def fence(
        self, token: str, devices: Sequence[str], *, wait_s: float, deadline_s: float
    ) -> list[LayoutRef]:
        """Keep every session off these devices; what is committed on each, in their order."""
        ...

    async def unfence(self, token: str) -> None:
        """End a fence, or make sure that it never begins."""
        ...

    async def devices(self, *, wait_s: float) -> list[PresenceDevice]:
        """List the devices, waiting up to `wait_s` for a service that is not up yet."""
        ...


class Duty(NamedTuple):
    """What a guard watches, and what it does when nobody else can.

    `deadline` is in seconds of the monotonic clock of boot `boot_id`. `fence_token` names the fence
    on the worker's devices; empty when it has none. `order` and `traceparent` are for its log.
    """

    name: str
    process: Process
    control: Path
    attempt: int
    deadline: float
    boot_id: str
    on_failure: Literal["Resume", "Kill"]
    fence_token: str = ""
    order: str = ""
    traceparent: str = ""


class GuardLink(Protocol):
    """The agent's end of a guard. When it breaks, the guard acts unless an agent comes back."""

    async def lost(self) -> None:
        """Wait until the guard is gone."""
        ...

    def tell_tool(self, tool: Process) -> None:
        """Name the process that leads the session of a dump tool, to be killed before a thaw."""
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

    async def start(self, duty: Duty) -> GuardLink:
        """Start a guard and return when it is armed. SourceExited when the worker is gone."""
        ...

    async def adopt(self, duty: Duty) -> GuardLink | None:
        """Take over a guard that waits for a returning agent; None when there is none."""
        ...


class Place(NamedTuple):
    """One generation below the artifact root."""

    namespace: str
    content_uid: str
    generation: int


class Artifacts(Protocol):
    """The artifact root, which all nodes share. Everything it reads is hostile input."""

    def require_space(self, own: int, weights: int) -> None:
        """NoSpace unless a worker's own state fits, and its weights where they come here, too."""
        ...

    def new_part(self, place: Place, part: str) -> int:
        """Create a part's directory and open it. ArtifactExists when it is there already."""
        ...

    def open_part(self, place: Place, part: str) -> int:
        """Open a part's directory for reading."""
        ...

    async def finish_part(self, directory: int, manifest: PartManifest) -> str:
        """Write the part manifest, last and durably; its digest."""
        ...

    async def read_part(self, place: Place, part: str) -> tuple[PartManifest, str]:
        """Read a part manifest and its digest; sizes and kinds of all files are checked."""
        ...

    async def check_bytes(self, place: Place, manifest: PartManifest, progress: Progress) -> None:
        """Read every byte of a part. ArtifactCorrupt names file and chunk."""
        ...


class Generations(Protocol):
    """Whole generations below the artifact root."""

    async def parts(self, place: Place) -> list[str]:
        """Name the parts that a generation holds on disk."""
        ...

    async def seal(self, manifest: RootManifest) -> str:
        """Put the root manifest in place, never over another; its digest."""
        ...

    async def read_root(self, ref: ArtifactRef) -> RootManifest:
        """Read the root manifest. ArtifactCorrupt when its digest is not the one given."""
        ...

    async def remove(self, place: Place) -> None:
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

    async def set_aside_before(self) -> int:
        """Count what lies in quarantine."""
        ...


class Inventories(Protocol):
    """Who knows whose generations are."""

    async def judge(self, found: Sequence[FoundGeneration]) -> InventoryReply:
        """Ask about generations that were listed before. BusUnavailable, NotFound."""
        ...


class Templates(Protocol):
    """Where pod specs come from: they never travel in orders."""

    async def spec(self, pod: PodRef) -> Any:
        """Ask for the spec of a pod, as JSON values. StalePodReference when it is another."""
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

    async def cancel(self, order_id: str, attempt: int) -> bool:
        """Cancel a running order of at most this attempt; wait for its compensation."""
        ...


@dataclass(frozen=True)
class Machine:
    """The node as handlers use it."""

    runtime: Runtime
    control: ControlDirectory
    drivers: dict[str, ProcessDriver]
    gpu_memory: GpuMemory
    guards: Guard
    artifacts: Artifacts
    generations: Generations
    templates: Templates
    locks: Locks
    clocks: Clocks
    facts: Facts
    metrics: Metrics = OFF
