"""An operator of a Kubernetes cluster that runs here, for as long as a command does."""

from __future__ import annotations

import asyncio
import contextlib
import os
import tempfile
from collections.abc import AsyncIterator, Callable
from typing import IO

import msgspec

from snapshot_shared.errors import BusUnavailable, SnapbackError
from snapshotctl.adapters.kubectl import PYTHON, Kubernetes
from snapshotctl.adapters.operator_client import OperatorClient
from snapshotctl.adapters.processes import ending_with_us

START_S = 60.0
"""How long it may take to answer, in seconds: the Lease of one that was killed has to run out."""
END_S = 10.0
LOOK_EVERY_S = 0.5


class _Logged(msgspec.Struct):
    message: str = ""


@contextlib.asynccontextmanager
async def own_operator(
    kubernetes: Kubernetes, client: OperatorClient, say: Callable[[str], None]
) -> AsyncIterator[None]:
    """Run the operator for the length of the block, unless the cluster has one that answers.

    BusUnavailable with its last words where it ends, or does not answer within a minute.
    """
    if await _answers(client):
        say("the cluster has an operator, which does the work")
        yield
        return
    say("the operator of the cluster runs here until this ends")
    settings = kubernetes.operator_settings()
    kept = {name: value for name, value in os.environ.items() if not name.startswith("SNAPBACK_")}
    with tempfile.TemporaryDirectory(prefix="snapback-") as state, tempfile.TemporaryFile() as log:
        process = await asyncio.create_subprocess_exec(
            *(*ending_with_us(), *PYTHON, "snapshot_operator.main"),
            env=kept | settings | {"SNAPBACK_STATE_DIR": state},
            stdin=asyncio.subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            # Ctrl-C goes to this program alone, which needs the operator to clean up.
            start_new_session=True,
        )
        ended = asyncio.ensure_future(process.wait())

        def notice(_: object) -> None:
            say(f"the operator here has ended: {_last_words(log)}")

        try:
            await _until_it_answers(ended, client, log)
            ended.add_done_callback(notice)
            yield
        finally:
            ended.remove_done_callback(notice)
            if not ended.done():
                process.terminate()
                await asyncio.wait({ended}, timeout=END_S)
            if not ended.done():
                process.kill()
            await ended


async def _until_it_answers(
    ended: asyncio.Future[int], client: OperatorClient, log: IO[bytes]
) -> None:
    try:
        async with asyncio.timeout(START_S):
            while not await _answers(client):
                if (await asyncio.wait({ended}, timeout=LOOK_EVERY_S))[0]:
                    raise BusUnavailable(f"the operator here has ended: {_last_words(log)}")
    except TimeoutError:
        raise BusUnavailable(
            f"the operator here does not answer: {_last_words(log)}",
            next_step="see who holds its Lease: kubectl get leases --all-namespaces",
        ) from None


def _last_words(log: IO[bytes]) -> str:
    log.seek(0)
    lines = log.read().decode("utf-8", "replace").strip().splitlines() or ["it said nothing"]
    with contextlib.suppress(msgspec.DecodeError):
        return msgspec.json.decode(lines[-1], type=_Logged).message or lines[-1]
    return lines[-1]


async def _answers(client: OperatorClient) -> bool:
    with contextlib.suppress(SnapbackError):
        await client.health()
        return True
    return False
