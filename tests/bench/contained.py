"""Be the first process of a container, as far as a dump can tell: `unshare` starts it.

    unshare --mount --pid --net --uts --ipc --fork python -m tests.bench.contained ARGUMENTS

where the arguments are FOLDER [--at SOURCE] PROGRAM and those of the program.

It has the root of this machine with a layer of its own over it, which is in FOLDER, and the mounts
that a container has. Then it becomes the program. FOLDER must be on another file system than the
root. With `--at`, the folder SOURCE is mounted at /snapback.
"""

from __future__ import annotations

import ctypes
import os
import socket
import stat
import subprocess
import sys
from pathlib import Path

HOST = "bench-worker"
DEVICES = {"null": (1, 3), "zero": (1, 5), "full": (1, 7), "random": (1, 8), "urandom": (1, 9)}
SNAPBACK = "snapback"
"""Where a placeholder has its first program."""
PR_SET_PDEATHSIG = 1

_libc = ctypes.CDLL(None, use_errno=True)


def mount(fs_type: str, source: str, target: Path, *options: str) -> None:
    target.mkdir(exist_ok=True)
    command = ["mount", "-t", fs_type, *(["-o", ",".join(options)] if options else [])]
    subprocess.run([*command, source, str(target)], check=True)


def build(folder: Path, at: str | None) -> Path:
    for name in ("upper", "work", "root"):
        (folder / name).mkdir()
    (folder / "upper" / "etc").mkdir()
    (folder / "upper" / "etc" / "hostname").write_text(f"{HOST}\n")
    root = folder / "root"
    layers = f"upperdir={folder}/upper", f"workdir={folder}/work"
    mount("overlay", "overlay", root, "lowerdir=/", *layers)
    mount("proc", "proc", root / "proc")
    mount("tmpfs", "tmpfs", root / "dev", "mode=755")
    for name, number in DEVICES.items():
        os.mknod(root / "dev" / name, 0o666 | stat.S_IFCHR, os.makedev(*number))
    mount("tmpfs", "shm", root / "dev" / "shm")
    if at:
        mount("none", at, root / SNAPBACK, "bind")
    return root


def enter(root: Path) -> None:
    os.chdir(root)
    if _libc.pivot_root(b".", b"."):
        raise OSError(ctypes.get_errno(), "pivot_root")
    subprocess.run(["umount", "-l", "."], check=True)
    os.chdir("/")


def main(folder: str, *argv: str) -> None:
    at = argv[1] if argv[0] == "--at" else None
    command = argv[2:] if at else argv
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    socket.sethostname(HOST)
    enter(build(Path(folder), at))
    # That of the machine is on no mount of the container.
    os.dup2(os.open("/dev/null", os.O_RDONLY), 0)
    os.setsid()
    # A restored process would have it as well, and CRIU, which has started it, ends.
    _libc.prctl(PR_SET_PDEATHSIG, 0, 0, 0, 0)
    os.execv(command[0], command)


if __name__ == "__main__":
    main(*sys.argv[1:])
