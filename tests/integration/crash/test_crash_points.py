"""SIGKILL of real processes, of a service at every step of every table; then the rules hold.

The cases are made from the tables. A few of them always run; all of them with
`make crash-points REPEAT=3`.
"""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from snapshot_api.facts import Pod
from snapshot_api.meta import condition
from snapshot_api.v1alpha1.content import SnapshotContent
from snapshot_shared.errors import BusUnavailable
from snapshot_shared.steps import STEPS, Place
from tests.integration.crash.crash_cases import (
    CAPTURE,
    NODE,
    PLACES,
    RESTORE,
    STORIES,
    SUBJECT,
    Story,
    case,
    everything_settles_well,
    workers_are_free,
)
from tests.support import rules
from tests.support.live_cluster import LiveCluster, Session, find

ALWAYS = {
    Place("agent", "prepare", "quiesce"),
    Place("agent", "dump", "copy-state"),
    Place("agent", "seal", "write-root"),
    Place("agent", "restore", "fill-state"),
    Place("gms", "save", "write"),
    Place("gms", "abort", "compensate"),
}


def _cases(places: list[Place], always: set[Place]) -> list[object]:
    return [
        pytest.param(place, id="-".join(place), marks=() if place in always else pytest.mark.slow)
        for place in places
    ]


def test_every_step_of_every_table_has_a_story_that_leads_to_it() -> None:
    # A process is placed by CRIU alone; tests/process kills there.
    assert set(STORIES) == STEPS.keys() - {"place"}
    assert set(PLACES) >= ALWAYS


@pytest.mark.parametrize("place", _cases(PLACES, ALWAYS))
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


RETURN_S = 5.0
MARGIN_S = 3.0
GUARDED = [Place("agent", "prepare", step) for step in STEPS["prepare"][2:]] + [
    Place("agent", "dump", step) for step in STEPS["dump"]
]
"""The steps of which the worker may be held, from the quiesce on."""


@pytest.mark.parametrize("place", _cases(GUARDED, {Place("agent", "dump", "copy-state")}))
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


SETTLED_S = 20.0
"""How long an operator that was started again may take to bring all to an end, in seconds."""
NO_MORE_S = 2.0
"""How long a story without any further change is waited for, in seconds."""


def _moments() -> list[object]:
    moments = [
        *(("capture", CAPTURE, after) for after in range(1, 32, 3)),
        *(("restore", RESTORE, after) for after in range(1, 20, 3)),
        *(("delete", STORIES["delete"], after) for after in range(1, 16, 3)),
    ]
    return [
        pytest.param(
            story,
            after,
            id=f"{name}-{after}",
            marks=() if (name, after) == ("capture", 13) else pytest.mark.slow,
        )
        for name, story, after in moments
    ]


@pytest.mark.parametrize(("story", "changes"), _moments())
async def test_an_operator_killed_after_some_changes_goes_on_where_it_was(
    cluster: LiveCluster, story: Story, changes: int, turn: int
) -> None:
    async with case(cluster) as session:
        await story.before(session)
        session.forget_events()
        killing = asyncio.ensure_future(_kill_after(session, changes))
        with contextlib.suppress(BusUnavailable):
            await story.then(session)
        await killing
        cluster.start_operator()
        await session.until(lambda _: True, "an answer")
        # As a user does who got no answer: to wish the same once more changes nothing.
        await story.then(session)
        await everything_settles_well(session, within_s=SETTLED_S)
        await workers_are_free(session)


async def _kill_after(session: Session, changes: int) -> None:
    with contextlib.suppress(TimeoutError):
        for _ in range(changes):
            async with asyncio.timeout(NO_MORE_S):
                await session.event()
    await session.cluster.kill("operator")
