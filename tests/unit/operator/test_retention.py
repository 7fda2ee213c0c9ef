"""What is let go when a namespace holds more than it may, and what never is."""

from __future__ import annotations

import logging
from typing import Any

import msgspec
import pytest

from snapshot_api.facts import Pod
from snapshot_api.meta import OwnerReference
from snapshot_api.v1alpha1.checkpoint import DynamoCheckpoint
from snapshot_api.v1alpha1.content import SnapshotContent
from snapshot_api.v1alpha1.snapshot import Snapshot, SnapshotSource
from snapshot_operator.core.conditions import timestamp
from snapshot_operator.core.restore import restore_for
from snapshot_operator.core.retention import DAY_S, Decision, Holdings, Limits, judged
from snapshot_operator.main import OperatorSettings
from snapshot_shared.api import RetentionRequest
from snapshot_shared.ids import derived_uid
from snapshot_shared.settings import load
from snapshot_shared.transitions import Capture, Restore
from tests.support import builders
from tests.support.builders import with_meta, with_spec, with_status
from tests.support.objects import (
    checkpoint,
    pod_document,
    presence,
    restore_document,
    snapshot_document,
)
from tests.support.operator_world import World
from tests.unit.tables import each

NOW = 10_000_000.0
SIZE = 100


def content_of(name: str, namespace: str, pod: str, age_days: float) -> SnapshotContent:
    committed = builders.committed(bytes=SIZE)
    found = builders.content(
        name, namespace=namespace, of=pod, capture=Capture.READY, attempt=1, committed=committed
    )
    return with_meta(
        found,
        name=f"content-{namespace}-{name}",
        uid=derived_uid("content", namespace, name),
        creation_timestamp=timestamp(NOW - age_days * DAY_S),
    )


def snapshot_of(content: SnapshotContent) -> Snapshot:
    name, namespace = content.spec.snapshot_ref.name, content.spec.snapshot_ref.namespace
    found = builders.snapshot(name, bound_snapshot_content_name=content.metadata.name)
    source = SnapshotSource(pod_ref=content.spec.source.pod_ref)
    return with_spec(with_meta(found, namespace=namespace), source=source)


def holdings(found: list[SnapshotContent], *pods: Pod) -> Holdings:
    return Holdings([], [snapshot_of(content) for content in found], found, pods)


def contents(*names: str, pod: str = "worker", namespace: str = "default") -> list[SnapshotContent]:
    """Give contents of one pod, the first ten days older than the second, and so on."""
    ages = range(10 * len(names), 0, -10)
    return [content_of(name, namespace, pod, age) for name, age in zip(names, ages, strict=True)]


def let_go(holdings: Holdings, limits: Limits) -> list[Decision]:
    return [verdict for verdict in judged(holdings, limits, NOW) if verdict.goes]


def names_of(gone: list[Decision]) -> list[str]:
    return [item.value.metadata.name for item in gone]


def chosen(
    found: list[SnapshotContent], limits: Limits, *pods: Pod, state: Restore | None = None
) -> list[str]:
    """Return what goes; each of the pods has a restore in a state, if one is given."""
    restores = [with_status(restore_for(pod), state=state) for pod in pods if state is not None]
    return names_of(let_go(holdings(found, *pods)._replace(restores=restores), limits))


@each(
    ("limits", "expected"),
    [
        (Limits(), []),
        (Limits(count=4), []),
        (Limits(count=3), ["a"]),
        (Limits(count=2), ["a", "b"]),
        (Limits(count=1), ["a", "b", "c"]),
        (Limits(days=40.0), []),
        (Limits(days=25.0), ["a", "b"]),
        (Limits(days=1.0), ["a", "b", "c"]),
        (Limits(bytes=400), []),
        (Limits(bytes=399), ["a"]),
        (Limits(bytes=150), ["a", "b", "c"]),
        (Limits(count=3, days=25.0), ["a", "b"]),
        (Limits(count=2, bytes=350), ["a", "b"]),
    ],
)
def test_the_oldest_are_let_go_until_every_limit_is_kept_but_never_the_newest(
    limits: Limits, expected: list[str]
) -> None:
    assert chosen(contents("a", "b", "c", "d"), limits) == expected


def test_each_namespace_has_limits_of_its_own() -> None:
    found = contents("a", "b") + contents("a", "b", "c", namespace="other")
    (gone,) = let_go(holdings(found), Limits(count=2))
    assert (gone.value.metadata.namespace, gone.value.metadata.name) == ("other", "a")


def test_the_newest_of_every_identity_stays() -> None:
    found = contents("a", "b") + contents("x", pod="another")
    assert chosen(found, Limits(count=1)) == ["a"]


def test_revisions_of_one_name_are_one_identity_whatever_pods_they_are_of() -> None:
    found = contents("a", "b") + contents("c", pod="another")
    held = holdings(found)
    revisions = [with_spec(each, revision_of="llm") for each in held.snapshots]
    assert names_of(let_go(held._replace(snapshots=revisions), Limits(count=1))) == ["a", "b"]


QUARANTINED = [builders.row("Quarantined", "True", "r")]
OPEN_RELEASE = builders.order("release", "x")


@each(
    ("change", "why"),
    [
        ({}, "the namespace holds 3 artifacts, the limit is 2"),
        ({"readers": ["x", "y"]}, "it is being restored by 2 pods"),
        ({"orders": [OPEN_RELEASE]}, "its capture or a verification is under way"),
        ({"verifications": 1}, "its capture or a verification is under way"),
        ({"conditions": QUARANTINED}, "it is in quarantine"),
    ],
)
def test_what_is_read_busy_or_quarantined_stays_and_the_next_goes(
    change: dict[str, Any], why: str
) -> None:
    oldest, *others = contents("a", "b", "c")
    found = [with_status(oldest, **change), *others]
    first, _, last = judged(holdings(found), Limits(count=2), NOW)
    assert (first.content, first.why) == (found[0], why)
    assert (last.goes, last.why) == (False, "it is the newest usable one of its identity")
    assert chosen(found, Limits(count=2)) == ["b" if change else "a"]


def test_what_is_to_be_retained_stays() -> None:
    oldest, *others = contents("a", "b", "c")
    kept = with_spec(oldest, deletion_policy="Retain")
    assert chosen([kept, *others], Limits(count=1)) == ["b"]


def test_a_quarantined_one_is_not_the_newest_that_is_kept_for_an_identity() -> None:
    *others, newest = contents("a", "b", "c")
    spoiled = with_status(newest, conditions=QUARANTINED)
    assert chosen([*others, spoiled], Limits(count=1)) == ["a"]


def test_what_is_being_captured_or_deleted_is_not_counted() -> None:
    a, b, c = contents("a", "b", "c")
    staging = with_status(c, capture=Capture.STAGING, committed=None)
    going = with_meta(a, deletion_timestamp=timestamp(NOW))
    assert chosen([going, b, staging], Limits(count=1)) == []


def test_within_the_limits_everything_stays_for_that_reason() -> None:
    found = contents("a", "b")
    first, _ = judged(holdings(found), Limits(), NOW)
    assert (first.goes, first.why) == (False, "it is within the limits")


def asking(source: str, **status: Any) -> Pod:
    pod = with_meta(msgspec.convert(restore_document(source), Pod), uid=derived_uid("pod", source))
    return with_status(pod, **status)


@each(
    ("pod", "state", "expected"),
    [
        (asking("a"), None, []),
        (asking("b"), None, ["a"]),
        (asking("a"), Restore.LOADING, []),
        (asking("a"), Restore.RESTORED, ["a"]),
        (asking("a", phase="Failed"), None, ["a"]),
    ],
)
def test_what_a_pod_asks_for_stays_until_it_has_it(
    pod: Pod, state: Restore | None, expected: list[str]
) -> None:
    assert chosen(contents("a", "b"), Limits(count=1), pod, state=state) == expected


def owned(name: str, content: SnapshotContent) -> tuple[DynamoCheckpoint, Snapshot]:
    uid = derived_uid("checkpoint", name)
    value = with_meta(checkpoint(name, model="example/one"), uid=uid)
    owner = OwnerReference(
        api_version="nvidia.com/v1alpha1", kind="DynamoCheckpoint", name=name, uid=uid
    )
    return value, with_meta(snapshot_of(content), owner_references=[owner])


@each(("phase", "expected"), [("Running", []), ("Succeeded", ["a"])])
def test_a_checkpoint_goes_as_a_whole_and_not_before_its_worker_has_ended(
    phase: str, expected: list[str]
) -> None:
    found = [*contents("a", pod="pod-a"), *contents("b", pod="pod-b")]
    found[1] = with_meta(found[1], creation_timestamp=timestamp(NOW))
    pairs = [owned(content.spec.snapshot_ref.name, content) for content in found]
    worker = with_meta(asking("none", phase=phase), uid=derived_uid("pod", "pod-a"))
    held = Holdings([c for c, _ in pairs], [s for _, s in pairs], found, [worker])
    gone = let_go(held, Limits(count=1))
    assert names_of(gone) == expected
    assert all(isinstance(item.value, DynamoCheckpoint) for item in gone)


def test_a_snapshot_with_the_name_of_a_checkpoint_that_is_not_its_own_goes_by_itself() -> None:
    found = contents("a", "b")
    held = holdings(found)._replace(checkpoints=[checkpoint("a", model="example/one")])
    assert [item.value for item in let_go(held, Limits(count=1))] == [snapshot_of(found[0])]


def test_an_artifact_stays_while_a_pod_asks_for_a_checkpoint_that_shares_it() -> None:
    found = contents("a", "b")
    pairs = [owned(content.spec.snapshot_ref.name, content) for content in found]
    sharer = with_meta(pairs[0][0], name="sharer")
    sharer = with_status(sharer, shares="a", content_name=found[0].metadata.name)
    checkpoints = [sharer, *(c for c, _ in pairs)]
    snapshots = [s for _, s in pairs]
    for source, expected in (("other", ["a"]), ("sharer", [])):
        held = Holdings(checkpoints, snapshots, found, [asking(source)])
        assert names_of(let_go(held, Limits(count=1))) == expected
    # The status of a checkpoint in another namespace names the content, too.
    checkpoints[0] = with_meta(sharer, namespace="another")
    held = Holdings(checkpoints, snapshots, found, [asking("sharer")])
    assert names_of(let_go(held, Limits(count=1))) == ["a"]


async def captured_twice() -> World:
    """Return a world that may keep one artifact, with two of one pod."""
    world = World(Limits(count=1))
    await world.join(presence("node-1"))
    await world.apply(pod_document("worker"))
    for name in ("old", "new"):
        await world.perform(snapshot_document(name, "worker"))
        world.now += 60
    return world


async def test_a_snapshot_over_the_limit_is_deleted_with_its_artifact_and_the_log_says_why(
    caplog: pytest.LogCaptureFixture,
) -> None:
    world = await captured_twice()
    with caplog.at_level(logging.WARNING):
        await world.retention.run()
    assert "Snapshot default/old: the namespace holds 2 artifacts" in caplog.text
    await world.settle()
    await world.answer_all()
    assert [c.metadata.name for c in world.cluster.page("Snapshot")] == ["new"]
    assert (await world.content()).spec.snapshot_ref.name == "new"
    assert [o.verb for o in world.orders.history if o.verb == "delete"] == ["delete"]
    caplog.clear()
    await world.retention.run()
    assert not caplog.text


async def test_the_answer_says_what_goes_and_can_have_it_done() -> None:
    world = await captured_twice()
    told = await world.api.retention(RetentionRequest())
    assert told.limits == {"count": 1}
    assert {item.name: item.goes for item in told.artifacts} == {"old": True, "new": False}
    assert (await world.api.retention(RetentionRequest(namespace="other"))).artifacts == []
    assert len(world.cluster.page("Snapshot")) == 2

    done = await world.api.retention(RetentionRequest(run=True))
    assert [item.name for item in done.artifacts] == ["new"]
    await world.settle()
    await world.answer_all()
    assert [c.metadata.name for c in world.cluster.page("Snapshot")] == ["new"]


def test_limits_are_read_from_the_environment_and_are_off_without() -> None:
    unset = {"SNAPBACK_STATE_DIR": "/x"}
    assert load(OperatorSettings, unset).limits.is_off
    given = unset | {
        "SNAPBACK_KEEP_COUNT": "3",
        "SNAPBACK_KEEP_DAYS": "1.5",
        "SNAPBACK_KEEP_BYTES": "4096",
    }
    assert load(OperatorSettings, given).limits == Limits(count=3, days=1.5, bytes=4096)
