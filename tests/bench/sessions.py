"""Calls of a GMS session beside the same call over gRPC and over a bare asyncio protocol.

`python -m tests.bench.sessions FOLDER` is their server: the lease socket with real GMS sessions,
and beside it the same frame answered over grpc.aio and over a bare asyncio protocol, both of which
look nothing up. It ends when standard input closes.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import signal
import struct
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path

import grpc

from gms.adapters.lease_socket import LeaseServer
from gms.adapters.simulated import SimulatedDevice
from gms.handlers.memory_server import MemoryServer
from gms.handlers.sessions import LeaseSessions
from snapback_client import frames
from snapback_client.lease import Lease
from tests.bench.common import Contender, Rows, contender, rotated, say
from tests.bench.goals import AIO, BARE, REGIONS, Calls, hand_over
from tests.bench.machine import Watch

TIMES = 5
"""How often regions are handed over in a round."""

SYNC = "grpc, synchronous"
GRANULE = 4096
LISTED = 16
CAPACITY = 8192 * GRANULE
NODE = "bench"
ECHO_GRPC = "echo-grpc.sock"
ECHO_BARE = "echo.sock"
METHOD = "/bench.Echo/List"
LENGTH = struct.Struct("<I")

ENTRIES = [
    frames.AllocationInfo(
        id=f"model.layers.{slot:02}.weight", size=GRANULE, aligned=GRANULE, tag="", slot=slot
    )
    for slot in range(LISTED)
]
"""What a client of GMS has allocated, and the others are answered without having it."""

Call = Callable[[], Awaitable[object]]


def measure(rounds: int, calls: int) -> Calls:
    """Let all take turns in every round, `calls` calls each; then hand over regions."""
    seconds: Rows = {}
    cpu: Rows = {"client": {}, "server": {}}
    watch = Watch()
    with (
        tempfile.TemporaryDirectory(prefix="bench-") as path,
        contender("sessions", path) as server,
    ):
        asyncio.run(_calls(Path(path), server, rounds, calls, (seconds, cpu)))
        for count in REGIONS:
            say(f"hand over {count:,} regions")
            with _leased(path, server.said, count) as (lease, ids):
                for _ in range(rounds):
                    times = [_handed_over(lease, ids) for _ in range(TIMES)]
                    row = seconds.setdefault(hand_over(count), {})
                    row.setdefault("gms", []).append(sorted(times)[TIMES // 2])
    return Calls(calls=calls, seconds=seconds, cpu=cpu, others=watch.others())


@contextlib.contextmanager
def _leased(folder: str, device: str, count: int) -> Iterator[tuple[Lease, list[str]]]:
    request = frames.Attach(
        device=device,
        domain=frames.MemoryDomain.KV,
        lock=frames.LockMode.RW,
        deadline_s=5.0,
        client="bench",
    )
    lease = Lease.attach(folder, request)
    try:
        ids = [info.id for info in ENTRIES] if not count else [f"r{n}" for n in range(count)]
        lease.allocate([frames.AllocationSpec(id=each, size=GRANULE) for each in ids])
        yield lease, ids
    finally:
        lease.detach()


def _handed_over(lease: Lease, ids: list[str]) -> float:
    begin = time.perf_counter()
    for run in lease.export(ids, frames.Access.RW):
        for _, descriptor in run:
            os.fstat(descriptor)
    return time.perf_counter() - begin


async def _calls(
    folder: Path,
    server: Contender,
    rounds: int,
    calls: int,
    found: tuple[Rows, Rows],
) -> None:
    seconds, cpu = found
    async with _bare(folder) as bare, _grpc(folder) as by_aio:
        with _leased(str(folder), server.said, 0) as (lease, _), _sync(folder) as by_sync:

            async def by_lease() -> object:
                return lease.allocations()

            contenders = {"gms": by_lease, BARE: bare, AIO: by_aio, SYNC: by_sync}
            for call in contenders.values():
                await _timed(call, calls // 10)
            for number in range(rounds):
                say(f"session calls: round {number + 1} of {rounds}")
                for name, call in rotated(list(contenders.items()), number, rounds):
                    before = time.process_time(), server.cpu_s
                    times = await _timed(call, calls)
                    after = time.process_time(), server.cpu_s
                    for end, begin, used in zip(cpu.values(), before, after, strict=True):
                        end.setdefault(name, []).append((used - begin) / calls)
                    for share in (50, 99):
                        row = seconds.setdefault(f"session call, p{share}", {})
                        row.setdefault(name, []).append(times[(calls - 1) * share // 100])


async def _timed(call: Call, count: int) -> list[float]:
    times = []
    for _ in range(count):
        begin = time.perf_counter()
        await call()
        times.append(time.perf_counter() - begin)
    return sorted(times)


class Framed(asyncio.Protocol):
    """Messages with their lengths before them; a subclass receives them."""

    transport: asyncio.Transport
    _pending = b""

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


class _Client(Framed):
    answered: asyncio.Future[bytes]

    def taken(self, data: bytes) -> None:
        self.answered.set_result(data)


@contextlib.asynccontextmanager
async def _bare(folder: Path) -> AsyncIterator[Call]:
    loop = asyncio.get_running_loop()
    transport, client = await loop.create_unix_connection(_Client, str(folder / ECHO_BARE))

    async def call() -> object:
        client.answered = loop.create_future()
        client.send(frames.encode_frame(frames.ListAllocations()))
        return frames.decode_reply(await client.answered)

    try:
        yield call
    finally:
        transport.close()


@contextlib.asynccontextmanager
async def _grpc(folder: Path) -> AsyncIterator[Call]:
    async with grpc.aio.insecure_channel(f"unix:{folder / ECHO_GRPC}") as channel:
        method: Callable[[bytes], Awaitable[bytes]] = channel.unary_unary(METHOD)

        async def call() -> object:
            return frames.decode_reply(await method(frames.encode_frame(frames.ListAllocations())))

        yield call


@contextlib.contextmanager
def _sync(folder: Path) -> Iterator[Call]:
    """Yield a call that blocks, as that of a lease does, to the same server as grpc.aio."""
    with grpc.insecure_channel(f"unix:{folder / ECHO_GRPC}") as channel:
        method: Callable[[bytes], bytes] = channel.unary_unary(METHOD)

        async def call() -> object:
            return frames.decode_reply(method(frames.encode_frame(frames.ListAllocations())))

        yield call


# The server.


def answer(data: bytes) -> bytes:
    """Do what any server of the call does: decode, look, encode."""
    if not isinstance(frames.decode_request(data), frames.ListAllocations):
        raise TypeError("it is asked for the list only")
    return frames.encode_frame(frames.Allocations(allocations=ENTRIES))


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
