"""Requests to the Kubernetes API server: bytes in and out, its refusals as errors of our own.

Configuration, TLS and credentials are those of kubernetes-asyncio. Its typed models are not used:
decoding into them takes eighty times the CPU of msgspec structs.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import re
import socket
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from email.utils import parsedate_to_datetime
from typing import Any, Self, TypeVar

import aiohttp
import msgspec
from kubernetes_asyncio import config
from kubernetes_asyncio.client import ApiClient, Configuration
from kubernetes_asyncio.config import ConfigException

from snapshot_shared import instruments
from snapshot_shared.codec import digest, encode_json
from snapshot_shared.errors import (
    AlreadyExists,
    Conflict,
    InvalidInput,
    InvalidManifest,
    NoSpace,
    NotFound,
    Refused,
    SnapbackError,
    StoreBusy,
)
from snapshot_shared.metrics import OFF, Metrics
from snapshot_shared.tasks import any_set

T = TypeVar("T")

REQUEST_S = 30.0
"""How long one request may take, in seconds."""
SILENCE_S = 150.0
"""How long a watch may be silent, in seconds. The server sends a bookmark about every minute."""
GATHER_S = 0.01
"""How long the events of a burst are gathered before they are read, in seconds."""
GATHER_BYTES = 256 * 1024
"""How many bytes of a burst are read however soon they are there."""

MERGE_PATCH = "application/merge-patch+json"
STRATEGIC_PATCH = "application/strategic-merge-patch+json"
APPLY_PATCH = "application/apply-patch+yaml"
"""Server-side apply; JSON is YAML."""

MAX_RETRY_S = 30.0

MAX_DEPTH = 200
"""How deep what is read may be nested where the decoder refuses it. Kubernetes lets in 10,000."""

_BRACKETS = re.compile(rb'"(?:[^"\\]|\\.)*"|[][{}]')
"""A bracket, or a string, for that may have some."""

_CANNOT_REACH = "check that the API server runs, and the cluster and user of the kubeconfig"


class ResourceExpired(Conflict):
    """The server does not have the history any more that a watch or a page continues."""


class ErrorDetails(msgspec.Struct, frozen=True):
    """What is read of the `details` of a Status: each problem that the server has found."""

    causes: list[Any] = []


class ErrorStatus(msgspec.Struct, frozen=True):
    """A `Status` of Kubernetes: how the API server says what is wrong."""

    message: str = ""
    reason: str = ""
    code: int = 0
    details: ErrorDetails | None = None


_STATUS = msgspec.json.Decoder(ErrorStatus)


async def load_configuration(kubeconfig: str | None, context: str | None = None) -> Configuration:
    """Return how to reach the API server: by a kubeconfig, else as the pod that this runs in.

    InvalidInput names what is missing.
    """
    found = Configuration()
    try:
        if kubeconfig:
            await config.load_kube_config(kubeconfig, context, found)
        else:
            config.load_incluster_config(found)  # type: ignore[no-untyped-call]
    except (ConfigException, OSError) as error:
        where = kubeconfig or "the service account of this pod"
        raise InvalidInput(
            f"{where} cannot be used to reach the API server: {error}",
            next_step="give a kubeconfig in SNAPBACK_KUBECONFIG, or run in a pod with a service "
            "account",
        ) from error
    return found


class KubeClient:
    """One API server. Its connections are opened with the first request."""

    def __init__(self, configuration: Configuration, metrics: Metrics = OFF) -> None:
        """Use a configuration as it was loaded."""
        self._client = ApiClient(configuration)
        self._host = configuration.host or ""
        self._metrics = metrics

    async def __aenter__(self) -> Self:
        """Return the client itself."""
        return self

    async def __aexit__(self, *exc: object) -> None:
        """Close its connections."""
        await self._client.close()

    async def request(
        self,
        verb: str,
        path: str,
        *,
        params: Mapping[str, str] | None = None,
        body: Any = None,
        content_type: str = "application/json",
        accept: str = "application/json",
    ) -> bytes:
        """Send one request and return the body of its answer.

        NotFound, AlreadyExists, Conflict (ResourceExpired for history that is gone), Refused,
        InvalidManifest, NoSpace as the server says. StoreBusy where it does not answer, or wants to
        be asked later; then a write may have been done or not.
        """
        headers = {"Accept": accept, "Content-Type": content_type}
        data = None if body is None else encode_json(body)
        limit = aiohttp.ClientTimeout(total=REQUEST_S)
        began = time.perf_counter()
        async with self._open(verb, path, params, headers, data, limit) as response:
            answer = await response.read()
        self._metrics.record(
            instruments.API_REQUEST_DURATION,
            time.perf_counter() - began,
            verb,
            path_kind(path),
            str(response.status),
        )
        if response.status >= 400:
            raise _refusal(response.status, answer, f"{verb} {path}")
        return answer

    async def ahead(self, wall: Callable[[], float]) -> float:
        """Return how many seconds a clock is ahead of the server's; 0.0 if both may be equal.

        `wall` returns seconds since the epoch. StoreBusy as for `request`.
        """
        limit = aiohttp.ClientTimeout(total=REQUEST_S)
        asked_at = wall()
        async with self._open("GET", "/version", None, {}, None, limit) as response:
            return clock_ahead(response.headers.get("Date", ""), asked_at, wall())

    async def watch(self, path: str, params: Mapping[str, str]) -> AsyncGenerator[bytes, None]:
        """Return the events of a watch as the server sends them, one JSON document each.

        It ends when the server ends it. ResourceExpired, Refused, StoreBusy as for `request`.
        """
        limit = aiohttp.ClientTimeout(total=None, sock_connect=REQUEST_S, sock_read=SILENCE_S)
        headers = {"Accept": "application/json"}
        async with self._open("GET", path, params, headers, None, limit) as response:
            if response.status >= 400:
                raise _refusal(response.status, await response.read(), f"watch {path}")
            rest = b""
            with contextlib.closing(_Gathering(response)) as gathering:
                # What has come at once is taken at once, which costs less than line after line.
                async for chunk in response.content.iter_any():
                    *lines, rest = (rest + chunk).split(b"\n")
                    for line in lines:
                        yield line
                    gathering.more()

    @contextlib.asynccontextmanager
    async def _open(
        self,
        verb: str,
        path: str,
        params: Mapping[str, str] | None,
        headers: dict[str, str],
        data: bytes | None,
        limit: aiohttp.ClientTimeout,
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        rest = self._client.rest_client
        try:
            # Reads a token again that its kubelet has replaced.
            await self._client.update_params_for_auth(headers, [], ["BearerToken"])
            async with rest.pool_manager.request(
                verb,
                self._host + path,
                params=params,
                headers=headers,
                data=data,
                timeout=limit,
                proxy=rest.proxy,
                proxy_headers=rest.proxy_headers,
                server_hostname=rest.server_hostname,
            ) as response:
                yield response
        except (aiohttp.ClientError, ConfigException, TimeoutError, OSError, ValueError) as error:
            raise StoreBusy(
                f"the API server does not answer {verb} {path}: {error or type(error).__name__}",
                next_step=_CANNOT_REACH,
            ) from error


class _Gathering:
    """Has the kernel report events of a burst together: to be woken costs more than an event."""

    def __init__(self, response: aiohttp.ClientResponse) -> None:
        transport = response.connection and response.connection.transport
        self._socket = transport.get_extra_info("socket") if transport else None
        self._loop = asyncio.get_running_loop()
        self._end: asyncio.TimerHandle | None = None
        self._asked_at = -math.inf

    def more(self) -> None:
        """Gather what comes next, if it is asked for soon after what came last was."""
        now = self._loop.time()
        self.close()
        if now - self._asked_at < 2 * GATHER_S:
            self._wake_from(GATHER_BYTES)
            self._end = self._loop.call_later(GATHER_S, self._wake_from, 1)
        self._asked_at = now

    def close(self) -> None:
        """Have it reported at once again."""
        if self._end is not None:
            self._end.cancel()
            self._wake_from(1)

    def _wake_from(self, size: int) -> None:
        # Closed meanwhile, which the reader sees in a moment.
        with contextlib.suppress(OSError):
            if self._socket is not None:
                self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, size)


def clock_ahead(date: str, asked_at: float, answered_at: float) -> float:
    """Return how many seconds a clock is ahead of a server's; negative if it is behind.

    The server wrote `date`, an HTTP date, between two instants of the clock. An HTTP date has no
    fraction of a second. 0.0 if both clocks may be equal, and if `date` is not a date.
    """
    try:
        second = parsedate_to_datetime(date).timestamp()
    except ValueError:
        return 0.0
    least, most = asked_at - second - 1.0, answered_at - second
    return 0.0 if least <= 0.0 <= most else (least + most) / 2


async def back_off(failures: int, jitter: float) -> None:
    """Wait before the API server is asked again: longer after each failure. `jitter` is 0 to 1."""
    await any_set(min(MAX_RETRY_S, 2.0 ** min(failures, 10)) * (1 + jitter) / 2)


def decoded(decoder: msgspec.json.Decoder[T], answer: bytes | msgspec.Raw) -> T:
    """Return a decoded answer. StoreBusy for what no API server sends, such as a proxy's page.

    What is nested deeper than the decoder goes is its digest instead, as a string.
    """
    try:
        return decoder.decode(answer)
    except RecursionError:
        return decoded(decoder, _shallow(bytes(answer)))
    except msgspec.DecodeError as error:
        raise StoreBusy(f"the answer is none of an API server: {error}") from error


def _shallow(document: bytes) -> bytes:
    parts, depth, kept, begin = [], 0, 0, 0
    for found in _BRACKETS.finditer(document):
        match found[0]:
            case b"{" | b"[":
                depth += 1
                if depth == MAX_DEPTH:
                    begin = found.start()
            case b"}" | b"]":
                if depth == MAX_DEPTH:
                    name = digest(document[begin : found.end()])
                    parts.append(document[kept:begin] + encode_json(name))
                    kept = found.end()
                depth -= 1
            case _:
                """A string."""
    return b"".join((*parts, document[kept:]))


def path_kind(path: str) -> str:
    """Return the plural that a path is about, and its subresource: `pods`, `snapshots/status`.

    Of `/api/v1/...` and `/apis/<group>/<version>/...`, with or without a namespace.
    """
    words = path.strip("/").split("/")
    words = words[2:] if words[0] == "api" else words[3:]
    if words[:1] == ["namespaces"] and len(words) > 2:
        words = words[2:]
    return "/".join((*words[:1], *words[2:3]))


def error_status(answer: bytes) -> ErrorStatus:
    """Return the Status in an answer, or one with the beginning of a text that is none."""
    try:
        return _STATUS.decode(answer)
    except msgspec.DecodeError:
        return ErrorStatus(message=answer[:200].decode(errors="replace"))


def _refusal(code: int, answer: bytes, what: str) -> SnapbackError:
    """Return the error that an answer of 400 and more stands for."""
    status = error_status(answer)
    message = status.message or f"{what}: HTTP {code}"
    match code, status.reason:
        case 404, _:
            return NotFound(message)
        case 409, "AlreadyExists":
            return AlreadyExists(message)
        case 409, _:
            return Conflict(message)
        case 410, _:
            return ResourceExpired(message)
        case 401 | 403, _:
            return Refused(message)
        case 400 | 422, _:
            return InvalidManifest(message, problems=status.details and status.details.causes)
        case _ if "database space exceeded" in message or "no space left" in message:
            return NoSpace(message, next_step="free space in etcd, and lift its alarm")
        case _:
            return StoreBusy(message, code=code)
