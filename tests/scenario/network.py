"""What a network does between a client and the simulated server: latency, order, loss, partition.

All time is the loop's, all chance comes from `Faults`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from random import Random
from typing import TYPE_CHECKING, Any, NamedTuple

from tests.scenario.streams import Refused, Stored

if TYPE_CHECKING:
    from tests.scenario.server import SimServer

TICK_S = 1e-9
"""Two packets of one connection never arrive at the same time, so they stay in order."""

UNANSWERED = object()
"""Given by an operation whose answer comes later."""


class _Calm(Random):
    """No chance: everything takes as long as it does on average, and nothing goes wrong."""

    def random(self) -> float:
        return 0.5


class Faults:
    """Every decision of the network between one client and the server, by chance or calm.

    Times are seconds. Decisions are taken when they are needed, in the order of the run, so that
    a seed gives the same run again. The fields are probabilities and may be changed at any time.
    """

    def __init__(self, random: Random | None = None, *, slowest_s: float = 0.001) -> None:
        self.random = random or _Calm()
        self.slowest_s = slowest_s
        self.lost_requests = 0.0
        self.lost_answers = 0.0
        self.lost_announcements = 0.0
        self.postponed = 0.0
        self.repeated = 0.0
        self.longest_s = 60.0

    def latency(self) -> float:
        """How long a packet takes one way."""
        return self.random.random() * self.slowest_s

    def loses_request(self) -> bool:
        return self._happens(self.lost_requests)

    def loses_answer(self) -> bool:
        """Whether a request is carried out and its answer never comes."""
        return self._happens(self.lost_answers)

    def loses_announcement(self) -> bool:
        """Whether a core message to this client is lost."""
        return self._happens(self.lost_announcements)

    def postpones(self) -> float:
        """How much later than its turn a message of a durable is delivered; 0: in its turn."""
        return self._sometime() if self._happens(self.postponed) else 0.0

    def repeats(self) -> float:
        """How long after its delivery a message comes again, acked or not; 0: it does not."""
        return self._sometime() if self._happens(self.repeated) else 0.0

    def notices(self) -> float:
        """How long a cut connection looks alive to its client."""
        return 10.0 + 20.0 * self.random.random()

    def returns(self) -> float:
        """How long a client takes to connect again once it can."""
        return 0.05 + self.random.random()

    def choose(self, count: int) -> int:
        """Which of the instances of a service gets a request."""
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
        self.subscriptions: tuple[Subscription, ...] = ()
        self.pulls: set[Pull] = set()
        self._on_change = on_change
        self._cuts = 0
        self._up_at = 0.0
        self._down_at = 0.0

    def subscribe(self, subscription: Subscription) -> None:
        self.subscriptions += (subscription,)
        self.server.forget_routes()

    def unsubscribe(self, subscription: Subscription) -> None:
        self.subscriptions = tuple(item for item in self.subscriptions if item is not subscription)
        self.server.forget_routes()

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


class Pull(Call):
    """A request for the next messages of a durable, as they come, until its time is over."""

    def __init__(
        self,
        link: Link,
        place: tuple[str, str],
        count: int,
        take: Callable[[Stored], None],
        timeout_s: float,
    ) -> None:
        self.place = place
        self.wanted = count
        """How many more the server may send."""
        self.missing = count
        """How many have not arrived."""
        self._take = take
        super().__init__(link, link.server.pull, timeout_s, None)
        self.limit()
        link.pulls.add(self)
        self.future.add_done_callback(lambda _done: link.pulls.discard(self))

    def send(self, message: Stored) -> None:
        """Send one message; it may not arrive."""
        self.wanted -= 1
        if not self.link.faults.loses_answer():
            self.link.down(self._arrived, message)

    def _arrived(self, message: Stored) -> None:
        if self.link.carries and self.is_alive:
            self.missing -= 1
            self._take(message)
            if not self.missing:
                self.finish(None)
