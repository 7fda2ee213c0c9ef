"""What one report changes of one order, and when an order is late, owed or to be given again."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from snapshot_api.meta import OrderStatus, time_of
from snapshot_api.views import is_answered
from snapshot_operator.core import fold
from snapshot_shared.errors import Failure
from snapshot_shared.orders import PartResult, Report
from tests.support import builders
from tests.support.builders import DIGEST, UID
from tests.unit.tables import each

FAILURE = Failure(reason="NoSpace", message="full")
PART = PartResult(part="process", bytes=1, digest=DIGEST)


def order(verb: str = "dump", **changes: Any) -> OrderStatus:
    """An order that was given at 100 and is late from 200 on."""
    fields = {"at": 100.0, "attempt": 2, "deadline": time_of(200.0), **changes}
    return builders.order(verb, UID, **fields)


def report(kind: str, verb: str = "dump", **changes: Any) -> Report:
    return builders.told(order=f"{verb}-{UID}", attempt=2, kind=kind, **changes)


def ended(kind: str, verb: str = "dump", **changes: Any) -> OrderStatus:
    found = fold.fold([order(verb)], report(kind, verb, **changes), 150.0)
    assert found is not None
    return found[0]


STAGED = report("staged", part=PART)


def states(verb: str, *kinds: str) -> list[str]:
    """The states that an order has after each of these reports."""
    orders, found = [order(verb)], []
    for kind in kinds:
        orders = fold.fold(orders, report(kind, verb), 150.0) or orders
        found.append(orders[0].state)
    return found


def test_the_highest_report_wins_and_the_first_end_stays() -> None:
    assert states("save", "leased", "accepted") == ["leased", "leased"]
    assert states("save", "accepted", "staged", "leased") == ["accepted", "staged", "staged"]
    assert states("save", "failed", "staged", "rejected") == ["failed"] * 3
    kept = ["started", "ready", "exited", "exited"]
    assert states("run", "started", "ready", "exited", "ready") == kept


def test_a_lease_that_is_told_late_is_still_remembered() -> None:
    staged = ended("staged", "save", part=PART)
    (found,) = fold.fold([staged], report("leased", "save"), 160.0) or []
    assert (found.state, found.leased) == ("staged", True)
    assert fold.fold([found], report("leased", "save"), 160.0) is None


@each(
    "other",
    [
        replace(STAGED, attempt=1),
        replace(STAGED, attempt=3),
        replace(STAGED, order=f"save-{UID}"),
        replace(STAGED, node="node-2"),
        replace(STAGED, service="gms"),
        replace(STAGED, kind="sealed"),
        replace(STAGED, kind="ready"),
    ],
)
def test_a_report_of_something_else_changes_nothing(other: Report) -> None:
    assert fold.fold([order()], other, 150.0) is None


def test_the_other_orders_stay_where_they_are() -> None:
    first, last = order("prepare"), order("seal")
    found = fold.fold([first, order(), last], STAGED, 150.0) or []
    assert (found[0], found[1].state, found[2]) == (first, "staged", last)
    assert found[1].ended_at == time_of(150.0)
    assert fold.fold_all([first, order()], [replace(STAGED, attempt=1), STAGED], 150.0) == found[:2]


def test_a_life_sign_that_overtakes_the_start_proves_it() -> None:
    found = ended("ready", "run")
    assert fold.succeeded(found)
    assert found.ended_at == time_of(150.0)
    (after,) = fold.fold([found], report("exited", "run", exit_code=3), 160.0) or []
    assert (after.state, after.final and after.final.exit_code) == ("exited", 3)
    assert after.ended_at == time_of(150.0)


def test_ready_keeps_the_start_and_an_exit_takes_its_place() -> None:
    started = ended("started", "run")
    (found,) = fold.fold([started], report("ready", "run"), 160.0) or []
    assert found.final == started.final


@pytest.mark.parametrize("kind", ["failed", "rejected", "staged"])
def test_a_report_without_what_its_kind_promises_is_a_failure(kind: str) -> None:
    found: Any = ended(kind)
    assert found.final.failure.reason == "InvalidReport"
    assert not fold.succeeded(found)


def test_a_report_of_an_unknown_version_is_a_failure_with_both() -> None:
    failure: Any = fold.failure_in([ended("staged", part=PART, schema=99)], 150.0)
    assert (failure.reason, failure.values["found"]) == ("UnsupportedVersion", 99)


def test_the_first_failure_is_told_whatever_kind_it_is() -> None:
    failed, lost, late = ended("failed", failure=FAILURE), order(state=fold.LOST), order("seal")
    done = ended("staged", part=PART)
    assert fold.failure_in([done, failed, lost], 150.0) == FAILURE
    assert [f.reason for f in [fold.failure_in([done, lost, failed], 150.0)] if f] == ["NodeLost"]
    assert fold.failure_in([done, late], 199.0) is None
    found: Any = fold.failure_in([done, late], 200.0)
    assert (found.reason, found.retryable) == ("AgentUnresponsive", True)


def test_an_order_is_late_from_its_deadline_on_unless_it_is_answered() -> None:
    assert not fold.is_late(order(), 199.9)
    assert fold.is_late(order(), 200.0)
    assert not fold.is_late(ended("staged", part=PART), 300.0)
    assert not fold.is_late(order(state=fold.LOST), 300.0)


def test_the_next_deadline_is_the_first_that_is_to_come() -> None:
    later = order("seal", deadline=time_of(300.0))
    assert fold.next_deadline([later, order()], 199.0) == 200.0
    assert fold.next_deadline([later, order()], 200.0) == 300.0
    assert fold.next_deadline([later, order()], 300.0) is None
    assert fold.next_deadline([ended("staged", part=PART)], 0.0) is None
    assert fold.earliest(None, 3.0, 2.0) == 2.0
    assert fold.earliest(None) is None


@each(
    ("verb", "item", "at"),
    [
        ("unanswered", order("release"), 200.0),
        ("gone", order("release", state=fold.LOST), None),
        ("done", ended("released", "release"), None),
        ("failed", ended("failed", "release", failure=FAILURE), 180.0),
        ("failed twice", replace(ended("failed", "release", failure=FAILURE), tries=2), 210.0),
        ("failed often", replace(ended("failed", "release", failure=FAILURE), tries=99), 750.0),
    ],
)
def test_what_cleans_is_given_again_after_a_rest_that_grows(
    verb: str, item: OrderStatus, at: float | None
) -> None:
    assert fold.due_at(item) == at, verb
    assert fold.renewal_at([item], 150.0) == at
    assert fold.renewal_at([replace(item, verb="dump")], 150.0) is None
    assert at is None or fold.renewal_at([item], at) is None


def test_what_is_due_already_does_not_hide_what_is_given_again_later() -> None:
    due, later = order("delete"), order("release", deadline=time_of(300.0))
    assert fold.renewal_at([due, later], 200.0) == 300.0


@each(
    ("known", "held"),
    [(1, 0), (2, 2), (500_000, 500_000), *((no, 0) for no in (500_001, True, "7", 7.0, [7], None))],
)
def test_a_node_is_believed_that_it_knows_a_higher_attempt_within_bounds(
    known: object, held: int
) -> None:
    failure = Failure(reason="Superseded", message="older", values={"attempt": known})
    refused = ended("rejected", "release", failure=failure)
    assert fold.superseding(refused) == held
    assert fold.next_attempt(refused) == max(2, held) + 1
    assert fold.due_at(refused) == (150.0 if held else 180.0)
    assert fold.superseding(ended("failed", failure=replace(failure, reason="NoSpace"))) == 0


def test_only_what_is_not_answered_is_lost_with_its_node() -> None:
    done, waiting = ended("staged", part=PART), order("seal")
    assert fold.mark_lost([done, waiting], 160.0, {"node-1"}) == [done, waiting]
    kept, lost = fold.mark_lost([done, waiting], 160.0, set())
    assert kept == done
    assert (lost.state, lost.ended_at) == (fold.LOST, time_of(160.0))
    assert is_answered(lost)
    assert fold.is_done(lost)
    assert not fold.succeeded(lost)


@each(
    ("started_at", "now", "ordered_at", "deadline"),
    [
        (90.0, 150.0, 100.0, 200.0),
        (100.0, 150.0, 100.0, 200.0),
        (150.0, 160.0, 100.0, 200.0),
        (195.0, 196.0, 100.0, 210.0),
        (500.0, 501.0, 100.0, 515.0),
        (40.0, 50.0, 40.0, 140.0),
        (40.0, 100.0, 100.0, 200.0),
    ],
)
def test_an_operator_that_was_away_gives_answers_time_and_no_order_more_than_its_own(
    started_at: float, now: float, ordered_at: float, deadline: float
) -> None:
    (found,) = fold.resumed([order()], started_at, now)
    assert (found.ordered_at, found.deadline) == (time_of(ordered_at), time_of(deadline))
    done = ended("staged", part=PART)
    assert fold.resumed([done], started_at, now) == [done]


def test_an_order_takes_the_place_of_its_earlier_attempts_alone() -> None:
    first, other, new = order(), order("seal"), order(attempt=3)
    assert fold.replaced([first, other], new) == [other, new]
    assert fold.find([first, other, new], "dump") == [first, new]
    assert fold.find([first, other, new], "dump", 3) == [new]
