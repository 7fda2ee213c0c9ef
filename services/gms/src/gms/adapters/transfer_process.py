"""Runs each transfer in a child process and hands on what it tells."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncGenerator

import msgspec

from gms.domain.tasks import LoadTask, SaveTask, TransferDone, TransferEvent, TransferFailed
from snapshot_shared.codec import MAX_FRAME_BYTES, encode_json
from snapshot_shared.errors import Internal, InvalidMessage, TransferKilled
from snapshot_shared.frames import error_of

_DECODER: msgspec.json.Decoder[TransferEvent] = msgspec.json.Decoder(TransferEvent)


class TransferProcesses:
    """Starts `transfer_child` with the interpreter of this service."""

    async def run(self, task: SaveTask | LoadTask) -> AsyncGenerator[TransferEvent, None]:
        verb = "save" if isinstance(task, SaveTask) else "load"
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-P",  # The working directory is no place to import from.
            "-m",
            "gms.adapters.transfer_child",
            verb,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            limit=MAX_FRAME_BYTES,
        )
        try:
            async with contextlib.aclosing(_events(process, encode_json(task) + b"\n")) as events:
                async for event in events:
                    if isinstance(event, TransferFailed):
                        raise error_of(event.to_failure())
                    yield event
                    if isinstance(event, TransferDone):
                        # Its lease is given back before it says so; its process has to go too.
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
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
                await process.wait()


async def _events(
    process: asyncio.subprocess.Process, task: bytes
) -> AsyncGenerator[TransferEvent, None]:
    stdin, stdout = process.stdin, process.stdout
    assert stdin is not None and stdout is not None  # noqa: S101, PT018 - both are pipes
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        stdin.write(task)
        await stdin.drain()
    try:
        # The pipe stays open: its end tells the child that we are gone.
        while line := await stdout.readline():
            yield _DECODER.decode(line)
    except (msgspec.MsgspecError, ValueError) as error:
        raise InvalidMessage(f"a transfer process said something else: {error}") from error
