"""The sweep repairs what a publish could not do; a stream that is nearly full takes nothing new."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import pytest
from msgspec.structs import replace

from snapshot_api.v1alpha1.content import SnapshotContent
from snapshot_operator.core.backpressure import is_full
from snapshot_operator.runtime.sweep import RETRY_S
from snapshot_shared.errors import BusUnavailable, StoreBusy
from snapshot_shared.transitions import Capture, Restore
from tests.support.objects import checkpoint_document, restore_document
from tests.support.operator_world import World, row_of, world_of
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


async def test_a_full_stream_is_rid_of_what_nobody_awaits_before_anything_is_published() -> None:
    world = await world_of(2, answered=("run",))
    (prepare,) = world.open("prepare")
    left = replace(prepare, order=prepare.order.replace("prepare", "dump"))
    world.orders.stream = {left.order: left}
    world.orders.most = 1
    await world.sweep.once()
    assert list(world.orders.stream) == [prepare.order]


async def test_what_cleans_up_is_published_before_other_orders_that_are_missing() -> None:
    world = await world_of(2, answered=("run",))
    await world.answer("prepare")
    await world.delete("DynamoCheckpoint", "llm")
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
    world = await world_of(2, answered=("run",))
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
    world = await world_of(2, answered=("run",))
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
    world = await world_of(2, answered=("run",))
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
    world = await world_of(2, answered=("run",))
    await world.answer("prepare")
    dump, *saves = (*world.open("dump"), *world.open("save"))
    world.orders.stream = {saves[-1].order: saves[-1]}
    world.orders.history.clear()
    world.orders.most = 1
    with pytest.raises(BusUnavailable):
        await world.sweep.once()
    assert [order.order for order in world.orders.history] == [saves[-1].order]
    assert dump.order not in world.orders.stream


@pytest.fixture
async def world() -> World:
    return await world_of(3)


async def fill(world: World, share: float) -> None:
    """Have the next sweep see a stream that is as full as that."""
    world.orders.taken = share
    await world.sweep.once()
    await world.settle()


@pytest.mark.parametrize(
    ("taken", "full"), [(0.0, False), (0.79, False), (0.8, True), (0.81, True), (1.0, True)]
)
def test_nothing_new_begins_from_80_percent_on(taken: float, full: bool) -> None:
    assert is_full(taken) is full


async def test_a_pod_waits_with_a_reason_and_starts_when_there_is_room(world: World) -> None:
    await world.apply(checkpoint_document("first"))
    await fill(world, 0.8)
    await world.apply(checkpoint_document("second"))
    assert len(world.open("run")) == 1
    assert (await world.row("DynamoCheckpoint", "second")).reason == "BusFull"
    await fill(world, 0.0)
    assert len(world.open("run")) == 2


def captures(world: World) -> list[Capture]:
    return sorted(value.status.capture for value in world.cluster.page("SnapshotContent"))


async def test_a_capture_that_has_begun_goes_on_and_a_new_one_waits(world: World) -> None:
    await world.apply(checkpoint_document("first"), checkpoint_document("second"))
    first, second = world.open("run")
    await world.answer_well(first)
    await fill(world, 0.8)
    await world.answer_well(second)
    contents: list[Any] = world.cluster.page("SnapshotContent")
    under_way, waiting = sorted(contents, key=lambda content: content.status.capture, reverse=True)
    assert under_way.status.capture is Capture.PREPARING
    assert waiting.status.capture is Capture.PENDING
    assert row_of(waiting).reason == "BusFull"
    await world.answer_all()
    assert captures(world) == [Capture.PENDING, Capture.READY]
    await fill(world, 0.0)
    await world.answer_all()
    assert captures(world) == [Capture.READY] * 2


async def test_a_restore_waits_without_a_side_effect(world: World) -> None:
    await world.capture()
    await fill(world, 0.8)
    await world.apply(restore_document(node="node-2"))
    pod = await world.get("Pod", "restored")
    assert (pod.status.phase, pod.status.reason, pod.status.orders) == ("Pending", "BusFull", [])
    assert (await world.restore("restored")).status.orders == []
    await fill(world, 0.0)
    await world.answer_all()
    assert (await world.restore("restored")).status.state is Restore.RESTORED


async def test_a_restore_whose_pod_has_its_place_already_waits_too(world: World) -> None:
    await world.capture()
    with world.refusing_status(lambda value: isinstance(value, SnapshotContent)):
        await world.apply(restore_document(node="node-2"))
    await fill(world, 0.8)
    await world.advance(1.0)
    restore = await world.restore("restored")
    assert (await world.content()).status.readers == [restore.metadata.uid]
    assert restore.status.conditions[0].reason == "BusFull"
    assert not world.open("load")
    await fill(world, 0.0)
    assert len(world.open("load")) == 2


async def test_a_verification_waits(world: World) -> None:
    await world.capture()
    await fill(world, 0.8)
    await world.verify("Snapshot")
    assert not world.open("verify")
    found = row_of(await world.content(), "Verified")
    assert found.reason == "BusFull"
    await fill(world, 0.0)
    assert world.open("verify")


async def test_what_cleans_up_goes_out_however_full_the_stream_is(world: World) -> None:
    await world.apply(checkpoint_document())
    await world.answer("run", "prepare")
    await fill(world, 0.8)
    await world.fail(world.open("dump")[0], "NoSpace")
    assert len(world.open("abort")) == 2
    await world.remove("DynamoCheckpoint", "llm")
    verbs = {order.verb for order in world.orders.history}
    assert verbs >= {"abort", "stop", "drop", "delete"}
    assert not world.cluster.page("Pod")
