"""The few calls to the API server that a driver of devices makes, as a service account does."""

from __future__ import annotations

import os
import ssl
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote

import aiohttp
import msgspec
import yaml

from gms.domain.claims import DRIVER, ResourceClaim
from gms.domain.slices import API, FoundSlice
from snapshot_shared.codec import decode_json
from snapshot_shared.errors import (
    Conflict,
    Forbidden,
    InvalidInput,
    NotFound,
    SnapbackError,
    StoreBusy,
)
from snapshot_shared.tasks import in_thread

T = TypeVar("T")

CALL_S = 10.0
WATCH_S = 300
"""How long one watch lasts, in seconds; then the slices are listed again."""
MAX_ANSWER_BYTES = 16 * 1024 * 1024
ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_SLICES = f"/apis/{API}/resourceslices"
_ERRORS: Mapping[int, type[SnapbackError]] = {
    401: Forbidden,
    403: Forbidden,
    404: NotFound,
    409: Conflict,
    410: Conflict,
}


@dataclass(frozen=True, kw_only=True)
class Access:
    """Where the API server is and how to call it; `token_file` is read at each call."""

    url: str
    ca_file: Path
    token_file: Path | None = None
    token: str = ""


def access(kubeconfig: Path | None, environment: Mapping[str, str] | None = None) -> Access:
    """Return what a kubeconfig says, or the service account of this pod. InvalidInput."""
    if kubeconfig is not None:
        return _from_kubeconfig(kubeconfig)
    found = os.environ if environment is None else environment
    host = found.get("KUBERNETES_SERVICE_HOST")
    if not host:
        raise InvalidInput(
            "KUBERNETES_SERVICE_HOST is not set: this process is not in a pod",
            next_step="set SNAPBACK_KUBECONFIG to a kubeconfig with a token",
        )
    port = found.get("KUBERNETES_SERVICE_PORT", "443")
    return Access(
        url=f"https://{f'[{host}]' if ':' in host else host}:{port}",
        ca_file=ACCOUNT / "ca.crt",
        # The kubelet replaces it before it expires.
        token_file=ACCOUNT / "token",
    )


def _from_kubeconfig(path: Path) -> Access:
    try:
        config = yaml.safe_load(path.read_text(encoding="utf-8"))
        context = _named(config, "context", config["current-context"])
        cluster = _named(config, "cluster", context["cluster"])
        user = _named(config, "user", context["user"])
        return Access(
            url=cluster["server"].rstrip("/"),
            ca_file=path.parent / cluster["certificate-authority"],
            token_file=path.parent / user["tokenFile"] if "tokenFile" in user else None,
            token=user["token"] if "tokenFile" not in user else "",
        )
    except (OSError, yaml.YAMLError, LookupError, TypeError, AttributeError) as error:
        raise InvalidInput(
            f"SNAPBACK_KUBECONFIG={str(path)!r} cannot be used: {type(error).__name__}: {error}",
            next_step="it needs a server, a file certificate-authority, and a token or tokenFile",
        ) from error


def _named(config: Any, kind: str, name: str) -> Any:
    return next(each for each in config[f"{kind}s"] if each["name"] == name)[kind]


class KubeApi:
    """Calls the API server."""

    def __init__(self, way: Access) -> None:
        """Connect at the first call."""
        self._access = way
        self._session: aiohttp.ClientSession | None = None

    async def aclose(self) -> None:
        """End every connection."""
        if self._session is not None:
            await self._session.close()

    async def has_claims(self) -> bool:
        try:
            await self._call("GET", f"/apis/{API}", dict)
        except NotFound:
            return False
        return True

    async def node_uid(self, node: str) -> str:
        found = await self._call("GET", f"/api/v1/nodes/{node}", _Object)
        return found.metadata.uid

    async def claim(self, namespace: str, name: str) -> ResourceClaim:
        path = f"/apis/{API}/namespaces/{namespace}/resourceclaims/{name}"
        return await self._call("GET", path, ResourceClaim)

    async def slices(self, node: str) -> tuple[list[FoundSlice], str]:
        found = await self._call("GET", f"{_SLICES}?{_selector(node)}", _SliceList)
        return found.items, found.metadata.resource_version

    async def create_slice(self, body: Mapping[str, Any]) -> None:
        await self._call("POST", _SLICES, dict, body)

    async def replace_slice(self, name: str, body: Mapping[str, Any]) -> None:
        await self._call("PUT", f"{_SLICES}/{name}", dict, body)

    async def delete_slice(self, name: str) -> None:
        try:
            await self._call("DELETE", f"{_SLICES}/{name}", dict)
        except NotFound:
            return

    async def slices_changed(self, node: str, version: str) -> None:
        path = (
            f"{_SLICES}?watch=1&{_selector(node)}&resourceVersion={quote(version)}"
            f"&timeoutSeconds={WATCH_S}"
        )
        async with self._answer("GET", path, total_s=WATCH_S + CALL_S) as answer:
            # Whatever the first event says (a change, or that the version is too old), what to do
            # is decided from a new list.
            await answer.content.readany()

    async def _call(
        self, method: str, path: str, kind: type[T], body: Mapping[str, Any] | None = None
    ) -> T:
        async with self._answer(method, path, body) as answer:
            data = bytearray()
            async for piece in answer.content.iter_any():
                data += piece
                if len(data) > MAX_ANSWER_BYTES:
                    raise InvalidInput(f"the answer to {method} {path} is too long")
        return decode_json(bytes(data), kind, limit=MAX_ANSWER_BYTES)

    @asynccontextmanager
    async def _answer(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        total_s: float = CALL_S,
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        try:
            session, token = await self._connected()
            async with session.request(
                method,
                self._access.url + path,
                json=body,
                headers={"Authorization": f"Bearer {token}"},
                timeout=aiohttp.ClientTimeout(total=total_s),
            ) as answer:
                if answer.status >= 300:
                    raise _error(answer.status, method, path, await answer.content.read(4096))
                yield answer
        except (TimeoutError, aiohttp.ClientError, OSError) as error:
            raise StoreBusy(
                f"{method} {self._access.url}{path}: {type(error).__name__}: {error}",
                next_step="look whether the API server can be reached from this node",
            ) from error

    async def _connected(self) -> tuple[aiohttp.ClientSession, str]:
        way = self._access
        if self._session is None:
            context = await in_thread(ssl.create_default_context, cafile=way.ca_file)
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(ssl=context, limit=8)
            )
        if way.token_file is None:
            return self._session, way.token
        return self._session, (await in_thread(way.token_file.read_text)).strip()


class _ObjectMetadata(msgspec.Struct, frozen=True):
    uid: str


class _Object(msgspec.Struct, frozen=True):
    metadata: _ObjectMetadata


class _ListMetadata(msgspec.Struct, frozen=True, rename="camel"):
    resource_version: str


class _SliceList(msgspec.Struct, frozen=True):
    metadata: _ListMetadata
    items: list[FoundSlice] = []


def _selector(node: str) -> str:
    return "fieldSelector=" + quote(f"spec.nodeName={node},spec.driver={DRIVER}")


def _error(status: int, method: str, path: str, data: bytes) -> SnapbackError:
    try:
        message = str(msgspec.json.decode(data)["message"])
    except (msgspec.MsgspecError, LookupError, TypeError, UnicodeDecodeError):
        message = data[:200].decode(errors="replace")
    passing = StoreBusy if status == 429 or status >= 500 else InvalidInput
    kind = _ERRORS.get(status, passing)
    return kind(f"{method} {path}: {status}: {message}", status=status)
