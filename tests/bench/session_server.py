"""`python -m tests.bench.session_server FOLDER`: the lease socket, and the same call without it.

Beside the real GMS sessions it answers the same frame over grpc.aio and over a bare asyncio
protocol, both of which look nothing up. It ends when standard input closes.
"""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import struct
import sys
from pathlib import Path

import grpc

from gms.adapters.lease_socket import LeaseServer
from gms.adapters.simulated import SimulatedDevice
from gms.handlers.memory_server import MemoryServer
from gms.handlers.sessions import LeaseSessions
from snapback_client.frames import (
    AllocationInfo,
    Allocations,
    ListAllocations,
    decode_request,
    encode_frame,
)

GRANULE = 4096
LISTED = 16
CAPACITY = 8192 * GRANULE
NODE = "bench"
ECHO_GRPC = "echo-grpc.sock"
ECHO_BARE = "echo.sock"
METHOD = "/bench.Echo/List"
LENGTH = struct.Struct("<I")

ENTRIES = [
    AllocationInfo(
        id=f"model.layers.{slot:02}.weight", size=GRANULE, aligned=GRANULE, tag="", slot=slot
    )
    for slot in range(LISTED)
]
"""What a client of GMS has allocated, and the others are answered without having it."""


def answer(data: bytes) -> bytes:
    """Do what any server of the call does: decode, look, encode."""
    if not isinstance(decode_request(data), ListAllocations):
        raise TypeError("it is asked for the list only")
    return encode_frame(Allocations(allocations=ENTRIES))


class Framed(asyncio.Protocol):
    """Messages with their lengths before them; a subclass receives them."""

    transport: asyncio.Transport

    def __init__(self) -> None:
        self._pending = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        pending = self._pending + data
        while len(pending) >= LENGTH.size:
            end = LENGTH.size + LENGTH.unpack_from(pending)[0]
            if len(pending) < end:
                break
            self.taken(pending[LENGTH.size : end])
            pending = pending[end:]
        self._pending = pending

    def taken(self, data: bytes) -> None:
        raise NotImplementedError

    def send(self, data: bytes) -> None:
        self.transport.write(LENGTH.pack(len(data)) + data)


class _Echo(Framed):
    def taken(self, data: bytes) -> None:
        self.send(answer(data))


async def _listed(data: bytes, _: object) -> bytes:
    return answer(data)


async def serve(folder: Path) -> None:
    """Serve all three until standard input ends; writes the device to standard output."""
    loop = asyncio.get_running_loop()
    device = SimulatedDevice(node=NODE, index=0, capacity=CAPACITY, granularity=GRANULE)
    gms = MemoryServer(node=NODE, incarnation="1", devices=[device])
    lease = LeaseServer(folder, LeaseSessions(gms))
    lease.start()
    bare = await loop.create_unix_server(_Echo, folder / ECHO_BARE)
    echo = grpc.aio.server()
    service, method = METHOD[1:].split("/")
    handlers = {method: grpc.unary_unary_rpc_method_handler(_listed)}
    echo.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, handlers),))
    echo.add_insecure_port(f"unix:{folder / ECHO_GRPC}")
    await echo.start()
    ended = asyncio.Event()
    loop.add_reader(sys.stdin.fileno(), ended.set)
    print(device.info.uuid, flush=True)
    await ended.wait()
    await echo.stop(grace=None)
    bare.close()
    await lease.close()
    await gms.drained()
    device.close()


if __name__ == "__main__":
    # ctrl-C reaches this process too; its parent then closes standard input.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    asyncio.run(serve(Path(sys.argv[1])))
    # Threads of gRPC may not hold the process up.
    sys.stdout.flush()
    os._exit(0)
