"""Benchmarks: what counts as missed, and what a noisy machine cannot say."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from tests.bench.results import GOALS, Results, judged, page, spread

ROW = "save, one large"
SHARE = 0.001


def results(row: dict[str, list[float]], **changes: float) -> Results:
    found = Results(
        machine={"cores": "2"},
        size=2**30,
        seconds={ROW: row},
        written_again=SHARE,
        extra_bytes={"save": 5},
        extra_limit=10,
    )
    return msgspec.structs.replace(found, **changes)


def verdict(found: Results, what: str) -> str:
    (line,) = [line for line in judged(found) if line.what.startswith(what)][:1]
    return line.verdict


STEADY = [1.0, 1.01, 0.99, 1.0, 1.0]


@pytest.mark.parametrize(
    ("ours", "raw", "wanted"),
    [
        (STEADY, [0.95] * 5, "met"),
        (STEADY, [0.8] * 5, "missed"),
        ([1.0, 2.0, 0.5, 2.0, 0.5], [0.8] * 5, "inconclusive"),
        (STEADY, [0.1, 1.2, 0.8, 1.2, 0.1], "inconclusive"),
        ([1.0, 2.0, 0.5, 2.0, 0.5], [1.1] * 5, "met"),
        (STEADY, [], "not measured"),
    ],
)
def test_a_ratio_is_judged_by_medians_and_missed_only_on_a_quiet_machine(
    ours: list[float], raw: list[float], wanted: str
) -> None:
    assert verdict(results({"posix-direct": ours, "raw": raw}), "raw write limit") == wanted


def test_the_limit_and_the_peer_are_the_fastest_there_are() -> None:
    row = {"posix-direct": STEADY, "raw": [2.0] * 5, "fio": [0.5] * 5, "numpy": [9.0] * 5}
    lines = [line for line in judged(results(row)) if line.row == ROW]
    assert [(line.what, line.found, line.verdict) for line in lines] == [
        ("raw write limit (fio)", "0.50 x", "missed"),
        ("best durable peer (numpy)", "9.00 x", "met"),
    ]


@pytest.mark.parametrize(
    ("change", "what"),
    [({"written_again": 0.01}, "bytes written"), ({"extra_limit": 4}, "peak extra memory")],
)
def test_what_is_counted_is_never_a_matter_of_noise(change: dict[str, float], what: str) -> None:
    assert verdict(results({}), what) == "met"
    assert verdict(results({}, **change), what) == "missed"


def test_one_slow_round_of_five_is_no_noise() -> None:
    assert spread([1.0, 1.0, 1.0, 1.0, 30.0]) == 0.0


def test_the_page_says_what_is_not_installed() -> None:
    text = page(results({"posix-direct": STEADY, "raw": STEADY, "safetensors": []}))
    assert f"| {ROW} | safetensors | not installed | |" in text
    assert text.count("not measured") == len(GOALS) - 1


def bench(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tests.bench", *arguments],
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize(("raw", "status"), [(1.0, 0), (0.2, 1)])
def test_a_check_ends_with_status_one_when_a_ratio_is_missed(
    tmp_path: Path, raw: float, status: int
) -> None:
    path = tmp_path / "found.json"
    path.write_bytes(msgspec.json.encode(results({"posix-direct": STEADY, "raw": [raw] * 5})))
    found = bench("check", path)
    assert found.returncode == status, found.stderr
    assert ("missed" in found.stdout) == bool(status)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["check", "/nowhere"], "/nowhere"),
        (["gms", "--rounds", "0"], "--rounds 0"),
        (["gms", "--size-mib", "1"], "--size-mib is 1"),
        (["gms", "--folder", "/nowhere"], "/nowhere"),
    ],
)
def test_a_request_that_makes_no_sense_is_named(arguments: list[str], named: str) -> None:
    found = bench(*arguments)
    assert found.returncode == 2
    assert named in found.stderr
    assert "Traceback" not in found.stderr


@pytest.mark.waits
def test_a_small_run_measures_every_row(tmp_path: Path) -> None:
    path = tmp_path / "found.json"
    found = bench("gms", "--size-mib", "16", "--rounds", "1", "--folder", tmp_path, "--json", path)
    assert found.returncode in (0, 1), found.stderr
    measured = msgspec.json.decode(path.read_bytes(), type=Results)
    assert {goal.row for goal in GOALS} == set(measured.seconds)
    assert all(row["posix-direct"] and row["posix-buffered"] for row in measured.seconds.values())
    assert measured.written_again < 0.01
    assert list(tmp_path.iterdir()) == [path]
