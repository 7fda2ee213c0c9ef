"""The example worker's unix socket: JSON lines, one answer a question."""

from __future__ import annotations

import asyncio
import contextlib
import json
from pathlib import Path

from snapshot_shared.errors import Aborted, DeadlineExceeded
from snapshotctl.adapters import inotify

SOCKET = "worker.sock"
ANSWER_S = 120.0
MAX_ANSWER_BYTES = 1024 * 1024


class WorkerClient:
    """One connection to a worker."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Use the streams of a connection; `connect` makes one."""
        self._reader = reader
        self._writer = writer

    async def ask(self, prompt: str) -> bytes:
        """Return the answer to a question that changes nothing, as the line that came."""
        return await self._exchange({"op": "ask", "prompt": prompt})

    async def chat(self, text: str) -> bytes:
        """Return the answer to a sentence that changes the worker's state."""
        return await self._exchange({"op": "chat", "text": text})

    async def _exchange(self, request: dict[str, str]) -> bytes:
        try:
            async with asyncio.timeout(ANSWER_S):
                self._writer.write(json.dumps(request).encode() + b"\n")
                await self._writer.drain()
                line = await self._reader.readline()
        except TimeoutError:
            raise DeadlineExceeded(
                f"the worker did not answer within {ANSWER_S:.0f} s", budget_s=ANSWER_S
            ) from None
        except (OSError, ValueError) as error:
            raise Aborted(f"the worker hung up: {error}") from error
        if not line.endswith(b"\n"):
            raise Aborted("the worker hung up in the middle of an answer")
        return line

    async def close(self) -> None:
        """Close the connection."""
        self._writer.close()
        with contextlib.suppress(OSError):
            await self._writer.wait_closed()


async def connect(folder: Path, pod_uid: str) -> WorkerClient:
    """Wait until the worker of a pod listens below a node's folder of sockets, and connect."""
    # The agent shortens the uid as well: the path of a socket has at most 107 bytes.
    path = folder / pod_uid[:8] / SOCKET
    await inotify.appears(path)
    reader, writer = await asyncio.open_unix_connection(path, limit=MAX_ANSWER_BYTES)
    return WorkerClient(reader, writer)
