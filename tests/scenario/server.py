"""A simulated nats-server, the connections of its clients, and what a network does to them.

All time is the loop's, all chance comes from `Faults`. A client that stops running holds nothing
up: what the server does, it does in its own context and not in a task of a client.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections import deque
from collections.abc import Callable, Mapping
from random import Random
from typing import Any, NamedTuple

from nats.js.api import StorageType

from snapshot_shared import bus
from tests.scenario.loop import VirtualLoop
from tests.scenario.streams import Durable, Refused, Stream, matches, stream_of_bucket

TICK_S = 1e-9
"""Two packets of one connection never arrive at the same time, so they stay in order."""

NO_STREAM = 10059
NO_CONSUMER = 10014


class Faults:
    """Every decision of the network between one client and the server; this network is calm.

    Times are seconds. Decisions are taken when they are needed, in the order of the run, so that
    a seed gives the same run again.
    """

    def latency(self) -> float:
        """How long a packet takes one way."""
        return 0.0005

    def loses_request(self) -> bool:
        """Whether a request never reaches the server."""
        return False

    def loses_answer(self) -> bool:
        """Whether a request is carried out and its answer never comes."""
        return False

    def loses_announcement(self) -> bool:
        """Whether a core message to this client is lost."""
        return False

    def postpones(self) -> float:
        """How much later than its turn a message of a durable is delivered; 0: in its turn."""
        return 0.0

    def repeats(self) -> float:
        """How long after its delivery a message comes again, acked or not; 0: it does not."""
        return 0.0

    def notices(self) -> float:
        """How long a cut connection looks alive to its client."""
        return 20.0

    def returns(self) -> float:
        """How long a client takes to connect again once it can."""
        return 0.5

    def choose(self, count: int) -> int:
        """Which of the instances of a service gets a request."""
        return 0


class SeededFaults(Faults):
    """Faults by chance. The fields are probabilities and may be changed at any time."""

    def __init__(self, random: Random, *, slowest_s: float = 0.005) -> None:
        self.random = random
        self.slowest_s = slowest_s
        self.lost_requests = 0.0
        self.lost_answers = 0.0
        self.lost_announcements = 0.0
        self.postponed = 0.0
        self.repeated = 0.0
        self.longest_s = 60.0

    def latency(self) -> float:
        return self.random.random() * self.slowest_s

    def loses_request(self) -> bool:
        return self._happens(self.lost_requests)

    def loses_answer(self) -> bool:
        return self._happens(self.lost_answers)

    def loses_announcement(self) -> bool:
        return self._happens(self.lost_announcements)

    def postpones(self) -> float:
        return self._sometime() if self._happens(self.postponed) else 0.0

    def repeats(self) -> float:
        return self._sometime() if self._happens(self.repeated) else 0.0

    def notices(self) -> float:
        return 10.0 + 20.0 * self.random.random()

    def returns(self) -> float:
        return 0.05 + self.random.random()

    def choose(self, count: int) -> int:
        return self.random.randrange(count)

    def _happens(self, probability: float) -> bool:
        return probability > 0 and self.random.random() < probability

    def _sometime(self) -> float:
        return 0.001 + self.random.random() * self.longest_s


class Subscription(NamedTuple):
    """What a client wants to hear. Of each `group` only one member gets a message."""

    filter: str
    group: str
    take: Callable[[str, bytes, Mapping[str, str], Callable[[bytes], None] | None], None]


class Link:
    """One client's connection: the order and latency of its packets, and whether they pass."""

    def __init__(
        self, server: SimServer, faults: Faults, on_change: Callable[[bool], None]
    ) -> None:
        self.server = server
        self.faults = faults
        self.session = 0
        self.is_open = False
        self.is_cut = False
        self.is_broken = False
        self.is_gone = False
        self.subscriptions: list[Subscription] = []
        self.pulls: set[Pull] = set()
        self._on_change = on_change
        self._cuts = 0
        self._up_at = 0.0
        self._down_at = 0.0

    @property
    def passes(self) -> bool:
        """Say whether a packet would arrive now."""
        return self.server.is_up and not self.is_cut and not self.is_gone

    @property
    def carries(self) -> bool:
        """Say whether a packet of the present connection arrives at the server now."""
        return self.server.is_up and not self.is_cut and not self.is_broken

    def up(self, arrive: Callable[..., None], *arguments: Any) -> None:
        """Send towards the server, in order."""
        self._up_at = max(self.server.now + self.faults.latency(), self._up_at + TICK_S)
        self.server.at(self._up_at, arrive, *arguments)

    def down(self, arrive: Callable[..., None], *arguments: Any) -> None:
        """Send towards the client, in order."""
        self._down_at = max(self.server.now + self.faults.latency(), self._down_at + TICK_S)
        self.server.at(self._down_at, arrive, *arguments)

    def reach_out(self) -> None:
        """Connect as soon as that is possible."""
        if not self.is_open and self.passes:
            self.server.later(self.faults.returns() if self.session else 0.0, self._open)

    def _open(self) -> None:
        if self.is_open or not self.passes:
            return
        self.session += 1
        self.is_open, self.is_broken = True, False
        pulls, self.pulls = self.pulls, set()
        for pull in pulls:
            pull.finish(None)
        self._on_change(True)

    def cut(self) -> None:
        """Let no packet pass from now on; the client notices later."""
        self.is_cut = True
        self._cuts += 1
        self.server.later(self.faults.notices(), self._notice_cut, self._cuts)

    def heal(self) -> None:
        """Let packets pass again. What was lost stays lost."""
        self.is_cut = False
        if self.is_broken:
            self.close()
        self.reach_out()

    def break_off(self) -> None:
        """End the connection from the server's side; a client behind a cut learns it later."""
        self.is_broken = True
        if not self.is_cut:
            self.down(self._broken_off)

    def _broken_off(self) -> None:
        if self.is_broken and not self.is_cut:
            self.close()

    def _notice_cut(self, which: int) -> None:
        if self.is_cut and which == self._cuts:
            self.close()

    def close(self) -> None:
        """Let the client know that its connection is over; it will try again."""
        if self.is_open:
            self.is_open = False
            self._on_change(False)
            self.reach_out()


class Call:
    """One request under way: it ends with an answer, a refusal, or nothing in time.

    The future never gets an exception, because nobody may be left to take it out; its result is a
    value or an error.
    """

    def __init__(
        self, link: Link, operation: Callable[[Call], Any], timeout_s: float, late: Any
    ) -> None:
        loop = asyncio.get_running_loop()
        self.link = link
        self.future: asyncio.Future[Any] = loop.create_future()
        self.session = link.session
        self._operation = operation
        self._deadline = link.server.now + timeout_s
        self._late = late
        if link.faults.loses_request():
            self.lose()
        else:
            link.up(self._arrive)

    @property
    def is_alive(self) -> bool:
        """Say whether the client still waits for this, as far as the server can know."""
        link = self.link
        return not self.future.done() and self.session == link.session and not link.is_gone

    def _arrive(self) -> None:
        link, server = self.link, self.link.server
        if not link.carries or self.session != link.session:
            self.lose()
        elif server.is_stalled:
            server.held.append(self)
            self.lose()
        else:
            self.run()

    def run(self) -> None:
        """Carry it out on the server."""
        try:
            result = self._operation(self)
        except Refused as refusal:
            result = refusal
        if result is not UNANSWERED:
            self.answer(result)

    def answer(self, result: Any) -> None:
        """Send the answer; it may not arrive."""
        if self.link.faults.loses_answer():
            self.lose()
        else:
            self.link.down(self._answered, result)

    def _answered(self, result: Any) -> None:
        if not self.link.carries or not self.is_alive:
            self.lose()
        else:
            self.finish(result)

    def lose(self) -> None:
        """Let the client wait in vain until its time is over."""
        if not self.future.done():
            self.link.server.at(self._deadline, self.finish, self._late)

    def limit(self) -> None:
        """Give up at the deadline although nothing was lost: others have to answer."""
        handle = self.link.server.at(self._deadline, self.finish, self._late)
        self.future.add_done_callback(lambda _done: handle.cancel())

    def finish(self, result: Any) -> None:
        """Hand the result to who waits, if anybody does."""
        if not self.future.done():
            self.future.set_result(result)


UNANSWERED = object()
"""Given by an operation whose answer comes later."""


class Pull(Call):
    """A request for the next message of a durable. Nothing in time is an answer, too."""

    def __init__(self, link: Link, stream: str, durable: str, timeout_s: float) -> None:
        self.place = (stream, durable)
        super().__init__(link, link.server.pull, timeout_s, None)
        link.pulls.add(self)
        self.future.add_done_callback(lambda _done: link.pulls.discard(self))


class _Durable(Durable):
    """A durable with the clients that wait for its next message."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.waiting: deque[Pull] = deque()
        self.alarm: asyncio.TimerHandle | None = None


class SimServer:
    """The server: streams, buckets, durables, core subjects, and what can happen to it.

    It lives in the context in which it is made; make it outside every simulated process.
    """

    def __init__(self) -> None:
        self.context = contextvars.copy_context()
        self.streams: dict[str, Stream] = {}
        self.is_up = True
        self.is_stalled = False
        self.held: deque[Call] = deque()
        self._links: dict[object, Link] = {}
        self._stalls = 0

    # Time, in the server's own context.

    @property
    def now(self) -> float:
        loop = asyncio.get_running_loop()
        # Clients may have clocks of their own.
        return loop.now if isinstance(loop, VirtualLoop) else loop.time()

    def later(self, delay_s: float, run: Callable[..., None], *arguments: Any) -> None:
        """Run something after a time."""
        self.at(self.now + delay_s, run, *arguments)

    def at(self, when: float, run: Callable[..., None], *arguments: Any) -> asyncio.TimerHandle:
        """Run something at a time of the loop, or at once when it is over."""
        loop = asyncio.get_running_loop()
        if isinstance(loop, VirtualLoop):
            return loop.in_world(when - loop.now, run, *arguments)
        return loop.call_at(when, run, *arguments, context=self.context)

    # What can happen to it.

    def crash(self, *, forgotten_acks: int = 0, lost_messages: int = 0) -> None:
        """End at once: memory streams, ids of messages that are gone, and all waits are forgotten.

        A power failure also takes the newest acks of each durable and messages of each stream.
        """
        self.is_up = False
        self._end_stall()
        self.held.clear()
        self._drop_streams(
            name
            for name, stream in self.streams.items()
            if stream.config.storage is StorageType.MEMORY
        )
        for stream in self.streams.values():
            stream.forget_newest(lost_messages)
            stream.forget_ids()
            for durable in stream.durables.values():
                durable.waiting.clear()
                durable.forget_acks(forgotten_acks)
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
                # nats-py takes the news of a deleted consumer for a pause, and waits on.
                for pull in durable.waiting:
                    pull.lose()
                durable.waiting.clear()

    def inject(
        self, subject: str, data: bytes, headers: Mapping[str, str] | None = None
    ) -> int | None:
        """Store any bytes on any subject, as an intruder would; None when no stream takes it."""
        try:
            return self.publish(subject, data, headers or {})
        except Refused:
            return None

    # The clients.

    def join(self, client: object, link: Link) -> None:
        """Know a client from now on."""
        self._links[client] = link
        link.reach_out()

    def drop_client(self, client: object) -> None:
        """Forget a client that ended or crashed. What it had sent may still arrive."""
        link = self._links.pop(client, None)
        if link is not None:
            link.is_gone = True
            link.is_open = False

    def cut(self, client: object) -> None:
        """Part a client from the server in both directions."""
        self._links[client].cut()

    def heal(self, client: object) -> None:
        """End the partition of a client."""
        if client in self._links:
            self._links[client].heal()

    # What clients ask for. Each answers at once or raises Refused.

    def ensure(self) -> None:
        """Create the streams and buckets of the product that are missing."""
        wanted = [*bus.STREAMS, *map(stream_of_bucket, bus.BUCKETS)]
        for config in wanted:
            name = config.name or ""
            if name not in self.streams:
                self.streams[name] = Stream(config)

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
        for stream in self.streams.values():
            if stream.has(subject):
                sequence, message = stream.store(subject, data, headers, self.now)
                if message is not None:
                    for durable in stream.durables.values():
                        self._feed(stream, durable)
                return sequence
        raise Refused(NO_STREAM, "no response from stream")

    def write(self, bucket: str, key: str, value: bytes, headers: Mapping[str, str]) -> int:
        """Write a key of a bucket."""
        self.stream(f"KV_{bucket}")
        return self.publish(f"$KV.{bucket}.{key}", value, headers)

    def bind(self, name: str, durable: str, filter_: str, max_pending: int) -> None:
        """Create a durable, or change the settings of one."""
        self.stream(name).bind(
            _Durable(durable, filter_, ack_wait=bus.ACK_WAIT_S, max_pending=max_pending)
        )

    def pull(self, pull: Call) -> Any:
        """Deliver the next message to this request when there is one."""
        assert isinstance(pull, Pull)
        name, durable = pull.place
        stream = self.stream(name)
        found = stream.durables.get(durable)
        if found is None:
            raise Refused(NO_CONSUMER, "consumer not found")
        found.waiting.append(pull)
        self._feed(stream, found)
        return UNANSWERED

    def ack(self, name: str, durable: str, sequence: int) -> None:
        """Take an ack."""
        stream = self.stream(name)
        found = stream.durables.get(durable)
        if found is None:
            raise Refused(NO_CONSUMER, "consumer not found")
        found.settle(sequence)
        self._feed(stream, found)

    def _feed(self, stream: Stream, durable: _Durable) -> None:
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
            pull.answer(message)
            if delay := faults.repeats():
                self.later(delay, self._deliver_again, stream, durable, message.sequence)
        self._arm(stream, durable)

    def _deliver_again(self, stream: Stream, durable: _Durable, sequence: int) -> None:
        durable.put_back(sequence)
        self._feed(stream, durable)

    def _arm(self, stream: Stream, durable: _Durable) -> None:
        at = durable.next_expiry()
        if durable.alarm is None and at is not None:
            durable.alarm = self.at(at, self._expire, stream, durable)

    def _expire(self, stream: Stream, durable: _Durable) -> None:
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
        for link in self._links.values():
            for subscription in link.subscriptions:
                if not link.is_open or not matches(subscription.filter, subject):
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
