"""How a driver calls the API server: with which token, and what its answers mean."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import certifi
import pytest
from aiohttp import web

from gms.adapters.cluster_api import MAX_ANSWER_BYTES, Access, KubeApi, access
from gms.domain.claims import DRIVER
from snapshot_shared.errors import (
    Conflict,
    Forbidden,
    InvalidInput,
    InvalidMessage,
    NotFound,
    SnapbackError,
    StoreBusy,
)

CA = Path(certifi.where())


class Server:
    """Answers every call with one status and body, and keeps what was asked."""

    def __init__(self) -> None:
        self.status, self.body = 200, b"{}"
        self.asked: list[tuple[str, str, str | None]] = []
        self.event = asyncio.Event()

    async def answer(self, request: web.Request) -> web.StreamResponse:
        token = request.headers.get("Authorization")
        self.asked.append((request.method, request.path_qs, token))
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
async def url(server: Server) -> AsyncIterator[str]:
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", server.answer)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    server.event.set()
    await runner.cleanup()


@pytest.fixture
async def api(url: str, tmp_path: Path) -> AsyncIterator[KubeApi]:
    (tmp_path / "token").write_text("first\n")
    found = KubeApi(Access(url=url, ca_file=CA, token_file=tmp_path / "token"))
    async with contextlib.aclosing(found):
        yield found


def body(**fields: Any) -> bytes:
    return json.dumps(fields).encode()


async def test_a_token_that_was_replaced_is_used(
    api: KubeApi, server: Server, tmp_path: Path
) -> None:
    server.body = body(metadata={"uid": "u"})
    assert await api.node_uid("n1") == "u"
    (tmp_path / "token").write_text("second")
    await api.node_uid("n1")
    assert server.asked == [
        ("GET", "/api/v1/nodes/n1", f"Bearer {token}") for token in ("first", "second")
    ]


@pytest.mark.parametrize(
    ("status", "error", "retryable"),
    [
        (401, Forbidden, False),
        (403, Forbidden, False),
        (404, NotFound, False),
        (409, Conflict, True),
        (410, Conflict, True),
        (422, InvalidInput, False),
        (429, StoreBusy, True),
        (500, StoreBusy, True),
        (503, StoreBusy, True),
    ],
)
async def test_what_the_api_server_refuses_is_an_error_of_ours_with_its_words(
    api: KubeApi, server: Server, status: int, error: type[SnapbackError], retryable: bool
) -> None:
    server.status, server.body = status, body(kind="Status", message="because of this")
    with pytest.raises(error, match=f"{status}: because of this") as caught:
        await api.claim("default", "c")
    assert caught.value.retryable is retryable


@pytest.mark.parametrize("answer", [b"", b"<html>", b'{"metadata": {}}', b"[" * 2000])
async def test_an_answer_that_is_no_object_is_refused(
    api: KubeApi, server: Server, answer: bytes
) -> None:
    server.body = answer
    with pytest.raises(InvalidMessage):
        await api.claim("default", "c")


async def test_an_answer_without_end_is_refused(api: KubeApi, server: Server) -> None:
    server.body = b" " * (MAX_ANSWER_BYTES + 1)
    with pytest.raises(InvalidInput, match="too long"):
        await api.claim("default", "c")


async def test_an_api_server_that_is_away_may_be_asked_again(tmp_path: Path) -> None:
    api = KubeApi(Access(url="http://127.0.0.1:9", ca_file=CA, token="t"))
    async with contextlib.aclosing(api):
        with pytest.raises(StoreBusy, match=r"127\.0\.0\.1:9") as caught:
            await api.has_claims()
    assert caught.value.retryable


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
    (asked,) = server.asked
    assert f"fieldSelector=spec.nodeName%3Dn1,spec.driver%3D{DRIVER}" in asked[1]
    assert "resourceVersion=77" in asked[1]


def kubeconfig(folder: Path, user: dict[str, str], cluster: dict[str, str]) -> Path:
    file = folder / "kubeconfig"
    config = {
        "current-context": "here",
        "contexts": [{"name": "here", "context": {"cluster": "c", "user": "u"}}],
        "clusters": [
            {"name": "other", "cluster": {"server": "https://other"}},
            {"name": "c", "cluster": {"server": "https://api:6443/", **cluster}},
        ],
        "users": [{"name": "u", "user": user}],
    }
    file.write_text(json.dumps(config))
    return file


def test_the_current_context_of_a_kubeconfig_says_where_and_who(tmp_path: Path) -> None:
    file = kubeconfig(tmp_path, {"tokenFile": "token"}, {"certificate-authority": "/ca.crt"})
    assert access(file) == Access(
        url="https://api:6443", ca_file=Path("/ca.crt"), token_file=tmp_path / "token"
    )


@pytest.mark.parametrize(
    ("user", "cluster"),
    [({}, {"certificate-authority": "ca"}), ({"token": "t"}, {}), ([], {})],
)
def test_a_kubeconfig_that_cannot_be_used_is_refused_with_what_it_needs(
    tmp_path: Path, user: Any, cluster: dict[str, str]
) -> None:
    with pytest.raises(InvalidInput, match="SNAPBACK_KUBECONFIG") as caught:
        access(kubeconfig(tmp_path, user, cluster))
    assert "token" in caught.value.next_step


def test_a_pod_uses_its_service_account() -> None:
    found = access(None, {"KUBERNETES_SERVICE_HOST": "fd00::1", "KUBERNETES_SERVICE_PORT": "443"})
    assert found.url == "https://[fd00::1]:443"
    with pytest.raises(InvalidInput, match="not in a pod"):
        access(None, {})
