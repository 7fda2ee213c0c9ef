"""What a client of the API server makes of the bytes that come."""

from __future__ import annotations

from contextlib import aclosing

import pytest
from aiohttp import web
from kubernetes_asyncio.client import Configuration

from snapshot_operator.kube.client import KubeClient

LONG = b"x" * 5_000_000


@pytest.mark.parametrize(
    ("pieces", "events"),
    [
        ([b"one\n", b"two\n"], [b"one", b"two"]),
        ([b"one\ntwo\nthree\n"], [b"one", b"two", b"three"]),
        ([b"on", b"e\ntw", b"o\n"], [b"one", b"two"]),
        ([LONG, b"\n"], [LONG]),
        ([b"one\n", b"tw"], [b"one"]),
        ([], []),
    ],
    ids=["each", "together", "in pieces", "long", "cut off", "none"],
)
async def test_a_watch_gives_each_whole_line_however_it_comes(
    pieces: list[bytes], events: list[bytes]
) -> None:
    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        for piece in pieces:
            await response.write(piece)
        return response

    app = web.Application()
    app.router.add_get("/pods", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    url = "http://{}:{}".format(*runner.addresses[0][:2])
    async with (
        KubeClient(Configuration(host=url)) as client,
        aclosing(client.watch("/pods", {})) as lines,
    ):
        assert [line async for line in lines] == events
    await runner.cleanup()
