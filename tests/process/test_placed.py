"""A process that is brought into its placeholder first, and goes on when its devices are loaded."""

from __future__ import annotations

import pytest

from snapshot_shared import steps
from snapshot_shared.orders import ArtifactRef, Order
from tests.process.killing import RESTORE_STEPS, Halted, crashed, thinned
from tests.process.node import Container, Node, children_of
from tests.support.waiting import until


async def captured(node: Node) -> tuple[Container, ArtifactRef]:
    """Return a container that waits for a process, and the process that was captured."""
    artifact = await node.artifact()
    return await node.container("target", waits=True), artifact


async def brought(node: Node, target: Container, order: Order, kind: str) -> int:
    """Have the process placed or restored; return its pid."""
    report = await node.done(order, kind)
    assert kind == "restored" or report.bytes > 0
    [process] = children_of(target.pid)
    return process.pid


async def placed(node: Node, target: Container, artifact: ArtifactRef, attempt: int = 1) -> int:
    order = node.place_order(target, artifact, attempt=attempt)  # type: ignore[arg-type]
    return await brought(node, target, order, "placed")


async def restored(node: Node, target: Container, artifact: ArtifactRef, attempt: int = 1) -> int:
    order = node.restore_order(target, artifact, attempt=attempt)  # type: ignore[arg-type]
    return await brought(node, target, order, "restored")


async def test_a_placed_process_waits_and_goes_on_as_it_is_when_a_later_attempt_restores_it(
    node: Node,
) -> None:
    target, artifact = await captured(node)
    before = await placed(node, target, artifact)
    await target.goes_on()
    assert not (target.control / "restore-complete").exists()
    assert not any("restored" in done for done in target.did())
    assert await placed(node, target, artifact, attempt=2) == before
    assert await restored(node, target, artifact, attempt=2) == before
    await target.goes_on()
    assert target.did()[-1] == "restored 2"
    assert node.left() == []


@pytest.mark.parametrize("step", thinned(steps.table("place")))
async def test_an_agent_killed_at_a_step_goes_on_where_it_was(node: Node, step: str) -> None:
    target, artifact = await captured(node)
    order = node.place_order(target, artifact)  # type: ignore[arg-type]
    await crashed(node, order, "place", step)
    await node.process()
    assert (await node.answer(order)).kind == "placed"
    await restored(node, target, artifact)
    await target.goes_on()
    assert node.left() == []


async def test_a_process_whose_restore_was_given_up_is_told_so(node: Node) -> None:
    target, artifact = await captured(node)
    await placed(node, target, artifact)
    abort = node.restore_abort(target, why="no weights")  # type: ignore[arg-type]
    await node.done(abort, "aborted")
    await until((target.control / "restore-failed").exists, "what is said to the process")


async def test_an_abort_ends_a_process_that_is_half_placed(node: Node) -> None:
    target, artifact = await captured(node)
    order = node.place_order(target, artifact)  # type: ignore[arg-type]
    halted = Halted(node, target, order)
    halted.arm(RESTORE_STEPS["restoring"])
    await node.send(order)
    await halted.reached(over=False)
    abort = node.restore_abort(target, why="deleted")  # type: ignore[arg-type]
    await node.done(abort, "aborted")
    halted.go_on()
    assert (await halted.answered()).kind == "failed"
    await target.becomes("ended")
    await halted.rests()
