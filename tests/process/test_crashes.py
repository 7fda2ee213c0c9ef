"""SIGKILL of the agent at each step of the tables of the driver `criu`."""

from __future__ import annotations

import pytest

from snapshot_shared import steps
from tests.process.killing import HaltedDump, crashed, prepared, thinned
from tests.process.node import Node
from tests.support.agent_rig import failure_of

DUMPS = [(step, returns) for step in steps.table("dump", "criu") for returns in (True, False)]


@pytest.mark.parametrize(("step", "returns"), thinned(DUMPS))
async def test_an_agent_killed_at_a_step_of_a_dump_leaves_a_worker_that_goes_on(
    node: Node, step: str, *, returns: bool
) -> None:
    worker = await node.container("worker")
    order = await prepared(node, worker)
    await crashed(node, order, "dump", step)
    if returns:
        await node.process()
    await worker.is_let_go()
    if not returns:
        await node.process()
    expected = "AgentRestarted" if step == "dump-process" else "OutcomeUnknown"
    failure_of(await node.answer(order), expected)
    halted = HaltedDump(node, worker, order)
    await halted.rests()
    assert not halted.is_staged
    assert (await node.status())["captures"] == []


@pytest.mark.parametrize("step", thinned(steps.table("restore", "criu")))
async def test_an_agent_killed_at_a_step_of_a_restore_goes_on_where_it_was(
    node: Node, step: str
) -> None:
    target, order = await node.waiting(await node.artifact())
    await crashed(node, order, "restore", step)
    await node.process()
    assert (await node.answer(order)).kind == "restored"
    await target.goes_on()
    assert target.did()[-1] == "restored 1"
    assert node.left() == []
