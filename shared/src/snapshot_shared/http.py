"""The HTTP ports of a service: one for people and their tools, and one for its kubelet.

There is one at `SNAPBACK_HTTP_ADDRESS` and one at `SNAPBACK_HEALTH_ADDRESS`, if these are set. No
part of the product calls another over HTTP, and nothing that is served here changes anything.

The kubelet ends a service that does not answer, so it has a port that a NetworkPolicy can close to
everybody else: a kubelet always reaches the pods of its node. Without such a policy any pod of a
cluster may reach a port, and a service must answer its kubelet and its API server all
the same. So a new connection is never refused. If there are too many, the oldest gives way that is
not trusted: of the same peer if the peer has too many, else of all. A flood of connections ends
itself, and a probe that is answered within milliseconds meets none of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from typing import TYPE_CHECKING

from snapshot_shared.errors import AddressInUse, InvalidInput
from snapshot_shared.settings import Common

if TYPE_CHECKING:
    import ssl

    from aiohttp import web

log = logging.getLogger(__name__)

CLOSE_S = 1.0
"""How long open answers may hold up the end, in seconds."""

MAX_CONNECTIONS = 256
"""How many connections there are at a time."""
MAX_OF_PEER = 32
"""How many connections one address may have that are not trusted."""
HEAD_S = 2.0
"""How long a handshake of TLS may take, and then the whole head of a request, in seconds."""
PATIENCE_S = 10.0
"""How long a connection is kept that was answered and asks for nothing more, in seconds."""

NotReady = Callable[[], str]
"""Says why the service cannot do its work, in words; empty when it can."""


class _Guest:
    """What is known of one connection."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self.transport = transport
        self.peer = str((transport.get_extra_info("peername") or ("",))[0])
        self.has_asked = False
        self.is_trusted = False


class Guests:
    """The connections of one listener."""

    def __init__(
        self, most: int = MAX_CONNECTIONS, of_peer: int = MAX_OF_PEER, head_s: float = HEAD_S
    ) -> None:
        """Keep at most `most`, `of_peer` from one address. Each asks within `head_s` seconds."""
        self._most = most
        self._of_peer = of_peer
        self._head_s = head_s
        self._guests: list[_Guest] = []
        """The oldest first."""

    def admit(self, transport: asyncio.Transport) -> None:
        """Take in a new connection, for which an older one goes if there are too many.

        A connection counts before its handshake of TLS: if the handshake never ends, the connection
        costs as much memory as any other.
        """
        guest = _Guest(transport)
        there = [each for each in self._guests if not each.transport.is_closing()]
        strangers = [each for each in there if not each.is_trusted]
        of_peer = [each for each in strangers if each.peer == guest.peer]
        if len(of_peer) >= self._of_peer:
            of_peer[0].transport.abort()
        elif len(there) >= self._most and strangers:
            strangers[0].transport.abort()
        self._guests = [*there, guest]

    def begin(self, transport: asyncio.Transport, spoken: asyncio.Transport) -> None:
        """Expect a request on a connection that was admitted; over TLS it speaks by another one."""
        for guest in self._of(transport):
            guest.transport = spoken
            asyncio.get_running_loop().call_later(self._head_s, self._end_silent, guest)

    def asks(self, transport: asyncio.BaseTransport | None) -> None:
        """Note that a connection has sent the head of a request."""
        for guest in self._of(transport):
            guest.has_asked = True

    def trust(self, transport: asyncio.BaseTransport | None) -> None:
        """Note that a connection has proven who it is: it gives way to no other."""
        for guest in self._of(transport):
            guest.is_trusted = True

    def _of(self, transport: asyncio.BaseTransport | None) -> Iterator[_Guest]:
        return (each for each in self._guests if each.transport is transport)

    def end(self) -> None:
        """End all connections."""
        for guest in self._guests:
            guest.transport.abort()

    def _end_silent(self, guest: _Guest) -> None:
        if not guest.has_asked:
            guest.transport.abort()


class _Visitor(asyncio.Protocol):
    """A connection before it speaks HTTP."""

    def __init__(self, server: web.Server, guests: Guests, context: ssl.SSLContext | None) -> None:
        self._server = server
        self._guests = guests
        self._context = context
        self._early: list[bytes] = []
        self._securing: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)  # noqa: S101 - of a server of TCP
        self._guests.admit(transport)
        if self._context is None:
            self._begin(transport, transport)
            return
        # What comes before the handshake is not for this protocol.
        transport.pause_reading()
        self._securing = asyncio.create_task(self._secure(transport, self._context))

    def data_received(self, data: bytes) -> None:
        # It may come with the last packet of the handshake.
        self._early.append(data)

    async def _secure(self, transport: asyncio.Transport, context: ssl.SSLContext) -> None:
        loop = asyncio.get_running_loop()
        secure: asyncio.Transport | None = None
        # The other side is no client of TLS, is too slow, or has gone.
        with contextlib.suppress(OSError):
            secure = await loop.start_tls(
                transport, self, context, server_side=True, ssl_handshake_timeout=HEAD_S
            )
        if secure is None or secure.is_closing():
            transport.abort()
        else:
            self._begin(transport, secure)

    def _begin(self, transport: asyncio.Transport, spoken: asyncio.Transport) -> None:
        self._guests.begin(transport, spoken)
        handler = self._server()
        spoken.set_protocol(handler)
        handler.connection_made(spoken)
        for data in self._early:
            handler.data_received(data)


@contextlib.asynccontextmanager
async def http_ports(
    settings: Common, not_ready: NotReady, routes: Iterable[web.AbstractRouteDef]
) -> AsyncIterator[None]:
    """Serve both ports of a service, as `http_port` does; `routes` on that for people alone."""
    async with (
        http_port(settings.http_address, not_ready, routes),
        http_port(settings.health_address, not_ready, variable="SNAPBACK_HEALTH_ADDRESS"),
    ):
        yield


@contextlib.asynccontextmanager
async def http_port(
    address: str | None,
    not_ready: NotReady,
    routes: Iterable[web.AbstractRouteDef] = (),
    *,
    guests: Guests | None = None,
    patience_s: float = PATIENCE_S,
    variable: str = "SNAPBACK_HTTP_ADDRESS",
) -> AsyncIterator[int | None]:
    """Serve `/healthz`, `/readyz` and `routes` on `host:port` for the length of the block.

    `/healthz` answers 200 while the process turns, `/readyz` 503 and why while `not_ready` says
    so. Gives the port, which the system chooses where the address has 0, or None where there is
    no address. A connection that has been answered is kept for `patience_s`. InvalidInput for an
    address that is none, AddressInUse when it cannot be had.
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
    async with serving(
        app, address, guests or Guests(), patience_s=patience_s, variable=variable
    ) as number:
        log.info("HTTP on %s port %d", parse_address(address, variable)[0], number)
        yield number


@contextlib.asynccontextmanager
async def serving(
    app: web.Application,
    address: str,
    guests: Guests,
    *,
    patience_s: float,
    variable: str = "SNAPBACK_HTTP_ADDRESS",
    context: ssl.SSLContext | None = None,
) -> AsyncIterator[int]:
    """Serve an application, over TLS if there is a context for it; give the port.

    What is being answered at the end has a second for it. InvalidInput for an address that is none,
    AddressInUse when it cannot be had.
    """
    from aiohttp import web  # noqa: PLC0415 - costs start-up time and memory

    @web.middleware
    async def note(
        request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        guests.asks(request.transport)
        return await handler(request)

    app.middlewares.append(note)
    host, port = parse_address(address, variable)
    runner = web.AppRunner(
        app, access_log=None, shutdown_timeout=CLOSE_S, keepalive_timeout=patience_s
    )
    await runner.setup()
    try:
        server = runner.server
        assert server is not None  # noqa: S101 - the runner is set up
        listening = await _listen(lambda: _Visitor(server, guests, context), host, port, variable)
        try:
            number: int = listening.sockets[0].getsockname()[1]
            yield number
        finally:
            listening.close()
    finally:
        await runner.cleanup()
        guests.end()


async def _listen(
    visitor: Callable[[], _Visitor], host: str, port: int, variable: str
) -> asyncio.Server:
    try:
        return await asyncio.get_running_loop().create_server(visitor, host, port)
    except OSError as error:
        raise AddressInUse(
            f"cannot listen on {host}:{port}: {error.strerror or error}",
            next_step=f"set {variable} to a free address, or unset it",
        ) from error


def parse_address(address: str, variable: str = "SNAPBACK_HTTP_ADDRESS") -> tuple[str, int]:
    """Take `host:port` apart; IPv6 hosts stand in brackets. InvalidInput names the setting."""
    host, _, port = address.rpartition(":")
    if not host or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise InvalidInput(
            f"{variable}={address!r} is not host:port",
            next_step="write for example 127.0.0.1:9090, or [::]:9090",
        )
    return host.removeprefix("[").removesuffix("]"), int(port)
