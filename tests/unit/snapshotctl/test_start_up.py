"""What the command line does without: modules that take longer to import than most commands run."""

from __future__ import annotations

import subprocess
import sys

import pytest

SLOW = {"aiohttp", "jsonschema", "nats", "opentelemetry"}

IMPORTED = """
import sys
from snapshotctl.main.commands import run
try:
    run(sys.argv[1:])
finally:
    print("imported:", *sorted({name.partition(".")[0] for name in sys.modules}))
"""


@pytest.mark.parametrize(
    "words",
    [["--version"], ["--help"], ["apply", "--help"], ["demo", "--help"], ["sim", "--help"]],
    ids=" ".join,
)
def test_no_slow_module_is_imported_to_show_the_version_or_help(words: list[str]) -> None:
    shown = subprocess.run(
        [sys.executable, "-c", IMPORTED, *words], check=True, capture_output=True, text=True
    ).stdout
    *_, last = shown.splitlines()
    imported = set(last.split()[1:])
    assert "typer" in imported
    assert imported & SLOW == set()
