"""`snapback-run`: engines as they are, with the test as their snapshot agent."""

from __future__ import annotations

import ctypes
import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tarfile
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from snapback_client.errors import InvalidInput, NotEligible
from snapback_client.run import Command, Engine, Request, hook_of, plan_of
from snapback_client.state_files import pack, unpack
from tests.integration.gms.test_worker import PATIENCE_S, Agent
from tests.support.agent_rig import catches, is_gone, watches
from tests.support.gms_rig import MIB
from tests.support.waiting import wait_until

HAS_FILTERS = hasattr(tarfile, "data_filter")
pytestmark = pytest.mark.skipif(not HAS_FILTERS, reason="--state needs Python 3.11.4")

ENGINE = """
import http.server, sys
log = open("asked", "a", buffering=1)
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.answer(200)
    def do_POST(self):
        log.write(self.path + chr(10))
        self.answer(500 if self.path == "/fails" else 200)
    def answer(self, code):
        self.send_response(code)
        self.send_header("Content-Length", "0")
        self.end_headers()
    def log_message(self, *_):
        pass
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


class Running:
    """A program under snapback-run, in a folder of its own."""

    def __init__(self, folder: Path, control: Path | None = None) -> None:
        self.folder = folder
        self.env = {k: v for k, v in os.environ.items() if not k.startswith("SNAP")}
        if control is not None:
            self.env["SNAPSHOT_CONTROL_DIR"] = str(control)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.process: subprocess.Popen[str] | None = None

    def url(self, path: str) -> str:
        return f"http://127.0.0.1:{self.port}{path}"

    def start(self, *words: str, **env: str) -> subprocess.Popen[str]:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "snapback_client.run", *words],
            cwd=self.folder,
            env=self.env | env,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        return self.process

    def engine(self, *options: str, **env: str) -> None:
        """Start an engine that writes down what it is asked by POST."""
        program = ("--", sys.executable, "-c", ENGINE, str(self.port))
        self.start("--ready", self.url("/"), *options, *program, **env)

    def end_captured(self, agent: Agent) -> None:
        """End what was captured; a standby that starts next begins with what it has saved."""
        self.close()
        agent.remove("quiesce", "quiesced", "ready-for-snapshot")
        agent.put("restore-complete", 2)

    def asked(self) -> list[str]:
        return (self.folder / "asked").read_text().split()

    def end(self) -> tuple[int, str, str]:
        assert self.process is not None
        out, error = self.process.communicate(timeout=PATIENCE_S)
        return self.process.returncode, out, error

    def close(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            self.process.communicate(timeout=PATIENCE_S)


@pytest.fixture
def agent(tmp_path: Path) -> Agent:
    return Agent(tmp_path / "control")


@pytest.fixture
def running(tmp_path: Path, agent: Agent) -> Iterator[Running]:
    folder = tmp_path / "engine"
    folder.mkdir()
    made = Running(folder, agent.path)
    yield made
    made.close()


@pytest.mark.parametrize(
    ("text", "hook"),
    [
        ("", None),
        ("http://h/sleep", Request("POST", "http://h/sleep")),
        ("GET http://h/health", Request("GET", "http://h/health")),
        ("save --to 'a b'", Command(("save", "--to", "a b"))),
    ],
)
def test_a_hook_is_a_request_or_a_command(text: str, hook: object) -> None:
    assert hook_of(text) == hook


@pytest.mark.parametrize(
    "text",
    [
        "GET nowhere",
        "http://a b",
        "say 'what",
        "http://[::1/",
        "http://h:x/",
        "http://",
        "http://h/ä",
    ],
)
def test_a_hook_that_makes_no_sense_is_shown(text: str) -> None:
    with pytest.raises(InvalidInput, match="the hook"):
        hook_of(text)


def test_a_python_that_cannot_put_files_back_safely_is_refused_at_the_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delattr(tarfile, "data_filter")
    with pytest.raises(InvalidInput, match=r"--state needs Python 3\.11\.4"):
        plan_of(["--state", "cache", "--", "true"], {})
    assert plan_of(["--", "true"], {}).state == []


def test_each_option_may_come_from_the_environment_and_the_command_line_wins() -> None:
    given = {"SNAPBACK_RUN_READY": "http://h/", "SNAPBACK_RUN_HOOK_WITHIN": "5"}
    plan = plan_of(["--hook-within", "7", "--resume", "http://h/wake", "--", "engine"], given)
    assert plan.ready == Request("GET", "http://h/")
    assert plan.hook_s == 7.0
    assert plan.restore == plan.resume == Request("POST", "http://h/wake")
    with pytest.raises(InvalidInput, match="--ready-within is 'soon'"):
        plan_of(["--ready-within", "soon", "--", "engine"], {})


def test_output_and_exit_code_are_those_of_the_engine(running: Running) -> None:
    running.start("--", "sh", "-c", "echo said; echo wrong >&2; exit 7")
    assert running.end() == (7, "said\n", "wrong\n")


def test_signals_reach_the_engine_and_its_end_by_one_is_shown(running: Running) -> None:
    script = "trap 'echo heard; exit 3' TERM; echo up; while :; do sleep 0.02; done"
    process = running.start("--", "sh", "-c", script)
    assert process.stdout is not None
    assert process.stdout.readline() == "up\n"
    process.send_signal(signal.SIGTERM)
    assert running.end()[:2] == (3, "heard\n")
    running.start("--", "sh", "-c", "kill -KILL $$")
    assert running.end()[0] == 128 + signal.SIGKILL


@pytest.mark.parametrize(
    ("words", "control", "status", "said"),
    [
        ("--", "", 2, "no program is named"),
        ("--quiesce 'GET x' -- true", "", 2, "the hook 'GET x' is no request"),
        ("-- ./nothing", "", 127, "./nothing cannot be started: No such file or directory"),
        ("-- true", "/no/such/folder", 2, "SNAPSHOT_CONTROL_DIR is '/no/such/folder'"),
        ("--ready {url} -- sh -c 'exit 9'", "", 9, "the engine has ended"),
        (
            "--ready {url} --ready-within 0.3 -- sleep 60",
            "",
            1,
            "the engine was not ready within 0.3 s",
        ),
    ],
)
def test_what_cannot_be_run_is_said_without_a_traceback(
    running: Running, words: str, control: str, status: int, said: str
) -> None:
    env = {"SNAPSHOT_CONTROL_DIR": control} if control else {}
    running.start(*shlex.split(words.format(url=running.url("/"))), **env)
    code, _, error = running.end()
    assert (code, said in error, "Traceback" in error) == (status, True, False)


def test_an_engine_is_asked_to_be_quiet_for_a_capture_and_to_go_on_after_it(
    running: Running, agent: Agent
) -> None:
    options = ("--quiesce", running.url("/sleep"), "--resume", running.url("/wake"))
    running.engine(*options, "--state", "asked:cache:absent")
    agent.found("ready-for-snapshot")
    (running.folder / "cache").mkdir()
    (running.folder / "cache/graph").write_text("compiled")
    agent.quiet()
    assert running.asked() == ["/sleep"]
    with tarfile.open(agent.path / "state/files.tar") as archive:
        assert archive.getnames() == ["0", "1", "1/graph"]
    agent.go_on()
    assert running.asked() == ["/sleep", "/wake"]


def is_not_captured(running: Running, agent: Agent, hook: str) -> None:
    """Have a capture aborted because the engine has not become quiet after its hook."""
    agent.ask()
    wait_until(lambda: hook in (running.folder / "asked").read_text(), "the hook")
    agent.go_on(end="snapshot-aborted")
    assert not (agent.path / "quiesced").exists()


@pytest.mark.parametrize("may_wake", [True, False])
def test_an_engine_whose_hook_fails_is_not_captured_and_may_refuse_to_wake_up(
    running: Running, agent: Agent, may_wake: bool
) -> None:
    options = () if may_wake else ("--resume", running.url("/fails"))
    running.engine("--quiesce", running.url("/fails"), *options)
    is_not_captured(running, agent, "/fails")
    assert running.process is not None
    assert running.process.poll() is None
    running.close()
    assert running.process.returncode == 128 + signal.SIGTERM


@pytest.mark.parametrize("what", ["pipe", "link"])
def test_files_that_could_not_be_put_back_are_not_captured(
    running: Running, agent: Agent, what: str
) -> None:
    cache = running.folder / "cache"
    cache.mkdir()
    if what == "pipe":
        os.mkfifo(cache / "pipe")
    else:
        (cache / "link").symlink_to("/etc/hostname")
    running.engine("--quiesce", running.url("/sleep"), "--state", "cache")
    is_not_captured(running, agent, "/sleep")


def test_a_folder_that_is_elsewhere_is_saved_with_what_is_in_it(
    running: Running, agent: Agent, tmp_path: Path
) -> None:
    (tmp_path / "mounted").mkdir()
    (tmp_path / "mounted/graph").write_text("compiled")
    (running.folder / "cache").symlink_to(tmp_path / "mounted")
    running.engine("--state", "cache")
    agent.quiet()
    running.end_captured(agent)
    (tmp_path / "mounted/graph").unlink()
    running.engine("--state", "cache", SNAPSHOT_RESTORE_STANDBY="1")
    agent.found("restored", 2)
    assert (tmp_path / "mounted/graph").read_text() == "compiled"


def test_an_engine_that_cannot_go_on_ends_with_a_status_that_is_not_0(
    running: Running, agent: Agent
) -> None:
    program = ("--", "sh", "-c", "trap 'exit 0' TERM; while :; do sleep 0.02; done")
    running.start("--resume", "false", *program)
    agent.quiet()
    agent.put("snapshot-complete", 1)
    assert running.end()[0] == 1


def test_what_a_hook_has_started_ends_with_it(running: Running, agent: Agent) -> None:
    hook = "sh -c 'sleep 60 & echo $! >pid; wait'"
    running.start("--hook-within", "0.3", "--quiesce", hook, "--", "sleep", "60")
    agent.ask()
    wait_until((running.folder / "pid").exists, "the start of the hook")
    wait_until(lambda: (running.folder / "pid").read_text().strip(), "its child")
    pid = int((running.folder / "pid").read_text())
    wait_until(lambda: is_gone(pid), "the end of its child")


def test_a_restored_engine_finds_its_files_and_is_asked_to_take_them_up(
    running: Running, agent: Agent, tmp_path: Path
) -> None:
    (tmp_path / "saved").mkdir()
    (tmp_path / "saved/graph").write_text("compiled")
    (tmp_path / "asked").write_text("before\n")
    with tarfile.open(agent.path / "state/files.tar", "w") as archive:
        archive.add(tmp_path / "asked", "0")
        archive.add(tmp_path / "saved", "1")
    agent.put("restore-complete", 4)
    options = ("--resume", running.url("/wake"), "--restore", running.url("/load"))
    running.engine(*options, "--state", "asked:cache", SNAPSHOT_RESTORE_STANDBY="1")
    agent.found("restored", 4)
    assert running.asked() == ["before", "/load"]
    assert (running.folder / "cache/graph").read_text() == "compiled"


def test_a_process_that_was_restored_elsewhere_is_asked_to_take_up_what_is_its_own(
    running: Running, agent: Agent
) -> None:
    running.engine("--resume", running.url("/wake"), "--restore", running.url("/load"))
    agent.quiet()
    agent.put("restore-complete", 2)
    agent.found("restored", 2)
    assert running.asked() == ["/load"]


def test_a_command_that_is_called_after_a_restore_finds_who_the_engine_is(
    running: Running, agent: Agent, tmp_path: Path
) -> None:
    seen = tmp_path / "seen"
    running.engine("--restore", f"sh -c 'env >{seen}'", POD_NAME="source", POD_UID="source")
    agent.quiet()
    context = {"env": {"POD_NAME": "clone", "POD_UID": None}}
    (agent.path / "restore-context.json").write_text(json.dumps(context))
    agent.put("restore-complete", 2, node="n2", pod="default/clone", generation=3)
    agent.found("restored", 2)
    found = dict(line.partition("=")[::2] for line in seen.read_text().splitlines())
    assert found["SNAPBACK_HOSTNAME"] == socket.gethostname()
    assert (found["SNAPBACK_NODE"], found["SNAPBACK_POD"]) == ("n2", "default/clone")
    assert (found["SNAPBACK_GENERATION"], found["SNAPBACK_ATTEMPT"]) == ("3", "2")
    assert found["POD_NAME"] == "clone"
    assert "POD_UID" not in found
    assert int(found["SNAPBACK_SEED"]) in range(1 << 32)


def test_a_standby_ends_at_a_signal(running: Running, agent: Agent) -> None:
    process = running.start("--", "sleep", "60", SNAPSHOT_RESTORE_STANDBY="1")
    wait_until(lambda: watches(process.pid) and catches(process.pid, signal.SIGTERM), "its wait")
    process.send_signal(signal.SIGTERM)
    assert running.end()[0] == 128 + signal.SIGTERM


def test_a_restore_of_what_another_program_has_saved_is_said(
    running: Running, agent: Agent
) -> None:
    agent.put("restore-complete", 1)
    running.start("--state", "cache", "--", "true", SNAPSHOT_RESTORE_STANDBY="1")
    code, _, error = running.end()
    assert code == 1
    assert "the files of --state cannot be put back" in error
    assert "Traceback" not in error


FILE, LINK, NAME = tarfile.REGTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE


@pytest.mark.parametrize(
    "members",
    [
        [("0/../other/x", FILE, "")],
        [("0/link", LINK, "../other"), ("0/link/x", FILE, "")],
        [("0/name", NAME, "other/file"), ("0/name", FILE, "")],
        [("0/name", NAME, "../other/file"), ("0/name", FILE, "")],
        [("1", LINK, "other"), ("1/x", FILE, "")],
        [("1", NAME, "other/file"), ("1", FILE, "")],
    ],
)
def test_nothing_is_put_back_beside_what_the_state_names(
    tmp_path: Path, members: list[tuple[str, bytes, str]]
) -> None:
    for folder in ("cache", "other"):
        (tmp_path / folder).mkdir()
    (tmp_path / "other/file").write_text("mine")
    with tarfile.open(tmp_path / "files.tar", "w") as archive:
        for name, kind, to in members:
            member = tarfile.TarInfo(name)
            member.type, member.linkname = kind, to
            archive.addfile(member)
    engine = Engine(plan_of(["--state", f"{tmp_path}/cache:{tmp_path}/log", "--", "true"], {}))
    with pytest.raises(NotEligible, match="the files of --state cannot be put back"):
        engine.put_back(tmp_path)
    assert [each.name for each in (tmp_path / "other").iterdir()] == ["file"]
    assert (tmp_path / "other/file").read_text() == "mine"
    assert not (tmp_path / "log").is_symlink()


def test_links_that_stay_in_what_the_state_names_are_put_back(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    (cache / "below").mkdir(parents=True)
    (cache / "graph").write_text("compiled")
    (cache / "below/link").symlink_to("../graph")
    (cache / "name").hardlink_to(cache / "graph")
    engine = Engine(plan_of(["--state", str(cache), "--", "sleep", "60"], {}))
    engine.start()
    try:
        engine.quiesce(tmp_path)
    finally:
        engine.end()
    shutil.rmtree(cache)
    engine.put_back(tmp_path)
    assert (cache / "below/link").readlink() == Path("../graph")
    assert {(cache / each).read_text() for each in ("below/link", "name")} == {"compiled"}
    assert (cache / "name").samefile(cache / "graph")


def test_holes_modes_and_times_of_the_state_are_put_back(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    (cache / "below").mkdir(parents=True)
    with (cache / "below/sparse").open("wb") as file:
        for offset in (0, 300 * MIB + 5):
            file.seek(offset)
            file.write(b"here")
        file.truncate(1024 * MIB)
    (cache / "zeros").write_bytes(bytes(4 * MIB))
    (cache / "empty").touch()
    before = (cache / "below/sparse").stat()
    for path, mode in ((cache / "below/sparse", 0o664), (cache / "below", 0o775), (cache, 0o710)):
        path.chmod(mode)
        os.utime(path, (1e9, 1e9 + mode))
    pack([cache], tmp_path / "files.tar")
    packed = (tmp_path / "files.tar").stat()
    assert packed.st_blocks * 512 < MIB < packed.st_size
    with tarfile.open(tmp_path / "files.tar") as archive:
        assert sorted(archive.getnames()) == [
            "0",
            "0/below",
            "0/below/sparse",
            "0/empty",
            "0/zeros",
        ]
    shutil.rmtree(cache)
    unpack(tmp_path / "files.tar", [cache])
    found = (cache / "below/sparse").stat()
    assert found.st_size == before.st_size == 1024 * MIB
    assert found.st_blocks * 512 <= before.st_blocks * 512 + 2 * 64 * 1024
    with (cache / "below/sparse").open("rb") as file:
        for offset in (0, 300 * MIB + 5):
            file.seek(offset)
            assert file.read(5) == b"here\0"
    assert (cache / "zeros").read_bytes() == bytes(4 * MIB)
    for path, mode in ((cache / "below/sparse", 0o664), (cache / "below", 0o775), (cache, 0o710)):
        assert (path.stat().st_mode & 0o777, path.stat().st_mtime) == (mode, 1e9 + mode)


def test_a_signal_that_comes_while_the_engine_is_started_reaches_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = Engine(plan_of(["--", "sleep", "60"], {}))
    start = subprocess.Popen.__init__

    def started(*arguments: Any, **more: Any) -> None:
        start(*arguments, **more)
        threading.Thread(target=engine.forward, args=(signal.SIGTERM,)).start()

    monkeypatch.setattr(subprocess.Popen, "__init__", started)
    engine.start()
    assert engine.child.wait(PATIENCE_S) == -signal.SIGTERM


def test_a_signal_that_another_thread_takes_reaches_the_engine(
    running: Running, agent: Agent
) -> None:
    """The main thread waits for the engine all the while, and runs no handler."""
    script = "trap 'exit 3' TERM; echo up; while :; do sleep 0.02; done"
    process = running.start("--", "sh", "-c", script)
    assert process.stdout is not None
    # Before, the shell would end by the signal.
    assert process.stdout.readline() == "up\n"
    agent.found("ready-for-snapshot")
    others = {int(task.name) for task in Path(f"/proc/{process.pid}/task").iterdir()}
    others.remove(process.pid)
    tgkill, libc = 234, ctypes.CDLL(None, use_errno=True)
    assert libc.syscall(tgkill, process.pid, min(others), signal.SIGTERM) == 0
    assert running.end()[0] == 3


def test_a_server_of_others_has_its_data_again(running: Running, agent: Agent) -> None:
    """The server of moto, unchanged: it records requests in a file and can replay them."""
    replay = f"POST {running.url('/moto-api/recorder/replay-recording')}"
    words = ("--ready", running.url("/moto-api/"), "--state", "moto_recording", "--restore", replay)
    program = ("--", sys.executable, "-m", "moto.server", "-p", str(running.port))
    env = {"MOTO_ENABLE_RECORDING": "1"}
    running.start(*words, *program, **env)
    agent.found("ready-for-snapshot")
    ask(running.url("/bucket"), "PUT")
    ask(running.url("/bucket/key"), "PUT", b"what was stored")
    agent.quiet()
    running.end_captured(agent)
    (running.folder / "moto_recording").unlink()
    running.start(*words, *program, SNAPSHOT_RESTORE_STANDBY="1", **env)
    agent.found("restored", 2)
    assert ask(running.url("/bucket/key")) == b"what was stored"


def ask(url: str, method: str = "GET", data: bytes | None = None) -> bytes:
    headers = {
        "Authorization": "AWS4-HMAC-SHA256 Credential=a/20260101/us-east-1/s3/aws4_request",
        "Content-Type": "text/plain",
    }
    request = urllib.request.Request(url, method=method, data=data, headers=headers)
    with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
        return bytes(answer.read())
