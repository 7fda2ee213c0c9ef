"""A node with the real CRIU, the real helper and a fake CUDA driver, and containers on it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from snapshot_agent.adapters import procfs
from snapshot_agent.adapters.criu_cuda import CriuCuda
from snapshot_agent.domain.control import ContainerPaths
from snapshot_agent.domain.helping import MAX_MESSAGE_BYTES, RESTORED, Ping
from snapshot_agent.ports import Dump, Process, RestoreSource, Worker
from snapshot_shared.codec import encode_json
from snapshot_shared.files import opened
from snapshot_shared.orders import PodRef
from tests.process.node import CRIU, INIT, REPOSITORY
from tests.support.container import command
from tests.support.cuda_rig import UUIDS, CudaNode, GivenDevices
from tests.support.waiting import wait_until

POD = PodRef(namespace="default", name="worker", uid="00000000-0000-4000-8000-000000000001")
WITHIN_S = 60.0

_HELPER = """
mount -t tmpfs none /run
mount -t tmpfs none /proc/driver
mkdir /proc/driver/nvidia
ln -s "$FOLDER/version" /proc/driver/nvidia/version
exec "$@"
"""

_NVIDIA_SMI = """#!/bin/sh
case "$*" in
*--query-gpu=*) cat "$FOLDER/gpus" ;;
*--query-compute-apps=*) cat "$FOLDER/apps" ;;
esac
"""

_CRIU = """#!/bin/sh
case "$1 $(cat "$FOLDER/criu-does")" in
"dump fail") echo "(00.1) Error (criu/x.c:1): it was told to" >dump.log; exit 1 ;;
"dump hang") touch "$FOLDER/criu-hangs"; exec sleep 600 ;;
esac
exec "$CRIU" "$@"
"""


_VERSION = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  {}  Tue\n"


def nvidia_programs(folder: Path) -> None:
    """Put nvidia-smi into `bin`, and what it and the driver say of a node beside that."""
    program = folder / "bin" / "nvidia-smi"
    program.parent.mkdir()
    program.write_text(_NVIDIA_SMI)
    program.chmod(0o755)
    (folder / "version").write_text(_VERSION.format("580.65.06"))
    (folder / "apps").write_text("")
    gpus = [f"{uuid}, NVIDIA H100, Disabled\n" for uuid in UUIDS]
    (folder / "gpus").write_text("".join(gpus))


class Lines(threading.Thread):
    """What a container prints."""

    def __init__(self, file: Any) -> None:
        super().__init__(daemon=True)
        self._file = file
        self.said: list[dict[str, Any]] = []
        self.others: list[str] = []
        self.start()

    def run(self) -> None:
        for line in self._file:
            if line.startswith("{"):
                self.said.append(json.loads(line))
            else:
                self.others.append(line)

    def counts(self, who: str = "parent") -> list[int]:
        return [line["count"] for line in list(self.said) if line["who"] == who]


class Container:
    """The first process of a container, which `unshare` has started."""

    def __init__(self, node: Stage, *argv: str, init: Path | None = None) -> None:
        self.layer = node.new_folder(node.layers)
        mounts = {str(init): "/snapback"} if init else {}
        self.starter: Any = subprocess.Popen(
            command(self.layer, *argv, mounts=mounts),
            cwd=REPOSITORY,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.lines = Lines(self.starter.stdout)
        name = Path(argv[0]).name
        wait_until(lambda: self._runs(name), f"{name} in a container")
        paths = ContainerPaths(self.layer, self.layer, placeholder=init)
        found = procfs.read(self._first())
        assert found is not None
        self.worker = Worker(POD, Process(*found.key), paths)

    def _first(self) -> int:
        listed = Path(f"/proc/{self.starter.pid}/task/{self.starter.pid}/children").read_text()
        return int(listed or 0)

    def _runs(self, name: str) -> bool:
        assert self.starter.poll() is None, self.lines.others
        first = self._first()
        with contextlib.suppress(OSError):
            # Not the program that prepares the container, which is of Python, too.
            words = Path(f"/proc/{first}/cmdline").read_bytes().split(b"\0")
            return b"tests.support.container" not in words and name.encode() in words[0]
        return False

    @property
    def pid(self) -> int:
        return self.worker.process.pid

    def tree(self) -> list[int]:
        return sorted(each.pid for each in procfs.family_of(*self.worker.process))

    def runs(self) -> bool:
        return procfs.is_alive(*self.worker.process)

    def is_restored(self) -> bool:
        folder = self.worker.paths.placeholder
        return folder is not None and (folder / RESTORED).exists()

    def end(self) -> None:
        if self.starter.stdout.closed:
            return
        found = procfs.read(self._first())
        if found is not None:
            # The first process of its namespace: all others end with it.
            procfs.send(found, signal.SIGKILL)
        self.starter.wait()
        # All of its processes have the other end.
        self.lines.join(10)
        self.starter.stdout.close()


class Stage:
    """A node. `folder` is on the disk, `layers` on another file system than the root."""

    def __init__(self, folder: Path, layers: Path, cuda: CudaNode) -> None:
        self.folder, self.layers, self.cuda = folder, layers, cuda
        self.given = GivenDevices(UUIDS[0])
        self._places = 0
        self._containers: list[Container] = []
        self._helper: subprocess.Popen[bytes] | None = None
        self.artifacts = folder / "artifacts"
        self.artifacts.mkdir()
        nvidia_programs(folder)
        program = folder / "bin" / "criu"
        program.write_text(_CRIU)
        program.chmod(0o755)
        (folder / "bin" / "nft").symlink_to(CRIU / "nft")
        self.criu_does("")
        self.socket = folder / "helper.sock"
        self.driver = CriuCuda(self.socket, time.monotonic, self.given)

    def version(self, driver: str) -> None:
        (self.folder / "version").write_text(_VERSION.format(driver))

    def criu_does(self, what: str) -> None:
        """Let dumps by CRIU `fail` or `hang`."""
        (self.folder / "criu-does").write_text(what)

    def start_helper(self) -> None:
        settings = {
            "NODE": "here",
            "STATE_DIR": self.folder / "helper",
            "HELPER": self.socket,
            "ARTIFACT_ROOT": self.artifacts,
            "CRIU": self.folder / "bin" / "criu",
        }
        environment = {f"SNAPBACK_{name}": str(value) for name, value in settings.items()}
        environment |= {"FOLDER": str(self.folder), "CRIU": str(CRIU / "criu")}
        environment["PATH"] = f"{self.folder / 'bin'}:{os.environ['PATH']}"
        program = (sys.executable, "-m", "snapshot_agent.helper")
        self.socket.unlink(missing_ok=True)
        self._helper = subprocess.Popen(
            ["unshare", "--mount", "sh", "-ec", _HELPER, "helper", *program],
            env={**os.environ, **environment},
        )
        wait_until(self.socket.exists, "a helper")
        # It is answered after the self-test, which has CRIU do what a test wants of a dump later.
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as caller:
            caller.settimeout(WITHIN_S)
            caller.connect(str(self.socket))
            caller.send(encode_json(Ping()))
            assert caller.recv(MAX_MESSAGE_BYTES)

    def uses(self, *bytes_of: tuple[int, int]) -> None:
        """Let processes have so many MiB on devices, by pid."""
        lines = [f"{pid}, {number}\n" for pid, number in bytes_of]
        (self.folder / "apps").write_text("".join(lines))

    def stop_helper(self) -> None:
        """Ask the helper to stop, as an update of its pod does, and wait for its end."""
        helper, self._helper = self._helper, None
        assert helper is not None
        helper.terminate()
        helper.wait(30)

    def kill_helper(self) -> None:
        """Kill the helper with all that it has started, as the end of a container does."""
        helper, self._helper = self._helper, None
        assert helper is not None
        found = procfs.read(helper.pid)
        assert found is not None
        for each in procfs.family_of(*found.key):
            procfs.send(each, signal.SIGKILL)
        helper.wait()

    def new_folder(self, where: Path) -> Path:
        self._places += 1
        folder = where / f"place-{self._places}"
        folder.mkdir()
        return folder

    def worker(self, *what: str) -> Container:
        """Start a worker on the first device; it has begun to count."""
        program = Path(__file__).with_name("cuda_worker.py")
        made = self._kept(
            Container(self, sys.executable, str(program), str(self.cuda.library), *what)
        )
        who = ["parent", *(["child"] if "child" in what else [])]
        wait_until(lambda: all(made.lines.counts(each) for each in who), "the first calls of CUDA")
        return made

    def placeholder(self) -> Container:
        init = self.new_folder(self.folder)
        shutil.copy(INIT, init)
        made = self._kept(Container(self, "/snapback/snapback-init", init=init))
        device = os.makedev(1, 11)
        inside = Path("/proc", str(made.pid), "root", "dev", "nvidia0")
        os.mknod(inside, 0o666 | stat.S_IFCHR, device)
        return made

    def _kept(self, container: Container) -> Container:
        self._containers.append(container)
        return container

    async def dump(self, container: Container, within_s: float = WITHIN_S) -> Path:
        part = self.new_folder(self.artifacts)
        with opened(os.open(part, os.O_RDONLY | os.O_DIRECTORY)) as fd:
            deadline = time.monotonic() + within_s
            await self.driver.dump(Dump(container.worker, 1, deadline, _ignored, fd))
        return part

    async def restore(self, part: Path, placeholder: Container, **chosen: str) -> Process:
        with opened(os.open(part, os.O_RDONLY | os.O_DIRECTORY)) as fd:
            names = part.relative_to(self.artifacts).parts
            deadline = time.monotonic() + WITHIN_S
            source = RestoreSource(fd, names, [], chosen, deadline, _ignored)
            return await self.driver.restore(placeholder.worker, source)

    async def reached(self, step: str, *, since: int = 0) -> None:
        """Wait until the driver has begun to do something, after so many calls."""

        def has_begun() -> bool:
            calls = self.cuda.calls()[since:]
            return any((call.what, call.verb) == ("begin", step) for call in calls)

        await asyncio.to_thread(wait_until, has_begun, step)

    def kill(self, target: str) -> None:
        """Kill a part of the helper: `call` and `criu` are programs that its `child` has started.

        `helper` is its first process alone, `container` all of its container, as a runtime ends it.
        """
        if target == "container":
            self.kill_helper()
            return
        assert self._helper is not None
        if target == "helper":
            helper, self._helper = self._helper, None
            helper.kill()
            helper.wait()
            return
        found = procfs.read(self._helper.pid)
        assert found is not None
        [child] = [each for each in procfs.family_of(*found.key) if each.parent == found.pid]
        program = {"call": b"cuda_call", "criu": b"sleep"}.get(target)
        for each in procfs.family_of(*child.key) if program else [child]:
            # Another call may end meanwhile.
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                if program is None or program in Path(f"/proc/{each.pid}/cmdline").read_bytes():
                    procfs.send(each, signal.SIGKILL)

    def left(self) -> list[str]:
        """What is left of dumps and restores on the node; nothing when all is well."""
        return [path.name for path in (self.folder / "helper" / "dumps").iterdir()]

    async def settle(self, container: Container) -> None:
        """Do what a guard does for a worker whose dump has not ended."""
        release = self.driver.release(container.worker, self.driver.stages[0].phases.during)
        done = await asyncio.create_subprocess_exec(*release.program)
        assert await asyncio.wait_for(done.wait(), release.within_s) == 0

    def close(self) -> None:
        for container in self._containers:
            container.end()
        if self._helper is not None:
            self.kill_helper()


async def _ignored(_done: int) -> None:
    pass


def goes_on(container: Container, *who: str) -> bool:
    """Whether calls of CUDA succeed again, of the parent or of those that are named."""
    before = {each: len(container.lines.counts(each)) for each in who or ("parent",)}
    wait_until(
        lambda: all(len(container.lines.counts(each)) > seen for each, seen in before.items()),
        "calls of CUDA",
    )
    return all(line["whole"] for line in container.lines.said)


def staged(folder: Path, layers: Path, cuda: CudaNode) -> Iterator[Stage]:
    """Give a node with a helper; for a fixture."""
    node = Stage(folder, layers, cuda)
    try:
        node.start_helper()
        yield node
    finally:
        node.close()
