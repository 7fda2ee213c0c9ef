"""Each command as the program that a shell starts: it answers as it does within the tests.

Those that are interrupted elsewhere, or that start a cluster, are programs there. Every command is
imported when it is called, and costs half a second of CPU: `make test` runs some of each kind.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.snapshotctl.conftest import Cli, Ended

POD = """\
apiVersion: v1
kind: Pod
metadata: {name: there}
spec: {nodeSelector: {nowhere: "1"}, containers: [{name: main, command: ["true"]}]}
"""
CHECKPOINT = """\
apiVersion: nvidia.com/v1alpha1
kind: DynamoCheckpoint
metadata: {name: llama}
spec: {identity: {model: meta-llama/Llama-2-7b-hf, backendFramework: vllm}}
"""


def _both(cli: Cli, *words: str, stdin: str = "") -> tuple[Ended, Ended]:
    return cli.program(*words, stdin=stdin), cli.run(*words, stdin=stdin)


@pytest.mark.parametrize(
    ("words", "stdin", "code"),
    [
        ("apply -n programs -f -", POD, 0),
        pytest.param("identity -f -", CHECKPOINT, 0, marks=pytest.mark.slow),
        ("validate -f -", CHECKPOINT, 4),
        ("get pods -n programs -o json", "", 0),
        pytest.param("describe pod there -n programs -o json", "", 0, marks=pytest.mark.slow),
        ("explain DeviceTooSmall", "", 0),
        pytest.param("trace nothing", "", 3, marks=pytest.mark.slow),
        ("watch nothing", "", 3),
        pytest.param("verify nothing", "", 3, marks=pytest.mark.slow),
        pytest.param("checkpoint nothing", "", 3, marks=pytest.mark.slow),
        pytest.param("delete pod nothing", "", 3, marks=pytest.mark.slow),
        pytest.param("cordon nothing", "", 3, marks=pytest.mark.slow),
        pytest.param("drain nothing --capture", "", 3, marks=pytest.mark.slow),
        pytest.param("artifacts ls", "", 0, marks=pytest.mark.slow),
        pytest.param("artifacts gc --dry-run -o json", "", 0, marks=pytest.mark.slow),
        pytest.param("orders", "", 0, marks=pytest.mark.slow),
        pytest.param("dead ls", "", 0, marks=pytest.mark.slow),
        ("schema dump_order", "", 0),
        pytest.param("completion bash", "", 0, marks=pytest.mark.slow),
        ("sim fail node-1 --clear", "", 0),
        ("down --name nothing", "", 3),
        ("leftovers --no-such-option", "", 2),
        ("--version", "", 0),
    ],
)
def test_a_command_answers_the_same_from_a_shell(
    running: Cli, words: str, stdin: str, code: int
) -> None:
    if "-n programs" in words:
        running.ok("apply", "-n", "programs", "-f", "-", stdin=POD)
    program, here = _both(running, *words.split(), stdin=stdin)
    assert program == here
    assert program.code == code
    assert program.out or program.err


@pytest.mark.parametrize(
    "words",
    [
        pytest.param("nodes", marks=pytest.mark.slow),
        pytest.param("events", marks=pytest.mark.slow),
        "doctor",
    ],
)
def test_a_command_whose_answer_holds_times_ends_the_same_from_a_shell(
    running: Cli, words: str
) -> None:
    program, here = _both(running, *words.split())
    assert (program.code, program.err) == (here.code, here.err) == (0, "")
    assert program.out.split()[0] == here.out.split()[0]


def test_files_are_written_the_same_from_a_shell(running: Cli, tmp_path: Path) -> None:
    for name, run in (("program", running.program), ("here", running.run)):
        bundle = tmp_path / f"{name}.tar.gz"
        ended = run("bundle", "--file", str(bundle))
        assert (ended.code, bundle.is_file()) == (0, True), ended
        folder = tmp_path / name
        ended = run("keys", "--folder", str(folder), "--node", "node-1")
        assert (ended.code, (folder / "operator" / "seed.nk").is_file()) == (0, True), ended
