"""The cluster of docker-compose.yaml, as somebody at a terminal uses it."""

from __future__ import annotations

import json
import subprocess
import time
from typing import Any, NamedTuple

from tests.support.docker_engine import Engine
from tests.support.service_images import REPOSITORY, environment

COMMAND_S = 300.0

_ASK = """
import json, socket, sys
with socket.socket(socket.AF_UNIX) as worker:
    worker.settimeout(60)
    worker.connect(sys.argv[1])
    worker.sendall(json.dumps({"op": "ask", "prompt": "What is my name?"}).encode() + b"\\n")
    print(worker.makefile().readline(), end="")
"""


class Ended(NamedTuple):
    """How a command ended."""

    code: int
    out: str
    err: str


class Compose:
    """The commands that a person types."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._environment = environment(engine) | {"SIZE_MIB": "32", "WARM_UP": "short"}

    def try_(self, *words: str, given: str = "", within_s: float = COMMAND_S) -> Ended:
        """Run a command to its end."""
        done = subprocess.run(
            words,
            input=given,
            capture_output=True,
            text=True,
            check=False,
            timeout=within_s,
            cwd=REPOSITORY,
            env=self._environment,
        )
        return Ended(done.returncode, done.stdout, done.stderr)

    def run(self, *words: str, given: str = "", within_s: float = COMMAND_S) -> str:
        """Run a command that has to succeed, and give its standard output."""
        ended = self.try_(*words, given=given, within_s=within_s)
        assert ended.code == 0, f"{' '.join(words)}: {ended.code}\n{ended.out}\n{ended.err}"
        return ended.out

    def docker(self, *words: str) -> str:
        return self.run("docker", *words)

    def compose(self, *words: str, given: str = "") -> str:
        return self.run("docker", "compose", *words, given=given)

    def up(self) -> float:
        """Start what does not run, and give the seconds until everything is healthy."""
        since = time.monotonic()
        self.compose("up", "--detach")
        return time.monotonic() - since

    def ctl(self, *words: str, given: str = "") -> str:
        """Run snapshotctl as a person does."""
        return self.compose("run", "--rm", "-T", "snapshotctl", *words, given=given)

    def nats(self, *words: str) -> str:
        """Run the stock nats CLI as a person does."""
        return self.compose("run", "--rm", "-T", "nats", *words)

    def object(self, kind: str, name: str) -> Any:
        """Read an object."""
        return json.loads(self.ctl("get", kind, name, "-o", "json"))

    def containers(self) -> list[Any]:
        """Inspect all containers, also those that have ended."""
        found = self.docker("ps", "--all", "--quiet").split()
        return list(json.loads(self.docker("inspect", *found))) if found else []

    def ask(self, node: str, pod_uid: str) -> str:
        """Ask the worker of a pod on a node a question that changes nothing."""
        path = f"/run/snapback/{pod_uid[:8]}/worker.sock"
        return self.compose("exec", "-T", f"agent-{node}", "python", "-c", _ASK, path)

    def fetch(self, url: str) -> str:
        """Read a URL from where the engine publishes its ports."""
        code = "import sys, urllib.request as u; print(u.urlopen(sys.argv[1]).read().decode())"
        return self.run(*self.engine.inside("python3", "-c", code, url))
