"""A simulated nats-server, and what can happen to it.

A client that stops running holds nothing up: what the server does, it does in the world of a
simulation and not in a task of a client.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from nats.js.api import StorageType

from snapshot_shared.bus import assets
from tests.scenario.loop import VirtualLoop
from tests.scenario.network import UNANSWERED, Call, Link, Pull, Subscription
from tests.scenario.streams import Durable, Refused, Stream, matches, stream_of_bucket

NO_STREAM = 10059
NO_CONSUMER = 10014


class SimServer:
    """The server: streams, buckets, durables, core subjects, and what can happen to it."""

    def __init__(self) -> None:
        self.streams: dict[str, Stream] = {}
        self.is_up = True
        self.is_stalled = False
        self.held: deque[Call] = deque()
        self._links: dict[object, Link] = {}
        self._routes: dict[str, list[tuple[Link, Subscription]]] = {}
        self._homes: dict[str, str | None] = {}
        """By subject, the name of the stream that stores it."""
        self.stalled_until = 0.0
        self._stalls = 0

    # Time, outside of every simulated process.

    @property
    def now(self) -> float:
        loop = asyncio.get_running_loop()
        # Clients may have clocks of their own.
        return loop.now if isinstance(loop, VirtualLoop) else loop.time()

    def later(self, delay_s: float, run: Callable[..., None], *arguments: Any) -> None:
        self.at(self.now + delay_s, run, *arguments)

    def at(self, when: float, run: Callable[..., None], *arguments: Any) -> asyncio.TimerHandle:
        """Run something at a time of the loop, or at once when it is over."""
        loop = asyncio.get_running_loop()
        if isinstance(loop, VirtualLoop):
            return loop.in_world(when - loop.now, run, *arguments)
        return loop.call_at(when, run, *arguments)

    # What can happen to it.

    def crash(self) -> None:
        """End at once: memory streams, ids of messages that are gone, and all waits are lost."""
        self.is_up = False
        self._end_stall()
        self.held.clear()
        self._drop_streams(
            name
            for name, stream in self.streams.items()
            if stream.config.storage is StorageType.MEMORY
        )
        for stream in self.streams.values():
            stream.forget_ids()
            for durable in stream.durables.values():
                durable.waiting.clear()
        for link in self._links.values():
            link.break_off()

    def restart(self) -> None:
        """Come back after a crash with what was on disk."""
        self.is_up = True
        for stream in self.streams.values():
            for durable in stream.durables.values():
                durable.restart(self.now)
                self._arm(stream, durable)
        for link in self._links.values():
            link.reach_out()

    def stall(self, seconds: float) -> None:
        """Answer nobody for a while, as while a leader is elected; nothing is lost."""
        self.is_stalled = True
        self._stalls += 1
        self.stalled_until = self.now + seconds
        self.later(seconds, self._resume, self._stalls)

    def _resume(self, which: int) -> None:
        if which != self._stalls or not self.is_stalled:
            return
        self._end_stall()
        while self.held:
            self.held.popleft().run()
        for stream in self.streams.values():
            for durable in stream.durables.values():
                self._feed(stream, durable)

    def _end_stall(self) -> None:
        self.is_stalled = False
        self._stalls += 1

    def wipe(self) -> None:
        """Lose every stream, bucket and durable, until somebody ensures them."""
        self._drop_streams(self.streams)

    def delete_stream(self, name: str) -> None:
        """Lose one stream with its durables."""
        self._drop_streams([name])

    def _drop_streams(self, names: Any) -> None:
        for name in list(names):
            for durable in self.streams.pop(name).durables.values():
                for pull in durable.waiting:
                    pull.answer(Refused(NO_CONSUMER, "consumer deleted"))
                durable.waiting.clear()

    def inject(self, subject: str, data: bytes) -> None:
        """Store any bytes on any subject, as an intruder would, unless no stream takes it."""
        with contextlib.suppress(Refused):
            self.publish(subject, data, {})

    # The clients.

    def join(self, client: object, link: Link) -> None:
        self._links[client] = link
        self.forget_routes()
        link.reach_out()

    def drop_client(self, client: object) -> None:
        """Forget a client that ended or crashed. What it had sent may still arrive."""
        link = self._links.pop(client, None)
        if link is not None:
            self.forget_routes()
            link.is_gone = True
            link.is_open = False

    def cut(self, client: object) -> None:
        """Part a client from the server in both directions."""
        if client in self._links:
            self._links[client].cut()

    def heal(self, client: object) -> None:
        if client in self._links:
            self._links[client].heal()

    # What clients ask for. Each answers at once or raises Refused.

    def ensure(self) -> bool:
        """Create the streams and buckets of the product that are missing, if any is."""
        wanted = {
            it.name or "": it for it in (*assets.STREAMS, *map(stream_of_bucket, assets.BUCKETS))
        }
        missing = {name: Stream(it) for name, it in wanted.items() if name not in self.streams}
        self.streams |= missing
        return bool(missing)

    def stream(self, name: str) -> Stream:
        """Give a stream without what is too old. Refused when there is none."""
        found = self.streams.get(name)
        if found is None:
            raise Refused(NO_STREAM, "stream not found")
        found.prune(self.now)
        return found

    def publish(self, subject: str, data: bytes, headers: Mapping[str, str]) -> int:
        """Store a message and tell who listens to its subject."""
        self.route(subject, data, headers)
        if (stream := self._stream_of(subject)) is not None:
            sequence, message = stream.store(subject, data, headers, self.now)
            if message is not None:
                for durable in stream.durables.values():
                    self._feed(stream, durable)
            return sequence
        raise Refused(NO_STREAM, "no response from stream")

    def write(self, bucket: str, key: str, value: bytes, headers: Mapping[str, str]) -> int:
        self.stream(f"KV_{bucket}")
        return self.publish(f"$KV.{bucket}.{key}", value, headers)

    def bind(
        self, name: str, durable: str, filter_: str, max_pending: int, ack_wait_s: float
    ) -> Durable:
        """Create a durable, or change the settings of one, and return it."""
        return self.stream(name).bind(
            Durable(durable, filter_, ack_wait=ack_wait_s, max_pending=max_pending)
        )

    def pull(self, pull: Call) -> Any:
        """Deliver the next messages to this request when there are some."""
        assert isinstance(pull, Pull)
        stream, found = self._bound(*pull.place)
        found.waiting.append(pull)
        self._feed(stream, found)
        return UNANSWERED

    def ack(self, name: str, durable: str, sequence: int) -> None:
        stream, found = self._bound(name, durable)
        found.settle(sequence)
        self._feed(stream, found)

    def nak(self, name: str, durable: str, sequence: int) -> None:
        """Take a message back that was delivered and not used; it goes out again at once."""
        stream, found = self._bound(name, durable)
        if sequence in found.pending:
            self._deliver_again(stream, found, sequence)

    def _bound(self, name: str, durable: str) -> tuple[Stream, Durable]:
        stream = self.stream(name)
        if (found := stream.durables.get(durable)) is None:
            raise Refused(NO_CONSUMER, "consumer not found")
        return stream, found

    def _feed(self, stream: Stream, durable: Durable) -> None:
        """Deliver as long as there are messages and clients that wait."""
        if not self.is_up or self.is_stalled:
            return
        while durable.waiting:
            pull = durable.waiting[0]
            if not pull.is_alive:
                durable.waiting.popleft()
                continue
            message = durable.take(stream, self.now)
            if message is None:
                break
            faults = pull.link.faults
            if delay := faults.postpones():
                self.later(delay, self._deliver_again, stream, durable, message.sequence)
                continue
            durable.waiting.popleft()
            pull.send(message)
            if pull.wanted:
                durable.waiting.append(pull)
            if delay := faults.repeats():
                self.later(delay, self._deliver_again, stream, durable, message.sequence)
        self._arm(stream, durable)

    def _deliver_again(self, stream: Stream, durable: Durable, sequence: int) -> None:
        durable.put_back(sequence)
        self._feed(stream, durable)

    def _arm(self, stream: Stream, durable: Durable) -> None:
        at = durable.next_expiry()
        if durable.alarm is None and at is not None:
            durable.alarm = self.at(at, self._expire, stream, durable)

    def _expire(self, stream: Stream, durable: Durable) -> None:
        durable.alarm = None
        if self.is_up:
            durable.expire(self.now)
            self._feed(stream, durable)
            self._arm(stream, durable)

    def route(
        self,
        subject: str,
        data: bytes,
        headers: Mapping[str, str],
        respond: Callable[[bytes], None] | None = None,
    ) -> int:
        """Give a core message to those who listen; the number of them."""
        groups: dict[str, list[tuple[Link, Subscription]]] = {}
        count = 0
        for link, subscription in self._routes_of(subject):
            if not link.is_open:
                continue
            count += 1
            if subscription.group:
                groups.setdefault(subscription.group, []).append((link, subscription))
            else:
                self._tell(link, subscription, subject, data, headers, respond)
        for members in groups.values():
            link, subscription = members[members[0][0].faults.choose(len(members))]
            self._tell(link, subscription, subject, data, headers, respond)
        return count

    def _routes_of(self, subject: str) -> list[tuple[Link, Subscription]]:
        """Return who listens to a subject; that is found once, until somebody comes or goes."""
        found = self._routes.get(subject)
        if found is None:
            found = self._routes[subject] = [
                (link, subscription)
                for link in self._links.values()
                for subscription in link.subscriptions
                if matches(subscription.filter, subject)
            ]
        return found

    def forget_routes(self) -> None:
        """Find anew who listens to what."""
        self._routes.clear()

    def _stream_of(self, subject: str) -> Stream | None:
        if (name := self._homes.get(subject)) in self.streams:
            return self.streams[name]
        for name, stream in self.streams.items():
            if stream.has(subject):
                self._homes[subject] = name
                return stream
        return None

    def _tell(
        self,
        link: Link,
        subscription: Subscription,
        subject: str,
        data: bytes,
        headers: Mapping[str, str],
        respond: Callable[[bytes], None] | None,
    ) -> None:
        if link.faults.loses_announcement():
            return
        session = link.session

        def arrive() -> None:
            if link.carries and link.session == session and subscription in link.subscriptions:
                subscription.take(subject, data, headers, respond)

        link.down(arrive)
