"""What people see of objects: phases, states, parts, and what is mirrored."""

from __future__ import annotations

from typing import Any, get_args

import msgspec
import pytest
from msgspec.structs import replace

from snapshot_shared.codec import encode_json
from snapshot_shared.objects.kinds import AnyObject
from snapshot_shared.objects.kubernetes import Job, Node
from snapshot_shared.objects.meta import OrderStatus
from snapshot_shared.objects.snapback import SnapshotContent, SnapshotRestore
from snapshot_shared.orders import PartResult, Progress, VectorEntry
from snapshot_shared.transitions import Capture, Restore
from snapshot_shared.views import (
    BAD_ORDERS,
    is_answered,
    mirrored,
    orders_of,
    phase,
    progress,
    received_for,
    state,
    with_columns,
)
from tests.support import builders
from tests.support.builders import with_status
from tests.support.objects import checkpoint
from tests.unit.tables import each

UID = "00000000-0000-0000-0000-000000000001"
CONTAINERS = {"containers": [{"name": "main"}]}
SPECS: dict[str, dict[str, Any]] = {
    "DynamoCheckpoint": {
        "identity": {"model": "m", "backendFramework": "vllm"},
        "job": {"podTemplateSpec": {"spec": CONTAINERS}},
    },
    "Snapshot": {"source": {"podRef": {"name": "pod"}}},
    "SnapshotContent": {
        "snapshotRef": {"namespace": "default", "name": "s", "uid": UID},
        "source": {"namespace": "default"},
    },
    "SnapshotRestore": {"podRef": {"name": "pod", "uid": UID}, "source": "s"},
    "Job": {"template": {"spec": CONTAINERS}},
    "Pod": CONTAINERS,
    "Node": {},
}
VERSIONS = {"Job": "batch/v1", "Pod": "v1", "Node": "v1"}
BOUND = {"boundSnapshotContentName": "content"}


def made(kind: str, status: dict[str, Any] | None = None, **more: Any) -> Any:
    """Return an object; `true` and `false` are its conditions, each separated by a space."""
    rows = [
        {"type": name, "status": value.capitalize(), "reason": "Why"}
        for value in ("true", "false", "unknown")
        for name in str(more.get(value, "")).split()
    ]
    document = {
        "apiVersion": VERSIONS.get(kind, "nvidia.com/v1alpha1"),
        "kind": kind,
        "metadata": {"name": "n", "uid": UID, **more.get("meta", {})},
        "spec": {**SPECS[kind], **more.get("spec", {})},
        "status": {**(status or {}), "conditions": rows},
    }
    return msgspec.json.decode(encode_json(document), type=AnyObject)


def restore(found: Restore) -> SnapshotRestore:
    return made("SnapshotRestore", {"state": found.value})  # type: ignore[no-any-return]


PHASES = [
    # Object, phase, state.
    (made("DynamoCheckpoint"), "Pending", "waiting"),
    (made("DynamoCheckpoint", {"phase": "Creating"}, false="Ready"), "Creating", "busy"),
    (made("DynamoCheckpoint", {"phase": "Ready"}, true="Ready"), "Ready", "ok"),
    (made("DynamoCheckpoint", {"phase": "Ready"}, false="Ready"), "Ready", "bad"),
    (made("DynamoCheckpoint", {"phase": "Failed"}, true="Failed"), "Failed", "bad"),
    (made("DynamoCheckpoint", meta={"deletionTimestamp": "t"}), "Terminating", "waiting"),
    (made("Snapshot"), "Pending", "waiting"),
    (made("Snapshot", BOUND, false="Ready"), "Capturing", "busy"),
    (made("Snapshot", BOUND, true="Ready"), "Ready", "ok"),
    (made("Snapshot", {**BOUND, "bytes": 7}, false="Ready"), "Ready", "bad"),
    (made("Snapshot", BOUND, true="Failed"), "Failed", "bad"),
    (made("SnapshotContent"), "Pending", "waiting"),
    (made("SnapshotContent", {"capture": "Sealing"}), "Sealing", "busy"),
    (made("SnapshotContent", {"capture": "Ready"}, true="Ready"), "Ready", "ok"),
    (made("SnapshotContent", {"capture": "Ready"}, true="Ready Quarantined"), "Ready", "bad"),
    (made("SnapshotContent", {"capture": "Failed"}), "Failed", "bad"),
    (restore(Restore.PENDING), "Pending", "waiting"),
    (restore(Restore.COMMITTING), "Committing", "busy"),
    (restore(Restore.RESTORED), "Restored", "ok"),
    (restore(Restore.FAILED), "Failed", "bad"),
    (made("Job"), "Running", "busy"),
    (made("Job", {"active": 1, "ready": 1}), "Running", "ok"),
    (made("Job", {"active": 1, "failed": 1}), "Running", "busy"),
    (made("Job", {"succeeded": 1, "failed": 1}, true="Complete"), "Complete", "off"),
    (made("Job", {"failed": 1}, true="Failed"), "Failed", "bad"),
    (made("Pod"), "Pending", "waiting"),
    (made("Pod", {"phase": "Running"}, false="Ready"), "Running", "busy"),
    (made("Pod", {"phase": "Running"}, true="Ready"), "Running", "ok"),
    (made("Pod", {"phase": "Succeeded"}), "Succeeded", "off"),
    (made("Pod", {"phase": "Failed"}), "Failed", "bad"),
    (made("Pod", {"phase": "Unknown"}), "Unknown", "waiting"),
    (made("Node"), "Unknown", "waiting"),
    (made("Node", true="Ready"), "Ready", "ok"),
    (made("Node", false="Ready"), "NotReady", "bad"),
    (made("Node", unknown="Ready"), "NotReady", "bad"),
    (made("Node", true="Lost", false="Ready"), "Lost", "bad"),
    (made("Node", true="Ready", spec={"unschedulable": True}), "Ready,SchedulingDisabled", "off"),
    (
        made("Node", false="Ready", spec={"unschedulable": True}),
        "NotReady,SchedulingDisabled",
        "bad",
    ),
]


@each(("value", "expected", "how"), PHASES)
def test_an_object_has_one_phase_and_one_state(value: AnyObject, expected: str, how: str) -> None:
    assert (phase(value), state(value)) == (expected, how)


def test_every_kind_and_every_state_of_a_capture_and_a_restore_has_a_phase() -> None:
    assert {type(value) for value, _, _ in PHASES} == set(get_args(AnyObject))
    assert {phase(made("SnapshotContent", {"capture": found.value})) for found in Capture} == {
        found.value for found in Capture
    }
    assert {phase(restore(found)) for found in Restore} == {found.value for found in Restore}


@pytest.mark.parametrize(
    ("pod", "found", "expected", "how"),
    [
        ({"phase": "Pending"}, Restore.PENDING, "Pending", "waiting"),
        ({"phase": "Running"}, Restore.LOADING, "Loading", "busy"),
        ({"phase": "Running"}, Restore.RESTORED, "Running", "busy"),
        ({"phase": "Unknown"}, Restore.LOADING, "Unknown", "waiting"),
        ({"phase": "Failed"}, Restore.DROPPING, "Failed", "bad"),
    ],
)
def test_a_pod_has_the_phase_of_its_restore_while_that_is_under_way(
    pod: dict[str, Any], found: Restore, expected: str, how: str
) -> None:
    value, own = made("Pod", pod), restore(found)
    assert (phase(value, own), state(value, own)) == (expected, how)


def order(verb: str, part: str = "", **fields: Any) -> OrderStatus:
    return builders.order(verb, UID, part=part, at=100.0, **fields)


def last(item: OrderStatus, done: int, total: int, attempt: int = 1) -> Progress:
    return builders.progress(order=item.order, attempt=attempt, done=done, total=total)


def staged(item: OrderStatus, size: int) -> OrderStatus:
    result = PartResult(part="process", bytes=size, digest="sha256:" + "0" * 64)
    return builders.ended(item, "staged", part=result)


def content(orders: list[OrderStatus]) -> SnapshotContent:
    layout = builders.layout(incarnation="one", bytes=1024)
    vector = [VectorEntry(part="gpu-0", ordinal=0, layout=layout), VectorEntry(part="process")]
    return builders.content(capture=Capture.STAGING, vector=vector, orders=orders)


def test_parts_are_those_of_the_plan_until_something_is_known_of_them() -> None:
    found = progress([content([order("dump")])], {})
    assert [(p.part, p.done, p.total, p.state) for p in found] == [
        ("process", 0, 0, "waiting"),
        ("gpu-0", 0, 1024, "waiting"),
    ]


def test_a_part_has_the_last_progress_of_this_attempt_and_counts_whole_once_it_is_done() -> None:
    item = order("dump")
    assert received_for(item, {item.order: last(item, 1, 4, attempt=2)}) is None
    moving = progress([content([item])], {item.order: last(item, 1, 4)})
    assert moving[0] == ("process", 1, 4, "busy", "write")
    done = staged(item, 10)
    assert is_answered(done)
    assert progress([content([done])], {item.order: last(item, 1, 4)})[0] == (
        "process",
        10,
        10,
        "ok",
        "",
    )


@pytest.mark.parametrize("how", BAD_ORDERS)
def test_a_part_whose_order_failed_is_bad_and_keeps_its_size(how: str) -> None:
    found = progress([content([order("save", "gpu-0", state=how)])], {})
    assert found[-1] == ("gpu-0", 0, 1024, "bad", "")


def test_only_a_lost_or_ended_order_is_answered_and_only_some_kinds_have_orders() -> None:
    assert is_answered(order("dump", state="lost"))
    assert not is_answered(order("dump", state="accepted"))
    assert orders_of(checkpoint()) == []


def test_the_mirror_shows_the_identity_of_an_object_and_nothing_else_of_its_spec() -> None:
    shown = mirrored(checkpoint())
    assert shown["identity"]["model"] == "example/llm"
    assert "spec" not in shown
    assert shown["metadata"]["name"] == "llm"


@each(("value", "expected", "how"), PHASES)
def test_the_column_of_the_phase_is_the_phase(value: AnyObject, expected: str, how: str) -> None:
    if not isinstance(value, Job | Node):
        assert with_columns(value).status.phase == expected


@pytest.mark.parametrize("value", [made("Job"), made("Pod"), made("Node")])
def test_only_objects_of_ours_get_columns(value: AnyObject) -> None:
    assert with_columns(value) is value


def test_columns_that_are_right_are_left_alone() -> None:
    value = with_columns(content([order("dump"), order("save", "gpu-0")]))
    assert with_columns(value) is value


def test_the_progress_of_a_capture_counts_the_parts_of_this_attempt_that_are_staged() -> None:
    def shown(*orders: OrderStatus) -> str:
        found: Any = with_columns(with_status(content(list(orders)), attempt=1))
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
    value = restore(Restore.LOADING)
    for orders, expected in (
        ([load], "0/2"),
        ([staged(load, 5)], "1/2"),
        ([staged(load, 5), staged(process, 5)], "2/2"),
    ):
        found: Any = with_columns(with_status(value, attempt=1, orders=orders))
        assert found.status.progress == expected


def test_an_artifact_that_is_committed_is_complete_and_has_a_size() -> None:
    committed = builders.committed(bytes=1536)
    found: Any = with_columns(builders.content(capture=Capture.READY, committed=committed))
    assert (found.status.progress, found.status.size) == ("1/1", "1.5 KiB")
    snapshot: Any = with_columns(builders.snapshot(bytes=1536))
    assert snapshot.status.size == "1.5 KiB"
