"""What an agent does with pods of which the operator knows nothing any more."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import pytest

from tests.support.agent_rig import PATIENCE_S, AgentProcess, Pod, Rig, fresh_uid, is_gone, state_of
from tests.support.waiting import until


async def stopped(process: AgentProcess) -> None:
    """End an agent as a supervisor does; its workers run on."""
    process.terminate()
    await asyncio.wait_for(process.wait(), PATIENCE_S)


async def asked(rig: Rig, times: int) -> None:
    await until(lambda: len(rig.asked_pods) >= times, "the question about the pods")


def folder(rig: Rig, pod: Pod) -> Path:
    return rig.state / "pods" / pod.ref.uid


async def test_a_pod_that_went_while_its_node_was_away_is_ended_and_its_folder_removed(
    rig: Rig,
) -> None:
    process = await rig.process()
    kept, lost = await rig.running(), await rig.running("--child")
    pid, child = lost.pid(rig.journal), int((lost.home / "child").read_text())
    await stopped(process)
    del rig.pods[lost.ref.uid]
    await rig.process()
    await until(lambda: is_gone(pid) and is_gone(child), "the end of the pod")
    await until(lambda: not folder(rig, lost).exists(), "the end of its folder")
    await rig.exited(lost)
    assert state_of(kept.pid(rig.journal)) not in "XZ"
    assert [pod["uid"] for pod in (await rig.status())["pods"]] == [kept.ref.uid]


async def test_a_pod_is_found_by_its_folder_when_the_journal_is_lost(rig: Rig) -> None:
    process = await rig.process()
    pod = await rig.running("--child")
    pid, child = pod.pid(rig.journal), int((pod.home / "child").read_text())
    await stopped(process)
    rig.journal.unlink()
    del rig.pods[pod.ref.uid]
    await rig.process()
    await until(lambda: is_gone(pid) and is_gone(child), "the end of the pod")
    await until(lambda: not folder(rig, pod).exists(), "the end of its folder")
    assert rig.asked_pods[-1] == [pod.ref.uid]


async def test_the_log_of_a_pod_that_is_known_stays_when_it_has_ended(rig: Rig) -> None:
    process = await rig.process()
    pod = rig.pod("--exit-at-start", "3")
    await rig.carry_out(rig.run_order(pod))
    await rig.exited(pod)
    await stopped(process)
    await rig.process()
    await asked(rig, 2)
    assert rig.asked_pods[-1] == [pod.ref.uid]
    assert (pod.home / "log").exists()


async def test_an_answer_about_a_pod_that_was_not_asked_about_ends_none(rig: Rig) -> None:
    process = await rig.process()
    pod = await rig.running()
    await stopped(process)
    rig.also_unknown = [fresh_uid()]
    del rig.pods[pod.ref.uid]
    await rig.process()
    await asked(rig, 3)
    assert state_of(pod.pid(rig.journal)) not in "XZ"
    rig.also_unknown = []
    await until(lambda: is_gone(pod.pid(rig.journal)), "the end of the pod")


async def test_a_folder_that_is_no_pods_is_left_alone(rig: Rig) -> None:
    other = rig.state / "pods" / "notes"
    other.mkdir(parents=True)
    await rig.process()
    await asked(rig, 1)
    assert rig.asked_pods == [[]]
    assert other.exists()


@pytest.mark.parametrize("has_folder", [True, False], ids=["folder", "processes"])
async def test_a_pod_of_which_only_the_folder_or_the_processes_are_left_can_be_stopped(
    rig: Rig, has_folder: bool
) -> None:
    process = await rig.process()
    pod = rig.pod(command=["sleep", "600"])
    await rig.done(rig.run_order(pod), "started")
    pid = pod.pid(rig.journal)
    await stopped(process)
    rig.journal.unlink()
    if not has_folder:
        shutil.rmtree(rig.state / "pods")
    await rig.process()
    await rig.done(rig.stop_order(pod), "stopped")
    assert is_gone(pid)
