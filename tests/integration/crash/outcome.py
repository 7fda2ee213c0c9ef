"""What must hold once a fault is over, asked of real processes, files and messages."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from snapshot_agent.domain.control import QUIESCE
from snapshot_agent.domain.spec import CONTROL_DIR
from snapshotctl.adapters import processes
from tests.integration.crash.crash_cases import NODE, SUBJECT, is_of_base
from tests.support import rules
from tests.support.agent_rig import is_gone
from tests.support.live_cluster import SETTLE_S, LiveCluster, Session
from tests.support.waiting import until

FREE_S = 10.0
"""How long a worker may stay held once its service has returned, in seconds."""


@asynccontextmanager
async def case(cluster: LiveCluster) -> AsyncIterator[Session]:
    """A session of one case: its logs are shown when it fails, and what it made is removed."""
    async with cluster.session() as session:
        try:
            yield session
        except BaseException:
            print(cluster.logs())
            raise
        finally:
            await _tidy(session)


async def _tidy(session: Session) -> None:
    """Have everything of the case removed: that works after each crash, too."""
    await session.disarm(NODE)
    for kind in ("DynamoCheckpoint", "Pod"):
        await session.delete(kind, SUBJECT)
    values = await session.until(
        lambda found: all(map(is_of_base, found)), "the end of the case's objects"
    )
    assert await rules.damaged(session.cluster.artifacts, values) == []
    assert rules.workers(session.cluster.run) == {}


async def everything_settles_well(session: Session, within_s: float = SETTLE_S) -> None:
    """Every object is settled, each order has one outcome, and each artifact is whole."""
    values = await session.until(lambda found: not rules.unsettled(found), "settling", within_s)
    assert rules.doubled(session.reports) == []
    assert await rules.damaged(session.cluster.artifacts, values) == []


async def workers_are_free(
    session: Session, *, has_memory: bool = True, within_s: float = FREE_S
) -> None:
    """Each worker goes on, or has ended, within the time; a standby waits for its restore.

    To go on is to answer; where the memory went with its service (`has_memory` is False), it is to
    be let go by the agent, for the worker itself then waits for its memory.
    """
    for pid, pod_uid in rules.workers(session.cluster.run).items():
        environment = processes.environment_of(pid)
        if environment.get("SNAPSHOT_RESTORE_STANDBY") == "1":
            continue
        quiesce = Path(environment.get(CONTROL_DIR, "")) / QUIESCE
        try:
            async with asyncio.timeout(within_s):
                await until(lambda file=quiesce: not file.exists(), "letting go", within_s=within_s)
                if has_memory and not await session.answers(NODE, pod_uid):
                    await until(
                        lambda one=pid: is_gone(one), f"the end of worker {pid}", within_s=within_s
                    )
        except TimeoutError:
            raise AssertionError(f"worker {pid} is still held after {within_s} s") from None
    # The next attempt of the capture may have frozen one for a moment.
    run = session.cluster.run
    await until(lambda: not rules.frozen(run), "the thaw of all processes", within_s=within_s)
