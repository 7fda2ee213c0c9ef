"""SIGKILL of the operator in the middle of its work, at a change of an object chosen by number."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from snapshot_shared.errors import BusUnavailable
from tests.integration.crash.crash_cases import CAPTURE, RESTORE, STORIES, Story
from tests.integration.crash.outcome import case, everything_settles_well, workers_are_free
from tests.support.live_cluster import LiveCluster, Session

SETTLED_S = 20.0
"""How long an operator that was started again may take to bring all to an end, in seconds."""
NO_MORE_S = 2.0
"""How long a story without any further change is waited for, in seconds."""


def _cases() -> list[object]:
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


@pytest.mark.parametrize(("story", "changes"), _cases())
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
