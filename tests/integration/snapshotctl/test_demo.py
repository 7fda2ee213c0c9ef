"""The demo, as `make demo` runs it, on little memory."""

import re
import shutil
import signal
from pathlib import Path

import pytest

from snapshotctl.adapters import processes
from snapshotctl.domain import formats
from snapshotctl.domain.demo_engines import ENGINES
from tests.integration.snapshotctl.conftest import (
    EXAMPLES,
    Cli,
    interrupt,
    needs_engines,
    read_until,
)

SIZE = ("--size-mib", "16")
LAST = "Everything is ended and removed."


def _demos(cli: Cli) -> list[Path]:
    folder = cli.home / "state" / "snapback"
    return sorted(folder.glob("demo-*")) if folder.is_dir() else []


def _run_of(out: str) -> str:
    found = re.search(r"logs: .*/demo-([0-9a-f]{8})/logs", out)
    assert found is not None
    return found[1]


def test_two_demos_at_once_each_capture_lose_restore_and_leave_nothing(cli: Cli) -> None:
    both = [cli.start("demo", *SIZE) for _ in range(2)]
    outputs = [process.communicate(timeout=120)[0] for process in both]
    assert [process.returncode for process in both] == [0, 0]
    for out in outputs:
        _is_whole(out)
        assert cli.left(_run_of(out)) == []
    assert _demos(cli) == []


def _is_whole(out: str) -> None:
    """Everything that a demo shows is there, in its order."""
    assert [line[:3] for line in out.splitlines() if re.match(r"\d/6 ", line)] == [
        f"{number}/6" for number in range(1, 7)
    ]
    assert "killed node-1 with SIGKILL: node-1" in out
    assert "all 4 answers are the same, byte for byte" in out
    assert re.search(r"refused, as it must be: DeviceTooSmall: .*8 MiB.* 4 MiB", out)
    assert re.search(r"cold start [\d.]+ m?s, restore [\d.]+ m?s", out)
    assert re.search(r"^    sha256:[0-9a-f]{64}$", out, re.MULTILINE)
    assert out.count("\ntrace ") == 2
    assert out.count("\n    nats --context ") == out.count("\n    snapshotctl --cluster ") == 7
    assert out.endswith(f"{LAST}\n")


@needs_engines
def test_a_trained_model_names_the_same_types_of_files_on_the_other_node(cli: Cli) -> None:
    out = cli.ok("demo", "--engine", "onnx").out
    before, after = (
        re.findall(r"^  \? (.*)$", part, re.MULTILINE) for part in out.partition("5/6 ")[::2]
    )
    assert before == after
    assert [line.partition(": ")[0] for line in before] == list(ENGINES["onnx"].asked)
    assert {"LICENSE: txt", "Makefile: makefile"} <= {line.partition(" (")[0] for line in before}
    assert "killed node-1 with SIGKILL: node-1" in out
    assert "all 20 answers are the same, byte for byte" in out
    assert "refused, as it must be: DeviceTooSmall" in out
    assert cli.left(_run_of(out)) == []


def test_an_engine_that_is_not_installed_is_named_before_anything_starts(tmp_path: Path) -> None:
    shutil.copytree(EXAMPLES, tmp_path / "checkout" / "deploy" / "examples")
    cli = Cli(tmp_path, workdir=tmp_path / "checkout")
    refused = cli.run("demo", "--engine", "onnx")
    assert refused.code == 1
    assert re.search(r"\.engines/\.installed: run, .*: make engines", refused.err)
    assert _demos(cli) == []


def test_every_part_of_the_capture_rises_to_the_size_in_the_manifest(cli: Cli) -> None:
    out = cli.ok("demo", "--size-mib", "64", "--keep").out
    [demo] = _demos(cli)
    [content] = cli.ok("get", "snapshotcontents", "-o", "json", "--cluster", demo.name).value()
    sizes = {part["part"]: part["bytes"] for part in content["status"]["committed"]["parts"]}
    capture = out.partition("4/6 ")[2].partition("5/6 ")[0]
    for part, size in sizes.items():
        seen = re.findall(rf"^  {part}: ([\d.]+ \w*B)\b", capture, re.MULTILINE)
        assert (seen[0], seen[-1]) == ("0 B", formats.size(size))
        assert seen == sorted(set(seen), key=formats.parse_size)
        assert len(seen) >= 3
    assert f"snapshotctl down --cluster {demo.name} --purge" in out
    assert f"  page {cli.record(demo.name)['page']}" in out
    assert cli.left(cli.record(demo.name)["run"]) == []
    cli.ok("down", "--name", demo.name, "--purge")


@pytest.mark.parametrize(
    ("moment", "number"),
    [
        ("nats-server listens", signal.SIGINT),
        ("pod demo-llm", signal.SIGTERM),
        ("> The harbour", signal.SIGINT),
        ("5/6 ", signal.SIGTERM),
        ("trace ", signal.SIGINT),
    ],
)
def test_an_interrupted_demo_leaves_nothing(cli: Cli, moment: str, number: int) -> None:
    process = cli.start("demo", *SIZE)
    read_until(process, moment)
    run = cli.record(_demos(cli)[0].name)["run"]
    ended = interrupt(process, number)
    assert (ended.code, "interrupted" in ended.err) == (130, True)
    assert processes.members(run) == []
    assert _demos(cli) == []
    assert cli.left(run) == []


@pytest.mark.parametrize(
    ("broken", "reason"),
    [
        ("import sys; sys.exit(3)", "exit code 3"),
        ('raise SystemExit("no model here")', "exit code 1"),
    ],
)
def test_a_worker_that_ends_early_ends_the_demo_and_the_logs_are_kept(
    tmp_path: Path, broken: str, reason: str
) -> None:
    copied = tmp_path / "checkout" / "deploy" / "examples"
    shutil.copytree(EXAMPLES, copied)
    (copied / "worker.py").write_text(broken)
    cli = Cli(tmp_path, workdir=tmp_path / "checkout")
    failed = cli.run("demo", *SIZE)
    assert failed.code == 1
    assert reason in failed.err
    [demo] = _demos(cli)
    assert f"the logs are kept in {demo}/logs" in failed.err
    assert (demo / "logs" / "operator.log").stat().st_size > 0
    assert processes.members(cli.record(demo.name)["run"]) == []
    cli.ok("down", "--name", demo.name, "--purge")


def test_an_answer_that_differs_after_the_restore_ends_the_demo(tmp_path: Path) -> None:
    copied = tmp_path / "checkout" / "deploy" / "examples"
    shutil.copytree(EXAMPLES, copied)
    worker = (copied / "worker.py").read_text()
    forgetful = worker.replace('own["turns"], own["memory"])', 'own["turns"], "")')
    assert forgetful != worker
    (copied / "worker.py").write_text(forgetful)
    cli = Cli(tmp_path, workdir=tmp_path / "checkout")
    failed = cli.run("demo", *SIZE)
    assert failed.code == 1
    assert "4 answers differ after the restore" in failed.err
    cli.purge()


def test_too_little_memory_is_named_before_anything_starts(cli: Cli) -> None:
    refused = cli.run("demo", "--size-mib", "1000000")
    assert refused.code == 1
    assert re.search(r"memory: .* available, .* needed: free memory", refused.err)
    assert _demos(cli) == []
