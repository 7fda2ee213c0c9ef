"""Objects as they change."""

import msgspec

from snapshot_shared.objects.kinds import KINDS
from snapshot_shared.objects.kubernetes import Job
from snapshotctl.views.changing import ChangingTable, changes


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
