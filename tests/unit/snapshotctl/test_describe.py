"""An object as titled lines and small tables."""

from __future__ import annotations

from snapshot_shared.errors import Failure
from snapshot_shared.ids import derived_uid
from snapshot_shared.objects.kinds import AnyObject
from snapshot_shared.objects.meta import time_of
from snapshot_shared.orders import VectorEntry
from snapshot_shared.transitions import Capture, Restore
from snapshotctl.commands import describe
from snapshotctl.commands.describe import Section
from tests.support import builders
from tests.support.builders import NOW, row

UID = derived_uid("content", "snap")


def _sections(value: AnyObject, *readers: str) -> dict[str, Section]:
    return {section.title: section for section in describe.sections(value, readers, NOW)}


def test_a_content_has_parts_readers_orders_and_obligations() -> None:
    failure = Failure(reason="NoSpace", message="full")
    failed = builders.ended(builders.order("seal", UID), "failed", failure)
    value = builders.content(
        capture=Capture.READY,
        started_at=time_of(NOW),
        orders=[failed],
        obligations=["release"],
        committed=builders.committed(),
        vector=[VectorEntry(part="process"), VectorEntry(part="gpu-0", ordinal=0)],
        conditions=[row("Ready", "True", "Captured", "generation 1")],
    )
    found = _sections(value, "default: pod/reader")
    assert found["Conditions:"].table is not None
    assert found["Conditions:"].table.rows == [("Ready", "True", "Captured", "10s", "generation 1")]
    assert found["Parts:"].table is not None
    assert [row[:3] for row in found["Parts:"].table.rows] == [
        ("process", "10 B", builders.DIGEST),
        ("gpu-0", "-", "not staged"),
    ]
    assert found["Orders:"].table is not None
    [order] = found["Orders:"].table.rows
    assert order[1:4] == ("1", "agent@node-1", "failed")
    assert order[5:] == ("2.00 s", "NoSpace: full")
    assert found["Readers:"].lines == ("default: pod/reader",)
    assert found["Obligations:"].lines == ["release"]
    assert "startedAt:       1970-01-12T13:46:40Z" in found["Status:"].lines


def test_a_restore_has_its_state_and_orders_and_a_pod_shows_those_of_its_own() -> None:
    uid = derived_uid("restore", "r")
    load = builders.ended(builders.order("load", uid, part="gpu-0"), "loaded")
    restore = builders.restore(
        state=Restore.RESTORING, attempt=1, content_name="content-1", orders=[load]
    )
    found = _sections(restore)
    assert "source:          snap" in found["Spec:"].lines
    assert "state:           Restoring" in found["Status:"].lines
    assert found["Orders:"].table is not None
    assert [row[0] for row in found["Orders:"].table.rows] == [load.order]
    pod = builders.pod(source="snap", phase="Running")
    shown = {section.title: section for section in describe.sections(pod, [], NOW, restore)}
    assert f"name:            {restore.metadata.name}" in shown["Restore:"].lines
    assert "contentName:     content-1" in shown["Restore:"].lines
    assert shown["Orders of the restore:"].table == found["Orders:"].table
    assert "Restore:" not in _sections(pod)


def test_lists_and_what_is_nested_are_indented_and_what_is_empty_is_left_out() -> None:
    spec = _sections(builders.pod(phase="Running"))["Spec:"].lines
    assert spec == ["containers:", "  - name:            main", "    command:", "      x"]


def test_text_of_others_cannot_move_the_cursor() -> None:
    value = builders.pod(message="a\x1b[2Jb", phase="Failed")
    assert "message:         a [2Jb" in _sections(value)["Status:"].lines
