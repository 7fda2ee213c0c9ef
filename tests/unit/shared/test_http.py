from __future__ import annotations

import socket

import aiohttp
import pytest

from snapshot_shared.errors import AddressInUse, InvalidInput
from snapshot_shared.http import http_port, parse_address


async def fetch(port: int | None, path: str) -> tuple[int, str]:
    async with (
        aiohttp.ClientSession() as session,
        session.get(f"http://127.0.0.1:{port}{path}") as answer,
    ):
        return answer.status, await answer.text()


async def test_health_is_ok_while_readiness_says_what_is_missing() -> None:
    missing = ["not connected to NATS"]
    async with http_port("127.0.0.1:0", lambda: "; ".join(missing)) as port:
        assert await fetch(port, "/healthz") == (200, "ok\n")
        assert await fetch(port, "/readyz") == (503, "not connected to NATS\n")
        missing.clear()
        assert await fetch(port, "/readyz") == (200, "ok\n")


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


@pytest.mark.parametrize("address", ["", "9090", ":9090", "node:", "node:70000", "node:٣"])
def test_what_is_no_address_is_refused_with_an_example(address: str) -> None:
    with pytest.raises(InvalidInput, match="is not host:port") as caught:
        parse_address(address)
    assert "127.0.0.1:9090" in caught.value.next_step
