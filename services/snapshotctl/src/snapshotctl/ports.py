"""What the commands need: the operator, a screen, a local cluster, a worker to talk to."""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

import msgspec

from snapshot_shared.api import (
    AbortReply,
    Applied,
    CordonReply,
    Fault,
    RequeueReply,
    RetentionReply,
    VerifyReply,
)
from snapshot_shared.errors import Failure
from snapshot_shared.ids import NodeName
from snapshot_shared.objects import AnyObject, Kind
from snapshot_shared.orders import Presence, Progress, Report
from snapshot_shared.spans import SpanRecord
from snapshotctl.domain.artifacts import Artifact, Manifests
from snapshotctl.domain.cluster import ClusterRecord, Handle, NodeSpec
from snapshotctl.domain.kin import Changed
from snapshotctl.domain.progress import PartProgress
from snapshotctl.domain.queue import Letter, Queued
from snapshotctl.domain.rows import Table
from snapshotctl.domain.targets import Target

News = Changed | Report | SpanRecord | None
"""That an object has changed, a report, a span; or None: read everything again."""


class Changes(Protocol):
    """Says when it is worth looking again."""

    async def wait(self) -> None:
        """Return at a change, after a reconnection, and at the latest after a safety interval."""


class Operator(Protocol):
    """The object store behind the operator. BusUnavailable when it does not answer."""

    async def apply(self, documents: Sequence[msgspec.Raw], traceparent: str) -> list[Applied]:
        """Store manifests, all or none. InvalidManifest lists every problem."""

    async def get(self, target: Target) -> AnyObject | None:
        """Read one object; None when it does not exist."""

    async def all_of(self, kind: Kind, namespace: str | None) -> list[AnyObject]:
        """Read all objects of a kind, in all namespaces when None."""

    async def delete(self, target: Target, uid: str) -> bool:
        """Mark the incarnation with this uid for deletion. True when it is gone already.

        NotFound, and Conflict when another one has the name.
        """

    async def verify(self, target: Target, uid: str) -> VerifyReply:
        """Ask for a verification of what an object holds. NotFound, Conflict, NotEligible."""

    async def retention(self, namespace: str | None, *, run: bool) -> RetentionReply:
        """Ask what retention would delete now, or have it done first."""

    def watching(self, target: Target) -> AbstractAsyncContextManager[Changes]:
        """Follow one object for the length of the block."""

    async def spans(self, trace_id: str) -> list[SpanRecord]:
        """Read the finished spans of a trace."""

    def spans_arriving(self, trace_id: str) -> AbstractAsyncContextManager[Changes]:
        """Follow a trace for the length of the block."""

    async def presence(self) -> dict[NodeName, Presence]:
        """Read what the nodes last said of themselves."""

    def progress(self) -> AbstractAsyncContextManager[AsyncIterator[Progress]]:
        """Follow the progress of all orders for the length of the block."""

    async def last_progress(self, order: str) -> Progress | None:
        """Read how far an order said last that it was."""

    async def reports(self, orders: Collection[str] | None = None) -> list[Report]:
        """Read the reports that are kept of some orders, or of all."""

    async def all_spans(self) -> list[SpanRecord]:
        """Read all finished spans that are kept."""

    async def answers(self, node: str, service: str) -> bool:
        """Say whether a service of a node answers questions now."""

    def news(self) -> AbstractAsyncContextManager[AsyncIterator[News]]:
        """Follow all that happens for the length of the block. None where some may be lost."""


class OnCall(Operator, Protocol):
    """What people on call may see and ask for besides. What is refused is a RemoteFailure."""

    async def cordon(
        self, node: NodeName, resource_version: str, *, unschedulable: bool
    ) -> CordonReply:
        """Let nothing new begin on a node, or let it again. Conflict when it has changed since."""

    async def abort(self, target: Target, by: str, uid: str) -> AbortReply:
        """Have the capture behind an object ended. Conflict as for `delete`."""

    async def requeue(self, order: str) -> RequeueReply:
        """Have the operator publish its own current order again."""

    async def queued(self, node: NodeName | None) -> list[Queued]:
        """Read the stream of orders, of one node or of all, oldest first."""

    async def progress_now(self, node: NodeName | None) -> list[Progress]:
        """Read the last progress of each order."""

    async def letters(self, node: NodeName | None) -> list[Letter]:
        """Read the dead letters, oldest first."""


class Parts(Protocol):
    """Shows parts as they move on."""

    def show(self, part: PartProgress) -> None:
        """Show one part as it is now."""


class Screen(Protocol):
    """Where results and messages go."""

    def line(self, text: str = "", *, strong: bool = False) -> None:
        """Print one line of the result."""

    def table(self, table: Table, *, indent: str = "") -> None:
        """Print rows below their headers, each line after an indent."""

    def value(self, value: Any) -> None:
        """Print a value as JSON or YAML, whichever was asked for."""

    def entry(self, value: Any) -> None:
        """Print one of many values as they come: JSON on one line, or an item of a YAML list."""

    def note(self, text: str) -> None:
        """Print a remark beside the result, on standard error."""

    def failure(self, failure: Failure) -> None:
        """Print an error and what to do, on standard error."""

    def parts(self) -> AbstractContextManager[Parts]:
        """Show progress for the length of the block."""

    @property
    def wants_table(self) -> bool:
        """Whether people read this, not a program."""

    @property
    def width(self) -> int:
        """Columns that a line may have."""


class Logs(Protocol):
    """The logs of a cluster that can be read from here."""

    @property
    def folder(self) -> str:
        """Where they are, for people."""

    def lines(self) -> list[tuple[str, str]]:
        """Give the last lines of every service, each with the name of its program."""

    def worker(self, node: str, pod_uid: str) -> list[tuple[str, str]]:
        """Give the last lines that a pod's containers wrote, each with the container."""


class Files(Protocol):
    """Artifacts on disk, where they can be read from here."""

    def manifests(self, artifact: Artifact) -> Manifests | None:
        """Read the manifests of an artifact; None when they cannot be read here.

        ArtifactCorrupt when they are not those that were committed.
        """


class Ground(Protocol):
    """A cluster for the demo to play on."""

    @property
    def handle(self) -> Handle:
        """How people reach it, once it has started."""

    def sockets(self, node: str) -> Path:
        """Give the folder of the sockets of a node and of the pods on it."""

    async def start(self, nodes: Sequence[NodeSpec]) -> None:
        """Return when everything is ready. AlreadyRunning, StartFailed, Unready."""

    async def add_node(self, node: NodeSpec) -> bool:
        """Start one more node and wait until it is ready; False where none can be. StartFailed."""

    async def kill_node(self, node: str) -> list[str]:
        """SIGKILL a node's agent, its GPU memory service and its workers; name what was killed."""

    async def stop(self, *, purge: bool) -> None:
        """End everything that `start` has started; with `purge` the state goes, too."""

    def keep(self) -> None:
        """Let it live on when this command ends."""


class Cluster(Ground, Protocol):
    """A cluster of processes on this machine."""

    @property
    def record(self) -> ClusterRecord:
        """What is known of it now."""

    async def restart(self, node: str, services: Sequence[str]) -> list[str]:
        """Start those services (`agent`, `gms`) of a node that ended, on their state; name them.

        Returns when they answer. AlreadyRunning when none ended, NotFound, StartFailed.
        """


class Switch(Protocol):
    """The fault switches of simulated nodes. NotFound when a service has none or does not run."""

    async def arm(self, node: str, service: str, fault: Fault) -> list[Fault]:
        """Arm one fault; give all that are armed in this service."""

    async def clear(self, node: str, service: str) -> list[Fault]:
        """Disarm everything in this service."""


class Conversation(Protocol):
    """A worker that answers questions."""

    async def ask(self, prompt: str) -> bytes:
        """Put a question that changes nothing; the answer is the line as it came."""

    async def chat(self, text: str) -> bytes:
        """Say something that the worker will remember."""

    async def close(self) -> None:
        """Hang up."""


class Workers(Protocol):
    """Finds the workers of a local cluster."""

    async def call(self, folder: Path, pod_uid: str) -> Conversation:
        """Wait until the worker of a pod listens below a node's folder of sockets, and call it."""
