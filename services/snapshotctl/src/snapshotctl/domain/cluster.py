"""A local cluster as values: what runs, with which environment, and what is recorded of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec

from snapshot_api.facts import FINISHED, Pod
from snapshot_api.kinds import AnyObject
from snapshot_api.v1alpha1.checkpoint import DynamoCheckpoint
from snapshot_api.v1alpha1.snapshot import Snapshot
from snapshot_shared.ids import NodeName
from snapshot_shared.permissions import User, server_accounts
from snapshot_shared.units import counted
from snapshotctl.domain.servers import Server

RECORD = "cluster.json"
MARKER = "cluster"
CONTEXT_PREFIX = "snapback-"
SOCKETS_PREFIX = "snapback-"
DEMO_PREFIX = "demo-"
MAX_RECORD_BYTES = 1024 * 1024
MAX_NAMES = 5
MAX_SOCKET_FOLDER = 60
"""A socket's path has at most 107 bytes; below this folder come node, pod and name."""

NATS = "nats-server"
NATS_CONFIGURATION = "nats.conf"
OPERATOR = "operator"
PAGE = "page"
ALONE = (NATS, OPERATOR, PAGE)
"""The processes of a cluster that belong to no node."""

CRIU = "criu/criu"
INIT = "snapback-init"
"""Where they are in the folder of the tools."""


class ProcessRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A process that was started, `started` ticks after boot. A pid alone may be used again."""

    name: str
    pid: int
    started: int
    log: str = ""


class NodeSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One node of a local cluster; `gpu_memory` is bytes a GPU.

    With the device `cuda` it has the GPUs of the machine, `gpus` of them or more.
    """

    name: str
    gpus: int
    gpu_memory: int = 0
    device: Literal["simulated", "cuda"] = "simulated"

    @property
    def about(self) -> str:
        """Its GPUs in words."""
        if self.device == "cuda":
            return "the GPUs of this machine"
        return f"{counted(self.gpus, 'simulated GPU')} of {self.gpu_memory // (1024 * 1024)} MiB"


class ClusterRecord(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="snapback.v1.local_cluster"
):
    """The contents of `cluster.json`. `owner` is the demo that will end this cluster, if one will.

    `workdir` is the working directory of its workers, and `page` the address of its page. `tools`
    is the folder of CRIU and the first program of placeholders, where its nodes have helpers.
    """

    name: str
    run: str
    boot_id: str
    state_dir: str
    socket_dir: str
    workdir: str = ""
    tools: str = ""
    url: str = ""
    page: str = ""
    nodes: list[NodeSpec] = []
    processes: list[ProcessRecord] = []
    owner: ProcessRecord | None = None

    def process(self, name: str) -> ProcessRecord | None:
        """Return a process by its name."""
        return next((found for found in self.processes if found.name == name), None)


class SeenCluster(NamedTuple):
    """A local cluster as it is: pids by the names of its processes, and those that have ended."""

    name: str
    state: str
    path: str
    url: str
    page: str
    pids: dict[str, int]
    ended: list[str]

    def value(self) -> dict[str, Any]:
        """Return it as JSON has it."""
        return self._asdict()


def seen_cluster(record: ClusterRecord, alive: frozenset[int]) -> SeenCluster:
    """Return a cluster of which the processes `alive` run: `running`, `down` or `partly running`.

    What is down has no address: the next start takes other ports.
    """
    pids = {found.name: found.pid for found in record.processes if found.pid in alive}
    gone, runs = ended(record.processes, alive)
    state = "down" if not runs else "partly running" if gone else "running"
    url, page = (record.url, record.page) if runs else ("", "")
    return SeenCluster(record.name, state, record.state_dir, url, page, pids, gone)


def server_of(record: ClusterRecord) -> Server:
    """Return the server of a running cluster, with the credentials of people."""
    paths = ClusterPaths(Path(record.state_dir), Path(record.socket_dir))
    seed = paths.key(User("snapshotctl"))
    return Server(record.url, f"local cluster {record.name}", str(seed), cluster=record.name)


class ClusterAccess(NamedTuple):
    """How people reach a cluster: what they type before a command, and where things are."""

    snapshotctl: str
    nats: str
    artifacts: Path
    logs: str
    page: str
    end: str
    is_ours: bool
    """Whether the demo has started it, and so ends it as well."""
    name: str = ""
    """Of a local cluster."""


def access_of(record: ClusterRecord, program: str) -> ClusterAccess:
    """Return how people reach a local cluster that the demo has started, by which program."""
    paths = ClusterPaths(Path(record.state_dir), Path(record.socket_dir))
    return ClusterAccess(
        snapshotctl=f"{program} --cluster {record.name}",
        nats=f"nats --context {CONTEXT_PREFIX}{record.name}",
        artifacts=paths.artifacts,
        logs=str(paths.logs),
        page=record.page,
        end=f"end it with: {program} down --cluster {record.name} --purge",
        is_ours=True,
        name=record.name,
    )


def instead(names: Sequence[str], option: str, wanted: str = "") -> str:
    """Return the next step where a cluster is not there: those that are, or how to start it."""
    start = f"start one with: snapshotctl up{wanted}"
    if not names:
        return start
    choices = " or ".join(f"{option} {name}" for name in names[:MAX_NAMES])
    more = f" ({len(names)} in all)" if len(names) > MAX_NAMES else ""
    return f"name one that is there: {choices}{more}; or {start}"


def restart(cluster: str, process: str) -> str:
    """Return the command that starts a process of a local cluster again."""
    node, _, service = process.rpartition("-")
    if service in ("agent", "gms"):
        return f"snapshotctl sim restart {node} --service {service} --cluster {cluster}"
    return (
        f"snapshotctl sim restart {process} --cluster {cluster}"
        if process in ALONE
        else (anew(cluster))
    )


def anew(cluster: str) -> str:
    """Return the command that ends a local cluster and starts it on its state."""
    return f"snapshotctl down --cluster {cluster} && snapshotctl up --cluster {cluster}"


class Program(NamedTuple):
    """One process to start."""

    name: str
    arguments: tuple[str, ...]
    environment: dict[str, str]


class ClusterPaths(NamedTuple):
    """The files of a cluster."""

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

    def helper(self, node: str) -> Path:
        """The socket of the helper of a node."""
        return self.node_sockets(node) / "helper.sock"


class ClusterSettings(NamedTuple):
    """What the arguments and environments of the processes of a cluster are made of."""

    python: str
    paths: ClusterPaths
    run: str
    url: str
    workdir: Path
    inherited: Mapping[str, str]
    name: str = ""
    tools: Path | None = None


def agent_of(node: str) -> str:
    """Return the name of the agent of a node."""
    return f"{node}-agent"


def gms_of(node: str) -> str:
    """Return the name of the GPU memory service of a node."""
    return f"{node}-gms"


def helper_of(node: str) -> str:
    """Return the name of the helper of a node."""
    return f"{node}-helper"


def program_of(node: str, service: str) -> str:
    """Return the name of the process of one service (`agent` or `gms`) of a node."""
    return agent_of(node) if service == "agent" else gms_of(node)


def base_environment(inherited: Mapping[str, str], run: str) -> dict[str, str]:
    """Return the environment of every process: the user's, without settings meant for others."""
    kept = (
        "SNAPBACK_ARTIFACT_KEYS",
        "SNAPBACK_DEVICE_HUGE_PAGES",
        "SNAPBACK_ENCRYPT_MEMORY",
        "SNAPBACK_OTLP_ENDPOINT",
        "SNAPBACK_HTTP_ADDRESS",
        "SNAPBACK_LOG_LEVEL",
        "SNAPBACK_KEEP_",
        "SNAPBACK_KMS_COMMAND",
        "SNAPBACK_OBJECT_STORAGE",
        "SNAPBACK_PROCESS_PER_DEVICE",
        "SNAPBACK_REQUIRE_SIGNATURE",
        "SNAPBACK_QUARANTINE",
        "SNAPBACK_TRANSFER_BACKEND",
        "SNAPBACK_SAVE_THREADS",
        "SNAPBACK_LOAD_THREADS",
        "SNAPBACK_STRIPE_ROOTS",
    )
    environment = {
        name: value
        for name, value in inherited.items()
        if not name.startswith("SNAPBACK_") or name.startswith(kept)
    }
    return environment | {"SNAPBACK_RUN": run}


def operator_program(settings: ClusterSettings) -> Program:
    """Return the operator."""
    environment = _service(settings, User("operator"), settings.paths.state / OPERATOR)
    # -P: the working directory is the user's and may hold modules of any name.
    return Program(OPERATOR, (settings.python, "-P", "-m", "snapshot_operator.main"), environment)


def page_program(settings: ClusterSettings) -> Program:
    """Return the page, at a free port of the loopback address."""
    environment = _service(settings, User("viewer"), settings.paths.state / PAGE) | {
        "SNAPBACK_HTTP_ADDRESS": "127.0.0.1:0",
        "SNAPBACK_PAGE_FILE": str(settings.paths.page),
        "SNAPBACK_NATS_CONTEXT": CONTEXT_PREFIX + settings.name,
    }
    return Program(PAGE, (settings.python, "-P", "-m", "snapshot_page.main"), environment)


def node_programs(settings: ClusterSettings, node: NodeSpec) -> tuple[Program, Program]:
    """Return the GPU memory service and the agent of a node."""
    paths, name = settings.paths, NodeName(node.name)
    shared = {
        "SNAPBACK_NODE": node.name,
        "SNAPBACK_ARTIFACT_ROOT": str(paths.artifacts),
        "SNAPBACK_SOCKET_DIR": str(paths.node_sockets(node.name)),
        "SNAPBACK_WORKDIR": str(settings.workdir),
        # Serves the fault switches of `snapshotctl sim`.
        "SNAPBACK_SIM": "1",
        "SNAPBACK_GMS_DEVICE": node.device,
    }
    if node.device == "simulated":
        shared["SNAPBACK_DEVICES"] = str(node.gpus)
        shared["SNAPBACK_DEVICE_BYTES"] = str(node.gpu_memory)
    gms = Program(
        gms_of(node.name),
        (settings.python, "-P", "-m", "gms.main"),
        _service(settings, User("gms", name), paths.node(node.name, "gms")) | shared,
    )
    criu = {}
    if settings.tools is not None:
        criu = {
            "SNAPBACK_HELPER": str(paths.helper(node.name)),
            "SNAPBACK_INIT": str(settings.tools / INIT),
        }
    agent = Program(
        agent_of(node.name),
        (settings.python, "-P", "-m", "snapshot_agent.main"),
        _service(settings, User("agent", name), paths.node(node.name, "agent")) | shared | criu,
    )
    return gms, agent


def helper_program(settings: ClusterSettings, node: NodeSpec) -> Program | None:
    """Return the helper of a node, whose /run no other has; None where the cluster has none."""
    paths, tools = settings.paths, settings.tools
    if tools is None:
        return None
    apart = 'exec unshare --mount -- sh -c "mount -t tmpfs tmpfs /run && exec \\"\\$@\\"" sh "$@"'
    environment = base_environment(settings.inherited, settings.run) | {
        "SNAPBACK_NODE": node.name,
        "SNAPBACK_HELPER": str(paths.helper(node.name)),
        "SNAPBACK_STATE_DIR": str(paths.node(node.name, "helper")),
        "SNAPBACK_ARTIFACT_ROOT": str(paths.artifacts),
        "SNAPBACK_CRIU": str(tools / CRIU),
    }
    words = ("/bin/sh", "-c", apart, "sh", settings.python, "-P", "-m", "snapshot_agent.helper")
    return Program(helper_of(node.name), words, environment)


def _service(settings: ClusterSettings, user: User, state: Path) -> dict[str, str]:
    return base_environment(settings.inherited, settings.run) | {
        "SNAPBACK_NATS_URL": settings.url,
        "SNAPBACK_NATS_CREDENTIALS": str(settings.paths.key(user)),
        "SNAPBACK_STATE_DIR": str(state),
    }


class NatsServer(NamedTuple):
    """A nats-server: `listen` and `monitor` are host:port, of which port -1 is any that is free.

    It writes the port that it has chosen to a file below `ports`. Without `monitor` it has no HTTP
    port. `tls` are the files of its certificate and of the key of that, in PEM format.
    """

    name: str
    listen: str
    store: Path
    ports: Path | None = None
    monitor: str | None = None
    tls: tuple[Path, Path] | None = None


def local_nats(name: str, paths: ClusterPaths, url: str = "") -> NatsServer:
    """Return the server of a local cluster: loopback, at `url` or at a free port."""
    listen = url.rpartition("//")[2] or "127.0.0.1:-1"
    return NatsServer(CONTEXT_PREFIX + name, listen, paths.nats / "store", paths.nats / "ports")


def nats_configuration(server: NatsServer, keys: Sequence[tuple[User, str]]) -> str:
    """Return the configuration of nats-server: every write synced.

    `keys` has the public nkey of each user; no other user can connect.
    """
    accounts = msgspec.json.format(msgspec.json.encode(server_accounts(keys)), indent=2).decode()
    ports = f"ports_file_dir: {_quoted(server.ports)}\n" if server.ports else ""
    monitor = f"http: {_quoted(server.monitor)}\n" if server.monitor else ""
    tls = ""
    if server.tls:
        certificate, key = map(_quoted, server.tls)
        tls = f"tls {{\n  cert_file: {certificate}\n  key_file: {key}\n}}\n"
    return f"""\
server_name: {_quoted(server.name)}
listen: {_quoted(server.listen)}
{ports}{monitor}{tls}max_payload: 1MB
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
    """Return the processes in the groups in which they are ended, workers between the two last.

    The operator is first, or it would answer the end of the others with new work; the bus is last.
    """
    operator = [found for found in record.processes if found.name in (OPERATOR, PAGE)]
    bus = [found for found in record.processes if found.name == NATS]
    nodes = [found for found in record.processes if found.name not in (OPERATOR, PAGE, NATS)]
    agents = [found for found in nodes if found.name.endswith("-agent")]
    rest = [found for found in nodes if found not in agents]
    return [operator, agents, rest, bus]


class RunProcess(NamedTuple):
    """A process of this machine that has a run id in its environment."""

    pid: int
    run: str
    command: str


class Inventory(NamedTuple):
    """What exists on a machine: records with the pids that run, other processes, folders.

    `supervised` are the runs of which a process has a parent that lives and is of no run.
    """

    clusters: list[tuple[ClusterRecord, frozenset[int]]]
    owners_alive: frozenset[str]
    processes: list[RunProcess]
    socket_folders: list[tuple[Path, str]]
    broken_states: list[Path]
    supervised: frozenset[str] = frozenset()


def leftovers(found: Inventory) -> list[str]:
    """Return what was left behind and how to remove it, one line each.

    A cluster runs while its demo does, or, when no demo owns it, while one of its processes does;
    one without a record, such as that of a test, while the program that started it does.
    """
    running = {
        record.run
        for record, alive in found.clusters
        if (record.run in found.owners_alive if record.owner else alive)
    } | (found.supervised - {record.run for record, _ in found.clusters})
    lines = [
        f"process {process.pid} of run {process.run}: {process.command} (fix: kill {process.pid})"
        for process in found.processes
        if process.run not in running
    ]
    lines += [
        f"sockets {folder} of run {run or 'unknown'} (fix: rm -r {folder})"
        for folder, run in found.socket_folders
        if run not in running
    ]
    lines += [
        f"state {record.state_dir} of a demo that ended "
        f"(fix: snapshotctl down --cluster {record.name} --purge)"
        for record, _ in found.clusters
        if record.name.startswith(DEMO_PREFIX) and record.run not in running
    ]
    lines += [f"state {path} without a record (fix: rm -r {path})" for path in found.broken_states]
    return lines


def ended(processes: Iterable[ProcessRecord], alive: frozenset[int]) -> tuple[list[str], bool]:
    """Return the names of the processes that ended, and whether any runs."""
    listed = list(processes)
    return [p.name for p in listed if p.pid not in alive], any(p.pid in alive for p in listed)


def kept(values: Sequence[AnyObject]) -> str:
    """Return what a cluster has of an earlier time, for people; empty if that is nothing."""
    made = [each for each in values if not isinstance(each, Pod)]
    pods = [each for each in values if isinstance(each, Pod)]
    ended = sum(pod.status.phase in FINISHED for pod in pods)
    counts = {
        "checkpoint": sum(isinstance(each, DynamoCheckpoint) for each in made),
        # That of a checkpoint is counted with it.
        "snapshot": sum(
            isinstance(each, Snapshot) and not each.metadata.owner_references for each in made
        ),
        "pod": len(pods),
    }
    text = ", ".join(counted(count, noun) for noun, count in counts.items() if count)
    return f"{text} ({ended} ended)" if ended else text
