"""What JetStream keeps: streams with their limits, and durables with what they still owe.

Plain values and rules. Nothing here waits, sends or reads a clock: the time is handed in, in
seconds. `Refused` is the server's answer when it does not do what it was asked to.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any, NamedTuple

from nats.js.api import DiscardPolicy, KeyValueConfig, StorageType, StreamConfig

DEDUP_WINDOW_S = 120.0
OVERHEAD_BYTES = 22
"""What a record of the file store costs beyond subject, headers and payload."""


class Refused(Exception):
    """A definite no, with the code of nats-server."""

    def __init__(self, code: int, description: str) -> None:
        super().__init__(description)
        self.code = code


class Stored(NamedTuple):
    """One message of a stream; `at` is the second it was stored."""

    sequence: int
    subject: str
    data: bytes
    headers: Mapping[str, str]
    at: float

    @property
    def size(self) -> int:
        """Give the bytes it takes of its stream."""
        headers = sum(len(key) + len(value) + 4 for key, value in self.headers.items())
        return len(self.subject) + len(self.data) + headers + OVERHEAD_BYTES


@lru_cache(maxsize=65536)
def matches(filter_: str, subject: str) -> bool:
    """Say whether a subject falls under a filter with `*` and `>`.

    Wildcards of the subject are ordinary characters; no filter takes an empty word.
    """
    wanted, words = filter_.split("."), subject.split(".")
    if wanted[-1] == ">":
        wanted.pop()
        if len(words) <= len(wanted):
            return False
    elif len(words) != len(wanted):
        return False
    return all(words) and all(
        want in ("*", word) for want, word in zip(wanted, words, strict=False)
    )


def stream_of_bucket(bucket: KeyValueConfig) -> StreamConfig:
    return StreamConfig(
        name=f"KV_{bucket.bucket}",
        subjects=[f"$KV.{bucket.bucket}.>"],
        storage=bucket.storage or StorageType.FILE,
        discard=DiscardPolicy.NEW,
        max_msgs_per_subject=bucket.history,
        max_age=bucket.ttl,
    )


class Durable:
    """A pull consumer with explicit acks: what it has not delivered, and what was not acked."""

    def __init__(self, name: str, filter_: str, *, ack_wait: float, max_pending: int) -> None:
        self.name = name
        self.filter = filter_
        self.ack_wait = ack_wait
        self.max_pending = max_pending
        self.todo: deque[int] = deque()
        self.again: deque[int] = deque()
        self.pending: dict[int, float] = {}
        """Sequence to the time at which it is delivered again, earliest first."""
        self.waiting: deque[Any] = deque()
        """The requests of clients that wait for the next message."""
        self.alarm: Any = None
        """What ends the earliest wait for an ack."""

    def take(self, stream: Stream, now: float) -> Stored | None:
        """Give the next message and count it as delivered: first what comes again."""
        if len(self.pending) >= self.max_pending:
            return None
        for queue in (self.again, self.todo):
            while queue:
                message = stream.messages.get(queue.popleft())
                if message is not None:
                    self.pending[message.sequence] = now + self.ack_wait
                    return message
        return None

    def settle(self, sequence: int) -> None:
        """Take an ack; one that is old or unknown changes nothing."""
        if self.pending.pop(sequence, None) is None and sequence in self.again:
            self.again.remove(sequence)

    def expire(self, now: float) -> None:
        """Put what was not acked in time back into the queue."""
        due = []
        for sequence, at in self.pending.items():
            if at > now:
                break
            due.append(sequence)
        for sequence in due:
            self.put_back(sequence)

    def put_back(self, sequence: int) -> None:
        """Let one message be delivered again, acked or not."""
        self.pending.pop(sequence, None)
        if sequence not in self.again:
            self.again.append(sequence)

    def next_expiry(self) -> float | None:
        """Give the time at which something comes again for want of an ack."""
        return next(iter(self.pending.values()), None)

    def restart(self, now: float) -> None:
        """Begin the waits for acks afresh, as a server does that comes back."""
        self.pending = dict.fromkeys(self.pending, now + self.ack_wait)


class Stream:
    """The messages of one stream, oldest first, under the limits of its configuration."""

    def __init__(self, config: StreamConfig) -> None:
        self.config = config
        self.messages: dict[int, Stored] = {}
        self.durables: dict[str, Durable] = {}
        self.last_sequence = 0
        self._bytes = 0
        self._by_subject: dict[str, list[int]] = {}
        self._ids: dict[str, tuple[int, float]] = {}
        self._ends: dict[int, float] = {}

    def has(self, subject: str) -> bool:
        return any(matches(filter_, subject) for filter_ in self.config.subjects or ())

    def store(
        self, subject: str, data: bytes, headers: Mapping[str, str], now: float
    ) -> tuple[int, Stored | None]:
        """Store a message: its sequence, and the message unless it was a duplicate.

        Refused when a limit or an expectation of the publisher forbids it.
        """
        message_id = headers.get("Nats-Msg-Id")
        if message_id is not None and (known := self._known_id(message_id, now)) is not None:
            return known, None
        message = Stored(self.last_sequence + 1, subject, data, headers, now)
        self.prune(now)
        self._check(message)
        self.last_sequence = message.sequence
        if message_id is not None:
            self._ids[message_id] = (message.sequence, now)
        self.messages[message.sequence] = message
        if ttl := headers.get("Nats-TTL"):
            self._ends[message.sequence] = now + float(ttl.removesuffix("s"))
        self._bytes += message.size
        self._by_subject.setdefault(subject, []).append(message.sequence)
        self._make_room(subject)
        for durable in self.durables.values():
            if matches(durable.filter, subject):
                durable.todo.append(message.sequence)
        return message.sequence, message

    def _known_id(self, message_id: str, now: float) -> int | None:
        while self._ids:
            oldest = next(iter(self._ids))
            if self._ids[oldest][1] > now - DEDUP_WINDOW_S:
                break
            del self._ids[oldest]
        found = self._ids.get(message_id)
        return None if found is None else found[0]

    def _check(self, message: Stored) -> None:
        config, subject = self.config, message.subject
        size = message.size - len(subject) - OVERHEAD_BYTES
        if _limits(config.max_msg_size) and size > config.max_msg_size:
            raise Refused(10054, "message size exceeds maximum allowed")
        sequences = self._by_subject.get(subject, ())
        expected = message.headers.get("Nats-Expected-Last-Subject-Sequence")
        if expected is not None and int(expected) != (sequences[-1] if sequences else 0):
            raise Refused(10071, f"wrong last sequence: {sequences[-1] if sequences else 0}")
        per_subject = config.max_msgs_per_subject
        replaces = _limits(per_subject) and len(sequences) >= per_subject
        if config.discard is not DiscardPolicy.NEW or replaces:
            return
        if _limits(config.max_msgs) and len(self.messages) >= config.max_msgs:
            raise Refused(10077, "maximum messages exceeded")
        if _limits(config.max_bytes) and self._bytes + message.size > config.max_bytes:
            raise Refused(10077, "maximum bytes exceeded")

    def _make_room(self, subject: str) -> None:
        config, sequences = self.config, self._by_subject[subject]
        if _limits(config.max_msgs_per_subject):
            while len(sequences) > config.max_msgs_per_subject:
                self._drop(sequences[0])
        while (_limits(config.max_msgs) and len(self.messages) > config.max_msgs) or (
            _limits(config.max_bytes) and self._bytes > config.max_bytes
        ):
            self._drop(next(iter(self.messages)))

    def prune(self, now: float) -> None:
        """Drop what is older than the stream keeps, or than it was meant to get."""
        for sequence in [found for found, end in self._ends.items() if end <= now]:
            self._drop(sequence)
        if not _limits(self.config.max_age):
            return
        while self.messages:
            oldest = next(iter(self.messages.values()))
            if oldest.at + self.config.max_age > now:
                return
            self._drop(oldest.sequence)

    def delete(self, sequence: int) -> bool:
        """Delete one message; False when there is none of this sequence."""
        if sequence not in self.messages:
            return False
        self._drop(sequence)
        return True

    def _drop(self, sequence: int) -> None:
        message = self.messages.pop(sequence)
        self._ends.pop(sequence, None)
        self._bytes -= message.size
        sequences = self._by_subject[message.subject]
        sequences.remove(sequence)
        if not sequences:
            del self._by_subject[message.subject]

    def last(self, subject: str) -> Stored | None:
        sequences = self._by_subject.get(subject)
        return self.messages[sequences[-1]] if sequences else None

    def counts(self, filter_: str) -> dict[str, int]:
        """Count the messages on each subject that matches."""
        return {
            subject: len(sequences)
            for subject, sequences in self._by_subject.items()
            if matches(filter_, subject)
        }

    def fill(self) -> float:
        """Give the share of the room that is taken, by messages or by bytes."""
        taken = (
            (len(self.messages), self.config.max_msgs),
            (self._bytes, self.config.max_bytes),
        )
        return max((used / most for used, most in taken if most and _limits(most)), default=0.0)

    def select(self, filter_: str) -> Iterator[Stored]:
        """Go through the messages that match, oldest first."""
        return (found for found in self.messages.values() if matches(filter_, found.subject))

    def bind(self, wanted: Durable) -> Durable:
        """Create a durable that reads from the beginning, or adopt the settings of a known one."""
        known = self.durables.get(wanted.name)
        if known is None:
            wanted.todo.extend(message.sequence for message in self.select(wanted.filter))
            self.durables[wanted.name] = wanted
            return wanted
        known.filter, known.ack_wait = wanted.filter, wanted.ack_wait
        known.max_pending = wanted.max_pending
        return known

    def forget_ids(self) -> None:
        """Lose the ids of messages that are not stored any more, as a crash does."""
        self._ids = {key: seen for key, seen in self._ids.items() if seen[0] in self.messages}


def _limits(value: float | None) -> bool:
    """Say whether a limit is set; JetStream writes -1 or 0 for none."""
    return value is not None and value > 0
