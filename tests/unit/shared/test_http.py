from __future__ import annotations

import asyncio
import contextlib
import functools
import socket
from collections.abc import AsyncIterator

import aiohttp
import pytest
from aiohttp import web

from snapshot_shared.errors import AddressInUse, InvalidInput
from snapshot_shared.http import Guests, http_port, parse_address
from tests.unit.tables import each

served = functools.partial(http_port, "127.0.0.1:0")


async def fetch(port: int | None, path: str) -> tuple[int, str]:
    async with (
        aiohttp.ClientSession() as session,
        session.get(f"http://127.0.0.1:{port}{path}") as answer,
    ):
        return answer.status, await answer.text()


@contextlib.asynccontextmanager
async def connected(
    port: int | None, number: int = 1
) -> AsyncIterator[list[tuple[asyncio.StreamReader, asyncio.StreamWriter]]]:
    """Open connections, one after the other."""
    found = [await asyncio.open_connection("127.0.0.1", port) for _ in range(number)]
    try:
        yield found
    finally:
        for _, writer in found:
            writer.close()
            # The service may have ended it.
            with contextlib.suppress(OSError):
                await writer.wait_closed()


async def test_health_is_ok_while_readiness_says_what_is_missing() -> None:
    missing = ["not connected to NATS"]
    async with served(lambda: "; ".join(missing)) as port:
        assert await fetch(port, "/healthz") == (200, "ok\n")
        assert await fetch(port, "/readyz") == (503, "not connected to NATS\n")
        missing.clear()
        assert await fetch(port, "/readyz") == (200, "ok\n")


@pytest.mark.parametrize("begun", [b"", b"GET /healthz HTT"])
async def test_who_asks_for_nothing_is_let_go(begun: bytes) -> None:
    guests = Guests(head_s=0.1)
    async with served(str, guests=guests) as port, connected(port) as [(reader, writer)]:
        writer.write(begun)
        assert await ended(reader)


async def ended(reader: asyncio.StreamReader) -> bool:
    """Wait for the end of a connection; return whether nothing was answered."""
    try:
        return await asyncio.wait_for(reader.read(), 10) == b""
    except ConnectionResetError:
        return True


async def test_who_has_been_answered_and_asks_for_nothing_more_is_let_go() -> None:
    async with served(str, patience_s=0.1) as port, connected(port) as [(reader, writer)]:
        writer.write(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert (await asyncio.wait_for(reader.read(), 10)).endswith(b"ok\n")


LAST = b"GET /healthz HTTP/1.0\r\n\r\n"


@pytest.mark.parametrize("guests", [Guests(most=2), Guests(of_peer=2)])
async def test_the_oldest_connection_gives_way_to_one_too_many(guests: Guests) -> None:
    async with (
        served(str, guests=guests) as port,
        connected(port, 2) as [(first, _), (second, writer)],
    ):
        assert await fetch(port, "/healthz") == (200, "ok\n")
        assert await ended(first)
        writer.write(LAST)
        assert (await asyncio.wait_for(second.read(), 10)).endswith(b"ok\n")


async def test_a_connection_that_has_proven_who_it_is_gives_way_to_no_other() -> None:
    guests = Guests(most=2, of_peer=2)

    async def prove(request: web.Request) -> web.Response:
        guests.trust(request.transport)
        return web.Response(text="trusted\n")

    async with (
        served(str, [web.get("/prove", prove)], guests=guests) as port,
        connected(port) as [(reader, writer)],
    ):
        writer.write(b"GET /prove HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert b"200 OK" in await reader.readuntil(b"trusted\n")
        async with connected(port, 9):
            assert await fetch(port, "/healthz") == (200, "ok\n")
            writer.write(LAST)
            assert (await asyncio.wait_for(reader.read(), 10)).endswith(b"ok\n")


async def test_without_an_address_nothing_listens() -> None:
    async with http_port(None, str) as port:
        assert port is None


async def test_a_port_that_is_taken_is_refused_with_what_to_do() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(AddressInUse, match=address) as caught:
            async with http_port(address, str):
                pass
    assert "SNAPBACK_HTTP_ADDRESS" in caught.value.next_step


@pytest.mark.parametrize(
    ("address", "parsed"),
    [("127.0.0.1:80", ("127.0.0.1", 80)), ("[::]:9090", ("::", 9090)), ("node:0", ("node", 0))],
)
def test_addresses_are_host_and_port(address: str, parsed: tuple[str, int]) -> None:
    assert parse_address(address) == parsed


@each("address", ["", "9090", ":9090", "node:", "node:70000", "node:٣"])
def test_what_is_no_address_is_refused_with_an_example(address: str) -> None:
    with pytest.raises(InvalidInput, match="is not host:port") as caught:
        parse_address(address)
    assert "127.0.0.1:9090" in caught.value.next_step
