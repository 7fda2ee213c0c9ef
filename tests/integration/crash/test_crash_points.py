"""SIGKILL at every step of every step table, in real processes; then the rules of the product.

The cases are made from the tables. A few of them always run; all of them with
`make crash-points REPEAT=3`.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator

import pytest

from snapshot_shared.steps import STEPS, Place
from tests.integration.crash.crash_cases import NODE, PLACES, STORIES, SUBJECT, is_of_base
from tests.support import rules
from tests.support.agent_rig import is_gone, until
from tests.support.live_cluster import LiveCluster, Session, find

FREE_S = 10.0
"""How long a worker may stay held once the service has returned, in seconds."""

REPEAT = int(os.environ.get("CRASH_REPEAT", "1"))
ALWAYS = {
    Place("agent", "prepare", "quiesce"),
    Place("agent", "dump", "freeze"),
    Place("agent", "seal", "write-root"),
    Place("agent", "restore", "fill-state"),
    Place("gms", "load", "read"),
}


def _case(place: Place, turn: int) -> object:
    marks = () if place in ALWAYS and turn == 0 else (pytest.mark.slow,)
    name = f"{place.service}-{place.verb}-{place.step}" + (f"-{turn}" if turn else "")
    return pytest.param(place, id=name, marks=marks)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveCluster]:
    """One cluster for all cases; what it leaves behind is looked for at its end."""
    found = LiveCluster(tmp_path_factory.mktemp("crash"))
    asyncio.run(found.up(NODE))
    yield found
    assert asyncio.run(found.down()) == []


def test_every_step_of_every_table_has_a_story_that_leads_to_it() -> None:
    assert set(STORIES) == set(STEPS)
    assert {(place.verb, place.step) for place in PLACES} == {
        (verb, step) for verb, steps in STEPS.items() for step in steps
    }
    assert set(PLACES) >= ALWAYS


@pytest.mark.timeout(240)
@pytest.mark.parametrize("place", [_case(p, turn) for turn in range(REPEAT) for p in PLACES])
async def test_a_service_killed_at_a_step_leaves_nothing_half_doubled_or_frozen(
    cluster: LiveCluster, place: Place
) -> None:
    story = STORIES[place.verb]
    async with cluster.session() as session:
        try:
            await story.before(session)
            service = cluster.process(f"{NODE}-{place.service}")
            await session.arm(NODE, place, "crash")
            await story.then(session)
            await cluster.ended(service)
            await cluster.restart(NODE, place.service)
            await _workers_are_free(session)
            await _everything_holds(session, place)
        except BaseException:
            print(cluster.logs())
            raise
        finally:
            await _tidy(session)


async def _workers_are_free(session: Session, within_s: float = FREE_S) -> None:
    """Each worker answers, or has ended, within the time; a standby waits for its restore."""
    workers = rules.workers(session.cluster.run)
    await asyncio.gather(
        *(
            _is_free(session, pid, pod_uid, within_s)
            for pid, pod_uid in workers.items()
            if not _is_standby(pid)
        )
    )
    assert rules.frozen(session.cluster.run) == []


async def _is_free(session: Session, pid: int, pod_uid: str, within_s: float) -> None:
    try:
        async with asyncio.timeout(within_s):
            if not await session.answers(NODE, pod_uid):
                await until(lambda: is_gone(pid), f"the end of worker {pid}", within_s)
    except TimeoutError:
        raise AssertionError(f"worker {pid} is still held after {within_s} s") from None


def _is_standby(pid: int) -> bool:
    return rules.environment(pid).get("SNAPSHOT_RESTORE_STANDBY") == "1"


async def _everything_holds(session: Session, place: Place) -> None:
    values = await session.until(lambda found: not rules.unsettled(found), "settling")
    if place.verb == "verify":
        kinds = {report.kind for report in session.reports if report.order.startswith("verify-")}
        assert "verified" in kinds
    if find(values, "Pod", SUBJECT) is not None and place.verb != "run":
        await _workers_are_free(session)
    assert rules.doubled(session.reports) == []
    assert await rules.damaged(session.cluster.artifacts, values) == []


async def _tidy(session: Session) -> None:
    """Have everything of the case removed: that works after each crash, too."""
    await session.disarm(NODE)
    for kind in ("DynamoCheckpoint", "Pod"):
        await session.delete(kind, SUBJECT)
    values = await session.until(
        lambda found: all(map(is_of_base, found)),
        "the end of the case's objects",
    )
    assert await rules.damaged(session.cluster.artifacts, values) == []
    kept = {value.metadata.uid for value in values}
    assert {uid for uid in rules.workers(session.cluster.run).values() if uid not in kept} == set()

