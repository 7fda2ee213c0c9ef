"""Which modules a command does without: most take longer to import than the command runs."""

from __future__ import annotations

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

IMPORTED = """
import sys
from snapshotctl.cli import run
try:
    run(sys.argv[1:])
finally:
    print("imported:", *sorted(sys.modules))
"""


def _imported(*words: str) -> set[str]:
    shown = subprocess.run(
        [sys.executable, "-c", IMPORTED, *words], check=True, capture_output=True, text=True
    ).stdout
    *_, last = shown.splitlines()
    return set(last.split()[1:])


@pytest.mark.parametrize("words", [["--version"], ["--help"]], ids=" ".join)
def test_the_version_and_the_help_import_no_command_and_nothing_slow(words: list[str]) -> None:
    imported = _imported(*words)
    assert "typer" in imported
    assert imported & UNUSED == set()
    assert not [name for name in imported if name.startswith("snapshotctl.commands")]


@pytest.mark.parametrize(
    "words",
    [["identity", "-f", EXAMPLE], ["explain", "DeviceTooSmall"], ["schema", "--help"]],
    ids=lambda words: " ".join(words[:1]),
)
def test_a_command_without_a_server_imports_no_client(words: list[str]) -> None:
    imported = _imported(*words)
    assert f"snapshotctl.commands.{words[0]}" in imported
    assert imported & SLOW == set()
    assert "snapshotctl.adapters.operator_client" not in imported


def test_the_help_of_no_command_imports_anything_slow() -> None:
    program = """
import sys
from snapshotctl.cli import COMMANDS, run
for name in COMMANDS:
    assert run([name, "--help"]) == 0, name
print("imported:", *sorted(sys.modules))
"""
    shown = subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True
    ).stdout
    *_, last = shown.splitlines()
    imported = set(last.split()[1:])
    assert {f"snapshotctl.commands.{name}" for name in COMMANDS} <= imported
    assert imported & SLOW == set()
