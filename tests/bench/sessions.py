"""Calls of a GMS session beside the same call over gRPC and over a bare asyncio protocol."""

from __future__ import annotations

import asyncio
import contextlib
import os
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import grpc

from snapback_client import frames
from snapback_client.lease import Lease
from tests.bench.common import Rows, contender, rotated
from tests.bench.goals import AIO, BARE, REGIONS, Calls, hand_over
from tests.bench.machine import Watch
from tests.bench.session_server import ECHO_BARE, ECHO_GRPC, ENTRIES, GRANULE, METHOD, Framed

TIMES = 5
"""How often regions are handed over in a round."""

SYNC = "grpc, synchronous"

Call = Callable[[], Awaitable[object]]


class Server(NamedTuple):
    """The device that it has, and its process."""

    device: str
    pid: int

    @property
    def cpu_s(self) -> float:
        """Processor-seconds of all its threads so far."""
        # The clock of a process is numbered by its id: CPUCLOCK_SCHED in Linux' posix-timers.h.
        return time.clock_gettime((~self.pid << 3) | 2)


def measure(rounds: int, calls: int, say: Callable[[str], None]) -> Calls:
    """Let all take turns in every round, `calls` calls each; then hand over regions."""
    seconds: Rows = {}
    cpu: Rows = {"client": {}, "server": {}}
    watch = Watch()
    with (
        tempfile.TemporaryDirectory(prefix="bench-") as path,
        contender("session_server", path) as (process, device),
    ):
        server = Server(device, process.pid)
        asyncio.run(_calls(Path(path), server, rounds, calls, (seconds, cpu), say))
        for count in REGIONS:
            say(f"hand over {count:,} regions")
            with _leased(path, server.device, count) as (lease, ids):
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
    server: Server,
    rounds: int,
    calls: int,
    found: tuple[Rows, Rows],
    say: Callable[[str], None],
) -> None:
    seconds, cpu = found
    async with _bare(folder) as bare, _grpc(folder) as by_aio:
        with _leased(str(folder), server.device, 0) as (lease, _), _sync(folder) as by_sync:

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
