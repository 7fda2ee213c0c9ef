"""One test over a table, in place of a test a row."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any

import pytest

MOST_CHARS = 400
WRONG = (Exception, pytest.fail.Exception)
"""How a row fails: `pytest.raises` that nothing raises in is no Exception."""


def each(names: str | tuple[str, ...], rows: Iterable[Any]) -> Callable[[Any], Any]:
    """Run a test once for each row, whose values it takes by these names.

    All rows are run. The failure has the error of every row that is wrong, below its values. Rows
    share the fixtures of the test, so a row must not change what the next one finds.
    """
    fields = (names,) if isinstance(names, str) else names
    table = [(row,) if isinstance(names, str) else tuple(row) for row in rows]

    def over(test: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(test)
        fixtures = [value for name, value in signature.parameters.items() if name not in fields]

        def run(**given: Any) -> None:
            _fail(_errors(test, fields, table, given), len(table))

        async def run_async(**given: Any) -> None:
            errors: list[BaseException] = []
            for row in table:
                try:
                    await test(**given, **dict(zip(fields, row, strict=True)))
                except WRONG as error:
                    errors.append(_of_row(error, row))
            _fail(errors, len(table))

        wrapper: Any = run_async if inspect.iscoroutinefunction(test) else run
        for name in ("__name__", "__qualname__", "__module__", "__doc__"):
            setattr(wrapper, name, getattr(test, name))
        wrapper.__signature__ = signature.replace(parameters=fixtures)
        return wrapper  # type: ignore[no-any-return]

    return over


def _errors(
    test: Callable[..., Any], fields: tuple[str, ...], table: list[Any], given: dict[str, Any]
) -> list[BaseException]:
    errors: list[BaseException] = []
    for row in table:
        try:
            test(**given, **dict(zip(fields, row, strict=True)))
        except WRONG as error:
            errors.append(_of_row(error, row))
    return errors


def _of_row(error: BaseException, row: Any) -> BaseException:
    error.add_note(f"in the row {row!r}"[:MOST_CHARS])
    return error


def _fail(errors: list[BaseException], rows: int) -> None:
    assert rows, "the table is empty"
    if errors:
        raise BaseExceptionGroup(f"{len(errors)} of {rows} rows are wrong", errors)
