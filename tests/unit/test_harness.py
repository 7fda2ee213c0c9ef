"""How the tests are run: a table names every row that is wrong, and CPU time has a limit."""

from __future__ import annotations

import asyncio
import signal

import pytest

from tests.support.limits import CPU_S, cpu_limit
from tests.unit.tables import each


def test_every_wrong_row_is_named_with_its_error_and_the_others_are_run_too() -> None:
    seen = []

    @each(("number", "is_even"), [(1, True), (2, True), (3, True), (4, True)])
    def test(number: int, is_even: bool) -> None:
        seen.append(number)
        assert (number % 2 == 0) is is_even

    with pytest.raises(ExceptionGroup, match="2 of 4 rows are wrong") as failed:
        test()
    assert seen == [1, 2, 3, 4]
    notes = [error.__notes__ for error in failed.value.exceptions]
    assert notes == [["in the row (1, True)"], ["in the row (3, True)"]]


def test_a_coroutine_runs_once_for_each_row_of_each_table() -> None:
    seen = []

    @each("one", "ab")
    @each("two", [1, 2])
    async def test(one: str, two: int) -> None:
        seen.append((one, two))
        assert (one, two) != ("b", 1)

    with pytest.raises(ExceptionGroup):
        asyncio.run(test())
    assert seen == [("a", 1), ("a", 2), ("b", 1), ("b", 2)]


def test_a_table_without_rows_proves_nothing() -> None:
    @each("row", [])
    def test(row: int) -> None:
        """Never run."""

    with pytest.raises(AssertionError, match="empty"):
        test()


def _compute_for_ever() -> None:
    while True:
        pass


def test_what_computes_too_long_fails_where_it_is() -> None:
    limited = cpu_limit(0.05)
    with pytest.raises(pytest.fail.Exception, match=r"than 0\.05 s of CPU") as caught, limited:
        _compute_for_ever()
    assert "_compute_for_ever" in [entry.name for entry in caught.traceback]


@pytest.mark.parametrize("limit_s", [CPU_S, pytest.param(5, marks=pytest.mark.cpu(5))])
def test_every_test_is_limited_and_may_have_a_limit_of_its_own(limit_s: float) -> None:
    left_s, _ = signal.getitimer(signal.ITIMER_PROF)
    assert limit_s / 2 < left_s <= limit_s + 1
