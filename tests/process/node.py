"""A node on which CRIU is really run: containers, a helper, an agent, and the faults between them.

The containers are processes in namespaces of their own, as a kubelet's are: their cgroups and
mounts have the names by which an agent finds them. The helper and the agent are the real programs.
CRIU waits where a test wants it to (`Pause`), so that what is killed is killed within a step.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

from snapshot_agent.adapters import procfs
from snapshot_agent.domain.mounts import mounts_in
from snapshot_shared.orders import ArtifactRef, PodRef, RestoreOrder
from snapshot_shared.volumes import CONTROL_VOLUME, INIT_VOLUME
from tests.support.agent_rig import AgentProcess, Rig, fresh_uid, killed
from tests.support.container import command
from tests.support.waiting import until

REPOSITORY = Path(__file__).parents[2]
CRIU = REPOSITORY / ".tools" / "criu"
INIT = REPOSITORY / ".tools" / "snapback-init"
WORKER = REPOSITORY / "tests" / "support" / "full_worker.py"
PYTHON = os.path.realpath(sys.executable)
CONTAINER = "main"
DRIVEN = ("run", "prepare", "dump", "release", "place", "restore")
"""The verbs of orders that name a driver."""

# CRIU runs the last of its action scripts first, so this one is run after the helper's.
_CRIU = """#!/bin/sh
here={here}
verb=$1
case $verb in
    dump | restore) shift ;;
    *) exec {criu} "$@" ;;
esac
CRTOOLS_SCRIPT_ACTION=start "$here/hook" || exit 1
exec {criu} "$verb" --action-script "$here/hook" "$@"
"""
_HOOK = """#!/bin/sh
here={here}
[ -e "$here/at" ] || exit 0
read -r at <"$here/at"
[ "$at" = "$CRTOOLS_SCRIPT_ACTION" ] || exit 0
mv "$here/at" "$here/reached"
read -r status <"$here/go"
exit "$status"
"""


def lacking() -> str:
    """Return why no process can be dumped here, or nothing."""
    if os.geteuid() != 0:
        return "needs root"
    if missing := [name for name in ("ip", "unshare", "mount") if shutil.which(name) is None]:
        return f"{' and '.join(missing)} missing: install iproute2, util-linux and mount"
    if not (CRIU.exists() and INIT.exists()):
        return "CRIU is missing: run `make criu init`"
    if os.stat(PYTHON).st_dev != os.stat("/").st_dev:  # noqa: PTH116
        return f"{PYTHON} is on another file system than /, which the containers have"
    return ""


class Container:
    """A container of a pod of its own, which runs a worker or waits for one."""

    process: procfs.Stat

    def __init__(
        self,
        node: Node,
        name: str,
        *,
        waits: bool = False,
        heap_mib: int = 8,
        no_new_privs: bool = False,
    ) -> None:
        self.node = node
        self.ref = PodRef(
            namespace="default", name=name, uid=str(uuid.uuid4()), container=CONTAINER
        )
        self.home = node.folder / "containers" / self.ref.uid
        pod = node.kubelet / "pods" / self.ref.uid
        volumes = pod / "volumes" / "kubernetes.io~empty-dir"
        self.control = volumes / CONTROL_VOLUME / CONTAINER
        self.init = volumes / INIT_VOLUME / CONTAINER
        self.data = volumes / "data"
        self.output = self.home / "output"
        said = pod / "containers" / CONTAINER / "termination-log"
        logs = node.kubelet / "logs" / f"default_{name}_{self.ref.uid}"
        for folder in (self.home, self.control, self.data, said.parent, logs):
            folder.mkdir(parents=True)
        said.touch()
        hostname = self.home / "hostname"
        hostname.write_text(f"{name}\n")
        mounts = {
            str(hostname): "/etc/hostname",
            str(said): "/dev/termination-log",
            str(self.control): "/control",
            str(self.data): "/data",
        }
        words = [PYTHON, "/worker.py", "--heap-mib", str(heap_mib)]
        self.upper = self.home / "upper"
        self.upper.mkdir()
        shutil.copy(WORKER, self.upper / "worker.py")
        if waits:
            self.init.mkdir(parents=True)
            shutil.copy(INIT, self.init / INIT.name)
            mounts[str(self.init)] = "/snapback"
            words = [f"/snapback/{INIT.name}", "--", *words]
        self.cgroup = node.cgroup / f"pod{self.ref.uid}" / CONTAINER
        self.cgroup.mkdir(parents=True)
        self._command = command(
            self.home,
            *words,
            name=name,
            mounts=mounts,
            cgroups=[str(self.cgroup / "cgroup.procs")],
            no_new_privs=no_new_privs,
            environment={"SNAPSHOT_CONTROL_DIR": "/control", "PYTHONDONTWRITEBYTECODE": "1"},
        )

    def start(self) -> None:
        """Start it. What it prints is copied into `output`, as a runtime does."""
        with self.output.open("ab") as output:
            self._output = subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=output)
        self._outside = subprocess.Popen(
            self._command,
            cwd=REPOSITORY,
            stdin=subprocess.DEVNULL,
            stdout=self._output.stdin,
            stderr=subprocess.STDOUT,
        )
        assert self._output.stdin is not None
        self._output.stdin.close()

    async def running(self) -> None:
        """Start it, and wait until it says something."""
        self.start()
        await until(self.output.read_bytes, f"the start of {self.ref.name}")
        self._hold_network()
        await until(self._is_held, "the other process of its network")

    def _hold_network(self) -> None:
        """Have another process hold its network, as other containers of a pod do."""
        [self.process] = children_of(self._outside.pid)
        network = f"--net=/proc/{self.pid}/ns/net"
        self._sandbox = subprocess.Popen(["nsenter", network, "sleep", "infinity"])

    def _is_held(self) -> bool:
        both = (Path(f"/proc/{pid}/ns/net").stat().st_ino for pid in (self.pid, self._sandbox.pid))
        return next(both) == next(both)

    @property
    def pid(self) -> int:
        """The pid of its first process."""
        return self.process.pid

    def lines(self) -> list[dict[str, Any]]:
        """Return what its worker has printed."""
        text = self.output.read_text(errors="replace")
        return [json.loads(line) for line in text.splitlines() if line.startswith("{")]

    def did(self) -> list[str]:
        """Return what its worker has done for a capture or a restore."""
        return [line["did"] for line in self.lines() if line["did"]]

    async def goes_on(self) -> None:
        """Wait until the worker counts on; its connections, memory and files are whole."""
        before = len(self.lines())
        await until(lambda: len(self.lines()) > before + 2, "another count of the worker")
        are_whole(self.lines()[before:])

    async def is_let_go(self) -> None:
        """Wait until the worker is told that its capture was aborted, and goes on."""
        await until(lambda: "snapshot-aborted" in self.did(), "the worker's release")
        await self.goes_on()

    async def becomes(self, outcome: str) -> None:
        """Wait until it `ended`, `goes on`, or `waits` as a placeholder with nothing below it."""
        match outcome:
            case "ended":
                await until(self.has_ended, f"the end of {self.ref.name}")
            case "goes on":
                await self.goes_on()
            case _:
                await until(lambda: not children_of(self.pid), "the end of what is below it")
                assert not self.has_ended()

    def has_ended(self) -> bool:
        return self._outside.poll() is not None

    def exit_code(self) -> int:
        return self._outside.wait(5)

    def tables(self) -> str:
        """Return the tables of nftables in its network."""
        return self.in_network(str(CRIU / "nft"), "list", "tables")

    def in_network(self, *command: str) -> str:
        """Run a program in its network; return what it prints."""
        words = ["nsenter", f"--net=/proc/{self._sandbox.pid}/ns/net", *command]
        return subprocess.run(words, check=True, capture_output=True, text=True).stdout

    def close(self) -> None:
        """End it, and remove its cgroup."""
        self._sandbox.kill()
        self._sandbox.wait()
        for inside in children_of(self._outside.pid):
            procfs.send(inside, signal.SIGKILL)
        self._outside.wait(10)
        self._output.wait(10)
        for folder in (self.cgroup, self.cgroup.parent):
            with contextlib.suppress(OSError):
                folder.rmdir()


class Pause:
    """A point at which CRIU waits, until it is told to go on."""

    def __init__(self, folder: Path, action: str) -> None:
        """`action` is one of CRIU's action scripts, or `start`, before CRIU is."""
        self._folder = folder
        for name in ("at", "reached", "go"):
            (folder / name).unlink(missing_ok=True)
        os.mkfifo(folder / "go")
        self._go = os.open(folder / "go", os.O_RDWR | os.O_CLOEXEC)
        (folder / "at.new").write_text(f"{action}\n")
        (folder / "at.new").rename(folder / "at")

    async def reached(self) -> None:
        await until((self._folder / "reached").exists, "the pause of CRIU")

    def end(self, status: int = 0) -> None:
        """Have CRIU go on; with a status other than 0 its action script fails."""
        os.write(self._go, f"{status}\n".encode())


class Node(Rig):
    """The programs of one node, and the operator's side of them."""

    helper: asyncio.subprocess.Process
    running_agent: AgentProcess

    def __init__(self, folder: Path, url: str, sockets: Path) -> None:
        super().__init__(folder, url, sockets)
        self.folder = folder
        self.kubelet = folder / "kubelet"
        self.socket = sockets / "helper.sock"
        self.records = folder / "helper" / "dumps"
        self.run = folder / "run"
        self.programs = folder / "programs"
        memory = Path("/sys/fs/cgroup/memory")
        self.cgroups = memory.parent
        self.cgroup = (memory if memory.is_dir() else self.cgroups) / f"snapback-{uuid.uuid4()}"
        self.containers: list[Container] = []
        self.hides_artifacts = False
        """Whether the helper, as on NFS, can do nothing below the artifact root by itself."""
        for each in (self.run, self.programs, self.root):
            each.mkdir(parents=True)
        for name, text in (("criu", _CRIU), ("hook", _HOOK)):
            program = self.programs / name
            program.write_text(text.format(here=self.programs, criu=CRIU / "criu"))
            program.chmod(0o755)
        (self.programs / "nft").symlink_to(CRIU / "nft")

    @property
    def environment(self) -> dict[str, str]:
        return super().environment | {
            "SNAPBACK_WORLD": "kubernetes",
            "SNAPBACK_KUBELET_DIR": str(self.kubelet),
            "SNAPBACK_POD_LOGS_DIR": str(self.kubelet / "logs"),
            "SNAPBACK_HELPER": str(self.socket),
            "SNAPBACK_SIM": "1",
        }

    async def start_helper(self) -> asyncio.subprocess.Process:
        """Start the helper, whose /run outlives it as that of a pod does, and wait for it."""
        self.socket.unlink(missing_ok=True)
        environment = self.environment | {
            "SNAPBACK_STATE_DIR": str(self.records.parent),
            "SNAPBACK_CRIU": str(self.programs / "criu"),
            "SNAPBACK_CGROUP_DIR": str(self.cgroups),
        }
        run = f"mount --bind {self.run} /run && exec {sys.executable} -m snapshot_agent.helper"
        if self.hides_artifacts:
            run = f"mount -t tmpfs -o ro tmpfs {self.root} && {run}"
        with (self.folder / "helper.log").open("ab") as log:
            process = await asyncio.create_subprocess_exec(
                *("unshare", "--mount", "--propagation", "slave", "sh", "-c", run),
                env={**os.environ, **environment},
                stderr=log,
            )
        self._processes.append(process)
        await until(lambda: self.socket.exists() or process.returncode is not None, "the helper")
        assert process.returncode is None, (self.folder / "helper.log").read_text()
        self.helper = process
        return process

    @property
    def agent_pid(self) -> int:
        return self.running_agent.pid

    async def process(self, *arguments: str) -> AgentProcess:
        # Not forked: its environment is looked for in /proc, and says where libraries are.
        arguments = arguments or ("-m", "snapshot_agent.main")
        self.running_agent = await super().process(*arguments)
        return self.running_agent

    async def kill_helper(self) -> None:
        await killed(self.helper)

    async def kill_agent(self) -> None:
        await killed(self.running_agent)

    async def container(self, name: str, **arguments: Any) -> Container:
        made = Container(self, name, **arguments)
        self.containers.append(made)
        await made.running()
        return made

    def common(self, verb: str, owner: str, attempt: int = 1) -> dict[str, Any]:
        driven = {"driver": "criu"} if verb in DRIVEN else {}
        return super().common(verb, owner, attempt) | driven

    async def artifact(self) -> ArtifactRef:
        """Capture a worker of its own."""
        return await self.captured(await self.container("source"), fresh_uid())  # type: ignore[arg-type]

    async def waiting(
        self, artifact: ArtifactRef, **options: Any
    ) -> tuple[Container, RestoreOrder]:
        """Return a container that waits for a process, and the order to restore it there."""
        target = await self.container("target", waits=True, **options)
        return target, self.restore_order(target, artifact)  # type: ignore[arg-type]

    def part(self, content: str) -> Path:
        return self.generation(content) / "process"

    def children(self) -> list[procfs.Stat]:
        """The children of the helper that carry out requests."""
        return children_of(self.helper.pid)

    def criu(self) -> procfs.Stat:
        """The process of CRIU that works for the helper."""
        [found] = [
            each
            for each in descendants_of([child.pid for child in self.children()])
            if b"criu.bin" in command_of(each.pid) or b"programs/criu" in command_of(each.pid)
        ][:1]
        return found

    def left(self) -> list[str]:
        """What is left of dumps and restores on the node; nothing when all is well."""
        found = [f"record {path.name}" for path in self.records.iterdir()]
        found += [f"file /run/{path.name}" for path in self.run.iterdir() if path.suffix != ".kdat"]
        for process in procfs.running():
            words = command_of(process.pid)
            if os.fsencode(self.programs) in words:
                found.append(f"process {process.pid} {words!r}")
        mounts = mounts_in(Path("/proc/self/mountinfo").read_text())
        found += [
            f"mount {mount.path}"
            for mount in mounts
            if mount.path.startswith(f"{self.folder}/") and mount.path != str(self.root)
        ]
        for container in self.containers:
            found += [f"table {line}" for line in container.tables().splitlines()]
            found += [f"ghost {path}" for path in container.data.rglob("*.ghost")]
        return found

    def logs(self) -> list[Path]:
        return [path for path in self.folder.glob("*.log") if path.exists()]

    async def close(self) -> None:
        # First what holds processes of the containers stopped.
        await super().close()
        for container in self.containers:
            container.close()
        with contextlib.suppress(OSError):
            self.cgroup.rmdir()


def command_of(pid: int) -> bytes:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""


def are_whole(lines: Sequence[dict[str, Any]]) -> None:
    """Require that a worker that prints this has its connections, memory and files."""
    for line in lines:
        for way in ("child", "tcp", "named", "anonymous"):
            assert line[way] == line["count"], line
        assert line["ghost"] == "still here"
        assert line["heap"] in (True, None)


def children_of(pid: int) -> list[procfs.Stat]:
    return [each for each in procfs.running() if each.parent == pid]


def descendants_of(pids: list[int]) -> list[procfs.Stat]:
    below = [each for each in procfs.running() if each.parent in pids]
    return below + (descendants_of([each.pid for each in below]) if below else [])


@contextlib.asynccontextmanager
async def opened(
    url: str,
    kind: type[Node] = Node,
    parent: str | None = "/dev/shm",
    prepare: Callable[[Node], None] = lambda _: None,
) -> AsyncIterator[Node]:
    """A node with a helper; its files are in memory, apart from the root of its containers.

    `prepare` gives it its settings before anything is started.
    """
    folder = Path(tempfile.mkdtemp(prefix="snapback-node-", dir=parent))
    sockets = Path(tempfile.mkdtemp(prefix="sb-"))
    node = kind(folder, url, sockets)
    prepare(node)
    try:
        await node.open()
        await node.start_helper()
        yield node
    finally:
        await node.close()
        shutil.rmtree(folder)
        shutil.rmtree(sockets)
