"""Chooses the adapters of each command."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import sys
import time
from collections.abc import AsyncIterator, Coroutine
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from snapshot_shared.service import VERSION
from snapshot_shared.tasks import end_all
from snapshotctl.adapters import machine
from snapshotctl.adapters.cluster_logs import ClusterLogs
from snapshotctl.adapters.folders import Folders
from snapshotctl.adapters.local_cluster import LocalCluster
from snapshotctl.adapters.operator_client import OperatorClient, connected
from snapshotctl.adapters.render import Output, Terminal
from snapshotctl.adapters.running_cluster import RunningCluster
from snapshotctl.adapters.worker_socket import SocketWorkers
from snapshotctl.domain import documents
from snapshotctl.domain.cluster import DEMO_PREFIX, ClusterRecord, Handle, server_of
from snapshotctl.domain.documents import Document
from snapshotctl.domain.exits import Exit, WrongArguments
from snapshotctl.domain.servers import DEFAULT_CLUSTER, Server, cluster_name
from snapshotctl.handlers.phases import Clocks
from snapshotctl.handlers.summary import Stage
from snapshotctl.main.running import carry_out

if TYPE_CHECKING:
    from snapshot_shared.telemetry import Telemetry

SERVICE = "snapshotctl"
NODE = "cli"


@dataclass(frozen=True)
class Tools:
    """What the user said for all commands, and what follows from it."""

    server: str | None
    cluster: str | None
    output: Output

    @cached_property
    def screen(self) -> Terminal:
        """The terminal."""
        return Terminal(self.output, sys.stdout, sys.stderr)

    @cached_property
    def folders(self) -> Folders:
        """The folders of this user."""
        return Folders(os.environ)

    @cached_property
    def telemetry(self) -> Telemetry:
        """The tracer."""
        from snapshot_shared.telemetry import Telemetry  # noqa: PLC0415 - costs start-up time

        endpoint = os.environ.get("SNAPBACK_OTLP_ENDPOINT")
        return Telemetry(SERVICE, NODE, VERSION, otlp_endpoint=endpoint)

    @property
    def clocks(self) -> Clocks:
        """The clocks of this machine."""
        return Clocks(machine.now, time.monotonic)

    def logs(self) -> ClusterLogs | None:
        """Find the logs of the server's cluster; None when they are not on this machine."""
        record = self.folders.record_at(self.folders.find_server(self.server, self.cluster))
        return None if record is None else ClusterLogs(record)

    @contextlib.asynccontextmanager
    async def operator(self, *, patiently: bool = False) -> AsyncIterator[OperatorClient]:
        """Find the server and connect for the length of the block."""
        server = self.folders.find_server(self.server, self.cluster)
        async with self.operator_at(server, patiently=patiently) as client:
            yield client

    @contextlib.asynccontextmanager
    async def operator_at(
        self, server: Server, *, patiently: bool
    ) -> AsyncIterator[OperatorClient]:
        """Connect for the length of the block; our spans leave meanwhile and at its end."""
        async with connected(server, patiently=patiently) as client:
            publishing = asyncio.create_task(self.telemetry.publish_to(client.bus))
            try:
                yield client
            finally:
                await end_all(publishing)
                await self.telemetry.flush(client.bus)
        self.telemetry.shutdown()

    def local_cluster(self, name: str | None) -> LocalCluster:
        """Give the local cluster that is meant."""
        return self._cluster(self._chosen(name), Path.cwd(), secrets.token_hex(4))

    def local_record(self, name: str) -> ClusterRecord | None:
        """Give what is recorded of a local cluster; without a name of the one that is meant.

        None where there is none, or where a server was named that is not its own.
        """
        if not name and (self.server or os.environ.get("NATS_URL")):
            return None
        return self.folders.record(self._chosen(name))

    def _chosen(self, name: str | None) -> str:
        chosen = name or self.cluster or os.environ.get("SNAPBACK_CLUSTER") or DEFAULT_CLUSTER
        return cluster_name(chosen)

    def _cluster(
        self, name: str, workdir: Path, run: str, *, is_demo: bool = False
    ) -> LocalCluster:
        return LocalCluster(
            self.folders,
            name,
            environment=os.environ,
            workdir=workdir,
            say=lambda text: self.screen.line(f"  {text}"),
            run=run,
            is_demo=is_demo,
        )

    def stage(self) -> Stage:
        """Set the stage of a demo on a cluster of its own."""
        examples = machine.examples_folder()
        run = secrets.token_hex(4)
        name = DEMO_PREFIX + run
        cluster = self._cluster(name, examples.parent.parent, run, is_demo=True)

        def connect() -> AbstractAsyncContextManager[OperatorClient]:
            return self.operator_at(server_of(cluster.record), patiently=True)

        return Stage(
            screen=self.screen,
            cluster=cluster,
            workers=SocketWorkers(),
            telemetry=self.telemetry,
            connect=connect,
            monotonic=time.monotonic,
            machine=machine.look(self.folders.states, examples),
            examples=examples,
            documents=read_documents,
        )

    def stage_on(self, sockets: Path, via: str) -> Stage:
        """Set the stage of a demo on a cluster that runs, with its sockets below a folder."""
        run = os.environ.get("SNAPBACK_RUN")
        if not run:
            raise WrongArguments(
                "--on needs SNAPBACK_RUN in the environment",
                next_step="set it to what the services have, for what they start is found by it",
            )
        before = f"{via} " if via else ""

        def connect() -> AbstractAsyncContextManager[OperatorClient]:
            return self.operator(patiently=True)

        handle = Handle(
            snapshotctl=f"{before}snapshotctl",
            nats=f"{before}nats",
            artifacts=Path(os.environ.get("SNAPBACK_ARTIFACT_ROOT", "artifacts")),
            logs="the logs of the services",
            page=os.environ.get("SNAPBACK_PAGE_URL", ""),
            end="The cluster goes on; another demo removes what this one made.",
            is_ours=False,
        )
        return Stage(
            screen=self.screen,
            cluster=RunningCluster(sockets, run, connect, handle),
            workers=SocketWorkers(),
            telemetry=self.telemetry,
            connect=connect,
            monotonic=time.monotonic,
            machine=None,
            examples=machine.examples_folder(),
            documents=read_documents,
        )


def run_work(tools: Tools, work: Coroutine[Any, Any, Exit | None]) -> None:
    """Run the work of a command and end with its exit code."""
    raise typer.Exit(int(carry_out(work, tools.screen)))


def read_documents(source: Path) -> list[Document]:
    """Read the documents of a file, or of standard input for `-`. InvalidManifest."""
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
