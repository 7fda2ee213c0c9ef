"""The first process of a container that waits to be restored, in process namespaces of its own."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from snapshot_agent.adapters import procfs
from tests.support.waiting import wait_until

ROOT = Path(__file__).resolve().parents[3]
SOURCE = ROOT / "services/snapshot-agent/init/init.c"
WITHIN_S = 10.0

pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root, for process namespaces"),
    pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler"),
]


@pytest.fixture(scope="session")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The program, built as `make init` builds it."""
    built = tmp_path_factory.mktemp("init") / "snapback-init"
    words = ("cc", "-std=c11", "-Wall", "-Wextra", "-Werror", "-O2", "-static")
    subprocess.run([*words, "-o", built, SOURCE], check=True)
    return built


class Container:
    """A process namespace whose first process is the program."""

    def __init__(self, program: Path, folder: Path, *words: str, **env: str) -> None:
        self.folder = folder
        self._env = os.environ | env
        self._program = folder / "snapback-init"
        if not self._program.exists():
            subprocess.run([program, "--install", self._program], check=True)
        self._log = folder.parent / f"log-{time.monotonic_ns()}"
        with self._log.open("w") as log:
            self.process = subprocess.Popen(
                ["unshare", "--pid", "--fork", "--kill-child", self._program, *words],
                cwd=folder.parent,
                env=self._env,
                stdout=log,
                stderr=log,
            )
        self.pid = self._first()

    def _first(self) -> int:
        """Return the pid of the first process when it waits, or 0 when it has ended."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        end = time.monotonic() + WITHIN_S
        while self.process.poll() is None:
            assert time.monotonic() < end, "the first process does not wait"
            with contextlib.suppress(OSError):
                for pid in map(int, children.read_text().split()):
                    status = Path(f"/proc/{pid}/status").read_text()
                    # It blocks all signals before it waits for them.
                    if "SigBlk:\tffff" in status:
                        return pid
            time.sleep(0.005)
        return 0

    def restore(self, script: str) -> int:
        """Have a process in the namespace whose parent has ended, as CRIU does; return its pid."""
        words = ("nsenter", f"--target={self.pid}", "--pid", "sh", "-c")
        started = f"sh -c '{script}' </dev/null >/dev/null 2>&1 & echo $!"
        done = subprocess.run([*words, started], check=True, capture_output=True, text=True)
        inside = int(done.stdout)
        wait_until(lambda: procfs.child_in(self.pid, inside), "the child was adopted")
        return inside

    def ending(self, code: int) -> str:
        """Return a script that exits with a code after `end`, so not before it was adopted."""
        return f"until [ -e {self.folder}/end ]; do sleep 0.02; done; exit {code}"

    def end(self) -> None:
        (self.folder / "end").touch()

    def ends_after_a_restore(self) -> None:
        """Restore a process, with whose end the container ends."""
        self.announce(self.restore(self.ending(1)))
        self.end()
        assert self.ended() == 1

    def announce(self, inside: int) -> None:
        (self.folder / ".new").write_text(f"{inside}\n")
        (self.folder / ".new").rename(self.folder / "restored")
        os.kill(self.pid, signal.SIGUSR1)

    def probe(self) -> str:
        """Return why the startup probe fails; empty if it succeeds."""
        words = [self._program, "--restored"]
        done = subprocess.run(words, env=self._env, stderr=subprocess.PIPE, text=True, check=False)
        assert bool(done.stderr) == bool(done.returncode)
        return done.stderr

    def ended(self) -> int:
        return self.process.wait(WITHIN_S)

    def said(self) -> str:
        return self._log.read_text()


@pytest.fixture
def make(program: Path, tmp_path: Path) -> Iterator[Callable[..., Container]]:
    made: list[Container] = []

    def container(*words: str, **env: str) -> Container:
        folder = tmp_path / "snapback"
        folder.mkdir(exist_ok=True)
        made.append(Container(program, folder, *words, **env))
        return made[-1]

    yield container
    for each in made:
        each.process.kill()
        each.process.wait()


Make = Callable[..., Container]
WAITS = "no process has been restored here yet: kubectl get snapshotrestores\n"
RESTORED = "the restored process does not go on yet\n"
LOOP = "while :; do sleep 0.02; done"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_one_that_waits_ends_at_the_signals_that_end_a_container(
    make: Make, number: signal.Signals
) -> None:
    container = make()
    os.kill(container.pid, number)
    assert container.ended() == 128 + number


def test_the_probe_fails_while_a_restored_process_waits_for_its_memory(
    make: Make, tmp_path: Path
) -> None:
    container = make(SNAPSHOT_CONTROL_DIR=str(tmp_path))
    (tmp_path / "restore-complete").touch()
    assert container.probe() == WAITS
    (tmp_path / "restore-complete").unlink()
    container.announce(container.restore(LOOP))
    assert container.probe() == RESTORED
    (tmp_path / "restore-complete").touch()
    assert container.probe() == ""


def test_the_probe_of_a_container_that_starts_cold_waits_until_its_worker_is_ready(
    make: Make, tmp_path: Path
) -> None:
    given = {"SNAPSHOT_CONTROL_DIR": str(tmp_path)}
    first = make("--", "sleep", "60", **given)
    for name in ("restore-complete", "ready-for-snapshot"):
        (tmp_path / name).touch()
    first.ends_after_a_restore()
    again = make("--", "sh", "-c", LOOP.replace("0.02", "0.05"), **given)
    assert again.probe() == WAITS
    (tmp_path / "ready-for-snapshot").touch()
    assert again.probe() == ""


@pytest.mark.parametrize("code", [0, 7])
def test_the_container_ends_with_the_exit_code_of_the_restored_process(
    make: Make, code: int
) -> None:
    container = make()
    container.announce(container.restore(f'trap "exit {code}" TERM; {LOOP}'))
    wait_until(lambda: container.probe() == "", "restored")
    time.sleep(0.1)
    os.kill(container.pid, signal.SIGTERM)
    assert container.ended() == code


def test_a_restored_process_that_a_signal_ends_gives_128_and_its_number(make: Make) -> None:
    container = make()
    inside = container.restore(LOOP)
    container.announce(inside)
    found = procfs.child_in(container.pid, inside)
    assert found is not None
    procfs.send(found, signal.SIGKILL)
    assert container.ended() == 128 + signal.SIGKILL


def test_the_status_of_a_child_that_ended_before_it_was_announced_is_kept(make: Make) -> None:
    container = make()
    inside = container.restore(container.ending(5))
    container.end()
    wait_until(lambda: procfs.child_in(container.pid, inside) is None, "its end")
    container.announce(inside)
    assert container.ended() == 5


def test_other_children_that_end_do_not_end_the_container(make: Make) -> None:
    container = make()
    container.announce(container.restore(f'trap "exit 3" TERM; {LOOP}'))
    container.restore(container.ending(9))
    container.end()
    time.sleep(0.3)
    assert container.process.poll() is None
    os.kill(container.pid, signal.SIGTERM)
    assert container.ended() == 3


def test_a_container_that_is_started_again_after_a_restore_runs_its_own_command(
    make: Make, tmp_path: Path
) -> None:
    script = "pwd; echo ${SNAPSHOT_RESTORE_STANDBY:-none}; exit 4"
    make("--", "sh", "-c", script).ends_after_a_restore()
    again = make("--", "sh", "-c", script, SNAPSHOT_RESTORE_STANDBY="1")
    assert again.ended() == 4
    assert again.said() == f"{tmp_path}\nnone\n"
    assert not (tmp_path / "snapback/restored").exists()


def test_one_with_no_command_says_so_when_it_is_started_again(make: Make) -> None:
    make().ends_after_a_restore()
    again = make()
    assert again.ended() == 1
    assert "delete its pod, or give it a command" in again.said()


def context(folder: Path) -> dict[str, str | None]:
    path = folder / "restore-context.json"
    wait_until(path.exists, "the context")
    assert path.stat().st_mode & 0o777 == 0o600
    found: dict[str, str | None] = json.loads(path.read_text("utf-8"))["env"]
    return found


def test_one_that_waits_writes_the_variables_of_its_container_as_workers_of_dynamo_read_them(
    make: Make, tmp_path: Path
) -> None:
    given = {"POD_NAME": "a-1", "NATS_SERVER": "", "POD_UID": 'a "quote", \\, \n and ü€🎉'}
    (tmp_path / ".restore-context.json.new").write_text("of one that was killed")
    make(SNAPSHOT_CONTROL_DIR=str(tmp_path), SECRET="not of the list", **given)
    found = context(tmp_path)
    assert {name: found[name] for name in given} == given
    assert "SECRET" not in found
    assert found["DYN_SYSTEM_PORT"] is None
    assert len(found) == 34
    assert [*found] == sorted(found)
    assert not (tmp_path / ".restore-context.json.new").exists()


BROKEN = [
    b"\xff",
    b"a\xc3",
    b"\xed\xa0\x80",
    b"\xc0\xaf",
    b"\xf4\x90\x80\x80",
    b"\xf0\x80\x80\x80",
    b"\xe2\x82",
]


@pytest.mark.parametrize("text", BROKEN)
def test_bytes_that_are_no_text_are_as_python_has_them(
    make: Make, tmp_path: Path, text: bytes
) -> None:
    make(SNAPSHOT_CONTROL_DIR=str(tmp_path), POD_NAME=os.fsdecode(text))
    assert context(tmp_path)["POD_NAME"] == os.fsdecode(text)


def test_a_link_in_place_of_the_context_is_replaced_and_a_folder_that_is_gone_is_said(
    make: Make, tmp_path: Path
) -> None:
    (tmp_path / "elsewhere").write_text("kept")
    for name in ("restore-context.json", ".restore-context.json.new"):
        (tmp_path / name).symlink_to(tmp_path / "elsewhere")
    make(SNAPSHOT_CONTROL_DIR=str(tmp_path), POD_NAME="a")
    wait_until(lambda: not (tmp_path / "restore-context.json").is_symlink(), "the context")
    assert context(tmp_path)["POD_NAME"] == "a"
    assert (tmp_path / "elsewhere").read_text() == "kept"
    (tmp_path / "restore-context.json").unlink()
    (tmp_path / "restore-context.json").mkdir()
    other = make(SNAPSHOT_CONTROL_DIR=str(tmp_path))
    wait_until(lambda: "waiting for a restore" in other.said(), "it waits all the same")
    assert "restore-context.json" in other.said()


@pytest.mark.parametrize("text", ["", "no number", "1", "0", "-7", "99999999999999", None])
def test_a_file_that_names_no_process_or_is_a_link_restores_nothing(
    make: Make, tmp_path: Path, text: str | None
) -> None:
    container = make()
    if text is None:
        (tmp_path / "elsewhere").write_text("22\n")
        (container.folder / "restored").symlink_to(tmp_path / "elsewhere")
    else:
        (container.folder / "restored").write_text(text)
    os.kill(container.pid, signal.SIGUSR1)
    assert container.probe() == WAITS
    os.kill(container.pid, signal.SIGTERM)
    assert container.ended() == 128 + signal.SIGTERM


@pytest.mark.parametrize("words", [("--wrong",), ("--install",), ("--",)])
def test_wrong_arguments_are_answered_by_the_usage(make: Make, words: tuple[str, ...]) -> None:
    container = make(*words)
    assert container.ended() == 2
    assert container.said().startswith("usage: snapback-init")
