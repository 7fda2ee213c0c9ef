"""The page over HTTP: one file of HTML, JSON for programs, and server-sent events.

Everything here is read-only. All who reach the port may look, so browsers are kept from being
used against it: a name that is none of ours in the Host header is refused (DNS rebinding), nothing
is shared across origins, and the page runs no script but its own.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import ipaddress
import json
import logging
import re
from collections.abc import Awaitable, Callable, Iterable
from importlib import resources
from typing import Any

from aiohttp import web

from snapshot_operator.api.page.live_view import LiveView
from snapshot_shared.errors import NotFound

log = logging.getLogger(__name__)

MOST_STREAMS = 64
MOST_QUESTIONS = 64
"""How many may follow, and how many ask, at a time; one more is answered 503."""

BEAT_S = 10.0
"""A sign of life at least this often, in seconds; the page gives a silent stream up after three."""

PATIENCE_S = 10.0
"""How long a reader may take nothing before it is let go, in seconds."""

_INLINE = re.compile(r"<(script|style)>(.*?)</\1>", re.DOTALL)
_HEADERS = {
    "Cache-Control": "no-store",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def content_policy(html: str) -> str:
    """Return the Content-Security-Policy for exactly the scripts and styles of a page."""
    hashes: dict[str, list[str]] = {"script": [], "style": []}
    for kind, text in _INLINE.findall(html):
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        hashes[kind].append(f"'sha256-{digest}'")
    return "; ".join(
        [
            "default-src 'none'",
            f"script-src {' '.join(hashes['script'])}",
            f"style-src {' '.join(hashes['style'])}",
            "connect-src 'self'",
            "img-src data:",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
            "require-trusted-types-for 'script'",
            "trusted-types 'none'",
        ]
    )


class Page:
    """The handlers of the page; `close` ends the streams that are open."""

    def __init__(
        self,
        view: LiveView,
        hosts: Iterable[str] = (),
        *,
        most_streams: int = MOST_STREAMS,
        beat_s: float = BEAT_S,
        patience_s: float = PATIENCE_S,
    ) -> None:
        """Show `view`. Beside IP addresses and localhost the page answers to these host names."""
        self._view = view
        self._hosts = {host.lower() for host in hosts} | {"localhost"}
        self._html = resources.files(__package__).joinpath("page.html").read_text("utf-8")
        self._policy = content_policy(self._html)
        self._streams = 0
        self._questions = 0
        self._most_streams = most_streams
        self._beat_s = beat_s
        self._patience_s = patience_s
        self._closing = asyncio.Event()

    def routes(self) -> list[web.AbstractRouteDef]:
        """Return the routes; HEAD is answered wherever GET is, but for the stream."""
        return [
            web.get("/", self._guarded(self._index)),
            web.get("/events", self._guarded(self._events), allow_head=False),
            web.get("/api/state", self._guarded(self._state)),
            web.get(
                "/api/objects/{plural}/{namespace}/{name}",
                self._guarded(self._object),
            ),
        ]

    def close(self) -> None:
        """End all streams; new ones are refused."""
        self._closing.set()

    def _guarded(self, handler: Handler) -> Handler:
        async def answer(request: web.Request) -> web.StreamResponse:
            if not self._is_ours(request.headers.get("Host", "")):
                return _failure(
                    421,
                    "this name is none of the operator's: add it to SNAPBACK_PAGE_HOSTS, or use "
                    "the address",
                )
            if (
                request.headers.get("Sec-Fetch-Site", "none") == "cross-site"
                and request.path != "/"
            ):
                return _failure(403, "the data of this page is for this page only")
            return await handler(request)

        return answer

    def _is_ours(self, host: str) -> bool:
        """Whether a Host header is an address or a name of ours; names can be rebound."""
        name = host.rpartition(":")[0] if re.search(r":\d+\Z", host) else host
        bare = name.removeprefix("[").removesuffix("]").lower()
        if bare in self._hosts:
            return True
        try:
            ipaddress.ip_address(bare)
        except ValueError:
            return False
        return True

    async def _index(self, _request: web.Request) -> web.StreamResponse:
        headers = {**_HEADERS, "Content-Security-Policy": self._policy}
        return web.Response(text=self._html, content_type="text/html", headers=headers)

    async def _state(self, _request: web.Request) -> web.StreamResponse:
        async def ask() -> web.Response:
            async with self._view.looking() as feed:
                update = feed.since(0)
            body = _joined({**update.sections, "version": str(update.version).encode()})
            return _json(body)

        return await self._asked(ask)

    async def _object(self, request: web.Request) -> web.StreamResponse:
        words = (request.match_info[name] for name in ("plural", "namespace", "name"))
        plural, namespace, name = words

        async def ask() -> web.Response:
            async with self._view.looking():
                try:
                    return _json(await self._view.details(plural, namespace, name))
                except NotFound as error:
                    return _failure(404, error.message)

        return await self._asked(ask)

    async def _asked(self, ask: Callable[[], Awaitable[web.Response]]) -> web.Response:
        if self._questions >= MOST_QUESTIONS or self._closing.is_set():
            return _failure(503, "too many ask at a time; try again", {"Retry-After": "2"})
        self._questions += 1
        try:
            return await ask()
        except TimeoutError:
            return _failure(503, "the operator has no view yet; try again", {"Retry-After": "2"})
        finally:
            self._questions -= 1

    async def _events(self, request: web.Request) -> web.StreamResponse:
        if self._streams >= self._most_streams or self._closing.is_set():
            return _failure(503, "too many pages are open; close one", {"Retry-After": "10"})
        self._streams += 1
        try:
            return await self._stream(request)
        except TimeoutError:
            return _failure(503, "the operator has no view yet; try again", {"Retry-After": "2"})
        finally:
            self._streams -= 1

    async def _stream(self, request: web.Request) -> web.StreamResponse:
        async with self._view.looking() as feed:
            response = web.StreamResponse(
                headers={**_HEADERS, "Content-Type": "text/event-stream", "X-Accel-Buffering": "no"}
            )
            await response.prepare(request)
            life, _, last = request.headers.get("Last-Event-ID", "").partition(".")
            is_known = life == feed.life and last.isascii() and last.isdigit()
            version = min(int(last[:15]), feed.version) if is_known else 0
            with contextlib.suppress(ConnectionError, TimeoutError):
                await self._send(response, b"retry: 1000\n\n")
                while not self._closing.is_set():
                    update = feed.since(version)
                    version = update.version
                    kind = b"view" if update.sections else b"beat"
                    data = _joined({**update.sections, "now": b"%.3f" % self._view.now()})
                    frame = b"id: %s.%d\nevent: %s\ndata: %s\n\n"
                    place = (feed.life.encode(), version)
                    await self._send(response, frame % (*place, kind, data))
                    await self._until_news(feed.changed(version))
            _let_go(request)
            return response

    async def _send(self, response: web.StreamResponse, data: bytes) -> None:
        """Write, but let go of a reader that takes nothing for too long. TimeoutError."""
        async with asyncio.timeout(self._patience_s):
            await response.write(data)

    async def _until_news(self, news: Awaitable[None]) -> None:
        waiters = [asyncio.ensure_future(news), asyncio.ensure_future(self._closing.wait())]
        try:
            await asyncio.wait(waiters, timeout=self._beat_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for waiter in waiters:
                waiter.cancel()
            await asyncio.gather(*waiters, return_exceptions=True)


def _let_go(request: web.Request) -> None:
    """Drop the connection with what waits to be sent on it: it is not read."""
    if request.transport is not None:
        request.transport.abort()


def _joined(sections: dict[str, bytes]) -> bytes:
    """Write JSON values as one object; the encoder leaves no line break in them."""
    return b"{" + b",".join(b'"%s":%s' % (n.encode(), v) for n, v in sections.items()) + b"}"


def _json(body: bytes) -> web.Response:
    return web.Response(body=body, content_type="application/json", headers=_HEADERS)


def _failure(status: int, message: str, headers: dict[str, Any] | None = None) -> web.Response:
    body = json.dumps({"error": message}).encode()
    return web.Response(
        status=status,
        body=body,
        content_type="application/json",
        headers={**_HEADERS, **(headers or {})},
    )
