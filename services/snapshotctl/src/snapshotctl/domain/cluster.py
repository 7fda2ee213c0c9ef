"""A local cluster as values: what runs, with which environment, and what is recorded of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from snapshot_shared.ids import NodeName
from snapshot_shared.permissions import User, server_accounts
from snapshotctl.domain.servers import Server

RECORD = "cluster.json"
MARKER = "cluster"
CONTEXT_PREFIX = "snapback-"
SOCKETS_PREFIX = "snapback-"
DEMO_PREFIX = "demo-"
MAX_RECORD_BYTES = 1024 * 1024
MAX_SOCKET_FOLDER = 60
"""A socket's path has at most 107 bytes; below this folder come node, pod and name."""

NATS = "nats-server"
NATS_CONFIGURATION = "nats.conf"
OPERATOR = "operator"
PAGE = "page"


class ProcessRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A process that was started. `started` (ticks since boot) tells it from a later namesake."""

    name: str
    pid: int
    started: int
    log: str = ""


class NodeSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One node of a local cluster; `gpu_memory` is bytes a GPU."""

    name: str
    gpus: int
    gpu_memory: int


class ClusterRecord(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="snapback.v1.local_cluster"
):
    """What `cluster.json` says. `owner` is the demo that will end this cluster, if one will.

    `workdir` is the working directory of its workers, and `page` the address of its page.
    """

    name: str
    run: str
    boot_id: str
    state_dir: str
    socket_dir: str
    workdir: str = ""
    url: str = ""
    page: str = ""
    nodes: list[NodeSpec] = []
    processes: list[ProcessRecord] = []
    owner: ProcessRecord | None = None

    def process(self, name: str) -> ProcessRecord | None:
        """Find a process by its name."""
        return next((found for found in self.processes if found.name == name), None)


def server_of(record: ClusterRecord) -> Server:
    """Say where the bus of a running cluster is, and how a person gets in."""
    places = Places(Path(record.state_dir), Path(record.socket_dir))
    seed = places.key(User("snapshotctl"))
    return Server(record.url, f"local cluster {record.name}", str(seed))


class Handle(NamedTuple):
    """How people reach a cluster: what they type before a command, and where things are."""

    snapshotctl: str
    nats: str
    artifacts: Path
    logs: str
    page: str
    end: str
    is_ours: bool
    """Whether the demo has started it, and so ends it as well."""


def handle_of(record: ClusterRecord) -> Handle:
    """Say how people reach a local cluster that the demo has started."""
    places = Places(Path(record.state_dir), Path(record.socket_dir))
    return Handle(
        snapshotctl=f"snapshotctl --cluster {record.name}",
        nats=f"nats --context {CONTEXT_PREFIX}{record.name}",
        artifacts=places.artifacts,
        logs=str(places.logs),
        page=record.page,
        end=f"end it with: snapshotctl down --name {record.name} --purge",
        is_ours=True,
    )


class Program(NamedTuple):
    """One process to start."""

    name: str
    arguments: tuple[str, ...]
    environment: dict[str, str]


class Places(NamedTuple):
    """Where the parts of a cluster keep their files."""

    state: Path
    sockets: Path

    @property
    def logs(self) -> Path:
        """One file a process."""
        return self.state / "logs"

    @property
    def artifacts(self) -> Path:
        """The artifact root, which all nodes share."""
        return self.state / "artifacts"

    @property
    def page(self) -> Path:
        """Where the page writes its address."""
        return self.state / PAGE / "address"

    @property
    def nats(self) -> Path:
        """The folder of nats-server."""
        return self.state / "nats"

    def key(self, user: User) -> Path:
        """The nkey seed of one user of NATS."""
        return self.state / "keys" / f"{user.name}.nk"

    @property
    def record(self) -> Path:
        """The file that describes the cluster."""
        return self.state / RECORD

    def log(self, program: str) -> Path:
        """The log of one process."""
        return self.logs / f"{program}.log"

    def node(self, node: str, service: str) -> Path:
        """The state of one service of a node."""
        return self.state / "nodes" / node / service

    def node_sockets(self, node: str) -> Path:
        """The sockets of a node and of the pods on it."""
        return self.sockets / node


class Setting(NamedTuple):
    """What every process of a cluster is given."""

    python: str
    places: Places
    run: str
    url: str
    workdir: Path
    inherited: Mapping[str, str]
    name: str = ""


def agent_of(node: str) -> str:
    """Name the agent of a node."""
    return f"{node}-agent"


def gms_of(node: str) -> str:
    """Name the GPU memory service of a node."""
    return f"{node}-gms"


def program_of(node: str, service: str) -> str:
    """Name the process of one service (`agent` or `gms`) of a node."""
    return agent_of(node) if service == "agent" else gms_of(node)


def base_environment(inherited: Mapping[str, str], run: str) -> dict[str, str]:
    """Give the environment of every process: the user's, without settings meant for others."""
    kept = (
        "SNAPBACK_DEVICE_HUGE_PAGES",
        "SNAPBACK_OTLP_ENDPOINT",
        "SNAPBACK_HTTP_ADDRESS",
        "SNAPBACK_LOG_LEVEL",
        "SNAPBACK_KEEP_",
        "SNAPBACK_OBJECT_STORAGE",
        "SNAPBACK_QUARANTINE",
        "SNAPBACK_TRANSFER_BACKEND",
    )
    environment = {
        name: value
        for name, value in inherited.items()
        if not name.startswith("SNAPBACK_") or name.startswith(kept)
    }
    return environment | {"SNAPBACK_RUN": run}


def operator_program(setting: Setting) -> Program:
    """Describe the operator."""
    environment = _service(setting, User("operator"), setting.places.state / OPERATOR)
    return Program(OPERATOR, (setting.python, "-P", "-m", "snapshot_operator.main"), environment)


def page_program(setting: Setting) -> Program:
    """Describe the page, at a free port of the loopback address."""
    environment = _service(setting, User("viewer"), setting.places.state / PAGE) | {
        "SNAPBACK_HTTP_ADDRESS": "127.0.0.1:0",
        "SNAPBACK_PAGE_FILE": str(setting.places.page),
        "SNAPBACK_NATS_CONTEXT": CONTEXT_PREFIX + setting.name,
    }
    return Program(PAGE, (setting.python, "-P", "-m", "snapshot_page.main"), environment)


def node_programs(setting: Setting, node: NodeSpec) -> tuple[Program, Program]:
    """Describe a node: its GPU memory service and its agent."""
    places, name = setting.places, NodeName(node.name)
    shared = {
        "SNAPBACK_NODE": node.name,
        "SNAPBACK_ARTIFACT_ROOT": str(places.artifacts),
        "SNAPBACK_SOCKET_DIR": str(places.node_sockets(node.name)),
        "SNAPBACK_DEVICES": str(node.gpus),
        "SNAPBACK_DEVICE_BYTES": str(node.gpu_memory),
        "SNAPBACK_WORKDIR": str(setting.workdir),
        "SNAPBACK_SIM": "1",
    }
    gms = Program(
        gms_of(node.name),
        (setting.python, "-P", "-m", "gms.main"),
        _service(setting, User("gms", name), places.node(node.name, "gms")) | shared,
    )
    agent = Program(
        agent_of(node.name),
        (setting.python, "-P", "-m", "snapshot_agent.main"),
        _service(setting, User("agent", name), places.node(node.name, "agent")) | shared,
    )
    return gms, agent


def _service(setting: Setting, user: User, state: Path) -> dict[str, str]:
    return base_environment(setting.inherited, setting.run) | {
        "SNAPBACK_NATS_URL": setting.url,
        "SNAPBACK_NATS_CREDENTIALS": str(setting.places.key(user)),
        "SNAPBACK_STATE_DIR": str(state),
    }


class NatsServer(NamedTuple):
    """A nats-server: `listen` and `monitor` are host:port, of which port -1 is any that is free.

    It writes which one it got below `ports`. Without `monitor` it has no HTTP port.
    """

    name: str
    listen: str
    store: Path
    ports: Path | None = None
    monitor: str | None = None


def local_nats(name: str, places: Places) -> NatsServer:
    """Describe the server of a local cluster: loopback, a free port."""
    return NatsServer(
        CONTEXT_PREFIX + name, "127.0.0.1:-1", places.nats / "store", places.nats / "ports"
    )


def nats_configuration(server: NatsServer, keys: Sequence[tuple[User, str]]) -> str:
    """Write the configuration of nats-server: every write synced.

    `keys` has the public nkey of each user; nobody else gets in.
    """
    accounts = msgspec.json.format(msgspec.json.encode(server_accounts(keys)), indent=2).decode()
    ports = f"ports_file_dir: {_quoted(server.ports)}\n" if server.ports else ""
    monitor = f"http: {_quoted(server.monitor)}\n" if server.monitor else ""
    return f"""\
server_name: {_quoted(server.name)}
listen: {_quoted(server.listen)}
{ports}{monitor}max_payload: 1MB
jetstream {{
  store_dir: {_quoted(server.store)}
  sync_interval: always
  max_file_store: 4GB
  max_memory_store: 256MB
}}
accounts: {accounts}
"""


def _quoted(value: object) -> str:
    return msgspec.json.encode(str(value)).decode()


def stop_order(record: ClusterRecord) -> list[list[ProcessRecord]]:
    """Give the processes in the groups in which they are ended, workers between the two last.

    The operator first, so that it does not answer the end of the others with work; the bus last.
    """
    operator = [found for found in record.processes if found.name in (OPERATOR, PAGE)]
    bus = [found for found in record.processes if found.name == NATS]
    nodes = [found for found in record.processes if found.name not in (OPERATOR, PAGE, NATS)]
    agents = [found for found in nodes if found.name.endswith("-agent")]
    rest = [found for found in nodes if found not in agents]
    return [operator, agents, rest, bus]


class Member(NamedTuple):
    """A process found on this machine that carries a run id."""

    pid: int
    run: str
    command: str


class Found(NamedTuple):
    """What a look at the machine found: records with the pids that live, members, folders."""

    clusters: list[tuple[ClusterRecord, frozenset[int]]]
    owners_alive: frozenset[str]
    members: list[Member]
    socket_folders: list[tuple[Path, str]]
    broken_states: list[Path]


def leftovers(found: Found) -> list[str]:
    """Say what was left behind and how to remove it, one line each; empty when nothing was.

    A cluster lives while its demo does, or, when no demo owns it, while one of its processes does.
    """
    living = {
        record.run
        for record, alive in found.clusters
        if (record.run in found.owners_alive if record.owner else alive)
    }
    lines = [
        f"process {member.pid} of run {member.run}: {member.command} (fix: kill {member.pid})"
        for member in found.members
        if member.run not in living
    ]
    lines += [
        f"sockets {folder} of run {run or 'unknown'} (fix: rm -r {folder})"
        for folder, run in found.socket_folders
        if run not in living
    ]
    lines += [
        f"state {record.state_dir} of a demo that ended "
        f"(fix: snapshotctl down --name {record.name} --purge)"
        for record, _ in found.clusters
        if record.name.startswith(DEMO_PREFIX) and record.run not in living
    ]
    lines += [f"state {path} without a record (fix: rm -r {path})" for path in found.broken_states]
    return lines


def summary(processes: Iterable[ProcessRecord], alive: frozenset[int]) -> tuple[list[str], bool]:
    """Give the names of the processes that ended, and whether any lives."""
    listed = list(processes)
    return [p.name for p in listed if p.pid not in alive], any(p.pid in alive for p in listed)
