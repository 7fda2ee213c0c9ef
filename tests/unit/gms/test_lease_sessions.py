"""What the lease socket is answered: in pieces, so that others have their turn between them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

import gms.handlers.sessions as answers
from gms.adapters.simulated import SimulatedDevice
from gms.domain.sessions import Peer, Session
from gms.handlers.memory_server import MemoryServer
from gms.handlers.sessions import LeaseSessions
from snapback_client.frames import (
    MAX_BATCH,
    MESSAGE_BUDGET,
    Access,
    AllocationSpec,
    Attach,
    ExportMany,
    ListAllocations,
    LockMode,
    MemoryDomain,
    MetadataGet,
    MetadataItem,
    Request,
)

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
