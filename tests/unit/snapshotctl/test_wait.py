"""What `wait` waits for."""

import pytest

from snapshot_api.kinds import AnyObject
from snapshot_shared.errors import Failure
from snapshot_shared.transitions import Capture, Restore
from snapshotctl.commands.wait import ConditionIs, Gone, Met, Never, Open, judge, parse_goal
from snapshotctl.domain.exits import WrongArguments
from tests.support import builders
from tests.support.builders import pod, row
from tests.unit.tables import each

READY = ConditionIs("Ready")


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
        (READY, pod(conditions=[row("Ready", "True", "Because", "it serves")]), Met),
        (READY, pod(conditions=[row("Ready", "False", "Because")]), Open),
        (READY, pod(), Open),
        (READY, None, Never),
        (READY, pod(conditions=[row("Failed", "True", "Because")]), Never),
        (READY, pod(phase="Failed", reason="ContainerExited"), Never),
        (READY, pod(conditions=[row("Failed", "False", "Because")]), Open),
        (READY, builders.content(capture=Capture.FAILED), Never),
        (READY, builders.content(capture=Capture.ABORTING), Open),
        (ConditionIs("ready"), pod(conditions=[row("Ready", "True", "Because")]), Met),
        (ConditionIs("Failed"), pod(conditions=[row("Failed", "True", "Because")]), Met),
        (ConditionIs("Failed"), pod(), Open),
        (ConditionIs("Ready", "False"), pod(conditions=[row("Ready", "False", "Because")]), Met),
        (ConditionIs("Ready", "False"), pod(phase="Failed"), Open),
        (Gone(), None, Met),
        (Gone(), pod(phase="Failed"), Open),
    ],
)
def test_a_goal_is_met_open_or_lost(goal: object, found: AnyObject | None, expected: type) -> None:
    assert isinstance(judge(goal, found), expected)  # type: ignore[arg-type]


def test_what_has_failed_or_ended_never_becomes_ready_and_what_is_dropped_still_may() -> None:
    failure = Failure(reason="NodeLost", message="node-1 is gone")
    failed = builders.restore(state=Restore.FAILED, failure=failure)
    assert judge(READY, failed) == Never("NodeLost: node-1 is gone")
    dropping = builders.restore(state=Restore.DROPPING, failure=failure)
    assert isinstance(judge(READY, dropping), Open)
    shown = "8 bytes are needed, a device has 4"
    restored = row("nvidia.com/Restored", "False", "DeviceTooSmall", shown)
    verdict = judge(READY, pod(conditions=[restored]))
    assert verdict == Never(f"DeviceTooSmall: {shown}")
    ended = pod(phase="Succeeded", conditions=[row("Ready", "False", "Because")])
    assert isinstance(judge(READY, ended), Never)
    assert isinstance(judge(ConditionIs("Ready", "False"), ended), Met)


def test_a_pod_without_a_node_says_what_it_waits_for() -> None:
    waits = row("PodScheduled", "False", "NoSuchNode", "no node matches zone=b")
    verdict = judge(READY, pod(conditions=[waits]))
    assert verdict == Open("it has no condition Ready yet: NoSuchNode: no node matches zone=b")
    placed = pod(conditions=[row("PodScheduled", "True", "Because", "on node-1")])
    assert judge(READY, placed) == Open("it has no condition Ready yet")
