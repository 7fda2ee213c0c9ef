"""A test over a table names every row that is wrong."""

from __future__ import annotations

import asyncio
import inspect

import pytest

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


def test_a_row_in_which_nothing_is_raised_lets_the_others_run() -> None:
    @each("number", ["1", "one", "2"])
    def test(number: str) -> None:
        with pytest.raises(ValueError, match="invalid literal"):
            int(number)

    with pytest.raises(BaseExceptionGroup, match="2 of 3 rows are wrong"):
        test()


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


def test_a_test_asks_for_its_fixtures_alone() -> None:
    @each("row", [1])
    def test(tmp_path: str, row: int) -> None:
        """Never run."""

    assert list(inspect.signature(test).parameters) == ["tmp_path"]


def test_a_table_without_rows_proves_nothing() -> None:
    @each("row", [])
    def test(row: int) -> None:
        """Never run."""

    with pytest.raises(AssertionError, match="empty"):
        test()
