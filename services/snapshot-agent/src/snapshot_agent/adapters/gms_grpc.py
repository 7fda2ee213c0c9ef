"""The GPU memory service of this node, over its gRPC socket, with msgpack bodies.

`python -m snapshot_agent.adapters.gms_grpc <socket folder of GMS> <token>` ends a fence. A guard
starts this program when its agent is gone; it does not import gRPC itself, which starts too slowly.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

import grpc

from snapback_client.frames import Versions, error_of
from snapback_client.wire import pinned
from snapshot_shared.codec import decode_msgpack, encode_msgpack
from snapshot_shared.errors import (
    Failure,
    GmsUnavailable,
    InvalidMessage,
    OutcomeUnknown,
    SnapbackError,
    pods_own,
)
from snapshot_shared.frames import (
    FAILURE_TRAILER,
    GRPC_SOCKET,
    GRPC_VERSIONS,
    FenceReply,
    FenceRequest,
    StatusReply,
    StatusRequest,
    UnfenceReply,
    UnfenceRequest,
    call_metadata,
    check_answer,
    grpc_method,
)
from snapshot_shared.ids import check_uid
from snapshot_shared.orders import LayoutRef, PodRef, PresenceDevice
from snapshot_shared.telemetry import current_traceparent
from snapshot_shared.volumes import GMS_VOLUME, folder_of

log = logging.getLogger(__name__)

T = TypeVar("T")

CALL_S = 5.0
"""How long a call may take in addition to the wait that it asks for, in seconds."""

_LOOK = "check that the GMS of this node runs (nats micro ls)"

_OPTIONS = (
    ("grpc.max_receive_message_length", 1024 * 1024),
    ("grpc.initial_reconnect_backoff_ms", 100),
    # This is also how long a connection may take: on a busy node longer than the backoff.
    ("grpc.min_reconnect_backoff_ms", int(CALL_S * 1000)),
    ("grpc.max_reconnect_backoff_ms", 2000),
    # gRPC shares subchannels in a process, and a new channel would inherit their back-off.
    ("grpc.use_local_subchannel_pool", 1),
)


class GmsClient:
    """The `GpuMemory` port. Connects at its first call and again whenever it must."""

    def __init__(self, socket_dir: Path, versions: Versions = GRPC_VERSIONS) -> None:
        """Use `<socket_dir>/gms-grpc.sock`; nothing is opened before the first call.

        `versions` are offered to the service with each call.
        """
        self._socket_dir = socket_dir
        self._versions = versions
        self._target = f"unix:{socket_dir / GRPC_SOCKET}"
        self._channel: grpc.aio.Channel | None = None

    def at(self, _pod: PodRef) -> GmsClient:
        # In standalone mode one service has all devices of a node.
        return self

    async def fence(
        self, token: str, devices: Sequence[str], *, wait_s: float, deadline_s: float
    ) -> list[LayoutRef]:
        request = FenceRequest(
            token=token,
            devices=list(devices),
            wait_s=wait_s,
            deadline_s=deadline_s,
            traceparent=current_traceparent(),
        )
        reply = await self._call("Fence", request, FenceReply, wait_s + CALL_S)
        found = [layout.device for layout in reply.vector]
        if found != [device for device in devices if device in found]:
            raise InvalidMessage("the answer of GMS is not about the devices asked for")
        return reply.vector

    async def unfence(self, token: str) -> None:
        try:
            await self._call("Unfence", UnfenceRequest(token=token), UnfenceReply, CALL_S)
        except GmsUnavailable as error:
            # Fences are in the memory of the service, so they have ended with it.
            log.info("no fence to end: %s", error)

    def unfencing(self, token: str) -> tuple[str, ...]:
        return (
            sys.executable,
            "-m",
            "snapshot_agent.adapters.gms_grpc",
            str(self._socket_dir),
            token,
        )

    async def devices(self, *, wait_s: float) -> list[PresenceDevice]:
        within_s = max(wait_s, CALL_S)
        try:
            status = await self._call(
                "Status", StatusRequest(), StatusReply, within_s, patiently=wait_s > 0
            )
        except OutcomeUnknown as error:
            # A question changes nothing, so it may be asked again.
            raise GmsUnavailable(error.message, next_step=_LOOK) from error
        return [
            PresenceDevice(
                index=device.index,
                uuid=device.uuid,
                product=device.product,
                capacity_bytes=device.capacity,
            )
            for device in status.devices
        ]

    async def _call(
        self, method: str, body: Any, reply: type[T], within_s: float, *, patiently: bool = False
    ) -> T:
        if self._channel is None:
            self._channel = grpc.aio.insecure_channel(self._target, options=_OPTIONS)
        opening: Any = self._channel.unary_unary(grpc_method(method))
        metadata = call_metadata(self._versions, current_traceparent())
        call = opening(
            encode_msgpack(body), timeout=within_s, wait_for_ready=patiently, metadata=metadata
        )
        try:
            data = await call
            check_answer(dict(await call.initial_metadata()), self._versions)
        except grpc.aio.AioRpcError as error:
            raise _translated(method, error) from error
        return decode_msgpack(data, reply)

    async def close(self) -> None:
        """Close the connection; another call opens it again."""
        channel, self._channel = self._channel, None
        if channel is not None:
            await channel.close()


class PodGms(GmsClient):
    """The `GpuMemory` port on a node whose pods have memory servers of their own."""

    def __init__(self, socket_dir: Path, kubelet_dir: Path) -> None:
        """Use the service of the node in `socket_dir`, and pods below `<kubelet_dir>/pods`."""
        super().__init__(socket_dir)
        self._kubelet_dir = kubelet_dir

    def at(self, pod: PodRef) -> GmsClient:
        return _Briefly(Path(folder_of(self._kubelet_dir, check_uid(pod.uid), GMS_VOLUME)))


class _Briefly(GmsClient):
    """The service in the folder of a pod, which is hostile: each call finds the socket anew."""

    async def _call(
        self, method: str, body: Any, reply: type[T], within_s: float, *, patiently: bool = False
    ) -> T:
        path = self._socket_dir / GRPC_SOCKET
        try:
            with pinned(path) as short, pods_own():
                self._target = f"unix:{short}"
                try:
                    return await super()._call(method, body, reply, within_s, patiently=patiently)
                finally:
                    await self.close()
        except OSError as error:
            raise GmsUnavailable(
                f"{method}: no memory server at {path}: {error.strerror}",
                next_step="see what became of it: kubectl logs POD --container gms-server",
            ) from error


def _translated(method: str, error: grpc.aio.AioRpcError) -> SnapbackError:
    for key, value in error.trailing_metadata() or ():
        if key == FAILURE_TRAILER and isinstance(value, bytes):
            return error_of(decode_msgpack(value, Failure))
    if error.code() is grpc.StatusCode.UNAVAILABLE:
        return GmsUnavailable(f"{method}: the GPU memory service does not answer", next_step=_LOOK)
    if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
        return OutcomeUnknown(f"{method}: the GPU memory service did not answer in time")
    return GmsUnavailable(f"{method}: {error.details()}", next_step=_LOOK)


async def _end_fence(socket_dir: Path, token: str) -> None:
    client = _Briefly(socket_dir)
    try:
        await client.unfence(token)
    finally:
        await client.close()


def main(arguments: list[str]) -> int:
    """End the fence that the arguments name."""
    folder, token = arguments
    try:
        asyncio.run(_end_fence(Path(folder), token))
    except SnapbackError as error:
        sys.stderr.write(f"unfence: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
