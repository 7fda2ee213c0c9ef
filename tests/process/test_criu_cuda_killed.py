"""SIGKILL of each part at each step of a dump and of a restore of a worker that uses CUDA."""

from __future__ import annotations

import asyncio
from typing import Any, NamedTuple

import pytest

from snapshot_shared.errors import SnapbackError
from tests.process.cuda_stage import Stage, goes_on
from tests.process.killing import thinned
from tests.support.waiting import wait_until

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


def outcomes(call: Outcome, inside: Outcome) -> dict[str, Outcome]:
    """Return what becomes of it by what is killed.

    `call` is the process that asks the driver; the driver goes on with what it was asked for.
    """
    return {"call": call, "child": inside, "container": inside, "helper": DONE}


DUMPS = {
    "lock": outcomes(WHOLE, WHOLE),
    "checkpoint": outcomes(WHOLE, WHOLE),
    # CRIU may have stopped the worker, and has broken its connections.
    "criu": {"criu": ENDED, "child": ENDED, "container": ENDED},
    "restore": outcomes(DONE, WHOLE),
    "unlock": outcomes(DONE, WHOLE),
}
# Processes that run have been unlocked.
RESTORES = {"restore": outcomes(WAITS, ENDED), "unlock": outcomes(DONE, ENDED)}


def cases(found: dict[str, dict[str, Outcome]]) -> list[tuple[str, str, Outcome]]:
    return thinned([(step, *each) for step in found for each in found[step].items()])


@pytest.mark.parametrize(("step", "target", "expected"), cases(DUMPS))
async def test_a_part_that_is_killed_within_a_dump_leaves_a_worker_that_is_whole_or_ended(
    stage: Stage, step: str, target: str, expected: Outcome
) -> None:
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


@pytest.mark.parametrize(("step", "target", "expected"), cases(RESTORES))
async def test_a_part_that_is_killed_within_a_restore_leaves_no_process_without_its_devices(
    stage: Stage, step: str, target: str, expected: Outcome
) -> None:
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
