"""A local cluster of real processes, driven without the command line so that a case is quick.

`LiveCluster` is the cluster and outlives many tests; a `Session` is one test's connection to it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from snapshot_api.facts import HOSTNAME_LABEL, Node, Pod
from snapshot_api.kinds import KINDS, AnyObject, kind_of
from snapshot_api.meta import is_true
from snapshot_shared import subjects
from snapshot_shared.api import Fault, FaultAction
from snapshot_shared.bus import Delivery
from snapshot_shared.codec import decode_json
from snapshot_shared.errors import BusUnavailable, RemoteFailure
from snapshot_shared.orders import Report
from snapshot_shared.steps import Place
from snapshotctl.adapters import processes, worker_socket
from snapshotctl.adapters.folders import Folders, log_tail
from snapshotctl.adapters.local_cluster import LocalCluster
from snapshotctl.adapters.operator_client import OperatorClient, connected
from snapshotctl.domain import cluster as plans
from snapshotctl.domain.cluster import ClusterRecord, NodeSpec, ProcessRecord
from snapshotctl.domain.targets import Target
from tests.support.objects import checkpoint_document, restore_document, snapshot_document

ROOT = Path(__file__).resolve().parents[2]
NAME = "default"
DEATH_S = 30.0
SETTLE_S = 90.0
LONG_S = 900.0
"""How long an object with large weights may take, in seconds."""
LOOK_AGAIN_S = 2.0
"""How long a test waits for news before it looks by itself, in seconds."""

Holds = Callable[[list[AnyObject]], object]


def worker_pod(node: str) -> dict[str, Any]:
    """The spec of a small example worker that is ready as soon as it serves."""
    values = {"SIZE_MIB": "4", "WARMUP_REQUESTS": "0", "OPENBLAS_NUM_THREADS": "1"}
    container = {
        "name": "main",
        "command": ["python3", "deploy/examples/worker.py"],
        "env": [{"name": name, "value": value} for name, value in values.items()],
        "resources": {"limits": {"nvidia.com/gpu": 1}},
    }
    return {"nodeSelector": {HOSTNAME_LABEL: node}, "containers": [container]}


def checkpoint(name: str, node: str, policy: str = "Resume") -> dict[str, Any]:
    template = {"spec": worker_pod(node)}
    return checkpoint_document(name, podTemplateSpec=template, sourcePolicy=policy)


def pod(name: str, node: str, source: str | None = None) -> dict[str, Any]:
    """A pod with a worker, cold or restored from a checkpoint."""
    document = restore_document(name=name) | {"spec": worker_pod(node)}
    document["metadata"]["annotations"] = {"nvidia.com/restore-from": source} if source else {}
    return document


def snapshot(name: str, source: str, policy: str, **spec: str) -> dict[str, Any]:
    return snapshot_document(name, source, sourcePolicy=policy, **spec)


def find(values: Sequence[AnyObject], kind: str, name: str) -> Any:
    return next(
        (v for v in values if kind_of(v).name == kind and v.metadata.name == name),
        None,
    )


def is_ready(value: Any) -> bool:
    return is_true(value.status.conditions, "Ready")


class LiveCluster:
    """A cluster whose state lies below `home`; with `tools` its nodes have CRIU."""

    def __init__(self, home: Path, tools: Path | None = None) -> None:
        self.tools = tools
        self.environment = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("SNAPBACK_", "NATS_", "XDG_"))
        } | {"XDG_STATE_HOME": str(home / "state"), "XDG_CONFIG_HOME": str(home / "config")}
        self.folders = Folders(self.environment)

    def _cluster(self) -> LocalCluster:
        return LocalCluster(
            self.folders,
            NAME,
            environment=self.environment,
            workdir=ROOT,
            say=lambda _line: None,
            run=f"test-{uuid.uuid4().hex[:12]}",
            tools=self.tools,
        )

    @property
    def record(self) -> ClusterRecord:
        found = self.folders.record(NAME)
        assert found is not None
        return found

    @property
    def run(self) -> str:
        return self.record.run

    @property
    def artifacts(self) -> Path:
        return Path(self.record.state_dir) / "artifacts"

    def drop_cache(self) -> None:
        """Have the next reader of the artifacts read the disk."""
        for path in self.artifacts.rglob("*"):
            if path.is_file():
                with path.open("rb") as file:
                    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

    async def up(self, *nodes: str, gpus: int = 1, mib: int = 64) -> None:
        specs = [NodeSpec(name=name, gpus=gpus, gpu_memory=mib * 2**20) for name in nodes]
        await self._cluster().start(specs)

    async def down(self) -> list[str]:
        """End it all; give what is left behind, which should be nothing."""
        record = self.record
        await self._cluster().stop(purge=True)
        left = [f"{m.pid}: {m.command}" for m in processes.members(record.run)]
        folders = [Path(record.socket_dir), Path(record.state_dir)]
        return left + [str(folder) for folder in folders if folder.exists()]

    def process(self, name: str) -> ProcessRecord:
        found = self.record.process(name)
        assert found is not None, name
        return found

    async def ended(self, record: ProcessRecord) -> None:
        """Wait for the end of a service and collect it."""
        handle = processes.opened(record)
        if handle is None:
            return
        try:
            async with asyncio.timeout(DEATH_S):
                await handle.ended()
        finally:
            handle.close()

    async def kill(self, name: str) -> None:
        """SIGKILL one service of the cluster."""
        handle = processes.opened(self.process(name))
        assert handle is not None, f"{name} does not run"
        await processes.end([handle], grace_s=0)

    async def restart(self, node: str, *services: str) -> None:
        await self._cluster().restart(node, services)

    async def kill_node(self, node: str) -> None:
        """End a node, its workers included, as a power cut does."""
        await self._cluster().kill_node(node)

    def start_operator(self) -> None:
        """Start the operator again on its state; who waits sees it answer."""
        cluster = self._cluster()
        cluster._start(plans.operator_program(cluster._settings()))

    def logs(self) -> str:
        """The last lines of each service's log, for whoever reads a failure."""
        return "\n".join(
            "\n".join([f"--- {found.name}", *log_tail(Path(found.log))])
            for found in self.record.processes
        )

    @contextlib.asynccontextmanager
    async def session(self) -> AsyncIterator[Session]:
        server = self.folders.find_server(None, None)
        async with (
            connected(server, patiently=True) as client,
            client.bus.listening("snap.report.>") as reports,
            client.bus.listening(f"{subjects.EVENTS}.>") as events,
        ):
            yield Session(self, client, reports, events)


class Session:
    """What one test does with a cluster, and what it saw."""

    def __init__(
        self,
        cluster: LiveCluster,
        client: OperatorClient,
        reports: asyncio.Queue[Delivery],
        events: asyncio.Queue[Delivery],
    ) -> None:
        self.cluster = cluster
        self.client = client
        self._deliveries = reports
        self._events = events
        self._reports: list[Report] = []

    @property
    def reports(self) -> list[Report]:
        """Every report since the session began, copies included."""
        while not self._deliveries.empty():
            self._reports.append(decode_json(self._deliveries.get_nowait().data, Report))
        return self._reports

    async def reported(self, kind: str) -> Report:
        """Wait for a report of this kind, if there was none yet."""
        async with asyncio.timeout(SETTLE_S):
            while True:
                if found := next((r for r in self.reports if r.kind == kind), None):
                    return found
                self._reports.append(decode_json((await self._deliveries.get()).data, Report))

    async def event(self) -> None:
        """Wait for the next change of an object."""
        await self._events.get()

    async def arm(self, node: str, place: Place, action: FaultAction) -> None:
        fault = Fault(action=action, step=place.step, verb=place.verb)
        await self.client.arm_fault(node, place.service, fault)

    async def disarm(self, node: str) -> None:
        for service in ("agent", "gms"):
            await self.client.clear_faults(node, service)

    async def apply(self, *documents: dict[str, Any]) -> None:
        raw = [msgspec.Raw(msgspec.json.encode(document)) for document in documents]
        await self.client.apply(raw, "")

    async def delete(self, kind: str, name: str) -> None:
        space = "default" if KINDS[kind].namespaced else None
        with contextlib.suppress(RemoteFailure):
            await self.client.delete(Target(KINDS[kind], space, name))

    async def objects(self) -> list[AnyObject]:
        """Every object but the nodes."""
        found: list[AnyObject] = []
        for kind in KINDS.values():
            if kind.type is not Node:
                found += await self.client.all_of(kind, None)
        return found

    async def until(self, holds: Holds, what: str, within_s: float = SETTLE_S) -> list[AnyObject]:
        """Wait until something holds of the objects and give them. AssertionError in time."""
        values: list[AnyObject] = []
        try:
            async with asyncio.timeout(within_s):
                while True:
                    self.forget_events()
                    with contextlib.suppress(BusUnavailable):
                        values = await self.objects()
                        if holds(values):
                            return values
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(LOOK_AGAIN_S):
                            await self._events.get()
        except TimeoutError:
            shown = "\n".join(map(_shown, values))
            raise AssertionError(f"{what} did not happen in {within_s} s:\n{shown}") from None

    async def reaches(self, kind: str, name: str, holds: Callable[[Any], object] = is_ready) -> Any:
        """Wait until something holds of an object, and return it. RuntimeError if it fails."""

        def found(values: list[AnyObject]) -> object:
            value = find(values, kind, name)
            if value is not None and (why := _failure(value)):
                raise RuntimeError(f"{kind} {name} failed: {why}")
            return value is not None and holds(value)

        return find(await self.until(found, f"{kind} {name}", LONG_S), kind, name)

    async def remove(self, kind: str, name: str) -> None:
        """Delete an object, and wait until it is gone."""
        await self.delete(kind, name)
        gone = f"{kind} {name} is removed"
        await self.until(lambda values: find(values, kind, name) is None, gone, LONG_S)

    def forget_events(self) -> None:
        while not self._events.empty():
            self._events.get_nowait()

    async def answers(self, node: str, pod_uid: str) -> bool:
        """Ask a worker something. False when it has ended; a worker that is held never answers."""
        folder = Path(self.cluster.record.socket_dir) / node
        try:
            conversation = await worker_socket.connect(folder, pod_uid)
        except OSError:
            return False
        try:
            return b"error" not in await conversation.ask("Who is there?")
        except Exception:  # noqa: BLE001 - it hung up, however
            return False
        finally:
            await conversation.close()


def _failure(value: Any) -> str:
    failed = isinstance(value, Pod) and value.status.phase == "Failed"
    return next((c.message for c in value.status.conditions if c.type == "Failed"), "") or (
        value.status.message if failed else ""
    )


def _shown(value: AnyObject) -> str:
    status: Any = value.status
    orders = [
        f"{o.order}.{o.attempt}={o.state}:{o.final.failure if o.final else ''}"
        for o in getattr(status, "orders", [])
    ]
    rows = [f"{c.type}={c.status}:{c.reason}:{c.message}" for c in status.conditions]
    phase = getattr(status, "phase", getattr(status, "capture", ""))
    return f"{kind_of(value).name} {value.metadata.name} {phase} {rows} {orders}"
