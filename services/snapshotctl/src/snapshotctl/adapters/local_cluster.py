"""A local cluster of real processes: nats-server, operator, page, and an agent and a GMS a node.

Everything is recorded in `cluster.json` as it is started, so that another command can end it, and
everything is ended again when a start does not come to its end.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import shutil
import sys
import time
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from msgspec.structs import replace

from snapshot_api.kinds import KINDS, AnyObject
from snapshot_shared.errors import Conflict, NotFound, SnapbackError
from snapshot_shared.ids import NodeName
from snapshot_shared.permissions import users_of
from snapshotctl.adapters import folders, inotify, nkeys, processes
from snapshotctl.adapters.folders import Folders
from snapshotctl.adapters.machine import nats_server_binary, program
from snapshotctl.adapters.operator_client import connected
from snapshotctl.adapters.processes import to_the_end
from snapshotctl.domain import cluster as plans
from snapshotctl.domain.cluster import (
    ClusterAccess,
    ClusterPaths,
    ClusterRecord,
    NodeSpec,
    ProcessRecord,
    Program,
)
from snapshotctl.domain.exits import AlreadyRunning, StartFailed

T = TypeVar("T")

NATS_S = 30.0
SERVICE_S = 30.0
NODES_S = 60.0
GRACE_S = 10.0
_UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES)
_LEASE_SOCKET = "gms.sock"

Say = Callable[[str], None]


class LocalCluster:
    """One cluster by its name. Methods that start or stop hold its lock."""

    def __init__(
        self,
        where: Folders,
        name: str,
        *,
        environment: Mapping[str, str],
        workdir: Path,
        say: Say,
        run: str,
        is_demo: bool = False,
        tools: Path | None = None,
    ) -> None:
        """Start and read nothing yet. The processes of a first start get the id `run`.

        With `tools` each node has a helper, which uses the CRIU there.
        """
        self._where = where
        self._name = name
        self._environment = environment
        self._workdir = workdir
        self._say = say
        self._run = run
        self._is_demo = is_demo
        self._tools = tools
        self._record: ClusterRecord | None = None

    @property
    def record(self) -> ClusterRecord:
        if self._record is None:
            found = self._where.record(self._name)
            if found is None:
                raise NotFound(
                    f"there is no local cluster {self._name!r}",
                    next_step=plans.instead(self._where.names(), "--cluster"),
                )
            self._record = found
        return self._record

    @property
    def _paths(self) -> ClusterPaths:
        return ClusterPaths(Path(self.record.state_dir), Path(self.record.socket_dir))

    @property
    def access(self) -> ClusterAccess:
        return plans.access_of(self.record, program())

    def sockets(self, node: str) -> Path:
        return self._paths.node_sockets(node)

    # Starting.

    async def start(self, nodes: Sequence[NodeSpec]) -> None:
        state = self._where.state(self._name)
        try:
            await self._start_in(state, nodes)
        except OSError as error:
            if error.errno not in _UNWRITABLE:
                raise
            why = f"{error.strerror}: {error.filename or state}"
            raise StartFailed(
                f"local cluster {self._name!r} cannot be started: {why}",
                next_step=f"see whether there is space there: df -h {state.parent}",
            ) from error

    async def _start_in(self, state: Path, nodes: Sequence[NodeSpec]) -> None:
        was_there = state.exists()
        state.mkdir(mode=0o700, parents=True, exist_ok=True)
        with folders.locked(state):
            known = folders.read_record(state)
            if known is not None:
                self._refuse_if_running(known)
            try:
                self._begin(state, known)
                await self._start_all(nodes)
            except BaseException as error:
                try:
                    # A second Ctrl-C must not leave processes behind.
                    await to_the_end(self._undo())
                finally:
                    if not was_there and not self._is_demo:
                        folders.remove_half_made(state, keep_logs=isinstance(error, SnapbackError))
                raise

    async def _undo(self) -> None:
        """End what was started; on a full disk the record of that cannot be written."""
        if self._record is not None:
            with contextlib.suppress(OSError):
                await self._stop_all()

    def _begin(self, state: Path, known: ClusterRecord | None) -> None:
        # By the id of an earlier run its leftover processes are found, too.
        run = known.run if known else self._run
        sockets = Path(known.socket_dir) if known else None
        # What cleans /tmp may have removed the folder of an earlier run.
        if sockets is None or not (sockets / plans.MARKER).is_file():
            sockets = self._where.new_sockets()
            try:
                folders.mark(sockets, run, state)
            except OSError:
                folders.remove(sockets)
                raise
        self._save(
            ClusterRecord(
                name=self._name,
                run=run,
                boot_id=processes.boot_id(),
                state_dir=str(state),
                socket_dir=str(sockets),
                workdir=str(self._workdir),
                tools=str(self._tools or ""),
                owner=processes.this_process("snapshotctl") if self._is_demo else None,
            )
        )

    def _refuse_if_running(self, known: ClusterRecord) -> None:
        ended, any_alive = plans.ended(known.processes, folders.alive(known))
        if not any_alive:
            return
        state = f"only partly: {', '.join(ended)} ended" if ended else f"at {known.url}"
        again = plans.anew(self._name)
        as_it_is = f"use it as it is, or end it with: snapshotctl down --cluster {self._name}"
        raise AlreadyRunning(
            f"local cluster {self._name!r} runs already, {state}",
            next_step=f"start all of it again, on its state: {again}" if ended else as_it_is,
            url=known.url,
        )

    async def _start_all(self, nodes: Sequence[NodeSpec]) -> None:
        since = time.time()
        await self._start_nats(nodes)
        self._say(f"nats-server listens at {self.record.url}")
        self._paths.page.unlink(missing_ok=True)
        self._start(plans.operator_program(self._settings()))
        self._start(plans.page_program(self._settings()))
        for node in nodes:
            self._start_gms(node)
        for node in nodes:
            await self._start_agent(node)
        await self._ready("the nodes", self._nodes_ready(nodes, since), NODES_S)
        self._say("the operator answers")
        await self._page_ready()
        for node in nodes:
            self._announce(node)
        self._where.write_context(self.record)

    async def add_node(self, node: NodeSpec) -> bool:
        since = time.time()
        self._admit([*self.record.nodes, node])
        if bus := self.record.process(plans.NATS):
            # nats-server reads the new users on SIGHUP, without closing connections.
            processes.reload(bus)
        self._start_gms(node)
        await self._start_agent(node)
        await self._ready(node.name, self._nodes_ready([node], since), NODES_S)
        self._announce(node)
        return True

    async def restart(self, node: str, services: Sequence[str]) -> list[str]:
        with folders.locked(Path(self.record.state_dir)):
            spec = self._known(node)
            running = self._running()
            ended = [name for name in services if plans.program_of(node, name) not in running]
            if not ended:
                raise AlreadyRunning(
                    f"{' and '.join(services)} of {node} run; there is nothing to start",
                    next_step=f"to kill one: snapshotctl sim crash {node} --at STEP",
                )
            self._refuse_without_bus(running)
            # An agent asks its GPU memory service when it starts to recover.
            for service in sorted(ended, reverse=True):
                await self._restart(spec, service)
            return [plans.program_of(node, service) for service in ended]

    async def restart_program(self, name: str) -> list[str]:
        """Start the bus, the operator or the page again, once it has ended.

        AlreadyRunning, StartFailed; Conflict while there is no bus for another, or nothing runs.
        """
        with folders.locked(Path(self.record.state_dir)):
            running = self._running()
            if name in running:
                raise AlreadyRunning(
                    f"{name} runs; there is nothing to start",
                    next_step=f"to start all of it anew: {plans.anew(self._name)}",
                )
            if name == plans.NATS:
                # The services go on looking for it where it was.
                await self._start_nats(self.record.nodes, self.record.url)
                return [name]
            self._refuse_without_bus(running)
            if name == plans.PAGE:
                await self._start_page()
            else:
                self._start(plans.operator_program(self._settings()))
                await self._ready(name, self._operator_answers(), SERVICE_S, among=[name])
            return [name]

    def _running(self) -> set[str]:
        """Return the names of the programs that run. Conflict where there are none."""
        alive = folders.alive(self.record)
        running = {p.name for p in self.record.processes if p.pid in alive}
        if not running:
            raise Conflict(
                f"local cluster {self._name!r} is down",
                next_step=f"start all of it: snapshotctl up --cluster {self._name}",
            )
        return running

    def _refuse_without_bus(self, running: Collection[str]) -> None:
        if plans.NATS not in running:
            raise Conflict(
                f"the bus of local cluster {self._name!r} does not run",
                next_step=f"start it: {plans.restart(self._name, plans.NATS)}",
            )

    async def _operator_answers(self) -> None:
        server = plans.server_of(self.record)
        async with connected(server, patiently=True) as client, client.api_used() as changes:
            while not await client.is_healthy():
                await changes.wait()

    async def _start_page(self) -> None:
        self._paths.page.unlink(missing_ok=True)
        self._start(plans.page_program(self._settings()))
        await self._page_ready()

    async def _page_ready(self) -> None:
        await self._ready(
            plans.PAGE, inotify.appears(self._paths.page), SERVICE_S, among=[plans.PAGE]
        )
        self._save(replace(self.record, page=self._paths.page.read_text("ascii").strip()))

    def _known(self, node: str) -> NodeSpec:
        found = next((spec for spec in self.record.nodes if spec.name == node), None)
        if found is None:
            names = ", ".join(spec.name for spec in self.record.nodes) or "none"
            raise NotFound(f"local cluster {self._name!r} has no node {node!r}; it has {names}")
        return found

    async def _restart(self, node: NodeSpec, service: str) -> None:
        name = plans.program_of(node.name, service)
        if service == "gms":
            self._start_gms(node)
            socket = self._paths.node_sockets(node.name) / _LEASE_SOCKET
            await self._ready(name, inotify.appears(socket), SERVICE_S, among=[name])
        else:
            _, agent = plans.node_programs(self._settings(), node)
            self._start(agent)
        await self._ready(name, self._answers(node.name, service), SERVICE_S, among=[name])

    async def _answers(self, node: str, service: str) -> None:
        """Wait until a service answers. It first uses JetStream, whose advisory wakes this."""
        server = plans.server_of(self.record)
        async with connected(server, patiently=True) as client, client.api_used() as changes:
            while not await client.answers(node, service):
                await changes.wait()

    def _announce(self, node: NodeSpec) -> None:
        self._say(f"{node.name} is ready: {node.about}")

    def _admit(self, nodes: Sequence[NodeSpec], url: str = "") -> Path:
        """Write the configuration of nats-server, with the users of these nodes and no others.

        It listens at `url`, or without one at any free port.
        """
        paths = self._paths
        users = users_of(NodeName(node.name) for node in nodes)
        configuration = paths.nats / plans.NATS_CONFIGURATION
        server = plans.local_nats(self._name, paths, url)
        nkeys.admit(configuration, server, {user: paths.key(user) for user in users})
        return configuration

    async def _start_nats(self, nodes: Sequence[NodeSpec], url: str = "") -> None:
        paths = self._paths
        ports = paths.nats / "ports"
        # The file of an earlier nats-server would name a port that is closed.
        shutil.rmtree(ports, ignore_errors=True)
        folders.make_private(ports)
        configuration = self._admit(nodes, url)
        environment = plans.base_environment(self._environment, self.record.run)
        program = Program(plans.NATS, (nats_server_binary(), "-c", str(configuration)), environment)
        async with inotify.watching(ports) as changes:
            self._start(program)
            # Other processes of the cluster may have ended meanwhile.
            only = [plans.NATS] if url else None
            url = await self._ready(plans.NATS, _listening(ports, changes), NATS_S, among=only)
        self._save(replace(self.record, url=url))

    def _start_gms(self, node: NodeSpec) -> None:
        sockets = self._paths.node_sockets(node.name)
        sockets.mkdir(mode=0o700, exist_ok=True)
        # A socket that a killed server left would look like one that is ready.
        (sockets / _LEASE_SOCKET).unlink(missing_ok=True)
        if node not in self.record.nodes:
            others = [known for known in self.record.nodes if known.name != node.name]
            self._save(replace(self.record, nodes=[*others, node]))
        gms, _ = plans.node_programs(self._settings(), node)
        self._start(gms)

    async def _start_agent(self, node: NodeSpec) -> None:
        if helper := plans.helper_program(self._settings(), node):
            listening = self._paths.helper(node.name)
            listening.unlink(missing_ok=True)
            self._start(helper)
            await self._ready(helper.name, inotify.appears(listening), SERVICE_S)
        socket = self._paths.node_sockets(node.name) / _LEASE_SOCKET
        await self._ready(plans.gms_of(node.name), inotify.appears(socket), SERVICE_S)
        _, agent = plans.node_programs(self._settings(), node)
        self._start(agent)

    def _settings(self) -> plans.ClusterSettings:
        return plans.ClusterSettings(
            sys.executable,
            self._paths,
            self.record.run,
            self.record.url,
            # Workers start where they did before, wherever this command runs.
            Path(self.record.workdir or self._workdir),
            self._environment,
            self._name,
            Path(self.record.tools) if self.record.tools else None,
        )

    def _start(self, program: Program) -> None:
        if state := program.environment.get("SNAPBACK_STATE_DIR"):
            folders.make_private(Path(state))
        log = self._paths.log(program.name)
        started = processes.spawn(program.name, program.arguments, program.environment, log)
        others = [known for known in self.record.processes if known.name != program.name]
        self._save(replace(self.record, processes=[*others, started]))

    async def objects(self) -> list[AnyObject]:
        """Return its checkpoints, snapshots and pods."""
        async with connected(plans.server_of(self.record)) as client:
            kinds = ("DynamoCheckpoint", "Snapshot", "Pod")
            return [each for kind in kinds for each in await client.all_of(KINDS[kind], None)]

    async def _nodes_ready(self, nodes: Sequence[NodeSpec], since: float) -> None:
        """Wait until each node has published its presence with its devices since `since`.

        The store of an older run may have a node as ready that is not there.
        """
        async with connected(plans.server_of(self.record), patiently=True) as client:
            await client.nodes_ready(nodes, since)

    async def _ready(
        self,
        what: str,
        waiting: Coroutine[Any, Any, T],
        within_s: float,
        *,
        among: Sequence[str] | None = None,
    ) -> T:
        """Wait, but no longer than a deadline or the life of each process watched. StartFailed."""
        ready = asyncio.ensure_future(waiting)
        try:
            async with self._ends(among) as ends:
                either: list[asyncio.Future[Any]] = [ready, *ends]
                done, _ = await asyncio.wait(
                    either, timeout=within_s, return_when=asyncio.FIRST_COMPLETED
                )
            if ready in done:
                return ready.result()
        finally:
            ready.cancel()
        for task, record in ends.items():
            if task in done:
                raise self._start_failed(f"{record.name} ended at its start", record)
        log = self.record.process(what)
        raise self._start_failed(f"{what} did not become ready in {within_s:.0f} s", log)

    @contextlib.asynccontextmanager
    async def _ends(
        self, among: Sequence[str] | None
    ) -> AsyncIterator[dict[asyncio.Future[None], ProcessRecord]]:
        watched = [p for p in self.record.processes if among is None or p.name in among]
        handles = {record.name: processes.opened(record) for record in watched}
        tasks: dict[asyncio.Future[None], ProcessRecord] = {}
        for record in watched:
            handle = handles[record.name]
            tasks[asyncio.ensure_future(handle.ended() if handle else _nothing())] = record
        try:
            yield tasks
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            for handle in handles.values():
                if handle is not None:
                    handle.close()

    def _start_failed(self, message: str, record: ProcessRecord | None) -> StartFailed:
        log = Path(record.log) if record else self._paths.logs
        tail = folders.log_tail(log) if record else []
        return StartFailed(message, next_step=f"read {log}", log=str(log), lines=tail)

    # Ending.

    async def kill_node(self, node: str) -> list[str]:
        """End a node as a power cut does."""
        names = {plans.agent_of(node), plans.gms_of(node), plans.helper_of(node)}
        mine = [record for record in self.record.processes if record.name in names]
        recorded = {record.pid: record.name for record in mine}
        found = [(recorded[r.pid], processes.opened(r)) for r in mine]
        found += [
            (pod or "a child", processes.opened_member(member))
            for pod, member in processes.members_on(node, self.record.run)
            if member.pid not in recorded
        ]
        killed = [(name, handle) for name, handle in found if handle is not None]
        await processes.end([handle for _, handle in killed], grace_s=0)
        left = [record for record in self.record.processes if record.name not in names]
        self._save(replace(self.record, processes=left))
        return [f"{name} (pid {handle.pid})" for name, handle in killed]

    async def stop(self, *, purge: bool) -> None:
        with folders.locked(Path(self.record.state_dir)):
            await to_the_end(self._stop_all(purge=purge))

    async def _stop_all(self, *, purge: bool = False) -> None:
        """End the services group by group, the workers before their memory, the bus last."""
        record = self.record
        if not folders.is_this_boot(record):
            # The pids of another boot may belong to any process now.
            record = replace(record, processes=[])
        *first, memory, bus = plans.stop_order(record)
        spared = {found.pid for found in (*memory, *bus)}
        for group in first:
            await _end(group)
        workers = [m for m in processes.members(record.run) if m.pid not in spared]
        handles = [handle for m in workers if (handle := processes.opened_member(m))]
        await processes.end(handles, grace_s=GRACE_S)
        await _end(memory)
        await _end(bus)
        for _ in range(3):
            # What was started while the others were ending.
            late = [h for m in processes.members(record.run) if (h := processes.opened_member(m))]
            await processes.end(late, grace_s=0)
            if not late:
                break
        folders.remove_sockets(Path(record.socket_dir))
        self._where.remove_context(self._name)
        self._save(replace(record, url="", page="", processes=[], owner=None))
        if purge:
            folders.remove(Path(record.state_dir))

    def forget(self) -> bool:
        """Remove the logs that a start which failed has left; whether there were any."""
        state = self._where.state(self._name)
        if not state.is_dir() or (state / plans.RECORD).exists():
            return False
        with folders.locked(state):
            folders.remove(state)
        return True

    def keep(self) -> None:
        self._save(replace(self.record, owner=None))

    def _save(self, record: ClusterRecord) -> None:
        self._record = record
        # A purge has removed it.
        if Path(record.state_dir).is_dir():
            folders.write_record(record)


async def _listening(ports: Path, changes: inotify.Folder) -> str:
    """Read where nats-server listens from the file that it writes when it is ready."""
    while True:
        for file in ports.glob("*.ports"):
            with contextlib.suppress(ValueError, LookupError, OSError):
                return str(json.loads(file.read_bytes())["nats"][0])
        await changes.wait()


async def _nothing() -> None:
    """Return at once, for a process that ended before it could be watched."""


async def _end(group: Sequence[ProcessRecord]) -> None:
    handles = [handle for record in group if (handle := processes.opened(record))]
    await processes.end(handles, grace_s=GRACE_S)
