"""Objects as rows of a table, also as they change."""

from typing import Any

import pytest
from msgspec.structs import replace

from snapshot_api.facts import GPU_RESOURCE, Container, Job, ResourceRequirements
from snapshot_api.kinds import KINDS, AnyObject, kind_of
from snapshot_api.meta import Condition
from snapshot_api.schema import definitions as crds
from snapshot_shared.errors import Failure
from snapshot_shared.ids import NodeName
from snapshot_shared.orders import DeviceRef
from snapshot_shared.transitions import Capture, Restore
from snapshotctl.views import tables
from snapshotctl.views.changing import ChangingTable, changes
from snapshotctl.views.tables import Table
from tests.support import builders, objects
from tests.support.builders import NOW, content, job, node, restore, row, snapshot
from tests.unit.tables import each

TARGET = DeviceRef(ordinal=0, uuid="GPU-0")
DEVICE = builders.device(capacity_bytes=4 * 1024**3)
READY = row("Ready", "True", "r")


def doubted(reason: str) -> Condition:
    return row("Ready", "False", reason)


def checkpoint(**status: Any) -> AnyObject:
    found = builders.with_meta(objects.checkpoint("x"), creation_timestamp=builders.STAMP)
    return builders.with_status(found, **status)


def pod(**status: Any) -> AnyObject:
    resources = ResourceRequirements(limits={GPU_RESOURCE: 2})
    container = Container(name="main", resources=resources)
    return builders.with_spec(builders.pod(**status), containers=[container])


def _shown(table: Table) -> dict[str, str]:
    return dict(zip(table.columns, table.rows[0], strict=True))


def _row_of(value: AnyObject, **more: Any) -> dict[str, str]:
    return _shown(tables.table_of(kind_of(value), [value], NOW, **more))


@each(
    ("value", "expected"),
    [
        (
            checkpoint(phase="Ready", snapshot_name="s", bytes=2 * 1024**2),
            {"PHASE": "Ready", "MODEL": "example/x", "SNAPSHOT": "s", "SIZE": "2 MiB"},
        ),
        (
            checkpoint(phase="Ready", conditions=[doubted("ArtifactCorrupt")]),
            {"PHASE": "Ready (ArtifactCorrupt)"},
        ),
        (
            checkpoint(phase="Ready", shares="llm", snapshot_name="llm"),
            {"PHASE": "Ready (shares llm)", "SNAPSHOT": "llm"},
        ),
        (
            checkpoint(phase="Failed", conditions=[doubted("Aborted")]),
            {"PHASE": "Failed (Aborted)"},
        ),
        (snapshot(conditions=[READY]), {"POD": "worker", "READY": "True", "CONTENT": "-"}),
        (
            content(
                capture=Capture.READY, conditions=[row("Quarantined", "True", "ArtifactCorrupt")]
            ),
            {"CAPTURE": "Ready (Quarantined)"},
        ),
        (
            content(capture=Capture.READY, attempt=2, committed=None),
            {"CAPTURE": "Ready", "ATTEMPT": "2", "NODE": "node-1", "SNAPSHOT": "default/snap"},
        ),
        (
            restore(state=Restore.LOADING, attempt=1, node_name="node-1", devices=[TARGET]),
            {"POD": "worker", "SOURCE": "snap", "STATE": "Loading", "NODE": "node-1", "GPUS": "1"},
        ),
        (
            restore(state=Restore.FAILED, failure=Failure(reason="NoSpace", message="full")),
            {"STATE": "Failed (NoSpace)", "ATTEMPT": "0", "NODE": "-"},
        ),
        (
            job(active=1, ready=1, failed=2),
            {"ACTIVE": "1", "READY": "1", "SUCCEEDED": "0", "FAILED": "2"},
        ),
        (pod(phase="Unknown", reason="NodeSilent"), {"STATUS": "Unknown (NodeSilent)"}),
        (
            pod(phase="Failed", reason="DeviceTooSmall", node_name="node-1"),
            {"READY": "0/1", "STATUS": "Failed (DeviceTooSmall)", "NODE": "node-1", "GPUS": "2"},
        ),
        (
            node(devices=[DEVICE], drivers=["cooperative"]),
            {"STATUS": "Unknown", "GPUS": "1", "GPU-MEMORY": "4 GiB", "DRIVERS": "cooperative"},
        ),
        (node(conditions=[doubted("r")]), {"STATUS": "NotReady"}),
        (
            node(conditions=[READY, row("UnknownArtifacts", "True", "UnknownArtifactsMoved")]),
            {"STATUS": "Ready,UnknownArtifacts"},
        ),
        (
            builders.with_spec(node(conditions=[READY]), unschedulable=True),
            {"STATUS": "Ready,SchedulingDisabled"},
        ),
    ],
)
def test_each_kind_shows_what_people_ask_for(value: AnyObject, expected: dict[str, str]) -> None:
    name_and_age = {"NAME": value.metadata.name, "AGE": "10s"}
    assert _row_of(value).items() >= (name_and_age | expected).items()


def test_all_kinds_have_a_layout_with_a_namespace_on_request_and_cells_that_keep_it() -> None:
    for kind in KINDS.values():
        assert tables.table_of(kind, [], now=0.0).columns[0] == "NAME"
    assert _row_of(pod(), with_namespace=True)["NAMESPACE"] == "default"
    assert "Pending (a b)" in _row_of(pod(reason="a\nb\x1b[0m")).values()


def test_a_node_shows_when_it_was_last_seen_or_that_it_is_not_there() -> None:
    seen = objects.presence("node-1", gpus=1)
    there = {NodeName("node-1"): replace(seen, free_bytes=1024**3, at=NOW - 7)}
    found = _shown(tables.table_of_nodes([node()], there, (), NOW))
    assert (found["SEEN"], found["FREE-DISK"], found["GPUS"]) == ("7s ago", "1 GiB", "1")
    assert _shown(tables.table_of_nodes([node()], {}, (), NOW))["SEEN"] == "no"


@pytest.mark.parametrize(
    "definition", crds.definitions(), ids=lambda found: str(found["spec"]["names"]["kind"])
)
def test_a_wide_table_has_the_wide_columns_of_kubectl(definition: dict[str, Any]) -> None:
    kind = KINDS[definition["spec"]["names"]["kind"]]
    [version] = definition["spec"]["versions"]
    # Our tables have the unit with each value.
    wide = {
        column["name"].removesuffix("(s)").upper()
        for column in version["additionalPrinterColumns"]
        if column.get("priority")
    }
    head = tables.table_of(kind, [], 0.0, is_wide=True).columns
    # The snapshot of a content is one column here, and the content of a snapshot is not wide.
    assert wide - set(head) <= {"NAMESPACE", "ARTIFACT"}
    assert len(head) > len(tables.table_of(kind, [], 0.0).columns)


@each(
    ("value", "expected"),
    [
        (
            checkpoint(
                checkpoint_id="abc",
                content_name="c",
                conditions=[doubted("ArtifactCorrupt")],
            ),
            {
                "BACKEND": "vllm",
                "CHECKPOINTID": "abc",
                "ARTIFACT": "c",
                "REASON": "ArtifactCorrupt",
            },
        ),
        (snapshot(), {"DRIVER": "cooperative"}),
        (content(), {"DRIVER": "cooperative", "TRACE": "-"}),
        (restore(content_name="c"), {"ARTIFACT": "c"}),
        (job(), {"CONTAINERS": "main"}),
        (pod(devices=[TARGET]), {"CONTAINERS": "main", "DEVICES": "GPU-0"}),
        (node(criu="4.2", slots=2), {"CRIU": "4.2", "SLOTS": "2", "ARTIFACTS": "-"}),
    ],
)
def test_a_wide_table_shows_more_of_an_object(value: AnyObject, expected: dict[str, str]) -> None:
    shown = _row_of(value, is_wide=True)
    assert {name: shown[name] for name in expected} == expected


def _job(name: str, version: str = "1", uid: str = "") -> Job:
    return builders.with_meta(job(name), uid=uid or name, resource_version=version)


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
    assert row.startswith("default     a-long-name   0")
    [later] = table.lines([_job("b")], 0.0, is_gone=True)
    assert not table.is_first
    assert later.startswith("default     b             0")
    assert later.endswith("   (deleted)")
