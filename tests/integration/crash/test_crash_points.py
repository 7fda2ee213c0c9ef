"""SIGKILL at every step of every step table, in real processes; then the rules of the product.

The cases are made from the tables. A few of them always run; all of them with
`make crash-points REPEAT=3`.
"""

from __future__ import annotations

import pytest

from snapshot_shared.objects.snapback import SnapshotContent
from snapshot_shared.steps import STEPS, Place
from tests.integration.crash.crash_cases import CAPTURE, NODE, PLACES, STORIES, SUBJECT
from tests.integration.crash.outcome import case, everything_settles_well, workers_are_free
from tests.support import rules
from tests.support.live_cluster import LiveCluster

ALWAYS = {
    Place("agent", "prepare", "quiesce"),
    Place("agent", "dump", "copy-state"),
    Place("agent", "seal", "write-root"),
    Place("agent", "restore", "fill-state"),
    Place("gms", "save", "write"),
    Place("gms", "abort", "compensate"),
}


def _case(place: Place) -> object:
    marks = () if place in ALWAYS else (pytest.mark.slow,)
    return pytest.param(place, id="-".join(place), marks=marks)


def test_every_step_of_every_table_has_a_story_that_leads_to_it() -> None:
    # A process is placed by CRIU alone; tests/process kills there.
    assert set(STORIES) == STEPS.keys() - {"place"}
    assert set(PLACES) >= ALWAYS


@pytest.mark.parametrize("place", [_case(place) for place in PLACES])
async def test_a_service_killed_at_a_step_leaves_nothing_half_doubled_or_frozen(
    cluster: LiveCluster, place: Place, turn: int
) -> None:
    story = STORIES[place.verb]
    async with case(cluster) as session:
        await story.before(session)
        service = cluster.process(f"{NODE}-{place.service}")
        await session.arm(NODE, place, "crash")
        await story.then(session)
        await cluster.ended(service)
        await cluster.restart(NODE, place.service)
        await workers_are_free(session, has_memory=place.service == "agent")
        await everything_settles_well(session)
        await workers_are_free(session, has_memory=place.service == "agent")
        if place.verb == "verify":
            await session.reported("verified")


@pytest.mark.slow
@pytest.mark.parametrize("step", STEPS["abort"])
async def test_an_agent_killed_while_it_undoes_a_deleted_capture_frees_the_worker(
    cluster: LiveCluster, step: str, turn: int
) -> None:
    async with case(cluster) as session:
        service = cluster.process(f"{NODE}-agent")
        await session.arm(NODE, Place("agent", "dump", "copy-state"), "stall")
        await session.arm(NODE, Place("agent", "abort", step), "crash")
        await CAPTURE.then(session)
        await session.until(
            lambda values: any(
                order.verb == "dump" and order.state == "accepted"
                for value in values
                if isinstance(value, SnapshotContent)
                for order in value.status.orders
            ),
            "the dump",
        )
        await session.delete("DynamoCheckpoint", SUBJECT)
        await cluster.ended(service)
        await cluster.restart(NODE, "agent")
        await workers_are_free(session)
        assert rules.doubled(session.reports) == []
