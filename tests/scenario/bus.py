"""The bus of a service on a simulated server: what `Bus` promises, without nats-py and sockets.

Everything that may go wrong is decided by the `Faults` of the client, or done to it through the
server: `cut`, `heal`, `crash`, `restart`, `stall`, `wipe`, `inject`, `drop_client`.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import functools
import json
import re
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

from snapshot_shared.bus import ASKED, REQUEST_S, Bus, Delivery, Handler, streams
from snapshot_shared.bus.connection import IMPATIENCE_S
from snapshot_shared.bus.pull import Pull
from snapshot_shared.bus.streams import Binding
from snapshot_shared.errors import BusUnavailable, Conflict, NotFound
from snapshot_shared.subjects import check_key
from tests.scenario import network
from tests.scenario.network import UNANSWERED, Call, Faults, Link, Subscription
from tests.scenario.server import NO_STREAM, SimServer
from tests.scenario.streams import Refused, Stored

__all__ = ["Faults", "SimBus", "SimServer"]

MAX_PAYLOAD_BYTES = 1024 * 1024
WRONG_LAST_SEQUENCE = 10071
LATE = Refused(0, "timeout")
NOBODY = Refused(503, "no responders")


class SimBus(Bus):
    """One client of a simulated server. What needs no network is the real bus's own."""

    def __init__(self, server: SimServer, name: str, *, faults: Faults | None = None) -> None:
        """Belong to a server, over a network that is calm unless `faults` say otherwise."""
        super().__init__("nats://simulated", name)
        self._server = server
        self._link = Link(server, faults or Faults(), self._on_change)
        self._endpoints: list[_Endpoint] = []

    async def connect(self, *, patiently: bool = True) -> SimBus:
        if not patiently and not self._server.is_up:
            raise BusUnavailable("no NATS server answers at nats://simulated")
        self._server.join(self, self._link)
        try:
            async with asyncio.timeout(None if patiently else IMPATIENCE_S):
                await self._connected.wait()
        except TimeoutError:
            self._server.drop_client(self)
            raise BusUnavailable("no NATS server answers at nats://simulated") from None
        return self

    def _on_change(self, is_open: bool) -> None:
        if not is_open:
            self._connected.clear()
            return
        self._connected.set()
        if self._link.session > 1:
            self._notify_reconnected()

    async def close(self) -> None:
        self._closing = True
        self._connected.clear()
        self._server.drop_client(self)
        for endpoint in self._endpoints:
            endpoint.end()

    def _check_connected(self) -> None:
        if self._link.session == 0:
            raise BusUnavailable("not connected yet")
        if not self._connected.is_set():
            raise BusUnavailable("not connected")

    async def _ask(
        self,
        what: str,
        operation: Callable[..., Any],
        *arguments: Any,
        timeout_s: float = REQUEST_S,
    ) -> Any:
        """Let the server do something. Errors as `Bus` gives them."""
        result = await self._try(operation, *arguments, timeout_s=timeout_s)
        if isinstance(result, Refused):
            raise _error(result, what)
        return result

    async def _try(
        self, operation: Callable[..., Any], *arguments: Any, timeout_s: float = REQUEST_S
    ) -> Any:
        """Let the server do something; the answer may be `Refused`."""
        self._check_connected()
        return await Call(self._link, lambda _call: operation(*arguments), timeout_s, LATE).future

    async def ensure_assets(self) -> bool:
        return bool(await self._ask("ensure streams and buckets", self._server.ensure))

    async def publish(
        self,
        subject: str,
        payload: bytes,
        *,
        headers: Mapping[str, str] | None = None,
        expected_last: int | None = None,
        message_id: str | None = None,
    ) -> int:
        self._check_connected()
        _check(subject, payload)
        sent = dict(headers or {})
        if expected_last is not None:
            sent["Nats-Expected-Last-Subject-Sequence"] = str(expected_last)
        if message_id is not None:
            sent["Nats-Msg-Id"] = message_id
        what = f"publish to {subject}"
        return int(await self._ask(what, self._server.publish, subject, payload, sent))

    async def announce(self, subject: str, payload: bytes) -> bool:
        if self._link.session == 0:
            raise BusUnavailable("not connected yet")
        if not self._connected.is_set():
            return False
        if self._link.faults.loses_request():
            return True
        link, session = self._link, self._link.session

        def arrive() -> None:
            # A core message is for those who listen, and for the stream that has its subject.
            if link.carries and link.session == session and not self._server.is_stalled:
                self._server.inject(subject, payload)

        link.up(arrive)
        return True

    async def last(self, stream: str, subject: str) -> tuple[int, bytes] | None:
        found = await self._try(lambda: self._server.stream(stream).last(subject))
        if isinstance(found, Refused):
            if found.code == NO_STREAM:
                return None
            raise _error(found, f"read {subject}")
        return None if found is None else (found.sequence, found.data)

    async def delete(self, stream: str, sequence: int) -> None:
        await self._ask(
            f"delete {stream}/{sequence}", lambda: self._server.stream(stream).delete(sequence)
        )

    async def subjects_in(self, stream: str, filter_: str) -> dict[str, int]:
        found: dict[str, int] = await self._ask(
            f"list {stream}", lambda: self._server.stream(stream).counts(filter_)
        )
        return found

    async def fill(self, stream: str) -> float:
        found: float = await self._ask(
            f"measure {stream}", lambda: self._server.stream(stream).fill()
        )
        return found

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
        bound = await self._try(
            self._server.bind, stream, durable, filter_, max_pending, ack_wait_s
        )
        if isinstance(bound, Refused):
            if bound.code == NO_STREAM:
                self._misses_stream.set()
            raise _error(bound, "bind")
        binding.created = bound

        async def ask(count: int) -> None:
            self._check_connected()
            request = network.Pull(self._link, (stream, durable), count, take, streams.FETCH_S)
            requests.append(request)
            request.future.add_done_callback(lambda done: ended(request, done.result()))

        def take(message: Stored) -> None:
            delivery = self._delivery(stream, durable, message)
            pull.take(delivery._replace(binding=binding, created=bound))

        def ended(request: network.Pull, result: Refused | None) -> None:
            requests.remove(request)
            if result is not None:
                pull.fail(_error(result, f"pull {durable}"))
            elif request.missing:
                pull.lapse(request.missing)

        requests: list[network.Pull] = []
        pull = Pull[Delivery](ask)
        try:
            yield pull
        finally:
            for request in requests:
                request.finish(None)
            for delivery in pull.rest():
                await delivery.give_back()

    def _delivery(self, stream: str, durable: str, message: Stored) -> Delivery:
        acks = _Acks(self, stream, durable, message.sequence)
        return Delivery(message.subject, message.sequence, message.data, message.headers, acks)

    async def replay(self, stream: str, filter_: str) -> list[Delivery]:
        found = await self._ask(
            f"read {stream}", lambda: list(self._server.stream(stream).select(filter_))
        )
        return [self._delivery(stream, "", message) for message in found]

    @contextlib.asynccontextmanager
    async def listening(self, subject: str) -> AsyncIterator[asyncio.Queue[Delivery]]:
        queue: asyncio.Queue[Delivery] = asyncio.Queue()

        def take(*message: Any) -> None:
            queue.put_nowait(self._heard(*message))

        subscription = Subscription(subject, "", take)
        self._link.subscribe(subscription)
        try:
            await self._flush()
            yield queue
        finally:
            self._link.unsubscribe(subscription)

    def _heard(
        self,
        subject: str,
        data: bytes,
        headers: Mapping[str, str],
        respond: Callable[[bytes], None] | None,
    ) -> Delivery:
        return Delivery(subject, 0, data, headers, _Answers(self._link, respond))

    async def put(self, bucket: str, key: str, value: bytes) -> int:
        return await self._write(bucket, key, value, {}, f"put {bucket}/{key}")

    async def revision(self, bucket: str, key: str) -> int | None:
        subject = f"$KV.{bucket}.{key}"
        found: list[Stored] = await self._ask(
            f"read {subject}", lambda: list(self._server.stream(f"KV_{bucket}").select(subject))
        )
        return found[-1].sequence if found else None

    async def remove(self, bucket: str, key: str) -> None:
        await self._write(bucket, key, b"", streams.marker(), f"delete {bucket}/{key}")

    async def _write(
        self, bucket: str, key: str, value: bytes, headers: Mapping[str, str], what: str
    ) -> int:
        self._check_connected()
        check_key(key)
        _check(key, value)
        return int(await self._ask(what, self._server.write, bucket, key, value, headers))

    async def entries(self, bucket: str) -> dict[str, bytes]:
        found = await self._ask(
            f"read bucket {bucket}", lambda: list(self._server.stream(f"KV_{bucket}").select(">"))
        )
        start = len(f"$KV.{bucket}.")
        return {
            message.subject[start:]: message.data
            for message in found
            if "KV-Operation" not in message.headers
        }

    async def request(
        self,
        subject: str,
        payload: bytes,
        *,
        timeout_s: float = REQUEST_S,
        headers: Mapping[str, str] | None = None,
    ) -> bytes:
        self._check_connected()
        _check(subject, payload)

        def ask(call: Call) -> Any:
            count = self._server.route(subject, payload, headers or {}, call.answer)
            return UNANSWERED if count else NOBODY

        call = Call(self._link, ask, timeout_s, LATE)
        call.limit()
        result = await call.future
        if result is NOBODY:
            raise NotFound(
                f"nothing answers {subject}",
                subject=subject,
                next_step="check that the service behind it runs (nats micro ls)",
            )
        if isinstance(result, Refused):
            raise _error(result, f"request {subject}")
        return bytes(result)

    async def serve(
        self, name: str, version: str, metadata: Mapping[str, str], endpoints: Mapping[str, Handler]
    ) -> None:
        info = {
            "name": name,
            "id": f"{self._name}-{len(self._endpoints)}",
            "version": version,
            "metadata": dict(metadata),
            "endpoints": [{"name": key.replace(".", "-"), "subject": key} for key in endpoints],
        }

        async def tell(kind: str, _data: bytes, _headers: Mapping[str, str]) -> bytes:
            return json.dumps(info | {"type": f"io.nats.micro.v1.{kind}_response"}).encode()

        for subject, handler in endpoints.items():
            self._answer(subject, "q", handler)
        for kind in ("ping", "info"):
            for subject in (f"$SRV.{kind.upper()}", f"$SRV.{kind.upper()}.{name}"):
                self._answer(subject, "", functools.partial(tell, kind))
        await self._flush()

    async def _flush(self) -> None:
        with contextlib.suppress(BusUnavailable):
            await self._ask("subscribe", lambda: None)

    def _answer(self, subject: str, group: str, handler: Handler) -> None:
        endpoint = _Endpoint(handler)
        self._endpoints.append(endpoint)

        def take(*message: Any) -> None:
            endpoint.take(self._heard(*message))

        self._link.subscribe(Subscription(subject, group, take))


class _Acks:
    """What `Delivery.ack` settles."""

    def __init__(self, bus: SimBus, stream: str, durable: str, sequence: int) -> None:
        self._bus = bus
        self._place = (stream, durable, sequence)
        self._is_done = False

    async def ack_sync(self, timeout: float) -> None:
        """Settle on the server and wait for its answer."""
        if self._is_done:
            raise BusUnavailable("ack: message was already acknowledged")
        await self._bus._ask("ack", self._bus._server.ack, *self._place, timeout_s=timeout)
        self._is_done = True

    async def nak(self) -> None:
        """Give the message back; the server may not hear of it."""
        self._is_done = True
        link = self._bus._link
        if link.is_open:
            link.up(self._give_back)

    def _give_back(self) -> None:
        # It has no answer: where the stream is gone meanwhile, nobody hears of it.
        if self._bus._link.carries:
            with contextlib.suppress(Refused):
                self._bus._server.nak(*self._place)


class _Answers:
    """What answers a request that came as a core message."""

    def __init__(self, link: Link, respond: Callable[[bytes], None] | None) -> None:
        self._link = link
        self._respond = respond

    async def respond(self, data: bytes) -> None:
        """Send the answer; it is lost when the connection is."""
        if self._respond is not None and self._link.is_open:
            self._link.up(self._arrive, self._link.session, data)

    def _arrive(self, session: int, data: bytes) -> None:
        if self._link.carries and self._link.session == session and self._respond is not None:
            self._respond(data)


class _Endpoint:
    """One subject of a service: answers one request at a time, in the context of the client."""

    def __init__(self, handler: Handler) -> None:
        self._handler = handler
        self._context = contextvars.copy_context()
        self._backlog: deque[Delivery] = deque()
        self._task: asyncio.Task[None] | None = None

    def take(self, request: Delivery) -> None:
        """Answer after those that came before."""
        self._backlog.append(request)
        if self._task is None:
            loop = asyncio.get_running_loop()
            self._task = loop.create_task(self._work(), context=self._context)

    async def _work(self) -> None:
        try:
            while self._backlog:
                request = self._backlog.popleft()
                try:
                    headers = {**request.headers, ASKED: request.subject}
                    answer = await self._handler(request.data, headers)
                except Exception:  # noqa: BLE001 - as nats.micro, which answers with an error
                    answer = b""
                await request.raw.respond(answer)
        finally:
            self._task = None

    def end(self) -> None:
        """Answer nobody any more."""
        self._backlog.clear()
        if self._task is not None:
            self._task.cancel()


def _check(subject: str, payload: bytes) -> None:
    if not subject or re.search(r"\s", subject):
        raise BusUnavailable(f"{subject!r}: nats: invalid subject")
    if len(payload) > MAX_PAYLOAD_BYTES:
        raise BusUnavailable(f"{subject}: nats: maximum payload exceeded")


def _error(refusal: Refused, what: str) -> BusUnavailable | Conflict:
    if refusal.code == WRONG_LAST_SEQUENCE:
        return Conflict(f"{what}: another client has published first")
    return BusUnavailable(f"{what}: {refusal}")
