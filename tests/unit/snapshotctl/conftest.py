"""Commands of snapshotctl, run within the test."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from snapshotctl.domain.cluster import ClusterRecord
from snapshotctl.domain.exits import Exit
from snapshotctl.main import main
from snapshotctl.views.finding import Finding


class Said(NamedTuple):
    """The exit code of a command, and what it printed."""

    code: int
    out: str
    err: str


class Run:
    """Runs commands one after another; `options` stand in front of the words of each."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, printed: pytest.CaptureFixture[str], *options: str
    ) -> None:
        self.monkeypatch = monkeypatch
        self.printed = printed
        self.options = options

    def __call__(self, *words: str, exits: int | None = Exit.OK) -> Said:
        """Run a command that must exit with a code, or with any if `exits` is None."""
        self.monkeypatch.setattr(sys, "argv", ["snapshotctl", *self.options, *words])
        try:
            code = main()
        except SystemExit as ended:
            code = int(ended.code or 0)
        said = Said(code, *self.printed.readouterr())
        assert exits is None or said.code == exits, said
        return said


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Run:
    """Run commands that find no server by accident."""
    for name in ("NATS_URL", "NATS_CONTEXT", "SNAPBACK_CLUSTER", "SNAPBACK_RUN"):
        monkeypatch.delenv(name, raising=False)
    for name in ("XDG_STATE_HOME", "XDG_CONFIG_HOME", "XDG_RUNTIME_DIR"):
        monkeypatch.setenv(name, str(tmp_path / name.lower()))
    return Run(monkeypatch, capsys)


def cluster_record(state: Path, **more: Any) -> ClusterRecord:
    """Return the record of a local cluster that has the name of its folder."""
    fields: dict[str, Any] = {"name": state.name, "run": "r", "boot_id": "b"}
    folders = {"state_dir": str(state), "socket_dir": str(state)}
    return ClusterRecord(**{**fields, **folders, **more})


def assert_trouble(findings: list[Finding], said: str) -> None:
    """Look for one finding with a level, words and words of its fix: `warn  words → fix`."""
    level_and_words, _, fix = said.partition(" → ")
    level, _, words = level_and_words.partition("  ")
    [trouble] = [finding for finding in findings if words in finding.what]
    assert (trouble.level, fix in trouble.fix) == (level, True), trouble
