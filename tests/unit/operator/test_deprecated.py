"""Fields of older manifests that are set and not honoured in a cluster are named."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from snapshot_operator.core.checkpoint import CheckpointView
from snapshot_operator.core.plan import FINALIZER, NOTHING, Adopt, SetStatus
from snapshot_operator.kube.controllers import DEPRECATED, deprecated, reconcile_checkpoint
from snapshot_shared.objects.meta import condition
from snapshot_shared.objects.snapback import DynamoCheckpoint
from tests.support.objects import checkpoint

NOW = 1_000_000.0


def adopted(**job: Any) -> DynamoCheckpoint:
    value: Any = checkpoint(**job)
    return replace(value, metadata=replace(value.metadata, uid="u", finalizers=[FINALIZER]))


def with_status(value: DynamoCheckpoint, **status: Any) -> DynamoCheckpoint:
    return replace(value, status=replace(value.status, **status))


def test_those_that_are_not_set_or_ask_for_what_happens_anyway_are_not_named() -> None:
    assert deprecated(adopted()) == []
    assert deprecated(adopted(backoffLimit=0)) == []


def test_each_is_named_by_its_path() -> None:
    value = adopted(backoffLimit=3)
    job = replace(value.spec.job, ttl_seconds_after_finished=0)
    value = replace(value, spec=replace(value.spec, job=job))
    value = with_status(value, location="/checkpoints/a", storage_type="pvc")
    assert deprecated(value) == [
        "spec.job.backoffLimit",
        "spec.job.ttlSecondsAfterFinished",
        "status.location",
        "status.storageType",
    ]


def test_the_condition_comes_with_the_first_status_and_is_written_once() -> None:
    value = adopted(backoffLimit=3)
    plan = reconcile_checkpoint(CheckpointView(value), NOW)
    (status,) = (write for write in plan.writes if isinstance(write, SetStatus))
    stored = status.new
    assert isinstance(stored, DynamoCheckpoint)
    row = condition(stored.status.conditions, DEPRECATED)
    assert row is not None
    assert (row.status, row.reason) == ("True", DEPRECATED)
    assert "spec.job.backoffLimit" in row.message
    assert "Next: " in row.message
    assert stored.status.job_name == "llm"
    ready = with_status(stored, phase="Ready")
    assert reconcile_checkpoint(CheckpointView(ready), NOW + 5.0) == NOTHING


def test_one_that_is_over_and_was_written_by_another_product_is_named_too() -> None:
    value = with_status(adopted(), phase="Ready", location="/checkpoints/a")
    (write,) = reconcile_checkpoint(CheckpointView(value), NOW).writes
    assert isinstance(write, SetStatus)
    assert isinstance(write.new, DynamoCheckpoint)
    assert write.new.status.phase == "Ready"
    assert write.new.status.location == "/checkpoints/a"


def test_a_checkpoint_is_adopted_after_its_condition_is_written() -> None:
    fresh = replace(adopted(backoffLimit=1), metadata=checkpoint().metadata)
    (write,) = reconcile_checkpoint(CheckpointView(fresh), NOW).writes
    assert isinstance(write, SetStatus)
    assert isinstance(write.new, DynamoCheckpoint)
    (then,) = reconcile_checkpoint(CheckpointView(write.new), NOW).writes
    assert isinstance(then, Adopt)


def test_nothing_is_said_at_one_that_is_being_deleted() -> None:
    value = adopted(backoffLimit=1)
    meta = replace(value.metadata, deletion_timestamp="2026-01-01T00:00:00Z")
    going = replace(value, metadata=meta)
    plan = reconcile_checkpoint(CheckpointView(going), NOW)
    assert not any(isinstance(write, SetStatus) for write in plan.writes)
