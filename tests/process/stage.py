"""Dump a worker with the real CRIU and restore it for another pod, in namespaces of their own.

It is the first process of a PID, network and mount namespace (`unshare`): what is left of a worker
ends with it. The peer of the worker's connections is this process. It prints a report as JSON.

Its arguments are the program of CRIU, an empty folder, and what is to be seen: `rewritten` images,
images `as dumped`, or a worker whose `unix peer` is outside of its tree.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

from snapshot_agent.domain.criu_images import readdressed, renamed

SOURCE = ("10.77.0.1", "fd77::1")
TARGET = ("10.77.0.2", "fd77::2")
PEER = "10.77.0.9"
OPTIONS = ("-v4", "--tcp-established", "--manage-cgroups=ignore", "--network-lock", "skip")


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


def address(verb: str, four: str, six: str) -> None:
    ip("address", verb, f"{four}/32", "dev", "lo")
    ip("address", verb, f"{six}/128", "dev", "lo", *(["nodad"] if verb == "add" else []))


def criu(program: str, verb: str, folder: Path, *options: str) -> int:
    command = [program, verb, "--images-dir", str(folder / "images"), "--work-dir", str(folder)]
    command += ["--log-file", f"{verb}.log", *OPTIONS, *options]
    return subprocess.run(command, check=False).returncode


def started(folder: Path, unix: socket.socket | None) -> tuple[int, list[socket.socket]]:
    """Return the pid of a worker that is ready, and the sockets that are connected to it."""
    with (
        socket.create_server((PEER, 0)) as listener,
        (folder / "report").open("w") as report,
        (folder / "worker.err").open("w") as errors,
    ):
        worker = Path(__file__).with_name("socket_worker.py")
        command = [sys.executable, str(worker), *SOURCE, PEER, str(listener.getsockname()[1])]
        process = subprocess.Popen(
            ["unshare", "--uts", *command],
            stdin=subprocess.DEVNULL,
            stdout=report,
            stderr=errors,
            start_new_session=True,
            pass_fds=[unix.fileno()] if unix else [],
        )
        listener.settimeout(30)
        connected, left = listener.accept()[0], listener.accept()[0]
    left.close()
    lines = connected.makefile()
    accepted = socket.create_connection(json.loads(lines.readline()), source_address=(PEER, 0))
    assert lines.readline() == "ready\n"
    return process.pid, [connected, accepted]


def rewrite(images: Path) -> dict[str, int]:
    (utsns,) = images.glob("utsns-*.img")
    utsns.write_bytes(renamed(utsns.read_bytes(), "target-host"))
    files = images / "files.img"
    found = readdressed(files.read_bytes(), dict(zip(SOURCE, TARGET, strict=True)))
    files.write_bytes(found.image)
    return {"moved": found.moved, "closed": found.closed}


def main(program: str, where: str, how: str) -> None:
    folder = Path(where)
    (folder / "images").mkdir()
    ip("link", "set", "lo", "up")
    ip("address", "add", f"{PEER}/32", "dev", "lo")
    address("add", *SOURCE)
    unix = socket.socketpair() if how == "unix peer" else None
    pid, held = started(folder, unix[1] if unix else None)
    if unix:
        unix[1].close()
        held.append(unix[0])
    report: dict[str, Any] = {"dump": criu(program, "dump", folder, "--tree", str(pid))}
    if report["dump"] == 0:
        os.waitpid(pid, 0)
        address("del", *SOURCE)
        address("add", *TARGET)
        if how == "rewritten":
            report |= rewrite(folder / "images")
        report["restore"] = criu(program, "restore", folder, "--restore-detached")
    if report.get("restore") == 0:
        os.kill(pid, signal.SIGUSR1)
        report["exit"] = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        report["worker"] = json.loads((folder / "report").read_text())
    for each in held:
        each.close()
    print(json.dumps(report))


if __name__ == "__main__":
    main(*sys.argv[1:])
