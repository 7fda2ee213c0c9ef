"""The sweep repairs what a publish could not do, and soon."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import pytest
from msgspec.structs import replace

from snapshot_operator.runtime.sweep import RETRY_S
from snapshot_shared.errors import BusUnavailable, StoreBusy
from tests.support.objects import checkpoint_document
from tests.support.operator_world import World, world_of
from tests.support.waiting import until


async def test_an_order_that_could_not_be_published_goes_out_with_the_next_try(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = await world_of(1)
    publish, failures = world.orders.publish, [BusUnavailable("no leader"), BusUnavailable("yet")]

    async def unreliably(order: Any) -> None:
        if failures:
            raise failures.pop()
        await publish(order)

    monkeypatch.setattr(world.orders, "publish", unreliably)
    sweep = asyncio.ensure_future(world.sweep.run(asyncio.Event(), world.retention.run))
    try:
        await world.apply(checkpoint_document())
        await until(lambda: world.open("run"), "the order", within_s=3 * RETRY_S + 2.0)
        assert not failures
    finally:
        sweep.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await sweep


async def captured_elsewhere() -> World:
    """Give a world with a running worker, whose stream has just become full."""
    world = await world_of(2)
    await world.apply(checkpoint_document())
    await world.answer_well(world.open("run")[0])
    await asyncio.sleep(0)
    return world


async def test_a_full_stream_is_rid_of_what_nobody_awaits_before_anything_is_published() -> None:
    world = await captured_elsewhere()
    (prepare,) = world.open("prepare")
    left = replace(prepare, order=prepare.order.replace("prepare", "dump"))
    world.orders.stream = {left.order: left}
    world.orders.most = 1
    await world.sweep.once()
    assert list(world.orders.stream) == [prepare.order]


async def test_what_cleans_up_is_published_before_other_orders_that_are_missing() -> None:
    world = await captured_elsewhere()
    await world.answer_well(world.open("prepare")[0])
    await world.cluster.delete(await world.get("DynamoCheckpoint", "llm"))
    await world.settle()
    aborts = {order.order for order in world.open("abort")}
    assert len(aborts) == 2
    world.orders.stream.clear()
    world.orders.most = len(aborts)
    with pytest.raises(BusUnavailable):
        await world.sweep.once()
    assert set(world.orders.stream) == aborts


async def test_an_order_that_is_answered_during_a_sweep_does_not_go_out_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = await captured_elsewhere()
    (prepare,) = world.open("prepare")
    world.orders.stream.clear()
    measure = world.orders.fill

    async def while_it_is_answered() -> float:
        await world.fail(prepare, "WorkerExited")
        return await measure()

    monkeypatch.setattr(world.orders, "fill", while_it_is_answered)
    await world.sweep.once()
    assert prepare.order not in world.orders.stream


async def test_the_first_sweep_has_every_unanswered_order_delivered_again_and_later_ones_none() -> (
    None
):
    world = await captured_elsewhere()
    (prepare,) = world.open("prepare")
    world.orders.history.clear()
    await world.sweep.once()
    assert [order.order for order in world.orders.history] == [prepare.order]
    await world.sweep.once()
    assert len(world.orders.history) == 1


async def test_an_owner_that_cannot_be_read_keeps_its_order_and_stops_nothing_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As after a rollback to a release that cannot decode one object."""
    world = await captured_elsewhere()
    (prepare,) = world.open("prepare")
    unread, gone = (f"00000000-0000-0000-0000-00000000000{n}" for n in (1, 2))
    left = [replace(prepare, order=f"prepare-{uid}") for uid in (unread, gone)]
    world.orders.stream = {order.order: order for order in left}
    world.orders.taken = 0.99
    find = world.store.find

    async def as_far_as_it_can(uid: str) -> Any:
        if uid == unread:
            raise StoreBusy("it is there and cannot be read by this version")
        return await find(uid)

    monkeypatch.setattr(world.store, "find", as_far_as_it_can)
    await world.sweep.once()
    assert set(world.orders.stream) == {left[0].order, prepare.order}
    assert world.sweep.fill > 0.99


async def test_orders_of_a_full_stream_are_delivered_again_before_what_does_not_fit() -> None:
    world = await captured_elsewhere()
    await world.answer_well(world.open("prepare")[0])
    dump, *saves = (*world.open("dump"), *world.open("save"))
    world.orders.stream = {saves[-1].order: saves[-1]}
    world.orders.history.clear()
    world.orders.most = 1
    with pytest.raises(BusUnavailable):
        await world.sweep.once()
    assert [order.order for order in world.orders.history] == [saves[-1].order]
    assert dump.order not in world.orders.stream
