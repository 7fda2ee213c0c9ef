"""How clients share the service: who is admitted, who has its turn, and what each waits for."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import gc
import itertools
import os
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest

import gms.handlers.sessions as answers
from gms.adapters.admission import Admission, LeasePolicy, pod_in
from gms.adapters.simulated import SimulatedDevice, simulated_uuid
from gms.adapters.turns import Turns
from gms.domain.layout import PIECE
from gms.domain.locks import Lock
from gms.domain.sessions import Peer, Session
from gms.domain.shares import TooManySessions
from gms.handlers.control import GmsControl
from gms.handlers.memory_server import MemoryServer
from gms.handlers.sessions import LeaseSessions
from gms.ports import Device
from snapback_client import frames
from snapshot_shared.errors import Forbidden, GenerationMismatch
from snapshot_shared.frames import StatusRequest
from snapshot_shared.metrics import Metrics
from snapshot_shared.tasks import end_all
from tests.unit.tables import each

GPU = simulated_uuid("n1", 0)


def server_of(*devices: Device, **fields: Any) -> MemoryServer:
    return MemoryServer(node="n1", incarnation="inc", devices=devices, **fields)


class SlowDevice(SimulatedDevice):
    """A device that releases memory when the test lets it."""

    def __init__(self) -> None:
        super().__init__(node="n1", index=0, capacity=2**20, granularity=4096)
        self.may_end: dict[int, threading.Event] = {}

    def create(self, size: int) -> int:
        handle = super().create(size)
        self.may_end[handle] = threading.Event()
        return handle

    def release(self, handle: int) -> None:
        assert self.may_end[handle].wait(10)
        super().release(handle)


@pytest.fixture
async def device() -> AsyncIterator[SlowDevice]:
    device = SlowDevice()
    yield device
    for event in device.may_end.values():
        event.set()
    await asyncio.get_running_loop().shutdown_default_executor()


async def attached(gms: MemoryServer, domain: frames.MemoryDomain) -> Session:
    attach = frames.Attach(device=GPU, domain=domain, lock=frames.LockMode.RW, deadline_s=5.0)
    return await gms.attach(attach, Peer(pid=1, uid=0))


async def test_a_later_release_delays_no_caller_that_waits_for_earlier_ones(
    device: SlowDevice,
) -> None:
    gms = server_of(device)
    session = await attached(gms, frames.MemoryDomain.KV)
    specs = [frames.AllocationSpec(id=name, size=1) for name in ("a", "b")]
    await gms.allocate(session, specs, wait_s=0.0)
    first, second = device.may_end.values()
    gms.free(session, ["a"])
    drained = asyncio.create_task(gms.drained())
    await asyncio.sleep(0)
    gms.free(session, ["b"])
    assert not drained.done()
    first.set()
    async with asyncio.timeout(5):
        await drained
    assert not second.is_set()


class SharedDevice(SimulatedDevice):
    """A device of which others have most, and which has to be asked in a thread."""

    def __init__(self, index: int = 0) -> None:
        super().__init__(node="n1", index=index, capacity=2**20, granularity=4096, is_shared=True)

    def free(self) -> int:
        assert threading.current_thread() is not threading.main_thread()
        return 4096


async def test_the_metric_of_free_memory_is_what_a_shared_device_has_said_last() -> None:
    metrics = Metrics("snap-gms", "n1", "0", scraped=True)
    device = SharedDevice()
    server_of(device, metrics=metrics)

    def shown() -> float:
        text = metrics.text().decode().splitlines()
        (line,) = [line for line in text if line.startswith("snapback_gms_memory_free")]
        return float(line.rpartition(" ")[2])

    assert shown() == 2**20
    await asyncio.gather(*asyncio.all_tasks() - {asyncio.current_task()})
    assert shown() == 4096
    await asyncio.gather(*asyncio.all_tasks() - {asyncio.current_task()})
    device.close()


class HangingDevice(SharedDevice):
    """One that answers when the test lets it."""

    def __init__(self) -> None:
        super().__init__()
        self.may_answer = threading.Event()
        self.asked = 0

    def free(self) -> int:
        self.asked += 1
        assert self.may_answer.wait(10)
        return super().free()


async def test_no_lock_waits_for_a_device_that_hangs_and_one_thread_asks_it() -> None:
    device = HangingDevice()
    gms = server_of(device)
    try:
        async with asyncio.timeout(5):
            asked = (gms.free_on(GPU) for _ in range(20))
            assert await asyncio.gather(*asked) == [2**20] * 20
            assert [await gms.free_on(GPU) for _ in range(3)] == [2**20] * 3
        assert device.asked == 1
    finally:
        device.may_answer.set()
        await asyncio.get_running_loop().shutdown_default_executor()
        device.close()


class MeetingDevice(SharedDevice):
    """One that answers while another one is asked."""

    def __init__(self, index: int, meeting: threading.Barrier) -> None:
        super().__init__(index)
        self._meeting = meeting

    def free(self) -> int:
        self._meeting.wait(10)
        return super().free()


async def test_a_status_asks_its_devices_at_the_same_time() -> None:
    meeting = threading.Barrier(2)
    devices = [MeetingDevice(index, meeting) for index in range(2)]
    gms = server_of(*devices)
    status = await GmsControl(gms).status(StatusRequest())
    assert [(device.index, device.free) for device in status.devices] == [(0, 4096), (1, 4096)]
    await asyncio.get_running_loop().shutdown_default_executor()
    for device in devices:
        device.close()


class OneFile(SimulatedDevice):
    """A device with one descriptor for all allocations, of which there may be many."""

    def __init__(self) -> None:
        super().__init__(node="n1", index=0, capacity=2**40, granularity=4096)
        self.sealed = 0
        self._file = os.memfd_create("one", os.MFD_ALLOW_SEALING)
        self._handles = itertools.count()

    def create(self, size: int) -> int:
        return next(self._handles)

    def export(self, handle: int, access: frames.Access) -> int:
        return os.dup(self._file)

    def seal(self, handle: int) -> None:
        fcntl.fcntl(self._file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_GROW)
        self.sealed += 1

    def release(self, handle: int) -> None:
        """Nothing is taken."""

    def close(self) -> None:
        os.close(self._file)


@pytest.fixture
def one_file() -> Iterator[OneFile]:
    with contextlib.closing(OneFile()) as device:
        yield device


@pytest.fixture
def server(one_file: OneFile) -> MemoryServer:
    return server_of(one_file)


def ids_of(first: int, count: int) -> list[str]:
    return [f"a{number:05}" for number in range(first, first + count)]


async def written(gms: MemoryServer, count: int = frames.MAX_ALLOCATIONS) -> Session:
    """A session that has written a layout, by default as large a one as there may be."""
    session = await attached(gms, frames.MemoryDomain.WEIGHTS)
    for first in range(0, count, frames.MAX_BATCH):
        ids = ids_of(first, frames.MAX_BATCH)
        await gms.allocate(
            session, [frames.AllocationSpec(id=name, size=1) for name in ids], wait_s=0.0
        )
        items = [
            frames.MetadataItem(key=name, allocation=name, offset=0, value=b"") for name in ids
        ]
        gms.table.put_metadata(session, items)
    return session


@pytest.mark.parametrize(
    ("request_", "cost"),
    [
        (frames.MetadataGet(), "cost_of_metadata"),
        (frames.ListAllocations(), "cost_of_allocation"),
        (frames.ExportMany(ids=ids_of(0, 1000), access=frames.Access.RO), "cost_of_allocation"),
    ],
)
async def test_an_answer_stops_for_others_before_each_message(
    server: MemoryServer, monkeypatch: pytest.MonkeyPatch, request_: frames.Request, cost: str
) -> None:
    session = await written(server, frames.MAX_BATCH)
    costs: list[Any] = []
    known: Callable[[Any], int] = getattr(answers, cost)

    def counted(entry: Any) -> int:
        costs.append(entry)
        return known(entry)

    monkeypatch.setattr(answers, cost, counted)
    messages, since = 0, 0
    for message in LeaseSessions(server).call(session, request_):
        assert len(costs) <= frames.MESSAGE_BUDGET // 40, "much was done in one piece"
        if message is None:
            since = 0
            costs.clear()
            continue
        message.close()
        messages += 1
        since += 1
        assert since == 1, "two messages came in one piece"
    assert messages > 1


def longest_pause(sessions: LeaseSessions, session: Session, request: frames.Request) -> float:
    """The most CPU time that one piece of an answer takes, without the collector of garbage."""
    gc.collect()
    gc.disable()
    try:
        found, begun = 0.0, time.thread_time()
        for _ in sessions.call(session, request):
            found, begun = max(found, time.thread_time() - begun), time.thread_time()
        return max(found, time.thread_time() - begun)
    finally:
        gc.enable()


async def test_no_piece_of_a_commit_of_the_largest_layout_takes_five_milliseconds(
    server: MemoryServer,
) -> None:
    pauses: list[float] = []
    for _ in range(3):
        session = await written(server)
        pauses.append(longest_pause(LeaseSessions(server), session, frames.Commit()))
        server.end(session, unmapped=True)
        server.drop_layout(GPU, None)
    assert min(pauses) < 0.005, pauses


async def test_a_layout_is_published_only_when_all_of_it_is_sealed(
    server: MemoryServer, one_file: OneFile
) -> None:
    session = await written(server)
    for message in LeaseSessions(server).call(session, frames.Commit()):
        weights = server.table.device(GPU).weights
        assert (weights.committed is not None) == (message is not None)
        assert message is None or one_file.sealed == frames.MAX_ALLOCATIONS


async def test_a_client_that_hangs_up_during_its_commit_commits_nothing(
    server: MemoryServer,
) -> None:
    session = await written(server)
    answer = LeaseSessions(server).call(session, frames.Commit())
    for _ in range(frames.MAX_ALLOCATIONS // PIECE):
        assert next(answer) is None
    answer.close()
    assert not server.end(session, unmapped=False)
    weights = server.table.device(GPU).weights
    assert (weights.committed, weights.lock) == (None, Lock.EMPTY)


async def test_a_commit_of_a_replaced_generation_is_refused_at_once(
    server: MemoryServer, one_file: OneFile
) -> None:
    session = await written(server)
    other = frames.GenerationRef(incarnation="another", generation=1)
    with pytest.raises(GenerationMismatch):
        next(LeaseSessions(server).call(session, frames.Commit(if_match=other)))
    assert one_file.sealed == 0


class Work:
    """Clients that always have more to do, on a clock on which each piece takes a second."""

    def __init__(self, budget_s: float) -> None:
        self.now = 0.0
        self.done: list[str] = []
        self.turns = Turns(budget_s, clock=lambda: self.now)

    async def client(self, name: str, owner: str, pieces: int = 1_000_000) -> None:
        for _ in range(pieces):
            await self.turns.take(owner)
            self.now += 1
            self.done.append(name)

    async def flooded_by(self, *names: str) -> list[asyncio.Task[None]]:
        """Begin clients that do not end; a name begins with its owner."""
        tasks = [asyncio.create_task(self.client(name, name[0])) for name in names]
        await asyncio.sleep(0)
        return tasks


@pytest.mark.parametrize("clients", [1, 5, 100])
async def test_however_many_have_work_ready_a_turn_of_the_loop_has_little_of_it(
    clients: int,
) -> None:
    work = Work(budget_s=3.0)
    tasks = await work.flooded_by(*(f"a{number}" for number in range(clients)))
    for _ in range(50):
        before = work.now
        await asyncio.sleep(0)
        assert work.now - before <= 3.0 + 1.0
    await end_all(*tasks)


async def test_one_piece_of_another_comes_next_beside_many_clients_of_one_owner() -> None:
    work = Work(budget_s=0.0)
    tasks = await work.flooded_by(*(f"a{number}" for number in range(100)))
    for _ in range(10):
        await asyncio.sleep(0)
    one = asyncio.create_task(work.client("b", "b", pieces=1))
    for _ in range(4):
        await asyncio.sleep(0)
    assert one.done(), "it waits for many pieces of another owner"
    await end_all(one, *tasks)


async def test_every_client_of_an_owner_comes_in_its_turn() -> None:
    work = Work(budget_s=0.0)
    tasks = await work.flooded_by("a0", "a1", "b0")
    for _ in range(41):
        await asyncio.sleep(0)
    assert len(work.done) >= 40
    counts = {name: work.done.count(name) for name in ("a0", "a1", "b0")}
    assert counts["b0"] in range(18, 23)
    assert counts["a0"] in range(8, 13)
    await end_all(*tasks)


async def test_what_fits_into_the_budget_waits_for_no_turn() -> None:
    work = Work(budget_s=3.0)
    loop = asyncio.get_running_loop()
    turns = itertools.count()
    loop.call_soon(next, turns)
    await work.client("a", "a", pieces=3)
    assert next(turns) == 0, "the loop turned meanwhile"


async def test_one_who_gave_up_while_it_waited_delays_no_other() -> None:
    work = Work(budget_s=0.0)
    tasks = await work.flooded_by("a", "b", "c")
    tasks[0].cancel()
    for _ in range(20):
        await asyncio.sleep(0)
    assert work.done.count("c") >= 5
    await end_all(*tasks)


UNUSED_ID = 61_111
POD, OTHER_POD = "3c8a1f5e-0d6b-4a63-9a39-0f1c3f6f9b01", "3c8a1f5e-0d6b-4a63-9a39-0f1c3f6f9b02"


@pytest.fixture
def sock() -> Iterator[socket.socket]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        yield ours


def peer(pid: int, pod: str = "", uid: int = os.geteuid()) -> Peer:
    return Peer(pid=pid, uid=uid, pod=pod)


def test_a_user_who_is_neither_the_owner_nor_in_the_group_is_refused_and_not_counted(
    sock: socket.socket,
) -> None:
    admission = Admission(LeasePolicy(group=UNUSED_ID, max_connections=1))
    with pytest.raises(Forbidden) as refusal:
        admission.enter(sock, peer(1, uid=UNUSED_ID))
    assert refusal.value.values == {"uid": UNUSED_ID}
    admission.enter(sock, peer(1))
    with pytest.raises(TooManySessions):
        admission.enter(sock, peer(1))


def test_what_one_gives_back_of_several_leaves_the_others_counted(sock: socket.socket) -> None:
    admission = Admission(LeasePolicy(max_of_process=3))
    for _ in range(3):
        admission.enter(sock, peer(1))
    admission.leave(peer(1))
    admission.enter(sock, peer(1))
    with pytest.raises(TooManySessions):
        admission.enter(sock, peer(1))


def test_a_process_that_holds_all_it_may_leaves_room_for_another_of_its_user(
    sock: socket.socket,
) -> None:
    admission = Admission(LeasePolicy(max_of_process=2))
    admission.enter(sock, peer(1))
    admission.enter(sock, peer(1))
    with pytest.raises(TooManySessions) as refusal:
        admission.enter(sock, peer(1))
    assert refusal.value.values == {"limit": 2, "process": 1}
    admission.enter(sock, peer(2))
    admission.leave(peer(1))
    admission.enter(sock, peer(1))


def test_the_processes_of_a_pod_together_leave_room_for_other_pods(sock: socket.socket) -> None:
    admission = Admission(LeasePolicy(max_of_process=1, max_of_pod=2))
    for pid in (1, 2):
        admission.enter(sock, peer(pid, POD))
    with pytest.raises(TooManySessions) as refusal:
        admission.enter(sock, peer(3, POD))
    assert refusal.value.values == {"limit": 2, "pod": POD}
    admission.enter(sock, peer(4, OTHER_POD))


def test_processes_that_we_cannot_see_are_not_taken_for_one(sock: socket.socket) -> None:
    admission = Admission(LeasePolicy(max_of_process=1, max_of_user=2))
    admission.enter(sock, peer(0))
    admission.enter(sock, peer(0))
    with pytest.raises(TooManySessions) as refusal:
        admission.enter(sock, peer(0))
    assert refusal.value.values == {"limit": 2, "user": os.geteuid()}


def test_what_the_service_started_gets_in_when_others_hold_all(sock: socket.socket) -> None:
    admission = Admission(LeasePolicy(max_connections=1))
    admission.enter(sock, peer(1))
    ours = Peer(pid=2, uid=os.geteuid(), is_ours=True)
    admission.enter(sock, ours)
    admission.leave(ours)
    with pytest.raises(TooManySessions):
        admission.enter(sock, peer(3))


@each(
    ("text", "pod"),
    [
        (f"0::/kubepods/burstable/pod{POD}/1f2e\n", POD),
        (
            "0::/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod"
            + POD.replace("-", "_")
            + ".slice/cri-containerd-1f2e.scope\n",
            POD,
        ),
        (f"12:cpu:/kubepods/pod{POD}/1f2e\n0::/\n", POD),
        (f"0::/../../pod{POD}/1f2e\n", POD),
        ("0::/user.slice/user-1000.slice/session-2.scope\n", ""),
        ("0::/podman/pods\n", ""),
        ("", ""),
    ],
)
def test_the_pod_of_a_process_stands_in_its_control_group(text: str, pod: str) -> None:
    assert pod_in(text) == pod
