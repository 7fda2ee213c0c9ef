"""What the service reports of its past, of its queue, and of writers that vanished."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from typing import Any

import pytest

import snapback_client as client
from snapback_client.frames import AllocationSpec, Attach, LockMode, MemoryDomain, MetadataItem
from snapshot_shared.errors import DeadlineExceeded, GenerationMismatch
from snapshot_shared.frames import (
    MAX_EVENTS,
    EventRecord,
    FenceRequest,
    StatusReply,
    StatusRequest,
    UnfenceRequest,
)
from tests.support.gms_rig import attach

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


def status(service: Any, events: int = MAX_EVENTS) -> StatusReply:
    return service.run(service.control.status(StatusRequest(events=events)))


def events(service: Any) -> list[EventRecord]:
    found = status(service).events
    assert isinstance(found, list)
    return found


def reasons(service: Any) -> list[tuple[str, str]]:
    return [(event.kind.value, event.reason) for event in events(service)]


def test_status_shows_what_happened_in_order_and_when(service: Any) -> None:
    with client.connect(lock="RW", name="worker") as pool:
        pool.allocate("w", 1000, "u1")
        pool.commit()
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


def test_the_history_is_bounded_and_says_only_as_much_as_was_asked_for(service: Any) -> None:
    for _ in range(MAX_EVENTS // 3 + 5):
        attach(service).detach()
    found = events(service)
    assert len(found) == MAX_EVENTS
    assert [event.seq for event in found] == list(range(found[0].seq, found[0].seq + MAX_EVENTS))
    assert status(service, 2).events == found[-2:]
    assert status(service, 0).events == []


def test_a_refusal_is_in_the_history_with_its_reason(service: Any) -> None:
    with client.connect(lock="RW") as pool:
        pool.allocate("w", 10, "u1")
        pool.commit()
        with pytest.raises(GenerationMismatch):
            attach(service)
    assert ("refusal", "GenerationMismatch") in reasons(service)


def test_metadata_is_listed_by_prefix(service: Any) -> None:
    lease = attach(service)
    lease.allocate([AllocationSpec(id="w", size=5)])
    keys = ["layer.1.bias", "layer.1.weight", "layer.10.weight", "other"]
    lease.put_metadata([MetadataItem(key=key, allocation="w", offset=0, value=b"") for key in keys])
    assert [item.key for item in lease.metadata("layer.1.")] == keys[:2]
    assert [item.key for item in lease.metadata("layer")] == keys[:3]
    assert [item.key for item in lease.metadata()] == keys
    assert lease.metadata("nothing") == []
    lease.detach()


def test_a_writer_waits_until_one_that_hung_up_is_dead_and_status_says_so(service: Any) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(VANISHES), service.uuids[0]],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as careless:
        assert careless.stdout is not None
        assert careless.stdin is not None
        assert careless.stdout.readline() == b"hung up\n"
        with pytest.raises(DeadlineExceeded, match=r"careless.*which hung up and lives"):
            attach(service, deadline_s=0.2)
        (session,) = service.device().domains[0].sessions
        assert (session.client, session.state) == ("careless", "lingering")
        assert session.fence == "pidfd"
        careless.stdin.close()
        attach(service, deadline_s=20.0).detach()
    assert ("death", "lingering") in reasons(service)
    assert ("death", "process-ended") in reasons(service)
    assert service.device().used == 0


def test_status_says_what_each_waiting_client_waits_for(service: Any) -> None:
    writer = attach(service, client="first")
    with client.connect(lock="RW", domain="kv"):
        pass

    def waiting() -> list[Any]:
        return [each.why for each in service.device().domains[0].waiting]

    async def ask(lock: str) -> Any:
        from gms.domain.sessions import Peer

        request = Attach(
            device=service.uuids[0],
            domain=MemoryDomain.WEIGHTS,
            lock=LockMode(lock),
            deadline_s=0.2,
        )
        return await service.gms.attach(request, Peer(pid=1, uid=0))

    async def both() -> list[Any]:
        import asyncio

        asked = [asyncio.create_task(ask("RO")), asyncio.create_task(ask("RW"))]
        await asyncio.wait(asked, timeout=0.05)
        found = await service.control.status(StatusRequest())
        await asyncio.gather(*asked, return_exceptions=True)
        return [each.why for each in found.devices[0].domains[0].waiting]

    reader, second = service.run(both())
    assert reader == "a commit"
    assert second.startswith("first (pid ")
    assert waiting() == []
    writer.detach()
