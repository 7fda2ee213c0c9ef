"""The processes of a chaos run: a cluster of nats-servers, two operators, nodes; and their ends."""

from __future__ import annotations

import asyncio
import fcntl
import os
import shutil
import signal
import socket
import sys
import tempfile
import uuid
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from snapshot_shared.ids import NodeName
from snapshot_shared.permissions import users_of
from snapshotctl.adapters import folders, processes
from snapshotctl.adapters.local_cluster import nats_server_binary
from snapshotctl.domain import cluster as plans
from snapshotctl.domain.cluster import ClusterPaths, NodeSpec, ProcessRecord, Program
from tests.support import hanging
from tests.support.keyed_server import keyed_accounts, seed_of

ROOT = Path(__file__).resolve().parents[2]
SERVERS = ("nats-0", "nats-1", "nats-2")
OPERATORS = ("operator-0", "operator-1")
MIB = 2**20
_CONFIGURATION = """\
server_name: "{name}"
listen: "127.0.0.1:{port}"
cluster {{
  name: "chaos"
  listen: "127.0.0.1:{route}"
  routes: [{routes}]
}}
jetstream {{
  store_dir: "{store}"
  max_file_store: 4GB
  max_memory_store: 256MB
}}
"""


class Machines:
    """Every process of one run, by its name. A name is alive, stopped, or waits to be started."""

    def __init__(self, home: Path, sockets: Path, nodes: int) -> None:
        self.run = f"chaos-{uuid.uuid4().hex[:12]}"
        self.places = ClusterPaths(home, sockets)
        self.nodes = [NodeSpec(name=f"node-{i}", gpus=2, gpu_memory=64 * MIB) for i in range(nodes)]
        self.counts: Counter[str] = Counter()
        folders.mark(sockets, self.run, home)
        # All are held until all are chosen.
        held = [socket.create_server(("127.0.0.1", 0)) for _ in range(2 * len(SERVERS))]
        ports = [each.getsockname()[1] for each in held]
        for each in held:
            each.close()
        self._ports = dict(zip(SERVERS, ports[: len(SERVERS)], strict=True))
        self._routes = dict(zip(SERVERS, ports[len(SERVERS) :], strict=True))
        self.url = ",".join(f"nats://127.0.0.1:{port}" for port in self._ports.values())
        self._programs = {program.name: program for program in self._described()}
        self._records: dict[str, ProcessRecord] = {}

    def _described(self) -> Iterator[Program]:
        inherited = {k: v for k, v in os.environ.items() if not k.startswith(("NATS_", "XDG_"))}
        setting = plans.ClusterSettings(
            sys.executable, self.places, self.run, self.url, ROOT, inherited
        )
        users = users_of(NodeName(node.name) for node in self.nodes)
        accounts = keyed_accounts(self.places.state, users)
        routes = ", ".join(f'"nats://127.0.0.1:{port}"' for port in self._routes.values())
        for name in SERVERS:
            folder = self.places.nats / name
            folder.mkdir(parents=True)
            configuration = folder / "nats.conf"
            configuration.write_text(
                _CONFIGURATION.format(
                    name=name,
                    port=self._ports[name],
                    route=self._routes[name],
                    routes=routes,
                    store=folder / "store",
                )
                + accounts
            )
            environment = plans.base_environment(inherited, self.run)
            yield Program(name, (nats_server_binary(), "-c", str(configuration)), environment)
        operator = plans.operator_program(setting)
        for name in OPERATORS:
            environment = operator.environment | {"SNAPBACK_NATS_REPLICAS": "3"}
            yield operator._replace(name=name, environment=environment)
        for node in self.nodes:
            for program in plans.node_programs(setting, node):
                environment = program.environment | self._hanging(node.name)
                yield program._replace(environment=environment)

    def _hanging(self, node: str) -> dict[str, str]:
        """Return the settings with which the artifact root of a node hangs while `stall` says."""
        lock = self._stalled(node)
        lock.parent.mkdir(exist_ok=True)
        lock.touch()
        return {
            "PYTHONPATH": f"{hanging.PRELOAD}:{ROOT}",
            hanging.ROOT: str(self.places.artifacts),
            hanging.LOCK: str(lock),
        }

    def _stalled(self, node: str) -> Path:
        return self.places.state / "stalls" / node

    @property
    def root(self) -> str:
        """The nkey seed of a user whom no list binds."""
        return str(seed_of(self.places.state, "root"))

    @property
    def services(self) -> list[str]:
        """The names of all agents and GPU memory services."""
        return [
            p for node in self.nodes for p in (plans.agent_of(node.name), plans.gms_of(node.name))
        ]

    def start(self, *names: str) -> None:
        """Start what does not run."""
        for name in names:
            program = self._programs[name]
            record = self._records.get(name)
            if record is not None and processes.is_alive(record):
                continue
            if state := program.environment.get("SNAPBACK_STATE_DIR"):
                Path(state).mkdir(mode=0o700, parents=True, exist_ok=True)
            if name.endswith("-gms"):
                Path(program.environment["SNAPBACK_SOCKET_DIR"]).mkdir(mode=0o700, exist_ok=True)
            self._records[name] = processes.spawn(
                name, program.arguments, program.environment, self.places.log(name)
            )

    def _opened(self, name: str) -> processes.ProcessHandle | None:
        record = self._records.get(name)
        return processes.opened(record) if record else None

    async def kill(self, name: str, what: str) -> None:
        """End one process at once, and count it."""
        if handle := self._opened(name):
            self.counts[f"{what} kills"] += 1
            await processes.end([handle], grace_s=0)

    async def pause(self, name: str, seconds: float, what: str) -> None:
        """Stop one process for a time."""
        if (handle := self._opened(name)) is None:
            return
        self.counts[f"{what} pauses"] += 1
        try:
            handle.send(signal.SIGSTOP)
            await asyncio.sleep(seconds)
        finally:
            handle.send(signal.SIGCONT)
            handle.close()

    async def stall(self, node: str, seconds: float) -> None:
        """Have no call of a node below the artifact root return for a time."""
        self.counts["disk stalls"] += 1
        with self._stalled(node).open() as lock:
            # A process that was stopped between two calls may keep it from us.
            await asyncio.to_thread(fcntl.flock, lock, fcntl.LOCK_EX)
            await asyncio.sleep(seconds)

    async def wipe(self) -> None:
        """Lose JetStream as a whole: all servers, all stores."""
        await asyncio.gather(*(self.kill(name, "wiped nats-server") for name in SERVERS))
        for name in SERVERS:
            shutil.rmtree(self.places.nats / name / "store", ignore_errors=True)
        self.counts["store wipes"] += 1
        self.start(*SERVERS)

    def start_all(self) -> None:
        """Start everything that does not run."""
        self.start(*self._programs)

    def fallen(self) -> list[str]:
        """Name what should run and does not."""
        return [name for name, record in self._records.items() if not processes.is_alive(record)]

    async def end(self) -> None:
        """End everything in the order of `down`: workers before their memory, the servers last."""
        agents = [name for name in self.services if name.endswith("-agent")]
        memory = [name for name in self.services if name.endswith("-gms")]
        await self._end(*OPERATORS)
        await self._end(*agents)
        spared = {r.pid for name, r in self._records.items() if name in (*memory, *SERVERS)}
        await self._end_members(spared, grace_s=5.0)
        await self._end(*memory)
        await self._end(*SERVERS)
        await self._end_members(set(), grace_s=0)

    async def _end(self, *names: str) -> None:
        handles = [handle for name in names if (handle := self._opened(name))]
        await processes.end(handles, grace_s=10.0)

    async def _end_members(self, spared: set[int], *, grace_s: float) -> None:
        members = [m for m in processes.members(self.run) if m.pid not in spared]
        handles = [h for m in members if (h := processes.opened_member(m))]
        await processes.end(handles, grace_s=grace_s)


@contextmanager
def machines(nodes: int) -> Iterator[Machines]:
    """Folders for a run, removed at its end; the processes are ended by `Machines.end`."""
    home = Path(tempfile.mkdtemp(prefix="snapback-chaos-"))
    sockets = Path(tempfile.mkdtemp(prefix=plans.SOCKETS_PREFIX))
    try:
        yield Machines(home, sockets, nodes)
    finally:
        folders.remove_sockets(sockets)
        shutil.rmtree(home, ignore_errors=True)
