"""A process for each device: what the crash of one takes with it, and what it leaves."""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

import snapback_client as client
from gms.adapters.grpc_api import GrpcServer
from gms.adapters.grpc_client import GmsCaller, RemoteControl, fresh_token
from gms.adapters.lease_router import Intake, hand, until_ready
from gms.adapters.simulated import simulated_uuid
from gms.domain.tasks import TransferLeased
from gms.handlers.orders import GmsOrders
from gms.handlers.split import SplitControl
from gms.ports import Memory, StartedDevice
from snapback_client.errors import ConnectionLost
from snapback_client.frames import (
    Attach,
    Detach,
    ErrorReply,
    GenerationRef,
    LockMode,
    MemoryDomain,
    decode_reply,
    encode_frame,
)
from snapback_client.lease import Lease
from snapshot_shared import frames
from snapshot_shared.errors import SnapbackError
from snapshot_shared.orders import CommitOrder, PodRef
from tests.support.cuda_rig import UUIDS as CUDA
from tests.support.cuda_rig import CudaNode
from tests.support.gms_rig import MIB, GmsProgram, TransferThreads, committed, fields_of, gms, raw
from tests.support.limits import no_descriptor_left
from tests.support.waiting import wait_until
from tests.support.weights import PART, UID, loading

pytestmark = pytest.mark.turns

UUIDS = [simulated_uuid("n1", index) for index in range(2)]


class Node(GmsProgram):
    """GMS of two simulated devices, each with a process, without NATS."""

    def __init__(self, folder: Path, sockets: Path, **settings: str) -> None:
        common = {"SNAPBACK_DEVICES": "2", "SNAPBACK_PROCESS_PER_DEVICE": "1"}
        super().__init__(folder, sockets, **common, **settings)
        self._read = 0

    def pid(self, index: int) -> int:
        """The process of a device."""
        for pid in self.children():
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            if words[-3:-1] == [b"--device", str(index).encode()]:
                return pid
        return 0

    def said(self) -> str:
        """The log since the test has begun."""
        return self.log.read_text()[self._read :]

    def empty(self) -> None:
        """Wait until every device is served, and free what an earlier test has left."""
        wait_until(lambda: asyncio.run(self._emptied()) == UUIDS, self.log.read_text)
        self._read = len(self.log.read_text())

    async def _emptied(self) -> list[str]:
        async with GmsCaller(self.sockets) as gms:
            devices = (await gms.status(events=0)).devices
            for device in devices:
                assert device.fence is None, "a fence of another test"
                if layout := device.domains[0].layout:
                    await gms.drop_layout(device.uuid, layout.layout_id)
        return [device.uuid for device in devices]


@contextlib.contextmanager
def running(node: Node) -> Iterator[Node]:
    """Run a node, and have the clients of the test find it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GMS_SOCKET_DIR", str(node.sockets))
        patch.setenv("NVIDIA_VISIBLE_DEVICES", ",".join(UUIDS))
        try:
            node.start()
            yield node
        finally:
            # The processes of devices end with it, and remove their folders before that.
            node.stop()


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    """The node of all tests that do not end it: three processes take seconds to start."""
    with (
        tempfile.TemporaryDirectory(prefix="gms-") as sockets,
        running(Node(tmp_path_factory.mktemp("node"), Path(sockets))) as node,
    ):
        yield node


@pytest.fixture
def node(started: Node) -> Node:
    started.empty()
    return started


@pytest.fixture
def own(tmp_path: Path, socket_dir: Path) -> Iterator[Node]:
    """A node of the test alone."""
    with running(Node(tmp_path, socket_dir)) as node:
        yield node


def test_the_crash_of_one_leaves_the_pools_and_the_layouts_of_the_others(node: Node) -> None:
    with (
        committed(0, 1) as lost,
        client.connect(0, lock="RW", domain="kv") as writing,
        committed(1, 2) as kept,
    ):
        killed = node.pid(0)
        assert killed not in (0, node.pid(1))
        before = kept.generation
        os.kill(killed, signal.SIGKILL)
        with pytest.raises(ConnectionLost, match=r"service (closed the connection|is gone)"):
            writing.allocate("kv", MIB, np.uint8)
        # What is mapped stays, until the worker itself lets go of it.
        assert lost["w"][7] == 1
        kept.sleep()
        kept.wake()
        assert kept["w"].tolist() == [2] * 10
        asked = Attach(device=UUIDS[1], domain=MemoryDomain.WEIGHTS, lock=LockMode.RO, deadline_s=5)
        reader = Lease.attach(str(node.sockets), asked)
        found = reader.attached
        assert GenerationRef(incarnation=found.incarnation, generation=found.generation) == before
        assert [info.size for info in reader.allocations()] == [10]
        reader.detach()
        wait_until(lambda: node.pid(0) not in (0, killed), node.said)


def test_who_asks_for_a_device_whose_process_was_killed_is_told_so_until_it_serves_again(
    node: Node,
) -> None:
    with committed(0, 1) as pool:
        pool.sleep()
        killed = node.pid(0)
        os.kill(killed, signal.SIGKILL)
        said: list[SnapbackError] = []
        asked = Attach(device=UUIDS[0], domain=MemoryDomain.KV, lock=LockMode.RW, deadline_s=20)

        def serves_again() -> bool:
            try:
                Lease.attach(str(node.sockets), asked).detach()
            except SnapbackError as error:
                said.append(error)
                return False
            return True

        wait_until(serves_again, node.said)
        reasons = {error.to_failure().reason for error in said}
        # A client whom the process had taken before it ended sees its connection closed.
        assert reasons <= {"DeviceProcessGone", "ConnectionLost"}
        gone = [each for each in said if each.to_failure().reason == "DeviceProcessGone"]
        assert gone, said
        assert UUIDS[0] in gone[-1].message
        assert "was killed by signal 9" in gone[-1].message
        assert gone[-1].to_failure().retryable
        # What was committed is not there any more, and nothing else is taken for it.
        with pytest.raises(client.StaleLayout, match="incarnation"):
            pool.wake(deadline_s=5)


async def test_the_service_answers_for_all_devices_and_says_that_the_process_of_one_has_ended(
    own: Node,
) -> None:
    with committed(0, 1), committed(1, 2):
        status = await own.status(events=64)
        assert [device.uuid for device in status.devices] == UUIDS
        assert [device.used for device in status.devices] == [2 * MIB] * 2
        layouts = [device.domains[0].layout for device in status.devices]
        incarnations = {layout.incarnation for layout in layouts if layout}
        assert len(incarnations) == 2
        os.kill(own.pid(0), signal.SIGKILL)
        async with GmsCaller(own.sockets) as gms:
            async for reply in gms.watch(frames.WatchRequest(status=True)):
                deaths = [
                    event.device
                    for event in reply.events
                    if (event.kind, event.reason) == (frames.EventKind.DEATH, "device-process")
                ]
                if deaths:
                    assert deaths == [UUIDS[0]]
                    assert reply.status is not None
                    assert UUIDS[1] in [device.uuid for device in reply.status.devices]
                    break
        events = (await own.status(events=64)).events
        assert isinstance(events, list)
        assert {event.device for event in events} == set(UUIDS)
        assert [event.seq for event in events] == list(range(1, len(events) + 1))


def test_what_is_asked_while_a_process_starts_again_waits_for_it(node: Node) -> None:
    with committed(0, 1):
        os.kill(node.pid(0), signal.SIGKILL)
        wait_until(lambda: "was killed by signal 9" in node.said(), node.said)
        status = asyncio.run(node.status())
        assert [device.uuid for device in status.devices] == UUIDS
        assert status.devices[0].domains[0].layout is None


@contextlib.contextmanager
def stalled(node: Node, number: signal.Signals) -> Iterator[None]:
    """Make the process of the first device hang, or keep it from starting again."""
    pid, folder, aside = node.pid(0), node.sockets / "gpu-0", node.sockets / "moved"
    if number is signal.SIGKILL:
        folder.rename(aside)
        # What starts again has no place for its sockets.
        folder.touch()
    os.kill(pid, number)
    try:
        yield
    finally:
        if number is signal.SIGKILL:
            folder.unlink()
            shutil.rmtree(aside)
        else:
            os.kill(pid, signal.SIGCONT)


def test_a_process_that_hangs_holds_up_no_other_device(node: Node) -> None:
    with committed(1, 2):
        with stalled(node, signal.SIGSTOP):
            status = asyncio.run(node.status())
            assert [device.uuid for device in status.devices] == UUIDS[1:]
            with pytest.raises(client.DeadlineExceeded):
                client.connect(0, lock="RW", deadline_s=0.1)
            with client.connect(1, lock="RW", domain="kv") as pool:
                pool.allocate("kv", MIB, np.uint8)
        status = asyncio.run(node.status())
        assert [device.uuid for device in status.devices] == UUIDS


async def fence(node: Node, token: str, devices: list[str], wait_s: float = 5.0) -> list[str]:
    request = frames.FenceRequest(token=token, devices=devices, wait_s=wait_s, deadline_s=60.0)
    return [ref.device for ref in (await RemoteControl(node.sockets).fence(request)).vector]


async def unfence(node: Node, token: str) -> bool:
    request = frames.UnfenceRequest(token=token)
    return (await RemoteControl(node.sockets).unfence(request)).ended


async def fenced(node: Node) -> list[bool]:
    return [device.fence is not None for device in (await node.status()).devices]


async def test_a_fence_is_on_the_devices_of_all_processes_or_on_none(node: Node) -> None:
    pools = [committed(0, 1), committed(1, 2)]
    pools[0].sleep()
    token = fresh_token("fence")
    with pytest.raises(client.DeadlineExceeded):
        await fence(node, token, UUIDS[::-1], wait_s=0.2)
    assert await fenced(node) == [False, False]
    pools[1].sleep()
    token = fresh_token("fence")
    assert await fence(node, token, UUIDS[::-1]) == UUIDS[::-1]
    assert await fenced(node) == [True, True]
    assert await unfence(node, token)
    assert await fenced(node) == [False, False]
    for pool in pools:
        pool.wake()
        pool.close()


@pytest.fixture
def asleep(node: Node) -> Iterator[Node]:
    """A node both of whose devices have weights, which no session uses."""
    with committed(0, 1) as first, committed(1, 2) as second:
        first.sleep()
        second.sleep()
        yield node


async def test_a_fence_does_not_count_as_ended_while_a_process_that_hangs_has_it(
    asleep: Node,
) -> None:
    token = fresh_token("fence")
    await fence(asleep, token, UUIDS)
    with stalled(asleep, signal.SIGSTOP), pytest.raises(SnapbackError) as raised:
        await unfence(asleep, token)
    failure = raised.value.to_failure()
    assert (failure.reason, failure.retryable) == ("DeadlineExceeded", True)
    assert UUIDS[0] in failure.message
    await unfence(asleep, token)
    assert await fenced(asleep) == [False, False]


async def test_a_fence_ends_with_the_process_that_has_it(asleep: Node) -> None:
    token = fresh_token("fence")
    await fence(asleep, token, UUIDS)
    os.kill(asleep.pid(0), signal.SIGKILL)
    assert await unfence(asleep, token)
    assert not any(await fenced(asleep))


async def test_a_device_that_refuses_a_fence_may_have_it_later(asleep: Node) -> None:
    first, second = fresh_token("fence"), fresh_token("fence")
    await fence(asleep, first, UUIDS[1:])
    with pytest.raises(SnapbackError, match="another capture holds"):
        await fence(asleep, second, UUIDS)
    assert await fenced(asleep) == [False, True]
    await unfence(asleep, first)
    await fence(asleep, second, UUIDS[1:])
    assert await fenced(asleep) == [False, True]
    assert await unfence(asleep, second)


async def test_a_call_for_a_fence_that_is_cancelled_may_be_repeated(asleep: Node) -> None:
    token = fresh_token("fence")
    with client.connect(1, lock="RW", domain="kv") as pool:
        asked = asyncio.create_task(fence(asleep, token, UUIDS, wait_s=20.0))
        async with asyncio.timeout(20):
            while await fenced(asleep) != [True, True]:  # noqa: ASYNC110 - of another process
                await asyncio.sleep(0)
        asked.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asked
        assert await fenced(asleep) == [True, True]
        pool.close()
        await fence(asleep, token, UUIDS)
    assert await unfence(asleep, token)


@pytest.mark.parametrize(
    ("number", "reason"),
    [(signal.SIGSTOP, "DeadlineExceeded"), (signal.SIGKILL, "DeviceProcessGone")],
)
def test_an_order_for_a_device_that_is_not_served_now_may_be_given_again(
    node: Node, tmp_path: Path, number: signal.Signals, reason: str
) -> None:
    async def find(_: PodRef | None) -> Memory:
        return Memory(RemoteControl(node.sockets), node.sockets)

    unused: Any = None
    orders = GmsOrders(find, unused, unused, unused, root=tmp_path)
    fields = fields_of("commit", UID)
    order = CommitOrder(device="gpu-0", load_token="t", layout_id="l", **fields)
    with stalled(node, number):
        for name in ("gpu-0", UUIDS[0]):
            with pytest.raises(SnapbackError) as raised:
                asyncio.run(orders.commit(replace(order, device=name), unused))
            failure = raised.value.to_failure()
            # The socket of a killed process may be gone before the process is waited for.
            assert failure.reason in (reason, "GmsUnavailable"), name
            assert failure.retryable


async def saved(node: Node, index: int, root: Path) -> frames.TransferUpdate:
    """Save a device; return the last that is said of it."""
    request = frames.SaveRequest(device=UUIDS[index], content_uid=UID, root=str(root))
    async with GmsCaller(node.sockets) as gms:
        return [update async for update in gms.save(request)][-1]


async def test_a_load_whose_device_process_is_killed_may_be_tried_again(
    node: Node, tmp_path: Path
) -> None:
    root = tmp_path / "root"
    with committed(1, 2):
        done = await saved(node, 1, root)
    assert done.layout is not None
    task = loading(
        node.sockets,
        root,
        done.layout,
        path=root / PART.replace("gpu-0", "gpu-1"),
        device=UUIDS[0],
        part="gpu-1",
        deadline_s=30.0,
        memory_wait_s=20.0,
    )
    # The load waits for memory, so that it is under way when the process ends.
    with client.connect(0, lock="RW", domain="kv") as pool:
        pool.allocate("kv", 64 * MIB, np.uint8)
        events = TransferThreads().run(task)
        assert isinstance(await anext(events), TransferLeased)
        os.kill(node.pid(0), signal.SIGKILL)
        with pytest.raises(SnapbackError) as raised:
            await anext(events)
    failure = raised.value.to_failure()
    assert (failure.reason, failure.retryable) == ("ConnectionLost", True)


class OneDevice:
    """The device of a service as one that a process of its own serves."""

    def __init__(self, service: Any) -> None:
        self.infos = [device.info for device in service.devices]
        self.ended = asyncio.Event()
        self._folder = service.folder

    async def settled(self) -> None:
        """It is served all the time."""

    def control(self, device: str) -> RemoteControl:
        return RemoteControl(self._folder)

    async def started(self, device: str) -> StartedDevice:
        if self.ended.is_set():
            await asyncio.Event().wait()
        return StartedDevice(RemoteControl(self._folder), self.ended)


def test_the_events_of_a_process_that_lives_come_once_and_it_does_not_count_as_ended(
    launch: Callable[..., Any],
) -> None:
    service = launch(capacities=(64 * MIB,))
    uuid = service.uuids[0]
    committed(0, 1).close()

    async def run() -> list[tuple[frames.EventKind, str]]:
        devices = OneDevice(service)
        split = SplitControl("n1", "incarnation", devices)

        async def until_said(*wanted: tuple[frames.EventKind, str]) -> None:
            async with asyncio.timeout(20):
                async for _ in split.watch(frames.WatchRequest()):
                    if set(wanted) <= set(await said()):
                        return

        async def said() -> list[tuple[frames.EventKind, str]]:
            events = (await split.status(frames.StatusRequest(events=64))).events
            assert isinstance(events, list)
            found = [(event.kind, event.reason) for event in events]
            seen = (frames.EventKind.FENCE, frames.EventKind.DEATH)
            return [each for each in found if each[0] in seen]

        async def start_again() -> None:
            service.grpc = GrpcServer(service.folder, service.control, service.transfers)
            await service.grpc.start()

        request = frames.FenceRequest(token="t", devices=[uuid], wait_s=5.0, deadline_s=60.0)
        async with split.following():
            await service.control.fence(request)
            await until_said((frames.EventKind.FENCE, "asked"))
            await service.grpc.close()
            await start_again()
            await service.control.unfence(frames.UnfenceRequest(token="t"))
            await until_said((frames.EventKind.FENCE, "ended"))
            devices.ended.set()
            await service.grpc.close()
            await until_said((frames.EventKind.DEATH, "device-process"))
            await start_again()
            return await said()

    assert service.run(run()) == [
        (frames.EventKind.FENCE, "asked"),
        (frames.EventKind.FENCE, "held"),
        (frames.EventKind.FENCE, "ended"),
        (frames.EventKind.DEATH, "device-process"),
    ]


async def test_a_client_for_whom_no_descriptor_is_left_is_let_go_with_one_line(
    caplog: pytest.LogCaptureFixture,
) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    taken: list[socket.socket] = []
    intake = Intake(theirs, taken.append, lambda: pytest.fail("the other end is there"))
    intake.start()
    assert await until_ready(ours)
    with ours, contextlib.closing(intake):
        for is_full in (True, False):
            client_end, server_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with client_end, server_end:
                hand(ours, server_end)
                with no_descriptor_left() if is_full else contextlib.nullcontext():
                    # The message is read in this turn of the event loop or in the next.
                    for _ in range(10):
                        await asyncio.sleep(0)
    assert len(taken) == 1
    taken[0].close()
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 1
    assert "no descriptor is left" in lines[0]
    assert caplog.records[0].exc_info is None


def test_what_one_process_saves_another_loads(node: Node, tmp_path: Path) -> None:
    with committed(0, 7):
        done = asyncio.run(saved(node, 0, tmp_path / "root"))
    assert done.stage is frames.TransferStage.DONE
    gms("load", done.path, "-d", "1")
    with client.connect(1, lock="RO") as pool:
        assert set(pool["w"].tolist()) == {7}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_the_processes_end_with_the_service(own: Node, number: signal.Signals) -> None:
    with committed(0, 1):
        descriptors = [os.pidfd_open(pid) for pid in own.children()]
        assert len(descriptors) == 2
        own.process.send_signal(number)
        assert own.process.wait(20) == (0 if number == signal.SIGTERM else -number)
        for descriptor in descriptors:
            wait_until(lambda descriptor=descriptor: ended(descriptor), own.log.read_text)
            os.close(descriptor)
    if number == signal.SIGTERM:
        assert list(own.sockets.iterdir()) == []
        assert "Traceback" not in own.log.read_text()


def ended(pidfd: int) -> bool:
    return bool(select.select([pidfd], [], [], 0)[0])


def test_a_client_that_names_no_device_is_refused(node: Node) -> None:
    for frame in (encode_frame(Detach()), b"\xff"):
        with raw(node.sockets) as sock:
            sock.send(frame)
            reply = decode_reply(sock.recv(65536))
        assert isinstance(reply, ErrorReply)
        assert reply.to_failure().reason == "InvalidMessage", frame


def test_a_device_that_no_process_has_is_refused_by_name(node: Node) -> None:
    with pytest.raises(client.UnknownDevice, match="GPU-none"):
        client.connect("GPU-none")


def test_a_client_that_says_nothing_is_let_go(node: Node) -> None:
    with raw(node.sockets) as sock:
        assert b"no Attach came" in sock.recv(65536)


def test_devices_of_the_kubelet_plugin_cannot_have_a_process_each(
    tmp_path: Path, socket_dir: Path
) -> None:
    said = Node(tmp_path, socket_dir).refused(SNAPBACK_KUBELET_PLUGIN="dra")
    assert "SNAPBACK_PROCESS_PER_DEVICE and SNAPBACK_KUBELET_PLUGIN" in "\n".join(said)


def test_a_process_serves_its_gpu_alone(
    cuda_node: CudaNode, tmp_path: Path, socket_dir: Path
) -> None:
    cuda_node.place(*CUDA[:2])
    node = Node(tmp_path, socket_dir, SNAPBACK_GMS_DEVICE="cuda")
    node.start()
    code = (
        "import os, sys\n"
        "import snapback_client as client\n"
        "for number, uuid in enumerate(sys.argv[1:]):\n"
        "    with client.connect(number, lock='RW') as pool:\n"
        "        assert pool.device == uuid\n"
        "        pool.allocate('w', 10, 'f4').set(number)\n"
        "        pool.commit()\n"
        "        pool.sleep()\n"
        "        pool.wake()\n"
        "        assert pool['w'].get().tolist() == [number] * 10\n"
    )
    try:
        environment = os.environ | {"GMS_SOCKET_DIR": str(socket_dir)}
        subprocess.run([sys.executable, "-c", code, *CUDA[:2]], env=environment, check=True)
        status = asyncio.run(node.status())
        assert [(each.index, each.uuid) for each in status.devices] == list(enumerate(CUDA[:2]))
        assert [each.kind for each in status.devices] == ["cuda"] * 2
    finally:
        assert node.stop() == 0
