"""The crash points, made from the step tables, and the story that leads to each."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import NamedTuple

from snapshot_operator.local.pods import holds_devices
from snapshot_shared.objects.kinds import KINDS, AnyObject
from snapshot_shared.objects.kubernetes import Pod
from snapshot_shared.objects.meta import is_true
from snapshot_shared.objects.snapback import SnapshotContent
from snapshot_shared.steps import STEPS, VERBS_OF, Place
from snapshotctl.domain.targets import Target
from tests.support import live_cluster as live
from tests.support import rules
from tests.support.live_cluster import Session, find

NODE = "node-1"
BASE = "base"
SUBJECT = "subject"
"""The name of what a case captures, restores, stops or deletes."""


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
    await session.until(
        lambda values: (
            (found := find(values, "DynamoCheckpoint", SUBJECT)) and found.status.phase == "Ready"
        ),
        "the capture",
    )


async def _run(session: Session) -> None:
    await session.apply(live.pod(SUBJECT, NODE))
    await session.until(
        lambda values: (
            (found := find(values, "Pod", SUBJECT)) and is_true(found.status.conditions, "Ready")
        ),
        "the worker's start",
    )


async def _restore(session: Session) -> None:
    await session.apply(live.pod(SUBJECT, NODE, BASE))


async def _stop(session: Session) -> None:
    await session.delete("Pod", SUBJECT)


async def _delete(session: Session) -> None:
    await session.delete("DynamoCheckpoint", SUBJECT)


async def _save_will_fail(session: Session) -> None:
    await session.arm(NODE, Place("gms", "save", "write"), "fail")


async def _verify(session: Session) -> None:
    await session.client.verify(Target(KINDS["DynamoCheckpoint"], "default", BASE))


class Story(NamedTuple):
    """What leads to a verb: what must be there before the fault is armed, and what is done then."""

    before: Deed
    then: Deed


CAPTURE = Story(_nothing, _capture)
RESTORE = Story(need_base, _restore)
STORIES: dict[str, Story] = {
    "run": CAPTURE,
    "prepare": CAPTURE,
    "dump": CAPTURE,
    "save": CAPTURE,
    "seal": CAPTURE,
    "release": CAPTURE,
    "load": RESTORE,
    "commit": RESTORE,
    "restore": RESTORE,
    "stop": Story(_run, _stop),
    "drop": Story(_run, _stop),
    "abort": Story(_save_will_fail, _capture),
    "delete": Story(_captured, _delete),
    "verify": Story(need_base, _verify),
}

PLACES: list[Place] = [
    Place(service, verb, step)
    for service, verbs in VERBS_OF.items()
    for verb in verbs
    if verb in STORIES
    for step in STEPS[verb]
]
"""Every step of a table, in every service that carries it out."""
