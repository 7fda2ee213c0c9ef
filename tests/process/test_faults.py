"""What becomes of a worker when CRIU hangs or fails, or when the worker is not what it was."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path

import pytest

from snapshot_agent.adapters import procfs
from snapshot_agent.adapters.criu import Criu
from snapshot_agent.adapters.settling import settle
from snapshot_agent.domain.control import ContainerPaths
from snapshot_agent.ports import Dump, Process, Worker
from snapshot_shared.errors import SourceExited
from snapshot_shared.orders import Report
from tests.process.killing import COMPENSATED_S, DUMP_STEPS, dump_in, restore_in, thinned
from tests.process.node import Container, Node, children_of
from tests.support.agent_rig import failure_of
from tests.support.waiting import until

DEADLINE_S = 3.0


def reason_of(report: Report) -> str:
    return report.failure.reason if report.failure else report.kind


# A CRIU that does not go on is killed, which ends its worker. While files are archived it only
# waits, and frees the worker when it is told to.
HANGS = {
    "frozen": "ended",
    "pages": "ended",
    "archiving": "goes on",
    "archived": "ended",
    "thawing": "ended",
}


@pytest.mark.parametrize("step", thinned(list(HANGS)))
async def test_a_dump_that_hangs_is_ended_at_its_deadline(node: Node, step: str) -> None:
    halted = await dump_in(node, step, deadline_s=DEADLINE_S)
    began = time.monotonic()
    assert reason_of(await halted.answered()) == "DeadlineExceeded"
    await halted.container.becomes(HANGS[step])
    assert time.monotonic() - began < DEADLINE_S + COMPENSATED_S
    halted.go_on()
    await halted.rests()
    assert not halted.is_staged


@pytest.mark.parametrize("step", thinned(list(HANGS)))
async def test_a_dump_that_hangs_is_ended_by_an_abort(node: Node, step: str) -> None:
    halted = await dump_in(node, step)
    began = time.monotonic()
    await halted.abort()
    assert reason_of(await halted.answered()) == "Aborted"
    await halted.container.becomes(HANGS[step])
    assert time.monotonic() - began < COMPENSATED_S
    halted.go_on()
    await halted.rests()
    if HANGS[step] == "goes on":
        assert halted.container.did()[-1] == "snapshot-aborted"


RESTORE_HANGS = {"unpacking": "waits", "begun": "ended", "restoring": "ended", "resumed": "ended"}


@pytest.mark.parametrize("step", thinned(list(RESTORE_HANGS)))
async def test_a_restore_that_hangs_is_ended_at_its_deadline(node: Node, step: str) -> None:
    halted = await restore_in(node, step, deadline_s=DEADLINE_S)
    began = time.monotonic()
    assert reason_of(await halted.answered()) == "DeadlineExceeded"
    await halted.container.becomes(RESTORE_HANGS[step])
    assert time.monotonic() - began < DEADLINE_S + COMPENSATED_S
    halted.go_on()
    await halted.rests()


# When the images are written, CRIU does not ask any more whether an action has failed.
FAILURES = {
    "begun": "CriuFailed",
    "frozen": "CriuFailed",
    "archived": "CriuFailed",
    "thawing": "staged",
}


@pytest.mark.parametrize("step", thinned(list(FAILURES)))
async def test_a_worker_goes_on_when_an_action_of_its_dump_fails(node: Node, step: str) -> None:
    halted = await dump_in(node, step)
    halted.go_on(status=3)
    report = await halted.answered()
    assert reason_of(report) == FAILURES[step]
    await halted.container.goes_on()
    await halted.rests()
    await halted.end(report)


async def test_a_worker_goes_on_whose_agent_and_helper_are_replaced_while_it_is_dumped(
    node: Node,
) -> None:
    halted = await dump_in(node, "archiving")
    for each in (node.helper, node.running_agent):
        each.terminate()
    await node.running_agent.wait()
    await node.helper.wait()
    await halted.container.is_let_go()
    await node.start_helper()
    await node.process()
    await halted.rests()
    assert not halted.is_staged


RESTORE_FAILURES = {"begun": "CriuFailed", "restoring": "CriuFailed", "resumed": "restored"}
CUT_S = 1.0
"""Within this time services that cut a restore have done so."""


@pytest.mark.parametrize("step", thinned(["unpacking", *RESTORE_FAILURES]))
async def test_a_restore_is_finished_whose_agent_and_helper_are_replaced_meanwhile(
    node: Node, step: str
) -> None:
    halted = await restore_in(node, step)
    services = (node.helper, node.running_agent)
    for each in services:
        each.terminate()
    await asyncio.sleep(CUT_S)
    halted.go_on()
    for each in services:
        await each.wait()
    await node.start_helper()
    await node.process()
    assert (await halted.answered()).kind == "restored"
    await halted.container.becomes("goes on")
    await halted.rests()


@pytest.mark.parametrize("step", thinned(list(RESTORE_FAILURES)))
async def test_a_placeholder_waits_when_an_action_of_its_restore_fails(
    node: Node, step: str
) -> None:
    halted = await restore_in(node, step)
    halted.go_on(status=3)
    report = await halted.answered()
    assert reason_of(report) == RESTORE_FAILURES[step]
    await halted.container.becomes("waits" if report.kind == "failed" else "goes on")
    await halted.rests()


async def test_a_process_with_a_wrong_page_is_ended_before_it_runs_and_its_placeholder_waits(
    node: Node,
) -> None:
    artifact = await node.artifact()
    part = node.part(artifact.content_uid)
    pages = max(part.glob("pages-*.img"), key=lambda path: path.stat().st_size)
    before = pages.read_bytes()
    target, order = await node.waiting(artifact)
    pages.write_bytes(before[:-1] + bytes([before[-1] ^ 1]))
    failure = failure_of(await node.carry_out(order), "ArtifactCorrupt")
    assert failure.message.startswith(f"{pages.name}: chunk ")
    await target.becomes("waits")
    pages.write_bytes(before)
    await node.done(node.restore_order(target, artifact, attempt=2), "restored")  # type: ignore[arg-type]
    await target.goes_on()


@pytest.mark.parametrize("step", thinned(list(DUMP_STEPS)))
async def test_a_worker_that_ends_within_its_dump_leaves_the_network_of_its_pod_open(
    node: Node, step: str
) -> None:
    halted = await dump_in(node, step)
    procfs.send(halted.container.process, signal.SIGKILL)
    if step == "over":
        # CRIU holds it no more. A worker that ends after the helper has looked is not missed.
        await until(halted.container.has_ended, "the end of the worker")
    halted.go_on()
    report = await halted.answered()
    assert reason_of(report) in ("SourceExited", "CriuFailed")
    await until(halted.container.has_ended, "the end of the worker")
    await halted.rests()
    assert not halted.is_staged


async def test_a_pid_that_another_process_has_now_is_neither_dumped_nor_ended(
    node: Node, tmp_path: Path
) -> None:
    found = await node.container("worker")
    pid, start = found.process.key
    paths = ContainerPaths(home=found.home, sockets=found.home)
    worker = Worker(found.ref, Process(pid, start - 1), paths)

    async def progress(_: int) -> None:
        raise AssertionError("nothing was to be written")

    part = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
    driver = Criu(node.socket, time.monotonic)
    with pytest.raises(SourceExited):
        await driver.dump(Dump(worker, 1, time.monotonic() + 10, progress, part))
    os.close(part)
    assert list(tmp_path.iterdir()) == []
    assert not settle(str(node.socket), (pid, start - 1))
    await found.goes_on()
    assert node.left() == []


def limit_memory(container: Container, count: int) -> None:
    for name in ("memory.limit_in_bytes", "memory.max"):
        if (file := container.cgroup / name).exists():
            file.write_text(str(count))
            return
    pytest.skip("cgroups of this machine have no limit of memory that can be set")


async def test_a_target_with_too_little_memory_is_refused_and_left_alone(node: Node) -> None:
    target, order = await node.waiting(await node.artifact())
    limit_memory(target, 16 << 20)
    failure = failure_of(await node.carry_out(order), "Incompatible")
    assert failure.values["found"] == 16 << 20
    await target.becomes("waits")
    assert list(target.data.iterdir()) == []
    assert node.left() == []


async def test_a_target_that_runs_out_of_memory_within_its_restore_has_nothing_half_restored(
    node: Node,
) -> None:
    halted = await restore_in(node, "begun")
    limit_memory(halted.container, 24 << 20)
    halted.go_on()
    assert reason_of(await halted.answered()) in ("ChildKilled", "CriuFailed", "OutcomeUnknown")
    target = halted.container
    await until(lambda: target.has_ended() or not children_of(target.pid), "the end of the process")
    await halted.rests()
