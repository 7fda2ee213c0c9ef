"""A stream of orders that is nearly full takes nothing new, and all that cleans up."""

from __future__ import annotations

import pytest

from snapshot_operator.core.backpressure import is_full
from snapshot_shared.api import VerifyRequest
from snapshot_shared.errors import StoreBusy
from snapshot_shared.objects.kinds import AnyObject
from snapshot_shared.objects.meta import condition
from snapshot_shared.objects.snapback import SnapshotContent
from snapshot_shared.transitions import Capture, Restore
from tests.support.objects import checkpoint_document, restore_document
from tests.support.operator_world import World, world_of


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
    second = await world.get("DynamoCheckpoint", "second")
    ready = condition(second.status.conditions, "Ready")
    assert ready is not None
    assert ready.reason == "BusFull"
    await fill(world, 0.0)
    assert len(world.open("run")) == 2


async def test_a_capture_that_has_begun_goes_on_and_a_new_one_waits(world: World) -> None:
    await world.apply(checkpoint_document("first"), checkpoint_document("second"))
    first, second = world.open("run")
    await world.answer_well(first)
    await fill(world, 0.8)
    await world.answer_well(second)
    states = [c.status.capture for c in world.cluster.page("SnapshotContent")]
    assert sorted(states) == [Capture.PENDING, Capture.PREPARING]
    waiting = next(
        condition(content.status.conditions, "Ready")
        for content in world.cluster.page("SnapshotContent")
        if content.status.capture is Capture.PENDING
    )
    assert waiting is not None
    assert waiting.reason == "BusFull"
    await world.answer_all()
    states = [c.status.capture for c in world.cluster.page("SnapshotContent")]
    assert sorted(states) == [Capture.PENDING, Capture.READY]
    await fill(world, 0.0)
    await world.answer_all()
    states = [c.status.capture for c in world.cluster.page("SnapshotContent")]
    assert states == [Capture.READY] * 2


async def test_a_restore_waits_without_a_side_effect(world: World) -> None:
    await world.apply(checkpoint_document())
    await world.answer_all()
    await fill(world, 0.8)
    await world.apply(restore_document(node="node-2"))
    pod = await world.get("Pod", "restored")
    assert (pod.status.phase, pod.status.reason, pod.status.orders) == ("Pending", "BusFull", [])
    assert (await world.restore("restored")).status.orders == []
    await fill(world, 0.0)
    await world.answer_all()
    assert (await world.restore("restored")).status.state is Restore.RESTORED


async def test_a_restore_whose_pod_has_its_place_already_waits_too(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    await world.apply(checkpoint_document())
    await world.answer_all()
    update = world.store.update_status

    async def unregistered(value: AnyObject) -> AnyObject:
        if isinstance(value, SnapshotContent):
            raise StoreBusy("another process has the object store open and writes")
        found: AnyObject = await update(value)
        return found

    with monkeypatch.context() as patched:
        patched.setattr(world.store, "update_status", unregistered)
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
    await world.apply(checkpoint_document())
    await world.answer_all()
    await fill(world, 0.8)
    await world.api.verify(VerifyRequest(kind="Snapshot", name="llm"))
    await world.settle()
    assert not world.open("verify")
    found = condition((await world.content()).status.conditions, "Verified")
    assert found is not None
    assert found.reason == "BusFull"
    await fill(world, 0.0)
    assert world.open("verify")


async def test_what_cleans_up_goes_out_however_full_the_stream_is(world: World) -> None:
    await world.apply(checkpoint_document())
    await world.answer_well(world.open("run")[0])
    await world.answer_well(world.open("prepare")[0])
    await fill(world, 0.8)
    await world.fail(world.open("dump")[0], "NoSpace")
    assert len(world.open("abort")) == 2
    await world.cluster.delete(await world.get("DynamoCheckpoint", "llm"))
    await world.settle()
    await world.answer_all()
    verbs = {order.verb for order in world.orders.history}
    assert verbs >= {"abort", "stop", "drop", "delete"}
    assert not world.cluster.page("Pod")
