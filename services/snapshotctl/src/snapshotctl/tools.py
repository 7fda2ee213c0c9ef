"""What a command works with, and the only module that chooses adapters.

Each adapter is imported by the method that makes it: most commands need few of them, and to
import NATS or OpenTelemetry takes longer than most commands run.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from snapback_client.folders import check_folder
from snapshotctl.domain.exits import WrongArguments
from snapshotctl.domain.formats import OutputFormat

if TYPE_CHECKING:
    from snapshot_api.kind import Kind
    from snapshot_shared.telemetry import Telemetry
    from snapshotctl.adapters.cluster_logs import ClusterLogs
    from snapshotctl.adapters.folders import Folders
    from snapshotctl.adapters.kubectl import Kubernetes
    from snapshotctl.adapters.local_cluster import LocalCluster
    from snapshotctl.adapters.operator_client import OperatorClient
    from snapshotctl.adapters.terminal import Terminal
    from snapshotctl.domain.cluster import ClusterRecord
    from snapshotctl.domain.documents import Document
    from snapshotctl.domain.servers import Server
    from snapshotctl.ports import DemoCluster, Workers
    from snapshotctl.views.findings import Observed

SERVICE = "snapshotctl"
NODE = "cli"
DEFAULT_NAMESPACE = "default"
MANIFESTS = (".json", ".yaml", ".yml")
"""The suffixes of the files that are read of a folder."""

Connect = Callable[[], "AbstractAsyncContextManager[OperatorClient]"]


@dataclass(frozen=True)
class Tools:
    """The options of all commands, and what follows from them."""

    server: str | None
    cluster: str | None
    output: OutputFormat
    kubeconfig: str | None = None
    context: str | None = None
    own_operator: bool = False
    is_plugin: bool = False

    @cached_property
    def kubernetes(self) -> Kubernetes | None:
        """The cluster of kubectl that was named; None where none was.

        A plug-in of kubectl uses that of the current context if nothing is named.
        """
        is_meant = self.is_plugin and not (self.server or self.cluster)
        if not (self.kubeconfig or self.context or is_meant):
            return None
        from snapshotctl.adapters.kubectl import Kubernetes

        return Kubernetes(self.kubeconfig, self.context, are_shaped_here=self.own_operator)

    @property
    def namespace(self) -> str:
        """The namespace of what names none, in a cluster of kubectl that of the context."""
        return DEFAULT_NAMESPACE if self.kubernetes is None else self.kubernetes.namespace

    def close(self) -> None:
        """End what outlives a command otherwise."""
        if self.kubernetes is not None:
            self.kubernetes.close()

    def find_server(self) -> Server:
        """Return the server of the command. WrongArguments, BusUnavailable, NotFound."""
        if self.kubernetes is not None and not self.server:
            return self.kubernetes.server()
        return self.folders.find_server(self.server, self.cluster)

    @cached_property
    def screen(self) -> Terminal:
        """The terminal."""
        from snapshotctl.adapters.terminal import Terminal

        return Terminal(self.output, sys.stdout, sys.stderr)

    @cached_property
    def folders(self) -> Folders:
        """The folders of this user."""
        from snapshotctl.adapters.folders import Folders

        return Folders(os.environ)

    @cached_property
    def telemetry(self) -> Telemetry:
        """The tracer."""
        from snapshot_shared.service import VERSION
        from snapshot_shared.telemetry import Telemetry

        endpoint = os.environ.get("SNAPBACK_OTLP_ENDPOINT")
        return Telemetry(SERVICE, NODE, VERSION, otlp_endpoint=endpoint)

    def now(self) -> float:
        """Return the time in seconds since the epoch."""
        return time.time()

    def monotonic(self) -> float:
        """Return the seconds of the monotonic clock."""
        return time.monotonic()

    def rendered(self, documents: Sequence[Any]) -> list[Any]:
        """Return manifests as admission would have them stored. InvalidManifest."""
        from snapshotctl.adapters.kubectl import rendered

        if self.kubernetes is not None:
            return self.kubernetes.render(documents)
        return rendered(documents, {}, "immediate")

    def logs(self) -> ClusterLogs | None:
        """Return the logs of the server's cluster; None when they are not on this machine.

        A local cluster that was named has them also when it is down.
        """
        from snapshotctl.adapters.cluster_logs import ClusterLogs

        if self.kubernetes is not None and not self.server:
            record = self.folders.record_at(self.find_server())
        else:
            record = self.folders.find_record(self.server, self.cluster)
        return None if record is None else ClusterLogs(record)

    def workers(self) -> Workers:
        """Return the workers of the server's cluster. NotFound when they are not reached here."""
        if self.kubernetes is not None:
            return self.kubernetes
        from snapshot_shared.errors import NotFound
        from snapshotctl.adapters.local_workers import LocalWorkers

        record = self.folders.record_at(self.find_server())
        if record is None:
            raise NotFound(
                "the workers of this cluster are not on this machine",
                next_step="log in where they run, or name a Kubernetes cluster with --context",
            )
        return LocalWorkers(record, self.operator)

    @contextlib.asynccontextmanager
    async def operator(self, *, patiently: bool = False) -> AsyncIterator[OperatorClient]:
        """Find the server and connect for the length of the block.

        With `patiently` a connection that is lost is built again until the block ends. With
        `own_operator` the operator runs here for as long, where the cluster has none.
        """
        if self.own_operator and (self.kubernetes is None or self.server):
            raise WrongArguments(
                "--own-operator is for a Kubernetes cluster",
                next_step="name one with --context or --kubeconfig, and no --server",
            )
        server = self.find_server()
        async with self._operator_at(server, patiently=patiently) as client:
            if not self.own_operator or self.kubernetes is None:
                yield client
                return
            from snapshotctl.adapters.own_operator import own_operator

            async with own_operator(self.kubernetes, client, self.screen.note):
                yield client

    @contextlib.asynccontextmanager
    async def _operator_at(
        self, server: Server, *, patiently: bool
    ) -> AsyncIterator[OperatorClient]:
        import asyncio

        from snapshot_shared.tasks import end_all
        from snapshotctl.adapters.operator_client import connected

        async with connected(server, patiently=patiently, store=self.kubernetes) as client:
            publishing = asyncio.create_task(self.telemetry.publish_to(client.bus))
            try:
                yield client
            finally:
                # The last spans end with the block.
                await end_all(publishing)
                await self.telemetry.flush(client.bus)
        self.telemetry.shutdown()

    async def names(self, kinds: Sequence[Kind], namespace: str) -> list[str]:
        """Return the names of all objects of some kinds in a namespace, sorted."""
        from snapshotctl.adapters.operator_client import connected
        from snapshotctl.domain.targets import place

        async with connected(self.find_server()) as client:
            found = [await client.all_of(kind, place(kind, namespace)) for kind in kinds]
        return sorted({item.metadata.name for items in found for item in items})

    async def observe(self) -> Observed:
        """Look at this machine, the bus, the operator and every node."""
        from snapshotctl.adapters.observer import observe

        seen = await observe(self.folders, self.find_server)
        if self.kubernetes is None:
            return seen
        return seen._replace(installation=self.kubernetes.installation())

    def local_cluster(self, name: str | None, criu: str | None = None) -> LocalCluster:
        """Return the local cluster of a name, or of the options and the environment.

        When it is started, its nodes have the driver `criu` if `criu` is the folder of that.
        """
        chosen, run = self._cluster_name(name), secrets.token_hex(4)
        return self._cluster(chosen, Path.cwd(), run, criu=criu)

    def local_record(self, name: str) -> ClusterRecord | None:
        """Return the record of a local cluster; without a name, of the one in use.

        None where there is none, or where a server was named that is not its own.
        """
        if not name and (self.server or os.environ.get("NATS_URL")):
            return None
        return self.folders.record(self._cluster_name(name))

    def _cluster_name(self, name: str | None) -> str:
        from snapshotctl.domain.servers import DEFAULT_CLUSTER, cluster_name

        if name and self.cluster and name != self.cluster:
            raise WrongArguments(
                f"--name {name} and --cluster {self.cluster} are two clusters",
                next_step="name one of them: --cluster NAME",
            )
        chosen = name or self.cluster or os.environ.get("SNAPBACK_CLUSTER") or DEFAULT_CLUSTER
        return cluster_name(chosen)

    def _cluster(
        self,
        name: str,
        workdir: Path,
        run: str,
        *,
        is_demo: bool = False,
        criu: str | None = None,
    ) -> LocalCluster:
        from snapshotctl.adapters.local_cluster import LocalCluster

        return LocalCluster(
            self.folders,
            name,
            environment=os.environ,
            workdir=workdir,
            say=lambda text: None if is_demo else self.screen.line(f"  {text}"),
            run=run,
            is_demo=is_demo,
            tools=Path(criu) if criu else None,
        )

    def demo_cluster(self, workdir: Path, criu: str | None) -> tuple[DemoCluster, Connect]:
        """Return a new cluster for a demo, and what connects to its operator once it runs.

        `criu` as for `local_cluster`.
        """
        from snapshotctl.domain.cluster import DEMO_PREFIX, server_of

        run = secrets.token_hex(4)
        cluster = self._cluster(DEMO_PREFIX + run, workdir, run, is_demo=True, criu=criu)
        return cluster, lambda: self._operator_at(server_of(cluster.record), patiently=True)

    def running_cluster(self, sockets: Path, via: str) -> tuple[DemoCluster, Connect]:
        """Return the cluster of the server, whose sockets are below a folder, as `demo_cluster`.

        `via` is what people type before commands to reach it. WrongArguments without SNAPBACK_RUN.
        """
        from snapshotctl.adapters.running_cluster import RunningCluster
        from snapshotctl.domain.cluster import ClusterAccess

        run = os.environ.get("SNAPBACK_RUN")
        if not run:
            raise WrongArguments(
                "--on needs SNAPBACK_RUN in the environment",
                next_step="set it to what the services have, for what they start is found by it",
            )
        root = os.environ.get("SNAPBACK_ARTIFACT_ROOT")
        before = f"{via} " if via else ""
        access = ClusterAccess(
            snapshotctl=f"{before}snapshotctl",
            nats=f"{before}nats",
            artifacts=Path(check_folder("SNAPBACK_ARTIFACT_ROOT", root) if root else "artifacts"),
            logs="the logs of the services",
            page=os.environ.get("SNAPBACK_PAGE_URL", ""),
            end="The cluster goes on; another demo removes what this one made.",
            is_ours=False,
        )

        def connect() -> AbstractAsyncContextManager[OperatorClient]:
            return self.operator(patiently=True)

        return RunningCluster(sockets, run, connect, access), connect

    def documents(self, *sources: Path) -> list[Document]:
        """Read the documents of files, of the files of folders, or of standard input for `-`.

        InvalidManifest, WrongArguments.
        """
        files = [file for source in sources for file in _files_of(source)]
        return [document for file in files for document in self._documents(file)]

    def _documents(self, source: Path) -> list[Document]:
        from snapshotctl.domain import documents

        limit = documents.MAX_FILE_BYTES + 1
        if str(source) == "-":
            return documents.load(sys.stdin.buffer.read(limit), "stdin")
        try:
            with source.open("rb") as file:
                return documents.load(file.read(limit), str(source))
        except OSError as error:
            raise WrongArguments(
                f"{source} cannot be read: {error.strerror}", next_step="name a readable file, or -"
            ) from error


def _files_of(source: Path) -> list[Path]:
    """Return the manifests in a folder by their names, or the source itself. WrongArguments."""
    try:
        if not source.is_dir():
            return [source]
        found = sorted(path for path in source.iterdir() if path.suffix in MANIFESTS)
    except OSError as error:
        raise WrongArguments(
            f"{source} cannot be read: {error.strerror}", next_step="name a readable folder"
        ) from error
    if not found:
        raise WrongArguments(
            f"{source} has no file that ends in {', '.join(MANIFESTS)}",
            next_step="name a file, or the folder that has the manifests",
        )
    return found
