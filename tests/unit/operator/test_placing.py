"""A process that its driver brings is placed while the devices are loaded."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from snapshot_shared.orders import Driver
from snapshot_shared.steps import AGENT_VERBS
from snapshot_shared.transitions import Restore
from tests.support.objects import checkpoint_document, presence, restore_document
from tests.support.operator_world import World, payload

DRIVERS: list[Driver] = ["cooperative", "criu"]


async def waiting(driver: Driver = "criu", verbs: tuple[str, ...] = AGENT_VERBS) -> World:
    """A worker was captured with a driver, and a placeholder waits for it."""
    world = World()
    nodes = (presence("node-1"), presence("node-2"))
    await world.join(*(replace(node, drivers=DRIVERS, verbs=list(verbs)) for node in nodes))
    await world.apply(checkpoint_document(driver=driver))
    await world.answer_all()
    await world.apply(restore_document())
    await world.answer_well(world.open("run")[0])
    return world


async def test_a_process_is_placed_beside_the_loads_and_restored_after_their_commit() -> None:
    world = await waiting()
    (place,) = world.open("place")
    assert payload(place)["driver"] == "criu"
    assert len(world.open("load")) == 2
    for verb in ("load", "commit"):
        for order in world.open(verb):
            await world.answer_well(order)
    assert not world.open("restore")
    await world.answer_well(place)
    assert world.open("restore")
    await world.answer_all()
    assert (await world.restore("restored")).status.state is Restore.RESTORED


async def test_devices_that_load_longer_than_the_process_hold_it_up() -> None:
    world = await waiting()
    await world.answer_well(world.open("place")[0])
    assert not world.open("restore")
    await world.answer_all()
    assert (await world.restore("restored")).status.state is Restore.RESTORED
    assert [order.verb for order in world.orders.history].count("place") == 1


@pytest.mark.parametrize(
    ("driver", "verbs"),
    [("cooperative", AGENT_VERBS), ("criu", ()), ("criu", ("restore",))],
    ids=["a worker of its own", "an older agent", "an agent without the verb"],
)
async def test_no_process_is_placed_where_none_can_be(
    driver: Driver, verbs: tuple[str, ...]
) -> None:
    world = await waiting(driver, verbs)
    await world.answer_all()
    assert (await world.restore("restored")).status.state is Restore.RESTORED
    assert "place" not in {order.verb for order in world.orders.history}


async def test_a_load_that_failed_is_tried_again_when_the_process_is_placed() -> None:
    world = await waiting()
    first, second = world.open("load")
    await world.fail(first, "DeviceBusy", retryable=True)
    await world.answer_well(second)
    for drop in world.open("drop"):
        await world.answer_well(drop)
    # The process may be on its way still.
    assert not world.open("load")
    await world.answer_well(world.open("place")[0])
    assert [order.attempt for order in world.open("load")] == [2, 2]
    assert [order.attempt for order in world.open("place")] == [2]
    await world.answer_all()
    assert (await world.restore("restored")).status.state is Restore.RESTORED


async def test_a_process_that_cannot_be_placed_drops_what_was_loaded() -> None:
    world = await waiting()
    for load in world.open("load"):
        await world.answer_well(load)
    await world.fail(world.open("place")[0], "CriuFailed")
    assert len(world.open("drop")) == 2
    for drop in world.open("drop"):
        await world.answer_well(drop)
    status = (await world.restore("restored")).status
    assert status.state is Restore.FAILED
    assert status.failure is not None
    assert status.failure.reason == "CriuFailed"
    assert not world.open("restore")


async def test_nothing_is_tried_again_while_nobody_knows_what_became_of_the_process() -> None:
    world = await waiting()
    first, second = world.open("load")
    await world.fail(first, "DeviceBusy", retryable=True)
    await world.answer_well(second)
    for drop in world.open("drop"):
        await world.answer_well(drop)
    await world.advance(3600.0)
    status = (await world.restore("restored")).status
    assert status.state is Restore.FAILED
    assert not world.open("load")
