"""What is let go when a namespace holds more than it may, and what never is."""

from __future__ import annotations

import logging
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from snapshot_operator.core.conditions import timestamp
from snapshot_operator.core.restore import restore_for
from snapshot_operator.core.retention import DAY_S, Decision, Holdings, Limits, judged
from snapshot_operator.main import OperatorSettings
from snapshot_shared.api import RetentionRequest
from snapshot_shared.ids import derived_uid
from snapshot_shared.objects.kubernetes import Pod
from snapshot_shared.objects.meta import Condition, ObjectMeta, OrderStatus, OwnerReference, time_of
from snapshot_shared.objects.snapback import (
    Committed,
    ContentSource,
    DynamoCheckpoint,
    PodSource,
    Snapshot,
    SnapshotContent,
    SnapshotContentSpec,
    SnapshotContentStatus,
    SnapshotRef,
    SnapshotRestore,
    SnapshotSource,
    SnapshotSpec,
    SnapshotStatus,
)
from snapshot_shared.settings import load
from snapshot_shared.transitions import Capture, Restore
from tests.support.objects import checkpoint, presence, restore_document
from tests.support.operator_world import DIGEST, World
from tests.unit.tables import each

NOW = 10_000_000.0
SIZE = 100


def content_of(name: str, namespace: str, pod: str, age_days: float) -> SnapshotContent:
    committed = Committed(generation=1, root_digest=DIGEST, bytes=SIZE, parts=[], vector=[])
    source = PodSource(name=pod, uid=derived_uid("pod", pod))
    reference = SnapshotRef(namespace=namespace, name=name, uid=derived_uid("snapshot", name))
    return SnapshotContent(
        metadata=ObjectMeta(
            name=f"content-{namespace}-{name}",
            uid=derived_uid("content", namespace, name),
            creation_timestamp=timestamp(NOW - age_days * DAY_S),
        ),
        spec=SnapshotContentSpec(
            snapshot_ref=reference,
            source=ContentSource(pod_ref=source, namespace=namespace, node_name="node-1"),
        ),
        status=SnapshotContentStatus(capture=Capture.READY, attempt=1, committed=committed),
    )


def snapshot_of(content: SnapshotContent) -> Snapshot:
    reference = content.spec.snapshot_ref
    return Snapshot(
        metadata=ObjectMeta(name=reference.name, namespace=reference.namespace, uid=reference.uid),
        spec=SnapshotSpec(source=SnapshotSource(pod_ref=content.spec.source.pod_ref)),
        status=SnapshotStatus(bound_snapshot_content_name=content.metadata.name),
    )


def contents(*names: str, pod: str = "worker", namespace: str = "default") -> list[SnapshotContent]:
    """Give contents of one pod, the first ten days older than the second, and so on."""
    ages = range(10 * len(names), 0, -10)
    return [content_of(name, namespace, pod, age) for name, age in zip(names, ages, strict=True)]


def let_go(holdings: Holdings, limits: Limits, now: float) -> list[Decision]:
    return [verdict for verdict in judged(holdings, limits, now) if verdict.goes]


def chosen(
    found: list[SnapshotContent], limits: Limits, *pods: Pod, state: Restore | None = None
) -> list[str]:
    """Return what goes; each of the pods has a restore in a state, if one is given."""
    restores = [restoring(pod, state) for pod in pods if state is not None]
    snapshots = [snapshot_of(content) for content in found]
    holdings = Holdings([], snapshots, found, pods, restores)
    return [item.value.metadata.name for item in let_go(holdings, limits, NOW)]


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
    holdings = Holdings([], [snapshot_of(content) for content in found], found, [])
    gone = let_go(holdings, Limits(count=2), NOW)
    assert [(item.value.metadata.namespace, item.value.metadata.name) for item in gone] == [
        ("other", "a")
    ]


def test_the_newest_of_every_identity_stays() -> None:
    found = contents("a", "b") + contents("x", pod="another")
    assert chosen(found, Limits(count=1)) == ["a"]


def condition_of(type_: str) -> list[Condition]:
    return [Condition(type=type_, status="True", reason="r")]


def with_status(content: SnapshotContent, **changes: Any) -> SnapshotContent:
    return replace(content, status=replace(content.status, **changes))


OPEN_RELEASE = OrderStatus(
    order="release-x",
    verb="release",
    attempt=1,
    node="node-1",
    service="agent",
    payload=msgspec.Raw(b"{}"),
    ordered_at=time_of(0.0),
    deadline=time_of(1.0),
)


@pytest.mark.parametrize(
    "change",
    [
        {"readers": ["somebody"]},
        {"orders": [OPEN_RELEASE]},
        {"conditions": condition_of("Quarantined")},
        {"verifications": 1},
    ],
)
def test_what_is_read_under_way_or_in_quarantine_stays_and_the_next_goes(
    change: dict[str, Any],
) -> None:
    oldest, *others = contents("a", "b", "c")
    assert chosen([with_status(oldest, **change), *others], Limits(count=2)) == ["b"]


def test_what_is_to_be_retained_stays() -> None:
    oldest, *others = contents("a", "b", "c")
    kept = replace(oldest, spec=replace(oldest.spec, deletion_policy="Retain"))
    assert chosen([kept, *others], Limits(count=1)) == ["b"]


def test_a_quarantined_one_is_not_the_newest_that_is_kept_for_an_identity() -> None:
    *others, newest = contents("a", "b", "c")
    spoiled = with_status(newest, conditions=condition_of("Quarantined"))
    assert chosen([*others, spoiled], Limits(count=1)) == ["a"]


def test_what_is_being_captured_or_deleted_is_not_counted() -> None:
    a, b, c = contents("a", "b", "c")
    staging = with_status(c, capture=Capture.STAGING, committed=None)
    going = replace(a, metadata=replace(a.metadata, deletion_timestamp=timestamp(NOW)))
    assert chosen([going, b, staging], Limits(count=1)) == []


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({}, "the namespace holds 3 artifacts, the limit is 2"),
        ({"readers": ["x", "y"]}, "it is being restored by 2 pods"),
        ({"orders": [OPEN_RELEASE]}, "its capture or a verification is under way"),
        ({"conditions": condition_of("Quarantined")}, "it is in quarantine"),
    ],
)
def test_every_artifact_is_judged_with_the_reason(change: dict[str, Any], why: str) -> None:
    oldest, *others = contents("a", "b", "c")
    found = [with_status(oldest, **change), *others]
    holdings = Holdings([], [snapshot_of(content) for content in found], found, [])
    first, _, last = judged(holdings, Limits(count=2), NOW)
    assert (first.content, first.why) == (found[0], why)
    assert (last.goes, last.why) == (False, "it is the newest usable one of its identity")


def test_within_the_limits_everything_stays_for_that_reason() -> None:
    found = contents("a", "b")
    holdings = Holdings([], [snapshot_of(content) for content in found], found, [])
    first, _ = judged(holdings, Limits(), NOW)
    assert (first.goes, first.why) == (False, "it is within the limits")


def restoring(pod: Pod, state: Restore) -> SnapshotRestore:
    value = restore_for(pod)
    return replace(value, status=replace(value.status, state=state))


def asking(source: str, **status: Any) -> Pod:
    from snapshot_shared.manifests import parse

    pod = parse(restore_document(source))
    assert isinstance(pod, Pod)
    pod = replace(pod, metadata=replace(pod.metadata, uid=derived_uid("pod", source)))
    return replace(pod, status=replace(pod.status, **status))


@pytest.mark.parametrize(
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
    value = checkpoint(name, model="example/one")
    assert isinstance(value, DynamoCheckpoint)
    value = replace(value, metadata=replace(value.metadata, uid=derived_uid("checkpoint", name)))
    owner = OwnerReference(
        api_version="nvidia.com/v1alpha1",
        kind="DynamoCheckpoint",
        name=name,
        uid=value.metadata.uid,
    )
    snapshot = snapshot_of(content)
    return value, replace(snapshot, metadata=replace(snapshot.metadata, owner_references=[owner]))


@pytest.mark.parametrize(("phase", "expected"), [("Running", []), ("Succeeded", ["a"])])
def test_a_checkpoint_goes_as_a_whole_and_not_before_its_worker_has_ended(
    phase: str, expected: list[str]
) -> None:
    found = [*contents("a", pod="pod-a"), *contents("b", pod="pod-b")]
    found[1] = replace(
        found[1], metadata=replace(found[1].metadata, creation_timestamp=timestamp(NOW))
    )
    pairs = [owned(content.spec.snapshot_ref.name, content) for content in found]
    worker = asking("none", phase=phase)
    worker = replace(worker, metadata=replace(worker.metadata, uid=derived_uid("pod", "pod-a")))
    holdings = Holdings([c for c, _ in pairs], [s for _, s in pairs], found, [worker])
    gone = let_go(holdings, Limits(count=1), NOW)
    assert [item.value.metadata.name for item in gone] == expected
    assert all(isinstance(item.value, DynamoCheckpoint) for item in gone)


def test_a_snapshot_with_the_name_of_a_checkpoint_that_is_not_its_own_goes_by_itself() -> None:
    found = contents("a", "b")
    stranger = checkpoint("a", model="example/one")
    assert isinstance(stranger, DynamoCheckpoint)
    snapshots = [snapshot_of(content) for content in found]
    gone = let_go(Holdings([stranger], snapshots, found, []), Limits(count=1), NOW)
    assert [item.value for item in gone] == [snapshots[0]]


def test_an_artifact_stays_while_a_pod_asks_for_a_checkpoint_that_shares_it() -> None:
    found = contents("a", "b")
    pairs = [owned(content.spec.snapshot_ref.name, content) for content in found]
    sharer = pairs[0][0]
    shared = replace(sharer.status, shares="a", content_name=found[0].metadata.name)
    sharer = replace(sharer, metadata=replace(sharer.metadata, name="sharer"), status=shared)
    checkpoints = [sharer, *(c for c, _ in pairs)]
    snapshots = [s for _, s in pairs]
    for source, expected in (("other", ["a"]), ("sharer", [])):
        holdings = Holdings(checkpoints, snapshots, found, [asking(source)])
        gone = let_go(holdings, Limits(count=1), NOW)
        assert [item.value.metadata.name for item in gone] == expected


async def captured_twice() -> World:
    """Return a world that may keep one artifact, with two of one pod."""
    world = World(Limits(count=1))
    await world.join(presence("node-1"))
    worker = restore_document(name="worker")
    del worker["metadata"]["annotations"]
    await world.apply(worker)
    for name in ("old", "new"):
        await world.apply(
            {
                "apiVersion": "nvidia.com/v1alpha1",
                "kind": "Snapshot",
                "metadata": {"name": name},
                "spec": {"source": {"podRef": {"name": "worker"}}},
            }
        )
        await world.answer_all()
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
