"""GPU memory services for tests: in a thread of the test, or as the program; and its command line.

A process costs half a second of CPU to start. So transfers run in threads and commands in the
process of the test, unless the process itself is what a test is about.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import socket
import subprocess
import sys
import threading
import uuid
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator, Sequence
from pathlib import Path
from typing import Any, Self, TypeVar

import pytest

import snapback_client as client
from gms import cli
from gms.adapters.admission import LeasePolicy
from gms.adapters.grpc_api import GrpcServer
from gms.adapters.grpc_client import GmsCaller
from gms.adapters.lease_socket import LeaseServer
from gms.adapters.simulated import GRANULARITY, SimulatedDevice
from gms.adapters.transfer_process import TransferProcesses
from gms.domain.tasks import LoadTask, SaveTask, TransferDone, TransferEvent, TransferFailed
from gms.handlers.control import GmsControl
from gms.handlers.memory_server import MemoryServer
from gms.handlers.sessions import LeaseSessions
from gms.handlers.transfers import GmsTransfers
from gms.ports import Device, Transfers
from gms.transfer_child.__main__ import _work_of
from snapback_client.frames import (
    LEASE_SOCKET,
    Access,
    Attach,
    Attached,
    LockMode,
    MemoryDomain,
    error_of,
)
from snapback_client.lease import Lease
from snapback_client.wire import prepare
from snapshot_shared.codec import decode_json, encode_json
from snapshot_shared.errors import failure_of
from snapshot_shared.frames import DeviceStatus, StatusReply, StatusRequest
from snapshot_shared.orders import LayoutRef
from snapshot_shared.spans import SpanRecord
from snapshot_shared.telemetry import Telemetry
from tests.support.forks import forks
from tests.support.waiting import wait_until

MIB = 1024 * 1024
CAPACITY = 64 * MIB

TRANSFERS = ("tests.support.doomed_saver", "gms.transfer_child.__main__", "snapback_client.cuda")
"""What a process imports of which transfers and clients are forks."""

ATTACHED = Attached(
    session=1,
    granted=Access.RW,
    device="d",
    index=0,
    product="p",
    capacity=1,
    free=1,
    granularity=1,
    incarnation="i",
)
"""What a service answers to a client that has its lock."""

T = TypeVar("T")


def carried_out(
    task: SaveTask | LoadTask, emit: Callable[[TransferEvent], None] = lambda _: None
) -> TransferDone:
    """Carry out a task as a transfer process does, in this one; a failure is as it arrives."""
    try:
        return _work_of(task)(emit)
    except Exception as error:
        raise error_of(TransferFailed.of(failure_of(error)).to_failure()) from error


def apart(task: SaveTask | LoadTask, before: str = "") -> TransferDone:
    """Carry out a task in a fork that is as a transfer process; the code `before` runs first."""
    code = f"import sys\n{before}\nfrom gms.transfer_child.__main__ import main\nmain(['either'])"
    ended = forks(*TRANSFERS).run(code, stdin=encode_json(task) + b"\n")
    assert ended.stdout, ended.stderr.decode()
    event = decode_json(ended.stdout.splitlines()[-1], TransferEvent)
    if isinstance(event, TransferFailed):
        raise error_of(event.to_failure())
    assert isinstance(event, TransferDone)
    return event


async def events_of(task: SaveTask | LoadTask) -> list[TransferEvent]:
    """Carry out a task in a transfer process, as the service does."""
    return [event async for event in TransferProcesses().run(task)]


class TransferThreads:
    """The `Transfers` port, in threads: a transfer that is cancelled goes on to its end."""

    async def run(self, task: SaveTask | LoadTask) -> AsyncGenerator[TransferEvent, None]:
        loop = asyncio.get_running_loop()
        events: asyncio.Queue[TransferEvent | None] = asyncio.Queue()

        def emit(event: TransferEvent | None) -> None:
            loop.call_soon_threadsafe(events.put_nowait, event)

        work = asyncio.ensure_future(asyncio.to_thread(carried_out, task, emit))
        work.add_done_callback(lambda _: events.put_nowait(None))
        try:
            while event := await events.get():
                yield event
            yield work.result()
        finally:
            await asyncio.wait([work])


class RunningGms:
    """The real service, both sockets, two simulated devices unless it is given others."""

    def __init__(
        self,
        folder: Path,
        *,
        capacities: tuple[int, ...] = (CAPACITY, CAPACITY),
        granularity: int = GRANULARITY,
        policy: LeasePolicy | None = None,
        devices: Sequence[Device] | None = None,
        transfers: Transfers | None = None,
    ) -> None:
        self.folder = folder
        self.policy = policy
        self._granularity = granularity
        self.devices: Sequence[Device] = devices or self._simulated(capacities)
        self.uuids = [device.info.uuid for device in self.devices]
        self._transfers = transfers or TransferThreads()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)

    def start(self) -> None:
        self._thread.start()
        self.run(self._start())

    async def _start(self) -> None:
        self.gms = MemoryServer(node="n1", incarnation=str(uuid.uuid4()), devices=self.devices)
        self.telemetry = Telemetry("snap-gms", "n1", "0")
        sessions = LeaseSessions(self.gms, self.telemetry)
        self.lease = LeaseServer(self.folder, sessions, self.policy)
        self.lease.start()
        self.control = GmsControl(self.gms)
        self.transfers = GmsTransfers(
            self.gms, self._transfers, socket_dir=self.folder, root=self.folder / "artifacts"
        )
        self.grpc = GrpcServer(self.folder, self.control, self.transfers, self.telemetry)
        await self.grpc.start()

    def restart(self) -> None:
        """End the service with all its memory, and start another in its place."""
        self.run(self._close())
        for device in self.devices:
            device.close()
        self.devices = self._simulated([device.info.capacity for device in self.devices])
        self.run(self._start())

    def _simulated(self, capacities: Sequence[int]) -> Sequence[Device]:
        return [
            SimulatedDevice(node="n1", index=index, capacity=size, granularity=self._granularity)
            for index, size in enumerate(capacities)
        ]

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine where the service runs."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(30)

    def device(self, index: int = 0) -> DeviceStatus:
        """What the service says of a device now."""
        status = self.run(self.control.status(StatusRequest()))
        return status.devices[index]

    def layout(self, index: int = 0) -> LayoutRef:
        """The weights that are committed on a device."""
        found = self.device(index).domains[0].layout
        assert found is not None
        return found

    def publish(self, token: str, index: int = 1) -> LayoutRef:
        """Publish what was loaded into a device under a token."""

        async def published() -> LayoutRef:
            return self.gms.publish_hidden(self.uuids[index], token)

        return self.run(published())

    def drop(self, index: int, token: str | None = None) -> None:
        """Drop the weights of a device, or what was loaded under a token and is hidden."""

        async def dropped() -> None:
            if token is None:
                self.gms.drop_layout(self.uuids[index], None)
            else:
                self.gms.drop_hidden(self.uuids[index], token)
            await self.gms.drained()

        self.run(dropped())

    def spans(self) -> list[SpanRecord]:
        """What it has recorded of traces."""
        return list(self.telemetry._outbox.records)

    def stop(self) -> None:
        self.run(self._stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        for device in self.devices:
            device.close()

    async def _close(self) -> None:
        await self.lease.close()
        await self.grpc.close()
        await self.gms.drained()
        self.telemetry.shutdown()

    async def _stop(self) -> None:
        await self._close()
        await self._loop.shutdown_default_executor()


def asking(service: RunningGms, lock: str = "RW", **fields: Any) -> Attach:
    """The request of a lock, of the weights of the first device unless it is told another."""
    wanted: dict[str, Any] = {
        "device": service.uuids[0],
        "domain": MemoryDomain.WEIGHTS,
        "lock": LockMode(lock),
        "deadline_s": 10.0,
        "client": "test",
    }
    return Attach(**wanted | fields)


def attach(service: RunningGms, lock: str = "RW", **fields: Any) -> Lease:
    return Lease.attach(str(service.folder), asking(service, lock, **fields))


@contextlib.contextmanager
def raw(sockets: Path) -> Iterator[socket.socket]:
    """Connect to the lease socket in a folder, and say nothing yet."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
        prepare(sock)
        sock.settimeout(10)
        sock.connect(str(sockets / LEASE_SOCKET))
        yield sock


def committed(
    device: int = 0, value: int = 0, *, size: int = 10, layout_id: str | None = None, **how: Any
) -> client.MemoryPool:
    """Commit an array `w` of bytes, all with one value; return its pool, which is open."""
    pool = client.connect(device, lock="RW", **how)
    array = pool.allocate("w", size, "u1")
    if value:
        # An array of a GPU has another name for it.
        (array.set if pool.device_kind == "cuda" else array.fill)(value)
    pool.commit(layout_id=layout_id)
    return pool


def fields_of(verb: str, owner: str, part: str = "-gpu-0") -> dict[str, Any]:
    """Return what every order has, of one to the service of node n1."""
    order = f"{verb}-{owner}{part}"
    return {"order": order, "attempt": 1, "node": "n1", "owner": owner, "deadline_s": 30.0}


class GmsProgram:
    """`python -m gms.main` of node n1, with an environment and a log of its own."""

    def __init__(self, folder: Path, sockets: Path, **settings: str) -> None:
        self.sockets = sockets
        self.log = folder / "gms.log"
        self.environment = os.environ | {
            "SNAPBACK_NODE": "n1",
            "SNAPBACK_STATE_DIR": str(folder / "state"),
            "SNAPBACK_ARTIFACT_ROOT": str(folder / "artifacts"),
            "SNAPBACK_SOCKET_DIR": str(sockets),
            "SNAPBACK_NATS_URL": "",
            "SNAPBACK_DEVICES": "1",
            "SNAPBACK_DEVICE_BYTES": str(CAPACITY),
            **settings,
        }
        self.running: list[subprocess.Popen[bytes]] = []

    @property
    def process(self) -> subprocess.Popen[bytes]:
        """The last one that was started."""
        return self.running[-1]

    def begin(self) -> subprocess.Popen[bytes]:
        """Start it, and do not wait until it serves."""
        with self.log.open("ab") as log:
            command = [sys.executable, "-m", "gms.main"]
            process = subprocess.Popen(command, env=self.environment, stderr=log, process_group=0)
        self.running.append(process)
        return process

    def start(self) -> subprocess.Popen[bytes]:
        """Start it and return when it serves."""
        process = self.begin()
        served = self.sockets / "gms-grpc.sock"
        wait_until(lambda: process.poll() is not None or served.exists(), self.log.read_text)
        assert process.poll() is None, self.log.read_text()
        return process

    def refused(self, **settings: str) -> list[str]:
        """Run it with other settings until it ends with status 1; return what it said."""
        self.environment |= settings
        assert self.begin().wait(30) == 1
        return self.log.read_text().splitlines()

    def children(self) -> list[int]:
        return children_of(self.process.pid)

    async def status(self, events: int = 0) -> StatusReply:
        async with GmsCaller(self.sockets) as gms:
            return await gms.status(events=events)

    def stop(self) -> int:
        """End the last one as an init system does; return its status."""
        self.process.terminate()
        return self.process.wait(20)

    def kill(self) -> None:
        """Kill all that were started."""
        for process in self.running:
            process.kill()
            process.wait()


class Other:
    """Code in another process, which prints a line once it is ready and ends with its input."""

    def __init__(self, code: str, *arguments: str) -> None:
        command = [sys.executable, "-u", "-c", code, *arguments]
        pipe = subprocess.PIPE
        self._process: Any = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)
        self.said = self._process.stdout.readline().strip()
        self.pid = self._process.pid

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def end(self) -> None:
        self._process.stdin.close()
        self._process.wait(20)
        self._process.stdout.close()

    def kill(self) -> None:
        self._process.kill()
        self.end()


def program(name: str, *words: str, **environment: str) -> subprocess.Popen[str]:
    """Start a program that is installed beside Python; what it says of a failure can be read."""
    path = Path(sys.executable).with_name(name)
    variables = os.environ | environment
    return subprocess.Popen([path, *words], env=variables, stderr=subprocess.PIPE, text=True)


def transfer_processes() -> list[int]:
    """The transfer processes of this one; not the process whose forks are as they are."""
    return [
        pid
        for pid in children_of()
        if b"gms.transfer_child" in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    ]


def children_of(pid: int | str = "self") -> list[int]:
    """The children of a process and of all its threads."""
    found: list[int] = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        # A thread may have ended since it was listed.
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            found += map(int, path.read_text().split())
    return found


def open_descriptors() -> int:
    """How many descriptors this process has open."""
    return len(list(Path("/proc/self/fd").iterdir()))


def gms(*arguments: object, status: int = 0, **environment: str) -> str:
    """Run a command of `gms` in this process; give its output, or what it said of its failure."""
    out, err = (io.TextIOWrapper(io.BytesIO(), "utf-8", write_through=True) for _ in range(2))
    with (
        pytest.MonkeyPatch.context() as patch,
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        patch.setattr(sys, "argv", ["gms", *map(str, arguments)])
        for name, value in environment.items():
            patch.setenv(name, value)
        with pytest.raises(SystemExit) as ended:
            cli.main()
    for stream in (out, err):
        stream.seek(0)
    said, failed = out.read(), err.read()
    assert ended.value.code == status, failed
    assert "Traceback" not in failed
    return failed if status and not said else said
