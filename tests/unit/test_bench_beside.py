"""The benchmark of weights beside a process: what it reads off orders, and what is missed."""

from __future__ import annotations

import pytest

from tests.bench.beside import BOTH, GOAL, HEAP, MIB, WEIGHTS, Results, Turn, judged, section


def results(weights: float, heap: float, both: list[float]) -> Results:
    def turns(totals: list[float]) -> list[Turn]:
        return [Turn(total=total, verbs={"load": total, "restore": 0.1}) for total in totals]

    found = {WEIGHTS: turns([weights] * 3), HEAP: turns([heap] * 3), BOTH: turns(both)}
    return Results(machine={"cores": "2"}, weights=1024 * MIB, heap=512 * MIB, turns=found)


@pytest.mark.parametrize(
    ("weights", "heap", "both", "verdict"),
    [
        (2.0, 1.0, [2.0 * GOAL] * 3, "met"),
        (1.0, 2.0, [2.1] * 3, "met"),
        (2.0, 1.5, [3.5] * 3, "missed"),
        (2.0, 1.5, [1.0, 3.5, 9.0], "inconclusive"),
    ],
)
def test_both_are_compared_with_the_longer_of_the_two(
    weights: float, heap: float, both: list[float], verdict: str
) -> None:
    assert judged(results(weights, heap, both)).verdict == verdict


def test_the_section_has_the_goal_and_what_each_verb_took() -> None:
    text = section(results(2.0, 1.0, [2.0, 2.5, 3.0]))
    assert "both together against the longer of them (weights) | ≤ 1.1 x | 1.25 x | missed" in text
    assert "| both | 2.50 (3.00 … 2.00) | - | 0.10 (0.10 … 0.10) | 2.50 (3.00 … 2.00) |" in text
