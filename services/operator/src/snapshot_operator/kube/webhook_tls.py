"""What operators and API servers know each other by: a certificate, and a path that is a secret.

An API server trusts the authorities of the certificate. It is known by the path, which the
operators write into the configurations of their webhooks: any pod reaches the port, and none can
guess the path.

Both are in a Secret, which the first operator writes, whichever is active; each write names the
version that was read, so that there is one certificate and one path at a time. The certificate may
be mounted by others instead. It is taken into use without a restart: the next connection has it.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hmac
import logging
import os
import re
import secrets
import ssl
from collections.abc import AsyncIterator, Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
from asyncinotify import Inotify, Mask

from snapshot_operator.kube.certificates import LIFE, Certificates, at, renewal, renewed
from snapshot_operator.kube.definitions import PATH as DEFINITIONS
from snapshot_operator.kube.rbac import CERTIFICATE_SECRET, NAME
from snapshot_operator.kube.webhooks import (
    BASE,
    CONVERSIONS,
    MUTATING,
    VALIDATING,
    Document,
    Endpoint,
    addressed,
    introduced,
)
from snapshot_shared.clocks import Clocks
from snapshot_shared.errors import (
    AlreadyExists,
    Conflict,
    InvalidInput,
    NotFound,
    SnapbackError,
)
from snapshot_shared.kube_client import MERGE_PATCH, KubeClient, decoded
from snapshot_shared.kube_watch import WATCH_S, Bare, WatchEvent, changes, follow
from snapshot_shared.tasks import any_set, end_all, in_thread

log = logging.getLogger(__name__)

MAX_RETRY_S = 30.0
MAX_REST_S = 86_400.0
"""The wall clock is compared at least once in a day: it may have been set."""

SECRET_BYTES = 16

_FIELDS = ("ca.crt", "ca.key", "tls.crt", "tls.key")
"""The keys of the Secret, in the order of `Certificates`."""
_PATH = "path"
"""The key of the secret with which paths begin, in hexadecimal."""


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


class Introduction:
    """Keeps the Secret of the operators, and writes it into their webhook configurations."""

    def __init__(
        self,
        client: KubeClient,
        endpoint: Endpoint,
        clocks: Clocks,
        jitter: Callable[[], float],
        life: timedelta = LIFE,
        *,
        makes_certificate: bool = True,
        converted: Sequence[str] = (),
    ) -> None:
        """Serve `endpoint`. `jitter` returns a random number from 0 to 1.

        `converted` are the names of the definitions whose versions the operators convert. Unless
        it `makes_certificate`, others make it, and have the API server trust it.
        """
        self._client = client
        self._endpoint = endpoint
        self._clocks = clocks
        self._jitter = jitter
        self._life = life
        self._makes_certificate = makes_certificate
        self._converted = converted
        self._secrets: tuple[str, ...] = ()
        self._changed = asyncio.Event()
        self._context = new_context()
        self._served: Certificates | None = None

    def knows(self, secret: str) -> bool:
        """Whether a path begins with the secret of the operators, or with the one before."""
        return any(hmac.compare_digest(secret.encode(), each.encode()) for each in self._secrets)

    @contextlib.asynccontextmanager
    async def kept(self) -> AsyncIterator[ssl.SSLContext]:
        """Keep all of it for the length of the block, once it is there; give the certificate."""
        await self._first()
        secrets = f"/api/v1/namespaces/{self._endpoint.namespace}/secrets"
        watched = (
            (secrets, CERTIFICATE_SECRET),
            *((f"{BASE}/{plural}", NAME) for plural in _CONFIGURED),
            *((DEFINITIONS, name) for name in self._converted),
        )
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
                    await self._introduce(f"{BASE}/{plural}/{NAME}", _in_webhooks)
                for name in self._converted:
                    await self._introduce(f"{DEFINITIONS}/{name}", self._in_conversion)
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
            due = renewal(found).timestamp() - self._clocks.wall() if found else MAX_REST_S
            await any_set(min(max(due, 0.0) + 1.0, MAX_REST_S), self._changed)

    async def _pause(self, failures: int) -> None:
        longest = min(MAX_RETRY_S, 2.0 ** min(failures, 10))
        await any_set(longest * (1 + self._jitter()) / 2)

    def _serve(self, found: Certificates | None) -> None:
        if found is not None and found != self._served:
            take(self._context, found.certificate, found.key)
            self._served = found
            log.info("the webhooks have a certificate that is renewed on %s", renewal(found))

    async def _current(self) -> Certificates | None:
        """Return the certificate of the Secret; renew it first, and write it there, if it is due.

        The secret of the path is known from then on.
        """
        while True:
            with contextlib.suppress(AlreadyExists, Conflict):
                version, stored, secret = await self._stored()
                wanted = stored
                if self._makes_certificate:
                    now = at(self._clocks.wall())
                    wanted = renewed(stored, self._endpoint.names, now, self._life)
                if wanted != stored or not secret:
                    secret = secret or secrets.token_hex(SECRET_BYTES)
                    await self._write(wanted, secret, version)
                if secret not in self._secrets:
                    self._secrets = (secret, *self._secrets[:1])
                return wanted
            log.info("another operator has written the certificate of the webhooks")

    @property
    def _path(self) -> str:
        return f"/api/v1/namespaces/{self._endpoint.namespace}/secrets"

    async def _stored(self) -> tuple[str, Certificates | None, str]:
        """Return the version of the Secret, its certificate and its path; empty if not there."""
        try:
            answer = await self._client.request("GET", f"{self._path}/{CERTIFICATE_SECRET}")
        except NotFound:
            return "", None, ""
        found = decoded(_SECRET, answer)
        values = {}
        for name, text in found.data.items():
            with contextlib.suppress(ValueError):
                values[name] = base64.b64decode(text)
        certificates = None
        if values.keys() >= {*_FIELDS}:
            certificates = Certificates(*(values[name] for name in _FIELDS))
        secret = values.get(_PATH, b"").decode(errors="replace")
        is_one = re.fullmatch(f"[0-9a-f]{{{2 * SECRET_BYTES}}}", secret)
        return found.metadata.resource_version, certificates, secret if is_one else ""

    async def _write(self, wanted: Certificates | None, secret: str, version: str) -> None:
        """Create the Secret, or replace the version that was read. AlreadyExists, Conflict."""
        meta = {"name": CERTIFICATE_SECRET, "namespace": self._endpoint.namespace}
        values = dict(zip(_FIELDS, wanted, strict=True)) if wanted else {}
        body: dict[str, Any] = {
            "apiVersion": "v1",
            "kind": "Secret",
            "type": "Opaque",
            "metadata": {**meta, "labels": {"app.kubernetes.io/part-of": "snapback"}},
            "data": {
                name: base64.b64encode(value).decode()
                for name, value in {**values, _PATH: secret.encode()}.items()
            },
        }
        if not version:
            await self._client.request("POST", self._path, body=body)
            return
        body["metadata"]["resourceVersion"] = version
        await self._client.request("PUT", f"{self._path}/{CERTIFICATE_SECRET}", body=body)

    def _in_conversion(self, found: Document, secret: str, bundle: str) -> Document | None:
        """Return the change of a definition, whose versions the operators convert.

        A definition without a conversion webhook stays: its release had one version.
        """
        conversion = found["spec"].get("conversion") or {}
        if conversion.get("strategy") != "Webhook":
            return None
        there = conversion["webhook"].get("clientConfig") or {}
        wanted = addressed(self._endpoint.client_config, CONVERSIONS, secret, bundle)
        if there.items() >= wanted.items():
            return None
        # A merge patch keeps the fields of another way to reach the webhook, unless they are null.
        config = {**dict.fromkeys(there.keys() - {"caBundle"}), **wanted}
        return {"spec": {"conversion": {"webhook": {"clientConfig": config}}}}

    async def _introduce(
        self, path: str, change: Callable[[Document, str, str], Document | None]
    ) -> None:
        """Write what the Secret holds into a configuration, if the API server has it.

        The Secret is read after the configuration, whose version is compared: an operator that was
        paused brings nothing old back.
        """
        try:
            found = decoded(_DOCUMENT, await self._client.request("GET", path))
        except NotFound:
            log.info("there is no %s", path)
            return
        _, stored, secret = await self._stored()
        if not secret or (self._makes_certificate and stored is None):
            return
        bundle = ""
        if self._makes_certificate and stored is not None:
            bundle = base64.b64encode(stored.authorities).decode()
        changed = change(found, secret, bundle)
        if changed is None:
            return
        version = found["metadata"]["resourceVersion"]
        body = {"metadata": {"resourceVersion": version}, **changed}
        await self._client.request("PATCH", path, body=body, content_type=MERGE_PATCH)

    async def _watch(self, path: str, name: str) -> None:
        """Look again whenever one object has changed; a watch begins with the object itself."""
        seen, named = "", {"fieldSelector": f"metadata.name={name}"}

        async def watch() -> None:
            nonlocal seen
            lasts_s = WATCH_S * (1 + self._jitter())
            found = changes(self._client, path, _CHANGE, params=named, within_s=lasts_s)
            async with contextlib.aclosing(found):
                async for change, version in found:
                    seen = version
                    if change is not None:
                        self._changed.set()

        await follow(f"{path} {name}", lambda: seen, watch, watch, self._jitter)


_CONFIGURED = (MUTATING, VALIDATING)


def _in_webhooks(found: Document, secret: str, bundle: str) -> Document | None:
    """Return the change of a configuration of webhooks; None if it is as it should be."""
    webhooks = found.get("webhooks") or []
    wanted = [introduced(each, secret, bundle) for each in webhooks]
    return None if wanted == webhooks else {"webhooks": wanted}


class _SecretMeta(msgspec.Struct, frozen=True, rename="camel"):
    resource_version: str


class _Secret(msgspec.Struct, frozen=True):
    metadata: _SecretMeta
    data: dict[str, str] = {}


_SECRET = msgspec.json.Decoder(_Secret)
_CHANGE = msgspec.json.Decoder(WatchEvent[Bare])
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
