"""Publishing to streams and buckets, and consuming and reading what they hold."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from typing import Literal, NamedTuple

import nats.errors
import nats.js.errors
from nats.aio.msg import Msg
from nats.js.api import AckPolicy, ConsumerConfig, DeliverPolicy

from snapshot_shared import instruments, subjects
from snapshot_shared.bus.assets import Assets, fill_of
from snapshot_shared.bus.client import (
    IDLE,
    NO_MESSAGES,
    REQUEST_TIMEOUT,
    MessageStatus,
    message_status,
)
from snapshot_shared.bus.connection import REQUEST_S, translated, unavailable
from snapshot_shared.bus.pull import BATCH, Pull
from snapshot_shared.errors import BusUnavailable

log = logging.getLogger(__name__)

NO_MESSAGE_FOUND = 10057
"""NATS' error code for a message that a stream does not hold."""
KV_OPERATION = "KV-Operation"
FETCH_S = 20.0
"""How long the server keeps a request for messages, in seconds."""
LATE_S = 1.0
"""How much longer a request is taken for lost when nothing has come of it, in seconds."""
ACK_WAIT_S = 30.0
MARKER_TTL_S = 3600.0
"""How long it can be read that a key of a bucket was removed, in seconds."""


def marker() -> dict[str, str]:
    """Return the headers of the message that says that a key was removed."""
    return {KV_OPERATION: "DEL", "Nats-TTL": f"{MARKER_TTL_S:g}s"}


class Binding:
    """Which durable a consumer is bound to.

    A server settles the message that an ack numbers, and a stream that is created again numbers
    from 1: the ack of an older delivery would settle a message that no client has seen. So a
    delivery is acked only while its consumer is bound to the durable that delivered it.
    """

    def __init__(self) -> None:
        """Begin unbound."""
        self.created: object = None
        """When the server created the durable; None while the durable may be gone."""


class Delivery(NamedTuple):
    """One message of a stream: its place, its bytes and its headers; `ack` settles it.

    `stored_at` is when the server stored it, in seconds since the epoch by the server's clock; 0
    when that is not known. `binding` belongs to the consumer that got the message, and
    `created` is when the durable that delivered it was created.
    """

    subject: str
    sequence: int
    data: bytes
    headers: Mapping[str, str]
    raw: Msg
    stored_at: float = 0.0
    binding: Binding | None = None
    created: object = None

    async def ack(self) -> None:
        """Settle and wait until the server has it. BusUnavailable: the message comes again."""
        if self.binding is not None and self.binding.created != self.created:
            raise BusUnavailable("ack: the consumer that delivered the message may be gone")
        await translated(self.raw.ack_sync(timeout=REQUEST_S), "ack")

    async def give_back(self) -> None:
        """Have the message delivered again at once, to any client of the durable, if possible."""
        with contextlib.suppress(nats.errors.Error, nats.js.errors.Error):
            await self.raw.nak()


class Streams(Assets):
    """What is done with the messages of streams and the keys of buckets."""

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
                await translated(
                    self.client.store(subject, payload, sent or None, REQUEST_S),
                    f"publish to {subject}",
                )
            )

    async def last(
        self, stream: str, subject: str, *, direct: bool = False
    ) -> tuple[int, bytes] | None:
        """Read the newest message on a subject, if there is one: from the stream's leader.

        `direct` asks any replica, by a request that names the subject, so that a user may have the
        right to one subject alone.
        """
        manager = self.client.jetstream(timeout=REQUEST_S)
        try:
            found = await manager.get_last_msg(stream, subject, direct=direct)
        except nats.js.errors.NotFoundError:
            return None
        except (nats.errors.Error, nats.js.errors.Error) as error:
            raise unavailable(error, f"read {subject}") from error
        return int(found.seq or 0), found.data or b""

    async def delete(self, stream: str, sequence: int) -> None:
        """Delete one message by its exact sequence; absent is success."""
        manager = self.client.jetstream(timeout=REQUEST_S)
        try:
            await manager.delete_msg(stream, sequence)
        except nats.js.errors.APIError as error:
            if error.err_code != NO_MESSAGE_FOUND:
                raise unavailable(error, f"delete {stream}/{sequence}") from error
        except (nats.errors.Error, TimeoutError) as error:
            raise unavailable(error, f"delete {stream}/{sequence}") from error

    async def subjects_in(self, stream: str, filter_: str) -> dict[str, int]:
        """List the subjects of a stream that match, with the number of messages on each."""
        manager = self.client.jetstream(timeout=REQUEST_S)
        info = await translated(
            manager.stream_info(stream, subjects_filter=filter_), f"list {stream}"
        )
        return dict(info.state.subjects or {})

    async def fill(self, stream: str) -> float:
        """Return the share of a stream's room that is taken, from 0 to 1."""
        manager = self.client.jetstream(timeout=REQUEST_S)
        info = await translated(manager.stream_info(stream), f"measure {stream}")
        return fill_of(info.state.messages, info.state.bytes, info.config)

    async def consume(
        self,
        stream: str,
        durable: str,
        filter_: str,
        *,
        max_pending: int = 256,
        ack_wait_s: float | None = None,
    ) -> AsyncIterator[Delivery]:
        """Yield the messages of a durable pull consumer, one after another, until it is closed.

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
        """Yield the messages of a durable pull consumer, as many at a time as have come.

        It ends when it is closed. The durable is created when it is missing. At most BATCH messages
        are requested and not yielded. The caller acks what it has taken over; what is not acked is
        delivered again after `ack_wait_s` seconds, ACK_WAIT_S when it is None.
        """
        again = self.reconnections()
        binding = Binding()
        try:
            while True:
                try:
                    async with (
                        self._pulling(
                            stream, durable, filter_, max_pending, ack_wait_s or ACK_WAIT_S, binding
                        ) as pull,
                        _calling(pull.forget, again),
                    ):
                        while not again.is_set():
                            if batch := await pull.batch(FETCH_S + LATE_S):
                                yield batch
                except (BusUnavailable, nats.errors.Error, nats.js.errors.Error) as error:
                    log.info("consumer %s has to be bound again: %s", durable, error)
                binding.created = None
                await self.pause(again)
        finally:
            self._rebuilt.remove(again)

    @contextlib.asynccontextmanager
    async def _pulling(
        self,
        stream: str,
        durable: str,
        filter_: str,
        max_pending: int,
        ack_wait_s: float,
        binding: Binding,
    ) -> AsyncIterator[Pull[Delivery]]:
        """Bind a durable and pull from it for the length of the block."""
        manager = self.client.jetstream(timeout=REQUEST_S)
        config = ConsumerConfig(
            name=durable,
            durable_name=durable,
            description=f"{stream} for {durable}: {filter_}",
            filter_subject=filter_,
            ack_policy=AckPolicy.EXPLICIT,
            deliver_policy=DeliverPolicy.ALL,
            ack_wait=ack_wait_s,
            max_ack_pending=max_pending,
        )
        try:
            found = await manager.add_consumer(stream, config)
        except nats.js.errors.NotFoundError:
            self._misses_stream.set()
            raise
        created = binding.created = found.created
        inbox = self.client.new_inbox()
        pull = Pull[Delivery](
            lambda count: self.client.ask_next(stream, durable, inbox, count, FETCH_S)
        )

        def take(message: Msg) -> None:
            if status := message_status(message):
                _lapse(pull, status)
                return
            self._metrics.add(instruments.CONSUMED, subjects.family(message.subject))
            pull.take(_delivery(message, binding, created))

        subscriptions = [
            await self.client.sink(inbox, take),
            # A new leader of the consumer does not know the requests that are open.
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

    async def replay(self, stream: str, filter_: str) -> list[Delivery]:
        """Read what a stream holds now on the subjects that match, oldest first."""
        found = await translated(self.client.stored(stream, filter_), f"read {stream}")
        return [_stored_delivery(message) for message in found]

    async def put(self, bucket: str, key: str, value: bytes) -> int:
        """Write a key of a bucket and return its revision. InvalidName for what is no key."""
        return await self.publish(subjects.bucket_key(bucket, subjects.check_key(key)), value)

    async def revision(self, bucket: str, key: str) -> int | None:
        """Return the revision of a key of a bucket; None if it expired, or was never written."""
        subject = subjects.bucket_key(bucket, subjects.check_key(key))
        found = await self.last(subjects.stream_of_bucket(bucket), subject, direct=True)
        return found[0] if found else None

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


@contextlib.asynccontextmanager
async def _calling(call: Callable[[], None], event: asyncio.Event) -> AsyncIterator[None]:
    """Call something when an event is set within the block."""
    waiting = asyncio.ensure_future(event.wait())

    def ended(done: asyncio.Task[Literal[True]]) -> None:
        if not done.cancelled():
            call()

    waiting.add_done_callback(ended)
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


def _delivery(message: Msg, binding: Binding, created: object) -> Delivery:
    place = message.metadata
    return Delivery(
        message.subject,
        place.sequence.stream,
        message.data,
        message.headers or {},
        message,
        place.timestamp.timestamp(),
        binding,
        created,
    )


def _stored_delivery(message: Msg) -> Delivery:
    """Read the headers that a stored message comes with; it cannot be acked."""
    headers = dict(message.headers or {})
    subject, sequence = headers["Nats-Subject"], int(headers["Nats-Sequence"])
    return Delivery(subject, sequence, message.data, headers, message)
