"""The crash points, made from the step tables, the story that leads to each, and its outcome."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NamedTuple

from snapshot_agent.domain.control import QUIESCE
from snapshot_agent.domain.spec import CONTROL_DIR
from snapshot_api.facts import Pod
from snapshot_api.kinds import KINDS, AnyObject
from snapshot_api.v1alpha1.content import SnapshotContent
from snapshot_operator.local.pods import holds_devices
from snapshot_shared.steps import STEPS, VERBS_OF, Place
from snapshotctl.adapters import processes
from snapshotctl.domain.targets import Target
from tests.support import live_cluster as live
from tests.support import rules
from tests.support.agent_rig import is_gone
from tests.support.live_cluster import SETTLE_S, LiveCluster, Session, find
from tests.support.waiting import until

NODE = "node-1"
BASE = "base"
SUBJECT = "subject"
"""The name of what a case captures, restores, stops or deletes."""


VERIFIED = Target(KINDS["DynamoCheckpoint"], "default", BASE)


def is_of_base(value: AnyObject) -> bool:
    """Say whether an object belongs to the artifact that all cases share."""
    if isinstance(value, SnapshotContent):
        return value.spec.snapshot_ref.name == BASE
    return value.metadata.name == BASE or value.metadata.name.startswith(f"{BASE}-")


Deed = Callable[[Session], Awaitable[None]]


async def _nothing(_session: Session) -> None:
    pass


async def need_base(session: Session) -> None:
    """Have an artifact that cases restore and check; the first that needs it makes it."""
    if find(await session.objects(), "DynamoCheckpoint", BASE) is None:
        await session.apply(live.checkpoint(BASE, NODE, "Terminate"))
    await session.until(
        lambda values: (
            (found := find(values, "DynamoCheckpoint", BASE))
            and found.status.phase == "Ready"
            and not rules.unsettled(values)
            and not any(holds_devices(value) for value in values if isinstance(value, Pod))
        ),
        "the base artifact",
    )


async def _capture(session: Session) -> None:
    await session.apply(live.checkpoint(SUBJECT, NODE))


async def _captured(session: Session) -> None:
    await _capture(session)
    await session.reaches("DynamoCheckpoint", SUBJECT, lambda it: it.status.phase == "Ready")


async def _run(session: Session) -> None:
    await session.apply(live.pod(SUBJECT, NODE))
    await session.reaches("Pod", SUBJECT)


class Story(NamedTuple):
    """What leads to a verb: what must be there before the fault is armed, and what is done then."""

    before: Deed
    then: Deed


CAPTURE = Story(_nothing, _capture)
RESTORE = Story(need_base, lambda session: session.apply(live.pod(SUBJECT, NODE, BASE)))
STOP = Story(_run, lambda session: session.delete("Pod", SUBJECT))
STORIES: dict[str, Story] = {
    **dict.fromkeys(["run", "prepare", "dump", "save", "seal", "release"], CAPTURE),
    **dict.fromkeys(["load", "commit", "restore"], RESTORE),
    **dict.fromkeys(["stop", "drop"], STOP),
    "abort": Story(
        lambda session: session.arm(NODE, Place("gms", "save", "write"), "fail"), _capture
    ),
    "delete": Story(_captured, lambda session: session.delete("DynamoCheckpoint", SUBJECT)),
    "verify": Story(need_base, lambda session: session.client.verify(VERIFIED)),
}

PLACES: list[Place] = [
    Place(service, verb, step)
    for service, verbs in VERBS_OF.items()
    for verb in verbs
    if verb in STORIES
    for step in STEPS[verb]
]
"""Every step of a table, in every service that carries it out."""


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
    damaged = await rules.damaged(session.cluster.artifacts, values)
    assert damaged == [], damaged
    assert rules.workers(session.cluster.run) == {}


async def everything_settles_well(session: Session, within_s: float = SETTLE_S) -> None:
    """Every object is settled, each order has one outcome, and each artifact is whole."""
    values = await session.until(lambda found: not rules.unsettled(found), "settling", within_s)
    assert rules.doubled(session.reports) == []
    damaged = await rules.damaged(session.cluster.artifacts, values)
    assert damaged == [], damaged


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
