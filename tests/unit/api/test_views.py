"""What people see of objects: phases, states, parts, and what is mirrored."""

from __future__ import annotations

from typing import Any, get_args

import pytest
from msgspec.structs import replace

from snapshot_api.facts import Job, Node
from snapshot_api.kinds import AnyObject
from snapshot_api.meta import ObjectMeta, OrderStatus
from snapshot_api.v1alpha1.content import SnapshotContent
from snapshot_api.v1alpha1.restore import (
    RestoreTarget,
    SnapshotRestore,
    SnapshotRestoreSpec,
    SnapshotRestoreStatus,
)
from snapshot_api.views import (
    BAD_ORDERS,
    is_answered,
    mirrored,
    orders_of,
    phase,
    progress,
    received_for,
    state,
    warning_of_readers,
    with_columns,
)
from snapshot_api.well_known import POD_SPEC
from snapshot_shared.ids import derived_uid
from snapshot_shared.orders import PartResult, Progress, VectorEntry
from snapshot_shared.transitions import Capture, Restore
from tests.support import builders, objects
from tests.support.builders import (
    content,
    job,
    node,
    pod,
    restore,
    row,
    snapshot,
    with_meta,
    with_spec,
    with_status,
)
from tests.unit.tables import each

UID = derived_uid("content", "snap")
READY, NOT_READY, UNKNOWN = (row("Ready", status, "Why") for status in ("True", "False", "Unknown"))
FAILED, COMPLETE = row("Failed", "True", "Why"), row("Complete", "True", "Why")
QUARANTINED, LOST = row("Quarantined", "True", "Why"), row("Lost", "True", "Why")


def checkpoint(**status: Any) -> AnyObject:
    return with_status(objects.checkpoint(), **status)


def bound(**status: Any) -> AnyObject:
    return snapshot(bound_snapshot_content_name="content", **status)


def cordoned(**status: Any) -> AnyObject:
    return with_spec(node(**status), unschedulable=True)


PHASES = [
    # Object, phase, state.
    (checkpoint(), "Pending", "waiting"),
    (checkpoint(phase="Creating", conditions=[NOT_READY]), "Creating", "busy"),
    (checkpoint(phase="Ready", conditions=[READY]), "Ready", "ok"),
    (checkpoint(phase="Ready", conditions=[NOT_READY]), "Ready", "bad"),
    (checkpoint(phase="Failed", conditions=[FAILED]), "Failed", "bad"),
    (with_meta(checkpoint(), deletion_timestamp="t"), "Terminating", "waiting"),
    (snapshot(), "Pending", "waiting"),
    (bound(conditions=[NOT_READY]), "Capturing", "busy"),
    (bound(conditions=[READY]), "Ready", "ok"),
    (bound(bytes=7, conditions=[NOT_READY]), "Ready", "bad"),
    (bound(conditions=[FAILED]), "Failed", "bad"),
    (content(), "Pending", "waiting"),
    (content(capture=Capture.SEALING), "Sealing", "busy"),
    (content(capture=Capture.READY, conditions=[READY]), "Ready", "ok"),
    (content(capture=Capture.READY, conditions=[READY, QUARANTINED]), "Ready", "bad"),
    (content(capture=Capture.FAILED), "Failed", "bad"),
    (restore(state=Restore.PENDING), "Pending", "waiting"),
    (restore(state=Restore.COMMITTING), "Committing", "busy"),
    (restore(state=Restore.RESTORED), "Restored", "ok"),
    (restore(state=Restore.FAILED), "Failed", "bad"),
    (job(), "Running", "busy"),
    (job(active=1, ready=1), "Running", "ok"),
    (job(active=1, failed=1), "Running", "busy"),
    (job(succeeded=1, failed=1, conditions=[COMPLETE]), "Complete", "off"),
    (job(failed=1, conditions=[FAILED]), "Failed", "bad"),
    (pod(), "Pending", "waiting"),
    (pod(phase="Running", conditions=[NOT_READY]), "Running", "busy"),
    (pod(phase="Running", conditions=[READY]), "Running", "ok"),
    (pod(phase="Succeeded"), "Succeeded", "off"),
    (pod(phase="Failed"), "Failed", "bad"),
    (pod(phase="Unknown"), "Unknown", "waiting"),
    (node(), "Unknown", "waiting"),
    (node(conditions=[READY]), "Ready", "ok"),
    (node(conditions=[NOT_READY]), "NotReady", "bad"),
    (node(conditions=[UNKNOWN]), "NotReady", "bad"),
    (node(conditions=[LOST, NOT_READY]), "Lost", "bad"),
    (cordoned(conditions=[READY]), "Ready,SchedulingDisabled", "off"),
    (cordoned(conditions=[NOT_READY]), "NotReady,SchedulingDisabled", "bad"),
]


@each(("value", "expected", "how"), PHASES)
def test_an_object_has_one_phase_which_is_its_column_and_one_state(
    value: AnyObject, expected: str, how: str
) -> None:
    assert (phase(value), state(value)) == (expected, how)
    if not isinstance(value, Job | Node):
        assert with_columns(value).status.phase == expected


def test_every_kind_and_every_state_of_a_capture_and_a_restore_has_a_phase() -> None:
    assert {type(value) for value, _, _ in PHASES} == set(get_args(AnyObject))
    assert {phase(content(capture=found)) for found in Capture} == {
        found.value for found in Capture
    }
    assert {phase(restore(state=found)) for found in Restore} == {found.value for found in Restore}


@pytest.mark.parametrize(
    ("of_pod", "found", "expected", "how"),
    [
        ("Pending", Restore.PENDING, "Pending", "waiting"),
        ("Running", Restore.LOADING, "Loading", "busy"),
        ("Running", Restore.RESTORED, "Running", "busy"),
        ("Unknown", Restore.LOADING, "Unknown", "waiting"),
        ("Failed", Restore.DROPPING, "Failed", "bad"),
    ],
)
def test_a_pod_has_the_phase_of_its_restore_while_that_is_under_way(
    of_pod: str, found: Restore, expected: str, how: str
) -> None:
    value, own = pod(phase=of_pod), restore(state=found)
    assert (phase(value, own), state(value, own)) == (expected, how)


def order(verb: str, part: str = "", **fields: Any) -> OrderStatus:
    return builders.order(verb, UID, part=part, at=100.0, **fields)


def last(item: OrderStatus, done: int, total: int, attempt: int = 1) -> Progress:
    return builders.progress(order=item.order, attempt=attempt, done=done, total=total)


def staged(item: OrderStatus, size: int) -> OrderStatus:
    result = PartResult(part="process", bytes=size, digest="sha256:" + "0" * 64)
    return builders.ended(item, "staged", part=result)


def staging(*orders: OrderStatus) -> SnapshotContent:
    layout = builders.layout(bytes=1024)
    vector = [VectorEntry(part="gpu-0", ordinal=0, layout=layout), VectorEntry(part="process")]
    return content(capture=Capture.STAGING, vector=vector, orders=[*orders])


def test_parts_are_those_of_the_plan_until_something_is_known_of_them() -> None:
    found = progress([staging(order("dump"))], {})
    assert [(p.part, p.done, p.total, p.state) for p in found] == [
        ("process", 0, 0, "waiting"),
        ("gpu-0", 0, 1024, "waiting"),
    ]


def test_a_part_has_the_last_progress_of_this_attempt_and_counts_whole_once_it_is_done() -> None:
    item = order("dump")
    assert received_for(item, {item.order: last(item, 1, 4, attempt=2)}) is None
    moving = progress([staging(item)], {item.order: last(item, 1, 4)})
    assert moving[0] == ("process", 1, 4, "busy", "write")
    done = staged(item, 10)
    assert is_answered(done)
    whole = progress([staging(done)], {item.order: last(item, 1, 4)})
    assert whole[0] == ("process", 10, 10, "ok", "")


@pytest.mark.parametrize("how", BAD_ORDERS)
def test_a_part_whose_order_failed_is_bad_and_keeps_its_size(how: str) -> None:
    found = progress([staging(order("save", "gpu-0", state=how))], {})
    assert found[-1] == ("gpu-0", 0, 1024, "bad", "")


def test_only_a_lost_or_ended_order_is_answered_and_only_some_kinds_have_orders() -> None:
    assert is_answered(order("dump", state="lost"))
    assert not is_answered(order("dump", state="accepted"))
    assert orders_of(objects.checkpoint()) == []


def test_the_mirror_shows_the_identity_of_an_object_and_nothing_else_of_its_spec() -> None:
    shown = mirrored(objects.checkpoint())
    assert shown["identity"]["model"] == "example/llm"
    assert "spec" not in shown
    assert shown["metadata"]["name"] == "llm"


def test_the_mirror_leaves_the_kept_spec_of_a_pod_out_and_other_annotations_in() -> None:
    notes = {POD_SPEC: "{}", "example.com/team": "red"}
    shown = mirrored(with_meta(builders.snapshot("llm"), annotations=notes))
    assert shown["metadata"]["annotations"] == {"example.com/team": "red"}


@pytest.mark.parametrize("value", [job(), pod(), node()])
def test_only_objects_of_ours_get_columns(value: AnyObject) -> None:
    assert with_columns(value) is value


def test_columns_that_are_right_are_left_alone() -> None:
    value = with_columns(staging(order("dump"), order("save", "gpu-0")))
    assert with_columns(value) is value


def test_the_progress_of_a_capture_counts_the_parts_of_this_attempt_that_are_staged() -> None:
    def shown(*orders: OrderStatus) -> str:
        found: Any = with_columns(with_status(staging(*orders), attempt=1))
        return str(found.status.progress)

    dump, save = order("dump"), order("save", "gpu-0")
    assert shown(order("prepare")) == ""
    assert shown(dump, save) == "0/2"
    assert shown(staged(dump, 5), save) == "1/2"
    assert shown(staged(dump, 5), replace(staged(save, 5), state="failed")) == "1/2"
    assert shown(staged(dump, 5), staged(replace(save, attempt=0), 5)) == "1/2"
    assert shown(staged(dump, 5), staged(save, 5)) == "2/2"


def test_the_progress_of_a_restore_counts_the_process_before_it_is_ordered() -> None:
    load, process = order("load", "gpu-0"), order("restore")
    value = restore(state=Restore.LOADING)
    for orders, expected in (
        ([load], "0/2"),
        ([staged(load, 5)], "1/2"),
        ([staged(load, 5), staged(process, 5)], "2/2"),
    ):
        found: Any = with_columns(with_status(value, attempt=1, orders=orders))
        assert found.status.progress == expected


def test_an_artifact_that_is_committed_is_complete_and_has_a_size() -> None:
    committed = builders.committed(bytes=1536)
    found: Any = with_columns(content(capture=Capture.READY, committed=committed))
    assert (found.status.progress, found.status.size) == ("1/1", "1.5 KiB")
    whole: Any = with_columns(snapshot(bytes=1536))
    assert whole.status.size == "1.5 KiB"


def test_the_readers_of_a_source_are_those_of_its_namespace_and_those_of_a_content_all() -> None:
    def restore(pod: str, namespace: str, content: str = "") -> SnapshotRestore:
        return SnapshotRestore(
            metadata=ObjectMeta(name=f"of-{pod}", namespace=namespace),
            spec=SnapshotRestoreSpec(
                pod_ref=RestoreTarget(name=pod, uid=derived_uid(pod)), source="llm"
            ),
            status=SnapshotRestoreStatus(content_name=content),
        )

    made = [restore(f"p{n}", "team", "c" if n else "") for n in range(7)]
    found = warning_of_readers("Snapshot", "team", "llm", [*made, restore("other", "others")])
    assert found.endswith(": p0, p1, p2, p3, p4 and 2 more")
    assert warning_of_readers("SnapshotContent", None, "c", made[:2]).endswith(": p1")
    assert warning_of_readers("Snapshot", "team", "llm", []) == ""
