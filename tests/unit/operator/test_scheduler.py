"""Where a pod is placed."""

from __future__ import annotations

import asyncio

from tests.support.objects import pod_template, presence
from tests.support.operator_world import World


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
        world = World()
        await world.join(presence("node-1", gpus=2))
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
