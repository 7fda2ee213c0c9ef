"""What is left of a dump that was killed, and how a worker is freed of it.

While a process is dumped, a record of it is locked in the state directory. A record that is there
and not locked is of a dump that was killed: connections of the process are broken then, and its
network may be cut off, so it is ended and the network is opened again.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import select
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from snapshot_agent.adapters import procfs
from snapshot_agent.helper import syscalls
from snapshot_shared.errors import OutcomeUnknown

log = logging.getLogger(__name__)

SOFTLY_S = 10.0
"""How long a dump that was asked to end may take for it, in seconds."""

NFT_S = 5.0
"""How long one call of nft may take, in seconds."""

_TABLE = "CRIU-"


class Dumping(msgspec.Struct, frozen=True, kw_only=True):
    """The record of a dump: the process, who dumps it, and the inode of its network namespace."""

    pid: int
    start: int
    child: int
    network: int


class Records:
    """The records of a node, below its state directory."""

    def __init__(self, folder: Path, nft: Path) -> None:
        """Use `folder`, which is made when it is missing, and the program `nft`."""
        self._folder = folder
        self._nft = nft
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    @contextlib.contextmanager
    def dumping(self, pid: int, start: int, network: int) -> Iterator[None]:
        """Keep the record of a dump for a block. OutcomeUnknown leaves it: CRIU was killed."""
        path = self._path(pid, start)
        record = Dumping(pid=pid, start=start, child=os.getpid(), network=network)
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            os.ftruncate(fd, 0)
            os.pwrite(fd, msgspec.json.encode(record), 0)
            os.fsync(fd)
            try:
                yield
            except OutcomeUnknown:
                raise
            except BaseException:
                path.unlink()
                raise
            path.unlink()
        finally:
            os.close(fd)

    def settle(self, pid: int, start: int) -> bool:
        """End the dump of a process; whether the process had to be ended with it."""
        path = self._path(pid, start)
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            return False
        try:
            _wait_for(fd)
            # The one that had it has removed it if the process is whole.
            if os.fstat(fd).st_nlink == 0:
                return False
            self._clean(_read(fd))
            path.unlink(missing_ok=True)
            return True
        finally:
            os.close(fd)

    def settle_all(self) -> None:
        """Settle every process whose dump was killed before this program started."""
        for path in sorted(self._folder.iterdir()):
            pid, _, start = path.name.partition("-")
            with contextlib.suppress(ValueError):
                if not _is_locked(path) and self.settle(int(pid), int(start)):
                    log.warning("process %s was ended: its dump had been killed", pid)

    def _clean(self, record: Dumping | None) -> None:
        if record is None:
            return
        for member in procfs.family_of(record.pid, record.start):
            procfs.send(member, signal.SIGKILL)
        self.open_network(record.network)

    def open_network(self, inode: int) -> None:
        """Remove the tables by which a CRIU that was killed has locked a network namespace."""
        with contextlib.suppress(OSError):
            fd = _network(inode)
            if fd is None:
                return
            child = os.fork()
            if child == 0:
                with contextlib.suppress(BaseException):
                    syscalls.setns(fd, syscalls.CLONE_NEWNET)
                    self._remove_tables()
                    os._exit(0)
                os._exit(1)
            os.close(fd)
            os.waitpid(child, 0)

    def _remove_tables(self) -> None:
        words = [str(self._nft), "list", "tables"]
        listed = subprocess.run(words, check=True, capture_output=True, text=True, timeout=NFT_S)
        for line in listed.stdout.splitlines():
            # `table inet CRIU-<id>`
            table = line.split()
            if table[-1].startswith(_TABLE):
                subprocess.run([*words[:1], "delete", *table], check=True, timeout=NFT_S)

    def _path(self, pid: int, start: int) -> Path:
        return self._folder / f"{pid}-{start}"


def _wait_for(fd: int) -> None:
    """Wait for the end of the child that has the record; it is killed when that takes long."""
    limit = time.monotonic() + SOFTLY_S
    while not _locks(fd):
        record = _read(fd)
        if record is not None:
            # It then ends the dump softly.
            number = signal.SIGTERM if time.monotonic() < limit else signal.SIGKILL
            with contextlib.suppress(ProcessLookupError):
                os.kill(record.child, number)
        select.select([], [], [], 0.02)


def _locks(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_locked(path: Path) -> bool:
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        return not _locks(fd)
    finally:
        os.close(fd)


def _read(fd: int) -> Dumping | None:
    try:
        return msgspec.json.decode(os.pread(fd, 4096, 0), type=Dumping)
    except msgspec.MsgspecError:
        return None


def _network(inode: int) -> int | None:
    """Return a descriptor of a network namespace, found by the processes that are in it."""
    for process in procfs.running():
        with contextlib.suppress(OSError):
            path = Path(f"/proc/{process.pid}/ns/net")
            if path.stat().st_ino == inode:
                return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    return None
