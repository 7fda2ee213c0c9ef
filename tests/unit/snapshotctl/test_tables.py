"""Objects as rows of a table, also as they change."""

from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from snapshot_operator.kube import crds
from snapshot_shared.ids import NodeName
from snapshot_shared.objects.kinds import KINDS, AnyObject
from snapshot_shared.objects.kubernetes import Job, Node
from snapshotctl.views import tables
from snapshotctl.views.changing import ChangingTable, changes
from snapshotctl.views.tables import Table
from tests.support import objects
from tests.unit.tables import each

UID = "0" * 8 + "-0000-0000-0000-" + "0" * 12
META = {"name": "x", "namespace": "ns", "creationTimestamp": "1970-01-01T00:01:00Z"}
POD_SPEC = {"containers": [{"name": "main", "resources": {"limits": {"nvidia.com/gpu": 2}}}]}
CONTENT = {
    "snapshotRef": {"namespace": "ns", "name": "snap", "uid": UID},
    "source": {"podRef": {"name": "w"}, "namespace": "ns", "nodeName": "node-1"},
}
RESTORE = {"podRef": {"name": "w", "uid": UID}, "source": "snap"}
TARGET = {"ordinal": 0, "uuid": "GPU-0"}
IDENTITY = {"model": "m", "backendFramework": "vllm"}
DEVICE = {"index": 0, "uuid": "GPU-0", "product": "p", "capacity_bytes": 4 * 1024**3}
READY = {"type": "Ready", "status": "True", "reason": "r"}
DOUBTED = {"type": "Ready", "status": "False", "reason": "ArtifactCorrupt"}
QUARANTINED = {"type": "Quarantined", "status": "True", "reason": "ArtifactCorrupt"}


SPECS = {
    "DynamoCheckpoint": {"identity": IDENTITY, "job": {"podTemplateSpec": {"spec": POD_SPEC}}},
    "Snapshot": {"source": {"podRef": {"name": "w"}}},
    "SnapshotContent": CONTENT,
    "SnapshotRestore": RESTORE,
    "Job": {"template": {"spec": POD_SPEC}},
    "Pod": POD_SPEC,
    "Node": {},
}


def _object(kind: str, status: dict[str, Any], **spec: Any) -> AnyObject:
    document = {"kind": kind, "apiVersion": KINDS[kind].api_version, "metadata": META}
    document |= {"spec": SPECS[kind] | spec, "status": status}
    return msgspec.convert(document, KINDS[kind].type)  # type: ignore[no-any-return]


def _shown(table: Table) -> dict[str, str]:
    return dict(zip(table.columns, table.rows[0], strict=True))


@each(
    ("kind", "status", "expected"),
    [
        (
            "DynamoCheckpoint",
            {"phase": "Ready", "snapshotName": "s", "bytes": 2 * 1024**2},
            {"PHASE": "Ready", "MODEL": "m", "SNAPSHOT": "s", "SIZE": "2 MiB"},
        ),
        (
            "DynamoCheckpoint",
            {"phase": "Ready", "conditions": [DOUBTED]},
            {"PHASE": "Ready (ArtifactCorrupt)"},
        ),
        (
            "DynamoCheckpoint",
            {"phase": "Ready", "shares": "llm", "snapshotName": "llm"},
            {"PHASE": "Ready (shares llm)", "SNAPSHOT": "llm"},
        ),
        (
            "DynamoCheckpoint",
            {"phase": "Failed", "conditions": [{**DOUBTED, "reason": "Aborted"}]},
            {"PHASE": "Failed (Aborted)"},
        ),
        (
            "SnapshotContent",
            {"capture": "Ready", "conditions": [QUARANTINED]},
            {"CAPTURE": "Ready (Quarantined)"},
        ),
        ("Snapshot", {"conditions": [READY]}, {"POD": "w", "READY": "True", "CONTENT": "-"}),
        (
            "SnapshotContent",
            {"capture": "Ready", "attempt": 2, "committed": None},
            {"CAPTURE": "Ready", "ATTEMPT": "2", "NODE": "node-1", "SNAPSHOT": "ns/snap"},
        ),
        (
            "SnapshotRestore",
            {"state": "Loading", "attempt": 1, "nodeName": "node-1", "devices": [TARGET]},
            {"POD": "w", "SOURCE": "snap", "STATE": "Loading", "NODE": "node-1", "GPUS": "1"},
        ),
        (
            "SnapshotRestore",
            {"state": "Failed", "failure": {"reason": "NoSpace", "message": "full"}},
            {"STATE": "Failed (NoSpace)", "ATTEMPT": "0", "NODE": "-"},
        ),
        (
            "Job",
            {"active": 1, "ready": 1, "failed": 2},
            {"ACTIVE": "1", "READY": "1", "SUCCEEDED": "0", "FAILED": "2"},
        ),
        (
            "Pod",
            {"phase": "Unknown", "reason": "NodeSilent", "nodeName": "node-1"},
            {"STATUS": "Unknown (NodeSilent)"},
        ),
        (
            "Pod",
            {"phase": "Failed", "reason": "DeviceTooSmall", "nodeName": "node-1"},
            {"READY": "0/1", "STATUS": "Failed (DeviceTooSmall)", "NODE": "node-1", "GPUS": "2"},
        ),
        (
            "Node",
            {"devices": [DEVICE], "drivers": ["cooperative"]},
            {"STATUS": "Unknown", "GPUS": "1", "GPU-MEMORY": "4 GiB", "DRIVERS": "cooperative"},
        ),
        ("Node", {"conditions": [{**READY, "status": "False"}]}, {"STATUS": "NotReady"}),
    ],
)
def test_each_kind_shows_what_people_ask_for(
    kind: str, status: dict[str, Any], expected: dict[str, str]
) -> None:
    found = _shown(tables.table_of(KINDS[kind], [_object(kind, status)], now=100.0))
    assert found.items() >= ({"NAME": "x", "AGE": "40s"} | expected).items()


def test_a_cordoned_node_and_unknown_artifacts_below_its_root_stand_in_its_status() -> None:
    unknown = {"type": "UnknownArtifacts", "status": "True", "reason": "UnknownArtifactsMoved"}
    for node, status in (
        (_object("Node", {"conditions": [READY]}, unschedulable=True), "Ready,SchedulingDisabled"),
        (_object("Node", {"conditions": [READY, unknown]}), "Ready,UnknownArtifacts"),
    ):
        assert _shown(tables.table_of(KINDS["Node"], [node], now=100.0))["STATUS"] == status


def test_all_kinds_have_a_layout_with_a_namespace_on_request_and_cells_that_keep_it() -> None:
    for kind in KINDS.values():
        assert tables.table_of(kind, [], now=0.0).columns[0] == "NAME"
    found = tables.table_of(KINDS["Pod"], [_object("Pod", {})], now=0.0, with_namespace=True)
    assert _shown(found)["NAMESPACE"] == "ns"
    pod = _object("Pod", {"reason": "a\nb\x1b[0m"})
    assert "Pending (a b [0m)" in tables.table_of(KINDS["Pod"], [pod], now=0.0).rows[0]


def test_a_node_shows_when_it_was_last_seen_or_that_it_is_not_there() -> None:
    node = _object("Node", {})
    assert isinstance(node, Node)
    seen = objects.presence("x", gpus=1)
    there = {NodeName("x"): replace(seen, free_bytes=1024**3, at=93.0)}
    found = _shown(tables.table_of_nodes([node], there, (), now=100.0))
    assert (found["SEEN"], found["FREE-DISK"], found["GPUS"]) == ("7s ago", "1 GiB", "1")
    assert _shown(tables.table_of_nodes([node], {}, (), now=100.0))["SEEN"] == "no"


@pytest.mark.parametrize(
    "definition", crds.definitions(), ids=lambda found: str(found["spec"]["names"]["kind"])
)
def test_a_wide_table_has_the_wide_columns_of_kubectl(definition: dict[str, Any]) -> None:
    kind = KINDS[definition["spec"]["names"]["kind"]]
    [version] = definition["spec"]["versions"]
    wide = {
        column["name"].upper()
        for column in version["additionalPrinterColumns"]
        if column.get("priority")
    }
    head = tables.table_of(kind, [], 0.0, is_wide=True).columns
    # The snapshot of a content is one column here, and the content of a snapshot is not wide.
    assert wide - set(head) <= {"NAMESPACE", "ARTIFACT"}
    assert len(head) > len(tables.table_of(kind, [], 0.0).columns)


@each(
    ("kind", "status", "expected"),
    [
        (
            "DynamoCheckpoint",
            {"checkpointID": "abc", "contentName": "c", "conditions": [DOUBTED]},
            {
                "BACKEND": "vllm",
                "CHECKPOINTID": "abc",
                "ARTIFACT": "c",
                "REASON": "ArtifactCorrupt",
            },
        ),
        ("Snapshot", {}, {"DRIVER": "cooperative"}),
        ("SnapshotContent", {}, {"DRIVER": "cooperative", "TRACE": "-"}),
        ("SnapshotRestore", {"contentName": "c"}, {"ARTIFACT": "c"}),
        ("Job", {}, {"CONTAINERS": "main"}),
        ("Pod", {"devices": [TARGET]}, {"CONTAINERS": "main", "DEVICES": "GPU-0"}),
        ("Node", {"criu": "4.2", "slots": 2}, {"CRIU": "4.2", "SLOTS": "2", "ARTIFACTS": "-"}),
    ],
)
def test_a_wide_table_shows_more_of_an_object(
    kind: str, status: dict[str, Any], expected: dict[str, str]
) -> None:
    item = _object(kind, status)
    shown = _shown(tables.table_of(KINDS[kind], [item], 100.0, is_wide=True))
    assert {name: shown[name] for name in expected} == expected


def _job(name: str, version: str = "1", uid: str = "") -> Job:
    meta = {"name": name, "namespace": "ns", "uid": uid or name, "resourceVersion": version}
    pod = {"spec": {"containers": [{"name": "main"}]}}
    document = {
        "kind": "Job",
        "apiVersion": "batch/v1",
        "metadata": meta,
        "spec": {"template": pod},
    }
    return msgspec.convert(document, Job)


def test_between_two_reads_only_what_differs_is_new() -> None:
    before = [_job("same"), _job("changed"), _job("gone"), _job("again", uid="old")]
    after = [_job("same"), _job("changed", "2"), _job("new"), _job("again", uid="other")]
    found = [(kind, item.metadata.name) for kind, item in changes(before, after)]
    assert found == [
        ("DELETED", "gone"),
        ("DELETED", "again"),
        ("MODIFIED", "changed"),
        ("ADDED", "new"),
        ("ADDED", "again"),
    ]


def test_rows_that_come_later_stand_below_the_head() -> None:
    table = ChangingTable(KINDS["Job"], with_namespace=True, is_wide=False)
    assert table.lines([], 0.0, is_gone=False) == []
    head, row = table.lines([_job("a-long-name")], 0.0, is_gone=False)
    assert table.is_first
    assert head.startswith("NAMESPACE   NAME          ACTIVE")
    assert row.startswith("ns          a-long-name   0")
    [later] = table.lines([_job("b")], 0.0, is_gone=True)
    assert not table.is_first
    assert later.startswith("ns          b             0")
    assert later.endswith("   (deleted)")
