"""What the demo prints."""

from __future__ import annotations

from pathlib import Path

import pytest

from snapshotctl.domain import demo_story
from snapshotctl.domain.cluster import ClusterAccess
from snapshotctl.domain.demo_engines import ENGINES

ACCESS = ClusterAccess(
    "snapshotctl --cluster x", "nats -y", Path("/a"), "/l", "http://page/", "end", is_ours=True
)


def test_a_restore_that_was_faster_is_said_to_be() -> None:
    assert demo_story.conclusion(20.0, 2.0) == (
        "The restore was 10.0 times as fast as the cold start."
    )


def test_a_restore_that_was_slower_is_not_worded_as_a_success() -> None:
    said = demo_story.conclusion(2.0, 3.0)
    assert "slower than the cold start: it took 1.5 times as long" in said
    assert "fast" not in said


def test_only_the_first_answers_of_many_are_shown() -> None:
    shown = demo_story.answers([(f"file-{number}", "txt") for number in range(20)])
    assert shown == [
        "    file-0 -> txt",
        "    file-1 -> txt",
        "    file-2 -> txt",
        "    and 17 more",
    ]


def test_a_long_detail_is_broken_between_words() -> None:
    lines = demo_story.answers([("When", "word " * 40)])
    assert max(map(len, lines)) <= demo_story.WIDTH
    assert " ".join(" ".join(lines).split()) == f"When -> {('word ' * 40).strip()}"


@pytest.mark.parametrize("engine", ENGINES.values(), ids=ENGINES)
def test_titles_fit_into_a_line(engine: object) -> None:
    for size_mib in (16, 512, 2048):
        assert len(demo_story.cold_start(engine, size_mib)) <= demo_story.WIDTH  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("share", "shown"), [("", "capturing: 3 s"), ("1 of 2", "capturing: 1 of")]
)
def test_what_is_under_way_is_shown_with_its_time(share: str, shown: str) -> None:
    said = demo_story.waiting("capturing", 3.2, share)
    assert said.strip().startswith(shown)
    assert "3 s so far" in said


@pytest.mark.parametrize(("engine", "asks"), [("text", 1), ("onnx", 0)])
def test_a_worker_that_takes_text_can_be_asked_by_the_command_line(engine: str, asks: int) -> None:
    lines = demo_story.look_around(ACCESS, "demo-llm-restored", ENGINES[engine])
    assert sum(" ask demo-llm-restored " in line for line in lines) == asks
    assert (lines[0], lines[-1]) == ("It goes on; its page is http://page/", "End")
