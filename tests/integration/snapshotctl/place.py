"""A pod without a cluster: a real GPU memory service, and the test as its snapshot agent."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from gms.adapters.simulated import simulated_uuid
from snapshotctl.adapters import inotify, worker_socket
from snapshotctl.adapters.worker_socket import WorkerClient
from tests.support.waiting import until, wait_until

NODE = "node-1"
PATIENCE_S = 60.0


class Place:
    """The folders of one pod, and the environment of what runs in it, on two GPUs of its own."""

    def __init__(self, folder: Path, sockets: Path, number: int) -> None:
        self.folder = folder
        self.sockets = sockets
        self.control = folder / "control"
        self.uid = f"{number:08}-0000-0000-0000-000000000000"
        self.pod_sockets = sockets / self.uid[:8]
        self.devices = [simulated_uuid(NODE, index) for index in (2 * number, 2 * number + 1)]
        (self.control / "state").mkdir(parents=True)
        self.pod_sockets.mkdir()

    def worker(self, **more: str) -> dict[str, str]:
        return {
            **os.environ,
            "SNAPSHOT_CONTROL_DIR": str(self.control),
            "GMS_SOCKET_DIR": str(self.sockets),
            "NVIDIA_VISIBLE_DEVICES": ",".join(self.devices),
            "POD_SOCKET_DIR": str(self.pod_sockets),
            "SIZE_MIB": "8",
            "WARMUP_REQUESTS": "1",
            **more,
        }

    def say(self, name: str, attempt: int) -> None:
        temporary = self.control / f".{name}.tmp"
        temporary.write_text(json.dumps({"attempt": attempt}))
        temporary.rename(self.control / name)

    def forget(self, *names: str) -> None:
        for name in names:
            (self.control / name).unlink(missing_ok=True)

    async def said(self, name: str) -> Any:
        async with asyncio.timeout(PATIENCE_S):
            await inotify.appears(self.control / name)
        return json.loads((self.control / name).read_text())

    async def withdrawn(self, name: str) -> None:
        await until(lambda: not (self.control / name).exists(), name, within_s=PATIENCE_S)

    async def connect(self) -> WorkerClient:
        async with asyncio.timeout(PATIENCE_S):
            return await worker_socket.connect(self.sockets, self.uid)


@contextlib.asynccontextmanager
async def process(
    program: list[str], environment: dict[str, str]
) -> AsyncIterator[asyncio.subprocess.Process]:
    process = await asyncio.create_subprocess_exec(sys.executable, *program, env=environment)
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        await asyncio.wait_for(process.wait(), PATIENCE_S)


class Node:
    """A node with a GPU memory service, which the tests of a file share."""

    def __init__(self, sockets: Path) -> None:
        self.sockets = sockets
        self._places = itertools.count()

    def place(self, folder: Path) -> Place:
        return Place(folder, self.sockets, next(self._places))


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    folder = tmp_path_factory.mktemp("node")
    with tempfile.TemporaryDirectory(prefix="sb", dir="/tmp") as sockets:
        environment = {
            **os.environ,
            "SNAPBACK_NODE": NODE,
            # Without a bus there are no orders, and no processes wait for them.
            "SNAPBACK_NATS_URL": "",
            "SNAPBACK_STATE_DIR": str(folder / "gms"),
            "SNAPBACK_ARTIFACT_ROOT": str(folder / "artifacts"),
            "SNAPBACK_SOCKET_DIR": sockets,
            "SNAPBACK_DEVICES": "64",
            "SNAPBACK_DEVICE_BYTES": str(32 * 1024 * 1024),
        }
        with subprocess.Popen([sys.executable, "-m", "gms.main"], env=environment) as gms:
            try:
                wait_until((Path(sockets) / "gms.sock").exists, within_s=PATIENCE_S)
                yield Node(Path(sockets))
            finally:
                gms.terminate()


@pytest.fixture
def place(node: Node, tmp_path: Path) -> Place:
    return node.place(tmp_path)
