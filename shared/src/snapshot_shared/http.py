"""The HTTP port of a service, for people and their tools: health, and what else it is given.

There is one only where `SNAPBACK_HTTP_ADDRESS` is set. No part of the product calls another over
HTTP, and nothing that is served here changes anything.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Iterable
from typing import TYPE_CHECKING

from snapshot_shared.errors import AddressInUse, InvalidInput

if TYPE_CHECKING:
    import ssl

    from aiohttp import web

log = logging.getLogger(__name__)

CLOSE_S = 1.0
"""How long open answers may hold up the end, in seconds."""

MAX_CONNECTIONS = 256
"""How many connections there are at a time; one more is closed at once."""
PATIENCE_S = 10.0
"""How long a connection may wait for the whole head of a request, in seconds."""

NotReady = Callable[[], str]
"""Says why the service cannot do its work, in words; empty when it can."""


@contextlib.asynccontextmanager
async def http_port(
    address: str | None,
    not_ready: NotReady,
    routes: Iterable[web.AbstractRouteDef] = (),
    *,
    most: int = MAX_CONNECTIONS,
    patience_s: float = PATIENCE_S,
) -> AsyncIterator[int | None]:
    """Serve `/healthz`, `/readyz` and `routes` on `host:port` for the length of the block.

    `/healthz` answers 200 while the process turns, `/readyz` 503 and why while `not_ready` says
    so. Gives the port, which the system chooses where the address has 0, or None where there is
    no address. At most `most` connections are kept, and none for longer than `patience_s` that
    asks for nothing. InvalidInput for an address that is none, AddressInUse when it cannot be had.
    """
    if address is None:
        yield None
        return
    from aiohttp import web  # noqa: PLC0415 - costs start-up time and memory

    async def alive(_request: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def ready(_request: web.Request) -> web.Response:
        reason = not_ready()
        return web.Response(text=f"{reason or 'ok'}\n", status=503 if reason else 200)

    app = web.Application()
    app.add_routes([web.get("/healthz", alive), web.get("/readyz", ready), *routes])
    runner = web.AppRunner(
        app, access_log=None, shutdown_timeout=CLOSE_S, keepalive_timeout=patience_s
    )
    await runner.setup()
    try:
        listening = await listen(runner, address, most=most)
        try:
            number: int = listening.sockets[0].getsockname()[1]
            log.info("HTTP on %s port %d", parse_address(address)[0], number)
            yield number
        finally:
            listening.close()
    finally:
        await runner.cleanup()


async def listen(
    runner: web.AppRunner,
    address: str,
    *,
    variable: str = "SNAPBACK_HTTP_ADDRESS",
    most: int = MAX_CONNECTIONS,
    context: ssl.SSLContext | None = None,
) -> asyncio.Server:
    """Listen on the address that a setting gives, over TLS where there is a context for it.

    InvalidInput for an address that is none, AddressInUse when it cannot be had.
    """
    host, port = parse_address(address, variable)
    server = runner.server
    assert server is not None  # noqa: S101 - the runner is set up

    def connected() -> asyncio.Protocol:
        return server() if len(server.connections) < most else _Refused()

    try:
        return await asyncio.get_running_loop().create_server(connected, host, port, ssl=context)
    except OSError as error:
        raise AddressInUse(
            f"cannot listen on {host}:{port}: {error.strerror or error}",
            next_step=f"set {variable} to a free address, or unset it",
        ) from error


class _Refused(asyncio.Protocol):
    """A connection too many."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport.close()


def parse_address(address: str, variable: str = "SNAPBACK_HTTP_ADDRESS") -> tuple[str, int]:
    """Take `host:port` apart; IPv6 hosts stand in brackets. InvalidInput names the setting."""
    host, _, port = address.rpartition(":")
    if not host or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise InvalidInput(
            f"{variable}={address!r} is not host:port",
            next_step="write for example 127.0.0.1:9090, or [::]:9090",
        )
    return host.removeprefix("[").removesuffix("]"), int(port)
