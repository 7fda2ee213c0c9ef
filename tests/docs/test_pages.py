"""The commands that the pages tell people to type do what the pages say."""

from __future__ import annotations

import re
import shutil
import subprocess
from functools import cache
from pathlib import Path

import pytest

from tests.cluster.programs import find
from tests.docs import inspect_page
from tests.docs.pages import ROOT, Block, Shell, blocks, documents, parse_how, play

INSPECT = ROOT / "docs/inspect.md"
MAKE = re.compile(r"(?:^|\s)make ([a-z][a-z0-9-]*)")

BLOCKS = {page: blocks(page) for page in documents()}
PLAYED = [
    page
    for page, found in BLOCKS.items()
    if page != INSPECT
    and any(block.how and block.how.mode in ("cluster", "here") for block in found)
]


def test_every_block_of_commands_says_how_it_is_run() -> None:
    unknown = [block.where for found in BLOCKS.values() for block in found if block.how is None]
    assert unknown == [], "say it in a comment above the block, as tests/docs/pages.py shows"


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(
            page,
            id=str(page.relative_to(ROOT)),
            marks=() if page == ROOT / "README.md" else pytest.mark.turns,
        )
        for page in PLAYED
    ],
)
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_commands_of_a_page_work_in_their_order(page: Path, tmp_path: Path) -> None:
    story = [block for block in blocks(page) if block.how and block.how.mode in ("cluster", "here")]
    _skip_without_tools(story)
    shell = Shell(tmp_path)
    try:
        _begin(story, shell)
        for block in story:
            play(block, shell)
    finally:
        for name in shell.type("ls ~/.local/state/snapback 2>/dev/null").text.split():
            shell.type(f"snapshotctl down --purge --cluster {name}")


def _skip_without_tools(story: list[Block]) -> None:
    commands = [command for block in story for command in block.commands]
    if any(re.search(r"(^|\| )nats ", command) for command in commands) and find("nats") is None:
        pytest.skip("no nats CLI here: run make tools")
    for need in {block.how.needs for block in story if block.how and block.how.needs}:
        if shutil.which(need) is None:
            pytest.skip(f"no {need} here")


def _begin(story: list[Block], shell: Shell) -> None:
    """Start the cluster that the page takes for granted."""
    first = next((block for block in story if block.how and block.how.mode == "cluster"), None)
    if first is None or any("snapshotctl up" in c for block in story for c in block.commands):
        return
    assert first.how is not None
    said = shell.type(f"snapshotctl up {' '.join(first.how.options)}")
    assert said.code == 0, said.text


@pytest.mark.turns
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_cluster_answers_as_the_page_of_questions_says(tmp_path: Path) -> None:
    if find("nats") is None:
        pytest.skip("no nats CLI here: run make tools")
    written = inspect_page.written(INSPECT.read_text(encoding="utf-8"))
    assert len(written) >= 20
    shell = Shell(tmp_path)
    stable = inspect_page.Stable(tmp_path)
    try:
        inspect_page.scene(shell)
        for block, said in inspect_page.answered(INSPECT, shell):
            if block.line in written:
                answer = inspect_page.shown(said, stable)
                assert _beginning(answer) == _beginning(written[block.line]), block.where
    finally:
        shell.type("snapshotctl down --purge")


def _beginning(answer: list[str]) -> str:
    """Give what of an answer is the same each time."""
    return re.sub(r"\d+", "0", answer[0][:24]) if answer else ""


def test_a_block_that_is_not_played_names_only_what_exists() -> None:
    left_out = [
        (block.where, command)
        for found in BLOCKS.values()
        for block in found
        if block.how is not None and block.how.mode == "no"
        for command in block.commands
    ]
    wrong = [
        f"{where}: snapshotctl {words}"
        for where, command in left_out
        for words in re.findall(r"(?:^|\s)snapshotctl ([a-z][a-z-]*(?: [a-z][a-z-]*)?)", command)
        if not _is_command(words)
    ]
    assert left_out
    assert wrong == []
    targets = sorted({target for _, command in left_out for target in MAKE.findall(command)})
    done = subprocess.run(
        ["make", "--dry-run", "--keep-going", *targets, "SETUP_INPUTS="],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


@cache
def _is_command(words: str) -> bool:
    """Whether the first word, or the first two, are a command of snapshotctl."""
    from snapshotctl.cli import run

    return run([*words.split(), "--help"]) == 0


def test_an_annotation_that_is_not_understood_is_an_error() -> None:
    for text in ("clusters", "no", "no, because", "exits 0", "cluster; whenever"):
        with pytest.raises(ValueError, match=r"says neither|is not understood"):
            parse_how(text)
