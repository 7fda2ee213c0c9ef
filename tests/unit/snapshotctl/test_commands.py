"""The command line without a server: help, wrong arguments, exit codes."""

import sys
from pathlib import Path

import pytest

from snapshotctl.domain.exits import Exit
from snapshotctl.main import main

OBJECTS = ["apply", "get", "delete", "wait", "verify", "nodes", "trace"]
COMMANDS = [*OBJECTS, "up", "down", "keys", "demo", "leftovers", "sim"]
SIM = ["crash", "stall", "fail", "restart"]


@pytest.fixture(autouse=True)
def nowhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No server can be found by accident."""
    for name in ("NATS_URL", "NATS_CONTEXT", "SNAPBACK_CLUSTER", "SNAPBACK_RUN"):
        monkeypatch.delenv(name, raising=False)
    for name in ("XDG_STATE_HOME", "XDG_CONFIG_HOME", "XDG_RUNTIME_DIR"):
        monkeypatch.setenv(name, str(tmp_path / name.lower()))


def _run(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr(sys, "argv", ["snapshotctl", *words])
    return main()


@pytest.mark.parametrize("command", COMMANDS)
def test_the_help_of_every_command_has_an_example(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    assert _run(monkeypatch, command, "--help") == Exit.OK
    out = capsys.readouterr().out
    assert "Examples:" in out
    assert f"\n    snapshotctl {command}" in out


@pytest.mark.parametrize("command", SIM)
def test_the_help_of_every_way_to_break_something_has_an_example(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    assert _run(monkeypatch, "sim", command, "--help") == Exit.OK
    assert f"\n    snapshotctl sim {command} node-1" in capsys.readouterr().out
    assert _run(monkeypatch, "sim", "--help") == Exit.OK
    assert f"\n  {command} " in capsys.readouterr().out


def test_the_help_lists_every_command_and_every_exit_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _run(monkeypatch, "--help") == Exit.OK
    out = capsys.readouterr().out
    assert [word for word in COMMANDS if f"\n  {word} " not in out] == []
    assert [code.value for code in Exit if f" {code.value}  " not in out] == []


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        (["gett"], "'get'"),
        (["get"], "KIND [NAME]"),
        (["get", "nothing"], "dynamocheckpoints"),
        (["get", "pods", "--nonsense"], "--nonsense"),
        (["-o", "xml", "nodes"], "'yaml'"),
        (["get", "pods", "-o", "xml"], "'yaml'"),
        (["get", "pod", "x", "-A"], "exclude each other"),
        (["apply"], "--filename"),
        (["delete", "pods"], "a name is missing"),
        (["wait", "pod/x", "--for", "Ready"], "condition=Ready"),
        (["wait", "pod/x", "--timeout", "soon"], "5m"),
        (["up", "--nodes", "0"], "between 1 and"),
        (["up", "--gpu-memory", "much"], "4GiB"),
        (["up", "--name", "../x"], "lower-case"),
        (["demo", "--size-mib", "1"], "between"),
        (["demo", "--on", "."], "SNAPBACK_RUN"),
        (["keys", "--folder", "x"], "--node"),
        (["keys", "--folder", "x", "--node", "a/b"], "'a/b'"),
        (["trace"], "NAME"),
        (["verify"], "NAME"),
        (["verify", "pod/x"], "a Pod holds no artifact"),
        (["verify", "x", "--timeout", "soon"], "5m"),
        (["sim"], "restart"),
        (["sim", "crash"], "snapshotctl sim crash node-1 --at copy-state"),
        (["sim", "crash", "node-1"], "--at STEP is missing"),
        (["sim", "crash", "node-1", "--at", "melt"], "dump: freeze, copy-state, thaw, stage"),
        (["sim", "fail", "node-1", "--at", "check"], "--verb load (gms) or --verb restore (agent)"),
        (["sim", "fail", "node-1", "--at", "write", "--service", "agent"], "the agent has no step"),
        (["sim", "fail", "node-1", "--at", "write", "--verb", "copy"], "'copy'"),
        (["sim", "stall", "node-1", "--at", "gate", "--service", "nats"], "agent, gms"),
        (["sim", "stall", "node-1", "--at", "gate", "--clear"], "exclude"),
        (["sim", "restart", "node-1", "--service", "nats"], "agent, gms"),
        (["get", "pods", "--server", "http://x"], "nats://127.0.0.1:4222"),
    ],
)
def test_wrong_arguments_are_answered_with_the_right_ones(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    answer: str,
) -> None:
    assert _run(monkeypatch, *words) == Exit.USAGE
    captured = capsys.readouterr()
    assert answer in captured.err
    assert "Traceback" not in captured.err
    assert captured.out == ""


def test_nothing_at_all_is_answered_with_the_help(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _run(monkeypatch) == Exit.USAGE
    assert "Commands:" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [
        ["get", "pods"],
        ["nodes"],
        ["trace", "x"],
        ["delete", "pod/x"],
        ["wait", "pod/x"],
        ["verify", "x"],
        ["sim", "fail", "n", "--at", "gate"],
    ],
)
def test_without_a_server_every_command_says_how_to_start_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: list[str]
) -> None:
    assert _run(monkeypatch, *words) == Exit.UNREACHABLE
    assert "snapshotctl up" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["nodes"], ["wait", "pod/x"]])
def test_a_server_that_does_not_answer_is_named_with_where_it_came_from(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: list[str]
) -> None:
    assert _run(monkeypatch, *words, "--server", "u:secret@127.0.0.1:1") == Exit.UNREACHABLE
    err = capsys.readouterr().err
    assert "nats://127.0.0.1:1 (from --server)" in err
    assert "secret" not in err


def test_a_file_that_is_not_there_is_a_wrong_argument(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert _run(monkeypatch, "apply", "-f", str(tmp_path / "missing.yaml")) == Exit.USAGE
    assert "missing.yaml" in capsys.readouterr().err


def test_a_file_that_is_no_yaml_is_refused_with_its_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "bad.yaml"
    file.write_text("a: 1\nb: [\n")
    assert _run(monkeypatch, "apply", "-f", str(file)) == Exit.REFUSED
    assert "bad.yaml:3" in capsys.readouterr().err


def test_a_cluster_that_is_not_there_cannot_be_ended(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _run(monkeypatch, "down", "--name", "none") == Exit.NOT_FOUND
    assert "none" in capsys.readouterr().err


def test_the_version_is_shown(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _run(monkeypatch, "--version") == Exit.OK
    assert capsys.readouterr().out.startswith("snapshotctl ")
