"""The gRPC socket: what services and tools ask, with msgpack bodies and the standard health.

The mode of the folder decides who may connect: grpcio does not expose peer credentials.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import AbstractContextManager, aclosing
from pathlib import Path
from typing import NoReturn, TypeVar

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc  # type: ignore[import-untyped]

from gms.ports import Control, Tracer, TransferControl
from snapback_client.frames import Versions
from snapshot_shared.codec import MAX_FRAME_BYTES, decode_msgpack, encode_msgpack
from snapshot_shared.errors import (
    DeadlineExceeded,
    Internal,
    InvalidInput,
    NotFound,
    UnknownDevice,
    failure_of,
)
from snapshot_shared.frames import (
    FAILURE_TRAILER,
    GRPC_SERVICE,
    GRPC_SOCKET,
    GRPC_VERSIONS,
    VERSION_HEADER,
    DropLayoutRequest,
    FenceRequest,
    ForgetRequest,
    LoadRequest,
    PublishRequest,
    SaveRequest,
    StatusRequest,
    UnfenceRequest,
    WatchRequest,
    version_of_call,
)

log = logging.getLogger(__name__)

Context = grpc.aio.ServicerContext[bytes, bytes]
T = TypeVar("T")

_CODES: tuple[tuple[type[BaseException], grpc.StatusCode], ...] = (
    (DeadlineExceeded, grpc.StatusCode.DEADLINE_EXCEEDED),
    (InvalidInput, grpc.StatusCode.INVALID_ARGUMENT),
    (NotFound, grpc.StatusCode.NOT_FOUND),
    (UnknownDevice, grpc.StatusCode.NOT_FOUND),
    (Internal, grpc.StatusCode.INTERNAL),
)

_OPTIONS = (
    ("grpc.max_receive_message_length", MAX_FRAME_BYTES),
    ("grpc.so_reuseport", 0),
)


class GrpcServer:
    """Listens in a folder until it is closed."""

    def __init__(
        self,
        folder: Path,
        control: Control,
        transfers: TransferControl,
        tracer: Tracer | None = None,
        versions: Versions = GRPC_VERSIONS,
    ) -> None:
        """Prepare to serve `<folder>/gms-grpc.sock`, for our own user alone.

        Calls whose metadata has a `traceparent` are spans of that trace. Each is answered in the
        highest of the `versions` that its caller speaks as well.
        """
        self._versions = versions
        self.path = folder / GRPC_SOCKET
        self._control = control
        self._transfers = transfers
        self._tracer = tracer
        self._streams: set[asyncio.Task[None]] = set()
        self._server = grpc.aio.server(options=_OPTIONS)
        self._health = health.aio.HealthServicer()

    async def start(self) -> None:
        """Bind and begin to serve."""
        # The lease server holds the lock of the folder, so a socket in it is of an ended server.
        self.path.unlink(missing_ok=True)
        self._server.add_generic_rpc_handlers((self._handlers(),))
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        self._server.add_insecure_port(f"unix:{self.path}")
        await self._server.start()
        self.path.chmod(0o600)
        for name in ("", GRPC_SERVICE):
            await self._health.set(name, health_pb2.HealthCheckResponse.SERVING)

    async def close(self) -> None:
        """Report NOT_SERVING, end every call, remove the socket."""
        await self._health.enter_graceful_shutdown()
        await self._server.stop(grace=None)
        # stop() cancels the handlers of streams and does not wait for their clean-up.
        while self._streams:
            await asyncio.wait(self._streams)
        self.path.unlink(missing_ok=True)

    def _handlers(self) -> grpc.GenericRpcHandler:
        control, transfers = self._control, self._transfers
        unary, stream = self._unary, self._stream
        return grpc.method_handlers_generic_handler(
            GRPC_SERVICE,
            {
                "Fence": unary("fence", FenceRequest, control.fence),
                "Unfence": unary("unfence", UnfenceRequest, control.unfence),
                "DropLayout": unary("drop-layout", DropLayoutRequest, control.drop_layout),
                "Publish": unary("publish", PublishRequest, control.publish),
                "Forget": unary("forget", ForgetRequest, control.forget),
                "Status": unary("status", StatusRequest, control.status),
                "Watch": stream("watch", WatchRequest, control.watch),
                "Save": stream("save", SaveRequest, transfers.save),
                "Load": stream("load", LoadRequest, transfers.load),
            },
        )

    # Bodies are bytes for gRPC: its own serializers would turn a bad one into INTERNAL.

    def _unary(
        self, name: str, kind: type[T], answer: Callable[[T], Awaitable[object]]
    ) -> grpc.RpcMethodHandler[bytes, bytes]:
        """Decode, answer, encode."""

        async def call(data: bytes, context: Context) -> bytes:
            try:
                with self._span(name, context):
                    await self._agree(context)
                    return encode_msgpack(await answer(decode_msgpack(data, kind)))
            except asyncio.CancelledError:
                raise
            except Exception as error:  # noqa: BLE001 - where a failure becomes a gRPC status
                await _fail(context, error)

        return grpc.unary_unary_rpc_method_handler(call)

    def _stream(
        self, name: str, kind: type[T], answer: Callable[[T], AsyncGenerator[object, None]]
    ) -> grpc.RpcMethodHandler[bytes, bytes]:
        """Decode, and send each answer when the last was taken. A cancelled call closes them."""

        async def send(data: bytes, context: Context) -> None:
            with self._span(name, context):
                await self._agree(context)
                async with aclosing(answer(decode_msgpack(data, kind))) as answers:
                    async for each in answers:
                        await context.write(encode_msgpack(each))

        async def call(data: bytes, context: Context) -> None:
            # A task of ours: gRPC may cancel its own twice, and tidying up must end undisturbed.
            task = asyncio.create_task(send(data, context), name=name)
            self._streams.add(task)
            task.add_done_callback(self._streams.discard)
            try:
                await asyncio.shield(task)
            except asyncio.CancelledError:
                task.cancel()
                raise
            except Exception as error:  # noqa: BLE001 - where a failure becomes a gRPC status
                await _fail(context, error)

        return grpc.unary_stream_rpc_method_handler(call)

    async def _agree(self, context: Context) -> None:
        """Say in which version the call is answered. UnsupportedVersion names both ranges."""
        version = version_of_call(dict(context.invocation_metadata() or ()), self._versions)
        await context.send_initial_metadata(((VERSION_HEADER, str(version)),))

    def _span(self, name: str, context: Context) -> AbstractContextManager[object]:
        found = dict(context.invocation_metadata() or ())
        parent = found.get("traceparent")
        if self._tracer is None or not isinstance(parent, str):
            return contextlib.nullcontext()
        return self._tracer.span(f"gms-{name}", kind="server", parent=parent)


async def _fail(context: Context, error: Exception) -> NoReturn:
    failure = failure_of(error)
    if failure.reason == Internal.reason:
        log.error("a call failed", exc_info=error)
    context.set_trailing_metadata(((FAILURE_TRAILER, encode_msgpack(failure)),))
    await context.abort(_code(error), str(failure))


def _code(error: BaseException) -> grpc.StatusCode:
    for kind, code in _CODES:
        if isinstance(error, kind):
            return code
    return grpc.StatusCode.FAILED_PRECONDITION
