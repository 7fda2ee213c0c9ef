"""The steps of CI: whose turn it is, and the two lanes that run them."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.ci.__main__ import ungroup
from tests.ci.steps import STEPS, TURNS, Landing, Lane, When, due, lacking, landing_of
from tests.support.turns import turn_of
from tests.support.waiting import wait_until

ROOT = Path(__file__).parents[2]
TURN_STEPS = {step.name for step in STEPS if step.when not in (When.ALWAYS, When.PROOFS)}


def recorded(landings: int) -> str:
    """Return the text of `.ci/landings` after some landings."""
    return "# A comment.\n" + "".join(f"{number:040x}\n" for number in range(landings))


@pytest.mark.parametrize("sizes", [[1, 1, 1, 1], [4, 4, 4, 4], [1, 250, 3, 40], [7, 5, 11, 2]])
def test_each_turn_comes_within_four_landings_of_any_size(sizes: list[int]) -> None:
    for earlier in range(1, 9):
        ran: set[str] = set()
        commits = 1000
        for number, size in enumerate(sizes):
            commits += size
            now, left = due(landing_of(recorded(earlier + number), commits))
            turns = {step.name for step in now} & TURN_STEPS
            assert turns, "each landing has a share"
            assert turns | {step.name for step, _ in left} == TURN_STEPS
            ran |= turns
        assert ran == TURN_STEPS


def test_a_landing_says_at_which_landing_the_steps_run_that_it_leaves() -> None:
    for number in range(1, 9):
        for step, later in due(Landing(number, "", 0)).left:
            assert number < later < number + TURNS
            assert step in due(Landing(later, "", 0)).now


def test_each_row_of_a_fault_table_runs_within_four_landings() -> None:
    rows = [*range(TURNS * 3 + 1)]
    for step in STEPS:
        words = [step.words(Landing(number, "", 0)) for number in range(8, 8 + TURNS)]
        turns = {word.removeprefix("TURN=") for each in words for word in each if "TURN=" in word}
        if turns:
            assert sorted(row for text in turns for row in turn_of(text).of(rows)) == rows


def test_what_cover_runs_is_left_out_of_the_tests_of_the_same_landing_and_of_no_other() -> None:
    step = next(step for step in STEPS if step.name == "test")
    for number in range(8, 8 + TURNS):
        landing = Landing(number, "", 0)
        covers = any(each.name == "cover" for each in due(landing).now)
        assert ("COVERED=1" in step.words(landing)) == covers


def test_every_step_is_a_target_of_the_makefile() -> None:
    makefile = (ROOT / "Makefile").read_text("utf-8")
    targets = set(re.findall(r"^([a-z0-9-]+):", makefile, re.MULTILINE))
    assert {step.target or step.name for step in STEPS} - targets == set()
    assert {step.lane for step in STEPS} == set(Lane)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("# none yet\n", "has no landing"),
        ("995462cb\n", "landing 1 is '995462cb', not a whole commit id"),
        (recorded(2) + recorded(1), "a commit twice"),
    ],
)
def test_a_list_of_landings_that_is_not_understood_is_refused(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        landing_of(text, 1)


def test_each_landing_of_this_repository_began_from_a_commit_of_its_history() -> None:
    git = ["git", "-C", str(ROOT)]
    if subprocess.run(
        [*git, "rev-parse", "--git-dir"], capture_output=True, check=False
    ).returncode:
        pytest.skip("no git repository")
    landing = landing_of((ROOT / ".ci/landings").read_text("utf-8"), 0)
    is_ancestor = subprocess.run(
        [*git, "merge-base", "--is-ancestor", landing.since, "HEAD"], check=False
    )
    assert is_ancestor.returncode == 0


def test_a_step_whose_programs_are_missing_is_left_out_with_the_reason(tmp_path: Path) -> None:
    assert lacking("", {}, tmp_path) == ""
    assert "SNAPBACK_TOOLS" in lacking("cluster", {}, tmp_path)
    (tmp_path / "kube").touch()
    assert lacking("cluster", {"SNAPBACK_TOOLS": str(tmp_path)}, tmp_path) == ""
    assert lacking("cluster", {"KUBECONFIG": "/etc/kubeconfig"}, tmp_path) == ""


RUN = """
import sys
from pathlib import Path
from tests.ci import __main__ as ci
from tests.ci.__main__ import ungroup
from tests.ci.steps import Lane, Step
ci.ROOT = Path(sys.argv[1])
ci.LOGS = ci.ROOT / "logs"
ci.STEPS = (
    Step("short", Lane.REST),
    Step("other", Lane.ROOT, target=sys.argv[2], runs_again=sys.argv[2] != "alone"),
)
sys.exit(ci.main(["--proofs"]))
"""
MAKEFILE = """
short:
\techo short ran
fails:
\techo it never works; exit 3
races:
\ttest -e $(CURDIR)/raced || { touch $(CURDIR)/raced; exit 3; }
alone:
\ttest -e $(CURDIR)/raced || { touch $(CURDIR)/raced; exit 3; }
hangs:
\ttrap 'touch $(CURDIR)/cleaned; exit 1' INT; touch $(CURDIR)/begun; \\
\twhile :; do sleep 0.1; done
"""


def begin(folder: Path, other: str) -> subprocess.Popen[str]:
    """Run two steps, of which the second is one of the targets above."""
    (folder / "Makefile").write_text(MAKEFILE)
    (folder / ".ci").mkdir()
    (folder / ".ci/landings").write_text(recorded(1))
    commit = ["git", "-c", "user.name=x", "-c", "user.email=x@x", "commit", "--allow-empty", "-qmx"]
    for command in (["git", "init", "-q"], commit):
        subprocess.run(command, cwd=folder, check=True)
    return subprocess.Popen(
        [sys.executable, "-c", RUN, str(folder), other],
        cwd=ROOT,
        env=os.environ | {"SHELL": "/bin/sh"},
        stdout=subprocess.PIPE,
        text=True,
    )


FAILED_ALONE = ("--last-failed", "--last-failed-no-failures=none")


def run_tests(folder: Path, *options: str, **settings: str) -> subprocess.CompletedProcess[str]:
    """Run the tests of a folder as a step does, with a cache of their own."""
    run = [sys.executable, "-m", "pytest", "-q", "-o", f"cache_dir={folder}/cache", "-p", "xdist"]
    environment = {name: value for name, value in os.environ.items() if "PYTEST" not in name}
    return subprocess.run(
        [*run, *options],
        cwd=folder,
        env=environment | settings,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.waits
def test_tests_that_share_a_process_are_among_those_that_run_again(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(
        "import pytest\n"
        "from pathlib import Path\n"
        "def test_passes(): Path('ran').touch()\n"
        "@pytest.mark.xdist_group('one')\n"
        "@pytest.mark.parametrize('who', ['a@b'])\n"
        "def test_fails(who): raise AssertionError('still')\n"
    )
    assert run_tests(tmp_path, "-n", "1", "--dist", "loadgroup").returncode == 1
    (tmp_path / "ran").unlink()
    ungroup(tmp_path / "cache/v/cache/lastfailed")
    assert run_tests(tmp_path, "-n", "0", *FAILED_ALONE).returncode == 1
    assert not (tmp_path / "ran").exists()


@pytest.mark.waits
def test_a_second_try_runs_the_failed_tests_of_a_turn(tmp_path: Path) -> None:
    hook = "from tests.conftest import pytest_collection_modifyitems"
    (tmp_path / "conftest.py").write_text(f"{hook}  # noqa\n")
    (tmp_path / "test_it.py").write_text(
        "import pytest\n"
        "@pytest.mark.turns\n"
        "@pytest.mark.parametrize('row', range(8))\n"
        "def test_fails(row): raise AssertionError('still')\n"
    )
    for options in ((), FAILED_ALONE):
        done = run_tests(tmp_path, "-n", "0", *options, TURN="2/4", PYTHONPATH=str(ROOT))
        assert re.findall(r"^FAILED .*\[(\d)\]", done.stdout, re.MULTILINE) == ["1", "5"], done


@pytest.mark.waits
@pytest.mark.parametrize(
    ("other", "status", "said"),
    [
        ("short", 0, r"other +\d+ +\d+  root      passed"),
        ("fails", 1, r"failed: other"),
        ("alone", 1, r"failed: other"),
        ("races", 0, r"other failed once and passed when it was run again"),
    ],
)
def test_a_run_tells_how_each_step_ended(
    tmp_path: Path, other: str, status: int, said: str
) -> None:
    with begin(tmp_path, other) as running:
        out, _ = running.communicate(timeout=60)
    assert running.returncode == status, out
    assert re.search(said, out), out
    assert re.search(r"short +\d+ +\d+  rest      passed", out)
    assert "echo short ran" in out, "the log of each step is shown"


@pytest.mark.waits
def test_an_interrupted_run_ends_its_steps_and_lets_them_clean_up(tmp_path: Path) -> None:
    with begin(tmp_path, "hangs") as running:
        wait_until((tmp_path / "begun").exists)
        running.send_signal(signal.SIGINT)
        began = time.monotonic()
        out, _ = running.communicate(timeout=60)
    assert running.returncode == 130, out
    assert (tmp_path / "cleaned").exists()
    assert time.monotonic() - began < 20
