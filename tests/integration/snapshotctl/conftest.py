"""The command line as a user runs it, with folders of its own.

A process of its own costs half a second of CPU to start, so a command runs in the process of the
test, unless it is about processes: `Cli.program` starts it as a shell does.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar
from unittest import mock

import msgspec
import pytest

from snapshot_shared.bus import Bus
from snapshot_shared.permissions import User
from snapshotctl.adapters import processes, worker_socket
from snapshotctl.domain.cluster import ProcessRecord
from snapshotctl.main import main
from tests.support.waiting import wait_until

T = TypeVar("T")

ROOT = Path(__file__).resolve().parents[3]
EXAMPLES = ROOT / "deploy" / "examples"
ENGINES = ROOT / ".engines"
PATIENCE_S = 90
ANSWER_S = 30.0
HAVE_CHILDREN = ("up", "demo", "sim restart")
"""Commands whose children must not be children of the tests, as they go on after it."""

needs_engines = pytest.mark.skipif(
    not (ENGINES / ".installed").exists(), reason="no engines are installed: run `make engines`"
)


CHECKPOINT = "dynamocheckpoint/demo-llm"
POD = """\
apiVersion: v1
kind: Pod
metadata:
  name: {name}
spec:
  containers:
    - name: main
      command: {command}
"""


def pod(name: str, command: str = '["sleep", "1000"]') -> str:
    """The manifest of a pod that uses no GPU."""
    return POD.format(name=name, command=command)


def example(name: str) -> str:
    """One of the examples, with a small worker on one GPU that is ready as soon as it serves."""
    text = (EXAMPLES / name).read_text()
    for setting, value in (
        ("name: SIZE_MIB\n +value", '"4"'),
        ("name: WARMUP_REQUESTS\n +value", '"0"'),
        ("name: WARMUP_SECONDS\n +value", '"0"'),
        ("nvidia.com/gpu", "1"),
    ):
        text, count = re.subn(rf'({setting}: )["\d]+', rf"\g<1>{value}", text)
        assert count == 1
    return text


@dataclass(frozen=True)
class Ended:
    """How a command ended."""

    code: int
    out: str
    err: str

    def value(self) -> Any:
        return json.loads(self.out)


class Cli:
    """snapshotctl with state, contexts and working directory beneath one folder.

    A process of it is waited for at most `patience_s` seconds.
    """

    patience_s: float = PATIENCE_S

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
            out, err = process.communicate(stdin, timeout=self.patience_s)
        assert "Traceback" not in err
        return Ended(process.returncode, out, err)

    def run(self, *words: str, stdin: str = "") -> Ended:
        """Run a command, in this process where it starts none. Not for use in an event loop."""
        if " ".join(words).startswith(HAVE_CHILDREN):
            return self.program(*words, stdin=stdin)
        return self.here(*words, stdin=stdin)

    def here(self, *words: str, stdin: str = "") -> Ended:
        """Run a command in this process, even if it would start others were it not refused."""
        with _standing_in(self.workdir, self.environment, ["snapshotctl", *words], stdin) as said:
            code = _ended_with(main)
        out, err = (stream.buffer.getvalue().decode() for stream in said)
        assert "Traceback" not in err
        return Ended(code, out, err)

    def ok(self, *words: str, stdin: str = "") -> Ended:
        ended = self.run(*words, stdin=stdin)
        assert ended.code == 0, ended
        return ended

    def refused(self, code: int, why: str, *words: str) -> Ended:
        """Run a command that ends with this exit code and says why; it may not start anything."""
        ended = self.here(*words)
        assert (ended.code, why in ended.err) == (code, True), ended
        return ended

    def value(self, *words: str) -> Any:
        """Return the value that a command prints for a program."""
        return self.ok(*words, "-o", "json").value()

    def apply(self, manifest: str) -> Ended:
        return self.ok("apply", "-f", "-", stdin=manifest)

    def schedule(self, name: str, manifest: str = "") -> None:
        """Apply a pod, and wait until it has a node."""
        self.apply(manifest or pod(name))
        self.ok("wait", f"pod/{name}", "--for", "condition=PodScheduled", "--timeout", "60s")

    def until(self, holds: Callable[[Any], Any], *words: str) -> Any:
        """Repeat a command until something holds of the value it prints; return what that gave."""
        last = time.monotonic() + PATIENCE_S
        while time.monotonic() < last:
            if found := holds(self.value(*words)):
                return found
            time.sleep(0.05)
        raise AssertionError(f"not within {PATIENCE_S} s: {self.ok(*words).out}")

    def state(self, name: str = "default") -> Path:
        return self.home / "state" / "snapback" / name

    def record(self, name: str = "default") -> dict[str, Any]:
        return json.loads((self.state(name) / "cluster.json").read_text())  # type: ignore[no-any-return]

    def process(self, name: str) -> ProcessRecord:
        """The record of a process of the default cluster."""
        [found] = [each for each in self.record()["processes"] if each["name"] == name]
        return msgspec.convert(found, ProcessRecord)

    def kill(self, name: str) -> None:
        """SIGKILL a process of the default cluster, and wait for its end."""
        handle = processes.opened(self.process(name))
        assert handle is not None
        asyncio.run(processes.end([handle], grace_s=0))

    def members(self, name: str = "default") -> list[processes.RunProcess]:
        """The processes of a cluster that run, workers included."""
        return processes.members(self.record(name)["run"])

    def on_bus(self, work: Callable[[Bus], Awaitable[T]], user: str = "snapshotctl") -> T:
        """Use the bus of the default cluster as one of its users."""

        async def connected() -> T:
            who = User(user)  # type: ignore[arg-type]
            key = str(self.state() / "keys" / f"{who.name}.nk")
            bus = Bus(self.record()["url"], "test", credentials=key, inbox=who.inbox)
            await bus.connect(patiently=False)
            try:
                return await work(bus)
            finally:
                await bus.close()

        return asyncio.run(connected())

    def pods(self) -> dict[str, Any]:
        """The pods of the namespace `default`, by their names."""
        return {each["metadata"]["name"]: each for each in self.value("get", "pods")}

    def said_by(self, pod: Mapping[str, Any], *, chat: str = "") -> bytes:
        """Ask the worker of a pod something, or tell it. A worker that is held does not answer."""

        async def said() -> bytes:
            folder = Path(self.record()["socket_dir"]) / pod["status"]["nodeName"]
            client = await worker_socket.connect(folder, pod["metadata"]["uid"])
            try:
                return await (client.chat(chat) if chat else client.ask("What is my name?"))
            finally:
                await client.close()

        return asyncio.run(asyncio.wait_for(said(), ANSWER_S))

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


@pytest.fixture(scope="package")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cli]:
    """A user whose default cluster runs, with one node; shared by the tests of this folder.

    Each test names its own objects. The sockets are where no other user looks.
    """
    found = Cli(tmp_path_factory.mktemp("user"))
    with tempfile.TemporaryDirectory(prefix="r", dir="/tmp") as sockets:
        found.environment["XDG_RUNTIME_DIR"] = sockets
        found.ok("up", "--nodes", "1", "--gpu-memory", "256MiB")
        yield found
        found.purge()


@pytest.fixture(scope="module")
def faulty(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cli]:
    """A user for the tests of a file that break parts of one cluster; see `one_node`."""
    found = Cli(tmp_path_factory.mktemp("user"))
    yield found
    found.purge()


@pytest.fixture
def one_node(faulty: Cli) -> Cli:
    """A user whose default cluster runs, with a node of one GPU and no object, and is well."""
    return fresh(faulty, "--nodes", "1", "--gpus", "1")


def fresh(cli: Cli, *nodes: str) -> Cli:
    """Tidy the default cluster up after another test, or start another one if that fails.

    Dead letters stay, as no user may remove them.
    """
    if cli.state().exists():
        with contextlib.suppress(AssertionError, pytest.fail.Exception):
            _tidy(cli)
            return cli
        cli.purge()
    cli.ok("up", *nodes, "--gpu-memory", "64MiB")
    return cli


def _tidy(cli: Cli) -> None:
    records = [msgspec.convert(each, ProcessRecord) for each in cli.record()["processes"]]
    ended = [record.name for record in records if not processes.is_alive(record)]
    # In the order of their start, and those of a node together.
    for name in dict.fromkeys(re.sub("-(agent|gms)$", "", name) for name in ended):
        cli.ok("sim", "restart", name)
    for name in [each["name"] for each in cli.record()["nodes"]]:
        clear = ("sim", "fail", name, "--clear")
        # A service that was just started answers soon.
        wait_until(lambda words=clear: cli.run(*words).code == 0, " ".join(clear))
        cli.ok("uncordon", name)
    for kind in ("dynamocheckpoint", "snapshot", "pod"):
        names = [f"{kind}/{each['metadata']['name']}" for each in cli.value("get", kind)]
        for name in names:
            # It may be on its way out, and gone by now.
            cli.run("delete", name)
        for name in names:
            cli.ok("wait", name, "--for", "delete", "--timeout", "30s")
    wait_until(lambda: cli.run("doctor").code == 0, lambda: cli.run("doctor").out)
