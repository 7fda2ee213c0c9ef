"""An agent that is killed and does not return: the guard lets the worker go."""

from __future__ import annotations

import pytest

from snapshot_shared.steps import STEPS, Place
from tests.integration.crash.crash_cases import CAPTURE, NODE
from tests.integration.crash.outcome import case, everything_settles_well, workers_are_free
from tests.support.live_cluster import LiveCluster

RETURN_S = 5.0
MARGIN_S = 3.0
GUARDED = [Place("agent", "prepare", step) for step in STEPS["prepare"][2:]] + [
    Place("agent", "dump", step) for step in STEPS["dump"]
]
"""The steps of which the worker may be held, from the quiesce on."""


def _case(place: Place) -> object:
    marks = () if place.step == "copy-state" else (pytest.mark.slow,)
    return pytest.param(place, id=f"{place.verb}-{place.step}", marks=marks)


@pytest.mark.parametrize("place", [_case(place) for place in GUARDED])
async def test_a_worker_whose_agent_stays_away_is_let_go_by_its_guard(
    cluster: LiveCluster, place: Place, turn: int
) -> None:
    async with case(cluster) as session:
        service = cluster.process(f"{NODE}-agent")
        await session.arm(NODE, place, "crash")
        await CAPTURE.then(session)
        await cluster.ended(service)
        await workers_are_free(session, within_s=RETURN_S + MARGIN_S)
        await cluster.restart(NODE, "agent")
        await everything_settles_well(session)
        await workers_are_free(session)
