"""The demo, as `make demo` runs it, on little memory."""

import json
import re
import shlex
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

from snapshotctl.adapters import processes
from snapshotctl.domain.demo_engines import ENGINES
from tests.integration.snapshotctl.conftest import (
    EXAMPLES,
    PATIENCE_S,
    Cli,
    interrupt,
    needs_engines,
    read_until,
)

pytestmark = pytest.mark.turns

SHORT = ("--size-mib", "16", "--warm-up", "short")
MOST_LINES = 25


def _demos(cli: Cli) -> list[Path]:
    folder = cli.home / "state" / "snapback"
    return sorted(folder.glob("demo-*")) if folder.is_dir() else []


def _with_copied_examples(folder: Path) -> tuple[Cli, Path]:
    """A user with a copy of the examples as the only checkout, and where the copy is."""
    examples = folder / "checkout" / "deploy" / "examples"
    shutil.copytree(EXAMPLES, examples)
    return Cli(folder, workdir=folder / "checkout"), examples


def _run_of(out: str) -> str:
    found = re.search(r" demo-([0-9a-f]{8}): ", out)
    assert found is not None
    return found[1]


@pytest.mark.slow
def test_two_demos_at_once_each_capture_lose_restore_and_leave_nothing(cli: Cli) -> None:
    both = [cli.start("demo", *SHORT), cli.start("demo", *SHORT, "-o", "json")]
    (out, _), (value, err) = [process.communicate(timeout=PATIENCE_S) for process in both]
    assert [process.returncode for process in both] == [0, 0], err
    _is_whole(out)
    assert cli.left(_run_of(out)) == []
    # A program reads the same as one value.
    found = json.loads(value)
    assert (found["pod"], found["refused"]) == ("demo-llm-restored", "DeviceTooSmall")
    assert found["cluster"].startswith("demo-")
    assert found["coldSeconds"] > found["pausedSeconds"] > 0
    assert found["restoreSeconds"] > 0
    assert found["answers"][-1] == {"question": "My name is", "answer": "Ada."}
    assert cli.left(found["cluster"].removeprefix("demo-")) == []
    assert _demos(cli) == []


def _is_whole(out: str) -> None:
    """The whole story is there, in its order, and it fits on a screen."""
    lines = out.splitlines()
    assert [line[:3] for line in lines if re.match(r"\d/5 ", line)] == [
        f"{number}/5" for number in range(1, 6)
    ]
    assert re.search(r"cold start: [\d.]+ m?s to the first answer", out)
    assert re.search(r"captured [\d.]+ MiB in .* worker paused for [\d.]+ m?s", out)
    assert re.search(r"restore: [\d.]+ m?s to the first answer", out)
    assert out.count("My name is -> Ada.") == 2
    assert "node-1 is lost: its " in out
    assert "all 3 answers are the same, byte for byte" in out
    assert "GPUs are too small it is refused: DeviceTooSmall" in out
    assert re.search(r"^The restore was .* the cold start", out, re.MULTILINE)
    assert "Everything is ended and removed." in out
    assert "\ntrace " not in out
    assert len(_kept(out)) <= MOST_LINES
    assert max(map(len, lines)) <= 80


def _kept(out: str) -> list[str]:
    """The lines that stay on a terminal."""
    return [line for line in out.splitlines() if "so far" not in line]


@needs_engines
@pytest.mark.slow
def test_a_trained_model_names_the_same_types_of_files_on_the_other_node(cli: Cli) -> None:
    ended = cli.ok("demo", "--engine", "onnx", "-o", "json")
    answers = {each["question"]: each["answer"] for each in ended.value()["answers"]}
    assert list(answers) == list(ENGINES["onnx"].asked)
    assert answers["LICENSE"].startswith("txt ")
    assert answers["Makefile"].startswith("makefile ")
    assert ended.value()["refused"] == "DeviceTooSmall"
    assert _demos(cli) == []


def test_an_engine_that_is_not_installed_is_named_before_anything_starts(tmp_path: Path) -> None:
    cli, _ = _with_copied_examples(tmp_path)
    refused = cli.here("demo", "--engine", "onnx")
    assert refused.code == 1
    assert re.search(r"\.engines/\.installed: run, .*: make engines", refused.err)
    assert _demos(cli) == []


def test_a_demo_that_is_kept_says_how_to_look_around_and_how_to_end_it(cli: Cli) -> None:
    out = cli.ok("demo", *SHORT, "--keep", "--trace").out
    [demo] = _demos(cli)
    # Both traces are shown on request, each with an empty line before it.
    story, *traces = out.split("\ntrace ")
    assert len(traces) == 2
    rest = traces[-1].partition("\n\n")[2]
    assert len(_kept(story)) + len(_kept(rest)) <= MOST_LINES
    commands = re.findall(rf"^    snapshotctl --cluster {demo.name} (.*)$", out, re.MULTILINE)
    assert len(commands) == 2
    for typed in commands:
        cli.ok("--cluster", demo.name, *shlex.split(typed))
    assert f"It goes on; its page is {cli.record(demo.name)['page']}\n" in out
    assert f"snapshotctl down --cluster {demo.name} --purge" in out
    assert cli.left(cli.record(demo.name)["run"]) == []
    cli.ok("down", "--name", demo.name, "--purge")


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["1/5 ", "2/5 ", "3/5 ", "5/5 "])
def test_a_demo_whose_reader_ends_leaves_nothing_and_says_so(cli: Cli, moment: str) -> None:
    with cli.start("demo", *SHORT) as process:
        read_until(process, moment)
        assert process.stdout is not None
        process.stdout.close()
        assert process.stderr is not None
        err = process.stderr.read()
    assert (process.returncode, "Traceback" in err) == (1, False)
    assert "everything that the demo has started is ended and removed" in err
    assert _demos(cli) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("moment", "number"),
    [
        ("2/5 ", signal.SIGTERM),
        ("it learns: ", signal.SIGINT),
        ("5/5 ", signal.SIGTERM),
        ("byte for byte", signal.SIGINT),
    ],
)
def test_an_interrupted_demo_leaves_nothing(cli: Cli, moment: str, number: int) -> None:
    _interrupted(cli, cli.start("demo", *SHORT), moment, number)


def test_a_demo_that_is_interrupted_in_its_warm_up_has_shown_it_in_steady_lines(
    tmp_path: Path,
) -> None:
    cli, examples = _with_copied_examples(tmp_path)
    manifest = (examples / "text" / "checkpoint.yaml").read_text()
    # No machine is done with so many before it is interrupted.
    (examples / "text" / "checkpoint.yaml").write_text(manifest.replace('"8"', '"800"'))
    process = cli.start("demo", "--size-mib", "16")
    out = _interrupted(cli, process, "the worker warms up: ", signal.SIGTERM)
    assert re.search(r"^    the worker warms up: \d+ s so far$", out, re.MULTILINE)


def _interrupted(cli: Cli, process: subprocess.Popen[str], moment: str, number: int) -> str:
    """Interrupt a demo once it has shown a text; return its output."""
    out = read_until(process, moment)
    run = cli.record(_demos(cli)[0].name)["run"]
    ended = interrupt(process, number)
    assert (ended.code, "interrupted" in ended.err) == (130, True)
    assert "everything that the demo has started is ended and removed" in ended.err
    assert processes.members(run) == []
    assert _demos(cli) == []
    assert cli.left(run) == []
    return out + ended.out


@pytest.mark.parametrize(
    ("broken", "reason"),
    [
        ("import sys; sys.exit(3)", "exit code 3"),
        pytest.param('raise SystemExit("no model here")', "exit code 1", marks=pytest.mark.slow),
    ],
)
def test_a_worker_that_ends_early_ends_the_demo_and_the_logs_are_kept(
    tmp_path: Path, broken: str, reason: str
) -> None:
    cli, examples = _with_copied_examples(tmp_path)
    (examples / "text_worker.py").write_text(broken)
    failed = cli.run("demo", *SHORT)
    assert failed.code == 1
    assert reason in failed.err
    [demo] = _demos(cli)
    assert f"the logs are kept in {demo}/logs" in failed.err
    assert (demo / "logs" / "operator.log").stat().st_size > 0
    assert processes.members(cli.record(demo.name)["run"]) == []
    cli.ok("down", "--name", demo.name, "--purge")


def test_an_answer_that_differs_after_the_restore_ends_the_demo(tmp_path: Path) -> None:
    cli, examples = _with_copied_examples(tmp_path)
    worker = (examples / "text_worker.py").read_text()
    forgetful = worker.replace('own["inputs"], own["readout"]', 'own["inputs"], 0 * own["readout"]')
    assert forgetful != worker
    (examples / "text_worker.py").write_text(forgetful)
    failed = cli.run("demo", *SHORT)
    assert failed.code == 1
    assert "3 answers differ after the restore" in failed.err
    cli.purge()
