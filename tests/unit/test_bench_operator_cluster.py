"""The benchmark of the operator on an API server: what counts as missed, and what it writes."""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.bench.operator_cluster import CAPTURES, Calls, Samples, judged, judged_calls, section

ROOT = Path(__file__).resolve().parents[2]
GOOD = {"mb": 180.0, "cpu_s": 0.5, "events_a_s": 30000.0, "reconciles_a_s": 5000.0}
LIVE = {"most_mb": 200.0, "event_checkpoint_s": 0.0001, "event_pod_s": 0.0002}


def found(**changes: float) -> dict[str, list[float]]:
    return {what: [value] * 5 for what, value in {**GOOD, **LIVE, **changes}.items()}


def calls(unchanged: int = 0) -> Calls:
    return Calls(Counter({"POST jobs": CAPTURES}), Counter({"GET jobs": unchanged}))


def test_all_goals_are_met_at_their_limits() -> None:
    assert [row.verdict for row in judged(found(), 10_000)] == ["met"] * 4


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"mb": 181.0}, 0),
        ({"cpu_s": 0.51}, 1),
        ({"events_a_s": 29999.0}, 2),
        ({"reconciles_a_s": 4999.0}, 3),
    ],
)
def test_each_goal_can_be_missed_alone(change: dict[str, float], line: int) -> None:
    expected = ["met"] * 4
    expected[line] = "missed"
    assert [row.verdict for row in judged(found(**change), 10_000)] == expected


def test_one_call_for_what_has_not_changed_is_too_many() -> None:
    assert [row.verdict for row in judged_calls(calls())] == ["met", "met"]
    assert [row.verdict for row in judged_calls(calls(unchanged=1))] == ["met", "missed"]


def test_the_section_says_which_contender_is_not_installed() -> None:
    samples: Samples = {"snapback": found(), "kubernetes_asyncio": found(cpu_s=3.0)}
    rows = judged(samples["snapback"], 10_000)
    text = section(argparse.Namespace(count=10_000, rounds=5), 0.1, rows, samples, calls())
    assert "| snapback | 0.50 | 180 | 200 | 100 | 200 |" in text
    assert "| kubernetes_asyncio | 3.00 |" in text
    assert "| kopf | not installed |" in text


def test_a_request_that_makes_no_sense_ends_with_status_2() -> None:
    program = [sys.executable, "-m", "tests.bench.operator_cluster", "--count", "1"]
    ended = subprocess.run(program, cwd=ROOT, check=False, capture_output=True, text=True)
    assert ended.returncode == 2
    assert "--count is 1" in ended.stderr
