"""Logs, programs beside workers and questions to them, in a real local cluster."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import select
import shlex
import signal
import subprocess
import sys
import termios
from pathlib import Path

import pytest

from tests.integration.snapshotctl.conftest import PATIENCE_S, Cli, interrupt, read_until
from tests.support.waiting import wait_until

pytestmark = pytest.mark.turns

SERVER = """\
import http.server, json, os, socketserver, threading

class Line(socketserver.StreamRequestHandler):
    def handle(self):
        asked = json.loads(self.rfile.readline())
        end = b"" if "cut" in asked else b"\\n"
        self.wfile.write(json.dumps({"heard": asked}).encode() + end)

class Page(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/v1/models" else 404)
        self.end_headers()
        self.wfile.write(b"models of " + os.environ["POD_NAME"].encode())
    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.end_headers()
        self.wfile.write(body)

web = http.server.HTTPServer(("127.0.0.1", 0), Page)
threading.Thread(target=web.serve_forever, daemon=True).start()
socket = os.environ["POD_SOCKET_DIR"] + "/worker.sock"
server = socketserver.UnixStreamServer(socket, Line)
print("serving at", web.server_port, flush=True)
server.serve_forever()
"""
POD = {
    "apiVersion": "v1",
    "kind": "Pod",
    "metadata": {"name": "talker"},
    "spec": {"containers": [{"name": "main", "command": ["python3", "-c", SERVER]}]},
}


NOBODY = re.compile(r"name a pod that runs: .*\btalker\b")


@pytest.fixture
def talking(running: Cli) -> Cli:
    """A user whose worker serves."""
    running.apply(json.dumps(POD))
    wait_until(lambda: "serving at " in running.run("logs", "talker").out)
    return running


def test_a_log_is_followed_until_an_interrupt(talking: Cli) -> None:
    follower = talking.start("logs", "talker", "-f")
    read_until(follower, "serving at ")
    assert interrupt(follower).code == 130


def test_a_question_is_answered_over_the_socket_of_the_worker(talking: Cli) -> None:
    heard = json.loads(talking.ok("ask", "talker", "Who am I?").out)["heard"]
    assert heard == {"op": "ask", "prompt": "Who am I?"}
    heard = json.loads(talking.ok("ask", "pod/talker", "I am Ada.", "--as", "chat").out)["heard"]
    assert heard == {"op": "chat", "text": "I am Ada."}
    raw = talking.value("ask", "talker", '{"x": 1}', "--as", "raw")
    assert raw == {"pod": "talker", "namespace": "default", "answer": {"heard": {"x": 1}}}


def test_a_question_is_answered_over_http(talking: Cli) -> None:
    port = talking.ok("logs", "talker", "--tail", "1").out.split()[-1]
    got = talking.ok("ask", "talker", "--as", "/v1/models", "--to", port)
    assert got.out == "models of talker\n"
    posted = talking.ok("ask", "talker", '{"a": 1}', "--as", "/v1/chat", "--to", port)
    assert posted.out == '{"a": 1}\n'
    talking.refused(
        1, "HTTP 404 Not Found: models of talker", "ask", "talker", "--as", "/nothing", "--to", port
    )


def test_a_worker_that_does_not_answer_is_an_error_with_a_next_step(talking: Cli) -> None:
    talking.refused(1, "before the end of its answer", "ask", "talker", '{"cut": 1}', "--as", "raw")
    absent = talking.run("ask", "talker", "x", "--to", "other.sock")
    assert "other.sock: [Errno 2]" in absent.err
    assert "next: see whether it serves: snapshotctl logs talker" in absent.err
    nobody = talking.run("ask", "nobody", "x")
    assert (nobody.code, bool(NOBODY.search(nobody.err))) == (3, True)


def test_a_program_runs_with_the_environment_and_the_folder_of_the_worker(talking: Cli) -> None:
    script = "echo $POD_NAME; pwd; cat; exit 7"
    ran = talking.program("exec", "talker", "-c", "main", "--", "sh", "-c", script, stdin="in")
    assert ran.out.splitlines() == ["talker", str(talking.workdir), "in"]
    assert ran.code == 7
    talking.refused(2, "name one of: main", "exec", "talker", "-c", "side", "--", "true")
    talking.refused(
        3, "'no-such-program' is not on this machine", "exec", "talker", "--", "no-such-program"
    )


def test_a_process_is_not_of_the_pod_that_its_environment_names(talking: Cli) -> None:
    command = "POD_NAME=ghost; export POD_NAME; echo $POD_NAME; exec sleep 1000"
    posing = talking.start("exec", "talker", "--", "sh", "-c", command)
    read_until(posing, "ghost")
    refused = talking.run("exec", "ghost", "--", "true")
    # It ends with the command.
    assert interrupt(posing).code == 130
    assert (refused.code, "no process of pod ghost" in refused.err) == (3, True)


SNAPSHOTCTL = (sys.executable, "-m", "snapshotctl")

AT_TERMINAL = """\
import os, signal, sys, tty

def told(number, frame):
    # Not by print, which a signal may find at work.
    size = os.get_terminal_size()
    os.write(1, f"{signal.Signals(number).name} {size.columns} {size.lines}\\n".encode())

for number in (signal.SIGINT, signal.SIGWINCH):
    signal.signal(number, told)
tty.setcbreak(0)
print("ready", flush=True)
while sys.stdin.read(1) != "q":
    pass
sys.exit(7)
"""


class Terminal:
    """A program with a terminal of its own, and the far end of it."""

    def __init__(self, cli: Cli, *words: str) -> None:
        self._far, near = pty.openpty()
        self.attributes = termios.tcgetattr(near)
        controlled = (
            "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); "
            "os.execvp(sys.argv[1], sys.argv[1:])"
        )
        self._near = near
        self.process = subprocess.Popen(
            [sys.executable, "-c", controlled, *words],
            cwd=cli.workdir,
            env=cli.environment,
            stdin=near,
            stdout=near,
            stderr=near,
            start_new_session=True,
        )

    def type(self, text: str) -> None:
        os.write(self._far, text.encode())

    def resize(self, columns: int, lines: int) -> None:
        termios.tcsetwinsize(self._far, (lines, columns))

    def until(self, text: str) -> str:
        """Read what is shown up to a text."""
        seen = ""
        while text not in seen:
            ready, _, _ = select.select([self._far], [], [], PATIENCE_S)
            assert ready, seen
            seen += os.read(self._far, 4096).decode()
        return seen

    def ended(self) -> tuple[int, list[object]]:
        """Return the exit code of the command, and how it has left the terminal."""
        code = self.process.wait(PATIENCE_S)
        return code, termios.tcgetattr(self._near)

    def close(self) -> None:
        if self.process.poll() is None:
            # A shell does not end by SIGTERM.
            self.process.kill()
            self.process.wait(PATIENCE_S)
        os.close(self._near)
        os.close(self._far)


def executed(cli: Cli, *program: str) -> contextlib.closing[Terminal]:
    """Run a program beside the worker, from a terminal."""
    return contextlib.closing(Terminal(cli, *SNAPSHOTCTL, "exec", "talker", "--", *program))


def test_what_is_typed_at_a_terminal_is_for_the_program_alone(talking: Cli) -> None:
    with executed(talking, "python3", "-c", AT_TERMINAL) as terminal:
        terminal.until("ready")
        terminal.type("\x03")
        terminal.until("SIGINT")
        terminal.resize(100, 30)
        terminal.until("SIGWINCH 100 30")
        terminal.type("q")
        assert terminal.ended() == (7, terminal.attributes)


def test_ctrl_c_or_another_signal_ends_a_program_that_does_not_expect_it(talking: Cli) -> None:
    for mode in ("raw isig", "raw"):
        with executed(talking, "sh", "-c", f"stty {mode}; echo is $$; exec sleep 1000") as terminal:
            pid = int(terminal.until("\n").split()[1])
            if mode == "raw isig":
                terminal.type("\x03")
            else:
                terminal.process.terminate()
            assert terminal.ended() == (130, terminal.attributes)
            assert not Path(f"/proc/{pid}").exists()


def test_a_command_in_the_background_leaves_the_terminal_to_the_shell(
    talking: Cli, tmp_path: Path
) -> None:
    over = tmp_path / "over"
    program = f"echo rea''dy; until [ -e {over} ]; do sleep 0.1; done"
    words = shlex.join([*SNAPSHOTCTL, "exec", "talker", "--", "sh", "-c", program])
    with contextlib.closing(Terminal(talking, "bash", "--norc", "-i")) as terminal:
        terminal.type(f"{words}\n")
        terminal.until("ready")
        terminal.type("\x1a")
        terminal.until("Stopped")
        terminal.type("bg; echo it has pid $(jobs -p) no''w\n")
        pid = re.findall(r"pid (\d+) now", terminal.until(" now"))[0]
        over.touch()
        wait_until(lambda: not Path(f"/proc/{pid}").exists())
        terminal.type("exit 5\n")
        assert terminal.ended()[0] == 5


def test_workers_are_reached_while_no_operator_answers(talking: Cli) -> None:
    processes = {row["name"]: row["pid"] for row in talking.record()["processes"]}
    os.kill(processes["operator"], signal.SIGSTOP)
    try:
        heard = json.loads(talking.ok("ask", "talker", "Who am I?").out)["heard"]
        assert heard["prompt"] == "Who am I?"
        ran = talking.program("exec", "talker", "--", "sh", "-c", "echo $POD_NAME")
        assert (ran.code, ran.out) == (0, "talker\n")
        nobody = talking.run("exec", "nobody", "--", "true")
        assert (nobody.code, bool(NOBODY.search(nobody.err))) == (3, True)
    finally:
        os.kill(processes["operator"], signal.SIGCONT)


def test_the_logs_of_services_are_found_by_their_names(talking: Cli) -> None:
    [line] = talking.ok("logs", "agent@node-1", "--tail", "1").out.splitlines()
    assert json.loads(line)["service"] == "snap-agent"
    assert "Server is ready" in talking.ok("logs", "nats").out
    assert talking.ok("logs", "gms", "--tail", "1").out == (
        talking.ok("logs", "gms@node-1", "--tail", "1").out
    )
    missing = talking.run("logs", "helper")
    assert "name one of: nats, operator, page, agent@node-1, gms@node-1" in missing.err
    assert "talker has no container 'side'" in talking.run("logs", "talker", "-c", "side").err


def test_the_cluster_and_its_versions_are_shown(talking: Cli) -> None:
    [mine] = [found for found in talking.value("clusters") if found["path"] == str(talking.state())]
    assert (mine["state"], mine["ended"]) == ("running", [])
    assert set(mine["pids"]) == {"nats-server", "operator", "page", "node-1-agent", "node-1-gms"}
    shown = {(row["program"], row["where"]) for row in talking.value("version")}
    assert {
        ("snap-agent", "node-1"),
        ("snap-gms", "node-1"),
        ("snap-operator", "operator"),
    } <= shown
    assert talking.ok("open", "--no-browser").out == f"{talking.record()['page']}\n"
    wide = talking.ok("clusters", "-o", "wide").out
    assert f"operator={mine['pids']['operator']}" in wide


def test_the_names_of_objects_are_completed(talking: Cli) -> None:
    expected = {
        "ask talk": {"talker"},
        "logs talk": {"talker"},
        "logs ag": {"agent@node-1"},
        "get talk": {"talker"},
        "get pod/talk": {"pod/talker"},
        "explain node": {"node-1"},
        "trace pod/talk": {"pod/talker"},
        "trace talk": {"talker"},
        "cordon ": {"node-1"},
        "get pods talk": {"talker"},
        "delete pod/talk": {"pod/talker"},
    }
    assert {line: set(_completed(talking, line)) for line in expected} == expected
    assert "talker" in _completed(talking, "ask ")


def _completed(cli: Cli, line: str) -> list[str]:
    shell = Cli(cli.home)
    shell.environment["_SNAPSHOTCTL_COMPLETE"] = "complete_bash"
    shell.environment["COMP_WORDS"] = f"snapshotctl {line}"
    shell.environment["COMP_CWORD"] = str(line.count(" ") + 1)
    return shell.ok().out.split()
