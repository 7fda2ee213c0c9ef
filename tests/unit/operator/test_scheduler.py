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
