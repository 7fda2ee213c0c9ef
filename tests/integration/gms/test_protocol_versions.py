"""Two versions of the lease socket and of calls meet: of older clients and of older services."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import msgspec
import pytest

from gms.adapters.admission import LeasePolicy
from gms.adapters.grpc_api import GrpcServer
from gms.adapters.grpc_client import GmsCaller
from snapback_client import frames
from snapback_client.lease import Lease
from snapback_client.wire import send
from snapshot_agent.adapters.gms_grpc import GmsClient
from snapshot_shared.codec import encode_msgpack
from snapshot_shared.errors import InvalidMessage, UnsupportedVersion
from snapshot_shared.frames import VERSION_HEADER, StatusRequest, WatchRequest, grpc_method
from tests.support.gms_rig import ATTACHED, asking, raw

RANGES: list[tuple[frames.Versions, frames.Versions, int | None]] = [
    ((1, 2), (1, 2), 2),
    ((1, 1), (1, 2), 1),
    ((1, 2), (1, 1), 1),
    ((2, 3), (1, 2), 2),
    ((3, 4), (1, 2), None),
    ((1, 1), (2, 2), None),
]
"""What a client speaks, what a service speaks, and what they use."""


@pytest.mark.parametrize(("ours", "theirs", "used"), RANGES)
def test_a_session_is_in_the_highest_version_that_both_sides_speak(
    launch: Callable[..., Any], ours: frames.Versions, theirs: frames.Versions, used: int | None
) -> None:
    service = launch(policy=LeasePolicy(versions=theirs))
    if used is None:
        with pytest.raises(UnsupportedVersion) as caught:
            Lease.attach(str(service.folder), asking(service), ours)
        assert caught.value.values == {"offered": list(ours), "supported": list(theirs)}
        for low, high in (ours, theirs):
            assert (f"{low} to {high}" if low != high else f" {low}") in caught.value.message
        return
    lease = Lease.attach(str(service.folder), asking(service), ours)
    assert lease.version == used
    lease.allocate([frames.AllocationSpec(id="w", size=5000)])
    assert [info.id for info in lease.allocations()] == ["w"]
    lease.commit(if_match=None)
    lease.detach()


def answer(sock: socket.socket, frame: bytes) -> Any:
    """Send a frame as a client of another build has it; return the answer, undecoded."""
    send(sock, frame)
    return msgspec.msgpack.decode(sock.recv(65536))


def test_a_client_that_offers_no_range_is_served_in_the_first_version(service: Any) -> None:
    with raw(service.folder) as sock:
        reply = answer(sock, frames.encode_frame(asking(service)))
        assert (reply["type"], reply["v"]) == ("attached", 1)
        assert answer(sock, frames.encode_frame(frames.Detach()))["v"] == 1


def test_a_frame_of_another_version_than_was_agreed_is_refused_and_the_session_goes_on(
    service: Any,
) -> None:
    with raw(service.folder) as sock:
        assert answer(sock, frames.encode_frame(asking(service, versions=(1, 2))))["v"] == 2
        refused = answer(sock, frames.encode_frame(frames.Detach(), 1))
        assert (refused["type"], refused["reason"]) == ("error", "UnsupportedVersion")
        assert answer(sock, frames.encode_frame(frames.Detach(), 2))["type"] == "done"


def test_an_answer_in_a_version_that_was_not_offered_is_refused() -> None:
    with pytest.raises(UnsupportedVersion, match="2, and here 1 is spoken"):
        frames.decode_reply(frames.encode_frame(ATTACHED, 2), (1, 1))


@contextlib.contextmanager
def speaking(service: Any, folder: Path, versions: frames.Versions) -> Iterator[None]:
    """Have a gRPC socket of the service in a folder of its own, which speaks some versions."""

    async def start() -> GrpcServer:
        server = GrpcServer(folder, service.control, service.transfers, service.telemetry, versions)
        await server.start()
        return server

    server = service.run(start())
    yield
    service.run(server.close())


async def status_of_tools(folder: Path, versions: frames.Versions) -> object:
    async with GmsCaller(folder, versions=versions) as caller:
        return (await caller.status(events=0)).devices


async def watch_of_tools(folder: Path, versions: frames.Versions) -> object:
    async with GmsCaller(folder, versions=versions) as caller:
        async for each in caller.watch(WatchRequest(status=True)):
            return each.status
    return None


async def status_of_agents(folder: Path, versions: frames.Versions) -> object:
    gms = GmsClient(folder, versions)
    try:
        return await gms.devices(wait_s=5.0)
    finally:
        await gms.close()


@pytest.mark.parametrize("call", [status_of_tools, watch_of_tools, status_of_agents])
@pytest.mark.parametrize(("ours", "theirs", "used"), RANGES)
def test_a_call_is_answered_in_the_highest_version_that_both_sides_speak(
    service: Any,
    tmp_path: Path,
    call: Callable[..., Any],
    ours: frames.Versions,
    theirs: frames.Versions,
    used: int | None,
) -> None:
    with speaking(service, tmp_path, theirs):
        if used is not None:
            assert asyncio.run(call(tmp_path, ours))
            return
        with pytest.raises(UnsupportedVersion) as caught:
            asyncio.run(call(tmp_path, ours))
        assert caught.value.values == {"offered": list(ours), "supported": list(theirs)}


def status_call(service: Any, offered: str) -> grpc.Call:
    """Ask for the status as a program that offers these versions, or none; return the call."""
    metadata = (("snapback-versions", offered),) if offered else ()
    with grpc.insecure_channel(f"unix:{service.folder}/gms-grpc.sock") as channel:
        method = channel.unary_unary(grpc_method("Status"))
        body = encode_msgpack(StatusRequest())
        return method.with_call(body, metadata=metadata, timeout=10)[1]


@pytest.mark.parametrize(("offered", "version"), [("", "1"), ("1-1", "1"), ("1-7", "2")])
def test_an_answer_names_its_version_also_to_those_who_offer_none(
    service: Any, offered: str, version: str
) -> None:
    call = status_call(service, offered)
    assert dict(call.initial_metadata())[VERSION_HEADER] == version


def old_service(folder: Path) -> Any:
    """A service of a build that knows of no versions: it answers, and names none."""

    async def answer(_body: bytes, _context: Any) -> bytes:
        return encode_msgpack({"node": "n1", "incarnation": "i", "devices": []})

    server = grpc.aio.server()
    method = grpc.unary_unary_rpc_method_handler(answer)
    service = grpc_method("Status").split("/")[1]
    handler = grpc.method_handlers_generic_handler(service, {"Status": method})
    server.add_generic_rpc_handlers((handler,))
    server.add_insecure_port(f"unix:{folder}/gms-grpc.sock")
    return server


async def test_a_service_that_names_no_version_speaks_the_first(tmp_path: Path) -> None:
    server = old_service(tmp_path)
    await server.start()
    try:
        assert await status_of_tools(tmp_path, (1, 2)) == []
        assert await status_of_agents(tmp_path, (1, 2)) == []
        for call in (status_of_tools, status_of_agents):
            with pytest.raises(UnsupportedVersion, match="1, and here 2 to 3 is spoken"):
                await call(tmp_path, (2, 3))
    finally:
        await server.stop(None)


def test_an_offer_that_is_no_range_is_refused(service: Any) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        status_call(service, "two")
    assert InvalidMessage.reason in str(caught.value.details())
