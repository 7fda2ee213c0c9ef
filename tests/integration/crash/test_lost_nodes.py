"""A node that is lost in the middle of a capture, for good as it seems, and its return."""

from __future__ import annotations

import pytest

from snapshot_shared.objects import condition
from snapshot_shared.steps import Place
from tests.integration.crash.crash_cases import CAPTURE, NODE, SUBJECT
from tests.integration.crash.outcome import case, everything_settles_well
from tests.support import rules
from tests.support.live_cluster import LiveCluster, find

LOST_S = 200.0
"""Presence lives for 30 s; absence counts for 90 s, and is looked at every 30 s."""


@pytest.mark.slow
@pytest.mark.timeout(400)
async def test_a_capture_on_a_lost_node_fails_and_its_return_leaves_nothing(
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
            lambda found: (
                (one := find(found, "DynamoCheckpoint", SUBJECT)) and one.status.phase == "Failed"
            ),
            "the failure",
            LOST_S,
        )
        failed = condition(find(values, "DynamoCheckpoint", SUBJECT).status.conditions, "Failed")
        assert failed is not None
        assert failed.reason == "NodeLost"
        await cluster.restart(NODE, "agent", "gms")
        await everything_settles_well(session)
