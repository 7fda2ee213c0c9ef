"""Captures and restores that end the process and start it again, by orders and by crashes."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from snapshot_agent.adapters.guards import MARGIN_S
from snapshot_agent.domain import control
from snapshot_agent.handlers.holds import BEAT_S, SILENCE_S
from snapshot_shared import steps
from snapshot_shared.orders import Order
from tests.support.agent_rig import Pod, Rig, below, failure_of, fresh_uid, is_gone, killed
from tests.support.hanging import HangingRoot
from tests.support.waiting import until

pytestmark = pytest.mark.turns

RESPAWN: dict[str, Any] = {"driver": "respawn"}
STANDBY_EVENT = "standby"


def has_exited(rig: Rig, pod: Pod) -> bool:
    return any(r.kind == "exited" and r.order == f"run-{pod.ref.uid}" for r in rig.reports)


async def test_a_captured_worker_goes_on_as_another_process_of_the_same_container(
    node: Rig,
) -> None:
    pod = await node.running("--answer", "42")
    before = pod.pid(node.journal)
    await node.captured(pod, fresh_uid(), **RESPAWN)
    after = pod.pid(node.journal)
    assert after != before
    await until(lambda: is_gone(before), "the end of the first process")
    await until(lambda: pod.events()[-1] == "snapshot-complete 1", "the worker's release")
    assert "resumed 42 1024" in pod.events()
    (shown,) = (await node.status())["pods"]
    assert (shown["containers"], shown["ended"]) == ({"main": after}, {})
    assert not has_exited(node, pod)
    os.kill(after, signal.SIGTERM)
    assert (await node.exited(pod)).exit_code == 128 + signal.SIGTERM


async def test_a_restored_worker_is_a_new_process_whose_exit_code_and_log_are_followed(
    node: Rig,
) -> None:
    arguments = ("--answer", "42", "--state-bytes", "20971520")
    pod, artifact = await node.restorable(*arguments, **RESPAWN)
    before = pod.pid(node.journal)
    await node.done(node.restore_order(pod, artifact, **RESPAWN), "restored")
    assert is_gone(before)
    assert pod.pid(node.journal) != before
    assert pod.events()[-1] == "restored 42 20971520"
    assert not has_exited(node, pod)
    os.kill(pod.pid(node.journal), signal.SIGTERM)
    exited = await node.exited(pod)
    assert exited.exit_code == 128 + signal.SIGTERM
    assert str(pod.home / "log") in exited.message


async def test_the_event_loop_does_not_read_the_memory_of_a_worker_to_start_it_again(
    node: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    pod = await node.running()
    here = Path(f"/proc/{pod.pid(node.journal)}")
    read = [HangingRoot(here / name, monkeypatch) for name in ("cmdline", "environ")]
    await node.captured(pod, fresh_uid(), **RESPAWN)
    assert all(each.calls for each in read)
    assert [each.in_the_loop for each in read] == [[], []]


async def test_a_worker_can_be_captured_and_restored_again_and_again(node: Rig) -> None:
    pod = await node.running("--answer", "7")
    for number in range(2):
        (pod.control / control.READY).write_text('{"attempt": 0}')
        artifact = await node.captured(pod, fresh_uid(), **RESPAWN)
        await until(
            lambda number=number: pod.events().count("snapshot-complete 1") > number,
            "the worker's release",
        )
    await until(lambda: pod.events().count("resumed 7 1024") == 2, "the second resume")
    await pod.goes_on()
    for _ in range(2):
        pod = await node.running(standby=True)
        await node.done(node.restore_order(pod, artifact, **RESPAWN), "restored")
        assert pod.events()[-1] == "restored 7 1024"
        (pod.control / control.READY).write_text('{"attempt": 0}')
        artifact = await node.captured(pod, fresh_uid(), **RESPAWN)
    assert Path(f"/proc/{pod.pid(node.journal)}/cmdline").read_bytes().count(b"--resume-from") == 1


@pytest.mark.parametrize("returns", [True, False], ids=["agent returns", "guard alone"])
async def test_the_process_that_took_the_place_is_adopted_or_let_go_when_an_agent_is_killed(
    rig: Rig, returns: bool
) -> None:
    process = await rig.process()
    pod, content = await rig.running(), fresh_uid()
    await rig.staged(pod, content, **RESPAWN)
    await killed(process)
    if returns:
        await rig.process()
        assert [held["content"] for held in (await rig.status())["captures"]] == [content]
        await rig.done(rig.release_order(pod, content, **RESPAWN), "released")
        await until(lambda: pod.events()[-1] == "snapshot-complete 1", "the worker's release")
        assert not has_exited(rig, pod)
    else:
        await until(lambda: "snapshot-aborted 1" in pod.events(), "the worker's release")
        await pod.goes_on()


async def test_a_driver_that_the_node_does_not_have_is_refused_before_the_worker_is_asked(
    node: Rig,
) -> None:
    pod = await node.running()
    order = node.prepare_order(pod, fresh_uid(), driver="criu")
    failure = await node.refused(order, "NotEligible", kind="rejected")
    assert failure.values["found"] == ["cooperative", "respawn"]
    assert not (pod.control / control.QUIESCE).exists()


async def test_an_artifact_is_restored_by_no_other_driver_than_its_own(node: Rig) -> None:
    pod, artifact = await node.restorable(**RESPAWN)
    failure = await node.refused(node.restore_order(pod, artifact), "Incompatible")
    assert (failure.values["expected"], failure.values["found"]) == ("respawn", "cooperative")
    assert pod.events()[-1] == STANDBY_EVENT


async def test_a_worker_that_cannot_be_started_again_fails_its_dump_and_its_pod(node: Rig) -> None:
    pod, content, dump = await node.held("--exit-at-resume", "7", **RESPAWN)
    failure = await node.refused(dump, "SourceExited")
    assert failure.values["exit_code"] == 7
    assert "--resume-from" in failure.next_step
    await node.exited(pod)
    await node.done(node.release_order(pod, content), "released")
    assert (await node.status())["captures"] == []


# SIGKILL at each step that is the driver's own.


async def crashed(rig: Rig, process: asyncio.subprocess.Process, order: Order) -> None:
    await rig.send(order)
    await asyncio.wait_for(process.wait(), 20.0)


def test_every_table_of_a_driver_has_its_crash_points_here() -> None:
    # Those of `criu` need root, and are in tests/process/test_crashes.py. `criu+cuda` has the same;
    # it crashes in the midst of a dump in tests/process/test_criu_cuda.py.
    own = {of for of in steps.OWN_STEPS if of[1] not in ("criu", "criu+cuda")}
    assert own == {("dump", "respawn"), ("restore", "respawn")}


@pytest.fixture
def simulated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SNAPBACK_SIM", "1")


@pytest.mark.parametrize("returns", [True, False], ids=["agent returns", "guard alone"])
@pytest.mark.parametrize("step", steps.table("dump", "respawn"))
async def test_an_agent_killed_before_a_step_of_a_dump_has_done_anything_lets_the_worker_go_on(
    rig: Rig, simulated: None, step: str, returns: bool
) -> None:
    process = await rig.process()
    pod, _, dump = await rig.held("--child", **RESPAWN)
    await rig.arm("dump", step)
    await crashed(rig, process, dump)
    if returns:
        await rig.process()
    await until(lambda: "snapshot-aborted 1" in pod.events(), "the worker's release")
    if not returns:
        await until(lambda: not rig.guards(), "the end of the guard")
        await rig.process()
    await pod.goes_on()
    expected = "AgentRestarted" if step in ("freeze", "copy-state") else "OutcomeUnknown"
    await is_over(rig, dump, expected)
    assert not has_exited(rig, pod)


async def is_over(rig: Rig, order: Order, reason: str) -> None:
    """The order has failed once, and nothing is held any more."""
    failure_of(await rig.answer(order), reason)
    assert len([r for r in rig.reports if r.order == order.order and r.is_terminal]) == 1
    assert (await rig.status())["captures"] == []
    await until(lambda: not rig.guards(), "the end of the guard")


@pytest.mark.parametrize("returns", [True, False], ids=["agent returns", "guard alone"])
async def test_an_agent_killed_while_a_worker_is_replaced_leaves_nothing_of_it(
    rig: Rig, returns: bool
) -> None:
    process = await rig.process()
    pod, _, dump = await rig.held("--child", "--stubborn", "--hang-at-resume", **RESPAWN)
    await rig.send(dump)
    await until(lambda: "--resume-from" in pod.events()[-1], "the next process")
    await killed(process)
    if returns:
        await rig.process()
    await until(lambda: workers_of(pod) == [], "the end of the worker")
    if not returns:
        await until(lambda: not rig.guards(), "the end of the guard")
        await rig.process()
    await is_over(rig, dump, "OutcomeUnknown")
    await rig.exited(pod)


async def test_a_worker_that_is_being_replaced_is_not_ended_because_its_agent_is_stopped(
    rig: Rig,
) -> None:
    process = await rig.process()
    pod, content, dump = await rig.held("--hang-at-resume", **RESPAWN)
    await rig.send(dump)
    await until(lambda: "--resume-from" in pod.events()[-1], "the next process")
    # Before the next sign of life: what counts is the message of the moment at which it began.
    os.kill(process.pid, signal.SIGSTOP)
    await asyncio.sleep(SILENCE_S + MARGIN_S + BEAT_S)
    assert len(rig.guards()) == 1
    assert workers_of(pod)
    os.kill(process.pid, signal.SIGCONT)
    await rig.done(rig.abort_order(pod, content, **RESPAWN), "aborted")


async def test_a_dump_that_is_aborted_while_the_worker_is_replaced_leaves_nothing_of_it(
    node: Rig,
) -> None:
    pod, content, dump = await node.held("--child", "--hang-at-resume", **RESPAWN)
    await node.send(dump)
    await until(lambda: "--resume-from" in pod.events()[-1], "the next process")
    await node.done(node.abort_order(pod, content, **RESPAWN), "aborted")
    assert workers_of(pod) == []
    await is_over(node, dump, "Aborted")
    await node.exited(pod)


def workers_of(pod: Pod) -> list[int]:
    return [pid for pid, text in below(pod.control).items() if "adapters." not in text]


@pytest.mark.parametrize("step", steps.table("restore", "respawn"))
async def test_an_agent_killed_within_a_restore_goes_on_where_it_was(
    rig: Rig, simulated: None, step: str
) -> None:
    process = await rig.process()
    pod, artifact = await rig.restorable("--answer", "42", **RESPAWN)
    order = rig.restore_order(pod, artifact, **RESPAWN)
    await rig.arm("restore", step)
    await crashed(rig, process, order)
    await rig.process()
    assert (await rig.answer(order)).kind == "restored"
    assert pod.events()[-1] == "restored 42 1024"
    assert len(workers_of(pod)) == 1
    assert not has_exited(rig, pod)
