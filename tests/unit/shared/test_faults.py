"""The step runner, and the fault switch: what is armed happens once, where it was armed."""

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from snapshot_shared.api import Fault, FaultAction, SimReply, SimRequest
from snapshot_shared.codec import decode_json, encode_json
from snapshot_shared.errors import DeadlineExceeded, InjectedFault, InvalidInput
from snapshot_shared.faults import FaultPlan
from snapshot_shared.journal import Journal
from snapshot_shared.runner import Runner, Step
from snapshot_shared.steps import STEPS, VERBS_OF, find
from snapshot_shared.telemetry import Telemetry
from tests.support import builders

ORDER = builders.dump_order()


@pytest.fixture
def plan() -> FaultPlan:
    return FaultPlan("agent", "node-1")


@pytest.fixture
def runner(tmp_path: Path, plan: FaultPlan) -> Iterator[Runner]:
    journal = Journal.open(tmp_path, wall=lambda: 0.0)
    telemetry = Telemetry("test", "node-1", "0")
    yield Runner(journal, telemetry, plan)
    telemetry.shutdown()
    journal.close()


async def test_a_step_fails_once_with_a_reason_that_says_who_asked_for_it(plan: FaultPlan) -> None:
    plan.arm(Fault(action="fail", step="thaw"))
    with pytest.raises(InjectedFault) as raised:
        await plan.before("dump", "thaw")
    failure = raised.value.to_failure()
    assert (failure.reason, failure.retryable) == ("InjectedFault", False)
    assert "snapshotctl sim fail node-1 --at thaw" in failure.next_step
    await plan.before("dump", "thaw")
    assert plan.armed == []


async def test_a_step_that_is_stalled_for_a_time_goes_on_after_it(plan: FaultPlan) -> None:
    plan.arm(Fault(action="stall", step="thaw", stall_s=0.1))
    loop = asyncio.get_running_loop()
    began = loop.time()
    await plan.before("dump", "thaw")
    assert loop.time() - began >= 0.1


async def test_a_stalled_step_waits_until_somebody_ends_it(plan: FaultPlan) -> None:
    plan.arm(Fault(action="stall", step="thaw"))
    stalled = asyncio.ensure_future(plan.before("dump", "thaw"))
    done, _ = await asyncio.wait([stalled], timeout=0.05)
    assert done == set()
    await asyncio.wait_for(plan.before("dump", "thaw"), 5.0)
    stalled.cancel()
    with pytest.raises(asyncio.CancelledError):
        await stalled


async def test_a_fault_with_a_verb_leaves_the_step_of_another_verb_alone(plan: FaultPlan) -> None:
    plan.arm(Fault(action="fail", step="signal", verb="restore"))
    await plan.before("release", "signal")
    with pytest.raises(InjectedFault):
        await plan.before("restore", "signal")


async def test_a_fault_without_a_verb_takes_the_first_that_comes(plan: FaultPlan) -> None:
    plan.arm(Fault(action="fail", step="signal"))
    with pytest.raises(InjectedFault):
        await plan.before("release", "signal")
    await plan.before("restore", "signal")


async def test_a_later_fault_at_the_same_step_takes_the_place_of_the_first(plan: FaultPlan) -> None:
    plan.arm(Fault(action="crash", step="thaw", verb="dump"))
    plan.arm(Fault(action="fail", step="thaw", verb="dump"))
    assert [fault.action for fault in plan.armed] == ["fail"]


@pytest.mark.parametrize(
    ("step", "verb", "listed"),
    [
        ("melt", "dump", "dump: freeze, copy-state, thaw, stage"),
        ("melt", "", "prepare: gate, guard, quiesce, fence, facts"),
        ("thaw", "bump", "restore"),
        ("write", "save", "agent"),
    ],
)
def test_an_unknown_step_is_refused_with_those_that_there_are(
    plan: FaultPlan, step: str, verb: str, listed: str
) -> None:
    with pytest.raises(InvalidInput) as raised:
        plan.arm(Fault(action="fail", step=step, verb=verb))
    assert listed in raised.value.message
    assert plan.armed == []


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"[]",
        b'{"arm": {"action": "explode", "step": "thaw"}}',
        b'{"arm": {"action": "fail", "step": "melt"}}',
        b" " * 300_000,
    ],
)
async def test_a_bad_request_is_answered_and_changes_nothing(plan: FaultPlan, data: bytes) -> None:
    plan.arm(Fault(action="fail", step="thaw"))
    reply = decode_json(await plan.answer(data, {}), SimReply)
    assert reply.failure is not None
    assert len(plan.armed) == 1


async def test_a_request_arms_or_clears_and_is_told_what_is_armed(plan: FaultPlan) -> None:
    fault = Fault(action="stall", step="gate", verb="prepare")
    armed = await plan.answer(encode_json(SimRequest(arm=fault)), {})
    assert decode_json(armed, SimReply).armed == [fault]
    cleared = await plan.answer(encode_json(SimRequest(clear=True)), {})
    assert decode_json(cleared, SimReply) == SimReply()


def test_every_step_of_every_verb_can_be_named_and_belongs_to_a_service() -> None:
    for verb, steps in STEPS.items():
        for step in steps:
            [place] = find(step, verb=verb)
            assert verb in VERBS_OF[place.service]
    assert [place.verb for place in find("check")] == ["load", "place", "restore"]
    assert [place.service for place in find("compensate", service="gms")] == ["gms"]


def _table(ran: list[str], budget_s: float) -> list[Step]:
    def named(name: str) -> Step:
        async def run() -> None:
            ran.append(name)

        async def undo() -> None:
            ran.append(f"undo {name}")

        return Step(name, run, budget_s, undo=undo)

    return [named(name) for name in STEPS["dump"]]


@pytest.mark.parametrize(
    ("action", "error"), [("fail", InjectedFault), ("stall", DeadlineExceeded)]
)
async def test_a_fault_ends_the_order_and_what_was_begun_is_undone(
    runner: Runner, plan: FaultPlan, action: FaultAction, error: type[Exception]
) -> None:
    plan.arm(Fault(action=action, step="copy-state"))
    ran: list[str] = []
    with pytest.raises(error, match="copy-state"):
        await runner.run("dump", ORDER, _table(ran, 0.2), remaining_s=lambda: 60.0)
    assert ran == ["freeze", "undo copy-state", "undo freeze"]


async def test_a_compensation_that_hangs_keeps_no_other_from_running(
    runner: Runner, plan: FaultPlan
) -> None:
    plan.arm(Fault(action="fail", step="copy-state"))
    ran: list[str] = []
    freeze, copy, *others = _table(ran, 60.0)
    hangs = asyncio.Event()

    async def hang() -> None:
        await hangs.wait()

    table = [freeze, replace(copy, undo=hang, undo_s=0.05), *others]
    running = asyncio.ensure_future(runner.run("dump", ORDER, table, remaining_s=lambda: 60.0))
    try:
        with pytest.raises(InjectedFault):
            await asyncio.wait_for(asyncio.shield(running), 10.0)
    finally:
        hangs.set()
        await asyncio.gather(running, return_exceptions=True)
    assert ran == ["freeze", "undo freeze"]


OFTEN = 3


async def test_an_order_has_not_ended_before_its_compensation_however_often_it_is_cancelled(
    runner: Runner,
) -> None:
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
    task = asyncio.create_task(runner.run("dump", ORDER, table, remaining_s=lambda: 60.0))
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
