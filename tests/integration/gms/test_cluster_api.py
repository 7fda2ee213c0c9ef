"""What a driver asks of the API server, and what it makes of the answers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from aiohttp import web

from gms.adapters.cluster_api import KubeApi, cluster_api
from gms.domain.claims import DRIVER
from snapshot_shared.errors import StoreBusy


class Server:
    """Answers every call with one status and body, and keeps what was asked."""

    def __init__(self) -> None:
        self.status, self.body = 200, b"{}"
        self.asked: list[tuple[str, str]] = []
        self.event = asyncio.Event()

    async def answer(self, request: web.Request) -> web.StreamResponse:
        assert request.headers["Authorization"] == "Bearer secret"
        self.asked.append((request.method, request.path_qs))
        if "watch" not in request.query:
            return web.Response(status=self.status, body=self.body)
        response = web.StreamResponse()
        await response.prepare(request)
        await self.event.wait()
        await response.write(b'{"type": "DELETED"}\n')
        return response


@pytest.fixture
async def server() -> Server:
    return Server()


@pytest.fixture
async def api(server: Server, tmp_path: Path) -> AsyncIterator[KubeApi]:
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", server.answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    config = {
        "current-context": "here",
        "contexts": [{"name": "here", "context": {"cluster": "c", "user": "u"}}],
        "clusters": [{"name": "c", "cluster": {"server": url}}],
        "users": [{"name": "u", "user": {"token": "secret"}}],
    }
    (tmp_path / "kubeconfig").write_text(json.dumps(config))
    async with cluster_api(tmp_path / "kubeconfig") as found:
        yield found
    server.event.set()
    await runner.cleanup()


async def test_a_node_is_asked_for_its_uid(api: KubeApi, server: Server) -> None:
    server.body = b'{"metadata": {"uid": "u"}}'
    assert await api.node_uid("n1") == "u"
    assert server.asked == [("GET", "/api/v1/nodes/n1")]


@pytest.mark.parametrize("answer", [b"", b"<html>", b'{"metadata": {}}', b"[" * 2000])
async def test_an_answer_that_is_no_object_is_none_of_an_api_server(
    api: KubeApi, server: Server, answer: bytes
) -> None:
    server.body = answer
    with pytest.raises(StoreBusy):
        await api.claim("default", "c")


async def test_a_cluster_without_claims_is_known_by_its_missing_group(
    api: KubeApi, server: Server
) -> None:
    assert await api.has_claims()
    server.status = 404
    assert not await api.has_claims()
    await api.delete_slice("gone")
    assert server.asked[-1][1] == "/apis/resource.k8s.io/v1/resourceslices/gone"


async def test_a_watch_ends_with_the_first_event(api: KubeApi, server: Server) -> None:
    waiting = asyncio.create_task(api.slices_changed("n1", "77"))
    async with asyncio.timeout(10):
        while not server.asked:
            await asyncio.wait([waiting], timeout=0.01)
        assert not waiting.done()
        server.event.set()
        await waiting
    ((_, path),) = server.asked
    assert f"fieldSelector=spec.nodeName%3Dn1,spec.driver%3D{DRIVER}" in path
    assert "resourceVersion=77" in path
