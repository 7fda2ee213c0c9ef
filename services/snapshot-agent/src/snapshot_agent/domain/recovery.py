"""What an agent does at its start with the captures and pods that the one before left behind.

A capture that was prepared is held until its release. One that was interrupted is undone and
reported as failed, because the journal does not say how far its open step came.
"""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple

from snapshot_shared.errors import Aborted, OutcomeUnknown, SnapbackError
from snapshot_shared.ledger import Entry


class PrepareState(StrEnum):
    """How far a prepare order came. WAITING: no step has begun."""

    WAITING = "waiting"
    INTERRUPTED = "interrupted"
    PREPARED = "prepared"
    FAILED = "failed"


class DumpState(StrEnum):
    """How far the dump order of the same attempt came."""

    WAITING = "waiting"
    INTERRUPTED = "interrupted"
    ENDED = "ended"


class Recovery(StrEnum):
    """What is to be done with a capture.

    NOTHING: it is over, or its order is carried out again. COMPENSATE: undo it, and fail the
    interrupted order. HOLD: keep the worker quiesced under a guard until the release. LET_GO: the
    worker runs already or the deadline has passed; release it as unconfirmed.
    """

    NOTHING = "nothing"
    COMPENSATE = "compensate"
    HOLD = "hold"
    LET_GO = "let-go"


TABLE: dict[tuple[PrepareState, DumpState], Recovery] = {
    (PrepareState.WAITING, DumpState.WAITING): Recovery.NOTHING,
    (PrepareState.INTERRUPTED, DumpState.WAITING): Recovery.COMPENSATE,
    (PrepareState.PREPARED, DumpState.WAITING): Recovery.HOLD,
    (PrepareState.PREPARED, DumpState.INTERRUPTED): Recovery.COMPENSATE,
    (PrepareState.PREPARED, DumpState.ENDED): Recovery.HOLD,
    (PrepareState.FAILED, DumpState.WAITING): Recovery.NOTHING,
}
"""A dump begins only after its prepare has succeeded; pairs that are not here are compensated."""


class RunState(StrEnum):
    """How far a run order and its pod came. STARTING: processes may have been started."""

    WAITING = "waiting"
    STARTING = "starting"
    RUNNING = "running"
    FAILED = "failed"
    EXITED = "exited"


class PodRecovery(StrEnum):
    """What is to be done with a pod at a start of the agent.

    FINISH: report `started` when every container runs, otherwise end them all and report a failure.
    FOLLOW: wait for the end of its containers.
    """

    NOTHING = "nothing"
    FINISH = "finish"
    FOLLOW = "follow"


class RunRow(NamedTuple):
    """What a state of a run order implies; `may_run` is whether processes may be left."""

    recovery: PodRecovery
    may_run: bool


RUN_TABLE: dict[RunState, RunRow] = {
    RunState.WAITING: RunRow(PodRecovery.NOTHING, may_run=False),
    RunState.STARTING: RunRow(PodRecovery.FINISH, may_run=True),
    RunState.RUNNING: RunRow(PodRecovery.FOLLOW, may_run=True),
    # Its compensation has ended the containers, or could not end them.
    RunState.FAILED: RunRow(PodRecovery.NOTHING, may_run=True),
    RunState.EXITED: RunRow(PodRecovery.NOTHING, may_run=False),
}


def run_row(run: Entry) -> RunRow:
    """Return the row of a run order, from its journal entry."""
    return RUN_TABLE[_run_state(run)]


class AgentRestarted(Aborted):
    """The agent ended within a step; the order was undone at its next start."""

    retryable = True


class CaptureLeft(NamedTuple):
    """One capture attempt, from the journal and the control directory."""

    prepare: Entry
    dump: Entry | None
    is_settled: bool
    is_let_go: bool
    is_overdue: bool

    @property
    def interrupted(self) -> Entry | None:
        """The order that the end of the agent interrupted, or None."""
        if self.dump is not None and _dump_state(self.dump) is DumpState.INTERRUPTED:
            return self.dump
        if _prepare_state(self.prepare) is PrepareState.INTERRUPTED:
            return self.prepare
        return None


def decide(left: CaptureLeft) -> Recovery:
    """Return what is to be done with a capture attempt."""
    if left.is_settled:
        return Recovery.NOTHING
    state = _prepare_state(left.prepare), _dump_state(left.dump)
    answer = TABLE.get(state, Recovery.COMPENSATE)
    if answer is Recovery.HOLD and (left.is_let_go or left.is_overdue):
        return Recovery.LET_GO
    return answer


def deadline_of(
    prepare: Entry, noted: float | None, hold_s: float, *, boot_id: str, now: float
) -> float:
    """Return the deadline of a hold, in seconds of the monotonic clock, which reads `now`.

    `noted` is the one in the journal, None when the capture did not come that far.
    """
    # A reboot has ended every hold, and has started another monotonic clock.
    if prepare.accepted.boot_id != boot_id:
        return now
    return now + hold_s if noted is None else noted


def interruption(entry: Entry) -> SnapbackError:
    """Return the error of an order that the end of the agent interrupted."""
    step = entry.open_step or (entry.ended[-1] if entry.ended else "")
    verb = entry.order.partition("-")[0]
    if entry.notes.get("no-replay"):
        return OutcomeUnknown(f"the agent was restarted within {verb}, step {step}", step=step)
    return AgentRestarted(
        f"the agent was restarted within {verb}, step {step}; it was undone", step=step
    )


def _run_state(run: Entry) -> RunState:
    if any(report.kind == "exited" for report in run.reports):
        return RunState.EXITED
    if "spawn" not in run.began:
        return RunState.WAITING
    if run.terminal is None:
        return RunState.STARTING
    return RunState.RUNNING if run.terminal.kind == "started" else RunState.FAILED


def _prepare_state(entry: Entry) -> PrepareState:
    if entry.terminal is None:
        return PrepareState.INTERRUPTED if entry.began else PrepareState.WAITING
    return PrepareState.PREPARED if entry.terminal.kind == "prepared" else PrepareState.FAILED


def _dump_state(entry: Entry | None) -> DumpState:
    if entry is None:
        return DumpState.WAITING
    if entry.terminal is not None:
        return DumpState.ENDED
    return DumpState.INTERRUPTED if entry.began else DumpState.WAITING
