"""SIGKILL of each part at each step of a dump and of a restore by the real CRIU."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
from pathlib import Path
from typing import NamedTuple

import pytest

from snapshot_agent.adapters.guard import RETURN_S
from tests.process import killing
from tests.process.node import Node
from tests.support.waiting import until


class Outcome(NamedTuple):
    """What becomes of the worker or of the placeholder, and how the order ends."""

    container: str
    report: str
    reasons: tuple[str, ...] = ()


STAGED = Outcome("goes on", "staged")
UNDONE = Outcome("goes on", "failed", ("OutcomeUnknown", "ChildKilled"))
# The end of the worker may be seen before the answer of the helper is.
ENDED = Outcome("ended", "failed", ("HelperLost", "OutcomeUnknown", "SourceExited"))
RESTORED = Outcome("goes on", "restored")
WAITS = Outcome("waits", "failed", ("HelperLost", "ChildKilled"))

# A CRIU that was killed has broken the connections of its worker.
DUMPS = {
    "agent": UNDONE,
    "helper": STAGED,
    "container": ENDED,
    "child": ENDED,
    "criu": ENDED,
    "archiver": UNDONE,
    "guard": STAGED,
}
RESTORES = {
    "agent": ENDED,
    "helper": RESTORED,
    "container": ENDED,
    "child": ENDED,
    "criu": ENDED,
    "archiver": WAITS,
}
# What was only unpacked is unpacked anew; what is complete is handed over.
OTHERWISE = {
    ("unpacking", "agent"): RESTORED,
    ("unpacking", "container"): WAITS,
    ("unpacking", "child"): WAITS,
    ("over", "agent"): RESTORED,
}

ONLY_IN = {"archiver": ("archiving", "unpacking")}
NOT_IN = {"criu": ("over", "unpacking")}


def cases(steps: dict[str, str], targets: dict[str, Outcome]) -> list[tuple[str, str]]:
    """Return every step with each target that is there then, thinned out and repeated."""
    found = [
        (step, target)
        for step in steps
        for target in targets
        if step in ONLY_IN.get(target, steps) and step not in NOT_IN.get(target, ())
    ]
    return killing.thinned(found)


@pytest.mark.parametrize(("step", "target"), cases(killing.DUMP_STEPS, DUMPS))
async def test_a_part_that_is_killed_within_a_dump_leaves_a_worker_that_is_whole_or_ended(
    node: Node, step: str, target: str
) -> None:
    halted = await killing.dump_in(node, step)
    expected = DUMPS[target]
    worker = halted.container
    is_locked = step not in ("begun", "frozen", "over")
    assert ("CRIU-" in worker.tables()) == is_locked
    began = time.monotonic()
    await halted.kill(target)
    report = await halted.answered()
    await worker.becomes(expected.container)
    await halted.rests()
    assert time.monotonic() - began < killing.COMPENSATED_S
    assert report.kind == expected.report, report
    assert halted.is_staged == (report.kind == "staged")
    if report.failure is not None:
        assert report.failure.reason in expected.reasons
    await halted.end(report)
    if expected.container == "goes on":
        said = "snapshot-complete" if report.kind == "staged" else "snapshot-aborted"
        await until(lambda: said in worker.did(), "the worker's release")


@pytest.mark.parametrize(("step", "target"), cases(killing.RESTORE_STEPS, RESTORES))
async def test_a_part_that_is_killed_within_a_restore_leaves_no_process_half_restored(
    node: Node, step: str, target: str
) -> None:
    halted = await killing.restore_in(node, step)
    expected = OTHERWISE.get((step, target), RESTORES[target])
    began = time.monotonic()
    await halted.kill(target)
    report = await halted.answered()
    assert report.kind == expected.report, report
    await halted.container.becomes(expected.container)
    await halted.rests()
    assert time.monotonic() - began < killing.COMPENSATED_S
    if report.failure is not None:
        assert report.failure.reason in expected.reasons


@pytest.mark.parametrize("step", ["pages", "archiving"])
async def test_a_guard_alone_lets_a_worker_go_on_whose_agent_was_killed(
    node: Node, step: str
) -> None:
    halted = await killing.dump_in(node, step)
    began = time.monotonic()
    await node.kill_agent()
    halted.go_on()
    await halted.container.goes_on()
    assert time.monotonic() - began < RETURN_S
    await until(lambda: "snapshot-aborted" in halted.container.did(), "the worker's release")
    assert time.monotonic() - began < killing.COMPENSATED_S
    await halted.container.goes_on()
    assert node.left() == []


async def test_a_worker_goes_on_whose_agent_and_helper_are_killed_while_its_dump_is_read(
    node: Node,
) -> None:
    halted = await killing.dump_in(node, "thawing")
    pages = halted.part / "pages-9.img"
    with pages.open("wb") as file:
        # It takes no memory, and minutes to read.
        file.truncate(2**37)
    halted.go_on()
    await until(lambda: is_open(pages, node.agent_pid), "the agent, which reads what was written")
    await both_killed(node)
    await halted.container.is_let_go()


async def test_a_worker_whose_dump_has_failed_goes_on_when_agent_and_helper_are_killed(
    node: Node,
) -> None:
    halted = await killing.dump_in(node, "begun")
    halted.go_on(status=3)
    assert (await halted.answered()).kind == "failed"
    await both_killed(node)
    await halted.container.is_let_go()


async def test_a_worker_goes_on_whose_agent_learned_nothing_of_a_helper_that_was_stopped(
    node: Node,
) -> None:
    halted = await killing.dump_in(node, "thawing")
    os.kill(node.agent_pid, signal.SIGSTOP)
    halted.go_on()
    await until(lambda: not node.children(), "the end of the dump")
    node.helper.terminate()
    await node.helper.wait()
    await node.kill_agent()
    await halted.container.is_let_go()


async def test_a_worker_goes_on_while_a_helper_that_was_stopped_waits_for_another_request(
    node: Node,
) -> None:
    halted = await killing.dump_in(node, "thawing")
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as other:
        # Its child waits for the request.
        other.connect(str(node.socket))
        await until(lambda: len(node.children()) == 2, "the child of the other request")
        os.kill(node.agent_pid, signal.SIGSTOP)
        halted.go_on()
        await until(lambda: len(node.children()) == 1, "the end of the dump")
        node.helper.terminate()
        await node.kill_agent()
        did = halted.container.did
        await until(lambda: "snapshot-aborted" in did(), "the release", within_s=30.0)
        await halted.container.goes_on()
        assert node.helper.returncode is None
    await node.helper.wait()
    await halted.container.goes_on()
    assert node.left() == []


def is_open(path: Path, pid: int) -> bool:
    """Whether a process has a file open."""
    for each in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            if each.samefile(path):
                return True
    return False


async def both_killed(node: Node) -> None:
    await node.kill_agent()
    await node.kill_helper()


async def test_a_guard_alone_ends_a_worker_whose_agent_and_helper_were_killed_with_criu(
    node: Node,
) -> None:
    halted = await killing.dump_in(node, "pages")
    await node.kill_agent()
    members = [node.helper.pid, halted.child.pid, halted.criu.pid]
    for pid in members:
        os.kill(pid, signal.SIGKILL)
    await node.helper.wait()
    # CRIU had stopped it, and what CRIU does as it ends leaves it running.
    await until(halted.container.has_ended, "the end of the worker", within_s=30.0)
    await node.start_helper()
    await until(lambda: node.left() == [], "the removal of what was left")
