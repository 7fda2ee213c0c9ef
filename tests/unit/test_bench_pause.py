"""The benchmark of the worker's pause: what it reads off spans, and what counts as missed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from snapshot_shared.spans import SpanRecord
from tests.bench import results as bench
from tests.bench.page import page, renewed, with_section
from tests.bench.pause import (
    MIB,
    RESTORE_STEPS,
    STEPS,
    TITLE,
    Results,
    Turn,
    judged,
    pause,
    section,
)

ROOT = Path(__file__).resolve().parents[2]
SMALL, LARGE = 64 * MIB, 512 * MIB


def turn(
    pause_s: float,
    restore_s: float = 0.6,
    size: int = SMALL,
    unmap_s: float = 0.01,
    touch_s: float = 0.0,
) -> Turn:
    """Give a turn on a disk that reads the weights in 0.2 s."""
    return Turn(
        pause=pause_s,
        steps=dict.fromkeys(STEPS, pause_s / 10),
        saving=0.1,
        own_bytes=1000,
        restore=restore_s,
        answer=0.01,
        restore_steps=dict.fromkeys(RESTORE_STEPS, restore_s / 10),
        unmap=unmap_s,
        touch=touch_s,
        read_limit=size / 0.2,
        write_limit=1e9,
    )


def results(small: list[Turn], large: list[Turn]) -> Results:
    return Results(machine={"cores": "2"}, turns={SMALL: small, LARGE: large})


def verdicts(found: Results) -> list[str]:
    return [line.verdict for line in judged(found)]


def turns(pause_s: float, restore_s: float = 0.6, size: int = SMALL) -> list[Turn]:
    return [turn(pause_s + more / 1000, restore_s, size) for more in (0, 1, -1, 0, 2)]


STEADY = turns(0.1)


def span(name: str, start: int, end: int) -> SpanRecord:
    return SpanRecord(
        trace_id="a" * 32,
        span_id=name,
        name=name,
        service="s",
        node="n",
        start_ns=start,
        end_ns=end,
    )


def test_the_pause_is_from_the_wish_to_be_quiet_until_the_worker_is_let_go() -> None:
    spans = [span("gate", 1, 5), span("signal", 90, 95), span("write", 80, 200)]
    assert pause([*spans, span("quiesce", 10, 20)]) == (10, 95)


def test_equal_and_short_pauses_meet_every_goal() -> None:
    assert verdicts(results(STEADY, STEADY)) == ["met"] * 10


def test_a_pause_that_grows_with_the_weights_is_missed() -> None:
    found = verdicts(results(STEADY, turns(0.3, 0.9, LARGE)))
    assert found == ["met"] * 4 + ["missed"] * 6


def test_a_pause_that_grows_only_by_pages_to_give_back_is_told_apart() -> None:
    larger = [turn(t.pause + 0.03, unmap_s=0.04) for t in STEADY]
    assert verdicts(results(STEADY, larger))[-2:] == ["missed", "met"]


def test_a_restore_that_waits_only_for_new_memory_is_told_apart() -> None:
    slow = [turn(t.pause, restore_s=0.9, touch_s=0.4) for t in STEADY]
    assert verdicts(results(slow, slow))[:4] == ["met", "missed", "met", "met"]


def test_a_restore_whose_answer_takes_long_at_any_time_is_told_apart() -> None:
    slow = [msgspec.structs.replace(t, restore=0.9, answer=0.4) for t in STEADY]
    assert verdicts(results(slow, slow))[:4] == ["met", "missed", "missed", "met"]


def test_a_missed_pause_among_scattered_ones_is_inconclusive() -> None:
    scattered = [turn(0.05), turn(0.2), turn(0.3), turn(0.6), turn(0.9)]
    assert verdicts(results(STEADY, scattered))[4] == "inconclusive"


def test_its_section_takes_the_place_of_an_older_one_and_leaves_the_others() -> None:
    page = "# Benchmarks\n\nIntro.\n\n## GPU memory\n\nrows\n\n## Devices\n\nlast\n"
    once = with_section(page, section(results(STEADY, STEADY)))
    assert with_section(once, section(results(STEADY, STEADY))) == once
    titles = [line for line in once.splitlines() if line.startswith("#")]
    assert titles == ["# Benchmarks", "## GPU memory", f"## {TITLE}", "## Devices"]
    assert "Intro.\n\n## GPU memory\n\nrows\n" in once


@pytest.mark.parametrize("wrong", [["--size-mib", "1"], ["--rounds", "0"], ["--folder", "/none"]])
def test_a_request_that_makes_no_sense_is_refused(wrong: list[str]) -> None:
    command = [sys.executable, "-m", "tests.bench.pause", *wrong]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert found.returncode == 2
    assert wrong[0] in found.stderr
    assert "Traceback" not in found.stderr


def test_a_run_of_one_size_leaves_what_is_known_of_another() -> None:
    def found(size: int) -> bench.Results:
        one = bench.Transfers(
            size=size,
            seconds={},
            cpu={},
            others=0.0,
            written_again=0.0,
            extra_bytes={},
            extra_limit=0,
        )
        return bench.Results(machine={}, transfers=[one])

    both = renewed(page(found(4 * 2**30)), found(2**30))
    titles = [line for line in both.splitlines() if line.startswith("## ")]
    first = "## GPU memory: save and load of"
    assert titles == [f"{first} 1 GiB", f"{first} 4 GiB", "## Devices"]


def test_the_other_benchmark_keeps_the_section_and_renews_its_own() -> None:
    machine = {"cores": "2"}
    first = page(bench.Results(machine=machine))
    both = with_section(first, section(results(STEADY, STEADY)))
    again = renewed(both, bench.Results(machine={"cores": "4"}))
    assert again == both.replace("- cores: 2", "- cores: 4", 1)
    assert f"## {TITLE}" in again
