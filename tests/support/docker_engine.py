"""A Docker engine of the tests' own: in a network and a mount namespace that end with it."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

START_S = 60.0
STOP_S = 60.0
USUAL_SOCKET = Path("/var/run/docker.sock")
_START = 'ip link set lo up && exec dockerd "$@"'
NEEDED = {
    "docker": "docker-cli",
    "dockerd": "docker.io",
    "containerd": "containerd",
    "debootstrap": "debootstrap",
    "ip": "iproute2",
    "iptables": "iptables",
    "nsenter": "util-linux",
    "unshare": "util-linux",
}


class Engine(NamedTuple):
    """Where an engine listens; `pid` is that of one of ours."""

    host: str
    pid: int | None

    def inside(self, *words: str) -> list[str]:
        """Give a command that runs where the engine publishes its ports."""
        return ["nsenter", f"--net=/proc/{self.pid}/ns/net", *words] if self.pid else [*words]


def lacking() -> str:
    """Say why there can be no engine here; empty when there can."""
    if os.environ.get("DOCKER_HOST"):
        return "" if shutil.which("docker") else "docker is missing (package docker-cli)"
    if os.geteuid() != 0:
        return "only root can start a Docker engine; give DOCKER_HOST to use one that runs"
    if missing := sorted({f"{n} (package {p})" for n, p in NEEDED.items() if not shutil.which(n)}):
        return f"{', '.join(missing)} is missing"
    if USUAL_SOCKET.exists() and _answers(f"unix://{USUAL_SOCKET}"):
        return "an engine runs here already, and is left alone; DOCKER_HOST says to use it"
    return ""


@contextlib.contextmanager
def engine() -> Iterator[Engine]:
    """Start an engine and end it, with all that it made; or use the engine of DOCKER_HOST.

    `SNAPBACK_ENGINES` names the folder for its images, which /tmp has otherwise.
    """
    if host := os.environ.get("DOCKER_HOST"):
        yield Engine(host, None)
        return
    folder = Path(tempfile.mkdtemp("", "snapback-docker-", os.environ.get("SNAPBACK_ENGINES")))
    host, group = f"unix://{folder}/docker.sock", f"/{folder.name}"
    words = [
        f"--data-root={folder}/data",
        f"--exec-root={folder}/exec",
        f"--pidfile={folder}/pid",
        f"--host={host}",
        f"--cgroup-parent={group}",
        "--bridge=none",
        "--exec-opt=native.cgroupdriver=cgroupfs",
    ]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            ["unshare", "--net", "--mount", "sh", "-c", _START, "sh", *words],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    try:
        _await_answer(process, host, folder / "log")
        yield Engine(host, process.pid)
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(STOP_S)
        assert _left(folder) == []
        shutil.rmtree(folder)
        for left in sorted(Path("/sys/fs/cgroup").glob(f"**{group}/**/"), reverse=True):
            with contextlib.suppress(FileNotFoundError):
                left.rmdir()


def _left(folder: Path) -> list[str]:
    """Name what still runs of an engine that has ended."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if str(folder) in (words := (process / "cmdline").read_text(errors="replace")):
                found.append(f"{process.name} {words!r}")
    return found


def _await_answer(process: subprocess.Popen[bytes], host: str, log: Path) -> None:
    deadline = time.monotonic() + START_S
    while not _answers(host):
        if process.poll() is not None or time.monotonic() > deadline:
            tail = "\n".join(log.read_text(errors="replace").splitlines()[-15:])
            raise AssertionError(f"dockerd did not start:\n{tail}")
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(0.2)


def _answers(host: str) -> bool:
    words = ["docker", "--host", host, "version"]
    return subprocess.run(words, capture_output=True, check=False, timeout=30).returncode == 0
