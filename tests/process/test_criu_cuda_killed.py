"""SIGKILL of each part at each step of a dump and of a restore of a worker that uses CUDA."""

from __future__ import annotations

import asyncio
from typing import Any, NamedTuple

import pytest

from snapshot_shared.errors import SnapbackError
from tests.process.cuda_stage import Stage, goes_on
from tests.process.killing import thinned
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.process, pytest.mark.waits]

BOTH = ("parent", "child")
SLOW_MS = 1500
"""For how long a call of the driver waits, in which something is killed."""


class Outcome(NamedTuple):
    """Whether the order succeeds, and what becomes of the worker or of the placeholder."""

    done: bool
    becomes: str


DONE = Outcome(done=True, becomes="goes on")
WHOLE = Outcome(done=False, becomes="goes on")
ENDED = Outcome(done=False, becomes="ended")
WAITS = Outcome(done=False, becomes="waits")

# `call` is the process that asks the driver; the driver goes on with what it was asked for.
DUMPS = {
    ("lock", "call"): WHOLE,
    ("lock", "child"): WHOLE,
    ("lock", "container"): WHOLE,
    ("lock", "helper"): DONE,
    ("checkpoint", "call"): WHOLE,
    ("checkpoint", "child"): WHOLE,
    ("checkpoint", "container"): WHOLE,
    ("checkpoint", "helper"): DONE,
    # CRIU may have stopped the worker, and has broken its connections.
    ("criu", "criu"): ENDED,
    ("criu", "child"): ENDED,
    ("criu", "container"): ENDED,
    ("restore", "call"): DONE,
    ("restore", "child"): WHOLE,
    ("restore", "container"): WHOLE,
    ("restore", "helper"): DONE,
    ("unlock", "call"): DONE,
    ("unlock", "child"): WHOLE,
    ("unlock", "container"): WHOLE,
    ("unlock", "helper"): DONE,
}
RESTORES = {
    ("restore", "call"): WAITS,
    ("restore", "child"): ENDED,
    ("restore", "container"): ENDED,
    ("restore", "helper"): DONE,
    # Processes that run have been unlocked.
    ("unlock", "call"): DONE,
    ("unlock", "child"): ENDED,
    ("unlock", "container"): ENDED,
    ("unlock", "helper"): DONE,
}


@pytest.mark.parametrize(("step", "target"), thinned(list(DUMPS)))
async def test_a_part_that_is_killed_within_a_dump_leaves_a_worker_that_is_whole_or_ended(
    stage: Stage, step: str, target: str
) -> None:
    expected = DUMPS[step, target]
    source = stage.worker("child")
    if step == "criu":
        stage.criu_does("hang")
    else:
        stage.cuda.faults(f"{step} {source.pid} slow {SLOW_MS}")
    dump = asyncio.ensure_future(stage.dump(source))
    if step == "criu":
        await asyncio.to_thread(wait_until, (stage.folder / "criu-hangs").exists, "CRIU")
    else:
        await stage.reached(step)
    stage.kill(target)
    await ends_as(dump, expected)
    if target in ("helper", "container"):
        stage.criu_does("")
        stage.start_helper()
    await stage.settle(source)
    if expected.becomes == "ended":
        wait_until(lambda: not source.runs(), "the end of the worker")
    else:
        assert goes_on(source, *BOTH)
    wait_until(lambda: stage.left() == [], "the removal of what was left")


@pytest.mark.parametrize(("step", "target"), thinned(list(RESTORES)))
async def test_a_part_that_is_killed_within_a_restore_leaves_no_process_without_its_devices(
    stage: Stage, step: str, target: str
) -> None:
    expected = RESTORES[step, target]
    source = stage.worker("child")
    part = await stage.dump(source)
    source.end()
    placeholder = stage.placeholder()
    before = len(stage.cuda.calls())
    stage.cuda.faults(f"{step} 0 slow {SLOW_MS}")
    restore = asyncio.ensure_future(stage.restore(part, placeholder))
    await stage.reached(step, since=before)
    stage.kill(target)
    await ends_as(restore, expected)
    if target in ("helper", "container"):
        stage.start_helper()
    assert placeholder.is_restored() == expected.done
    if expected.done:
        assert goes_on(placeholder, *BOTH)
    elif expected.becomes == "waits":
        wait_until(lambda: placeholder.tree() == [placeholder.pid], "the end of what was restored")
        assert placeholder.runs()
    else:
        wait_until(lambda: not placeholder.runs(), "the end of the placeholder")
    wait_until(lambda: stage.left() == [], "the removal of what was left")


async def ends_as(work: asyncio.Future[Any], expected: Outcome) -> None:
    if expected.done:
        await work
    else:
        with pytest.raises(SnapbackError):
            await work
