"""What a client of the API server makes of the bytes that come."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from typing import Any

import msgspec
import pytest
from aiohttp import web
from aiohttp.test_utils import RawTestServer
from kubernetes_asyncio.client import Configuration

from snapshot_shared.errors import (
    AlreadyExists,
    Conflict,
    InvalidManifest,
    NotFound,
    SnapbackError,
    StoreBusy,
)
from snapshot_shared.kube_client import KubeClient, Refused, ResourceExpired, clock_ahead, decoded
from tests.unit.tables import each

LONG = b"x" * 5_000_000
SEVEN = 1_795_849_200.0
"""Seven o'clock of the date below, in seconds since the epoch."""


@asynccontextmanager
async def client_of(
    answer: Callable[[web.BaseRequest], Awaitable[Any]],
) -> AsyncIterator[KubeClient]:
    """Give a client of a server that answers to all like this."""
    async with (
        RawTestServer(answer) as server,
        KubeClient(Configuration(host=f"http://127.0.0.1:{server.port}")) as client,
    ):
        yield client


@each(
    ("pieces", "events"),
    [
        ([b"one\n", b"two\n"], [b"one", b"two"]),
        ([b"one\ntwo\nthree\n"], [b"one", b"two", b"three"]),
        ([b"on", b"e\ntw", b"o\n"], [b"one", b"two"]),
        ([LONG, b"\n"], [LONG]),
        ([b"one\n", b"tw"], [b"one"]),
        ([], []),
    ],
)
async def test_a_watch_gives_each_whole_line_however_it_comes(
    pieces: list[bytes], events: list[bytes]
) -> None:
    async def answer(request: web.BaseRequest) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        for piece in pieces:
            await response.write(piece)
        return response

    async with client_of(answer) as client, aclosing(client.watch("/pods", {})) as lines:
        assert [line async for line in lines] == events


@each(
    ("code", "reason", "error", "is_retryable"),
    [
        (400, "BadRequest", InvalidManifest, False),
        (401, "Unauthorized", Refused, True),
        (403, "Forbidden", Refused, True),
        (404, "NotFound", NotFound, False),
        (409, "AlreadyExists", AlreadyExists, False),
        (409, "Conflict", Conflict, True),
        (410, "Expired", ResourceExpired, True),
        (422, "Invalid", InvalidManifest, False),
        (429, "TooManyRequests", StoreBusy, True),
        (500, "InternalError", StoreBusy, True),
    ],
)
async def test_what_the_api_server_refuses_is_an_error_of_ours_with_its_words(
    code: int, reason: str, error: type[SnapbackError], *, is_retryable: bool
) -> None:
    async def answer(_: web.BaseRequest) -> web.Response:
        said = {"kind": "Status", "message": "because of this", "reason": reason}
        return web.json_response(said, status=code)

    async with client_of(answer) as client:
        with pytest.raises(SnapbackError, match="because of this") as caught:
            await client.request("GET", "/pods")
    assert (type(caught.value), caught.value.retryable) == (error, is_retryable)


def nested(levels: int, leaf: bytes = b"1") -> bytes:
    return b'{"a":[' * levels + leaf + b"]}" * levels


def named(spec: bytes, name: bytes = b'"x"') -> bytes:
    return b'{"before":{"a":"]\\"{"},"spec":' + spec + b',"name":' + name + b"}"


class Named(msgspec.Struct):
    """The end of an object, and its middle as it was sent."""

    name: str
    spec: msgspec.Raw


NAMED = msgspec.json.Decoder(Named)


def test_an_answer_is_decoded_however_deep_it_is_nested() -> None:
    deep = [decoded(NAMED, named(nested(5000, leaf))) for leaf in (b"1", b'"]{"', b"2")]
    assert [found.name for found in deep] == ["x", "x", "x"]
    # They differ there, too.
    assert len({bytes(found.spec) for found in deep}) == 3
    assert bytes(decoded(NAMED, named(nested(20))).spec) == nested(20)


def test_an_answer_that_is_no_json_is_none_of_an_api_server() -> None:
    for answer in (b"<html>", nested(5000)[:-1], b'{"a":' + nested(5000)):
        with pytest.raises(StoreBusy):
            decoded(NAMED, answer)


@each(
    ("date", "asked_at", "answered_at", "ahead_s"),
    [
        ("Sat, 28 Nov 2026 07:00:00 GMT", SEVEN + 0.2, SEVEN + 0.4, 0.0),
        # It was written at an instant of a whole second, and before the answer.
        ("Sat, 28 Nov 2026 07:00:00 GMT", SEVEN + 0.9, SEVEN + 1.4, 0.0),
        ("Sat, 28 Nov 2026 07:00:00 GMT", SEVEN - 0.3, SEVEN + 0.1, 0.0),
        ("Sat, 28 Nov 2026 07:00:00 GMT", SEVEN + 5.0, SEVEN + 6.0, 5.0),
        ("Sat, 28 Nov 2026 07:00:00 GMT", SEVEN - 5.5, SEVEN - 5.5, -6.0),
        ("Thu, 26 Nov 2026 07:00:00 GMT", SEVEN + 0.5, SEVEN + 0.5, 2 * 86_400.0),
        ("", SEVEN, SEVEN, 0.0),
        ("yesterday", SEVEN, SEVEN, 0.0),
    ],
)
def test_a_clock_is_compared_with_an_http_date(
    date: str, asked_at: float, answered_at: float, ahead_s: float
) -> None:
    assert clock_ahead(date, asked_at, answered_at) == ahead_s
