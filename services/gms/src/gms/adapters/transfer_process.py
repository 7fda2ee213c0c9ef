"""Runs each transfer in a child process and yields its events."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sys
from asyncio.subprocess import Process
from collections import Counter
from collections.abc import AsyncGenerator, Sequence
from typing import Self

import msgspec

from gms.domain.tasks import LoadTask, SaveTask, TransferDone, TransferEvent, TransferFailed
from snapback_client.frames import error_of
from snapshot_shared.codec import MAX_FRAME_BYTES, encode_json
from snapshot_shared.errors import GmsUnavailable, Internal, InvalidMessage, TransferKilled
from snapshot_shared.tasks import any_set

START_S = 30.0
"""For how long a transfer is begun again while no memory service is there: it may be starting."""
AGAIN_S = 0.25

log = logging.getLogger(__name__)

_ANY = ""
"""In place of the uuid of a GPU: any device that is none."""

_DECODER: msgspec.json.Decoder[TransferEvent] = msgspec.json.Decoder(TransferEvent)


class TransferProcesses:
    """Starts `gms.transfer_child` with the interpreter of this service.

    As a context manager it keeps `spares` of them waiting for a task: a worker that is captured is
    held until every save has its lease, and an interpreter takes longer to start than all the rest.
    Spares are made while nothing is transferred.

    `gpus` are the uuids of the devices that are GPUs: a process for one sees no other. Each has a
    spare of its own then, in which the driver is started.
    """

    def __init__(self, *, spares: int = 0, gpus: Sequence[str] = ()) -> None:
        self._gpus = gpus
        self._most = (list(gpus) or [_ANY] * spares) if spares else []
        self._wanted: list[str] = []
        self._spares: list[tuple[str, Process]] = []
        self._running = 0
        self._filling: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._wanted = self._most
        self._fill()
        return self

    async def __aexit__(self, *_: object) -> None:
        self._wanted = []
        if self._filling is not None:
            await self._filling
        while self._spares:
            await _ended(self._spares.pop()[1])

    def expect(self, gpus: Sequence[str]) -> None:
        """Keep a spare for each of these GPUs from now on."""
        self._gpus = self._wanted = list(gpus)
        self._fill()

    async def run(self, task: SaveTask | LoadTask) -> AsyncGenerator[TransferEvent, None]:
        verb = "save" if isinstance(task, SaveTask) else "load"
        gpu = task.device if task.device in self._gpus else _ANY
        self._running += 1
        loop = asyncio.get_running_loop()
        end = loop.time() + min(task.deadline_s, START_S)
        try:
            while True:
                spare = self._taken(gpu)
                process = spare or await _started(verb, gpu)
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
                except GmsUnavailable:
                    if has_answered or loop.time() + AGAIN_S >= end:
                        raise
                    await any_set(AGAIN_S)
                else:
                    return
        finally:
            self._running -= 1
            self._fill()

    def _taken(self, gpu: str) -> Process | None:
        """Take a spare for a GPU, or for any other device."""
        for number, (its_gpu, process) in enumerate(self._spares):
            if its_gpu == gpu:
                del self._spares[number]
                return process
        return None

    def _fill(self) -> None:
        if self._filling is None or self._filling.done():
            self._filling = asyncio.ensure_future(self._filled())

    async def _filled(self) -> None:
        while not self._running:
            missing = list(
                (Counter(self._wanted) - Counter(gpu for gpu, _ in self._spares)).elements()
            )
            if not missing:
                return
            try:
                self._spares.append((missing[0], await _started("either", missing[0])))
            except OSError as error:
                log.warning("no process can be kept for the next transfer: %s", error)
                return


async def _started(verb: str, gpu: str) -> Process:
    # Before the driver starts: it starts every device that is visible, and each takes its time.
    visible = {"CUDA_VISIBLE_DEVICES": gpu} if gpu else {}
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-P",  # The working directory is no place to import from.
        "-m",
        "gms.transfer_child",
        verb,
        *(["cuda"] if gpu else []),
        env=os.environ | visible,
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
