"""What an agent does at its start with what the last one left, and how far its drivers came."""

import msgspec
import pytest

from snapshot_agent.domain.driving import PHASE_NOTE, Phase, Release, device_map, phase_of
from snapshot_agent.domain.recovery import (
    TABLE,
    CaptureLeft,
    DumpState,
    PodRecovery,
    PrepareState,
    Recovery,
    deadline_of,
    decide,
    interruption,
    run_row,
)
from snapshot_shared.artifact import RootPart
from snapshot_shared.ledger import Began, Ended, Entry, Ledger, Noted, Record, Reported
from snapshot_shared.orders import DeviceRef
from tests.support import builders
from tests.support.builders import UID
from tests.unit.tables import each


def entry(
    verb: str, *steps: str, ended: int = 0, terminal: str = "", no_replay: bool = False
) -> Entry:
    name = f"{verb}-{UID}"
    records: list[Record] = [builders.accepted(order=name, wall=0.0)]
    if no_replay:
        records.append(Noted(order=name, attempt=1, key="no-replay", value=True))
    for index, step in enumerate(steps):
        records.append(Began(order=name, attempt=1, step=step))
        if index < ended:
            records.append(Ended(order=name, attempt=1, step=step))
    if terminal:
        records.append(Reported(report=builders.told(order=name, kind=terminal)))
    ledger = Ledger()
    for record in records:
        ledger.apply(record)
    return ledger.entries[name]


WAITING = entry("prepare")
QUIESCING = entry("prepare", "gate", "guard", "quiesce", ended=2)
BETWEEN = entry("prepare", "gate", "guard", ended=2)
PREPARED = entry("prepare", terminal="prepared")
FAILED = entry("prepare", terminal="failed")
DUMP_WAITING = entry("dump")
FREEZING = entry("dump", "freeze")
COPYING = entry("dump", "freeze", "copy-state", ended=1, no_replay=True)
STAGED = entry("dump", terminal="staged")
DUMP_FAILED = entry("dump", terminal="failed")
LEFT = CaptureLeft(PREPARED, STAGED, is_settled=False, is_let_go=False, is_overdue=False)


@each(
    ("prepare", "dump", "decision"),
    [
        (WAITING, None, Recovery.NOTHING),
        (QUIESCING, None, Recovery.COMPENSATE),
        (BETWEEN, None, Recovery.COMPENSATE),
        (FAILED, None, Recovery.NOTHING),
        (PREPARED, None, Recovery.HOLD),
        (PREPARED, DUMP_WAITING, Recovery.HOLD),
        (PREPARED, FREEZING, Recovery.COMPENSATE),
        (PREPARED, COPYING, Recovery.COMPENSATE),
        (PREPARED, STAGED, Recovery.HOLD),
        (PREPARED, DUMP_FAILED, Recovery.HOLD),
        (WAITING, STAGED, Recovery.COMPENSATE),
    ],
)
def test_what_was_prepared_is_held_and_what_was_cut_off_is_undone(
    prepare: Entry, dump: Entry | None, decision: Recovery
) -> None:
    assert decide(LEFT._replace(prepare=prepare, dump=dump)) is decision


@each("prepare", [WAITING, QUIESCING, PREPARED, FAILED])
@each("dump", [None, DUMP_WAITING, FREEZING, COPYING, STAGED])
def test_nothing_is_done_for_a_capture_that_was_released_or_aborted(
    prepare: Entry, dump: Entry | None
) -> None:
    left = CaptureLeft(prepare, dump, is_settled=True, is_let_go=True, is_overdue=True)
    assert decide(left) is Recovery.NOTHING


@each(("let_go", "overdue"), [(True, False), (False, True), (True, True)])
def test_a_hold_whose_worker_goes_on_already_or_whose_time_is_up_is_only_reported(
    let_go: bool, overdue: bool
) -> None:
    left = LEFT._replace(is_let_go=let_go, is_overdue=overdue)
    assert decide(left) is Recovery.LET_GO
    assert decide(left._replace(dump=COPYING)) is Recovery.COMPENSATE


@pytest.mark.parametrize(
    ("boot_id", "noted", "deadline"),
    [("b", 130.0, 130.0), ("b", None, 160.0), ("another", 130.0, 100.0), ("another", None, 100.0)],
)
def test_a_hold_keeps_its_deadline_over_a_restart_and_ends_with_a_reboot(
    boot_id: str, noted: float | None, deadline: float
) -> None:
    assert deadline_of(PREPARED, noted, 60.0, boot_id=boot_id, now=100.0) == deadline


def test_every_pair_that_can_arise_in_order_stands_in_the_table() -> None:
    begun = {(PrepareState.PREPARED, dump) for dump in DumpState}
    before = {(prepare, DumpState.WAITING) for prepare in PrepareState}
    assert set(TABLE) == begun | before


def test_the_order_that_was_cut_off_is_the_one_that_fails() -> None:
    assert LEFT._replace(prepare=QUIESCING, dump=None).interrupted is QUIESCING
    assert LEFT._replace(dump=COPYING).interrupted is COPYING
    assert LEFT.interrupted is None


def test_a_step_that_was_cut_off_is_not_open_any_more_when_the_table_has_begun_again() -> None:
    again = entry("restore", "check", "fill-state", ended=1)
    for step in ("check", "fill-state", "signal"):
        _apply(again, Began(order=again.order, attempt=1, step=step))
        _apply(again, Ended(order=again.order, attempt=1, step=step))
    assert again.open_step is None
    _apply(again, Began(order=again.order, attempt=1, step="await-restored"))
    assert again.open_step == "await-restored"


def _apply(known: Entry, record: Record) -> None:
    ledger = Ledger()
    ledger.entries[known.order] = known
    ledger.apply(record)


def test_a_step_that_must_not_run_twice_has_an_unknown_outcome_others_may_be_tried_again() -> None:
    unknown = interruption(COPYING).to_failure()
    assert (unknown.reason, unknown.retryable) == ("OutcomeUnknown", False)
    assert unknown.values == {"step": "copy-state"}
    assert unknown.message == "the agent was restarted within dump, step copy-state"
    undone = interruption(QUIESCING).to_failure()
    assert (undone.reason, undone.retryable) == ("AgentRestarted", True)
    assert undone.values == {"step": "quiesce"}
    between = interruption(BETWEEN).to_failure()
    assert between.message == "the agent was restarted within prepare, step guard; it was undone"


@each(
    ("run", "recovery", "may_run"),
    [
        (entry("run"), PodRecovery.NOTHING, False),
        (entry("run", "resolve", ended=1), PodRecovery.NOTHING, False),
        (entry("run", "resolve", "spawn", ended=1), PodRecovery.FINISH, True),
        (entry("run", "resolve", "spawn", ended=2, terminal="started"), PodRecovery.FOLLOW, True),
        (entry("run", "resolve", ended=1, terminal="failed"), PodRecovery.NOTHING, False),
        (entry("run", "resolve", "spawn", ended=1, terminal="failed"), PodRecovery.NOTHING, True),
    ],
)
def test_a_pod_is_recovered_by_how_far_its_run_order_came(
    run: Entry, recovery: PodRecovery, *, may_run: bool
) -> None:
    assert run_row(run) == (recovery, may_run)


def test_a_pod_that_has_exited_is_left_alone() -> None:
    run = entry("run", "resolve", "spawn", ended=2, terminal="started")
    run.reports.append(builders.told(order=run.order, n=9, kind="exited"))
    assert run_row(run) == (PodRecovery.NOTHING, False)


def test_the_phase_of_a_dump_is_the_one_on_record() -> None:
    dump = Entry(builders.accepted(order=f"dump-{UID}", wall=0.0))
    assert phase_of(None) is phase_of(dump) is Phase.SIGNAL
    dump.notes[PHASE_NOTE] = msgspec.json.decode(msgspec.json.encode(Phase.BEGUN))
    assert phase_of(dump) is Phase.BEGUN
    assert Release() == ((), 0.0, False, False)


def part(name: str, device: str) -> RootPart:
    return builders.root_part(name, layout=builders.layout(device=device))


def test_a_device_takes_the_place_of_the_one_with_its_ordinal() -> None:
    process = builders.root_part("process")
    root = builders.root_manifest(part("gpu-1", "old-b"), part("gpu-0", "old-a"), process)
    here = [DeviceRef(ordinal=0, uuid="new-a"), DeviceRef(ordinal=1, uuid="new-b")]
    assert device_map(root, here) == {"old-a": "new-a", "old-b": "new-b"}
    assert device_map(root, here[:1]) == {"old-a": "new-a"}
