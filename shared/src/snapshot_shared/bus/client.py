"""The client of nats-py, extended by what permissions make necessary.

A subject that the server forbids ends the request at once instead of by its timeout; a stream is
read without a consumer; services answer to inboxes only; and a flush includes all that was sent.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import re
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, NamedTuple, TypeVar, cast

import msgspec
import nats.errors
import nats.js.errors
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription

from snapshot_shared.errors import NotPermitted

log = logging.getLogger(__name__)

INBOXES = "_INBOX."
_IMPORTED = "_R_."
"""The prefix of replies that a server generates between accounts; no client may choose one."""

_VIOLATION = re.compile(r'permissions violation for (publish|subscription) to "([^"]*)"')
FLUSH_S = 60
"""Longer than a connection lives that does not answer: no flush may end before its connection."""
ANSWER_S = 5.0

T = TypeVar("T")

_PAGE = 256
_END_OF_PAGE, _NO_RESPONDERS = "204", "503"
IDLE, NO_MESSAGES, REQUEST_TIMEOUT = "100", "404", "408"


class BusClient(Client):
    """A connection of one user; `user` is its name in messages."""

    def __init__(self, user: str) -> None:
        """Connect with `connect`; its `error_cb` must call `take_violation`."""
        super().__init__()
        self._user = user
        # In lower case, as nats-py reports the errors of the server.
        self._asking: dict[str, set[Callable[[], None]]] = {}
        self._answers = _Answers()
        self._answers_to: str | None = None
        self._refused: set[str] = set()
        self._has_no_inbox = False

    def take_violation(self, error: Exception) -> bool:
        """End the requests to a subject that the server forbids; return whether there were any.

        The subject of a subscription is kept for `check_subscription`. Without an inbox there
        are no answers, so its refusal ends every request.
        """
        found = _VIOLATION.search(str(error))
        if found is None:
            return False
        kind, subject = found.groups()
        waiting = tuple(self._asking.get(subject, ()))
        if kind == "subscription":
            self._refused.add(subject)
            if self._is_inbox(subject):
                self._has_no_inbox = True
                waiting = tuple(end for ends in self._asking.values() for end in ends)
        for end in waiting:
            end()
        return bool(waiting)

    def check_subscription(self, subject: str) -> None:
        """Raise NotPermitted when the server has refused a subscription to this subject."""
        if subject.lower() in self._refused:
            raise self._refusal(subject, "subscribe to")

    async def _unless_refused(self, subject: str, work: Awaitable[T]) -> T:
        """Publish and wait for answers. NotPermitted as soon as the server forbids the subject."""
        scope = asyncio.timeout(None)

        def end() -> None:
            scope.reschedule(asyncio.get_running_loop().time())

        try:
            async with scope:
                with self._ended_by(end, subject):
                    return await work
        except TimeoutError:
            if not scope.expired():
                raise
            raise self._why_not(subject) from None

    @contextlib.contextmanager
    def _ended_by(self, end: Callable[[], None], subject: str) -> Iterator[None]:
        """Have `end` called when the server forbids the subject within the block."""
        key = subject.lower()
        ends = self._asking.setdefault(key, set())
        ends.add(end)
        try:
            yield
        finally:
            ends.discard(end)
            if not ends:
                self._asking.pop(key, None)

    def _why_not(self, subject: str) -> NotPermitted:
        return self._no_inbox() if self._has_no_inbox else self._refusal(subject, "publish to")

    def _refusal(self, subject: str, what: str) -> NotPermitted:
        return NotPermitted(
            f"NATS user {self._user} may not {what} {subject}", subject=subject, user=self._user
        )

    def _is_inbox(self, subject: str) -> bool:
        return subject.startswith(self._inbox_prefix.decode().lower() + ".")

    def _no_inbox(self) -> NotPermitted:
        inbox = self._inbox_prefix.decode()
        return NotPermitted(
            f"this nkey may not subscribe to answers below {inbox}",
            next_step="use the inbox of its user, _INBOX.<user>; NATS_INBOX_PREFIX names it",
            subject=f"{inbox}.>",
            user=self._user,
        )

    async def flush(self, timeout: int = FLUSH_S) -> None:
        """Wait until the server has taken, and perhaps refused, everything that was sent before.

        The PING of nats-py overtakes what still waits to be written; that of a second does not.
        Nats-py stops reading when the PONG of a cancelled flush arrives, so none is cancelled.
        """
        for _ in range(2):
            await asyncio.shield(asyncio.ensure_future(super().flush(timeout)))

    async def request(
        self,
        subject: str,
        payload: bytes = b"",
        timeout: float = ANSWER_S,
        old_style: bool = False,  # noqa: FBT001, FBT002 - as nats-py calls it
        headers: dict[str, Any] | None = None,
    ) -> Msg:
        """Ask as nats-py does, at a third of its cost. NotPermitted when this user may not."""
        if self._answers_to is None:
            self._answers_to = self.new_inbox()
            await self.sink(f"{self._answers_to}.*", self._answers.take)
        token, answered = self._answers.expect()

        def forbid() -> None:
            if not answered.done():
                answered.set_exception(self._why_not(subject))

        def expire() -> None:
            if not answered.done():
                answered.set_exception(nats.errors.TimeoutError())

        late = asyncio.get_running_loop().call_later(timeout, expire)
        try:
            with self._ended_by(forbid, subject):
                await self.publish(
                    subject, payload, reply=f"{self._answers_to}.{token}", headers=headers
                )
                answer = await answered
        finally:
            late.cancel()
            self._answers.forget(token)
        if answer.headers and _header(answer, "Status") == _NO_RESPONDERS:
            raise nats.errors.NoRespondersError
        return answer

    async def sink(self, subject: str, take: Callable[[Msg], None]) -> Subscription:
        """Subscribe; `take`, which must not raise, gets each message as it is read.

        nats-py hands a message straight to the future of a subscription that has one, where it
        would queue it for a callback and wake a task. It asks no more of a future than `_Sink` has.
        """
        return await self.subscribe(subject, future=cast("asyncio.Future[Msg]", _Sink(take)))

    async def store(
        self, subject: str, payload: bytes, headers: dict[str, str] | None, within_s: float
    ) -> int:
        """Publish to a stream and return the sequence at which the server has it.

        The errors of nats-py: APIError for a refusal, NoStreamResponseError where no stream has
        the subject, TimeoutError.
        """
        try:
            answer = await self.request(subject, payload, within_s, headers=headers)
        except nats.errors.NoRespondersError:
            raise nats.js.errors.NoStreamResponseError from None
        try:
            ack = _PUB_ACK.decode(answer.data)
        except msgspec.MsgspecError as error:
            raise nats.errors.Error(f"no answer of a stream: {error}") from error
        if ack.error is not None:
            raise nats.js.errors.APIError.from_error(ack.error)
        return ack.seq

    async def stored(self, stream: str, filter_: str) -> list[Msg]:
        """Read what a stream holds now on the subjects that match, oldest first.

        Subject and sequence stand in the headers `Nats-Subject` and `Nats-Sequence`. Any replica
        answers, so the newest may be missing for a moment.
        """
        found: list[Msg] = []
        sequence, pending = 1, 1
        while pending:
            page, pending = await self._page(stream, filter_, sequence)
            if not page:
                break
            found += page
            sequence = int(_header(page[-1], "Nats-Sequence")) + 1
        return found

    async def ask_next(
        self, stream: str, durable: str, inbox: str, count: int, within_s: float
    ) -> None:
        """Have the next messages of a durable sent to an inbox, as they come within a time."""
        request = {"batch": count, "expires": int(within_s * 1e9)}
        subject = f"$JS.API.CONSUMER.MSG.NEXT.{stream}.{durable}"
        await self.publish(subject, json.dumps(request).encode(), reply=inbox)

    async def _page(self, stream: str, filter_: str, sequence: int) -> tuple[list[Msg], int]:
        subject = f"$JS.API.DIRECT.GET.{stream}"
        request = {"seq": sequence, "batch": _PAGE, "next_by_subj": filter_}
        inbox = self.new_inbox()
        source = await self.subscribe(inbox)

        async def ask() -> tuple[list[Msg], int]:
            await self.publish(subject, json.dumps(request).encode(), reply=inbox)
            return await _collect(source)

        try:
            return await self._unless_refused(subject, ask())
        finally:
            with contextlib.suppress(nats.errors.Error):
                await source.unsubscribe()


class _PubAck(msgspec.Struct):
    """What a stream answers to a message."""

    seq: int = 0
    error: dict[str, Any] | None = None


_PUB_ACK = msgspec.json.Decoder(_PubAck)


class _Sink:
    """What nats-py takes for the future of a subscription."""

    def __init__(self, take: Callable[[Msg], None]) -> None:
        self.set_result = take

    def cancelled(self) -> bool:
        return False


class _Answers:
    """The futures of open requests, by the last token of the subject of their answer."""

    def __init__(self) -> None:
        self._waiting: dict[str, asyncio.Future[Msg]] = {}
        self._count = 0

    def expect(self) -> tuple[str, asyncio.Future[Msg]]:
        self._count += 1
        token = f"{self._count:x}"
        future = asyncio.get_running_loop().create_future()
        self._waiting[token] = future
        return token, future

    def forget(self, token: str) -> None:
        self._waiting.pop(token, None)

    def take(self, message: Msg) -> None:
        future = self._waiting.get(message.subject.rpartition(".")[2])
        if future is not None and not future.done():
            future.set_result(message)


class MessageStatus(NamedTuple):
    """A status that a server sends instead of a message; `pending` messages will not come."""

    code: str
    description: str
    pending: int


def message_status(message: Msg) -> MessageStatus | None:
    """Return the status that a message carries; None for a message of a stream."""
    if not message.headers or not (code := _header(message, "Status")):
        return None
    pending = int(_header(message, "Nats-Pending-Messages") or 0)
    return MessageStatus(code, _header(message, "Description"), pending)


async def _collect(source: Subscription) -> tuple[list[Msg], int]:
    """Return the messages of one page and how many are left after it."""
    found: list[Msg] = []
    while True:
        message = await source.next_msg(timeout=ANSWER_S)
        status = _header(message, "Status")
        if not status:
            found.append(message)
        elif status in (_END_OF_PAGE, NO_MESSAGES):
            return found, int(_header(message, "Nats-Num-Pending") or 0)
        elif status == _NO_RESPONDERS:
            raise nats.js.errors.NoStreamResponseError
        else:
            raise nats.errors.Error(f"{status} {_header(message, 'Description')}")


class InboxAnswers:
    """A client whose subscribers get only requests with an inbox as reply subject.

    The sender of a request chooses the reply subject, and could name one that only we may publish
    to.
    """

    def __init__(self, client: Client) -> None:
        """Use `client` for everything else."""
        self._client = client

    async def subscribe(
        self, subject: str, queue: str = "", cb: Callable[[Msg], Awaitable[None]] | None = None
    ) -> Subscription:
        """Subscribe; a request whose answer would go elsewhere is dropped."""

        async def take(message: Msg) -> None:
            if cb is None or not message.reply.startswith((INBOXES, _IMPORTED)):
                log.warning("a request on %s has no inbox to answer to: %s", subject, message.reply)
                return
            await cb(message)

        return await self._client.subscribe(subject, queue=queue, cb=take)

    def __getattr__(self, name: str) -> Any:
        """Return the attribute of the client."""
        return getattr(self._client, name)


def _header(message: Msg, name: str) -> str:
    return str((message.headers or {}).get(name, ""))
