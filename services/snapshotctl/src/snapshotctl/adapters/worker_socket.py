"""The unix sockets of the example workers: JSON lines, or files over HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
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
        async with _answering():
            self._writer.write(json.dumps(request).encode() + b"\n")
            await self._writer.drain()
            line = await self._reader.readline()
        if not line.endswith(b"\n"):
            raise Aborted("the worker hung up in the middle of an answer")
        return line

    async def close(self) -> None:
        """Close the connection."""
        self._writer.close()
        with contextlib.suppress(OSError):
            await self._writer.wait_closed()


class FileClient:
    """Sends files, each over a connection of its own; a question is the name of a file."""

    def __init__(self, path: Path, files: Path) -> None:
        """Use the socket at a path, and files by their names below a folder."""
        self._path = path
        self._files = files

    async def ask(self, prompt: str) -> bytes:
        """Return the answer to a file, as it came."""
        content = await asyncio.to_thread((self._files / prompt).read_bytes)
        async with _answering():
            reader, writer = await asyncio.open_unix_connection(self._path)
            try:
                writer.write(b"POST /identify HTTP/1.0\r\n")
                writer.write(b"Content-Length: %d\r\n\r\n" % len(content))
                writer.write(content)
                await writer.drain()
                answer = await reader.read()
            finally:
                writer.close()
        _, _, body = answer.partition(b"\r\n\r\n")
        if not body:
            raise Aborted("the worker hung up in the middle of an answer")
        return body

    async def chat(self, text: str) -> bytes:
        """Return the same: a worker remembers no file."""
        return await self.ask(text)

    async def close(self) -> None:
        """Do nothing: no connection is left."""


@contextlib.asynccontextmanager
async def _answering() -> AsyncIterator[None]:
    """Give an answer its time. DeadlineExceeded, or Aborted when the worker hangs up."""
    try:
        async with asyncio.timeout(ANSWER_S):
            yield
    except TimeoutError:
        raise DeadlineExceeded(
            f"the worker did not answer within {ANSWER_S:.0f} s", budget_s=ANSWER_S
        ) from None
    except (OSError, ValueError) as error:
        raise Aborted(f"the worker hung up: {error}") from error


async def _listens(folder: Path, pod_uid: str) -> Path:
    # The agent shortens the uid as well: the path of a socket has at most 107 bytes.
    path = folder / pod_uid[:8] / SOCKET
    await inotify.appears(path)
    return path


async def connect_with_files(folder: Path, pod_uid: str, files: Path) -> FileClient:
    """Wait until the worker of a pod listens below a node's folder of sockets."""
    return FileClient(await _listens(folder, pod_uid), files)


async def connect(folder: Path, pod_uid: str) -> WorkerClient:
    """Wait until the worker of a pod listens below a node's folder of sockets, and connect."""
    path = await _listens(folder, pod_uid)
    reader, writer = await asyncio.open_unix_connection(path, limit=MAX_ANSWER_BYTES)
    return WorkerClient(reader, writer)
