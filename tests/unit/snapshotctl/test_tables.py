"""Objects as rows of a table."""

from typing import Any

import msgspec
import pytest

from snapshot_operator.kube import crds
from snapshot_shared.objects.kinds import KINDS, AnyObject
from snapshot_shared.objects.kubernetes import Node
from snapshot_shared.orders import Presence, PresenceDevice
from snapshotctl.views import tables
from snapshotctl.views.tables import Table
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
DOUBTED = {"type": "Ready", "status": "False", "reason": "ArtifactCorrupt"}
QUARANTINED = {"type": "Quarantined", "status": "True", "reason": "ArtifactCorrupt"}


def _object(kind: str, spec: dict[str, Any], status: dict[str, Any]) -> AnyObject:
    document = {
        "kind": kind,
        "apiVersion": KINDS[kind].api_version,
        "metadata": META,
        "spec": spec,
        "status": status,
    }
    return msgspec.convert(document, KINDS[kind].type)  # type: ignore[no-any-return]


def _shown(table: Table) -> dict[str, str]:
    return dict(zip(table.columns, table.rows[0], strict=True))


@each(
    ("kind", "spec", "status", "expected"),
    [
        (
            "DynamoCheckpoint",
            {"identity": IDENTITY, "job": {"podTemplateSpec": {"spec": POD_SPEC}}},
            {"phase": "Ready", "snapshotName": "s", "bytes": 2 * 1024**2},
            {"PHASE": "Ready", "MODEL": "m", "SNAPSHOT": "s", "SIZE": "2 MiB"},
        ),
        (
            "DynamoCheckpoint",
            {"identity": IDENTITY, "job": {"podTemplateSpec": {"spec": POD_SPEC}}},
            {"phase": "Ready", "conditions": [DOUBTED]},
            {"PHASE": "Ready (ArtifactCorrupt)"},
        ),
        (
            "DynamoCheckpoint",
            {"identity": IDENTITY, "job": {"podTemplateSpec": {"spec": POD_SPEC}}},
            {"phase": "Ready", "shares": "llm", "snapshotName": "llm"},
            {"PHASE": "Ready (shares llm)", "SNAPSHOT": "llm"},
        ),
        (
            "DynamoCheckpoint",
            {"identity": IDENTITY, "job": {"podTemplateSpec": {"spec": POD_SPEC}}},
            {
                "phase": "Failed",
                "conditions": [{"type": "Ready", "status": "False", "reason": "Aborted"}],
            },
            {"PHASE": "Failed (Aborted)"},
        ),
        (
            "SnapshotContent",
            CONTENT,
            {"capture": "Ready", "conditions": [QUARANTINED]},
            {"CAPTURE": "Ready (Quarantined)"},
        ),
        (
            "Snapshot",
            {"source": {"podRef": {"name": "w"}}},
            {"conditions": [{"type": "Ready", "status": "True", "reason": "r"}]},
            {"POD": "w", "READY": "True", "CONTENT": "-"},
        ),
        (
            "SnapshotContent",
            CONTENT,
            {"capture": "Ready", "attempt": 2, "committed": None},
            {"CAPTURE": "Ready", "ATTEMPT": "2", "NODE": "node-1", "SNAPSHOT": "ns/snap"},
        ),
        (
            "SnapshotRestore",
            RESTORE,
            {"state": "Loading", "attempt": 1, "nodeName": "node-1", "devices": [TARGET]},
            {"POD": "w", "SOURCE": "snap", "STATE": "Loading", "NODE": "node-1", "GPUS": "1"},
        ),
        (
            "SnapshotRestore",
            RESTORE,
            {"state": "Failed", "failure": {"reason": "NoSpace", "message": "full"}},
            {"STATE": "Failed (NoSpace)", "ATTEMPT": "0", "NODE": "-"},
        ),
        (
            "Job",
            {"template": {"spec": POD_SPEC}},
            {"active": 1, "ready": 1, "failed": 2},
            {"ACTIVE": "1", "READY": "1", "SUCCEEDED": "0", "FAILED": "2"},
        ),
        (
            "Pod",
            POD_SPEC,
            {"phase": "Unknown", "reason": "NodeSilent", "nodeName": "node-1"},
            {"STATUS": "Unknown (NodeSilent)"},
        ),
        (
            "Pod",
            POD_SPEC,
            {"phase": "Failed", "reason": "DeviceTooSmall", "nodeName": "node-1"},
            {"READY": "0/1", "STATUS": "Failed (DeviceTooSmall)", "NODE": "node-1", "GPUS": "2"},
        ),
        (
            "Node",
            {},
            {"devices": [DEVICE], "drivers": ["cooperative"]},
            {"STATUS": "Unknown", "GPUS": "1", "GPU-MEMORY": "4 GiB", "DRIVERS": "cooperative"},
        ),
        (
            "Node",
            {"unschedulable": True},
            {"conditions": [{"type": "Ready", "status": "True", "reason": "r"}]},
            {"STATUS": "Ready,SchedulingDisabled"},
        ),
        (
            "Node",
            {},
            {"conditions": [{"type": "Ready", "status": "False", "reason": "r"}]},
            {"STATUS": "NotReady"},
        ),
    ],
)
def test_each_kind_shows_what_people_ask_for(
    kind: str, spec: dict[str, Any], status: dict[str, Any], expected: dict[str, str]
) -> None:
    found = _shown(tables.table_of(KINDS[kind], [_object(kind, spec, status)], now=100.0))
    assert found.items() >= ({"NAME": "x", "AGE": "40s"} | expected).items()


def test_all_kinds_have_a_layout() -> None:
    for kind in KINDS.values():
        assert tables.table_of(kind, [], now=0.0).columns[0] == "NAME"


def test_the_namespace_is_a_column_when_all_are_shown() -> None:
    found = tables.table_of(
        KINDS["Pod"], [_object("Pod", POD_SPEC, {})], now=0.0, with_namespace=True
    )
    assert _shown(found)["NAMESPACE"] == "ns"


def test_a_cell_cannot_break_the_table() -> None:
    pod = _object("Pod", POD_SPEC, {"reason": "a\nb\x1b[0m"})
    assert "Pending (a b [0m)" in tables.table_of(KINDS["Pod"], [pod], now=0.0).rows[0]


def test_a_node_shows_when_it_was_last_seen() -> None:
    node = _object("Node", {}, {})
    assert isinstance(node, Node)
    presence = Presence(
        node="x",
        boot_id="b",
        version="1",
        devices=[PresenceDevice(**DEVICE)],  # type: ignore[arg-type]
        free_bytes=1024**3,
        at=93.0,
    )
    found = _shown(tables.table_of_nodes([node], {"x": presence}, (), now=100.0))  # type: ignore[dict-item]
    assert (found["SEEN"], found["FREE-DISK"], found["GPUS"]) == ("7s ago", "1 GiB", "1")


def test_a_node_that_is_not_there_says_so() -> None:
    node = _object("Node", {}, {})
    assert isinstance(node, Node)
    assert _shown(tables.table_of_nodes([node], {}, (), now=100.0))["SEEN"] == "no"


def test_a_node_shows_that_unknown_artifacts_are_below_its_artifact_root() -> None:
    rows_of = [{"type": "Ready", "status": "True", "reason": "AgentPresent"}]
    rows_of.append(
        {"type": "UnknownArtifacts", "status": "True", "reason": "UnknownArtifactsMoved"}
    )
    node = _object("Node", {}, {"conditions": rows_of})
    assert isinstance(node, Node)
    shown = _shown(tables.table_of_nodes([node], {}, (), now=100.0))
    assert shown["STATUS"] == "Ready,UnknownArtifacts"


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
    ("kind", "spec", "status", "expected"),
    [
        (
            "DynamoCheckpoint",
            {"identity": IDENTITY, "job": {"podTemplateSpec": {"spec": POD_SPEC}}},
            {"checkpointID": "abc", "contentName": "c", "conditions": [DOUBTED]},
            {
                "BACKEND": "vllm",
                "CHECKPOINTID": "abc",
                "ARTIFACT": "c",
                "REASON": "ArtifactCorrupt",
            },
        ),
        ("Snapshot", {"source": {"podRef": {"name": "w"}}}, {}, {"DRIVER": "cooperative"}),
        ("SnapshotContent", CONTENT, {}, {"DRIVER": "cooperative", "TRACE": "-"}),
        ("SnapshotRestore", RESTORE, {"contentName": "c"}, {"ARTIFACT": "c"}),
        ("Job", {"template": {"spec": POD_SPEC}}, {}, {"CONTAINERS": "main"}),
        ("Pod", POD_SPEC, {"devices": [TARGET]}, {"CONTAINERS": "main", "DEVICES": "GPU-0"}),
        ("Node", {}, {"criu": "4.2", "slots": 2}, {"CRIU": "4.2", "SLOTS": "2", "ARTIFACTS": "-"}),
    ],
)
def test_a_wide_table_shows_more_of_an_object(
    kind: str, spec: dict[str, Any], status: dict[str, Any], expected: dict[str, str]
) -> None:
    item = _object(kind, spec, status)
    shown = _shown(tables.table_of(KINDS[kind], [item], 100.0, is_wide=True))
    assert {name: shown[name] for name in expected} == expected
