"""NATS, in one place: with its client the only importer of `nats`.

It reconnects for ever, rebuilds a connection that was closed for any reason, buffers nothing while
disconnected, and keeps streams, buckets and durables in existence. Everything it carries can be
rebuilt from the object store and the journals.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, cast

import nats.errors
import nats.js.errors
import nats.micro
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from nats.js.api import (
    AckPolicy,
    ConsumerConfig,
    DeliverPolicy,
    DiscardPolicy,
    KeyValueConfig,
    RetentionPolicy,
    StorageType,
    StreamConfig,
)
from nats.micro.service import ServiceConfig

from snapshot_shared import instruments, subjects
from snapshot_shared.errors import (
    BusUnavailable,
    Conflict,
    InvalidInput,
    NotFound,
    NotPermitted,
    SnapbackError,
)
from snapshot_shared.metrics import OFF, Metrics
from snapshot_shared.nats_client import (
    IDLE,
    INBOXES,
    NO_MESSAGES,
    REQUEST_TIMEOUT,
    BusClient,
    InboxAnswers,
    MessageStatus,
    message_status,
)
from snapshot_shared.pull import BATCH, Pull

log = logging.getLogger(__name__)

WRONG_LAST_SEQUENCE = 10071
NO_MESSAGE_FOUND = 10057
KV_OPERATION = "KV-Operation"
FETCH_S = 20.0
"""How long the server keeps a request for messages, in seconds."""
LATE_S = 1.0
"""How much longer a request is taken for lost when nothing has come of it, in seconds."""
REQUEST_S = 5.0
IMPATIENCE_S = 4.0
RETRY_S = 0.5
ACK_WAIT_S = 30.0
ENSURE_EVERY_S = 30.0
ENSURE_AGAIN_S = 1.0
PRESENCE_TTL_S = 30.0
DAY_S = 86400.0
MARKER_TTL_S = 3600.0
"""How long it can be read that a key of a bucket was removed, in seconds."""
DEDUPLICATE_S = 120.0
CONSUMERS_A_PAGE = 256

ASKED = "Snapback-Asked"
"""The header by which a handler is told the subject of a request, whatever its sender wrote."""

_SEED = re.compile(r"SU[A-Z2-7]{56}")

Handler = Callable[[bytes, Mapping[str, str]], Awaitable[bytes]]

STREAMS: tuple[StreamConfig, ...] = (
    StreamConfig(
        name=subjects.ORDERS,
        subjects=["snap.order.*.*.*"],
        retention=RetentionPolicy.LIMITS,
        storage=StorageType.FILE,
        discard=DiscardPolicy.NEW,
        max_msgs_per_subject=1,
        max_msgs=100_000,
        max_bytes=256 * 1024 * 1024,
        max_msg_size=256 * 1024,
        max_consumers=10_000,
        allow_direct=True,
    ),
    StreamConfig(
        name=subjects.REPORTS,
        subjects=["snap.report.*.*.*"],
        storage=StorageType.FILE,
        discard=DiscardPolicy.OLD,
        max_age=14 * DAY_S,
        max_bytes=512 * 1024 * 1024,
        max_msg_size=256 * 1024,
        allow_direct=True,
    ),
    StreamConfig(
        name=subjects.PROGRESS,
        subjects=["snap.progress.*.*"],
        storage=StorageType.MEMORY,
        discard=DiscardPolicy.OLD,
        max_msgs_per_subject=1,
        max_age=DAY_S,
        max_bytes=16 * 1024 * 1024,
        allow_direct=True,
    ),
    StreamConfig(
        name=subjects.SPANS,
        subjects=["snap.span.*.*"],
        storage=StorageType.FILE,
        discard=DiscardPolicy.OLD,
        max_age=2 * DAY_S,
        max_bytes=64 * 1024 * 1024,
        allow_direct=True,
    ),
    StreamConfig(
        name=subjects.DEAD,
        subjects=["snap.dead.*"],
        storage=StorageType.FILE,
        discard=DiscardPolicy.OLD,
        max_age=30 * DAY_S,
        max_bytes=64 * 1024 * 1024,
        allow_direct=True,
    ),
)

BUCKETS: tuple[KeyValueConfig, ...] = (
    KeyValueConfig(bucket=subjects.NODES_BUCKET, history=1, ttl=PRESENCE_TTL_S, direct=True),
    KeyValueConfig(bucket=subjects.OBJECTS_BUCKET, history=1, direct=True),
    KeyValueConfig(bucket=subjects.SCHEMAS_BUCKET, history=1, direct=True),
)


def stream_of(bucket: KeyValueConfig) -> StreamConfig:
    """Describe the stream behind a bucket.

    As nats-py does, but without rollups: with one, whoever may write one key could wipe them all.
    """
    return StreamConfig(
        name=subjects.stream_of_bucket(bucket.bucket),
        subjects=[subjects.bucket_key(bucket.bucket, ">")],
        discard=DiscardPolicy.NEW,
        max_msgs_per_subject=bucket.history,
        max_age=bucket.ttl,
        duplicate_window=min(bucket.ttl or DEDUPLICATE_S, DEDUPLICATE_S),
        deny_delete=True,
        allow_rollup_hdrs=False,
        allow_direct=bucket.direct,
        allow_msg_ttl=True,
    )


def marker() -> dict[str, str]:
    """Return the headers of the message that says that a key was removed."""
    return {KV_OPERATION: "DEL", "Nats-TTL": f"{MARKER_TTL_S:g}s"}


class Delivery(NamedTuple):
    """One message of a stream: its place, its bytes and its headers; `ack` settles it.

    `stored_at` is when the server stored it, in seconds since the epoch by the server's clock; 0
    when that is not known.
    """

    subject: str
    sequence: int
    data: bytes
    headers: Mapping[str, str]
    raw: Msg
    stored_at: float = 0.0

    async def ack(self) -> None:
        """Settle and wait until the server has it."""
        await _translating(self.raw.ack_sync(timeout=REQUEST_S), "ack")

    async def give_back(self) -> None:
        """Have the message delivered again at once, to any client of the durable, if possible."""
        with contextlib.suppress(nats.errors.Error, nats.js.errors.Error):
            await self.raw.nak()


class StreamState(NamedTuple):
    """A stream as it is. `differs` names the settings that are not as the product wants them.

    `fill` is the share of its room that is taken, from 0 to 1; `durables` gives filters by name.
    """

    name: str
    exists: bool
    differs: tuple[str, ...] = ()
    messages: int = 0
    bytes: int = 0
    fill: float = 0.0
    durables: Mapping[str, str] = MappingProxyType({})


class _Hearing:
    """A subject that is listened to, on whatever connection there is."""

    def __init__(self, subject: str, take: Callable[[Msg], Awaitable[None]]) -> None:
        self._subject = subject
        self._take = take
        self._subscription: Subscription | None = None

    async def begin(self, client: Client) -> None:
        self._subscription = await client.subscribe(self._subject, cb=self._take)

    async def end(self) -> None:
        if self._subscription is not None:
            with contextlib.suppress(nats.errors.Error):
                await self._subscription.unsubscribe()


class Bus:
    """A connection that does not end until `close`."""

    def __init__(
        self,
        url: str,
        name: str,
        *,
        credentials: str | None = None,
        inbox: str = INBOXES.rstrip("."),
        replicas: int = 1,
        metrics: Metrics = OFF,
    ) -> None:
        """Remember where to connect.

        `url` may name the servers of a cluster, separated by commas. `credentials` is the path of
        an nkey seed, and `inbox` the prefix below which its user may hear answers
        (`permissions.User.inbox`). Streams and buckets are kept by `replicas` of the servers.
        """
        self._url = url
        self._replicas = replicas
        self._name = name
        self._credentials = credentials
        self._inbox = inbox
        self._user = inbox.removeprefix(INBOXES) if inbox.startswith(INBOXES) else name
        self._client: BusClient | None = None
        self._is_patient = True
        self._closing = False
        self._connected = asyncio.Event()
        self._lost = asyncio.Event()
        self._supervisor: asyncio.Task[None] | None = None
        self._services: list[tuple[str, str, dict[str, str], dict[str, Handler]]] = []
        self._rebuilt: list[asyncio.Event] = []
        self._hearings: list[_Hearing] = []
        self._metrics = metrics
        metrics.observe(instruments.CONNECTED, lambda: {(): float(self.is_connected)})

    async def connect(self, *, patiently: bool = True) -> Bus:
        """Connect; a daemon waits for ever, a command (`patiently=False`) gives up at once."""
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
        client = BusClient(self._user)
        try:
            # nats-py tries for ever by itself; a command has to come back.
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
        for hearing in tuple(self._hearings):
            await hearing.begin(client)
        for service in self._services:
            await self._start_service(*service)

    async def _supervise(self) -> None:
        while not self._closing:
            await self._lost.wait()
            if not self._closing:
                log.warning("the NATS connection was closed; building a new one")
                await self._rebuild()

    async def _rebuild(self) -> None:
        never = asyncio.Event()
        while not self._closing:
            try:
                await self._open(patiently=True)
            except (SnapbackError, nats.errors.Error, OSError, ValueError) as error:
                log.warning("no new NATS connection yet: %s", error)
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(never.wait(), RETRY_S)
            else:
                self._announce()
                return

    async def _on_error(self, error: Exception) -> None:
        is_told = self._client is not None and self._client.take_violation(error)
        # A command says it itself; a daemon that may not go on has only its log.
        is_news = "violation" in str(error).lower() and self._is_patient and not is_told
        level = logging.WARNING if is_news else logging.INFO
        log.log(level, "NATS, as %s: %s", self._user, error or type(error).__name__)

    async def _on_disconnected(self) -> None:
        self._connected.clear()

    async def _on_reconnected(self) -> None:
        self._connected.set()
        self._announce()

    async def _on_closed(self) -> None:
        self._connected.clear()
        self._lost.set()

    def _announce(self) -> None:
        self._metrics.add(instruments.RECONNECTIONS)
        for event in self._rebuilt:
            event.set()

    def reconnections(self) -> asyncio.Event:
        """Give an event that is set after each reconnection; the waiter clears it."""
        event = asyncio.Event()
        self._rebuilt.append(event)
        return event

    @property
    def is_connected(self) -> bool:
        """Say whether the socket is up now."""
        return self._connected.is_set()

    def not_ready(self) -> str:
        """Say in words why nothing can be done over this bus now; empty when it can."""
        return "" if self.is_connected else "not connected to NATS"

    async def wait_connected(self) -> None:
        """Wait until the socket is up."""
        await self._connected.wait()

    @property
    def client(self) -> BusClient:
        """Give the client of nats-py. BusUnavailable before `connect`."""
        if self._client is None:
            raise BusUnavailable("not connected yet")
        return self._client

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

    async def ensure_assets(self) -> None:
        """Create what is missing of streams and buckets; change what differs. Idempotent.

        BusUnavailable when JetStream does not answer, as while its servers choose a leader.
        """
        stream = self.client.jetstream(timeout=REQUEST_S)
        for wanted in (*STREAMS, *map(stream_of, BUCKETS)):
            config = wanted.evolve(num_replicas=self._replicas)
            try:
                found = (await stream.stream_info(config.name or "")).config
            except nats.js.errors.NotFoundError:
                await _translating(stream.add_stream(config), f"create stream {config.name}")
                continue
            except (nats.errors.Error, nats.js.errors.Error) as error:
                raise _unavailable(error, f"look at stream {config.name}") from error
            if _differing(config, found):
                await _translating(stream.update_stream(config), f"update stream {config.name}")

    async def examine(self) -> list[StreamState]:
        """Look at every stream, and at those of buckets, without changing any. BusUnavailable."""
        manager = self.client.jetstream(timeout=REQUEST_S)
        found = []
        for wanted in (*STREAMS, *map(stream_of, BUCKETS)):
            name = wanted.name or ""
            try:
                info = await manager.stream_info(name)
            except nats.js.errors.NotFoundError:
                found.append(StreamState(name, exists=False))
                continue
            except (nats.errors.Error, nats.js.errors.Error) as error:
                raise _unavailable(error, f"look at stream {name}") from error
            state = info.state
            # How many servers keep it is a setting of the operator.
            differs = tuple(f for f in _differing(wanted, info.config) if f != "num_replicas")
            found.append(
                StreamState(
                    name,
                    exists=True,
                    differs=differs,
                    messages=state.messages,
                    bytes=state.bytes,
                    fill=_fill(state.messages, state.bytes, info.config),
                    durables=await self._durables(name, state.consumer_count),
                )
            )
        return found

    async def _durables(self, stream: str, count: int) -> dict[str, str]:
        manager = self.client.jetstream(timeout=REQUEST_S)
        found: dict[str, str] = {}
        for offset in range(0, count, CONSUMERS_A_PAGE):
            page = await _translating(manager.consumers_info(stream, offset), f"list {stream}")
            found |= {consumer.name: consumer.config.filter_subject or "" for consumer in page}
        return found

    async def connect_and_ensure(self) -> None:
        """Wait until NATS answers and streams and buckets are there, however long that takes."""
        await self.connect()
        again = self.reconnections()
        while True:
            try:
                return await self.ensure_assets()
            except BusUnavailable as error:
                log.warning("cannot ensure streams and buckets: %s", error)
                await self.pause(again)

    async def keep_assets(self) -> None:
        """Ensure the assets now, after each reconnection and every 30 s, for ever.

        What failed is tried again soon: a cluster that lost its store still chooses a leader then.
        """
        again = self.reconnections()
        while True:
            rest_s = ENSURE_EVERY_S
            try:
                await self.ensure_assets()
            except BusUnavailable as error:
                log.warning("cannot ensure streams and buckets: %s", error)
                rest_s = ENSURE_AGAIN_S
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(again.wait(), rest_s)
            again.clear()

    async def publish(
        self,
        subject: str,
        payload: bytes,
        *,
        headers: Mapping[str, str] | None = None,
        expected_last: int | None = None,
        message_id: str | None = None,
    ) -> int:
        """Store a message and return its stream sequence once the server has it.

        With `expected_last` the last sequence on this subject must be that one (0: none); Conflict
        if it is not. BusUnavailable when no answer came: the message may be stored all the same.
        """
        sent = dict(headers or {})
        if expected_last is not None:
            sent["Nats-Expected-Last-Subject-Sequence"] = str(expected_last)
        if message_id is not None:
            sent["Nats-Msg-Id"] = message_id
        family = subjects.family(subject)
        with self._metrics.timed(instruments.PUBLISH_DURATION, family, counted=instruments.SENT):
            return int(
                await _translating(
                    self.client.store(subject, payload, sent or None, REQUEST_S),
                    f"publish to {subject}",
                )
            )

    async def announce(self, subject: str, payload: bytes) -> bool:
        """Send a core NATS message, which may be lost. Return whether it could be sent at all."""
        try:
            await self.client.publish(subject, payload)
        except nats.errors.Error:
            return False
        return True

    async def last(self, stream: str, subject: str) -> tuple[int, bytes] | None:
        """Read the newest message on a subject from the stream's leader, if there is one."""
        manager = self.client.jetstream(timeout=REQUEST_S)
        try:
            found = await manager.get_last_msg(stream, subject, direct=False)
        except nats.js.errors.NotFoundError:
            return None
        except (nats.errors.Error, nats.js.errors.Error) as error:
            raise _unavailable(error, f"read {subject}") from error
        return int(found.seq or 0), found.data or b""

    async def delete(self, stream: str, sequence: int) -> None:
        """Delete one message by its exact sequence; absent is success."""
        manager = self.client.jetstream(timeout=REQUEST_S)
        try:
            await manager.delete_msg(stream, sequence)
        except nats.js.errors.APIError as error:
            if error.err_code != NO_MESSAGE_FOUND:
                raise _unavailable(error, f"delete {stream}/{sequence}") from error
        except (nats.errors.Error, TimeoutError) as error:
            raise _unavailable(error, f"delete {stream}/{sequence}") from error

    async def subjects_in(self, stream: str, filter_: str) -> dict[str, int]:
        """List the subjects of a stream that match, with the number of messages on each."""
        manager = self.client.jetstream(timeout=REQUEST_S)
        info = await _translating(
            manager.stream_info(stream, subjects_filter=filter_), f"list {stream}"
        )
        return dict(info.state.subjects or {})

    async def fill(self, stream: str) -> float:
        """Give the share of a stream's room that is taken, by messages or by bytes, from 0 to 1."""
        manager = self.client.jetstream(timeout=REQUEST_S)
        info = await _translating(manager.stream_info(stream), f"measure {stream}")
        return _fill(info.state.messages, info.state.bytes, info.config)

    async def consume(
        self,
        stream: str,
        durable: str,
        filter_: str,
        *,
        max_pending: int = 256,
        ack_wait_s: float | None = None,
    ) -> AsyncIterator[Delivery]:
        """Yield the messages of a durable pull consumer, one after another, for ever.

        As `consume_batches`. What was pulled and not yielded by the end is given back.
        """
        batches = self.consume_batches(
            stream, durable, filter_, max_pending=max_pending, ack_wait_s=ack_wait_s
        )
        left: deque[Delivery] = deque()
        try:
            async for batch in batches:
                left.extend(batch)
                while left:
                    yield left.popleft()
        finally:
            # First, or what is given back would come to what is closed here.
            await batches.aclose()
            for delivery in left:
                await delivery.give_back()

    async def consume_batches(
        self,
        stream: str,
        durable: str,
        filter_: str,
        *,
        max_pending: int = 256,
        ack_wait_s: float | None = None,
    ) -> AsyncGenerator[list[Delivery], None]:
        """Yield the messages of a durable pull consumer, as many at a time as have come, for ever.

        The durable is created when it is missing. At most BATCH messages are asked for and not
        yielded. The caller acks what it has taken over; what is not acked comes again after
        `ack_wait_s` seconds, ACK_WAIT_S when it is None.
        """
        again = self.reconnections()
        try:
            while True:
                try:
                    async with (
                        self._pulling(
                            stream, durable, filter_, max_pending, ack_wait_s or ACK_WAIT_S
                        ) as pull,
                        _calling(pull.forget, again),
                    ):
                        while not again.is_set():
                            if batch := await pull.batch(FETCH_S + LATE_S):
                                yield batch
                except (BusUnavailable, nats.errors.Error, nats.js.errors.Error) as error:
                    log.info("consumer %s has to be bound again: %s", durable, error)
                await self.pause(again)
        finally:
            self._rebuilt.remove(again)

    @contextlib.asynccontextmanager
    async def _pulling(
        self, stream: str, durable: str, filter_: str, max_pending: int, ack_wait_s: float
    ) -> AsyncIterator[Pull[Delivery]]:
        """Bind a durable and pull from it for the length of the block."""
        manager = self.client.jetstream(timeout=REQUEST_S)
        config = ConsumerConfig(
            name=durable,
            durable_name=durable,
            filter_subject=filter_,
            ack_policy=AckPolicy.EXPLICIT,
            deliver_policy=DeliverPolicy.ALL,
            ack_wait=ack_wait_s,
            max_ack_pending=max_pending,
        )
        await manager.add_consumer(stream, config)
        inbox = self.client.new_inbox()
        pull = Pull[Delivery](
            lambda count: self.client.ask_next(stream, durable, inbox, count, FETCH_S)
        )

        def take(message: Msg) -> None:
            if status := message_status(message):
                _lapse(pull, status)
                return
            self._metrics.add(instruments.CONSUMED, subjects.family(message.subject))
            pull.take(_delivery(message))

        subscriptions = [
            await self.client.sink(inbox, take),
            # A new leader of the consumer has not heard of what was asked for.
            await self.client.sink(subjects.elections(stream, durable), lambda _: pull.forget()),
        ]
        try:
            yield pull
        finally:
            for subscription in subscriptions:
                with contextlib.suppress(Exception):
                    await subscription.unsubscribe()
            for delivery in pull.rest():
                await delivery.give_back()

    async def pause(self, again: asyncio.Event) -> None:
        """Wait before another try: until a reconnection (`again`), or half a second."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(again.wait(), RETRY_S)
        again.clear()
        await self.wait_connected()

    async def replay(self, stream: str, filter_: str) -> list[Delivery]:
        """Read what a stream holds now on the subjects that match, oldest first."""
        found = await _translating(self.client.stored(stream, filter_), f"read {stream}")
        return [_stored_delivery(message) for message in found]

    @contextlib.asynccontextmanager
    async def listening(self, subject: str) -> AsyncIterator[asyncio.Queue[Delivery]]:
        """Collect core NATS messages on a subject in a queue for the length of the block.

        What is written to streams and buckets is seen so, too. The server has the subscription
        when the block begins, unless it does not answer: then it gets it later. So does each
        connection that is built after this one was closed.
        """
        queue: asyncio.Queue[Delivery] = asyncio.Queue()

        async def take(message: Msg) -> None:
            queue.put_nowait(
                Delivery(message.subject, 0, message.data, message.headers or {}, message)
            )

        hearing = _Hearing(subject, take)
        await hearing.begin(self.client)
        self._hearings.append(hearing)
        try:
            await self._settle()
            self.client.check_heard(subject)
            yield queue
        finally:
            self._hearings.remove(hearing)
            await hearing.end()

    async def _settle(self) -> None:
        """Wait until the server has our subscriptions, if it answers at all.

        nats-py stops reading when the PONG of a flush arrives that was cancelled or timed out, so
        a flush is left alone until its connection has been given up.
        """
        flushed = asyncio.ensure_future(self.client.flush())
        flushed.add_done_callback(lambda done: done.cancelled() or done.exception())
        if not (await asyncio.wait({flushed}, timeout=REQUEST_S))[0]:
            log.info("the server does not answer a subscription")

    async def put(self, bucket: str, key: str, value: bytes) -> None:
        """Write a key of a bucket. InvalidName for what is no key."""
        await self.publish(subjects.bucket_key(bucket, subjects.check_key(key)), value)

    async def remove(self, bucket: str, key: str) -> None:
        """Delete a key of a bucket; absent is success. InvalidName for what is no key."""
        subject = subjects.bucket_key(bucket, subjects.check_key(key))
        await self.publish(subject, b"", headers=marker())

    async def entries(self, bucket: str) -> dict[str, bytes]:
        """Read every live key of a bucket."""
        prefix = subjects.bucket_key(bucket, "")
        stream = subjects.stream_of_bucket(bucket)
        return {
            message.subject.removeprefix(prefix): message.data
            for message in await self.replay(stream, f"{prefix}>")
            if KV_OPERATION not in message.headers
        }

    async def request(
        self,
        subject: str,
        payload: bytes,
        *,
        timeout_s: float = REQUEST_S,
        headers: Mapping[str, str] | None = None,
    ) -> bytes:
        """Ask and wait for one answer. NotFound when nobody serves the subject."""
        try:
            answer = await self.client.request(
                subject, payload, timeout=timeout_s, headers=dict(headers) if headers else None
            )
        except nats.errors.NoRespondersError:
            raise NotFound(
                f"nobody answers {subject}",
                subject=subject,
                next_step="check that the service behind it runs (nats micro ls)",
            ) from None
        except (nats.errors.Error, TimeoutError) as error:
            raise _unavailable(error, f"request {subject}") from error
        return answer.data

    async def ask_all(self, subject: str, *, expected: int, within_s: float) -> list[bytes]:
        """Ask all who serve a subject; give up to `expected` answers that come in time."""
        answers: list[bytes] = []
        try:
            inbox = self.client.new_inbox()
            source = await self.client.subscribe(inbox)
            try:
                await self.client.publish(subject, b"", reply=inbox)
                async with asyncio.timeout(within_s):
                    while len(answers) < expected:
                        message = await source.next_msg(timeout=within_s)
                        if message.data:
                            answers.append(message.data)
            finally:
                with contextlib.suppress(nats.errors.Error):
                    await source.unsubscribe()
        except (nats.errors.TimeoutError, TimeoutError):
            return answers
        except nats.errors.Error as error:
            raise _unavailable(error, f"ask {subject}") from error
        return answers

    @property
    def server_version(self) -> str:
        """Version of the server behind the connection, such as `2.14.3`."""
        found = self.client.connected_server_version
        return f"{found.major}.{found.minor}.{found.patch}"

    async def serve(
        self, name: str, version: str, metadata: Mapping[str, str], endpoints: Mapping[str, Handler]
    ) -> None:
        """Answer requests as a NATS service (`nats micro ls`); `endpoints` is subject -> handler.

        Handlers answer quickly, never raise for bad input and run one at a time.
        """
        service = (name, version, dict(metadata), dict(endpoints))
        self._services.append(service)
        await self._start_service(*service)

    async def _start_service(
        self, name: str, version: str, metadata: dict[str, str], endpoints: dict[str, Handler]
    ) -> None:
        config = ServiceConfig(name=name, version=version, metadata=metadata)
        client = cast("Client", InboxAnswers(self.client))
        service = await nats.micro.add_service(client, config)
        for subject, handler in endpoints.items():
            endpoint_name = subject.replace(".", "-").replace("*", "any")
            await service.add_endpoint(
                name=endpoint_name, subject=subject, handler=_responding(handler)
            )
        await self._settle()


def _responding(handler: Handler) -> Callable[[Any], Awaitable[None]]:
    async def answer(request: Any) -> None:
        headers = {**(request.headers or {}), ASKED: request.subject}
        await request.respond(await handler(request.data, headers))

    return answer


@contextlib.asynccontextmanager
async def _calling(call: Callable[[], None], event: asyncio.Event) -> AsyncIterator[None]:
    """Call something when an event is set within the block."""
    waiting = asyncio.ensure_future(event.wait())

    def tell(done: asyncio.Future[Any]) -> None:
        if not done.cancelled():
            call()

    waiting.add_done_callback(tell)
    try:
        yield
    finally:
        waiting.cancel()


def _lapse(pull: Pull[Delivery], status: MessageStatus) -> None:
    """Take into account what a server says of a request for messages."""
    if status.code in (REQUEST_TIMEOUT, NO_MESSAGES):
        pull.lapse(status.pending or BATCH)
    elif "leadership" in status.description.lower():
        pull.forget()
    elif status.code != IDLE:
        pull.fail(BusUnavailable(f"{status.code} {status.description}"))


def _delivery(message: Msg) -> Delivery:
    place = message.metadata
    return Delivery(
        message.subject,
        place.sequence.stream,
        message.data,
        message.headers or {},
        message,
        place.timestamp.timestamp(),
    )


def _stored_delivery(message: Msg) -> Delivery:
    """Read the headers that a stored message comes with; it cannot be acked."""
    headers = dict(message.headers or {})
    subject, sequence = headers["Nats-Subject"], int(headers["Nats-Sequence"])
    return Delivery(subject, sequence, message.data, headers, message)


def _checked_seed(path: str) -> str:
    """Give back the path of an nkey seed. InvalidInput when it cannot be used."""
    try:
        seed = Path(path).read_text("ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInput(f"the nkey seed {path} cannot be read: {error}", path=path) from error
    if not _SEED.fullmatch(seed):
        raise InvalidInput(f"{path} holds no nkey seed of a user", path=path)
    return path


def _is_refusal(error: BaseException) -> bool:
    return "authorization violation" in str(error).lower()


def _fill(messages: int, size: int, limits: StreamConfig) -> float:
    taken = ((messages, limits.max_msgs), (size, limits.max_bytes))
    return max((used / most for used, most in taken if most and most > 0), default=0.0)


def _differing(wanted: StreamConfig, found: StreamConfig) -> list[str]:
    fields = (
        "subjects",
        "max_msgs_per_subject",
        "max_bytes",
        "max_age",
        "discard",
        "max_msgs",
        "num_replicas",
        "allow_direct",
        "allow_rollup_hdrs",
        "allow_msg_ttl",
    )
    return [
        field
        for field in fields
        if getattr(wanted, field) is not None and getattr(wanted, field) != getattr(found, field)
    ]


async def _translating(awaitable: Awaitable[Any], what: str) -> Any:
    try:
        return await awaitable
    except nats.js.errors.APIError as error:
        if error.err_code == WRONG_LAST_SEQUENCE:
            raise Conflict(f"{what}: somebody else published first") from error
        raise _unavailable(error, what) from error
    except (nats.errors.Error, nats.js.errors.Error, TimeoutError, OSError) as error:
        raise _unavailable(error, what) from error


def _unavailable(error: BaseException, what: str) -> BusUnavailable:
    return BusUnavailable(f"{what}: {error or type(error).__name__}")
