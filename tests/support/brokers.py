"""One face for a real nats-server and the simulated one, so that a test runs on both."""

from __future__ import annotations

import asyncio
import os
import selectors
import shutil
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

from snapshot_shared.bus import STREAMS, Bus
from tests.scenario.bus import SimBus, SimServer
from tests.support.nats_server import NatsServer, running_nats_server

T = TypeVar("T")


class RealBroker:
    """A nats-server process of a test alone, and what a test does to it."""

    def __init__(self, server: NatsServer, admin: Bus) -> None:
        self._server = server
        self._admin = admin
        self._clients: list[Bus] = []

    def client(self, name: str) -> Bus:
        """Give a bus that is not connected yet."""
        self._clients.append(Bus(self._server.url, name))
        return self._clients[-1]

    async def crash(self) -> None:
        """End the server as `kill -9` does, and wait until its clients know."""
        await asyncio.to_thread(self._server.kill)
        async with asyncio.timeout(5):
            while any(client.is_connected for client in self._clients):  # noqa: ASYNC110
                await asyncio.sleep(0.01)

    async def start(self) -> None:
        """Start it again with what it has on disk."""
        await self._server.start_async()

    async def wipe(self) -> None:
        """Start it again with nothing."""
        await self.crash()
        await asyncio.to_thread(shutil.rmtree, self._server.store)
        await self.start()

    def freeze(self) -> None:
        """Let it answer nobody."""
        os.kill(self._server.pid, signal.SIGSTOP)
        # Its threads stop one after another; a request may still be answered before the last.
        os.waitid(os.P_PID, self._server.pid, os.WSTOPPED)

    def thaw(self) -> None:
        os.kill(self._server.pid, signal.SIGCONT)

    async def delete_stream(self, name: str) -> None:
        await self._admin.client.jetstream().delete_stream(name)

    async def limit(self, name: str, **limits: Any) -> None:
        config = next(found for found in STREAMS if found.name == name)
        await self._admin.client.jetstream().update_stream(config.evolve(**limits))


class SimulatedBroker:
    """The server of the simulator, to which the same is done."""

    def __init__(self) -> None:
        self._server = SimServer()

    def client(self, name: str) -> Bus:
        return SimBus(self._server, name)

    async def crash(self) -> None:
        self._server.crash()
        await asyncio.sleep(0.1)

    async def start(self) -> None:
        self._server.restart()

    async def wipe(self) -> None:
        await self.crash()
        self._server.wipe()
        await self.start()

    def freeze(self) -> None:
        self._server.stall(3600.0)

    def thaw(self) -> None:
        self._server.stall(0.0)

    async def delete_stream(self, name: str) -> None:
        self._server.delete_stream(name)

    async def limit(self, name: str, **limits: Any) -> None:
        stream = self._server.streams[name]
        stream.config = stream.config.evolve(**limits)


Broker = RealBroker | SimulatedBroker


@asynccontextmanager
async def real_broker(store: Path) -> AsyncIterator[Broker]:
    """A nats-server that ends with the block, also when it was left frozen."""
    async with running_nats_server(store) as server:
        admin = await Bus(server.url, "admin").connect()
        try:
            yield RealBroker(server, admin)
        finally:
            await admin.close()


class VirtualSelector(selectors.DefaultSelector):
    """Waits for nothing: when all are idle, the clock jumps to the next timer."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> Any:
        ready = super().select(0)
        if not ready and timeout is None:
            raise RuntimeError("everything waits for ever")
        if not ready and timeout is not None:
            self.now += max(0.0, timeout)
        return ready


class InlineLoop(asyncio.SelectorEventLoop):
    """Runs at once, and in order, what is handed to threads."""

    def run_in_executor(  # type: ignore[override]
        self, executor: Any, func: Callable[..., T], *args: Any
    ) -> asyncio.Future[T]:
        future: asyncio.Future[T] = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:  # noqa: BLE001 - it belongs to whoever waits
            future.set_exception(error)
        return future


class VirtualLoop(InlineLoop):
    """An event loop whose hours pass at once."""

    def __init__(self) -> None:
        self._clock = VirtualSelector()
        super().__init__(self._clock)

    def time(self) -> float:
        return self._clock.now
