"""The fold of a journal: what is kept, what is forgotten, and that compaction changes nothing."""

from __future__ import annotations

import pytest

from snapshot_shared.ledger import (
    Accepted,
    Began,
    Delivered,
    Ended,
    Ledger,
    Noted,
    Record,
    Reported,
    Tombstoned,
)
from tests.support import builders

UID = "00000000-0000-4000-8000-000000000001"
OTHER = "00000000-0000-4000-8000-000000000002"
DUMP = f"dump-{UID}"


def accepted(order: str = DUMP, attempt: int = 1, wall: float = 100.0) -> Accepted:
    return builders.accepted(order=order, attempt=attempt, wall=wall)


def reported(kind: str, order: str = DUMP, attempt: int = 1, n: int = 1) -> Reported:
    report = builders.told(order=order, attempt=attempt, n=n, kind=kind)
    return Reported(report=report)


def over(order: str = DUMP, kind: str = "failed", attempt: int = 1) -> list[Record]:
    """All that is known of an order that ended, and whose report was delivered."""
    return [
        accepted(order, attempt),
        reported(kind, order, attempt),
        Delivered(order=order, attempt=attempt, n=1),
    ]


def folded(*records: Record) -> Ledger:
    ledger = Ledger()
    for record in records:
        ledger.apply(record)
    return ledger


OPEN = [
    accepted(),
    Noted(order=DUMP, attempt=1, key="phase", value="frozen"),
    Began(order=DUMP, attempt=1, step="freeze"),
    Ended(order=DUMP, attempt=1, step="freeze"),
    Began(order=DUMP, attempt=1, step="copy-state"),
]


@pytest.mark.parametrize("count", range(1, len(OPEN) + 1))
def test_compaction_changes_nothing_whatever_is_open(count: int) -> None:
    before = folded(Tombstoned(subject=f"capture-{UID}", attempt=2), *OPEN[:count])
    after = folded(*before.records())
    assert after.records() == before.records()
    assert after.tombstones == before.tombstones
    known, found = before.entries[DUMP], after.entries[DUMP]
    assert (found.began, found.ended, found.notes) == (known.began, known.ended, known.notes)
    assert found.open_step == known.open_step


def test_the_open_step_is_the_last_that_began_and_has_no_end() -> None:
    assert folded(*OPEN).entries[DUMP].open_step == "copy-state"
    assert folded(*OPEN[:4]).entries[DUMP].open_step is None


def test_what_was_not_acknowledged_is_kept_by_compaction() -> None:
    ledger = folded(
        accepted(),
        reported("accepted"),
        reported("failed", n=2),
        Delivered(order=DUMP, attempt=1, n=1),
    )
    again = folded(*ledger.records())
    assert [report.n for report in again.pending_reports()] == [2]
    assert again.entries[DUMP].delivered == {1}


def test_a_higher_attempt_takes_the_place_and_the_same_or_a_lower_one_does_not() -> None:
    ledger = folded(accepted(attempt=2), Began(order=DUMP, attempt=2, step="freeze"))
    for attempt in (1, 2):
        ledger.apply(accepted(attempt=attempt))
        assert ledger.entries[DUMP].began == ["freeze"]
    ledger.apply(Began(order=DUMP, attempt=1, step="copy-state"))
    ledger.apply(reported("failed", attempt=1))
    assert ledger.entries[DUMP].began == ["freeze"]
    assert ledger.unfinished() == [ledger.entries[DUMP]]
    ledger.apply(accepted(attempt=3))
    assert (ledger.entries[DUMP].attempt, ledger.entries[DUMP].began) == (3, [])


def test_a_tombstone_holds_up_to_its_attempt() -> None:
    ledger = folded(
        Tombstoned(subject=f"capture-{UID}", attempt=3),
        Tombstoned(subject=f"capture-{UID}", attempt=2),
    )
    assert [ledger.is_tombstoned(f"capture-{UID}", n) for n in (2, 3, 4)] == [True, True, False]
    assert not ledger.is_tombstoned(f"capture-{OTHER}", 1)


def test_what_led_to_an_artifact_goes_with_it_unless_it_is_newer_or_under_way() -> None:
    delete = f"delete-{UID}-gen-1"
    seal, release, abort = f"seal-{UID}", f"release-{UID}", f"dump-{OTHER}"
    ledger = folded(
        Tombstoned(subject=f"capture-{UID}", attempt=2),
        *over(DUMP, attempt=2),
        *over(seal, attempt=3),
        accepted(release, 2),
        *over(abort),
        accepted(delete),
    )
    ledger.apply(reported("failed", delete))
    assert DUMP in ledger.entries
    ledger.apply(reported("deleted", delete, n=2))
    assert list(ledger.entries) == [seal, release, abort, delete]


def test_a_deletion_without_a_tombstone_drops_nothing_of_the_capture() -> None:
    delete = f"delete-{UID}-gen-1"
    ledger = folded(*over(DUMP), accepted(delete), reported("deleted", delete))
    assert list(ledger.entries) == [DUMP, delete]


def test_what_is_older_is_forgotten_once_nothing_can_come_of_it() -> None:
    live = f"prepare-{OTHER}"
    ledger = folded(
        Tombstoned(subject=f"capture-{UID}", attempt=1),
        Tombstoned(subject=f"capture-{OTHER}", attempt=1),
        *over(),
        accepted(live),
    )
    ledger.forget(older_than=100.0)
    assert list(ledger.entries) == [DUMP, live]
    ledger.forget(older_than=100.1)
    assert list(ledger.entries) == [live]
    assert list(ledger.tombstones) == [f"capture-{OTHER}"]


def test_an_order_lives_until_its_end_was_delivered_and_a_run_until_its_processes_ended() -> None:
    run = f"run-{UID}"
    assert not folded(*over()).entries[DUMP].is_live
    assert folded(accepted()).entries[DUMP].is_live
    assert folded(accepted(), reported("failed")).entries[DUMP].is_live
    started = over(run, "started")
    assert folded(*started).entries[run].is_live
    exited = [reported("exited", run, n=2), Delivered(order=run, attempt=1, n=2)]
    assert not folded(*started, *exited).entries[run].is_live
