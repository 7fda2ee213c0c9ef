"""A deadline holds from its very instant on: what is not done by then fails, and not before."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from snapshot_operator.core import checkpoint, content, snapshot
from snapshot_operator.core.capture import ContentView
from snapshot_operator.core.checkpoint import CheckpointView
from snapshot_operator.core.conditions import timestamp
from snapshot_operator.core.owning import child_meta
from snapshot_operator.core.plan import FINALIZER, Plan, SetStatus
from snapshot_operator.core.snapshot import SnapshotView
from snapshot_shared.manifests import parse
from snapshot_shared.objects.kubernetes import Job, JobSpec, Node, NodeSpec, Pod, PodStatus
from snapshot_shared.objects.meta import ObjectMeta, condition, is_true
from snapshot_shared.objects.snapback import (
    ArtifactSource,
    ContentSource,
    DynamoCheckpoint,
    PodSource,
    Snapshot,
    SnapshotContent,
    SnapshotContentSpec,
    SnapshotRef,
    SnapshotSource,
    SnapshotSpec,
)
from tests.support.objects import checkpoint_document, restore_document
from tests.support.operator_world import DIGEST
from tests.unit.tables import each

CREATED, LIMIT_S = 1000.0, 100
END = CREATED + LIMIT_S
UID = "00000000-0000-4000-8000-000000000001"
META = ObjectMeta(
    name="one",
    namespace="default",
    uid=UID,
    creation_timestamp=timestamp(CREATED),
    finalizers=[FINALIZER],
)
ARTIFACT = ArtifactSource(content_uid=UID, generation=1, root_digest=DIGEST)


def parsed(document: dict[str, Any]) -> Any:
    return msgspec.structs.replace(parse(document), metadata=META)


POD: Pod = parsed(restore_document())
CHECKPOINT: DynamoCheckpoint = parsed(checkpoint_document(activeDeadlineSeconds=LIMIT_S))
JOB = Job(
    metadata=msgspec.structs.replace(
        child_meta(CHECKPOINT, "one"), creation_timestamp=timestamp(CREATED)
    ),
    spec=JobSpec(template=CHECKPOINT.spec.job.pod_template_spec),
)
CORDONED = Node(metadata=META, spec=NodeSpec(unschedulable=True))


def snapshot_of(**source: Any) -> Snapshot:
    spec = SnapshotSpec(source=SnapshotSource(**source), deadline_seconds=LIMIT_S)
    return Snapshot(metadata=META, spec=spec)


def content_of(**source: Any) -> SnapshotContent:
    spec = SnapshotContentSpec(
        snapshot_ref=SnapshotRef(namespace="default", name="one", uid=UID),
        source=ContentSource(namespace="default", **source),
        deadline_seconds=LIMIT_S,
    )
    return SnapshotContent(metadata=META, spec=spec)


NAMED = snapshot_of(pod_ref=PodSource(name="one", uid=UID))
IMPORT = snapshot_of(artifact=ARTIFACT)
CAPTURE = content_of(pod_ref=PodSource(name="one", uid=UID), node_name="one")
READING = content_of(artifact=ARTIFACT)


@each(
    "decide",
    [
        lambda now: snapshot.reconcile(SnapshotView(NAMED, None, None), now),
        lambda now: snapshot.reconcile(SnapshotView(NAMED, POD, None), now),
        lambda now: snapshot.reconcile(SnapshotView(IMPORT, None, None), now),
        lambda now: snapshot.reconcile(SnapshotView(IMPORT, None, None, CAPTURE), now),
        lambda now: content.reconcile(ContentView(CAPTURE, CORDONED, source=POD), now),
        lambda now: content.reconcile(ContentView(READING, None), now),
        lambda now: checkpoint.reconcile(CheckpointView(CHECKPOINT, JOB), now),
    ],
)
def test_what_waits_fails_at_the_instant_of_its_deadline_and_no_sooner(
    decide: Callable[[float], Plan],
) -> None:
    assert [has_failed(decide(at)) for at in (END - 0.001, END, END + 1.0)] == [False, True, True]


def test_a_worker_whose_containers_cannot_start_says_why_and_waits() -> None:
    status = PodStatus(reason="PodTemplateInvalid", message="container main: no secret")
    pod = msgspec.structs.replace(POD, status=status)
    plan = checkpoint.reconcile(CheckpointView(CHECKPOINT, JOB, pod), CREATED + 1.0)
    assert not has_failed(plan)
    (new,) = [write.new for write in plan.writes if isinstance(write, SetStatus)]
    row = condition(new.status.conditions, "Ready")
    assert row is not None
    assert row.reason == "PodTemplateInvalid"
    assert row.message.startswith("container main: no secret. Next: ")
    assert plan.wake_at == END


def has_failed(plan: Plan) -> bool:
    written = [write.new for write in plan.writes if isinstance(write, SetStatus)]
    return any(is_true(value.status.conditions, "Failed") for value in written)
