"""The part of a long table of tests that a run covers: `TURN=2/4` is each fourth row, from row 2.

CI runs a part at each landing, and the next part at the next landing (tests/ci/steps.py).
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from typing import NamedTuple, TypeVar

import pytest

T = TypeVar("T")


class Turn(NamedTuple):
    """Each row from number `first` on, in steps of `every`. Rows count from 1."""

    first: int = 1
    every: int = 1

    def of(self, rows: Sequence[T]) -> list[T]:
        return [*rows[self.first - 1 :: self.every]]


def turn_of(text: str) -> Turn:
    """Read a turn; ValueError if it is not one."""
    found = re.fullmatch(r"([1-9]\d*)/([1-9]\d*)", text)
    if found is None or int(found[1]) > int(found[2]):
        raise ValueError(f"TURN is {text!r}: write 2/4 for the second of four turns")
    return Turn(int(found[1]), int(found[2]))


TURN = turn_of(os.environ.get("TURN") or "1/1")


def others(items: Sequence[pytest.Item], turn: Turn) -> list[pytest.Item]:
    """Return the tests with the mark `turns` that run in another turn.

    The node with the mark is one row: a test with one of its parameters, or a whole module.
    """
    rows: dict[str, list[pytest.Item]] = {}
    for item in items:
        for node, _ in item.iter_markers_with_node("turns"):
            rows.setdefault(node.nodeid, []).append(item)
            break
    now = {*turn.of([*rows])}
    return [item for row, tests in rows.items() if row not in now for item in tests]
