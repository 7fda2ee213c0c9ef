"""What becomes of a captured worker when its agent is killed, and what the next agent does."""

import asyncio
import os
import signal
import sys
import time

import pytest

from snapshot_agent.adapters.guard import RETURN_S
from snapshot_agent.adapters.guards import MARGIN_S
from snapshot_agent.domain import control
from snapshot_agent.handlers.holds import BEAT_S, SILENCE_S
from tests.support.agent_rig import Rig, catches, failure_of, killed, state_of
from tests.support.waiting import until


async def started(rig: Rig, stderr: int) -> asyncio.subprocess.Process:
    """Start an agent that need not serve."""
    command = [sys.executable, "-m", "snapshot_agent.main"]
    env = {**os.environ, **rig.environment}
    return await asyncio.create_subprocess_exec(*command, env=env, stderr=stderr)


async def test_a_worker_runs_again_five_to_ten_seconds_after_its_agent_was_killed(rig: Rig) -> None:
    process = await rig.process()
    pod, _, _ = await rig.held()
    pid = pod.pid(rig.journal)
    # As if the agent had died in the middle of a dump.
    os.kill(pid, signal.SIGSTOP)
    await until(lambda: state_of(pid) == "T", "the stop", within_s=5.0)
    await killed(process)
    began = time.monotonic()
    await until(lambda: state_of(pid) != "T", "the thaw", within_s=10.0)
    assert time.monotonic() - began >= RETURN_S - 0.5
    await until(lambda: "snapshot-aborted 1" in pod.events(), "the worker's release", within_s=10.0)
    await until(lambda: not rig.guards(), "the end of the guard")
    assert list((rig.state / "guards").glob("*.sock")) == []


async def test_a_worker_whose_agent_is_stopped_goes_on_after_five_seconds_and_is_not_dumped_then(
    rig: Rig,
) -> None:
    process = await rig.process()
    pod, content, dump = await rig.held()
    os.kill(process.pid, signal.SIGSTOP)
    began = time.monotonic()
    await until(lambda: "snapshot-aborted 1" in pod.events(), "the worker's release", within_s=10.0)
    assert time.monotonic() - began > SILENCE_S - BEAT_S
    await rig.send(dump)
    os.kill(process.pid, signal.SIGCONT)
    assert failure_of(await rig.answer(dump), "HoldDeadline").retryable
    assert not rig.generation(content).exists()


async def test_a_worker_that_is_quiet_for_longer_than_a_silence_is_held_by_an_agent_that_lives(
    rig: Rig,
) -> None:
    process = await rig.process()
    pod, _, _ = await rig.held()
    await asyncio.sleep(SILENCE_S + MARGIN_S + BEAT_S)
    assert len(rig.guards()) == 1
    assert "snapshot-aborted 1" not in pod.events()
    await killed(process)


async def test_a_worker_whose_agent_is_stopped_within_a_copy_of_its_state_goes_on_after_the_silence(
    rig: Rig,
) -> None:
    process = await rig.process()
    pod, content, dump = await rig.held("--state-bytes", str(2**28))
    pid = pod.pid(rig.journal)
    await rig.send(dump)
    part = rig.generation(content) / "process"
    await until(part.exists, "the first byte of the part")
    os.kill(process.pid, signal.SIGSTOP)
    assert state_of(pid) == "T"
    await until(lambda: "snapshot-aborted 1" in pod.events(), "the worker's release", within_s=10.0)
    await until(lambda: not rig.guards(), "the end of the guard")
    await pod.goes_on()
    os.kill(process.pid, signal.SIGCONT)
    # The agent sees first that its guard has ended, or at the end of the copy that it has acted.
    assert failure_of(await rig.answer(dump), "AgentSilent", "ServiceStopped").retryable
    assert (await rig.done(rig.release_order(pod, content), "released")).unconfirmed
    assert (await rig.status())["captures"] == []


async def test_an_agent_that_returns_in_time_takes_the_guard_over_and_the_hold_goes_on(
    rig: Rig,
) -> None:
    process = await rig.process()
    pod, content, dump = await rig.held()
    (guard,) = rig.guards()
    await rig.restarted(process)
    assert rig.guards() == [guard]
    assert [held["content"] for held in (await rig.status())["captures"]] == [content]
    await rig.done(dump, "staged")
    await rig.done(rig.release_order(pod, content), "released")
    await until(lambda: "snapshot-complete 1" in pod.events(), "the worker's release")
    assert rig.guards() == []


async def test_an_agent_that_returns_without_a_guard_arms_another(rig: Rig) -> None:
    process = await rig.process()
    _, content, _ = await rig.held()
    (guard,) = rig.guards()
    os.kill(process.pid, signal.SIGSTOP)
    os.kill(guard, signal.SIGKILL)
    await rig.restarted(process)
    (another,) = rig.guards()
    assert another != guard
    assert [held["content"] for held in (await rig.status())["captures"]] == [content]


async def test_an_agent_that_returns_after_the_guard_has_acted_reports_the_release(
    rig: Rig,
) -> None:
    process = await rig.process()
    pod, content, _ = await rig.held()
    (guard,) = rig.guards()
    os.kill(process.pid, signal.SIGSTOP)
    os.kill(guard, signal.SIGTERM)
    await until(lambda: "snapshot-aborted 1" in pod.events(), "the worker's release")
    await rig.restarted(process)
    assert (await rig.done(rig.release_order(pod, content), "released")).unconfirmed
    assert (await rig.status())["captures"] == []


async def test_a_prepare_that_was_cut_off_is_undone_and_failed_retryably(rig: Rig) -> None:
    process = await rig.process()
    pod, order = await rig.asked()
    await rig.restarted(process)
    assert failure_of(await rig.answer(order), "AgentRestarted").retryable
    assert not (pod.control / control.QUIESCE).exists()
    assert control.is_of((pod.control / control.ABORTED).read_bytes(), 1)
    assert rig.guards() == []
    assert (await rig.status())["captures"] == []


async def test_a_dump_that_was_cut_off_is_never_run_again_and_the_worker_goes_on(rig: Rig) -> None:
    process = await rig.process()
    pod, content, dump = await rig.held("--state-bytes", str(2**28))
    await rig.send(dump)
    copy = rig.generation(content) / "process" / "weights.bin"
    await until(copy.exists, "the begin of the copy")
    await killed(process)
    assert state_of(pod.pid(rig.journal)) == "T"
    await rig.process()
    failure_of(await rig.answer(dump), "OutcomeUnknown")
    await until(lambda: "snapshot-aborted 1" in pod.events(), "the worker's release", within_s=10.0)
    await pod.goes_on()
    assert rig.guards() == []
    assert not (copy.parent / "part.json").exists()


async def test_a_dump_whose_guard_is_stopped_is_undone_as_by_a_stop_of_its_service(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SNAPBACK_SIM", "1")
    await rig.process()
    pod, _, dump = await rig.held()
    await rig.arm("dump", "copy-state", "stall")
    await rig.send(dump)
    await until(lambda: state_of(pod.pid(rig.journal)) == "T", "the freeze")
    (guard,) = rig.guards()
    os.kill(guard, signal.SIGTERM)
    failure = failure_of(await rig.answer(dump), "ServiceStopped")
    assert failure.retryable
    assert "guard" in failure.message
    await pod.goes_on()
    assert "snapshot-aborted 1" in pod.events()


async def test_an_agent_that_is_stopped_undoes_what_is_under_way(rig: Rig) -> None:
    async with rig.agent():
        pod, order = await rig.asked()
    assert control.is_of((pod.control / control.ABORTED).read_bytes(), 1)
    assert rig.guards() == []
    await pod.goes_on()
    async with rig.agent():
        failure_of(await rig.answer(order), "ServiceStopped")


async def test_an_order_that_ended_before_a_restart_is_answered_from_the_record(rig: Rig) -> None:
    async with rig.agent():
        pod = await rig.running()
        order = rig.run_order(pod)
    rig.reports.clear()
    async with rig.agent():
        # Deleting and publishing again is what a second delivery looks like.
        found = await rig.bus.last("ORDERS", f"snap.order.{rig.node}.agent.{order.order}")
        assert found is not None
        await rig.bus.delete("ORDERS", found[0])
        await rig.send(order)
        assert (await rig.answer(order)).kind == "started"
    assert pod.events() == ["started "]


async def test_a_worker_is_freed_although_nats_is_away(rig: Rig) -> None:
    process = await rig.process()
    pod, _ = await rig.asked()
    await killed(process)
    rig.settings["SNAPBACK_NATS_URL"] = "nats://127.0.0.1:1"
    lonely = await started(rig, asyncio.subprocess.DEVNULL)
    try:
        await until((pod.control / control.ABORTED).exists, "the worker's release", within_s=10.0)
        # On a busy machine the guard may have been faster than the start of the agent.
        await until(lambda: catches(lonely.pid, signal.SIGTERM), "the start of the agent")
        assert lonely.returncode is None
    finally:
        lonely.terminate()
        assert await asyncio.wait_for(lonely.wait(), 10) == 0
    await pod.goes_on()


async def test_only_one_agent_works_with_a_state_folder(node: Rig) -> None:
    second = await started(node, asyncio.subprocess.PIPE)
    _, message = await asyncio.wait_for(second.communicate(), 20)
    assert second.returncode == 1
    assert b"AlreadyExists" in message
    assert b"Traceback" not in message
