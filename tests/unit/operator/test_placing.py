"""Where a pod is placed, and a process that its driver brings while the devices are loaded."""

from __future__ import annotations

import msgspec
import pytest
from msgspec.structs import replace

from snapshot_api.facts import Node, NodeStatus, Pod
from snapshot_api.meta import Condition, ObjectMeta
from snapshot_api.v1alpha1.content import SnapshotContent
from snapshot_operator.local.scheduler import Placement, Waiting, place
from snapshot_shared.errors import Failure
from snapshot_shared.orders import (
    SCHEMA_VERSION,
    DeviceRef,
    Driver,
    PresenceDevice,
    VectorEntry,
)
from snapshot_shared.steps import AGENT_VERBS
from snapshot_shared.transitions import Restore
from tests.support import builders
from tests.support.builders import with_spec, with_status
from tests.support.objects import pod_document, presence, restore_document
from tests.support.operator_world import World, payload, world_of

DRIVERS: list[Driver] = ["cooperative", "criu"]


async def waiting(driver: Driver = "criu", verbs: tuple[str, ...] = AGENT_VERBS) -> World:
    """A worker was captured with a driver, and a placeholder waits for it."""
    world = World()
    nodes = (presence("node-1"), presence("node-2"))
    await world.join(*(replace(node, drivers=DRIVERS, verbs=list(verbs)) for node in nodes))
    await world.capture(driver=driver)
    await world.apply(restore_document())
    await world.answer("run")
    return world


async def test_a_process_is_placed_beside_the_loads_and_restored_after_their_commit() -> None:
    world = await waiting()
    (place,) = world.open("place")
    assert payload(place)["driver"] == "criu"
    assert len(world.open("load")) == 2
    await world.answer("load", "commit")
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


async def busy_device() -> World:
    """A worker of which a device could not be loaded now, and what was loaded is dropped."""
    world = await waiting()
    first, second = world.open("load")
    await world.fail(first, "DeviceBusy", retryable=True)
    await world.answer_well(second)
    await world.answer("drop")
    return world


async def test_a_load_that_failed_is_tried_again_when_the_process_is_placed() -> None:
    world = await busy_device()
    # The process may be on its way still.
    assert not world.open("load")
    await world.answer_well(world.open("place")[0])
    assert not world.open("load")
    await world.advance(1.0)
    assert [order.attempt for order in world.open("load")] == [2, 2]
    assert [order.attempt for order in world.open("place")] == [2]
    await world.answer_all()
    assert (await world.restore("restored")).status.state is Restore.RESTORED


async def test_a_process_that_cannot_be_placed_drops_what_was_loaded() -> None:
    world = await waiting()
    await world.answer("load")
    await world.fail(world.open("place")[0], "CriuFailed")
    assert len(world.open("drop")) == 2
    await world.answer("drop")
    status = (await world.restore("restored")).status
    assert (status.state, status.failure.reason) == (Restore.FAILED, "CriuFailed")
    assert not world.open("restore")


async def test_nothing_is_tried_again_while_nobody_knows_what_became_of_the_process() -> None:
    world = await busy_device()
    await world.advance(3600.0)
    status = (await world.restore("restored")).status
    assert status.state is Restore.FAILED
    assert not world.open("load")


MIB = 1024 * 1024


async def test_of_several_nodes_with_room_the_first_by_name_is_taken_whichever_came_first() -> None:
    world = World()
    await world.join(presence("node-2"))
    await world.join(presence("node-1"))
    await world.apply(pod_document("w"))
    assert (await world.get("Pod", "w")).status.node_name == "node-1"


async def test_pods_of_several_shapes_that_come_together_share_no_device() -> None:
    world = await world_of(1, gpus=2)
    await world.apply(*(pod_document(f"w-{gpus}", gpus=gpus) for gpus in (1, 2)))
    placed, waiting = [(await world.get("Pod", name)).status for name in ("w-1", "w-2")]
    assert (placed.reason, waiting.reason) == ("", "Unschedulable")
    assert [device.uuid for device in placed.devices] == ["GPU-node-1-0"]
    assert waiting.devices == []


def gpu_of(node: str, size: int) -> Node:
    device = PresenceDevice(index=0, uuid=f"GPU-{node}", product="p", capacity_bytes=size)
    ready = Condition(type="Ready", status="True", reason="AgentPresent")
    status = NodeStatus(devices=[device], schemas=[SCHEMA_VERSION], conditions=[ready])
    return Node(metadata=ObjectMeta(name=node), status=status)


@pytest.mark.parametrize(
    ("had", "asked", "fits"), [(1, 1, True), (1, 0, False), (2, 1, False), (0, 1, True)]
)
def test_a_process_that_brings_its_devices_gets_as_many_as_its_source_had(
    had: int, asked: int, *, fits: bool
) -> None:
    """An artifact that was imported has none here, and the node compares them."""
    pod = msgspec.convert(pod_document("w", gpus=asked), Pod)
    content = builders.content(committed=builders.committed(driver="criu+cuda"))
    devices = [DeviceRef(ordinal=n, uuid=f"GPU-{n}") for n in range(had)]
    content = with_spec(content, source=replace(content.spec.source, devices=devices))
    answer = place(pod, [gpu_of("node-1", MIB)], {}, content)
    assert isinstance(answer, Placement) == fits
    if not fits:
        assert isinstance(answer, Failure)
        assert answer.values == {"snapshot_gpus": had, "pod_gpus": asked}


def needing(size: int) -> SnapshotContent:
    """Return a content with one device of a size in bytes."""
    layout = builders.layout(device="GPU-0", bytes=size)
    vector = [VectorEntry(part="gpu-0", ordinal=0, layout=layout)]
    return builders.content(committed=builders.committed(vector=vector))


def test_a_smaller_device_of_a_node_neither_refuses_a_pod_nor_is_given_to_it() -> None:
    pod = msgspec.convert(pod_document("w", gpus=1), Pod)
    node = gpu_of("node-1", MIB)
    large = replace(node.status.devices[0], uuid="GPU-large", index=1, capacity_bytes=4 * MIB)
    node = with_status(node, devices=[*node.status.devices, large])
    answer = place(pod, [node], {}, needing(2 * MIB))
    assert answer == Placement("node-1", [DeviceRef(ordinal=0, uuid="GPU-large")])
    answer = place(pod, [node], {"node-1": {"GPU-large"}}, needing(2 * MIB))
    assert isinstance(answer, Waiting)
    assert "node-1 has 1 of 2 GPUs free, of which 0 fit" in answer.message
    answer = place(pod, [node], {}, needing(8 * MIB))
    assert isinstance(answer, Failure)
    assert (answer.reason, answer.values["capacity"]) == ("DeviceTooSmall", 4 * MIB)


def test_a_node_that_has_announced_no_devices_yet_is_waited_for() -> None:
    pod = msgspec.convert(pod_document("w", gpus=1), Pod)
    node = with_status(gpu_of("node-1", MIB), devices=[])
    assert isinstance(place(pod, [node], {}, needing(MIB)), Waiting)


def test_a_pod_that_waits_names_every_node_that_it_admits_and_what_is_wrong_with_each() -> None:
    pod = msgspec.convert(pod_document("w", gpus=1), Pod)
    nodes = [gpu_of("node-1", 4 * MIB), gpu_of("node-small", MIB)]
    answer = place(pod, nodes, {"node-1": {"GPU-node-1"}}, needing(2 * MIB))
    assert isinstance(answer, Waiting)
    busy, small = answer.message.split("; ")
    assert busy == "node-1 has 0 of 1 GPU free, the pod asks for 1"
    assert "node-small" in small
