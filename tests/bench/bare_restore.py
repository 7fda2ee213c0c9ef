"""Restore images by CRIU alone, below a placeholder, and print how many seconds CRIU took.

`python -m tests.bench.bare_restore CRIU PID PART WORK`: the images are in PART, and WORK is an
empty folder. Nothing is checked, and the files of the container are not unpacked.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import msgspec

from snapshot_agent.domain.criu_plan import (
    RestorePlan,
    external_mounts,
    inherited,
    restore_arguments,
)
from snapshot_agent.domain.criu_source import SourceFacts
from snapshot_agent.helper import syscalls


def namespace(pid: int | str, name: str) -> int:
    return os.open(f"/proc/{pid}/ns/{name}", os.O_RDONLY)


def mounts_of(pid: int) -> int:
    ours = namespace("self", "mnt")
    syscalls.setns(namespace(pid, "mnt"), syscalls.CLONE_NEWNS)
    tree = syscalls.open_tree("/")
    syscalls.setns(ours, syscalls.CLONE_NEWNS)
    return tree


def enter() -> None:
    syscalls.mount("proc", "/proc", "proc")


def main(criu: str, pid: int, part: Path, work: Path) -> None:
    source = msgspec.json.decode((part / "criu.json").read_bytes(), type=SourceFacts)
    stdio = [os.open(f"/proc/{pid}/fd/{number}", os.O_RDWR) for number in range(3)]
    network, processes, tree = namespace(pid, "net"), namespace(pid, "pid"), mounts_of(pid)
    syscalls.unshare(syscalls.CLONE_NEWNS)
    syscalls.mount(None, "/", None, syscalls.MS_REC | syscalls.MS_SLAVE)
    root = work / "root"
    root.mkdir()
    syscalls.move_mount(tree, str(root))
    syscalls.mount(None, str(root), None, syscalls.MS_REC | syscalls.MS_SLAVE)
    syscalls.setns(network, syscalls.CLONE_NEWNET)
    syscalls.setns(processes, syscalls.CLONE_NEWPID)
    plan = RestorePlan(
        images=str(part),
        work=str(work),
        root=str(root),
        pidfile=str(work / "pid"),
        network=network,
        external=external_mounts(source.mounts),
        pipes=inherited(source.stdio, stdio),
    )
    begin = time.monotonic()
    subprocess.run(
        [criu, *restore_arguments(plan)],
        check=True,
        cwd=work,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        pass_fds=[network, *stdio],
        preexec_fn=enter,
    )
    print(time.monotonic() - begin)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]), Path(sys.argv[4]))
