"""What commands need of others: the operator, a terminal, a cluster for the demo."""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import msgspec

from snapshot_api.kind import Kind
from snapshot_api.kinds import AnyObject
from snapshot_shared.api import (
    AbortReply,
    Applied,
    CordonReply,
    FactsReply,
    RequeueReply,
    RetentionReply,
    VerifyReply,
)
from snapshot_shared.errors import Failure
from snapshot_shared.ids import NodeName
from snapshot_shared.orders import ArtifactRef, Presence, Progress, Report
from snapshot_shared.spans import SpanRecord
from snapshotctl.domain.cluster import ClusterAccess, NodeSpec
from snapshotctl.domain.targets import Target
from snapshotctl.views.progress import PartProgress
from snapshotctl.views.queue import DeadMessage, Queued
from snapshotctl.views.related import ObjectChanged
from snapshotctl.views.tables import Table

News = ObjectChanged | Report | SpanRecord | None
"""That an object has changed, a report, a span; or None: read everything again."""


class Changes(Protocol):
    """The changes of something, without saying what has changed."""

    async def wait(self) -> None:
        """Return at a change, after a reconnection, and at the latest after a safety interval."""


class Conversation(Protocol):
    """What is said to a worker of the demo. DeadlineExceeded, or Aborted when it hangs up."""

    async def ask(self, prompt: str) -> bytes:
        """Return the answer to a question that changes nothing, as it came."""

    async def chat(self, text: str) -> bytes:
        """Return the answer to what may change the worker's state."""

    async def close(self) -> None:
        """End it."""


class Operator(Protocol):
    """The operator: its objects, and what NATS keeps. BusUnavailable when it does not answer.

    What it refuses is a RemoteFailure.
    """

    async def apply(
        self, documents: Sequence[msgspec.Raw], traceparent: str, *, dry_run: bool = False
    ) -> list[Applied]:
        """Store manifests, all or none; with `dry_run` say what that would do.

        InvalidManifest lists every problem.
        """

    async def get(self, target: Target) -> AnyObject | None:
        """Read one object; None when it does not exist."""

    async def all_of(self, kind: Kind, namespace: str | None) -> list[AnyObject]:
        """Read all objects of a kind, in all namespaces when None."""

    async def manifest(self, target: Target) -> dict[str, Any] | None:
        """Read the whole of an object, of which `get` has less in a cluster."""

    async def delete(self, target: Target, uid: str) -> bool:
        """Mark the incarnation with this uid for deletion. True when it is gone already.

        NotFound, and Conflict when another one has the name.
        """

    async def verify(self, target: Target, uid: str) -> VerifyReply:
        """Request a verification of what an object holds. NotFound, Conflict, NotEligible."""

    async def retention(self, namespace: str | None, *, run: bool) -> RetentionReply:
        """Return what retention would delete now; with `run` delete it first."""

    async def cordon(
        self, node: NodeName, resource_version: str, *, unschedulable: bool
    ) -> CordonReply:
        """Let nothing new begin on a node, or let it again. Conflict when it has changed since."""

    async def abort(self, target: Target, by: str, uid: str) -> AbortReply:
        """Request the end of the capture behind an object. Conflict as for `delete`."""

    async def requeue(self, order: str) -> RequeueReply:
        """Have the operator publish its own current order again."""

    async def queued(self, node: NodeName | None) -> list[Queued]:
        """Read the stream of orders, of one node or of all, oldest first."""

    async def dead(self, node: NodeName | None) -> list[DeadMessage]:
        """Read the stream of dead letters, oldest first."""

    async def reports(self, orders: Collection[str] | None = None) -> list[Report]:
        """Read the reports that are kept of some orders, or of all."""

    async def spans(self, trace_id: str) -> list[SpanRecord]:
        """Read the finished spans of a trace."""

    async def all_spans(self) -> list[SpanRecord]:
        """Read all finished spans that are kept."""

    async def presence(self) -> dict[NodeName, Presence]:
        """Read the last presence of each node."""

    async def paused(self) -> frozenset[str]:
        """Read which durables of the stream of orders are paused."""

    async def facts_of(self, node: str, artifact: ArtifactRef) -> FactsReply:
        """Ask the agent of a node for its facts, and for those of an artifact that it can read.

        BusUnavailable when it does not answer.
        """

    async def answers(self, node: str, service: str) -> bool:
        """Whether a service of a node answers questions."""

    async def last_progress(self, order: str) -> Progress | None:
        """Read the last progress of an order."""

    async def progress_now(self, node: NodeName | None) -> list[Progress]:
        """Read the last progress of each order."""

    def progress(self) -> AbstractAsyncContextManager[AsyncIterator[Progress]]:
        """Subscribe to the progress of all orders for the length of the block."""

    def watching(self, target: Target) -> AbstractAsyncContextManager[Changes]:
        """Subscribe to one object for the length of the block."""

    def spans_arriving(self, trace_id: str) -> AbstractAsyncContextManager[Changes]:
        """Subscribe to a trace for the length of the block."""

    def news(self) -> AbstractAsyncContextManager[AsyncIterator[News]]:
        """Subscribe to all changes for the length of the block. None where some may be lost."""


class Ran(NamedTuple):
    """A program that has ended: its exit code, and what it printed."""

    code: int
    out: bytes
    err: str


class Workers(Protocol):
    """The workers of a cluster, and programs that run beside them. NotFound, WrongArguments.

    Without a container that of a pod with one is meant.
    """

    @property
    def python(self) -> str:
        """How Python is called there."""

    async def run(
        self, namespace: str, pod: str, container: str | None, program: Sequence[str]
    ) -> int:
        """Run a program with this terminal; return its exit code."""

    async def answer(
        self, namespace: str, pod: str, container: str | None, program: Sequence[str]
    ) -> Ran:
        """Run a program that reads nothing; return what it printed."""


class Parts(Protocol):
    """A display of parts as they move on."""

    def show(self, part: PartProgress) -> None:
        """Show one part as it is now."""


class Activity(Protocol):
    """A display of what is under way."""

    @property
    def interval_s(self) -> float:
        """Seconds after which it should be shown again."""

    def show(self, text: str) -> None:
        """Show one line; on a terminal it replaces the one before and goes with the last."""


class Screen(Protocol):
    """Where results and messages go."""

    def line(self, text: str = "", *, strong: bool = False) -> None:
        """Print one line of the result."""

    def verbatim(self, text: str) -> None:
        """Print a line that another program wrote, as it is."""

    def table(self, table: Table, *, indent: str = "") -> None:
        """Print rows below their headers, each line after an indent."""

    def value(self, value: Any) -> None:
        """Print a value as JSON or YAML, whichever was requested."""

    def entry(self, value: Any) -> None:
        """Print one of many values as they come: JSON on one line, or an item of a YAML list."""

    def note(self, text: str) -> None:
        """Print a remark beside the result, on standard error."""

    def failure(self, failure: Failure) -> None:
        """Print an error and its next step, on standard error."""

    def parts(self) -> AbstractContextManager[Parts]:
        """Show progress for the length of the block."""

    def activity(self) -> AbstractContextManager[Activity]:
        """Show what is under way for the length of the block."""

    @property
    def has_colours(self) -> bool:
        """Whether a person sees the result in colours."""
        ...

    @property
    def wants_table(self) -> bool:
        """Whether the result is for people, not for a program."""

    @property
    def wants_wide(self) -> bool:
        """Whether a table has the columns that are left out elsewhere."""

    @property
    def width(self) -> int:
        """Columns that a line may have."""


class DemoCluster(Protocol):
    """A cluster that the demo uses."""

    @property
    def access(self) -> ClusterAccess:
        """How people reach it, once it has started."""

    def sockets(self, node: str) -> Path:
        """Return the folder of the sockets of a node and of the pods on it."""

    async def start(self, nodes: Sequence[NodeSpec]) -> None:
        """Return when everything is ready. AlreadyRunning, StartFailed, Unready."""

    async def add_node(self, node: NodeSpec) -> bool:
        """Start one more node and wait until it is ready; False where none can be. StartFailed."""

    async def kill_node(self, node: str) -> list[str]:
        """SIGKILL a node's agent, its GPU memory service and its workers; return their names."""

    async def stop(self, *, purge: bool) -> None:
        """End everything that `start` has started; with `purge` remove the state, too."""

    def keep(self) -> None:
        """Let it run on when this command ends."""
