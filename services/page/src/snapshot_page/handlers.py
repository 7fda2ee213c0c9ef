"""The page over HTTP: one file of HTML, JSON for programs, and server-sent events.

Everything here is read-only. Any client that reaches the port may read, so browsers are kept from
being used against it: an unknown name in the Host header is refused (DNS rebinding), nothing is
shared across origins, and the page runs no script but its own.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import ipaddress
import json
import re
from collections.abc import Awaitable, Callable, Iterable
from importlib import resources

from aiohttp import web

from snapshot_page.ports import View
from snapshot_shared.errors import NotFound

MAX_STREAMS = 64
MAX_REQUESTS = 64
"""How many event streams and how many other requests there are at a time; one more gets 503."""

BEAT_S = 10.0
"""The longest pause between two events, in seconds; a browser gives up after three of them."""

PATIENCE_S = 10.0
"""How long a reader may take nothing before it is disconnected, in seconds."""

_INLINE = re.compile(r"<(script|style)>(.*?)</\1>", re.DOTALL)
_HEADERS = {
    "Cache-Control": "no-store",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}

_POLICY = (
    "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def content_policy(html: str) -> str:
    """Return the Content-Security-Policy for exactly the scripts and styles of a page."""
    hashes: dict[str, list[str]] = {"script": [], "style": []}
    for kind, text in _INLINE.findall(html):
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        hashes[kind].append(f"'sha256-{digest}'")
    own = [f"{kind}-src {' '.join(found)}" for kind, found in hashes.items()]
    return "; ".join(["default-src 'none'", *own, _POLICY])


class Page:
    """The handlers of the page; `close` ends the streams that are open."""

    def __init__(
        self,
        view: View,
        hosts: Iterable[str] = (),
        *,
        max_streams: int = MAX_STREAMS,
        beat_s: float = BEAT_S,
        patience_s: float = PATIENCE_S,
    ) -> None:
        """Serve `view` to requests for an IP address, localhost or one of these host names."""
        self._view = view
        self._hosts = {host.lower() for host in hosts} | {"localhost"}
        self._html = resources.files(__package__).joinpath("page.html").read_text("utf-8")
        self._policy = content_policy(self._html)
        self._streams = asyncio.Semaphore(max_streams)
        self._requests = asyncio.Semaphore(MAX_REQUESTS)
        self._beat_s = beat_s
        self._patience_s = patience_s
        self._closing = asyncio.Event()

    def routes(self) -> list[web.AbstractRouteDef]:
        """Return the routes; HEAD is answered where GET is, except for the stream."""
        one = "/api/objects/{plural}/{namespace}/{name}"
        return [
            web.get("/", self._guarded(self._index, self._requests)),
            web.get("/events", self._guarded(self._events, self._streams), allow_head=False),
            web.get("/api/state", self._guarded(self._state, self._requests)),
            web.get(one, self._guarded(self._object, self._requests)),
        ]

    def close(self) -> None:
        """End all streams; new ones are refused."""
        self._closing.set()

    def _guarded(self, handler: Handler, slots: asyncio.Semaphore) -> Handler:
        async def answer(request: web.Request) -> web.StreamResponse:
            if not self._is_known(request.headers.get("Host", "")):
                hint = "add it to SNAPBACK_PAGE_HOSTS, or use the address"
                return _failure(421, f"this host name is not one of the page's: {hint}")
            site = request.headers.get("Sec-Fetch-Site", "none")
            if site == "cross-site" and request.path != "/":
                return _failure(403, "the data of this page is for this page only")
            if slots.locked() or self._closing.is_set():
                return _failure(503, "too many readers at a time; try again")
            try:
                async with slots:
                    return await handler(request)
            except TimeoutError:
                return _failure(503, "there is no view yet; try again")
            except NotFound as error:
                return _failure(404, error.message)

        return answer

    def _is_known(self, host: str) -> bool:
        """Whether a Host header is an address or a known name; other names can be rebound."""
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
        async with self._view.reading() as feed:
            return _json(_joined({**feed.since(0), "version": b"%d" % feed.version}))

    async def _object(self, request: web.Request) -> web.StreamResponse:
        async with self._view.reading():
            return _json(await self._view.details(**request.match_info))

    async def _events(self, request: web.Request) -> web.StreamResponse:
        async with self._view.reading() as feed:
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
                    changed, version = feed.since(version), feed.version
                    kind = b"view" if changed else b"beat"
                    data = _joined({**changed, "now": b"%.3f" % self._view.now()})
                    frame = b"id: %s.%d\nevent: %s\ndata: %s\n\n"
                    place = (feed.life.encode(), version)
                    await self._send(response, frame % (*place, kind, data))
                    await self._until_changed(feed.changed(version))
            _drop(request)
            return response

    async def _send(self, response: web.StreamResponse, data: bytes) -> None:
        """Write. TimeoutError when the reader takes nothing for `patience_s` seconds."""
        async with asyncio.timeout(self._patience_s):
            await response.write(data)

    async def _until_changed(self, change: Awaitable[None]) -> None:
        waiters = [asyncio.ensure_future(change), asyncio.ensure_future(self._closing.wait())]
        try:
            await asyncio.wait(waiters, timeout=self._beat_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for waiter in waiters:
                waiter.cancel()
            await asyncio.gather(*waiters, return_exceptions=True)


def _drop(request: web.Request) -> None:
    """Close the connection without sending what is buffered: a slow reader would keep it."""
    if request.transport is not None:
        request.transport.abort()


def _joined(sections: dict[str, bytes]) -> bytes:
    """Return JSON values as one object on one line, as an event needs it."""
    return b"{" + b",".join(b'"%s":%s' % (n.encode(), v) for n, v in sections.items()) + b"}"


def _json(body: bytes, status: int = 200) -> web.Response:
    headers = _HEADERS | ({"Retry-After": "2"} if status == 503 else {})
    return web.Response(status=status, body=body, content_type="application/json", headers=headers)


def _failure(status: int, message: str) -> web.Response:
    return _json(json.dumps({"error": message}).encode(), status)
