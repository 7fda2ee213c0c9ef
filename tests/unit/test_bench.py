"""Benchmarks: what counts as missed, and what a noisy machine cannot say."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from tests.bench.results import (
    GOALS,
    STEPS,
    Calls,
    Results,
    Transfers,
    hand_over,
    judged,
    page,
    spread,
)

ROW = "save, one large"
SHARE = 0.001


def results(row: dict[str, list[float]], **changes: float) -> Results:
    found = Transfers(
        size=2**30,
        seconds={ROW: row},
        cpu={ROW: {"posix-direct": [0.25] * len(row.get("posix-direct", ()))}},
        others=0.1,
        written_again=SHARE,
        extra_bytes={"save": 5},
        extra_limit=10,
    )
    transfers = [msgspec.structs.replace(found, **changes)]
    return Results(machine={"cores": "2"}, transfers=transfers)


def of_calls(row: dict[str, list[float]], others: float = 0.1) -> Results:
    seconds = {"session call, p99": row, hand_over(200): {"gms": row["gms"]}}
    return Results(machine={}, calls=Calls(calls=100, seconds=seconds, others=others))


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


def test_a_ratio_missed_while_others_had_the_processors_says_nothing() -> None:
    row = {"posix-direct": STEADY, "raw": [0.8] * 5}
    assert verdict(results(row, others=0.5), "raw write limit") == "inconclusive"
    assert verdict(results(row | {"raw": STEADY}, others=0.5), "raw write limit") == "met"


def test_a_peer_beaten_while_others_had_the_processors_says_nothing_either() -> None:
    row = {"posix-direct": STEADY, "numpy": [9.0] * 5}
    assert verdict(results(row), "best durable peer") == "met"
    assert verdict(results(row, others=0.5), "best durable peer") == "inconclusive"


@pytest.mark.parametrize(
    ("ours", "others", "wanted"),
    [
        (0.002, 0.1, ["met", "met"]),
        (0.003, 0.1, ["missed", "met"]),
        (0.006, 0.1, ["missed", "missed"]),
        (0.006, 0.5, ["inconclusive", "inconclusive"]),
    ],
)
def test_a_session_call_may_take_a_fifth_of_grpc_and_the_regions_five_milliseconds(
    ours: float, others: float, wanted: list[str]
) -> None:
    found = of_calls({"gms": [ours] * 5, "grpc.aio": [0.0101] * 5}, others)
    assert [line.verdict for line in judged(found)] == wanted
    assert "| session call, p99 | grpc.aio | 10,100 |" in page(found)


def test_the_page_says_what_a_load_is_made_of() -> None:
    row = {name: [share] * 3 for name, share in zip(STEPS, (0.5, 0.625, 0.75), strict=True)}
    (found,) = results({}).transfers
    seconds = {"load, cold, pooled, one large": row | {"posix-direct": [1.0] * 3}}
    cpu = {"load, cold, pooled, one large": {STEPS[0]: [0.01], "posix-direct": [0.2]}}
    found = msgspec.structs.replace(found, seconds=seconds, cpu=cpu, size=10**9)
    text = page(Results(machine={}, transfers=[found])).replace("\n", " ")
    assert "one large, takes 1.00 s/GB" in text
    assert "reading takes 0.50 s/GB, reading and digesting 0.62" in text
    assert "copying into the region 0.75." in text
    assert "Reading alone needs 0.01 processor-seconds a GB, the load 0.20;" in text


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
    assert f"| {ROW} | safetensors | not installed | | |" in text
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
        (["gms", "--rounds", "0"], "--rounds is 0"),
        (["gms", "--size-mib", "1"], "--size-mib is 1"),
        (["gms", "--folder", "/nowhere"], "/nowhere"),
        (["gms", "--peers", "/nowhere"], "--peers /nowhere"),
        (["gms", "--size-mib", "64", "8"], "--size-mib is 8"),
        (["sessions", "--calls", "1"], "--calls 1"),
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
    sizes, rest = ("--size-mib", "16", "24"), ("--rounds", "1", "--calls", "100")
    found = bench("gms", *sizes, *rest, "--folder", tmp_path, "--json", path)
    assert found.returncode in (0, 1), found.stderr
    measured = msgspec.json.decode(path.read_bytes(), type=Results)
    assert len(measured.transfers) == 2
    for one in measured.transfers:
        assert {goal.row for goal in GOALS} <= set(one.seconds)
        assert all(row["posix-direct"] and row["posix-buffered"] for row in one.seconds.values())
        assert one.written_again < 0.01
    assert measured.calls is not None
    assert {len(row) for row in measured.calls.seconds.values()} == {1, 3}
    assert list(tmp_path.iterdir()) == [path]
    assert "Traceback" not in found.stderr
