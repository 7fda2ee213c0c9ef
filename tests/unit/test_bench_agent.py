"""The benchmark of dumps and restores of processes: what counts as missed, and its section."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.bench.agent import MIB, TITLE, Results, Turn, judged, section
from tests.bench.page import with_section

ROOT = Path(__file__).resolve().parents[2]


def turn(dump: float = 1.0, restore: float = 1.1, more: float = 0.0) -> Turn:
    """Give a turn in which CRIU and fsync, CRIU's restore, and 0.7 of the disk take a second."""
    return Turn(
        size=1024 * MIB,
        dump={"snapback": dump + more, "criu": 0.8, "criu, fsync": 1.0, "disk": 0.7},
        frozen={"snapback": 0.6, "criu": 0.5},
        cached={"snapback": restore + more, "criu": 1.0},
        cold={"snapback": restore + more, "criu": 1.0},
    )


def results(*turns: Turn, others: float = 0.0) -> Results:
    return Results(machine={"cores": "2"}, heap=1024 * MIB, others=others, turns=list(turns))


def verdicts(found: Results) -> list[str]:
    return [line.verdict for line in judged(found)]


STEADY = [turn(more=more / 1000) for more in (0, -1, -2, 0, -3)]


def test_a_dump_as_fast_as_criu_and_a_restore_a_tenth_slower_meet_every_goal() -> None:
    assert verdicts(results(*STEADY)) == ["met"] * 4


def test_a_dump_that_takes_a_fifth_longer_than_criu_misses_both_goals() -> None:
    slow = [turn(dump=each.dump["snapback"] + 0.2) for each in STEADY]
    assert verdicts(results(*slow)) == ["missed", "missed", "met", "met"]


def test_a_restore_that_takes_a_third_longer_than_criu_is_missed() -> None:
    slow = [turn(restore=each.cached["snapback"] + 0.23) for each in STEADY]
    assert verdicts(results(*slow)) == ["met", "met", "missed", "missed"]


def test_what_is_missed_beside_busy_others_or_among_scattered_samples_is_inconclusive() -> None:
    slow = [turn(dump=1.3, restore=1.4) for _ in STEADY]
    assert verdicts(results(*slow)) == ["missed"] * 4
    assert verdicts(results(*slow, others=0.3)) == ["inconclusive"] * 4
    scattered = [turn(dump=1.3, restore=1.4, more=more) for more in (0, -0.6, 0.7, -0.7, 0.8)]
    assert verdicts(results(*scattered)) == ["inconclusive"] * 4


def test_its_section_takes_the_place_of_an_older_one_and_leaves_the_others() -> None:
    page = "# Benchmarks\n\nIntro.\n\n## GPU memory\n\nrows\n\n## Devices\n\nlast\n"
    once = with_section(page, section(results(*STEADY)))
    assert with_section(once, section(results(*STEADY))) == once
    titles = [line for line in once.splitlines() if line.startswith("#")]
    assert titles == ["# Benchmarks", "## GPU memory", f"## {TITLE}", "## Devices"]
    assert "| dump | raw write limit | ≥ 0.7 x | 0.70 x | met |" in once
    assert "| dump, not durable | criu | 800 | 800 … 800 |" in once


@pytest.mark.parametrize("wrong", [["--size-mib", "0"], ["--rounds", "0"], ["--folder", "/none"]])
def test_a_request_that_makes_no_sense_is_refused(wrong: list[str]) -> None:
    command = [sys.executable, "-m", "tests.bench.agent", *wrong]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert found.returncode == 2
    assert wrong[0] in found.stderr
    assert "Traceback" not in found.stderr
