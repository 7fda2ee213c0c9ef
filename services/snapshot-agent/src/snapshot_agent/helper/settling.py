"""What is left of a dump that was killed, and how a worker is freed of it.

While a process is dumped, a record of it is locked in the state directory. A record that is there
and not locked is of a dump that was killed. Where CRIU was at work, connections of the process are
broken then, and its network may be cut off, so it is ended and the network is opened again. Before
and after that only its devices are locked, and it is let go.
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
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec

from snapshot_agent.adapters import procfs
from snapshot_agent.domain import cuda as rules
from snapshot_agent.domain.cuda import CudaMissing, CudaStuck
from snapshot_agent.helper import cuda, syscalls
from snapshot_shared.errors import OutcomeUnknown

log = logging.getLogger(__name__)

SOFTLY_S = 10.0
"""How long a dump that was asked to end may take for it, in seconds."""

NFT_S = 5.0
"""How long one call of nft may take, in seconds."""

_TABLE = "CRIU-"
_RECORD_BYTES = 1024 * 1024


class Dumping(msgspec.Struct, frozen=True, kw_only=True):
    """The record of a dump: the process, who dumps it, and the inode of its network namespace.

    `cuda` are the processes whose devices are locked, by pid and start time, and `undo_s` is how
    long it may take to let them go. `criu` is whether CRIU is at work.
    """

    pid: int
    start: int
    child: int
    child_start: int
    network: int
    cuda: Sequence[tuple[int, int]] = ()
    undo_s: float = 0.0
    criu: bool = True


CriuWorks = Callable[[], contextlib.AbstractContextManager[None]]
"""Has the record of a dump say that CRIU is at work for a block. OutcomeUnknown: it is not over."""


class Records:
    """The records of a node, below its state directory."""

    def __init__(self, folder: Path, nft: Path) -> None:
        """Use `folder`, which is made when it is missing, and the program `nft`."""
        self._folder = folder
        self._nft = nft
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    @contextlib.contextmanager
    def dumping(
        self, pid: int, start: int, network: int, locks: Sequence[int] = (), undo_s: float = 0.0
    ) -> Iterator[CriuWorks]:
        """Keep the record of a dump for a block, in which the devices of `locks` may be locked.

        OutcomeUnknown and CudaStuck leave it: CRIU was killed, or devices could not be unlocked.
        """
        path = self._path(pid, start)
        own = procfs.read(os.getpid())
        record = Dumping(
            pid=pid,
            start=start,
            child=os.getpid(),
            child_start=own.start if own else 0,
            network=network,
            cuda=[found.key for each in locks if (found := procfs.read(each)) is not None],
            undo_s=undo_s,
            criu=not locks,
        )
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)

        @contextlib.contextmanager
        def criu_works() -> Iterator[None]:
            _write(fd, msgspec.structs.replace(record, criu=True))
            try:
                yield
            except OutcomeUnknown:
                raise
            except BaseException:
                _write(fd, msgspec.structs.replace(record, criu=False))
                raise
            _write(fd, msgspec.structs.replace(record, criu=False))

        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            os.ftruncate(fd, 0)
            _write(fd, record)
            os.fsync(fd)
            try:
                yield criu_works
            except (OutcomeUnknown, CudaStuck):
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
            record = _read(fd)
            # CRIU is started after the record is whole.
            ended = record is not None and (record.criu or not _is_let_go(record))
            if record is not None and ended:
                self._clean(record)
            path.unlink(missing_ok=True)
            return ended
        finally:
            os.close(fd)

    def settle_all(self) -> None:
        """Settle every process whose dump was killed before this program started."""
        for path in sorted(self._folder.iterdir()):
            pid, _, start = path.name.partition("-")
            with contextlib.suppress(ValueError):
                if not _is_locked(path) and self.settle(int(pid), int(start)):
                    log.warning("process %s was ended: its dump had been killed", pid)

    def _clean(self, record: Dumping) -> None:
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


def _is_let_go(record: Dumping) -> bool:
    """Unlock the devices of processes that CRIU has not stopped; whether all run again."""
    pids = [pid for pid, start in record.cuda if procfs.is_alive(pid, start)]
    try:
        found = cuda.let_go(pids, record.undo_s)
    except CudaMissing as error:
        log.warning("process %s cannot be let go: %s", record.pid, error)
        return False
    if left := rules.stuck(found):
        log.warning("process %s cannot be let go: %s", record.pid, left)
    return left is None


def _wait_for(fd: int) -> None:
    """Wait for the end of the child that has the record; it is killed when that takes long."""
    began = time.monotonic()
    while not _locks(fd):
        record = _read(fd)
        # A child that has ended is settled by another one, which is left alone.
        child = None if record is None else procfs.read(record.child)
        if record is not None and child is not None and child.start == record.child_start:
            is_late = time.monotonic() > began + SOFTLY_S + record.undo_s
            # It then ends the dump softly.
            procfs.send(child, signal.SIGKILL if is_late else signal.SIGTERM)
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


def _write(fd: int, record: Dumping) -> None:
    # Never shorter than before: one that was cut off would be that of no process.
    os.pwrite(fd, msgspec.json.encode(record).ljust(os.fstat(fd).st_size), 0)


def _read(fd: int) -> Dumping | None:
    try:
        return msgspec.json.decode(os.pread(fd, _RECORD_BYTES, 0), type=Dumping)
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
