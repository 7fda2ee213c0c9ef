"""The picture of the demo in README.md is what the demo prints."""

from __future__ import annotations

import re
from pathlib import Path

from snapshotctl.domain import demo_story
from snapshotctl.domain.demo_engines import ENGINES
from tests.docs import demo_picture
from tests.unit.api.test_figures import captured

ROOT = Path(__file__).resolve().parents[2]
SENTENCES = (ROOT / "deploy/examples/text/sentences.txt").read_text().splitlines()
TEXT = ENGINES["text"]
MEASURED = re.compile(r"\d[\d.]*( times| [a-zA-Z]*B(/s)?| m?s\b|m \d\ds)")


def masked(lines: list[str]) -> list[str]:
    """Lines with the same mark for each name of a cluster and each measured value."""
    named = [re.sub(r"demo-[0-9a-f]{8}", "demo-N", line) for line in lines]
    return [MEASURED.sub("N", line) for line in named]


def story() -> list[str]:
    """What a demo prints, with values of its own."""
    known = [*SENTENCES, *TEXT.said]
    said = {
        asked: sentence.removeprefix(f"{asked} ")
        for asked in TEXT.asked
        for sentence in known
        if sentence.startswith(f"{asked} ")
    }
    answers = demo_story.answers([(asked, said[asked]) for asked in TEXT.asked])
    return [
        f"$ {demo_picture.COMMAND}",
        demo_story.START,
        *demo_story.started("demo-0a1b2c3d", 3.0),
        demo_story.cold_start(TEXT, TEXT.size_mib),
        *demo_story.cold(20.0),
        answers[0],
        *demo_story.learned(TEXT.said[0]),
        demo_story.CAPTURE,
        *demo_story.captured(captured()),
        *answers,
        demo_story.lost(["process"] * 5),
        demo_story.RESTORE,
        *demo_story.restored(1.0),
        *answers,
        *demo_story.same(len(TEXT.asked)),
        *demo_story.refused("DeviceTooSmall"),
        demo_story.conclusion(20.0, 1.0),
        demo_story.REMOVED,
        demo_story.WITHOUT_KEEP,
    ]


def test_the_picture_of_the_readme_has_the_lines_that_the_demo_prints() -> None:
    """Else take it again: make demo-picture."""
    shown = demo_picture.lines_of(demo_picture.PICTURE.read_text())
    assert masked(shown) == masked(story())
    assert "(docs/images/demo.svg)" in (ROOT / "README.md").read_text()


def test_a_picture_has_the_lines_that_it_was_made_of_and_no_address_of_a_font() -> None:
    printed = "\x1b[1m1/5 Start & go\x1b[0m\n    <a> -> \x1b[32mb  c\x1b[0m\n"
    made = demo_picture.svg_of(printed)
    shown = demo_picture.lines_of(made)
    assert shown == ["$ snapshotctl demo", "1/5 Start & go", "    <a> -> b  c"]
    assert re.findall(r"url\((?!#)", made) == []
