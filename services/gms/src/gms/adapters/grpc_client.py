"""The gRPC socket of a GPU memory service, from the other side: for tools and containers."""

from __future__ import annotations

import contextlib
import os
from collections.abc import AsyncGenerator
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import grpc

from snapback_client.frames import Versions, error_of
from snapback_client.wire import pinned
from snapshot_shared.codec import MAX_FRAME_BYTES, decode_msgpack, encode_msgpack
from snapshot_shared.errors import DeadlineExceeded, Failure, GmsUnavailable, SnapbackError
from snapshot_shared.frames import (
    FAILURE_TRAILER,
    GRPC_SOCKET,
    GRPC_VERSIONS,
    MAX_EVENTS,
    DropLayoutReply,
    DropLayoutRequest,
    FenceReply,
    FenceRequest,
    ForgetReply,
    ForgetRequest,
    LoadRequest,
    PublishReply,
    PublishRequest,
    SaveRequest,
    StatusReply,
    StatusRequest,
    TransferUpdate,
    UnfenceReply,
    UnfenceRequest,
    WatchReply,
    WatchRequest,
    call_metadata,
    check_answer,
    grpc_method,
)
from snapshot_shared.orders import LayoutRef
from snapshot_shared.telemetry import current_traceparent

T = TypeVar("T")

CALL_S = 10.0
"""How long a short call may take, in seconds."""

_OPTIONS = (
    ("grpc.max_receive_message_length", 8 * MAX_FRAME_BYTES),
    ("grpc.use_local_subchannel_pool", 1),
)


class GmsCaller:
    """Calls one service. An async context manager, which closes the channel."""

    def __init__(
        self, socket_dir: Path, *, traceparent: str = "", versions: Versions = GRPC_VERSIONS
    ) -> None:
        """Use `<socket_dir>/gms-grpc.sock`, and offer these versions.

        Every call is part of the trace `traceparent`, else of the span around it.
        """
        self._path = socket_dir / GRPC_SOCKET
        self._traceparent = traceparent
        self._versions = versions
        self._channel: grpc.aio.Channel | None = None
        self._pinned = contextlib.ExitStack()

    async def __aenter__(self) -> Self:
        """Open the channel. GmsUnavailable when nothing listens there."""
        try:
            short = self._pinned.enter_context(pinned(self._path))
        except OSError as error:
            raise self._unavailable("there is no socket") from error
        self._channel = grpc.aio.insecure_channel(f"unix:{short}", options=_OPTIONS)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._channel is not None:
            await self._channel.close()
            self._channel = None
        self._pinned.close()

    async def status(self, *, events: int = MAX_EVENTS) -> StatusReply:
        """Return what the service holds, with its latest events."""
        return await self.call("Status", StatusRequest(events=events), StatusReply)

    async def publish(self, device: str, load_token: str) -> LayoutRef:
        """Commit what a load left hidden."""
        request = PublishRequest(device=device, load_token=load_token)
        return (await self.call("Publish", request, PublishReply)).layout

    async def forget(self, device: str, load_token: str) -> None:
        """Free what a load left hidden."""
        request = ForgetRequest(device=device, load_token=load_token)
        await self.call("Forget", request, ForgetReply)

    async def drop_layout(self, device: str, layout_id: str) -> bool:
        """Free the committed layout of a device; False when nothing is committed any more.

        StaleLayout where another one is; NotEligible, which names the sessions, or Fenced while it
        is used.
        """
        request = DropLayoutRequest(device=device, layout_id=layout_id)
        return (await self.call("DropLayout", request, DropLayoutReply)).dropped

    def watch(self, request: WatchRequest) -> AsyncGenerator[WatchReply, None]:
        """Follow what happens."""
        return self._stream("Watch", request, WatchReply, None)

    def save(self, request: SaveRequest) -> AsyncGenerator[TransferUpdate, None]:
        """Save; closing the iterator cancels."""
        return self._stream("Save", request, TransferUpdate, request.deadline_s)

    def load(self, request: LoadRequest) -> AsyncGenerator[TransferUpdate, None]:
        """Load; closing the iterator cancels."""
        return self._stream("Load", request, TransferUpdate, request.deadline_s)

    async def call(
        self, method: str, request: object, kind: type[T], within_s: float = CALL_S
    ) -> T:
        """Send a request and return the reply."""
        opening: Any = self._open.unary_unary(grpc_method(method))
        call = opening(encode_msgpack(request), timeout=within_s, metadata=self._metadata())
        try:
            data = await call
            check_answer(dict(await call.initial_metadata()), self._versions)
        except grpc.aio.AioRpcError as error:
            raise self._translated(method, error) from error
        return decode_msgpack(data, kind, limit=8 * MAX_FRAME_BYTES)

    async def _stream(
        self, method: str, request: object, kind: type[T], within_s: float | None
    ) -> AsyncGenerator[T, None]:
        opening: Any = self._open.unary_stream(grpc_method(method))
        call = opening(encode_msgpack(request), timeout=within_s, metadata=self._metadata())
        is_checked = False
        try:
            async for data in call:
                if not is_checked:
                    check_answer(dict(await call.initial_metadata()), self._versions)
                    is_checked = True
                yield decode_msgpack(data, kind, limit=8 * MAX_FRAME_BYTES)
        except grpc.aio.AioRpcError as error:
            raise self._translated(method, error) from error
        finally:
            call.cancel()

    def _metadata(self) -> tuple[tuple[str, str], ...]:
        return call_metadata(self._versions, self._traceparent or current_traceparent())

    @property
    def _open(self) -> grpc.aio.Channel:
        if self._channel is None:
            raise self._unavailable("the channel is closed")
        return self._channel

    def _unavailable(self, why: str) -> GmsUnavailable:
        return GmsUnavailable(
            f"no GPU memory service answers at {self._path}: {why}",
            next_step="start gms, or name the folder of its sockets with GMS_SOCKET_DIR",
            path=str(self._path),
        )

    def _translated(self, method: str, error: grpc.aio.AioRpcError) -> SnapbackError:
        for key, value in error.trailing_metadata() or ():
            if key == FAILURE_TRAILER and isinstance(value, bytes):
                return error_of(decode_msgpack(value, Failure))
        if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
            return DeadlineExceeded(f"{method} did not end in time", step=method)
        if error.code() is grpc.StatusCode.UNIMPLEMENTED:
            return self._unavailable(f"this version of it does not know {method}")
        return self._unavailable(error.details() or error.code().name)


class RemoteControl:
    """The `Control` port of the memory server at a socket."""

    def __init__(self, socket_dir: Path) -> None:
        """Connect for each call."""
        self._socket_dir = socket_dir

    async def _call(self, request: object, kind: type[T], within_s: float = CALL_S) -> T:
        method = type(request).__name__.removesuffix("Request")
        async with GmsCaller(self._socket_dir) as caller:
            return await caller.call(method, request, kind, within_s)

    async def fence(self, request: FenceRequest) -> FenceReply:
        return await self._call(request, FenceReply, request.wait_s + CALL_S)

    async def unfence(self, request: UnfenceRequest) -> UnfenceReply:
        return await self._call(request, UnfenceReply)

    async def drop_layout(self, request: DropLayoutRequest) -> DropLayoutReply:
        return await self._call(request, DropLayoutReply)

    async def publish(self, request: PublishRequest) -> PublishReply:
        return await self._call(request, PublishReply)

    async def forget(self, request: ForgetRequest) -> ForgetReply:
        return await self._call(request, ForgetReply, (request.wait_s or 0.0) + CALL_S)

    async def status(self, request: StatusRequest) -> StatusReply:
        return await self._call(request, StatusReply)

    async def watch(self, request: WatchRequest) -> AsyncGenerator[WatchReply, None]:
        async with GmsCaller(self._socket_dir) as caller:
            async for each in caller.watch(request):
                yield each


def fresh_token(prefix: str) -> str:
    """Return a token that no other call uses."""
    return f"{prefix}-{os.urandom(16).hex()}"
