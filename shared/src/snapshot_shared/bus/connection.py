"""One connection to NATS that lasts until it is closed.

It reconnects without limit, rebuilds a connection that was closed for any reason, and buffers
nothing while it is disconnected.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any, Protocol, Self

import nats.errors
import nats.js.errors
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription

from snapshot_shared import instruments
from snapshot_shared.bus.client import INBOXES, BusClient
from snapshot_shared.errors import (
    BusUnavailable,
    Conflict,
    InvalidInput,
    NotPermitted,
    SnapbackError,
)
from snapshot_shared.metrics import OFF, Metrics
from snapshot_shared.tasks import any_set

log = logging.getLogger(__name__)

WRONG_LAST_SEQUENCE = 10071
"""NATS' error code for an expectation of a publish that does not hold."""
REQUEST_S = 5.0
IMPATIENCE_S = 4.0
RETRY_S = 0.5

_SEED = re.compile(r"SU[A-Z2-7]{56}")


class Attachment(Protocol):
    """What is put on every new connection: a subscription, or a service."""

    async def begin(self, client: Client) -> None:
        """Put it on a connection."""


class CoreSubscription:
    """A subscription to core NATS messages, on whatever connection there is."""

    def __init__(self, subject: str, take: Callable[[Msg], Awaitable[None]]) -> None:
        """Call `take` with each message."""
        self._subject = subject
        self._take = take
        self._subscription: Subscription | None = None

    async def begin(self, client: Client) -> None:
        """Subscribe on a connection."""
        self._subscription = await client.subscribe(self._subject, cb=self._take)

    async def end(self) -> None:
        """Unsubscribe; the connection may be gone."""
        if self._subscription is not None:
            with contextlib.suppress(nats.errors.Error):
                await self._subscription.unsubscribe()


class Connection:
    """A connection that does not end until `close`."""

    def __init__(
        self,
        url: str,
        name: str,
        *,
        credentials: str | None = None,
        ca: Path | None = None,
        inbox: str = INBOXES.rstrip("."),
        replicas: int = 1,
        metrics: Metrics = OFF,
    ) -> None:
        """Connect with `connect`.

        `url` may name the servers of a cluster, separated by commas. `credentials` is the path of
        an nkey seed, `ca` that of the certificates by which servers are known over TLS (PEM; the
        system's by default), and `inbox` the prefix below which its user may subscribe to answers
        (`permissions.User.inbox`). Streams and buckets are kept by `replicas` of the servers.
        """
        self._url = url
        self._replicas = replicas
        self._name = name
        self._credentials = credentials
        self._ca = ca
        self._inbox = inbox
        self._user = inbox.removeprefix(INBOXES) if inbox.startswith(INBOXES) else name
        self._client: BusClient | None = None
        self._is_patient = True
        self._closing = False
        self._connected = asyncio.Event()
        self._lost = asyncio.Event()
        self._supervisor: asyncio.Task[None] | None = None
        self._rebuilt: list[asyncio.Event] = []
        self._misses_stream = asyncio.Event()
        self._attachments: list[Attachment] = []
        self._metrics = metrics
        metrics.observe(instruments.CONNECTED, lambda: {(): float(self.is_connected)})

    async def connect(self, *, patiently: bool = True) -> Self:
        """Connect; a daemon waits indefinitely, a command (`patiently=False`) fails at once."""
        await self._open(patiently=patiently)
        self._supervisor = asyncio.create_task(self._supervise(), name="bus-supervisor")
        return self

    async def _open(self, *, patiently: bool) -> None:
        self._is_patient = patiently
        options: dict[str, Any] = {
            "servers": self._url.split(","),
            "name": self._name,
            "connect_timeout": 2,
            "allow_reconnect": patiently,
            "max_reconnect_attempts": -1 if patiently else 1,
            "reconnect_time_wait": 0.5,
            "ping_interval": 10,
            "max_outstanding_pings": 2,
            "pending_size": -1,
            "error_cb": self._on_error,
            "disconnected_cb": self._on_disconnected,
            "reconnected_cb": self._on_reconnected,
            "closed_cb": self._on_closed,
            "inbox_prefix": self._inbox,
        }
        if self._credentials:
            options["nkeys_seed"] = _checked_seed(self._credentials)
        if self._ca:
            options["tls"] = _trusting(self._ca)
        client = BusClient(self._user)
        try:
            # nats-py retries the first connection without end; a command must return.
            async with asyncio.timeout(None if patiently else IMPATIENCE_S):
                await client.connect(**options)
        except (nats.errors.Error, OSError, TimeoutError) as error:
            with contextlib.suppress(Exception):
                await client.close()
            if _is_refusal(error):
                with_what = self._credentials or "no nkey"
                raise NotPermitted(
                    f"NATS at {self._url} does not let {self._user} in with {with_what}",
                    user=self._user,
                ) from error
            raise BusUnavailable(
                f"no NATS server answers at {self._url}: {error or type(error).__name__}",
                url=self._url,
            ) from error
        self._client = client
        self._lost.clear()
        self._connected.set()
        for attachment in tuple(self._attachments):
            await attachment.begin(client)

    async def _supervise(self) -> None:
        while not self._closing:
            await self._lost.wait()
            if not self._closing:
                log.warning("the NATS connection was closed; building a new one")
                await self._rebuild()

    async def _rebuild(self) -> None:
        while not self._closing:
            try:
                await self._open(patiently=True)
            except (SnapbackError, nats.errors.Error, OSError, ValueError) as error:
                log.warning("no new NATS connection yet: %s", error)
                await any_set(RETRY_S)
            else:
                self._notify_reconnected()
                return

    async def _on_error(self, error: Exception) -> None:
        is_handled = self._client is not None and self._client.take_violation(error)
        # A command reports the error itself; a daemon that may not go on has only its log.
        is_news = "violation" in str(error).lower() and self._is_patient and not is_handled
        level = logging.WARNING if is_news else logging.INFO
        log.log(level, "NATS, as %s: %s", self._user, error or type(error).__name__)

    async def _on_disconnected(self) -> None:
        self._connected.clear()

    async def _on_reconnected(self) -> None:
        self._connected.set()
        self._notify_reconnected()

    async def _on_closed(self) -> None:
        self._connected.clear()
        self._lost.set()

    def _notify_reconnected(self) -> None:
        self._metrics.add(instruments.RECONNECTIONS)
        self._begin_again()

    def _begin_again(self) -> None:
        for event in self._rebuilt:
            event.set()

    def reconnections(self) -> asyncio.Event:
        """Return an event that is set when messages may have been lost; the waiter clears it.

        That is after each reconnection, and after `keep_assets` has created a lost stream again.
        """
        event = asyncio.Event()
        self._rebuilt.append(event)
        return event

    @property
    def is_connected(self) -> bool:
        """Whether the socket is up."""
        return self._connected.is_set()

    def not_ready(self) -> str:
        """Return why nothing can be done over this connection, in words; empty when it can."""
        return "" if self.is_connected else "not connected to NATS"

    async def wait_connected(self) -> None:
        """Wait until the socket is up."""
        await self._connected.wait()

    async def pause(self, again: asyncio.Event) -> None:
        """Wait before another try: until a reconnection (`again`), or half a second."""
        await any_set(RETRY_S, again)
        again.clear()
        await self.wait_connected()

    @property
    def client(self) -> BusClient:
        """Return the client of nats-py. BusUnavailable before `connect`."""
        if self._client is None:
            raise BusUnavailable("not connected yet")
        return self._client

    @property
    def server_version(self) -> str:
        """Return the version of the server behind the connection, such as `2.14.3`."""
        found = self.client.connected_server_version
        return f"{found.major}.{found.minor}.{found.patch}"

    async def close(self) -> None:
        """Drain and close; never raises."""
        self._closing = True
        self._lost.set()
        if self._supervisor:
            self._supervisor.cancel()
        if self._client is not None and not self._client.is_closed:
            with contextlib.suppress(Exception):
                async with asyncio.timeout(2):
                    await self._client.drain()
            with contextlib.suppress(Exception):
                await self._client.close()

    async def _attach(self, attachment: Attachment) -> None:
        """Put something on this connection and on every later one."""
        self._attachments.append(attachment)
        await attachment.begin(self.client)

    @contextlib.asynccontextmanager
    async def _subscribed(
        self, subject: str, take: Callable[[Msg], Awaitable[None]]
    ) -> AsyncIterator[None]:
        """Call `take` with the messages on a subject for the length of the block.

        The server has the subscription when the block begins, unless it does not answer.
        NotPermitted when it refuses the subscription.
        """
        subscription = CoreSubscription(subject, take)
        try:
            await self._attach(subscription)
            await self._flush()
            self.client.check_subscription(subject)
            yield
        finally:
            self._attachments.remove(subscription)
            await subscription.end()

    async def _flush(self) -> None:
        """Wait until the server has our subscriptions, if it answers at all.

        nats-py stops reading when the PONG of a flush arrives that was cancelled or timed out, so
        a flush is left alone until its connection has been given up.
        """
        flushed = asyncio.ensure_future(self.client.flush())
        flushed.add_done_callback(lambda done: done.cancelled() or done.exception())
        if not (await asyncio.wait({flushed}, timeout=REQUEST_S))[0]:
            log.info("the server does not answer a subscription")


def _trusting(ca: Path) -> ssl.SSLContext:
    """Return what trusts the servers with a certificate of these authorities. InvalidInput."""
    try:
        return ssl.create_default_context(cafile=ca)
    except (OSError, ssl.SSLError) as error:
        raise InvalidInput(
            f"the certificates {ca} by which NATS is known cannot be read: {error}",
            next_step="name a file with certificates in PEM format",
        ) from error


def _checked_seed(path: str) -> str:
    """Return the path of an nkey seed. InvalidInput when it cannot be used."""
    try:
        seed = Path(path).read_text("ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInput(f"the nkey seed {path} cannot be read: {error}", path=path) from error
    if not _SEED.fullmatch(seed):
        raise InvalidInput(f"{path} holds no nkey seed of a user", path=path)
    return path


def _is_refusal(error: BaseException) -> bool:
    return "authorization violation" in str(error).lower()


async def translated(awaitable: Awaitable[Any], what: str) -> Any:
    """Await something of nats-py with its errors as ours: Conflict or BusUnavailable."""
    try:
        return await awaitable
    except nats.js.errors.APIError as error:
        if error.err_code == WRONG_LAST_SEQUENCE:
            raise Conflict(f"{what}: another client has published first") from error
        raise unavailable(error, what) from error
    except (nats.errors.Error, nats.js.errors.Error, TimeoutError, OSError) as error:
        raise unavailable(error, what) from error


def unavailable(error: BaseException, what: str) -> BusUnavailable:
    """Return an error of nats-py as one of ours."""
    return BusUnavailable(f"{what}: {error or type(error).__name__}")
