"""Becomes the first process of a container: `python -m tests.support.container JSON`.

It is started in new namespaces (`unshare`). Its root is an overlay over that of this machine, and
what the JSON lists is mounted in it, as a container runtime does. The folder `home`, which has the
layer, must be on another file system than the root. The kernel has no more to do with a real
container; Kubernetes is left out.
"""

from __future__ import annotations

import ctypes
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

CLONE_NEWCGROUP = 0x0200_0000
PR_SET_PDEATHSIG = 1
PR_SET_NO_NEW_PRIVS = 38
DEVICES = ("null", "zero", "full", "random", "urandom")


def mount(*words: object) -> None:
    subprocess.run(["mount", *map(str, words)], check=True)


def main(text: str) -> None:
    given = json.loads(text)
    home, root = Path(given["home"]), Path(given["home"], "root")
    os.setsid()
    for file in given.get("cgroups", ()):
        Path(file).write_text(str(os.getpid()))
        # In which that is the root, as on a node with cgroups of version 2.
        assert ctypes.CDLL(None).unshare(CLONE_NEWCGROUP) == 0
    socket.sethostname(given["name"])
    mount("--make-rprivate", "/")
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    for name in ("upper/etc", "work", "root"):
        (home / name).mkdir(parents=True, exist_ok=True)
    (home / "upper/etc/hostname").write_text(f"{given['name']}\n")
    layers = f"lowerdir=/,upperdir={home}/upper,workdir={home}/work"
    mount("-t", "overlay", "-o", layers, "overlay", root)
    mount("-t", "proc", "proc", root / "proc")
    mount("-t", "tmpfs", "-o", "mode=755", "tmpfs", root / "dev")
    for name in DEVICES:
        (root / "dev" / name).touch()
        mount("--bind", f"/dev/{name}", root / "dev" / name)
    (root / "dev" / "shm").mkdir()
    mount("-t", "tmpfs", "tmpfs", root / "dev" / "shm")
    for source, path in given["mounts"].items():
        target = root / path.removeprefix("/")
        if Path(source).is_dir():
            target.mkdir(parents=True, exist_ok=True)
        else:
            target.parent.mkdir(parents=True, exist_ok=True)
            target.touch()
        mount("--bind", source, target)
    os.chdir(root)
    subprocess.run(["pivot_root", ".", "."], check=True)
    subprocess.run(["umount", "--lazy", "."], check=True)
    os.chdir("/")
    # That of the machine is on no mount of the container.
    os.dup2(os.open("/dev/null", os.O_RDONLY), 0)
    # What `unshare --kill-child` has set would be restored with the process.
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, 0, 0, 0, 0)
    if given.get("no_new_privs"):
        assert ctypes.CDLL(None).prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0
    os.execve(given["command"][0], given["command"], given.get("environment", os.environ))


def command(home: Path, *argv: str, name: str = "worker", **given: Any) -> list[str]:
    """Return the command that runs a program in a container."""
    text = json.dumps({"home": str(home), "name": name, "command": argv, "mounts": {}, **given})
    words = ["unshare", "--mount", "--net", "--pid", "--uts", "--ipc", "--fork", "--kill-child"]
    return [*words, sys.executable, "-m", "tests.support.container", text]


if __name__ == "__main__":
    main(sys.argv[1])
