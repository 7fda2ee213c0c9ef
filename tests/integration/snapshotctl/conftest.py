"""The command line as a user runs it, with folders of its own.

A process of its own costs half a second of CPU to start, so a command runs in the process of the
test, unless it is about processes: `Cli.program` starts it as a shell does.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from snapshotctl.main import main

ROOT = Path(__file__).resolve().parents[3]
EXAMPLES = ROOT / "deploy" / "examples"
ENGINES = ROOT / ".engines"
PATIENCE_S = 90
HAVE_CHILDREN = ("up", "demo", "sim restart")
"""Commands whose children must not be children of the tests, as they go on after it."""

needs_engines = pytest.mark.skipif(
    not (ENGINES / ".installed").exists(), reason="no engines are installed: run `make engines`"
)


@dataclass(frozen=True)
class Ended:
    """How a command ended."""

    code: int
    out: str
    err: str

    def value(self) -> Any:
        return json.loads(self.out)


class Cli:
    """snapshotctl with state, contexts and working directory beneath one folder."""

    def __init__(self, home: Path, workdir: Path = ROOT) -> None:
        self.home = home
        self.workdir = workdir
        self.environment = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("SNAPBACK_", "NATS_", "XDG_"))
        } | {
            "XDG_STATE_HOME": str(home / "state"),
            "XDG_CONFIG_HOME": str(home / "config"),
            "PYTHONUNBUFFERED": "1",
        }

    def start(self, *words: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "snapshotctl", *words],
            cwd=self.workdir,
            env=self.environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def program(self, *words: str, stdin: str = "") -> Ended:
        """Run a command as a process."""
        with self.start(*words) as process:
            out, err = process.communicate(stdin, timeout=PATIENCE_S)
        assert "Traceback" not in err
        return Ended(process.returncode, out, err)

    def run(self, *words: str, stdin: str = "") -> Ended:
        """Run a command, in this process where it starts none. Not for use in an event loop."""
        if " ".join(words).startswith(HAVE_CHILDREN):
            return self.program(*words, stdin=stdin)
        with _standing_in(self.workdir, self.environment, ["snapshotctl", *words], stdin) as said:
            code = _ended_with(main)
        out, err = (stream.buffer.getvalue().decode() for stream in said)
        assert "Traceback" not in err
        return Ended(code, out, err)

    def ok(self, *words: str, stdin: str = "") -> Ended:
        ended = self.run(*words, stdin=stdin)
        assert ended.code == 0, ended
        return ended

    def until(self, holds: Callable[[Any], Any], *words: str) -> Any:
        """Repeat a command until something holds of the value it prints; return what that gave."""
        last = time.monotonic() + PATIENCE_S
        while time.monotonic() < last:
            if found := holds(self.ok(*words, "-o", "json").value()):
                return found
            time.sleep(0.05)
        raise AssertionError(f"not within {PATIENCE_S} s: {self.ok(*words).out}")

    def state(self, name: str = "default") -> Path:
        return self.home / "state" / "snapback" / name

    def record(self, name: str = "default") -> dict[str, Any]:
        return json.loads((self.state(name) / "cluster.json").read_text())  # type: ignore[no-any-return]

    def left(self, run: str) -> list[str]:
        """What `leftovers` says of one run; others may be under way on this machine."""
        lines = self.run("leftovers").out.splitlines()
        return [line for line in lines if run in line or str(self.home) in line]

    def purge(self) -> None:
        """End whatever a test left running; no test should."""
        for folder in (self.home / "state" / "snapback").glob("*"):
            self.run("down", "--name", folder.name, "--purge")


class _Stream(io.TextIOWrapper):
    """A standard stream in memory."""

    buffer: io.BytesIO

    def __init__(self, text: str = "") -> None:
        super().__init__(io.BytesIO(text.encode()), encoding="utf-8", write_through=True)


def _ended_with(command: Callable[[], int]) -> int:
    """Run it as a console script does; return its exit code."""
    try:
        return command()
    except SystemExit as ended:
        return int(ended.code or 0)


@contextlib.contextmanager
def _standing_in(
    workdir: Path, environment: Mapping[str, str], arguments: list[str], stdin: str
) -> Iterator[tuple[_Stream, _Stream]]:
    """Use the folder, environment, arguments and streams of another process; yield its output."""
    out, err = _Stream(), _Stream()
    with (
        contextlib.chdir(workdir),
        mock.patch.dict(os.environ, environment, clear=True),
        mock.patch.multiple(sys, argv=arguments, stdin=_Stream(stdin), stdout=out, stderr=err),
    ):
        yield out, err


def interrupt(process: subprocess.Popen[str], number: int = signal.SIGINT) -> Ended:
    """Interrupt a command and wait for its end."""
    process.send_signal(number)
    out, err = process.communicate(timeout=PATIENCE_S)
    return Ended(process.returncode, out, err)


def read_until(process: subprocess.Popen[str], text: str) -> str:
    """Read what a command prints up to the line that holds a text."""
    assert process.stdout is not None
    seen = ""
    for line in process.stdout:
        seen += line
        if text in line:
            return seen
    pytest.fail(f"the command ended without {text!r}:\n{seen}")


@pytest.fixture
def cli(tmp_path: Path) -> Iterator[Cli]:
    """A user who has nothing yet."""
    found = Cli(tmp_path)
    yield found
    found.purge()


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cli]:
    """A user whose default cluster runs, with one node; shared by the tests of a file."""
    found = Cli(tmp_path_factory.mktemp("user"))
    found.ok("up", "--nodes", "1", "--gpu-memory", "256MiB")
    yield found
    found.purge()
