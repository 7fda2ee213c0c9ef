"""The step runner: what is begun is ended, whoever is in a hurry."""

import asyncio
from pathlib import Path

import pytest

from snapshot_shared.journal import Journal
from snapshot_shared.orders import DumpOrder, PodRef
from snapshot_shared.runner import Runner, Step
from snapshot_shared.steps import STEPS
from snapshot_shared.telemetry import Telemetry

UID = "11111111-2222-4333-8444-555555555555"
ORDER = DumpOrder(
    order=f"dump-{UID}",
    attempt=1,
    node="node-1",
    owner=UID,
    deadline_s=60.0,
    pod=PodRef(namespace="default", name="p", uid=UID, container="main"),
    content_uid=UID,
    vector=[],
    driver="cooperative",
)
OFTEN = 3


async def test_an_order_has_not_ended_before_its_compensation_however_often_it_is_cancelled(
    tmp_path: Path,
) -> None:
    journal = Journal.open(tmp_path, wall=lambda: 0.0)
    begins, undoing, goes = asyncio.Event(), asyncio.Event(), asyncio.Event()
    undone = False

    async def hang() -> None:
        begins.set()
        await asyncio.Event().wait()

    async def undo() -> None:
        nonlocal undone
        undoing.set()
        await goes.wait()
        undone = True

    table = [Step(name, hang, 60.0, undo=undo) for name in STEPS["dump"]]
    telemetry = Telemetry("test", "node-1", "0")
    work = Runner(journal, telemetry).run("dump", ORDER, table, remaining_s=lambda: 60.0)
    task = asyncio.create_task(work)
    await begins.wait()
    task.cancel()
    await undoing.wait()
    for _ in range(OFTEN):
        task.cancel()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    assert not task.done()
    goes.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert undone
    telemetry.shutdown()
    journal.close()
