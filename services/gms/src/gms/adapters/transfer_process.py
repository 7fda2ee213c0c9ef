"""Runs each transfer in a child process and yields its events."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
from asyncio.subprocess import Process
from collections.abc import AsyncGenerator
from typing import Self

import msgspec

from gms.domain.tasks import LoadTask, SaveTask, TransferDone, TransferEvent, TransferFailed
from snapback_client.frames import error_of
from snapshot_shared.codec import MAX_FRAME_BYTES, encode_json
from snapshot_shared.errors import Internal, InvalidMessage, TransferKilled

log = logging.getLogger(__name__)

_DECODER: msgspec.json.Decoder[TransferEvent] = msgspec.json.Decoder(TransferEvent)


class TransferProcesses:
    """Starts `gms.transfer_child` with the interpreter of this service.

    As a context manager it keeps `spares` of them waiting for a task: a worker that is captured is
    held until every save has its lease, and an interpreter takes longer to start than all the rest.
    Spares are made while nothing is transferred.
    """

    def __init__(self, *, spares: int = 0) -> None:
        self._most = spares
        self._wanted = 0
        self._spares: list[Process] = []
        self._running = 0
        self._filling: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._wanted = self._most
        self._fill()
        return self

    async def __aexit__(self, *_: object) -> None:
        self._wanted = 0
        if self._filling is not None:
            await self._filling
        while self._spares:
            await _ended(self._spares.pop())

    async def run(self, task: SaveTask | LoadTask) -> AsyncGenerator[TransferEvent, None]:
        verb = "save" if isinstance(task, SaveTask) else "load"
        self._running += 1
        try:
            while True:
                spare = self._spares.pop() if self._spares else None
                process = spare or await _started(verb)
                has_answered = False
                try:
                    async with contextlib.aclosing(_carried_out(process, verb, task)) as events:
                        async for event in events:
                            has_answered = True
                            yield event
                except TransferKilled:
                    # A spare without an event may have ended long ago: start another.
                    if spare is None or has_answered:
                        raise
                else:
                    return
        finally:
            self._running -= 1
            self._fill()

    def _fill(self) -> None:
        if self._filling is None or self._filling.done():
            self._filling = asyncio.ensure_future(self._filled())

    async def _filled(self) -> None:
        while len(self._spares) < self._wanted and not self._running:
            try:
                self._spares.append(await _started("either"))
            except OSError as error:
                log.warning("no process can be kept for the next transfer: %s", error)
                return


async def _started(verb: str) -> Process:
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-P",  # The working directory is no place to import from.
        "-m",
        "gms.transfer_child",
        verb,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        limit=MAX_FRAME_BYTES,
        process_group=0,  # Ctrl-C goes to the service alone, which ends the process.
    )


async def _ended(process: Process) -> None:
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


async def _carried_out(
    process: Process, verb: str, task: SaveTask | LoadTask
) -> AsyncGenerator[TransferEvent, None]:
    try:
        async with contextlib.aclosing(_events(process, encode_json(task) + b"\n")) as events:
            async for event in events:
                if isinstance(event, TransferFailed):
                    raise error_of(event.to_failure())
                yield event
                if isinstance(event, TransferDone):
                    # Its session has ended; its memory and descriptors go with the process.
                    await process.wait()
                    return
        status = await process.wait()
        if status < 0:
            raise TransferKilled(
                f"the {verb} process was killed by signal {-status}",
                next_step="look for the out-of-memory killer in the kernel's log",
                signal=-status,
            )
        raise Internal(f"the {verb} process ended with status {status} and no result")
    finally:
        await _ended(process)


async def _events(process: Process, task: bytes) -> AsyncGenerator[TransferEvent, None]:
    stdin, stdout = process.stdin, process.stdout
    assert stdin is not None and stdout is not None  # noqa: S101, PT018 - both are pipes
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        stdin.write(task)
        await stdin.drain()
    try:
        # The pipe stays open: the child ends itself when it is closed.
        while line := await stdout.readline():
            yield _DECODER.decode(line)
    except (msgspec.MsgspecError, ValueError) as error:
        raise InvalidMessage(f"a transfer process said something else: {error}") from error
