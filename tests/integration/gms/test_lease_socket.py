"""The lease socket: a socket is a lock, and what a client sends costs only that client."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import platform
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gms.adapters.admission import LeasePolicy
from gms.adapters.lease_listener import LeaseListener
from gms.adapters.lease_socket import LeaseServer
from gms.domain.sessions import Session
from gms.domain.shares import TooManySessions
from gms.handlers.sessions import LeaseSessions
from snapback_client.frames import (
    DESCRIPTORS_PER_MESSAGE,
    Access,
    AllocateMany,
    Allocations,
    AllocationSpec,
    Attach,
    Attached,
    Commit,
    Detach,
    ErrorReply,
    ExportMany,
    FreeMany,
    GenerationRef,
    ListAllocations,
    LockMode,
    MemoryDomain,
    MetadataGet,
    MetadataItem,
    MetadataPut,
    Reply,
    Request,
    decode_reply,
    encode_frame,
)
from snapback_client.lease import Lease
from snapback_client.wire import Inbox, close_all, pinned, prepare, send
from snapshot_shared.errors import (
    AlreadyExists,
    DeadlineExceeded,
    DeviceError,
    Forbidden,
    GenerationMismatch,
    InvalidMessage,
    NotFound,
    OutOfDeviceMemory,
    SnapbackError,
)
from tests.support.gms_rig import MIB, asking, attach
from tests.support.limits import no_descriptor_left
from tests.support.waiting import wait_until


def specs(*sizes: int) -> list[AllocationSpec]:
    return [AllocationSpec(id=f"a{index}", size=size) for index, size in enumerate(sizes)]


def commit_one(service: Any) -> GenerationRef:
    lease = attach(service)
    lease.allocate(specs(5))
    done = lease.commit(if_match=None)
    lease.detach()
    return GenerationRef(incarnation=done.incarnation, generation=done.generation)


@contextlib.contextmanager
def raw(service: Any) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
        prepare(sock)
        sock.settimeout(10)
        sock.connect(str(service.folder / "gms.sock"))
        yield sock


def answer(sock: socket.socket) -> Reply | None:
    data, descriptors = Inbox().receive(sock)
    close_all(descriptors)
    return decode_reply(data) if data else None


def ask(sock: socket.socket, request: Request) -> Reply | None:
    send(sock, encode_frame(request))
    return answer(sock)


def open_descriptors() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def waiting(service: Any) -> int:
    return len(service.device().domains[0].waiting)


@contextlib.contextmanager
def in_background(work: Callable[[], Any]) -> Iterator[Callable[[], Any]]:
    """Do something that blocks; what is given waits for its result."""
    result: list[Any] = []

    def run() -> None:
        try:
            result.append(work())
        except Exception as error:  # noqa: BLE001 - raised again where it is awaited
            result.append(error)

    thread = threading.Thread(target=run)
    thread.start()

    def finish() -> Any:
        thread.join(20)
        assert result, "it did not end"
        if isinstance(result[0], Exception):
            raise result[0]
        return result[0]

    try:
        yield finish
    finally:
        thread.join(20)


def test_what_was_granted_says_everything_a_client_needs(service: Any) -> None:
    lease = attach(service)
    found = lease.attached
    info = service.devices[0].info
    assert (found.device, found.index, found.product) == (info.uuid, 0, info.product)
    assert (found.capacity, found.free) == (info.capacity, info.capacity)
    assert found.granularity == info.granularity
    assert found.incarnation == service.gms.incarnation
    assert (found.granted, found.generation, found.layout_id) == (Access.RW, 0, "")
    lease.detach()


def test_three_thousand_allocations_and_exports_make_the_round_trip(launch: Any) -> None:
    service = launch(granularity=4096)
    lease = attach(service)
    many = [AllocationSpec(id=f"model.layers.{n}.weight", size=n + 1) for n in range(3000)]
    made = lease.allocate(many)
    assert [(info.id, info.size, info.slot) for info in made] == [
        (spec.id, spec.size, slot) for slot, spec in enumerate(many)
    ]
    open_before = open_descriptors()
    exported = []
    for run in lease.export([spec.id for spec in many], Access.RW):
        assert len(run) <= DESCRIPTORS_PER_MESSAGE
        exported += [info for info, descriptor in run if os.fstat(descriptor).st_size == 4096]
    assert exported == made
    assert lease.allocations() == made
    lease.put_metadata(
        [MetadataItem(key=s.id, allocation=s.id, offset=0, value=b"x" * 100) for s in many]
    )
    assert len(lease.metadata()) == 3000
    wait_until(lambda: open_descriptors() <= open_before)
    lease.detach()


def test_a_client_that_stops_in_the_middle_of_an_export_can_go_on(launch: Any) -> None:
    service = launch(granularity=4096)
    lease = attach(service)
    lease.allocate(specs(*[1] * 500))
    for _ in lease.export([f"a{n}" for n in range(500)], Access.RO):
        break
    assert len(lease.allocations()) == 500
    lease.detach()


def test_the_end_of_the_socket_frees_the_lock_and_the_memory(service: Any) -> None:
    lease = attach(service)
    lease.allocate(specs(5))
    lease.close()
    second = attach(service)
    assert second.attached.granted is Access.RW
    second.detach()
    assert service.device().used == 0


def test_memory_of_a_killed_process_is_free_once_it_has_ended(service: Any) -> None:
    code = (
        "import sys, time\n"
        "import snapback_client as client\n"
        "pool = client.connect(device=0, lock='RW')\n"
        "pool.allocate('a', 3_000_000, 'uint8')[:] = 1\n"
        "print('ready', flush=True)\n"
        "sys.stdin.read()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as worker:
        assert worker.stdout is not None
        assert worker.stdout.readline() == b"ready\n"
        assert service.device().used == 4 * MIB
        (session,) = service.device().domains[0].sessions
        assert (session.pid, session.access) == (worker.pid, Access.RW)
        worker.kill()
    wait_until(lambda: service.device().used == 0)
    assert service.device().domains[0].lock == "empty"


@pytest.mark.parametrize("lock", ["RW", "RO"])
def test_the_session_of_a_killed_process_ends_though_its_child_has_the_socket(
    service: Any, lock: str
) -> None:
    if lock == "RO":
        commit_one(service)
    before = service.device().used
    code = (
        "import os, signal, sys\n"
        "import snapback_client as client\n"
        "pool = client.connect(device=0, lock=sys.argv[1])\n"
        "if sys.argv[1] == 'RW':\n"
        "    pool.allocate('a', 3_000_000, 'uint8')[:] = 1\n"
        # As a child that another library forks: nothing of this process's own closes it there.
        "os.dup(pool._lease._socket.fileno())\n"
        "if (child := os.fork()) == 0:\n"
        "    signal.pause()\n"
        "print(child, flush=True)\n"
        "signal.pause()\n"
    )
    with subprocess.Popen([sys.executable, "-c", code, lock], stdout=subprocess.PIPE) as worker:
        assert worker.stdout is not None
        child = int(worker.stdout.readline())
        try:
            assert len(service.device().domains[0].sessions) == 1
            worker.kill()
            wait_until(lambda: service.device().domains[0].sessions == [])
            assert service.device().used == before
            os.kill(child, 0)
        finally:
            os.kill(child, signal.SIGKILL)


def test_what_a_living_process_may_have_mapped_stays_charged(service: Any) -> None:
    first = commit_one(service)
    reader = attach(service, "RO")
    for _ in reader.export(["a0"], Access.RO):
        pass
    reader.close()
    writer = attach(service, if_match=first)
    writer.allocate(specs(5))
    writer.commit(if_match=first)
    writer.detach()
    status = service.device()
    assert (status.used, status.retired) == (4 * MIB, 2 * MIB)
    assert [session.state for session in status.domains[0].sessions] == ["lingering"]


def test_a_reader_waits_for_the_commit(service: Any) -> None:
    writer = attach(service)
    with in_background(lambda: attach(service, "RO")) as reader:
        wait_until(lambda: waiting(service) == 1)
        writer.allocate(specs(5))
        writer.commit(if_match=None)
        lease = reader()
    assert lease.attached.generation == 1
    lease.detach()
    writer.detach()


def test_a_lock_that_is_not_granted_in_time_names_its_holder(service: Any) -> None:
    writer = attach(service, client="the-writer")
    with pytest.raises(DeadlineExceeded) as caught:
        attach(service, deadline_s=0.05)
    assert caught.value.values["holders"] == [f"the-writer (pid {os.getpid()})"]
    assert waiting(service) == 0
    writer.detach()


def test_a_client_that_goes_away_while_it_waits_leaves_the_queue(service: Any) -> None:
    writer = attach(service)
    with raw(service) as sock:
        request = asking(service, deadline_s=60.0)
        send(sock, encode_frame(request))
        wait_until(lambda: waiting(service) == 1)
    wait_until(lambda: waiting(service) == 0)
    writer.detach()
    attach(service).detach()


def test_a_client_that_sends_ahead_and_dies_while_it_waits_is_let_go_at_once(service: Any) -> None:
    commit_one(service)
    reader = attach(service, "RO")
    ours, theirs = socket.socketpair()
    ours.settimeout(10)
    with raw(service) as sock:
        first = GenerationRef(incarnation=service.gms.incarnation, generation=1)
        request = asking(service, deadline_s=600.0, if_match=first, replace=True)
        send(sock, encode_frame(request))
        send(sock, encode_frame(ListAllocations()), [theirs.fileno()])
        theirs.close()
        wait_until(lambda: waiting(service) == 1)
    wait_until(lambda: waiting(service) == 0)
    with ours:
        assert ours.recv(1) == b"", "the descriptor that it sent is still open"
    # The writer that would have replaced the layout keeps no reader out any more.
    attach(service, "RO").detach()
    reader.detach()


def test_the_wait_of_a_process_that_sent_its_own_socket_ahead_ends_with_it(service: Any) -> None:
    writer = attach(service)

    def wait() -> None:
        with raw(service) as sock:
            request = asking(service, deadline_s=600.0)
            send(sock, encode_frame(request))
            send(sock, encode_frame(ListAllocations()), [sock.fileno()])

    pid = os.fork()
    if pid == 0:
        try:
            wait()
            signal.pause()
        finally:
            os._exit(0)
    wait_until(lambda: waiting(service) == 1)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    wait_until(lambda: waiting(service) == 0)
    writer.detach()


def test_a_client_that_dies_with_a_frame_ahead_waits_for_memory_no_longer(service: Any) -> None:
    other = attach(service, domain=MemoryDomain.KV)
    other.allocate(specs(40 * MIB))
    with raw(service) as sock:
        request = asking(service)
        assert isinstance(ask(sock, request), Attached)
        send(sock, encode_frame(AllocateMany(allocations=specs(40 * MIB), wait_s=600.0)))
        send(sock, encode_frame(ListAllocations()))
    wait_until(lambda: service.device().domains[0].sessions == [])
    other.detach()


def test_a_mismatch_is_refused_with_both_generations(service: Any) -> None:
    current = commit_one(service)
    with pytest.raises(GenerationMismatch) as caught:
        attach(service)
    assert caught.value.values == {
        "expected": "nothing",
        "found": f"generation 1 of {current.incarnation}",
    }


def test_all_allocations_are_made_or_none(service: Any) -> None:
    lease = attach(service)
    with pytest.raises(OutOfDeviceMemory) as caught:
        lease.allocate(specs(40 * MIB, 40 * MIB))
    assert caught.value.values == {
        "needed": 80 * MIB,
        "free": 64 * MIB,
        "capacity": 64 * MIB,
        "used": 0,
        "holders": {},
    }
    assert service.device().used == 0
    assert lease.allocations() == []
    lease.detach()


def test_an_allocation_can_wait_for_memory_that_another_gives_back(service: Any) -> None:
    cache = attach(service, domain=MemoryDomain.KV)
    cache.allocate(specs(60 * MIB))
    weights = attach(service)
    with in_background(lambda: weights.allocate(specs(30 * MIB), wait_s=10.0)) as made:
        cache.detach()
        assert len(made()) == 1
    weights.detach()


def test_a_client_that_goes_away_while_it_waits_for_memory_leaves_none_behind(
    service: Any,
) -> None:
    cache = attach(service, domain=MemoryDomain.KV)
    cache.allocate(specs(60 * MIB))
    with raw(service) as sock:
        request = asking(service)
        ask(sock, request)
        send(sock, encode_frame(AllocateMany(allocations=specs(30 * MIB), wait_s=600.0)))
    wait_until(lambda: service.device().domains[0].sessions == [])
    cache.detach()
    assert service.device().used == 0


@pytest.mark.parametrize(
    "data",
    [
        b"\xc1garbage",
        msgspec.msgpack.encode({"type": "nonsense", "v": 1}),
        msgspec.msgpack.encode({"type": "detach", "v": 1}),
        msgspec.msgpack.encode({"type": "attach", "v": 77}),
        b"\x81" * 100_000,
    ],
)
def test_a_bad_first_frame_gets_an_answer_and_ends_only_that_client(
    service: Any, data: bytes
) -> None:
    good = attach(service)
    with raw(service) as sock:
        send(sock, data)
        assert isinstance(answer(sock), ErrorReply)
        assert answer(sock) is None
    assert good.allocations() == []
    good.detach()


def test_a_bad_later_frame_is_answered_and_the_session_goes_on(service: Any) -> None:
    with raw(service) as sock:
        request = asking(service)
        ask(sock, request)
        for bad in (b"\xc1", encode_frame(request), b"\x00" * 200_000):
            send(sock, bad)
            reply = answer(sock)
            assert isinstance(reply, ErrorReply)
            assert reply.reason == "InvalidMessage"
        made = ask(sock, AllocateMany(allocations=specs(5)))
        assert not isinstance(made, ErrorReply)
        ask(sock, Detach())
    assert service.device().used == 0


def test_descriptors_that_were_not_requested_are_closed(service: Any) -> None:
    before = open_descriptors()
    with raw(service) as sock, Path(os.devnull).open() as spare:
        send(sock, encode_frame(Detach()), [spare.fileno()] * 100)
        reply = answer(sock)
        assert isinstance(reply, ErrorReply)
        assert reply.message == "a request carries no descriptors"
    wait_until(lambda: open_descriptors() <= before)


def test_more_descriptors_than_a_message_may_carry_end_the_connection(service: Any) -> None:
    before = open_descriptors()
    with raw(service) as sock, Path(os.devnull).open() as spare:
        send(sock, encode_frame(Detach()), [spare.fileno()] * 250)
        assert isinstance(answer(sock), ErrorReply)
    wait_until(lambda: open_descriptors() <= before)


def test_a_client_that_never_says_what_it_wants_is_sent_away(launch: Any) -> None:
    service = launch(policy=LeasePolicy(handshake_s=0.05))
    with raw(service) as sock:
        reply = answer(sock)
        assert isinstance(reply, ErrorReply)
        assert (reply.reason, reply.values["step"]) == ("DeadlineExceeded", "handshake")


def test_a_client_that_does_not_read_its_answers_is_dropped(launch: Any) -> None:
    service = launch(granularity=4096, policy=LeasePolicy(send_s=0.05))
    with raw(service) as sock:
        request = asking(service)
        ask(sock, request)
        ask(sock, AllocateMany(allocations=specs(*[1] * 2000)))
        listing = msgspec.msgpack.encode({"type": "list_allocations", "v": 1})
        sock.settimeout(1)
        with contextlib.suppress(OSError):
            for _ in range(200):
                send(sock, listing)
        wait_until(lambda: service.device().domains[0].sessions == [])


@pytest.mark.parametrize("turn_s", [0.0, 0.001])
def test_frames_that_were_sent_ahead_are_answered_in_their_order(
    launch: Any, turn_s: float
) -> None:
    service = launch(granularity=4096, policy=LeasePolicy(turn_s=turn_s))
    item = MetadataItem(key="k", allocation="a0", offset=0, value=b"1")
    with raw(service) as sock:
        request = asking(service, domain=MemoryDomain.KV)
        assert isinstance(ask(sock, request), Attached)
        requests: list[Request] = []
        for _ in range(5):
            requests += [
                AllocateMany(allocations=specs(1, 1)),
                MetadataPut(entries=[item]),
                ListAllocations(),
                MetadataGet(keys=["k"]),
                ExportMany(ids=["a0"], access=Access.RW),
                FreeMany(ids=["missing"]),
                FreeMany(ids=["a0", "a1"]),
                ListAllocations(),
            ]
        for each in [*requests, Detach()]:
            send(sock, encode_frame(each))
        kinds = [type(answer(sock)).__name__ for _ in requests]
        assert (
            kinds
            == [
                "Allocated",
                "Done",
                "Allocations",
                "Metadata",
                "Exported",
                "ErrorReply",
                "Done",
                "Allocations",
            ]
            * 5
        )
        assert type(answer(sock)).__name__ == "Done"
        assert answer(sock) is None


def test_a_client_that_reads_late_gets_every_answer_whole(launch: Any) -> None:
    service = launch(granularity=4096)
    with raw(service) as sock:
        request = asking(service, domain=MemoryDomain.KV)
        assert isinstance(ask(sock, request), Attached)
        ask(sock, AllocateMany(allocations=specs(*[1] * 2000)))
        asked = 100
        for _ in range(asked):
            send(sock, encode_frame(ListAllocations()))
        send(sock, encode_frame(Detach()))
        listed = [answer(sock) for _ in range(asked)]
        assert all(isinstance(each, Allocations) for each in listed)
        assert [len(each.allocations) for each in listed] == [2000] * asked  # type: ignore[union-attr]


def test_the_loop_does_not_turn_for_a_frame_that_has_to_wait(service: Any) -> None:
    async def watched() -> int:
        return len(asyncio.get_running_loop()._selector.get_map())  # type: ignore[attr-defined]

    cache = attach(service, domain=MemoryDomain.KV)
    cache.allocate(specs(60 * MIB))
    with raw(service) as sock:
        request = asking(service)
        ask(sock, request)
        assert isinstance(ask(sock, ListAllocations()), Allocations)
        before = service.run(watched())
        send(sock, encode_frame(AllocateMany(allocations=specs(30 * MIB), wait_s=600.0)))
        send(sock, encode_frame(ListAllocations()))
        wait_until(lambda: service.run(watched()) < before)
        cache.detach()
        assert not isinstance(answer(sock), ErrorReply)
        assert isinstance(answer(sock), Allocations)


def test_a_client_too_many_is_refused_by_name(launch: Any) -> None:
    service = launch(policy=LeasePolicy(max_connections=1))
    first = attach(service)
    with pytest.raises(SnapbackError) as caught:
        attach(service, "RO")
    failure = caught.value.to_failure()
    assert (failure.reason, failure.retryable) == ("TooManySessions", True)
    first.detach()


def test_a_session_outlives_an_allocation_for_which_no_descriptor_is_left(service: Any) -> None:
    lease = attach(service)
    with no_descriptor_left(), pytest.raises(DeviceError) as refused:
        lease.allocate(specs(5))
    assert refused.value.reason == "DeviceError"
    lease.allocate(specs(5))
    lease.detach()


async def test_what_has_the_number_of_the_spare_descriptor_meanwhile_is_left_alone(
    socket_dir: Path,
) -> None:
    def spares() -> set[int]:
        found = Path("/proc/self/fd").iterdir()
        return {int(path.name) for path in found if os.path.realpath(path) == os.devnull}

    accepted: list[socket.socket] = []
    first, second = (socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(2))
    with first, second, contextlib.ExitStack() as stack:
        before = spares()
        listener = LeaseListener(socket_dir, accepted.append, None)
        listener.start()
        stack.callback(listener.close)
        (spare,) = spares() - before
        while (filler := os.open(os.devnull, os.O_RDONLY)) < spare:
            stack.callback(os.close, filler)
        os.close(filler)
        with no_descriptor_left(below=spare):
            first.connect(str(socket_dir / "gms.sock"))
            await turns()
        weights = os.memfd_create("weights")
        stack.callback(os.close, weights)
        assert weights == spare
        with no_descriptor_left():
            await turns()
        async with asyncio.timeout(10):
            while not accepted:  # noqa: ASYNC110 - the listener rests
                await asyncio.sleep(0.01)
        stack.callback(accepted[0].close)
        assert Path(f"/proc/self/fd/{weights}").readlink().name.startswith("memfd:weights")
        with no_descriptor_left():
            second.connect(str(socket_dir / "gms.sock"))
            await turns()
        second.settimeout(10)
        assert second.recv(1) == b""


async def turns() -> None:
    """Have what can be read be read: in this turn of the event loop or in one of the next."""
    for _ in range(10):
        await asyncio.sleep(0)


def test_the_sockets_are_for_their_owner_alone(service: Any) -> None:
    for name in ("gms.sock", "gms-grpc.sock"):
        mode = (service.folder / name).stat().st_mode
        assert stat.S_ISSOCK(mode)
        assert stat.S_IMODE(mode) == 0o600


def test_only_the_lease_socket_is_opened_to_a_shared_group(launch: Any) -> None:
    service = launch(policy=LeasePolicy(group=os.getgid()))
    lease, grpc = (service.folder / name for name in ("gms.sock", "gms-grpc.sock"))
    assert stat.S_IMODE(lease.stat().st_mode) == 0o660
    assert lease.stat().st_gid == os.getgid()
    assert stat.S_IMODE(grpc.stat().st_mode) == 0o600


@pytest.mark.root
@pytest.mark.skipif(platform.machine() != "x86_64", reason="makes a system call by its number")
def test_a_process_of_another_user_is_refused(service: Any) -> None:
    service.folder.chmod(0o755)
    (service.folder / "gms.sock").chmod(0o666)

    def as_another_user() -> Lease:
        # Straight to the kernel: there a user belongs to a thread, and this one ends.
        assert ctypes.CDLL(None).syscall(117, -1, 65534, -1) == 0
        return attach(service)

    with in_background(as_another_user) as outcome, pytest.raises(Forbidden):
        outcome()


def in_child(work: Callable[[], int]) -> int:
    """Do something in a child of the process of the service, whose exit status is the answer."""
    pid = os.fork()
    if pid == 0:
        status = 70
        try:
            status = work()
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def as_user(uid: int, groups: list[int], work: Callable[[], Any]) -> Any:
    """Do something in a process of another user, whose exit status is the answer."""

    def as_that_user() -> int:
        os.setgroups(groups)
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
        return int(work())

    return in_child(as_that_user)


@pytest.mark.root
def test_another_user_gets_in_only_by_the_shared_group(launch: Any) -> None:
    service = launch(policy=LeasePolicy(group=61_000))
    service.folder.chmod(0o711)
    (service.folder / "gms.sock").chmod(0o666)

    def connect() -> int:
        try:
            attach(service).detach()
        except Forbidden:
            return 13
        return 0

    assert as_user(65_534, [], connect) == 13
    assert as_user(65_534, [61_001], connect) == 13
    assert as_user(65_534, [61_000], connect) == 0
    assert as_user(61_000, [], connect) == 0


def test_a_flood_of_connections_leaves_those_that_are_served_alone(launch: Any) -> None:
    service = launch(policy=LeasePolicy(max_connections=32, max_of_user=24, handshake_s=30.0))
    good = attach(service)
    before = open_descriptors()
    held: list[socket.socket] = []
    refused = 0
    for number in range(2_000):
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        sock.settimeout(10)
        sock.connect(str(service.folder / "gms.sock"))
        if len(held) < 23:
            held.append(sock)
            continue
        if number % 100 == 0:
            reply = answer(sock)
            assert isinstance(reply, ErrorReply)
            assert (reply.reason, reply.retryable) == ("TooManySessions", True)
            refused += 1
        sock.close()
    assert refused == 20 - 1
    assert good.allocations() == []
    for sock in held:
        sock.close()
    wait_until(lambda: open_descriptors() <= before)
    good.detach()
    attach(service).detach()


def test_sessions_that_may_still_have_memory_mapped_count_for_their_user(launch: Any) -> None:
    service = launch(policy=LeasePolicy(max_of_user=3))
    commit_one(service)
    for _ in range(3):
        lease = attach(service, "RO")
        for run in lease.export(["a0"], Access.RO):
            assert len(run) == 1
        lease.close()
    with pytest.raises(SnapbackError) as caught:
        attach(service, "RO")
    assert caught.value.to_failure().reason == "TooManySessions"


@pytest.mark.parametrize(
    ("policy", "for_another"),
    [
        (LeasePolicy(max_connections=3, max_of_process=2), 0),
        (LeasePolicy(max_connections=2, max_of_process=2), 7),
    ],
)
def test_one_process_that_holds_all_it_may_keeps_out_no_other_and_no_transfer(
    launch: Any, policy: LeasePolicy, for_another: int
) -> None:
    service = launch(policy=policy)
    held = [attach(service, domain=domain) for domain in MemoryDomain]
    with pytest.raises(TooManySessions):
        attach(service, device=service.uuids[1])

    def attached() -> int:
        try:
            attach(service, device=service.uuids[1]).detach()
        except TooManySessions:
            return 7
        return 0

    assert in_child(lambda: in_child(attached)) == for_another
    # Transfers are children of the service.
    assert in_child(attached) == 0
    for lease in held:
        lease.detach()


def test_a_client_that_keeps_frames_queued_lets_the_loop_turn_between_any_two(
    launch: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = launch(policy=LeasePolicy(turn_s=0.0))
    answered: list[Request] = []
    is_queued = threading.Event()
    call = LeaseSessions.call

    def counted(self: LeaseSessions, session: Session, request: Request) -> Any:
        answered.append(request)
        return call(self, session, request)

    monkeypatch.setattr(LeaseSessions, "call", counted)

    async def turns_until_all_are_answered() -> int:
        # Nothing is answered before everything is queued.
        is_queued.wait(10)
        turns = 0
        while len(answered) < 100:
            await asyncio.sleep(0)
            turns += 1
        return turns

    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(raw(service)) for _ in range(2)]
        for sock, domain in zip(clients, MemoryDomain, strict=True):
            request = asking(service, domain=domain)
            assert isinstance(ask(sock, request), Attached)
        with in_background(lambda: service.run(turns_until_all_are_answered())) as turns:
            for sock in clients:
                for _ in range(50):
                    send(sock, encode_frame(FreeMany(ids=["missing"])))
            is_queued.set()
            assert turns() >= 99


def test_a_client_that_is_silent_or_stops_in_the_middle_has_two_seconds(service: Any) -> None:
    begun = time.monotonic()
    cut = encode_frame(asking(service, "RO", domain=MemoryDomain.KV, deadline_s=9.0))[:-5]
    with raw(service) as silent, raw(service) as halved:
        send(halved, cut)
        reply = answer(halved)
        assert isinstance(reply, ErrorReply)
        assert reply.reason == "InvalidMessage"
        assert answer(halved) is None
        reply = answer(silent)
        assert isinstance(reply, ErrorReply)
        assert reply.values == {"step": "handshake", "budget_s": 2.0}
    assert 1.9 <= time.monotonic() - begun < 5.0


def test_a_frame_over_the_limit_ends_the_connection_and_costs_no_memory(service: Any) -> None:
    good = attach(service)
    with raw(service) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8 * MIB)
        with contextlib.suppress(OSError):
            send(sock, b"x" * (MIB + 1))
            reply = answer(sock)
            assert isinstance(reply, ErrorReply)
            assert reply.reason == "InvalidMessage"
    assert good.allocations() == []
    good.detach()


def test_a_folder_has_one_server(service: Any) -> None:
    async def start_another() -> None:
        LeaseServer(service.folder, LeaseSessions(service.gms)).start()

    with pytest.raises(AlreadyExists):
        service.run(start_another())
    attach(service).detach()


def test_the_socket_of_a_dead_server_is_replaced(socket_dir: Path, launch: Any) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as dead:
        dead.bind(str(socket_dir / "gms.sock"))
    attach(launch()).detach()


def test_a_missing_server_is_named_by_its_path(socket_dir: Path) -> None:
    request = Attach(device="GPU-1", domain=MemoryDomain.WEIGHTS, lock=LockMode.RO, deadline_s=1.0)
    with pytest.raises(NotFound) as caught:
        Lease.attach(str(socket_dir), request)
    assert caught.value.values["path"] == str(socket_dir / "gms.sock")


def test_metadata_and_ids_that_are_not_allowed_change_nothing(service: Any) -> None:
    lease = attach(service)
    with pytest.raises(InvalidMessage):
        lease.allocate([AllocationSpec(id="../x y", size=1)])
    lease.allocate(specs(5))
    with pytest.raises(NotFound):
        lease.put_metadata([MetadataItem(key="k", allocation="none", offset=0, value=b"")])
    assert lease.metadata() == []
    lease.detach()


FRAMES = [
    encode_frame(frame)
    for frame in (
        AllocateMany(allocations=specs(5, 6)),
        ExportMany(ids=["a0"], access=Access.RW),
        FreeMany(ids=["a1"]),
        MetadataPut(entries=[MetadataItem(key="k", allocation="a0", offset=0, value=b"v")]),
        MetadataGet(),
        ListAllocations(),
        Commit(),
        Commit(hidden=True),
    )
]


@settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    sent=st.lists(
        st.one_of(
            st.sampled_from(FRAMES),
            st.binary(min_size=1, max_size=200),
            st.tuples(st.sampled_from(FRAMES), st.integers(0, 500), st.integers(0, 255)).map(
                lambda t: t[0][: t[1] % len(t[0])] + bytes([t[2]]) + t[0][t[1] % len(t[0]) + 1 :]
            ),
        ),
        max_size=8,
    )
)
def test_whatever_a_client_sends_every_frame_gets_an_answer_and_others_are_served(
    service: Any, sent: list[bytes]
) -> None:
    with raw(service) as sock:
        request = asking(service, domain=MemoryDomain.KV)
        assert isinstance(ask(sock, request), Attached)
        for data in sent:
            send(sock, data)
            assert answer(sock) is not None
    with raw(service) as sock:
        other = asking(service, device=service.uuids[1], domain=MemoryDomain.KV)
        assert isinstance(ask(sock, other), Attached)


def test_a_pinned_path_leads_to_the_socket_that_was_there_and_never_to_a_link(
    tmp_path: Path,
) -> None:
    with socket.socket(socket.AF_UNIX) as first, socket.socket(socket.AF_UNIX) as other:
        first.bind(str(tmp_path / "first"))
        first.listen()
        other.bind(str(tmp_path / "other"))
        other.listen()
        with pinned(tmp_path / "first") as short:
            (tmp_path / "first").unlink()
            (tmp_path / "first").symlink_to(tmp_path / "other")
            with socket.socket(socket.AF_UNIX) as client:
                client.connect(short)
                first.setblocking(False)
                first.accept()[0].close()
        with pytest.raises(OSError, match="socket"), pinned(tmp_path / "first"):
            pass
        (tmp_path / "plain").touch()
        with pytest.raises(OSError, match="socket"), pinned(tmp_path / "plain"):
            pass
        with pytest.raises(FileNotFoundError), pinned(tmp_path / "none"):
            pass


def test_a_client_that_comes_as_the_service_ends_is_hung_up_on(
    service: Any, tmp_path: Path
) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)

    async def come_and_end() -> None:
        lease = LeaseServer(tmp_path, LeaseSessions(service.gms))
        lease.start()
        lease.adopt(theirs)
        await lease.close()

    ours.settimeout(0)
    with ours, theirs:
        service.run(come_and_end())
        assert ours.recv(1) == b""
