"""The lease socket: what a client sends costs only that client, and status tells of all."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import signal
import socket
import stat
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any, TypeVar

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gms.adapters.admission import LeasePolicy
from gms.adapters.lease_listener import LeaseListener
from gms.adapters.lease_socket import LeaseServer
from gms.domain.sessions import Peer, Session
from gms.domain.shares import TooManySessions
from gms.handlers.sessions import LeaseSessions
from snapback_client import frames
from snapback_client.lease import Lease
from snapback_client.wire import Inbox, close_all, pinned, send
from snapshot_shared import errors
from snapshot_shared.frames import (
    MAX_EVENTS,
    EventRecord,
    FenceRequest,
    StatusReply,
    StatusRequest,
    UnfenceRequest,
)
from tests.support.gms_rig import MIB, Other, asking, attach, committed, open_descriptors, raw
from tests.support.limits import no_descriptor_left
from tests.support.waiting import wait_until

T = TypeVar("T")


def specs(*sizes: int) -> list[frames.AllocationSpec]:
    return [frames.AllocationSpec(id=f"a{index}", size=size) for index, size in enumerate(sizes)]


def commit_one(service: Any) -> frames.GenerationRef:
    lease = attach(service)
    lease.allocate(specs(5))
    done = lease.commit(if_match=None)
    lease.detach()
    return frames.GenerationRef(incarnation=done.incarnation, generation=done.generation)


@pytest.fixture
def writer(service: Any) -> Iterator[Lease]:
    """A session that may write the weights of the first device."""
    lease = attach(service)
    yield lease
    lease.detach()


def answer(sock: socket.socket) -> frames.Reply | None:
    data, descriptors = Inbox().receive(sock)
    close_all(descriptors)
    return frames.decode_reply(data) if data else None


def put(sock: socket.socket, request: frames.Request, *files: IO[Any] | socket.socket) -> None:
    send(sock, frames.encode_frame(request), [file.fileno() for file in files])


def ask(sock: socket.socket, request: frames.Request) -> frames.Reply | None:
    put(sock, request)
    return answer(sock)


@contextlib.contextmanager
def session(service: Any, **fields: Any) -> Iterator[socket.socket]:
    """A client that has its lock."""
    with raw(service.folder) as sock:
        assert isinstance(ask(sock, asking(service, **fields)), frames.Attached)
        yield sock


def refusal(sock: socket.socket) -> frames.ErrorReply:
    reply = answer(sock)
    assert isinstance(reply, frames.ErrorReply)
    return reply


def waiting(service: Any) -> int:
    return len(service.device().domains[0].waiting)


@contextlib.contextmanager
def in_background(work: Callable[[], T]) -> Iterator[Callable[[], T]]:
    """Do something that blocks; what is given waits for its result."""
    with ThreadPoolExecutor(1) as pool:
        yield functools.partial(pool.submit(work).result, 20)


def test_what_was_granted_says_everything_a_client_needs(service: Any, writer: Lease) -> None:
    found = writer.attached
    info = service.devices[0].info
    assert (found.device, found.index, found.product) == (info.uuid, 0, info.product)
    assert (found.capacity, found.free) == (info.capacity, info.capacity)
    assert found.granularity == info.granularity
    assert found.incarnation == service.gms.incarnation
    assert (found.granted, found.generation, found.layout_id) == (frames.Access.RW, 0, "")


def test_three_thousand_allocations_and_exports_make_the_round_trip(launch: Any) -> None:
    service = launch(granularity=4096)
    lease = attach(service)
    many = [frames.AllocationSpec(id=f"model.layers.{n}.weight", size=n + 1) for n in range(3000)]
    made = lease.allocate(many)
    assert [(info.id, info.size, info.slot) for info in made] == [
        (spec.id, spec.size, slot) for slot, spec in enumerate(many)
    ]
    open_before = open_descriptors()
    exported = []
    for run in lease.export([spec.id for spec in many], frames.Access.RW):
        assert len(run) <= frames.DESCRIPTORS_PER_MESSAGE
        exported += [info for info, descriptor in run if os.fstat(descriptor).st_size == 4096]
    assert exported == made
    assert lease.allocations() == made
    lease.put_metadata(
        [frames.MetadataItem(key=s.id, allocation=s.id, offset=0, value=b"x" * 100) for s in many]
    )
    assert len(lease.metadata()) == 3000
    wait_until(lambda: open_descriptors() <= open_before)
    lease.detach()


def test_a_client_that_stops_in_the_middle_of_an_export_can_go_on(launch: Any) -> None:
    service = launch(granularity=4096)
    lease = attach(service)
    lease.allocate(specs(*[1] * 500))
    for _ in lease.export([f"a{n}" for n in range(500)], frames.Access.RO):
        break
    assert len(lease.allocations()) == 500
    lease.detach()


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
    with Other(code, lock) as worker:
        child = int(worker.said)
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
    for _ in reader.export(["a0"], frames.Access.RO):
        pass
    reader.close()
    writer = attach(service, if_match=first)
    writer.allocate(specs(5))
    writer.commit(if_match=first)
    writer.detach()
    status = service.device()
    assert (status.used, status.retired) == (4 * MIB, 2 * MIB)
    assert [session.state for session in status.domains[0].sessions] == ["lingering"]


def test_a_lock_that_is_not_granted_in_time_names_its_holder(service: Any) -> None:
    writer = attach(service, client="the-writer")
    with pytest.raises(errors.DeadlineExceeded) as caught:
        attach(service, deadline_s=0.05)
    assert caught.value.values["holders"] == [f"the-writer (pid {os.getpid()})"]
    assert waiting(service) == 0
    writer.detach()


def test_a_client_that_sends_ahead_and_dies_while_it_waits_is_let_go_at_once(service: Any) -> None:
    first = commit_one(service)
    reader = attach(service, "RO")
    ours, theirs = socket.socketpair()
    ours.settimeout(10)
    with raw(service.folder) as sock:
        put(sock, asking(service, deadline_s=600.0, if_match=first, replace=True))
        put(sock, frames.ListAllocations(), theirs)
        theirs.close()
        wait_until(lambda: waiting(service) == 1)
    wait_until(lambda: waiting(service) == 0)
    with ours:
        assert ours.recv(1) == b"", "the descriptor that it sent is still open"
    # The writer that would have replaced the layout keeps no reader out any more.
    attach(service, "RO").detach()
    reader.detach()


def test_the_wait_of_a_process_that_sent_its_own_socket_ahead_ends_with_it(
    service: Any, writer: Lease
) -> None:
    def wait() -> None:
        with raw(service.folder) as sock:
            put(sock, asking(service, deadline_s=600.0))
            put(sock, frames.ListAllocations(), sock)

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


def test_a_client_that_dies_with_a_frame_ahead_waits_for_memory_no_longer(service: Any) -> None:
    other = attach(service, domain=frames.MemoryDomain.KV)
    other.allocate(specs(40 * MIB))
    with session(service) as sock:
        put(sock, frames.AllocateMany(allocations=specs(40 * MIB), wait_s=600.0))
        put(sock, frames.ListAllocations())
    wait_until(lambda: service.device().domains[0].sessions == [])
    other.detach()
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
    service: Any, writer: Lease, data: bytes
) -> None:
    with raw(service.folder) as sock:
        send(sock, data)
        assert refusal(sock)
        assert answer(sock) is None
    assert writer.allocations() == []


def test_a_bad_later_frame_is_answered_and_the_session_goes_on(service: Any) -> None:
    with session(service) as sock:
        for bad in (b"\xc1", frames.encode_frame(asking(service)), b"\x00" * 200_000):
            send(sock, bad)
            assert refusal(sock).reason == "InvalidMessage"
        made = ask(sock, frames.AllocateMany(allocations=specs(5)))
        assert not isinstance(made, frames.ErrorReply)
        ask(sock, frames.Detach())
    assert service.device().used == 0


@pytest.mark.parametrize(
    ("count", "said"), [(100, "a request carries no descriptors"), (250, "descriptors")]
)
def test_descriptors_that_were_not_requested_are_closed(
    service: Any, count: int, said: str
) -> None:
    """A message may not carry so many as 250."""
    before = open_descriptors()
    with raw(service.folder) as sock, Path(os.devnull).open() as spare:
        put(sock, frames.Detach(), *[spare] * count)
        assert said in refusal(sock).message
    wait_until(lambda: open_descriptors() <= before)


def test_a_client_that_does_not_read_its_answers_is_dropped(launch: Any) -> None:
    service = launch(granularity=4096, policy=LeasePolicy(send_s=0.05))
    with session(service) as sock:
        ask(sock, frames.AllocateMany(allocations=specs(*[1] * 2000)))
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
    item = frames.MetadataItem(key="k", allocation="a0", offset=0, value=b"1")
    with session(service, domain=frames.MemoryDomain.KV) as sock:
        requests: list[frames.Request] = 5 * [
            frames.AllocateMany(allocations=specs(1, 1)),
            frames.MetadataPut(entries=[item]),
            frames.ListAllocations(),
            frames.MetadataGet(keys=["k"]),
            frames.ExportMany(ids=["a0"], access=frames.Access.RW),
            frames.FreeMany(ids=["missing"]),
            frames.FreeMany(ids=["a0", "a1"]),
            frames.ListAllocations(),
        ]
        for each in [*requests, frames.Detach()]:
            put(sock, each)
        kinds = [type(answer(sock)).__name__ for _ in requests]
        expected = "Allocated Done Allocations Metadata Exported ErrorReply Done Allocations"
        assert kinds == expected.split() * 5
        assert type(answer(sock)).__name__ == "Done"
        assert answer(sock) is None


def test_a_client_that_reads_late_gets_every_answer_whole(launch: Any) -> None:
    service = launch(granularity=4096)
    with session(service, domain=frames.MemoryDomain.KV) as sock:
        ask(sock, frames.AllocateMany(allocations=specs(*[1] * 2000)))
        asked = 100
        for _ in range(asked):
            put(sock, frames.ListAllocations())
        put(sock, frames.Detach())
        listed = [answer(sock) for _ in range(asked)]
        assert all(isinstance(each, frames.Allocations) for each in listed)
        assert [len(each.allocations) for each in listed] == [2000] * asked  # type: ignore[union-attr]


def test_the_loop_does_not_turn_for_a_frame_that_has_to_wait(service: Any) -> None:
    async def watched() -> int:
        return len(asyncio.get_running_loop()._selector.get_map())  # type: ignore[attr-defined]

    cache = attach(service, domain=frames.MemoryDomain.KV)
    cache.allocate(specs(60 * MIB))
    with session(service) as sock:
        assert isinstance(ask(sock, frames.ListAllocations()), frames.Allocations)
        before = service.run(watched())
        put(sock, frames.AllocateMany(allocations=specs(30 * MIB), wait_s=600.0))
        put(sock, frames.ListAllocations())
        wait_until(lambda: service.run(watched()) < before)
        cache.detach()
        assert not isinstance(answer(sock), frames.ErrorReply)
        assert isinstance(answer(sock), frames.Allocations)


def test_a_session_outlives_an_allocation_for_which_no_descriptor_is_left(writer: Lease) -> None:
    with no_descriptor_left(), pytest.raises(errors.DeviceError) as refused:
        writer.allocate(specs(5))
    assert refused.value.reason == "DeviceError"
    writer.allocate(specs(5))


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


@pytest.mark.parametrize(("group", "mode"), [(None, 0o600), (os.getgid(), 0o660)])
def test_only_the_lease_socket_is_opened_to_a_shared_group(
    launch: Any, group: int | None, mode: int
) -> None:
    service = launch(policy=LeasePolicy(group=group))
    found = [(service.folder / name).stat() for name in ("gms.sock", "gms-grpc.sock")]
    assert [each.st_mode for each in found] == [stat.S_IFSOCK | mode, stat.S_IFSOCK | 0o600]
    assert group in (None, found[0].st_gid)


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


def as_user(uid: int, groups: list[int], work: Callable[[], int]) -> int:
    """Do something in a process of another user, whose exit status is the answer."""

    def as_that_user() -> int:
        os.setgroups(groups)
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
        return work()

    return in_child(as_that_user)


def attached(service: Any, **fields: Any) -> int:
    """Attach, and detach; the status is 0, 13 for who may not, or 7 for one too many."""
    try:
        attach(service, **fields).detach()
    except errors.Forbidden:
        return 13
    except TooManySessions:
        return 7
    return 0


@pytest.mark.root
@pytest.mark.parametrize(("group", "by_group"), [(None, 13), (61_000, 0)])
def test_another_user_gets_in_only_by_the_shared_group(
    launch: Any, group: int | None, by_group: int
) -> None:
    service = launch(policy=LeasePolicy(group=group))
    service.folder.chmod(0o711)
    (service.folder / "gms.sock").chmod(0o666)
    connect = functools.partial(attached, service)
    assert as_user(65_534, [], connect) == 13
    assert as_user(65_534, [61_001], connect) == 13
    assert as_user(65_534, [61_000], connect) == by_group
    assert as_user(61_000, [], connect) == by_group


def test_a_flood_of_connections_leaves_those_that_are_served_alone(launch: Any) -> None:
    service = launch(policy=LeasePolicy(max_connections=32, max_of_user=24, handshake_s=30.0))
    good = attach(service)
    before = open_descriptors()
    with contextlib.ExitStack() as held:
        for _ in range(23):
            held.enter_context(raw(service.folder))
        for number in range(23, 2_000):
            with raw(service.folder) as sock:
                if number % 100 == 0:
                    reply = refusal(sock)
                    assert (reply.reason, reply.retryable) == ("TooManySessions", True)
        assert good.allocations() == []
    wait_until(lambda: open_descriptors() <= before)
    good.detach()
    attach(service).detach()


def test_sessions_that_may_still_have_memory_mapped_count_for_their_user(launch: Any) -> None:
    service = launch(policy=LeasePolicy(max_of_user=3))
    commit_one(service)
    for _ in range(3):
        lease = attach(service, "RO")
        for run in lease.export(["a0"], frames.Access.RO):
            assert len(run) == 1
        lease.close()
    with pytest.raises(errors.SnapbackError) as caught:
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
    held = [attach(service, domain=domain) for domain in frames.MemoryDomain]
    with pytest.raises(TooManySessions):
        attach(service, device=service.uuids[1])
    connect = functools.partial(attached, service, device=service.uuids[1])
    assert in_child(lambda: in_child(connect)) == for_another
    # Transfers are children of the service.
    assert in_child(connect) == 0
    for lease in held:
        lease.detach()


def test_a_client_that_keeps_frames_queued_lets_the_loop_turn_between_any_two(
    launch: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = launch(policy=LeasePolicy(turn_s=0.0))
    answered: list[frames.Request] = []
    is_queued = threading.Event()
    call = LeaseSessions.call

    def counted(self: LeaseSessions, session: Session, request: frames.Request) -> Any:
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
        clients = [
            stack.enter_context(session(service, domain=each)) for each in frames.MemoryDomain
        ]
        with in_background(lambda: service.run(turns_until_all_are_answered())) as turns:
            for sock in clients:
                for _ in range(50):
                    put(sock, frames.FreeMany(ids=["missing"]))
            is_queued.set()
            assert turns() >= 99


def test_a_client_that_is_silent_or_stops_in_the_middle_has_two_seconds(service: Any) -> None:
    begun = time.monotonic()
    cut = frames.encode_frame(asking(service, "RO", domain=frames.MemoryDomain.KV, deadline_s=9.0))[
        :-5
    ]
    with raw(service.folder) as silent, raw(service.folder) as halved:
        send(halved, cut)
        assert refusal(halved).reason == "InvalidMessage"
        assert answer(halved) is None
        reply = refusal(silent)
        assert reply.reason == "DeadlineExceeded"
        assert reply.values == {"step": "handshake", "budget_s": 2.0}
    assert 1.9 <= time.monotonic() - begun < 5.0


def test_a_frame_over_the_limit_ends_the_connection_and_costs_no_memory(
    service: Any, writer: Lease
) -> None:
    with raw(service.folder) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8 * MIB)
        with contextlib.suppress(OSError):
            send(sock, b"x" * (MIB + 1))
            assert refusal(sock).reason == "InvalidMessage"
    assert writer.allocations() == []


def test_a_folder_has_one_server(service: Any) -> None:
    async def start_another() -> None:
        LeaseServer(service.folder, LeaseSessions(service.gms)).start()

    with pytest.raises(errors.AlreadyExists):
        service.run(start_another())
    attach(service).detach()


def test_metadata_and_ids_that_are_not_allowed_change_nothing(writer: Lease) -> None:
    with pytest.raises(errors.InvalidMessage):
        writer.allocate([frames.AllocationSpec(id="../x y", size=1)])
    writer.allocate(specs(5))
    with pytest.raises(errors.NotFound):
        writer.put_metadata([frames.MetadataItem(key="k", allocation="none", offset=0, value=b"")])
    assert writer.metadata() == []


FRAMES = [
    frames.encode_frame(frame)
    for frame in (
        frames.AllocateMany(allocations=specs(5, 6)),
        frames.ExportMany(ids=["a0"], access=frames.Access.RW),
        frames.FreeMany(ids=["a1"]),
        frames.MetadataPut(
            entries=[frames.MetadataItem(key="k", allocation="a0", offset=0, value=b"v")]
        ),
        frames.MetadataGet(),
        frames.ListAllocations(),
        frames.Commit(),
        frames.Commit(hidden=True),
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
    with session(service, domain=frames.MemoryDomain.KV) as sock:
        for data in sent:
            send(sock, data)
            assert answer(sock) is not None
    with session(service, device=service.uuids[1], domain=frames.MemoryDomain.KV):
        pass


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


# Attaches as a writer, maps what it allocates, hangs up without a word and lives on.
VANISHES = """
    import os, sys
    from snapback_client.lease import Lease
    from snapback_client.frames import Access, AllocationSpec, Attach, LockMode, MemoryDomain
    lease = Lease.attach(os.environ["GMS_SOCKET_DIR"], Attach(
        device=sys.argv[1], domain=MemoryDomain.WEIGHTS, lock=LockMode.RW, deadline_s=5,
        client="careless"))
    lease.allocate([AllocationSpec(id="w", size=5)])
    for run in lease.export(["w"], Access.RW):
        kept = [os.dup(fd) for _, fd in run]
    lease.close()
    print("hung up", flush=True)
    sys.stdin.read()
"""


def status(service: Any) -> StatusReply:
    return service.run(service.control.status(StatusRequest(events=MAX_EVENTS)))


def events(service: Any) -> list[EventRecord]:
    found = status(service).events
    assert isinstance(found, list)
    return found


def reasons(service: Any) -> list[tuple[str, str]]:
    return [(event.kind.value, event.reason) for event in events(service)]


def test_status_shows_what_happened_in_order_and_when(service: Any) -> None:
    committed(size=1000, name="worker").close()
    request = FenceRequest(token="f", devices=service.uuids[:1], wait_s=5, deadline_s=60)
    service.run(service.control.fence(request))
    service.run(service.control.unfence(UnfenceRequest(token="f")))
    assert reasons(service) == [
        ("attach", "RW"),
        ("grant", "RW"),
        ("commit", ""),
        ("detach", ""),
        ("fence", "asked"),
        ("fence", "held"),
        ("fence", "ended"),
    ]
    found = events(service)
    assert [event.seq for event in found] == list(range(1, 8))
    times = [event.at_s for event in found]
    assert times == sorted(times)
    now = status(service).now_s
    assert isinstance(now, float)
    assert times[-1] <= now
    commit = found[2]
    assert (commit.client, commit.generation, commit.bytes) == ("worker", 1, 1000)
    assert {event.device for event in found} == {service.uuids[0]}


def test_a_refusal_is_in_the_history_with_its_reason(service: Any) -> None:
    with committed(), pytest.raises(errors.GenerationMismatch):
        attach(service)
    assert ("refusal", "GenerationMismatch") in reasons(service)


def test_a_writer_waits_until_one_that_hung_up_is_dead_and_status_says_so(service: Any) -> None:
    with Other(textwrap.dedent(VANISHES), service.uuids[0]) as careless:
        assert careless.said == "hung up"
        with pytest.raises(errors.DeadlineExceeded, match=r"careless.*which hung up and lives"):
            attach(service, deadline_s=0.2)
        (session,) = service.device().domains[0].sessions
        assert (session.client, session.state) == ("careless", "lingering")
        assert session.fence == "pidfd"
        careless.end()
        attach(service, deadline_s=20.0).detach()
    assert ("death", "lingering") in reasons(service)
    assert ("death", "process-ended") in reasons(service)
    assert service.device().used == 0


def test_status_says_what_each_waiting_client_waits_for(service: Any) -> None:
    writer = attach(service, client="first")

    async def waiting() -> list[Any]:
        found = await service.control.status(StatusRequest())
        return [each.why for each in found.devices[0].domains[0].waiting]

    async def both() -> list[Any]:
        requests = [asking(service, lock, deadline_s=0.2) for lock in ("RO", "RW")]
        asked = [
            asyncio.create_task(service.gms.attach(request, Peer(pid=1, uid=0)))
            for request in requests
        ]
        await asyncio.wait(asked, timeout=0.05)
        found = await waiting()
        await asyncio.gather(*asked, return_exceptions=True)
        return found

    reader, second = service.run(both())
    assert reader == "a commit"
    assert second.startswith("first (pid ")
    assert service.run(waiting()) == []
    writer.detach()
