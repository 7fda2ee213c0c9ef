"""SIGKILL of the agent at each step of the tables of the driver `criu`."""

from __future__ import annotations

import pytest

from snapshot_shared import steps, subjects
from snapshot_shared.api import Fault, SimReply, SimRequest
from snapshot_shared.codec import decode_json, encode_json
from snapshot_shared.orders import Order
from tests.process.killing import CRIU, HaltedDump, prepared, thinned
from tests.process.node import Node
from tests.support.agent_rig import fresh_uid
from tests.support.waiting import until

pytestmark = [pytest.mark.process, pytest.mark.waits]


async def crashed(node: Node, order: Order, verb: str, step: str) -> None:
    """Send an order, and wait for the end of the agent at a step of it."""
    request = SimRequest(arm=Fault(action="crash", step=step, verb=verb))
    subject = subjects.rpc(node.node, "agent", "sim")
    answer = await node.bus.request(subject, encode_json(request), timeout_s=5.0)
    assert decode_json(answer, SimReply).failure is None
    await node.send(order)
    assert node.running_agent is not None
    await node.running_agent.wait()


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
    await until(lambda: "snapshot-aborted" in worker.did(), "the worker's release")
    await worker.goes_on()
    if not returns:
        await node.process()
    report = await node.answer(order)
    assert report.failure is not None
    expected = "AgentRestarted" if step == "dump-process" else "OutcomeUnknown"
    assert report.failure.reason == expected
    halted = HaltedDump(node, worker, order)
    await halted.rests()
    assert not halted.is_staged
    assert (await node.status())["captures"] == []


@pytest.mark.parametrize("step", thinned(steps.table("restore", "criu")))
async def test_an_agent_killed_at_a_step_of_a_restore_goes_on_where_it_was(
    node: Node, step: str
) -> None:
    source = await node.container("source")
    artifact = await node.captured(source, fresh_uid(), **CRIU)  # type: ignore[arg-type]
    target = await node.container("target", waits=True)
    order = node.restore_order(target, artifact, **CRIU)  # type: ignore[arg-type]
    await crashed(node, order, "restore", step)
    await node.process()
    assert (await node.answer(order)).kind == "restored"
    await target.goes_on()
    assert target.did()[-1] == "restored 1"
    assert node.left() == []
