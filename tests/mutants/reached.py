"""Which tests reach which lines, by a run of the tests under coverage.

Most mutations are caught by a test that reaches their line, among hundreds that do not. So the
tests that reach it run first. They are a hint and no proof: coverage sees no line that runs at
import, in another process, or in a task beside the test.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path

from coverage import CoverageData

MOST = 40
"""How many tests of one line run first."""

SETTINGS = """\
[run]
dynamic_context = test_function
include = */src/*
disable_warnings = no-data-collected
"""
"""Settings of coverage by which it notes the test that reaches a line."""

Reached = Mapping[tuple[str, int], list[str]]
"""Tests by file and line, the test that reaches the fewest lines first."""


def read_reached(records: Iterable[Path], tree: Path) -> Reached:
    """Return the tests by the files of `tree` and their lines, from files that coverage wrote."""
    found: dict[tuple[str, int], set[str]] = defaultdict(set)
    lines: Counter[str] = Counter()
    for record in records:
        data = CoverageData(str(record))
        data.read()
        for file in data.measured_files():
            name = Path(file).relative_to(tree).as_posix()
            for line, contexts in data.contexts_by_lineno(file).items():
                tests = {test for context in contexts if (test := _test(context, tree))}
                found[name, line] |= tests
                lines.update(tests)
    return {
        place: sorted(tests, key=lambda test: (lines[test], test))[:MOST]
        for place, tests in found.items()
    }


def _test(context: str, tree: Path) -> str:
    """Return how pytest names the function of a context, or an empty text for no function."""
    module, _, function = context.rpartition(".")
    file = f"{module.replace('.', '/')}.py"
    return f"{file}::{function}" if module and (tree / file).is_file() else ""
