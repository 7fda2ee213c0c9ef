"""How an object stands, why, what to do, and all that is known of it, in plain words."""

from __future__ import annotations

from typing import Any

import pytest

from snapshot_api.kinds import AnyObject
from snapshot_api.manifests import parse
from snapshot_api.meta import time_of
from snapshot_shared.errors import Failure
from snapshot_shared.ids import NodeName, derived_uid
from snapshot_shared.orders import Presence, VectorEntry
from snapshot_shared.transitions import Capture, Restore
from snapshotctl.commands import describe
from snapshotctl.commands.describe import Section
from snapshotctl.views import explanation
from snapshotctl.views.related import RelatedObjects
from snapshotctl.views.state import ObjectState, object_state
from tests.support import builders
from tests.support.builders import NOW, row
from tests.support.objects import pod_document, unready
from tests.unit.tables import each

UID = derived_uid("content", "snap")
TOO_SMALL = Failure(
    reason="DeviceTooSmall",
    message="the snapshot needs 9 bytes",
    values={"needed": 9, "capacity": 4},
    next_step="choose a larger node",
)


def _related(*members: AnyObject) -> RelatedObjects:
    return RelatedObjects(members[0], members)


def _state(*members: AnyObject) -> ObjectState:
    return object_state(_related(*members))


def _headline(*members: AnyObject) -> str:
    related = _related(*members)
    return explanation.headline(related, object_state(related))


def _advice(*members: AnyObject, silent: tuple[str, ...] = ()) -> list[str]:
    related = _related(*members)
    return explanation.advice(related, object_state(related), silent)


def _now(*members: AnyObject, **more: Any) -> list[str]:
    given: dict[str, Any] = {"presence": {}, "progress": None, "silent": [], "now": NOW, **more}
    related = _related(*members)
    return explanation.now_lines(related, object_state(related), **given)


@pytest.mark.parametrize(
    ("gpus", "node", "said"),
    [
        (0, None, ""),
        (0, "node-1", " on node-1"),
        (1, None, " on 1 GPU"),
        (2, "node-1", " on 2 GPUs of node-1"),
    ],
)
def test_a_pod_is_asked_to_run_where_it_says(gpus: int, node: str | None, said: str) -> None:
    limits = {"nvidia.com/gpu": gpus} if gpus else {}
    document = pod_document(gpus=0)
    document["spec"]["containers"][0]["resources"] = {"limits": limits}
    if node:
        document["spec"]["nodeName"] = node
    assert explanation.asked(parse(document)) == f"run a worker{said}"


def test_a_failed_restore_shows_both_values_and_the_next_step() -> None:
    failed = [row("Failed", "True", "DeviceTooSmall", "m")]
    restore = builders.restore(state=Restore.FAILED, failure=TOO_SMALL, conditions=failed)
    assert explanation.asked(restore) == "restore container main of pod worker from snap"
    pod = builders.pod(source="snap", phase="Failed", conditions=failed)
    for members in ((pod, restore), (restore, pod)):
        found = _state(*members)
        assert (found.word, found.reason) == ("failed", "DeviceTooSmall")
        assert _now(*members)[1:3] == ["needed: 9", "capacity: 4"]
        assert _advice(*members)[0] == "choose a larger node"


def test_a_pod_says_what_its_restore_waits_for_before_what_it_says_itself() -> None:
    starting = [row("Ready", "False", "Starting", "the containers are being started")]
    pod = builders.pod(source="snap", phase="Running", conditions=starting)
    again = [row("Ready", "False", "Retrying", "the GPU memory service was killed")]
    found = _state(pod, builders.restore(state=Restore.PENDING, conditions=again))
    assert (found.word, found.reason) == ("waiting", "Retrying")
    loading = builders.restore(state=Restore.LOADING, conditions=again)
    assert _state(pod, loading).word == "under way"


def test_a_pod_of_a_silent_node_is_neither_well_nor_failed() -> None:
    ready = [row("Ready", "True", "WorkerReady", "ready for a snapshot")]
    shown = "node node-1 is silent: its worker may well run"
    pod = builders.pod(phase="Unknown", reason="NodeSilent", message=shown, conditions=ready)
    found = _state(pod)
    assert (found.word, found.reason) == ("unknown", "NodeSilent")
    assert _headline(pod) == "pod/worker may or may not run: NodeSilent"
    assert _now(pod) == [shown]
    assert any("snapshotctl nodes" in line for line in _advice(pod))


def test_a_refusal_of_the_scheduler_keeps_the_step_that_stands_in_its_condition() -> None:
    shown = "the snapshot has 2 GPUs, the pod asks for 1. Next: ask for 2"
    rows = [
        row("Ready", "False", "Incompatible", shown),
        row("Failed", "True", "Incompatible", shown),
    ]
    pod = builders.pod(source="snap", phase="Failed", reason="Incompatible", conditions=rows)
    assert _state(pod).message == "the snapshot has 2 GPUs, the pod asks for 1"
    assert _advice(pod)[0] == "ask for 2"
    assert "`snapshotctl artifacts show snap`" in _advice(pod)[1]


def test_a_snapshot_fails_for_the_reason_of_its_capture_with_its_values() -> None:
    rows = [row("Failed", "True", "DeviceTooSmall", "m")]
    snapshot = builders.snapshot(conditions=rows)
    content = builders.content(capture=Capture.FAILED, failure=TOO_SMALL, conditions=rows)
    assert _state(snapshot, content).values == {"needed": 9, "capacity": 4}
    assert _headline(snapshot, content) == "snapshot/snap has failed: DeviceTooSmall"


@pytest.mark.parametrize(
    ("state", "shown"), [("ordered", "has not accepted it"), ("accepted", "reported accepted")]
)
def test_what_is_under_way_names_the_oldest_order_that_is_not_answered(
    state: str, shown: str
) -> None:
    orders = [
        builders.ended(builders.order("prepare", UID, at=NOW - 9), "prepared"),
        builders.order("save", UID, part="gpu-0", at=NOW - 4, state=state),
        builders.order("dump", UID, at=NOW - 3),
    ]
    rows = [row("Ready", "False", "Capturing", "attempt 1 is under way")]
    content = builders.content(capture=Capture.STAGING, orders=orders, conditions=rows)
    found = _state(content)
    assert (found.word, found.order, found.since) == ("under way", orders[1], NOW - 4)
    presence = Presence(node="node-1", boot_id="b", version="1", at=NOW - 7)
    progress = builders.progress(
        order=orders[1].order, part="gpu-0", done=1024, total=4096, at=NOW - 2
    )
    assert _now(content, presence={NodeName("node-1"): presence}, progress=progress) == [
        "attempt 1 is under way",
        f"waits for gms@node-1 to end save-{UID}-gpu-0 (attempt 1)",
        f"ordered 4s ago; gms@node-1 {shown}; its deadline is in 56s",
        "last progress 2s ago: gpu-0, step write, 1 KiB of 4 KiB, 512 B/s, 6 s left",
        "node-1 was last seen 7s ago",
    ]


def test_what_a_worker_waits_for_is_shown_instead_of_bytes() -> None:
    orders = [builders.order("prepare", UID, at=NOW - 9, state="accepted")]
    content = builders.content(capture=Capture.PREPARING, orders=orders)
    more = {"order": orders[0].order, "step": "quiesce", "total": 0, "done": 0, "at": NOW - 2}
    shown = _now(content, progress=builders.progress(**more, awaits="1 request under way\n"))
    assert "step quiesce waits for the worker: 1 request under way, 2s ago" in shown
    assert not [line for line in shown if "last progress" in line]


def test_a_silent_node_and_a_service_that_does_not_answer_are_named() -> None:
    late = builders.order("prepare", UID, at=NOW - 100)
    content = builders.content(capture=Capture.PREPARING, orders=[late])
    lines = _now(content)
    assert "its deadline has passed" in lines[-2]
    assert lines[-1].startswith("node-1 is silent")
    assert explanation.asked_services(_related(content), _state(content)) == [("node-1", "agent")]
    assert _now(content, silent=["agent@node-1"])[-1].startswith("agent@node-1 does not answer")
    assert _advice(content, silent=("agent@node-1",)) == [
        "Start agent@node-1 again; in a local cluster: `snapshotctl sim restart node-1`."
    ]


def test_what_waits_shows_its_reason_and_since_when() -> None:
    rows = [row("PodScheduled", "False", "Unschedulable", "node-1 has 0 of 1 GPUs free")]
    pod = builders.pod(conditions=rows)
    assert _headline(pod) == "pod/worker waits: Unschedulable"
    assert _now(pod)[0] == "node-1 has 0 of 1 GPUs free"
    assert _now(pod)[1].endswith("10s ago")


def _going(value: AnyObject) -> ObjectState:
    return _state(builders.with_meta(value, deletion_timestamp=builders.STAMP))


def test_a_capture_waits_unless_it_goes_on_between_two_orders_or_is_being_deleted() -> None:
    rows = [row("Ready", "False", "Capturing", "attempt 1 is under way")]
    sealing = builders.content(capture=Capture.SEALING, conditions=rows)
    assert _state(sealing).word == "under way"
    assert _state(builders.content(conditions=rows)).word == "waiting"
    read = [row("Deleting", "False", "ReadersRegistered", "restored by x")]
    found = _going(builders.content(capture=Capture.READY, conditions=read))
    assert (found.word, found.reason) == ("going", "ReadersRegistered")
    ended = builders.pod(phase="Failed", reason="ContainerExited", message="exit code 3")
    assert (_state(ended).word, _going(ended).word) == ("failed", "going")


def test_what_is_damaged_is_not_well_although_it_was_captured() -> None:
    rows = [
        row("Ready", "False", "ArtifactCorrupt", "quarantined: part gpu-0"),
        row("Quarantined", "True", "ArtifactCorrupt", "part gpu-0"),
    ]
    done = builders.committed()
    content = builders.content(capture=Capture.READY, committed=done, conditions=rows)
    assert _headline(content).endswith("is damaged: ArtifactCorrupt")
    assert any("snapshotctl verify" in line for line in _advice(content))


def test_what_is_well_or_no_object_needs_nothing_that_explains_objects() -> None:
    rows = [row("Ready", "True", "WorkerReady", "ready for a snapshot")]
    well = builders.pod(phase="Running", conditions=rows)
    assert _state(well).word == "fine"
    assert _advice(well) == ["Capture it: `snapshotctl checkpoint worker`."]
    failed = row("Failed", "True", "NotFound", "no program 'x' on node-1. Next: install it there")
    pod = builders.pod(phase="Failed", reason="NotFound", conditions=[failed])
    assert _advice(pod) == ["install it there"]


def test_a_node_is_there_or_not_or_lost() -> None:
    there, absent = row("Ready", "True", "AgentPresent"), row("Ready", "False", "PresenceMissing")
    for rows, headline in (
        ([there], "node/n is well: AgentPresent"),
        ([absent], "node/n is not there: PresenceMissing"),
        ([absent, row("Lost", "True", "PresenceMissing")], "node/n is lost: PresenceMissing"),
    ):
        assert _headline(builders.node("n", conditions=rows)) == headline


@each(
    ("text", "filled"),
    [
        ("`snapshotctl explain NAME`", "`snapshotctl explain snap`"),
        ("`snapshotctl explain pod/NAME`", "`snapshotctl explain pod/worker`"),
        ("`snapshotctl checkpoint POD`", "`snapshotctl checkpoint worker`"),
        ("`snapshotctl describe KIND NAME`", "`snapshotctl describe snapshot snap`"),
        ("`snapshotctl delete job NAME`", "`snapshotctl delete job NAME`"),
        ("`snapshotctl sim restart NODE`", "`snapshotctl sim restart node-7`"),
        ("set SNAPBACK_NODE", "set SNAPBACK_NODE"),
    ],
)
def test_a_fix_has_the_names_of_the_story(text: str, filled: str) -> None:
    run = builders.order("run", derived_uid("pod", "worker"), node="node-7")
    related = _related(builders.snapshot(), builders.pod(orders=[run]))
    assert explanation.filled(text, related) == filled


def test_a_log_line_matters_when_it_names_the_story_or_is_a_warning_of_its_node() -> None:
    def line(message: str, level: str = "INFO", at: str = "2026-01-01T00:00:02Z") -> str:
        return f'{{"at": "{at}", "level": "{level}", "message": "{message}"}}'

    lines = [
        ("node-1-agent", line("about x-1", at="2026-01-01T00:00:03Z")),
        ("node-1-agent", line("other")),
        ("node-1-agent", line("trouble", "WARNING")),
        ("node-2-agent", line("their trouble", "WARNING")),
        ("node-1-agent", line("old trouble", "WARNING", "2025-01-01T00:00:00Z")),
        ("operator", "not JSON, of x-1"),
    ]
    found = explanation.relevant_lines(
        lines, ["x-1"], ["operator", "node-1-agent"], "2026-01-01T00:00:00Z"
    )
    assert [item.text for item in found] == ["not JSON, of x-1", "trouble", "about x-1"]


def test_a_line_about_the_order_of_another_object_is_not_of_this_one() -> None:
    warns = '{"at": "2", "level": "WARNING", "order_id": "o", "trace_id": "t-1"}'
    lines = [
        ("operator", '{"at": "1", "level": "INFO", "message": "applied", "trace_id": "t-1"}'),
        ("node-1-agent", warns),
    ]

    def found(names: list[str], traces: list[str]) -> list[str]:
        of = explanation.relevant_lines(lines, names, ["node-1-agent"], "", traces=traces)
        return [line.text for line in of]

    assert found(["mine"], []) == []
    assert found(["mine"], ["t-1"]) == ["applied"]
    # A node tells the troubles of everything on it.
    assert len(found([], [])) == 1


@each(
    ("line", "text"),
    [
        ('    raise OSError("no")', '    raise OSError("no")'),
        (
            '{"message": "it failed", "traceback": "Traceback:\\n  a\\nOSError: no"}',
            "it failed [OSError: no]",
        ),
    ],
)
def test_a_traceback_keeps_its_indentation_or_is_its_last_line(line: str, text: str) -> None:
    assert explanation.parse_log_line("main", line).text == text


def test_an_explanation_does_not_advise_to_read_itself() -> None:
    pod = builders.pod()
    text = "Wait; if it lasts, read it: `snapshotctl explain pod/worker`."
    assert explanation.pointing_up(text, pod) == "Wait; if it lasts, read it: the text above."
    starts = "`snapshotctl explain worker` shows which order failed first."
    assert explanation.pointing_up(starts, pod) == "The text above shows which order failed first."
    other = "See `snapshotctl explain pod/worker-2`."
    assert explanation.pointing_up(other, pod) == other


def test_a_node_says_which_process_drivers_it_has_and_why_it_cannot_use_another() -> None:
    why = Failure(reason="NotEligible", message="CRIU did not dump", next_step="use CRIU 4.2")
    unusable = unready(why, "criu")
    lines = _now(builders.node(drivers=["cooperative"], criu="4.1.1", unready=unusable))
    assert "process drivers: cooperative, CRIU 4.1.1" in lines
    assert "it cannot use the process driver criu: CRIU did not dump. Next: use CRIU 4.2" in lines


def test_what_was_captured_or_restored_says_what_it_has_cost() -> None:
    content = builders.content(
        attempt=1,
        committed=builders.committed(bytes=2**30),
        captured_seconds=4.0,
        paused_seconds=0.1,
        conditions=[row("Ready", "True", "Captured", "generation 1, 1 GiB")],
    )
    cost = "captured 1 GiB in 4.00 s (268 MB/s); worker paused for 100 ms"
    assert cost in _now(content)
    assert cost in _now(builders.snapshot(), content)
    restore = builders.restore(state=Restore.RESTORED, attempt=1, restored_seconds=1.24)
    assert "restored in 1.24 s" in _now(builders.pod(source="snap"), restore)


def _rows(section: Section) -> list[tuple[str, ...]]:
    assert section.table is not None
    return section.table.rows


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
    assert _rows(found["Conditions:"]) == [("Ready", "True", "Captured", "10s", "generation 1")]
    assert [row[:3] for row in _rows(found["Parts:"])] == [
        ("process", "10 B", builders.DIGEST),
        ("gpu-0", "-", "not staged"),
    ]
    [order] = _rows(found["Orders:"])
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
    assert [row[0] for row in _rows(found["Orders:"])] == [load.order]
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
    assert "message:         ab" in _sections(value)["Status:"].lines
