"""Core NATS: requests, services that answer them, and subscriptions."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any, NamedTuple, cast

import nats.errors
import nats.micro
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.micro.service import ServiceConfig

from snapshot_shared.bus.client import InboxAnswers
from snapshot_shared.bus.connection import REQUEST_S, unavailable
from snapshot_shared.bus.streams import Delivery, Streams
from snapshot_shared.errors import NotFound

ASKED = "Snapback-Asked"
"""The header with the subject of a request, whatever its sender wrote into that header."""

Handler = Callable[[bytes, Mapping[str, str]], Awaitable[bytes]]


class _Service(NamedTuple):
    """A NATS service, on whatever connection there is."""

    config: ServiceConfig
    endpoints: Mapping[str, Handler]

    async def begin(self, client: Client) -> None:
        answering = cast("Client", InboxAnswers(client))
        service = await nats.micro.add_service(answering, self.config)
        for subject, handler in self.endpoints.items():
            name = subject.replace(".", "-").replace("*", "any")
            await service.add_endpoint(name=name, subject=subject, handler=_responding(handler))


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
        config = ServiceConfig(name=name, version=version, metadata=dict(metadata))
        await self._attach(_Service(config, dict(endpoints)))
        await self._flush()


def _responding(handler: Handler) -> Callable[[Any], Awaitable[None]]:
    async def answer(request: Any) -> None:
        headers = {**(request.headers or {}), ASKED: request.subject}
        await request.respond(await handler(request.data, headers))

    return answer
