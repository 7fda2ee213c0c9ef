"""A capture waits for its process driver, and says why its node cannot use it."""

from __future__ import annotations

from msgspec.structs import replace

from snapshot_shared.errors import Failure
from snapshot_shared.objects.kubernetes import Node
from snapshot_shared.objects.meta import condition
from snapshot_shared.orders import Presence
from tests.support.objects import checkpoint_document, presence, unready
from tests.support.operator_world import World

WHY = Failure(
    reason="NotEligible",
    message="CRIU does not work on this node: CRIU did not dump: no such option",
    next_step="use CRIU 4.2 or later",
)
HAS_IT = replace(presence("node-1"), drivers=["cooperative", "criu"], criu="4.2")
UNFIT = replace(HAS_IT, drivers=["cooperative"], unready=unready(WHY, "criu"))


async def warm(world: World, last: Presence) -> None:
    """A worker for the driver criu is warm, and its node says this of itself."""
    await world.join(presence("node-1"))
    await world.apply(checkpoint_document(driver="criu"))
    (run,) = world.open("run")
    await world.report(run, "started")
    await world.join(last)
    await world.report(run, "ready")


async def reason(world: World) -> tuple[str, str]:
    snapshot = await world.get("Snapshot", "llm")
    found = condition(snapshot.status.conditions, "Ready")
    assert found is not None
    return found.reason, found.message


async def test_a_capture_waits_for_the_self_test_of_its_node_and_names_what_failed() -> None:
    world = World()
    await warm(world, UNFIT)
    assert world.open("prepare") == []
    assert await reason(world) == (
        "DriverUnavailable",
        f"node node-1 cannot use the driver criu: {WHY.message}. Next: {WHY.next_step}",
    )
    await world.join(HAS_IT)
    assert world.open("prepare")


async def test_a_capture_names_the_drivers_of_a_node_that_does_not_have_its_own() -> None:
    world = World()
    await warm(world, replace(UNFIT, unready=[]))
    assert world.open("prepare") == []
    why, message = await reason(world)
    assert why == "DriverUnavailable"
    assert "does not have the driver criu, it has cooperative" in message


async def test_a_capture_begins_on_a_node_that_does_not_say_which_drivers_it_has() -> None:
    world = World()
    await warm(world, presence("node-1"))
    assert world.open("prepare")


async def test_a_node_keeps_what_its_agent_says_of_criu() -> None:
    world = World()
    await world.join(UNFIT)
    node = world.cluster.get("Node", None, "node-1")
    assert isinstance(node, Node)
    assert (node.status.criu, node.status.unready) == (
        "4.2",
        unready(WHY, "criu"),
    )
