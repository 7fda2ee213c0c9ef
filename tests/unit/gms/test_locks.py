"""The lock tables: complete, consistent with each other, and fair to writers."""

from __future__ import annotations

import itertools

import pytest

from gms.domain.locks import (
    LOCK_DECISIONS,
    LOCKS,
    USES,
    Lock,
    LockDecision,
    LockEvent,
    LockRequest,
    Operation,
    Use,
    decide,
    lock_request_of,
)
from snapback_client.frames import LockMode
from snapshot_shared.errors import InvalidTransition
from tests.unit.tables import each

# What a state says of (writer, committed layout, readers).
MEANING = {
    Lock.EMPTY: (False, False, False),
    Lock.WRITING: (True, False, False),
    Lock.COMMITTED: (False, True, False),
    Lock.READING: (False, True, True),
    Lock.UPDATING: (True, True, False),
    Lock.UPDATING_READ: (True, True, True),
}


def _after(event: LockEvent, *, writer: bool, committed: bool, readers: bool) -> tuple[bool, ...]:
    match event:
        case LockEvent.WRITE:
            return (True, committed, readers)
        case LockEvent.REPLACE:
            return (True, False, readers)
        case LockEvent.READ:
            return (writer, committed, True)
        case LockEvent.COMMIT:
            return (False, True, True)
        case LockEvent.WRITER_GONE:
            return (False, committed, readers)
        case LockEvent.READER_GONE:
            return (writer, committed, readers)
        case LockEvent.LAST_READER_GONE:
            return (writer, committed, False)
        case LockEvent.PUBLISH:
            return (writer, True, readers)
        case LockEvent.DROP:
            return (writer, False, readers)


def test_every_state_answers_every_request() -> None:
    assert set(LOCK_DECISIONS) == set(itertools.product(Lock, LockRequest))


@each(("row", "target"), LOCKS.rows.items())
def test_a_step_leads_to_the_state_that_describes_what_holds_then(
    row: tuple[Lock, LockEvent], target: Lock
) -> None:
    state, event = row
    writer, committed, readers = MEANING[state]
    after = _after(event, writer=writer, committed=committed, readers=readers)
    assert MEANING[target] == after


@each(("row", "answer"), LOCK_DECISIONS.items())
def test_what_is_granted_is_a_step_of_the_lock(
    row: tuple[Lock, LockRequest], answer: LockDecision
) -> None:
    state, wanted = row
    if answer is LockDecision.READ:
        assert LOCKS.allows(state, LockEvent.READ)
    if answer is LockDecision.WRITE:
        event = LockEvent.REPLACE if wanted is LockRequest.REPLACE else LockEvent.WRITE
        assert LOCKS.allows(state, event)


@each("state", Lock)
def test_there_is_never_a_second_writer(state: Lock) -> None:
    has_writer = MEANING[state][0]
    granted = LOCK_DECISIONS[state, LockRequest.WRITE] is LockDecision.WRITE
    assert granted is not has_writer


@each("state", Lock)
def test_reading_needs_a_committed_layout(state: Lock) -> None:
    has_committed = MEANING[state][1]
    assert (LOCK_DECISIONS[state, LockRequest.READ] is LockDecision.READ) is has_committed


@pytest.mark.parametrize("wanted", [LockRequest.READ, LockRequest.EITHER])
def test_a_writer_that_waits_for_the_readers_to_leave_goes_before_new_readers(
    wanted: LockRequest,
) -> None:
    assert decide(Lock.READING, wanted, replacer_waits=False) is LockDecision.READ
    assert decide(Lock.READING, wanted, replacer_waits=True) is LockDecision.WAIT


@pytest.mark.parametrize("state", [Lock.UPDATING, Lock.UPDATING_READ])
def test_a_committed_layout_is_served_while_the_next_is_written(state: Lock) -> None:
    assert decide(state, LockRequest.READ, replacer_waits=True) is LockDecision.READ


def test_either_writes_only_while_nothing_is_committed() -> None:
    assert LOCK_DECISIONS[Lock.EMPTY, LockRequest.EITHER] is LockDecision.WRITE
    assert LOCK_DECISIONS[Lock.WRITING, LockRequest.EITHER] is LockDecision.WAIT
    assert LOCK_DECISIONS[Lock.COMMITTED, LockRequest.EITHER] is LockDecision.READ


@pytest.mark.parametrize(
    ("lock", "replace", "wanted"),
    [
        (LockMode.RW, False, LockRequest.WRITE),
        (LockMode.RW, True, LockRequest.REPLACE),
        (LockMode.RO, False, LockRequest.READ),
        (LockMode.RW_OR_RO, False, LockRequest.EITHER),
    ],
)
def test_a_lock_mode_is_a_request(lock: LockMode, replace: bool, wanted: LockRequest) -> None:
    assert lock_request_of(lock, replace=replace) is wanted


@each(
    "operation",
    sorted(set(Operation) - {Operation.EXPORT_RO, Operation.METADATA_GET, Operation.LIST}),
)
def test_a_reader_changes_nothing(operation: Operation) -> None:
    with pytest.raises(InvalidTransition) as caught:
        USES.next(Use.READING, operation)
    assert caught.value.values == {"state": "reading", "event": operation.value}


@each("operation", Operation)
def test_a_session_whose_layout_waits_hidden_can_only_end(operation: Operation) -> None:
    assert not USES.allows(Use.SPENT, operation)
