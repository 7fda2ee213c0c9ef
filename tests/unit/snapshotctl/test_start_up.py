"""Which modules a command does without: most take longer to import than the command runs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from snapshotctl.cli import COMMANDS

ROOT = Path(__file__).resolve().parents[3]
EXAMPLE = str(ROOT / "deploy" / "examples" / "checkpoint.yaml")

SLOW = {"aiohttp", "nats", "opentelemetry"}
"""Modules that no command needs before it connects."""
UNUSED = SLOW | {"asyncio", "jsonschema", "nacl", "rich", "snapshot_shared.objects", "yaml"}
"""Modules that are not needed to list the commands."""

WITHOUT_A_SERVER = (("identity", "-f", EXAMPLE), ("explain", "DeviceTooSmall"))

PROGRAM = """
import json, sys
from snapshotctl.cli import COMMANDS, run
for words in json.loads(sys.argv[1]) + [[name, "--help"] for name in COMMANDS]:
    code = run(words)
    print("imported:", json.dumps([words, code, sorted(sys.modules)]))
"""

Steps = list[tuple[list[str], int, set[str]]]


@pytest.fixture(scope="module")
def steps() -> Steps:
    """What one process runs one after another: its words, its exit code, the modules after it."""
    first = (("--version",), ("--help",), *WITHOUT_A_SERVER)
    shown = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps(first)],
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    lines = [line for line in shown.splitlines() if line.startswith("imported: ")]
    rows = [json.loads(line.partition(" ")[2]) for line in lines]
    assert len(rows) == len(first) + len(COMMANDS)
    return [(words, code, set(modules)) for words, code, modules in rows]


def test_the_version_and_the_help_import_no_command_and_nothing_slow(steps: Steps) -> None:
    for words, code, imported in steps[:2]:
        assert (words, code) in ((["--version"], 0), (["--help"], 0))
        assert "typer" in imported
        assert imported & UNUSED == set()
        assert not [name for name in imported if name.startswith("snapshotctl.commands")]


def test_a_command_without_a_server_imports_no_client(steps: Steps) -> None:
    for words, code, imported in steps[2:4]:
        assert (code, words[0] in ("identity", "explain")) == (0, True)
        assert f"snapshotctl.commands.{words[0]}" in imported
        assert imported & SLOW == set()
        assert "snapshotctl.adapters.operator_client" not in imported


def test_the_help_of_no_command_imports_anything_slow(steps: Steps) -> None:
    slow = {
        words[0]: found
        for words, _, imported in steps
        if (found := imported & {*SLOW, "snapshotctl.adapters.operator_client"})
    }
    assert slow == {}
    assert [words for words, code, _ in steps if code != 0] == []
    assert {f"snapshotctl.commands.{name}" for name in COMMANDS} <= steps[-1][2]
