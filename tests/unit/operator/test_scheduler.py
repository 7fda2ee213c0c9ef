"""Where a pod is placed."""

from __future__ import annotations

import asyncio

import msgspec

from snapshot_operator.local.scheduler import Waiting, place
from snapshot_shared.objects.kubernetes import Node, NodeStatus, Pod
from snapshot_shared.objects.meta import Condition, ObjectMeta
from snapshot_shared.orders import SCHEMA_VERSION, PresenceDevice, VectorEntry
from tests.support import builders
from tests.support.objects import pod_template, presence
from tests.support.operator_world import World, world_of

MIB = 1024 * 1024
ONE_GPU = {"limits": {"nvidia.com/gpu": 1}}


def test_of_several_nodes_with_room_the_first_by_name_is_taken_whichever_came_first() -> None:
    async def run() -> str:
        world = World()
        await world.join(presence("node-2"))
        await world.join(presence("node-1"))
        document = {"kind": "Pod", "apiVersion": "v1", "metadata": {"name": "w"}, **pod_template()}
        await world.apply(document)
        placed = await world.get("Pod", "w")
        return str(placed.status.node_name)

    assert asyncio.run(run()) == "node-1"


def test_pods_of_several_shapes_that_come_together_share_no_device() -> None:
    async def run() -> list[str]:
        world = await world_of(1, gpus=2)
        documents = [
            {
                "kind": "Pod",
                "apiVersion": "v1",
                "metadata": {"name": f"w-{gpus}"},
                **pod_template(resources={"limits": {"nvidia.com/gpu": gpus}}),
            }
            for gpus in (1, 2)
        ]
        await world.apply(*documents)
        pods = [await world.get("Pod", f"w-{gpus}") for gpus in (1, 2)]
        assert [pod.status.reason for pod in pods] == ["", "Unschedulable"]
        return [device.uuid for pod in pods for device in pod.status.devices]

    assert asyncio.run(run()) == ["GPU-node-1-0"]


def test_a_pod_that_waits_names_every_node_that_it_admits_and_what_is_wrong_with_each() -> None:
    def gpu_of(node: str, size: int) -> Node:
        device = PresenceDevice(index=0, uuid=f"GPU-{node}", product="p", capacity_bytes=size)
        ready = Condition(type="Ready", status="True", reason="AgentPresent")
        status = NodeStatus(devices=[device], schemas=[SCHEMA_VERSION], conditions=[ready])
        return Node(metadata=ObjectMeta(name=node), status=status)

    pod = msgspec.convert(
        {"kind": "Pod", "metadata": {"name": "w"}, **pod_template(resources=ONE_GPU)}, type=Pod
    )
    layout = builders.layout(device="GPU-0", bytes=2 * MIB)
    vector = [VectorEntry(part="gpu-0", ordinal=0, layout=layout)]
    nodes = [gpu_of("node-1", 4 * MIB), gpu_of("node-small", MIB)]
    answer = place(pod, nodes, {"node-1": {"GPU-node-1"}}, vector)
    assert isinstance(answer, Waiting)
    busy, small = answer.message.split("; ")
    assert busy == "node-1 has 0 of 1 GPU free"
    assert "node-small" in small
