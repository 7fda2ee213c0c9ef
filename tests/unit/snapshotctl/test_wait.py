"""What `wait` waits for."""

import pytest

from snapshot_shared.errors import Failure
from snapshot_shared.objects.kinds import AnyObject
from snapshot_shared.objects.kubernetes import Container, Pod, PodSpec, PodStatus
from snapshot_shared.objects.meta import Condition, ObjectMeta
from snapshot_shared.objects.snapback import (
    ContentSource,
    PodSource,
    SnapshotContent,
    SnapshotContentSpec,
    SnapshotContentStatus,
    SnapshotRef,
)
from snapshot_shared.transitions import Capture, Restore
from snapshotctl.commands.wait import ConditionIs, Gone, Met, Never, Open, judge, parse_goal
from snapshotctl.domain.exits import WrongArguments
from tests.support import builders
from tests.unit.tables import each

UID = "0" * 8 + "-0000-0000-0000-" + "0" * 12
READY = ConditionIs("Ready")


def _condition(type_: str, status: str, message: str = "") -> Condition:
    return Condition(type=type_, status=status, reason="Because", message=message)  # type: ignore[arg-type]


def _pod(**status: object) -> Pod:
    return Pod(
        metadata=ObjectMeta(name="w"),
        spec=PodSpec(containers=[Container(name="main")]),
        status=PodStatus(**status),  # type: ignore[arg-type]
    )


def _content(**status: object) -> SnapshotContent:
    return SnapshotContent(
        metadata=ObjectMeta(name="c"),
        spec=SnapshotContentSpec(
            snapshot_ref=SnapshotRef(namespace="default", name="s", uid=UID),
            source=ContentSource(
                pod_ref=PodSource(name="w"), namespace="default", node_name="node-1"
            ),
        ),
        status=SnapshotContentStatus(**status),  # type: ignore[arg-type]
    )


@pytest.mark.parametrize(
    ("text", "goal"),
    [
        ("condition=Ready", ConditionIs("Ready")),
        ("condition=Ready=False", ConditionIs("Ready", "False")),
        ("condition=Failed=true", ConditionIs("Failed")),
        ("condition=nvidia.com/Restored", ConditionIs("nvidia.com/Restored")),
        ("delete", Gone()),
    ],
)
def test_a_goal_is_read_as_kubectl_reads_it(text: str, goal: object) -> None:
    assert parse_goal(text) == goal


@pytest.mark.parametrize("text", ["", "Ready", "condition=", "condition=Ready=Maybe", "deleted"])
def test_what_is_no_goal_is_answered_with_goals(text: str) -> None:
    with pytest.raises(WrongArguments) as refused:
        parse_goal(text)
    assert "condition=Ready" in refused.value.next_step


@each(
    ("goal", "found", "expected"),
    [
        (READY, _pod(conditions=[_condition("Ready", "True", "it serves")]), Met),
        (READY, _pod(conditions=[_condition("Ready", "False")]), Open),
        (READY, _pod(), Open),
        (READY, None, Never),
        (READY, _pod(conditions=[_condition("Failed", "True")]), Never),
        (READY, _pod(phase="Failed", reason="ContainerExited"), Never),
        (READY, _pod(conditions=[_condition("Failed", "False")]), Open),
        (READY, _content(capture=Capture.FAILED), Never),
        (READY, _content(capture=Capture.ABORTING), Open),
        (ConditionIs("ready"), _pod(conditions=[_condition("Ready", "True")]), Met),
        (ConditionIs("Failed"), _pod(conditions=[_condition("Failed", "True")]), Met),
        (ConditionIs("Failed"), _pod(), Open),
        (ConditionIs("Ready", "False"), _pod(conditions=[_condition("Ready", "False")]), Met),
        (ConditionIs("Ready", "False"), _pod(phase="Failed"), Open),
        (Gone(), None, Met),
        (Gone(), _pod(phase="Failed"), Open),
    ],
)
def test_a_goal_is_met_open_or_lost(goal: object, found: AnyObject | None, expected: type) -> None:
    assert isinstance(judge(goal, found), expected)  # type: ignore[arg-type]


def test_the_failure_of_a_restore_is_the_reason_why_a_pod_never_becomes_ready() -> None:
    shown = "8 bytes are needed, a device has 4"
    restored = Condition(
        type="nvidia.com/Restored", status="False", reason="DeviceTooSmall", message=shown
    )
    verdict = judge(READY, _pod(conditions=[restored]))
    assert verdict == Never(f"DeviceTooSmall: {shown}")


def test_a_restore_that_failed_never_becomes_ready_and_one_that_is_dropped_still_may() -> None:
    failure = Failure(reason="NodeLost", message="node-1 is gone")
    failed = builders.restore(state=Restore.FAILED, failure=failure)
    assert judge(READY, failed) == Never("NodeLost: node-1 is gone")
    dropping = builders.restore(state=Restore.DROPPING, failure=failure)
    assert isinstance(judge(READY, dropping), Open)


def test_a_pod_that_has_run_to_its_end_never_becomes_ready() -> None:
    ended = _pod(phase="Succeeded", conditions=[_condition("Ready", "False")])
    assert isinstance(judge(READY, ended), Never)
    assert isinstance(judge(ConditionIs("Ready", "False"), ended), Met)


def test_a_pod_without_a_node_says_what_it_waits_for() -> None:
    row = Condition(
        type="PodScheduled", status="False", reason="NoSuchNode", message="no node matches zone=b"
    )
    verdict = judge(READY, _pod(conditions=[row]))
    assert verdict == Open("it has no condition Ready yet: NoSuchNode: no node matches zone=b")
    placed = _pod(conditions=[_condition("PodScheduled", "True", "on node-1")])
    assert judge(READY, placed) == Open("it has no condition Ready yet")
