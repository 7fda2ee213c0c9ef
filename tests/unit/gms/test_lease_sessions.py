"""What the lease socket is answered: in pieces, so that others have their turn between them."""

from __future__ import annotations

import fcntl
import gc
import itertools
import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import gms.handlers.sessions as answers
from gms.adapters.simulated import SimulatedDevice
from gms.domain.layout import PIECE
from gms.domain.locks import Lock
from gms.domain.sessions import Peer, Session
from gms.handlers.memory_server import MemoryServer
from gms.handlers.sessions import LeaseSessions
from gms.ports import DeviceInfo
from snapback_client.frames import (
    MAX_ALLOCATIONS,
    MAX_BATCH,
    MESSAGE_BUDGET,
    Access,
    AllocationSpec,
    Attach,
    Commit,
    ExportMany,
    GenerationRef,
    ListAllocations,
    LockMode,
    MemoryDomain,
    MetadataGet,
    MetadataItem,
    Request,
)
from snapshot_shared.errors import GenerationMismatch

MANY = MAX_BATCH


@pytest.fixture
def device() -> Iterator[SimulatedDevice]:
    device = SimulatedDevice(node="n1", index=0, capacity=2**26, granularity=4096)
    yield device
    device.close()


async def full(device: SimulatedDevice) -> tuple[LeaseSessions, Session]:
    """A session whose layout has many allocations, and as many entries of metadata."""
    gms = MemoryServer(node="n1", incarnation="inc", devices=[device])
    attach = Attach(
        device=device.info.uuid, domain=MemoryDomain.WEIGHTS, lock=LockMode.RW, deadline_s=5.0
    )
    session = await gms.attach(attach, Peer(pid=1, uid=0))
    ids = [f"a{number}" for number in range(MANY)]
    await gms.allocate(session, [AllocationSpec(id=each, size=1) for each in ids], wait_s=0.0)
    entries = [MetadataItem(key=each, allocation=each, offset=0, value=b"") for each in ids]
    gms.table.put_metadata(session, entries)
    return LeaseSessions(gms), session


@pytest.mark.parametrize(
    ("request_", "cost"),
    [
        (MetadataGet(), "cost_of_metadata"),
        (ListAllocations(), "cost_of_allocation"),
        (
            ExportMany(ids=[f"a{n}" for n in range(1000)], access=Access.RO),
            "cost_of_allocation",
        ),
    ],
)
async def test_an_answer_stops_for_others_before_each_message(
    device: SimulatedDevice, monkeypatch: pytest.MonkeyPatch, request_: Request, cost: str
) -> None:
    sessions, session = await full(device)
    costs: list[Any] = []
    known: Callable[[Any], int] = getattr(answers, cost)

    def counted(entry: Any) -> int:
        costs.append(entry)
        return known(entry)

    monkeypatch.setattr(answers, cost, counted)
    messages, since = 0, 0
    for message in sessions.call(session, request_):
        assert len(costs) <= MESSAGE_BUDGET // 40, "much was done in one piece"
        if message is None:
            since = 0
            costs.clear()
            continue
        message.close()
        messages += 1
        since += 1
        assert since == 1, "two messages came in one piece"
    assert messages > 1


class OneFile:
    """The `Device` port with one descriptor for all allocations, of which there may be many."""

    def __init__(self) -> None:
        self.info = DeviceInfo(
            kind="simulated", uuid="GPU-1", index=0, product="p", capacity=2**40, granularity=4096
        )
        self.used = 0
        self.sealed = 0
        self._file = os.memfd_create("one", os.MFD_ALLOW_SEALING)
        self._handles = itertools.count()

    def free(self) -> int:
        return self.info.capacity - self.used

    def holders(self) -> dict[str, int]:
        return {}

    def create(self, size: int) -> int:
        self.used += size
        return next(self._handles)

    def export(self, handle: int, access: Access) -> int:
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
    device = OneFile()
    yield device
    device.close()


@pytest.fixture
def server(one_file: OneFile) -> MemoryServer:
    return MemoryServer(node="n1", incarnation="inc", devices=[one_file])


async def largest(gms: MemoryServer) -> Session:
    """A session that has written as large a layout as there may be."""
    attach = Attach(device="GPU-1", domain=MemoryDomain.WEIGHTS, lock=LockMode.RW, deadline_s=5.0)
    session = await gms.attach(attach, Peer(pid=1, uid=0))
    for first in range(0, MAX_ALLOCATIONS, MAX_BATCH):
        ids = [f"a{number:05}" for number in range(first, first + MAX_BATCH)]
        await gms.allocate(session, [AllocationSpec(id=each, size=1) for each in ids], wait_s=0.0)
        items = [MetadataItem(key=each, allocation=each, offset=0, value=b"") for each in ids]
        gms.table.put_metadata(session, items)
    return session


def longest_pause(sessions: LeaseSessions, session: Session, request: Request) -> float:
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
        session = await largest(server)
        pauses.append(longest_pause(LeaseSessions(server), session, Commit()))
        server.end(session, unmapped=True)
        server.drop_layout("GPU-1", None)
    assert min(pauses) < 0.005, pauses


async def test_a_layout_is_published_only_when_all_of_it_is_sealed(
    server: MemoryServer, one_file: OneFile
) -> None:
    session = await largest(server)
    for message in LeaseSessions(server).call(session, Commit()):
        weights = server.table.device("GPU-1").weights
        assert (weights.committed is not None) == (message is not None)
        assert message is None or one_file.sealed == MAX_ALLOCATIONS


async def test_a_client_that_hangs_up_during_its_commit_commits_nothing(
    server: MemoryServer,
) -> None:
    session = await largest(server)
    answer = LeaseSessions(server).call(session, Commit())
    for _ in range(MAX_ALLOCATIONS // PIECE):
        assert next(answer) is None
    answer.close()
    assert not server.end(session, unmapped=False)
    weights = server.table.device("GPU-1").weights
    assert (weights.committed, weights.lock) == (None, Lock.EMPTY)


async def test_a_commit_of_a_replaced_generation_is_refused_at_once(
    server: MemoryServer, one_file: OneFile
) -> None:
    session = await largest(server)
    other = GenerationRef(incarnation="another", generation=1)
    with pytest.raises(GenerationMismatch):
        next(LeaseSessions(server).call(session, Commit(if_match=other)))
    assert one_file.sealed == 0
