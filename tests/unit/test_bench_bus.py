"""The benchmark of orders and reports: what counts as missed, and what it writes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.bench.bus import ANSWER, BEGIN, REQUEST, TITLE, Orders, Results, judged, section
from tests.bench.bus_server import carry_out, node_of
from tests.bench.page import with_section

ROOT = Path(__file__).resolve().parents[2]


def results(
    *,
    begins_s: float = 0.002,
    answer_s: float = 0.003,
    ours: tuple[float, ...] = (3500.0,) * 5,
    peer: float | None = 2000.0,
    others: float = 0.0,
) -> Results:
    seconds = {REQUEST: 0.001, BEGIN: begins_s, ANSWER: answer_s}
    a_second = {"snapback": list(ours), **({"faststream": [peer] * 5} if peer else {})}
    return Results(
        machine={"cores": "2"},
        calls=500,
        orders=3000,
        seconds={f"{row}, p99": {"snapback": [value] * 5} for row, value in seconds.items()},
        a_second=a_second,
        cpu={name: [0.0003] * 5 for name in a_second},
        others=others,
    )


def verdicts(found: Results) -> list[str]:
    return [line.verdict for line in judged(found)]


def test_all_goals_are_met_where_each_ratio_is_reached() -> None:
    assert verdicts(results()) == ["met"] * 4


@pytest.mark.parametrize(
    ("found", "line"),
    [
        (results(begins_s=0.0026), 0),
        (results(answer_s=0.0041), 1),
        (results(ours=(2999.0,) * 5, peer=1000.0), 2),
        (results(peer=2800.0), 3),
    ],
)
def test_each_goal_can_be_missed_alone(found: Results, line: int) -> None:
    expected = ["met"] * 4
    expected[line] = "missed"
    assert verdicts(found) == expected


def test_what_a_busy_machine_may_have_brought_about_is_inconclusive() -> None:
    found = results(begins_s=1.0, ours=(2500.0,) * 5, peer=1000.0, others=0.5)
    assert verdicts(found) == ["inconclusive", "met", "inconclusive", "inconclusive"]


def test_samples_that_spread_make_a_missed_goal_inconclusive() -> None:
    found = results(ours=(500.0, 600.0, 2000.0, 2900.0, 2950.0), peer=1000.0)
    assert verdicts(found)[2] == "inconclusive"


def test_a_peer_that_is_not_installed_is_not_measured() -> None:
    assert verdicts(results(peer=None))[3] == "not measured"


def test_the_section_takes_the_place_of_the_older_one_and_names_every_contender() -> None:
    page = with_section("# Benchmarks\n\n## Devices\n\nnone\n", section(results(peer=None)))
    page = with_section(page, section(results()))
    assert page.count(f"## {TITLE}") == 1
    assert "| snapback | 3,500 |" in page
    assert "| faststream | 2,000 |" in page


async def test_every_contender_answers_an_order_with_two_reports() -> None:
    published: list[str] = []

    async def publish(subject: str, _data: bytes) -> None:
        published.append(subject.rpartition(".")[2])

    _, data = Orders().next(node_of("nats-py"))
    await carry_out("nats-py", data, publish)
    assert published == ["accepted", "verified"]


def test_a_request_that_makes_no_sense_ends_with_status_2() -> None:
    program = [sys.executable, "-m", "tests.bench.bus", "--rounds", "0"]
    ended = subprocess.run(program, cwd=ROOT, check=False, capture_output=True, text=True)
    assert ended.returncode == 2
    assert "--rounds is 0" in ended.stderr
