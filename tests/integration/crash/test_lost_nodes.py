"""A node that falls silent in the middle of a capture, is given up, and returns."""

from __future__ import annotations

import pytest

from snapshot_shared.objects.kubernetes import Pod
from snapshot_shared.objects.meta import condition
from snapshot_shared.steps import Place
from tests.integration.crash.crash_cases import CAPTURE, NODE, SUBJECT
from tests.integration.crash.outcome import case, everything_settles_well
from tests.support import rules
from tests.support.live_cluster import LiveCluster, find

LOST_S = 200.0
"""Presence lives for 30 s; absence counts for 90 s, and is looked at every 30 s."""


@pytest.mark.slow
@pytest.mark.timeout(400)
async def test_a_capture_on_a_silent_node_waits_fails_with_the_node_and_leaves_nothing(
    cluster: LiveCluster,
) -> None:
    async with case(cluster) as session:
        service = cluster.process(f"{NODE}-agent")
        await session.arm(NODE, Place("agent", "dump", "copy-state"), "crash")
        await CAPTURE.then(session)
        await cluster.ended(service)
        await cluster.kill_node(NODE)
        assert rules.workers(cluster.run) == {}
        values = await session.until(
            lambda found: any(v.status.phase == "Unknown" for v in found if isinstance(v, Pod)),
            "the node's silence",
            LOST_S,
        )
        assert find(values, "DynamoCheckpoint", SUBJECT).status.phase == "Creating"
        await session.delete("Node", NODE)
        values = await session.until(
            lambda found: find(found, "DynamoCheckpoint", SUBJECT).status.phase == "Failed",
            "the failure",
        )
        failed = condition(find(values, "DynamoCheckpoint", SUBJECT).status.conditions, "Failed")
        assert failed is not None
        assert failed.reason == "NodeLost"
        await cluster.restart(NODE, "agent", "gms")
        await everything_settles_well(session)
