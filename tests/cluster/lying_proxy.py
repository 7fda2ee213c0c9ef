"""A proxy before a real API server that fails on request: refusals, cuts, answers that are lost."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from http import HTTPStatus
from typing import Literal, NamedTuple

import aiohttp
from aiohttp import web
from kubernetes_asyncio.client import ApiClient, Configuration

from snapshot_shared.kube_client import path_kind

Answer = int | Literal["cut", "lost", "page"]
_WRITES = ("POST", "PUT", "PATCH", "DELETE")


class Lie(NamedTuple):
    """What is answered instead: an HTTP status, a page, a cut before the request or after it."""

    answer: Answer
    method: str = ""
    kind: str = ""
    times: int = 1_000_000
    reason: str = ""


class LyingProxy:
    """Forwards to an API server, with credentials where a client has none; counts requests."""

    def __init__(self, behind: ApiClient) -> None:
        self._behind = behind
        self._lies: list[Lie] = []
        self._watches: set[asyncio.Task[object]] = set()
        self.requests: Counter[tuple[str, str]] = Counter()
        self.refused: list[str] = []
        """What the API server did not allow."""
        self.answered: Callable[[str], None] = lambda _: None
        """Gets each write that the API server has answered, before the client has the answer.

        Not those of Leases and Events, which come at times of their own.
        """
        self.url = ""

    @property
    def configuration(self) -> Configuration:
        """How a client reaches the API server through this proxy."""
        return Configuration(host=self.url)

    @contextlib.contextmanager
    def lying(self, *lies: Lie) -> Iterator[None]:
        """Lie for the length of the block."""
        self._lies = list(lies)
        try:
            yield
        finally:
            self._lies = []

    def cut_watches(self) -> None:
        """End every watch as a broken connection does."""
        for watch in self._watches:
            watch.cancel()

    def _lie(self, verb: str, kind: str) -> Lie | None:
        for index, lie in enumerate(self._lies):
            if lie.method in ("", verb) and lie.kind in ("", kind) and lie.times > 0:
                self._lies[index] = lie._replace(times=lie.times - 1)
                return lie
        return None

    async def handle(self, request: web.Request) -> web.StreamResponse:
        kind = path_kind(request.path)
        is_watch = "watch" in request.query
        verb = "WATCH" if is_watch else request.method
        self.requests[verb, kind] += 1
        lie = self._lie(verb, kind)
        if lie is not None and lie.answer == "cut":
            return _cut(request)
        if lie is not None and lie.answer == "page":
            return web.Response(text="<html>", content_type="text/html")
        if lie is not None and isinstance(lie.answer, int):
            status = {
                "kind": "Status",
                "code": lie.answer,
                "reason": lie.reason,
                "message": "a lie",
            }
            return web.json_response(status, status=lie.answer)
        kept = ("Accept", "Authorization", "Content-Type")
        headers = {name: request.headers[name] for name in kept if name in request.headers}
        if "Authorization" not in headers:
            await self._behind.update_params_for_auth(headers, [], ["BearerToken"])
        async with self._behind.rest_client.pool_manager.request(
            request.method,
            self._behind.configuration.host + request.path_qs,
            headers=headers,
            data=await request.read() or None,
            timeout=aiohttp.ClientTimeout(),
        ) as answer:
            if answer.status == HTTPStatus.FORBIDDEN:
                self.refused.append(f"{request.method} {request.path}")
            if not is_watch:
                body = await answer.read()
                if verb in _WRITES and kind not in ("leases", "events"):
                    self.answered(f"{verb} {kind}")
                if lie is not None:
                    return _cut(request)
                return web.Response(
                    status=answer.status, body=body, content_type="application/json"
                )
            return await self._passed_on(request, answer)

    async def _passed_on(
        self, request: web.Request, answer: aiohttp.ClientResponse
    ) -> web.StreamResponse:
        response = web.StreamResponse(status=answer.status)
        await response.prepare(request)

        async def pass_on() -> None:
            # The client may go in the middle.
            with contextlib.suppress(ConnectionError):
                async for chunk in answer.content.iter_any():
                    await response.write(chunk)

        watch = asyncio.ensure_future(pass_on())
        self._watches.add(watch)
        try:
            await watch
        except asyncio.CancelledError:
            if not watch.done():
                watch.cancel()
                raise
            return _cut(request)
        finally:
            self._watches.discard(watch)
            # The answer has no end, so its connection serves no other request. Closed in the way of
            # TLS, it would stay until the server says good-bye too, perhaps longer than the loop.
            if answer.connection is not None and answer.connection.transport is not None:
                answer.connection.transport.abort()
        return response


def _cut(request: web.Request) -> web.Response:
    if request.transport is not None:
        request.transport.abort()
    return web.Response()


@contextlib.asynccontextmanager
async def lying_proxy(configuration: Configuration) -> AsyncIterator[LyingProxy]:
    """Serve on a free port of loopback for the length of the block."""
    async with ApiClient(configuration) as behind:
        proxy = LyingProxy(behind)
        app = web.Application(client_max_size=16 * 1024 * 1024)
        app.router.add_route("*", "/{path:.*}", proxy.handle)
        runner = web.AppRunner(app, access_log=None, handle_signals=False, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        host, port = runner.addresses[0][:2]
        proxy.url = f"http://{host}:{port}"
        try:
            yield proxy
        finally:
            proxy.cut_watches()
            await runner.cleanup()
