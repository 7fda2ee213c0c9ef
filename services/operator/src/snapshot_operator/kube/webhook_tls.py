"""The certificate that the webhooks are served with: made and renewed here, or mounted by others.

It is taken into use without a restart: the next connection has the new one. Where the operators
make it themselves it is in a Secret, which the first of them writes, whichever is active; each
write names the version that was read, so that there is one certificate at a time.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import logging
import os
import ssl
from collections.abc import AsyncIterator, Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
from asyncinotify import Inotify, Mask

from snapshot_operator.kube.certificates import LIFE, Certificates, at, renewal, renewed
from snapshot_operator.kube.rbac import CERTIFICATE_SECRET, NAME
from snapshot_operator.kube.webhooks import BASE, MUTATING, VALIDATING, Endpoint
from snapshot_shared.clocks import Clocks
from snapshot_shared.errors import (
    AlreadyExists,
    Conflict,
    InvalidInput,
    NotFound,
    SnapbackError,
)
from snapshot_shared.kube_client import MERGE_PATCH, KubeClient, decoded
from snapshot_shared.tasks import any_set, end_all, in_thread

log = logging.getLogger(__name__)

MAX_RETRY_S = 30.0
MAX_REST_S = 86_400.0
"""The wall clock is compared at least once in a day: it may have been set."""
WATCH_S = 300

_FIELDS = ("ca.crt", "ca.key", "tls.crt", "tls.key")
"""The keys of the Secret, in the order of `Certificates`."""


def new_context() -> ssl.SSLContext:
    """Return a context without a certificate."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    return context


def take(context: ssl.SSLContext, certificate: bytes, key: bytes) -> None:
    """Serve another certificate to those who connect next. ssl.SSLError where it is none.

    The module `ssl` reads files alone: this one is in memory.
    """
    # What is wrong is found before it can spoil what is served.
    _load(new_context(), certificate, key)
    _load(context, certificate, key)


def _load(context: ssl.SSLContext, certificate: bytes, key: bytes) -> None:
    descriptor = os.memfd_create("certificate", os.MFD_CLOEXEC)
    try:
        os.write(descriptor, certificate + b"\n" + key)
        context.load_cert_chain(f"/proc/self/fd/{descriptor}")
    finally:
        os.close(descriptor)


class OwnCertificate:
    """The certificate that the operators make: in a Secret of theirs, renewed before it ends."""

    def __init__(
        self,
        client: KubeClient,
        endpoint: Endpoint,
        clocks: Clocks,
        jitter: Callable[[], float],
        life: timedelta = LIFE,
    ) -> None:
        """Serve `endpoint`. `jitter` returns a random number from 0 to 1."""
        self._client = client
        self._endpoint = endpoint
        self._clocks = clocks
        self._jitter = jitter
        self._life = life
        self._changed = asyncio.Event()
        self._context = new_context()
        self._served: Certificates | None = None

    @contextlib.asynccontextmanager
    async def kept(self) -> AsyncIterator[ssl.SSLContext]:
        """Keep the certificate for the length of the block, once there is one."""
        await self._first()
        secrets = f"/api/v1/namespaces/{self._endpoint.namespace}/secrets"
        watched = ((secrets, CERTIFICATE_SECRET), *((f"{BASE}/{k}", NAME) for k in _CONFIGURED))
        tasks = [
            asyncio.ensure_future(self._keep()),
            *(asyncio.ensure_future(self._watch(path, name)) for path, name in watched),
        ]
        try:
            yield self._context
        finally:
            await end_all(*tasks)

    async def _first(self) -> None:
        failures = 0
        while True:
            try:
                self._serve(await self._current())
                return
            except (SnapbackError, ssl.SSLError) as error:
                failures += 1
                log.warning("there is no certificate for the webhooks yet: %s", error)
            await self._pause(failures)

    async def _keep(self) -> None:
        """Renew what is due, serve what another operator has renewed, and have it trusted."""
        failures = 0
        while True:
            self._changed.clear()
            try:
                found = await self._current()
                # Before it is served: nothing may be served that is not trusted.
                for plural in _CONFIGURED:
                    await self._trust(plural)
                self._serve(found)
                failures = 0
            except Exception as error:
                # Whatever it was: the certificate ends some day, and nothing else renews it.
                failures += 1
                unknown = None if isinstance(error, SnapbackError | ssl.SSLError) else error
                text = "the certificate of the webhooks is not looked after: %s"
                log.warning(text, error, exc_info=unknown)
                await self._pause(failures)
                continue
            left = renewal(found).timestamp() - self._clocks.wall()
            await any_set(min(max(left, 0.0) + 1.0, MAX_REST_S), self._changed)

    async def _pause(self, failures: int) -> None:
        longest = min(MAX_RETRY_S, 2.0 ** min(failures, 10))
        await any_set(longest * (1 + self._jitter()) / 2)

    def _serve(self, found: Certificates) -> None:
        if found != self._served:
            take(self._context, found.certificate, found.key)
            self._served = found
            log.info("the webhooks have a certificate that is renewed on %s", renewal(found))

    async def _current(self) -> Certificates:
        """Return what is in the Secret, after what was due was renewed and written there."""
        while True:
            with contextlib.suppress(AlreadyExists, Conflict):
                version, stored = await self._stored()
                now = at(self._clocks.wall())
                wanted = renewed(stored, self._endpoint.names, now, self._life)
                if wanted != stored:
                    await self._write(wanted, version)
                return wanted
            log.info("another operator has written the certificate of the webhooks")

    @property
    def _path(self) -> str:
        return f"/api/v1/namespaces/{self._endpoint.namespace}/secrets"

    async def _stored(self) -> tuple[str, Certificates | None]:
        """Return the version of the Secret, none where it is not there, and what it holds."""
        try:
            answer = await self._client.request("GET", f"{self._path}/{CERTIFICATE_SECRET}")
        except NotFound:
            return "", None
        secret = decoded(_SECRET, answer)
        try:
            values = [base64.b64decode(secret.data[name]) for name in _FIELDS]
        except (KeyError, ValueError):
            return secret.metadata.resource_version, None
        return secret.metadata.resource_version, Certificates(*values)

    async def _write(self, wanted: Certificates, version: str) -> None:
        """Create the Secret, or replace the version that was read. AlreadyExists, Conflict."""
        meta = {"name": CERTIFICATE_SECRET, "namespace": self._endpoint.namespace}
        body: dict[str, Any] = {
            "apiVersion": "v1",
            "kind": "Secret",
            "type": "Opaque",
            "metadata": {**meta, "labels": {"app.kubernetes.io/part-of": "snapback"}},
            "data": {
                name: base64.b64encode(value).decode()
                for name, value in zip(_FIELDS, wanted, strict=True)
            },
        }
        if not version:
            await self._client.request("POST", self._path, body=body)
            return
        body["metadata"]["resourceVersion"] = version
        await self._client.request("PUT", f"{self._path}/{CERTIFICATE_SECRET}", body=body)

    async def _trust(self, plural: str) -> None:
        """Have the API server trust what the Secret holds, if the webhooks are configured at all.

        The Secret is read after the configuration, whose version is compared: an operator that was
        paused brings nothing old back.
        """
        path = f"{BASE}/{plural}/{NAME}"
        try:
            found = decoded(_DOCUMENT, await self._client.request("GET", path))
        except NotFound:
            log.info("there are no %s called %s", plural, NAME)
            return
        _, stored = await self._stored()
        if stored is None:
            return
        bundle = base64.b64encode(stored.authorities).decode()
        webhooks = found.get("webhooks") or []
        if all(each["clientConfig"].get("caBundle") == bundle for each in webhooks):
            return
        trusting = [
            {**each, "clientConfig": {**each["clientConfig"], "caBundle": bundle}}
            for each in webhooks
        ]
        version = found["metadata"]["resourceVersion"]
        body = {"metadata": {"resourceVersion": version}, "webhooks": trusting}
        await self._client.request("PATCH", path, body=body, content_type=MERGE_PATCH)

    async def _watch(self, path: str, name: str) -> None:
        """Look again whenever one object has changed; a watch begins with the object itself."""
        failures = 0
        while True:
            params = {
                "watch": "true",
                "fieldSelector": f"metadata.name={name}",
                "timeoutSeconds": str(int(WATCH_S * (1 + self._jitter()))),
            }
            try:
                async with contextlib.aclosing(self._client.watch(path, params)) as lines:
                    async for _ in lines:
                        failures = 0
                        self._changed.set()
            except SnapbackError as error:
                failures += 1
                log.warning("%s %s is not watched: %s", path, name, error)
            await self._pause(failures)


_CONFIGURED = (MUTATING, VALIDATING)


class _SecretMeta(msgspec.Struct, frozen=True, rename="camel"):
    resource_version: str


class _Secret(msgspec.Struct, frozen=True):
    metadata: _SecretMeta
    data: dict[str, str] = {}


_SECRET = msgspec.json.Decoder(_Secret)
_DOCUMENT = msgspec.json.Decoder(dict[str, Any])


class MountedCertificate:
    """A certificate that others keep in a folder, as `tls.crt` and `tls.key`."""

    def __init__(self, folder: Path) -> None:
        """Follow a folder, such as the mount of a Secret."""
        self._folder = folder
        self._context = new_context()

    @contextlib.asynccontextmanager
    async def kept(self) -> AsyncIterator[ssl.SSLContext]:
        """Serve what is there, and what is put there, for the length of the block.

        InvalidInput where there is no certificate at the begin.
        """
        with Inotify() as changes:
            try:
                # A kubelet puts all files of a Secret into place by one rename of a link.
                changes.add_watch(self._folder, Mask.MOVED_TO | Mask.CREATE | Mask.CLOSE_WRITE)
                await self._take()
            except (OSError, ssl.SSLError) as error:
                raise InvalidInput(
                    f"SNAPBACK_WEBHOOK_CERTIFICATE_DIR={str(self._folder)!r} has no certificate: "
                    f"{error}",
                    next_step="mount a Secret with tls.crt and tls.key there, or unset it",
                ) from error
            following = asyncio.ensure_future(self._follow(changes))
            try:
                yield self._context
            finally:
                await end_all(following)

    async def _follow(self, changes: Inotify) -> None:
        async for _ in changes:
            try:
                await self._take()
            except (OSError, ssl.SSLError) as error:
                # The other file of the two may be on its way.
                log.warning("the certificate in %s is not served: %s", self._folder, error)

    async def _take(self) -> None:
        files = [self._folder / name for name in ("tls.crt", "tls.key")]
        certificate, key = [await in_thread(file.read_bytes) for file in files]
        take(self._context, certificate, key)
        log.info("the webhooks have the certificate in %s", self._folder)
