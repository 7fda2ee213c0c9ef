"""How the demo asks an engine over HTTP, and what it makes of one that does not answer."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from snapshot_shared.errors import Aborted
from snapshotctl.adapters import worker_http
from tests.support.ports import free_port

CHOICE = {"index": 0, "text": " goes on", "token_ids": [4, 2], "finish_reason": "length"}


class Engine:
    """What answers at a port."""

    def __init__(self, answer: Any, status: int = 200) -> None:
        self.answer, self.status = answer, status
        self.asked: list[Any] = []

    async def serve(self, port: int) -> TestServer:
        app = web.Application()
        app.router.add_get("/health", self._health)
        app.router.add_post("/v1/completions", self._completions)
        server = TestServer(app, port=port)
        await server.start_server()
        return server

    async def _health(self, _: web.Request) -> web.Response:
        return web.Response()

    async def _completions(self, request: web.Request) -> web.Response:
        self.asked.append(await request.json())
        return web.json_response(self.answer, status=self.status)


@contextlib.asynccontextmanager
async def asking(engine: Engine) -> AsyncIterator[worker_http.CompletionClient]:
    port = free_port()
    server = await engine.serve(port)
    client = await worker_http.connect(str(port))
    try:
        yield client
    finally:
        await client.close()
        await server.close()


async def test_an_engine_that_begins_to_listen_is_asked_for_the_same_tokens_each_time() -> None:
    port = free_port()
    connecting = asyncio.create_task(worker_http.connect(str(port)))
    await asyncio.sleep(0.1)
    assert not connecting.done()
    engine = Engine({"id": "another each time", "choices": [CHOICE]})
    server = await engine.serve(port)
    try:
        async with asyncio.timeout(10):
            client = await connecting
        first = await client.ask("A node")
        assert first == await client.chat("A node") == b'{"text":" goes on","token_ids":[4,2]}'
        await client.close()
    finally:
        await server.close()
    assert [each["prompt"] for each in engine.asked] == ["A node", "A node"]
    assert {each["temperature"] for each in engine.asked} == {0}


@pytest.mark.parametrize("answer", [{"choices": []}, {"choices": [{"text": "no ids"}]}, [1]])
async def test_an_answer_that_is_no_completion_ends_the_conversation(answer: Any) -> None:
    async with asking(Engine(answer)) as client:
        with pytest.raises(Aborted):
            await client.ask("A node")


async def test_an_engine_that_is_gone_ends_the_conversation() -> None:
    gone = worker_http.CompletionClient(str(free_port()))
    with pytest.raises(Aborted):
        await gone.ask("A node")
    await gone.close()


async def test_what_an_engine_refuses_is_shown_as_it_says_it() -> None:
    async with asking(Engine({"error": {"message": "too long"}}, status=400)) as client:
        assert b"too long" in await client.ask("A node")
