"""Core NATS: requests, services that answer them, and subscriptions."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from functools import partial
from typing import Any, NamedTuple, cast

import msgspec
import nats.errors
import nats.micro
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.micro.request import ServiceError
from nats.micro.service import ServiceConfig

from snapshot_shared.bus.client import InboxAnswers
from snapshot_shared.bus.connection import REQUEST_S, unavailable
from snapshot_shared.bus.streams import Delivery, Streams
from snapshot_shared.errors import Failure, NotFound

ASKED = "Snapback-Asked"
"""The header with the subject of a request, whatever its sender wrote into that header."""

DESCRIPTIONS = {
    "snap-operator": "Answers what people and nodes ask about objects: snap.api.VERB",
    "snap-agent": "Says how the agent of a node is: snap.rpc.agent.NODE.status",
    "snap-gms": "Says how the GPU memory service of a node is: snap.rpc.gms.NODE.status",
}
"""What each service is there for, by its name."""

DEFECT = 500
ERROR_CODES = {
    "AlreadyExists": 409,
    "Conflict": 409,
    "Forbidden": 403,
    "InvalidInput": 400,
    "InvalidManifest": 400,
    "InvalidMessage": 400,
    "InvalidName": 400,
    "NotEligible": 409,
    "NotFound": 404,
    "NotPermitted": 403,
    "RequestExpired": 408,
    "StalePodReference": 404,
    "UnsupportedVersion": 400,
}
"""The code of a failed answer by its reason, as HTTP has it; DEFECT where this has none."""

MAX_HEADER = 256

Handler = Callable[[bytes, Mapping[str, str]], Awaitable[bytes]]


class _Service(NamedTuple):
    """A NATS service, on whatever connection there is."""

    config: ServiceConfig
    endpoints: Mapping[str, Handler]

    async def begin(self, client: Client) -> None:
        answering = cast("Client", InboxAnswers(client))
        service = await nats.micro.add_service(answering, self.config)
        for subject, handler in self.endpoints.items():
            await service.add_endpoint(
                name=_named(subject), subject=subject, handler=_responding(handler)
            )


class Bus(Streams):
    """Everything that our programs do over NATS, on a connection that lasts until `close`."""

    async def announce(self, subject: str, payload: bytes) -> bool:
        """Send a core NATS message, which may be lost. Return whether it could be sent at all."""
        try:
            await self.client.publish(subject, payload)
        except nats.errors.Error:
            return False
        return True

    @contextlib.asynccontextmanager
    async def listening(self, subject: str) -> AsyncIterator[asyncio.Queue[Delivery]]:
        """Collect core NATS messages on a subject in a queue for the length of the block.

        What is written to streams and buckets is among them. The server has the subscription when
        the block begins, unless it does not answer: then it gets it later, as does every connection
        that is built after this one was closed.
        """
        queue: asyncio.Queue[Delivery] = asyncio.Queue()

        async def take(message: Msg) -> None:
            queue.put_nowait(
                Delivery(message.subject, 0, message.data, message.headers or {}, message)
            )

        async with self._subscribed(subject, take):
            yield queue

    async def request(
        self,
        subject: str,
        payload: bytes,
        *,
        timeout_s: float = REQUEST_S,
        headers: Mapping[str, str] | None = None,
    ) -> bytes:
        """Send a request and return its answer. NotFound when the subject has no responders."""
        try:
            answer = await self.client.request(
                subject, payload, timeout=timeout_s, headers=dict(headers) if headers else None
            )
        except nats.errors.NoRespondersError:
            raise NotFound(
                f"nothing answers {subject}",
                subject=subject,
                next_step="check that the service behind it runs (nats micro ls)",
            ) from None
        except (nats.errors.Error, TimeoutError) as error:
            raise unavailable(error, f"request {subject}") from error
        return answer.data

    async def ask_all(self, subject: str, *, expected: int, within_s: float) -> list[bytes]:
        """Ask every responder of a subject; return up to `expected` answers that come in time."""
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
            raise unavailable(error, f"ask {subject}") from error
        return answers

    async def serve(
        self, name: str, version: str, metadata: Mapping[str, str], endpoints: Mapping[str, Handler]
    ) -> None:
        """Answer requests as a NATS service (`nats micro ls`); `endpoints` is subject -> handler.

        Handlers answer quickly, never raise for bad input and run one at a time.
        """
        config = ServiceConfig(
            name=name,
            version=version,
            description=DESCRIPTIONS.get(name),
            metadata=dict(metadata),
        )
        await self._attach(_Service(config, dict(endpoints)))
        await self._flush()


def _responding(handler: Handler) -> Callable[[Any], Awaitable[None]]:
    async def answer(request: Any) -> None:
        headers = {**(request.headers or {}), ASKED: request.subject}
        reply = await handler(request.data, headers)
        failure = _failure_in(reply)
        if failure is None:
            await request.respond(reply)
            return
        # nats-py counts an error where a handler raises, and answers it by this without a body.
        request.respond_error = partial(request.respond_error, data=reply)
        code = ERROR_CODES.get(failure.reason, DEFECT)
        raise ServiceError(str(code), _as_header(f"{failure.reason}: {failure.message}"))

    return answer


class _Answered(msgspec.Struct):
    failure: Failure | None = None


def _failure_in(reply: bytes) -> Failure | None:
    """Return the failure that an answer is; most are none, and are not decoded."""
    if b'"failure":' not in reply:
        return None
    try:
        return msgspec.json.decode(reply, type=_Answered).failure
    except msgspec.MsgspecError:
        return None


def _as_header(text: str) -> str:
    """Return a text as the value of a header: printable ASCII on one line."""
    plain = text.encode("ascii", "replace").decode()
    return "".join(sign if sign.isprintable() else " " for sign in plain)[:MAX_HEADER]


def _named(subject: str) -> str:
    """Return the name of an endpoint: what is asked, such as `get` or `status`."""
    words = [word for word in subject.split(".") if word != "*"]
    return "-".join(words[2:] if words[:2] == ["snap", "api"] else words[-1:])
