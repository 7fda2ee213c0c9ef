"""What is left of a dump or a restore that was killed, and how a worker is freed of it.

While a process is dumped, a record of it is locked in the state directory. A record that is there
and not locked is of a dump that was killed. Where CRIU was at work, connections of the process are
broken then, and its network may be cut off, so it is ended and the network is opened again. Before
and after that only its devices are locked, and it is let go. A placeholder has a record while a
process is restored below it, and is ended with what is half restored.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import re
import select
import signal
import stat
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec

from snapshot_agent.adapters import procfs
from snapshot_agent.domain import cuda as rules
from snapshot_agent.domain.criu_images import mark_of
from snapshot_agent.domain.cuda import CudaMissing, CudaStuck
from snapshot_agent.helper import beneath, cuda, syscalls
from snapshot_agent.helper.beneath import open_inside
from snapshot_shared.errors import Aborted, OutcomeUnknown, SnapbackError
from snapshot_shared.files import opened

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

    `network` is 0 for a placeholder, whose network CRIU does not lock. `volumes` are the paths
    there in which CRIU makes files anew that have no name, under names of its own.
    """

    pid: int
    start: int
    child: int
    child_start: int
    network: int
    cuda: Sequence[tuple[int, int]] = ()
    undo_s: float = 0.0
    criu: bool = True
    volumes: Sequence[str] = ()


CriuWorks = Callable[[], contextlib.AbstractContextManager[None]]
"""Has the record of a dump say that CRIU is at work for a block. OutcomeUnknown: it is not over."""


Undone = Callable[[], None]


class Records:
    """The records of a node, below its state directory."""

    def __init__(self, folder: Path, nft: Path) -> None:
        """Use `folder`, which is made when it is missing, and the program `nft`."""
        self._folder = folder
        self._nft = nft
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    @contextlib.contextmanager
    def dumping(
        self,
        pid: int,
        start: int,
        network: int,
        locks: Sequence[int] = (),
        undo_s: float = 0.0,
        volumes: Sequence[str] = (),
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
            volumes=volumes,
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
            if os.fstat(fd).st_nlink == 0:
                raise Aborted(f"process {pid} was settled before CRIU began")
            os.ftruncate(fd, 0)
            _write(fd, record)
            os.fsync(fd)
            try:
                yield criu_works
            except (OutcomeUnknown, CudaStuck):
                raise
            except BaseException:
                self.open_network(network)
                path.unlink()
                raise
            # CRIU enters the network by the process to open it, which may have ended.
            if not procfs.is_alive(pid, start):
                self.open_network(network)
            path.unlink()
        finally:
            os.close(fd)

    @contextlib.contextmanager
    def restoring(self, pid: int, start: int, volumes: Sequence[str]) -> Iterator[Undone]:
        """Keep the record of a placeholder for a block; one that fails ends the placeholder.

        It waits on when the block has called what this yields: nothing is left of the restore.
        """
        undone = False

        def set_undone() -> None:
            nonlocal undone
            undone = True

        try:
            with self.dumping(pid, start, network=0, volumes=volumes):
                try:
                    yield set_undone
                except BaseException:
                    if not undone:
                        _end(pid, start, volumes)
                    raise
        except (OutcomeUnknown, CudaStuck):
            self._path(pid, start).unlink()
            raise

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

    def settle_all(self, child: int | None = None) -> None:
        """Settle every process whose dump or restore was killed, or those that a child had."""
        for path in sorted(self._folder.iterdir()):
            pid, _, start = path.name.partition("-")
            # The child of an earlier helper may be at work, and remove its record.
            with contextlib.suppress(ValueError, FileNotFoundError):
                if _is_left(path, child) and self.settle(int(pid), int(start)):
                    log.warning("process %s was ended: CRIU had been killed", pid)

    def _clean(self, record: Dumping) -> None:
        # Before the end of what is in it, after which another network may have the inode.
        network = _network(record.network)
        _end(record.pid, record.start, record.volumes)
        self._open(network)

    def is_empty(self) -> bool:
        """Whether there is no record, so that nothing is under way or left to settle."""
        return not any(self._folder.iterdir())

    def open_network(self, inode: int) -> None:
        """Remove the tables by which CRIU has locked a network namespace. 0 is none."""
        self._open(_network(inode))

    def _open(self, network: int | None) -> None:
        if network is None:
            return
        child = os.fork()
        if child == 0:
            with contextlib.suppress(BaseException):
                syscalls.setns(network, syscalls.CLONE_NEWNET)
                self._remove_tables()
                os._exit(0)
            os._exit(1)
        os.close(network)
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


def _end(pid: int, start: int, volumes: Sequence[str]) -> None:
    """Kill a process with all that descends from it, and remove what CRIU has left in volumes."""
    with contextlib.ExitStack() as closing:
        folders = []
        for path in volumes if procfs.is_alive(pid, start) else ():
            # It may have ended by now, and its volumes with it.
            with contextlib.suppress(OSError, SnapbackError):
                folders.append(closing.enter_context(opened(open_inside(pid, path))))
        for member in procfs.family_of(pid, start):
            procfs.send(member, signal.SIGKILL)
        # Those of other restores in the same folder are in use.
        ghost = re.compile(re.escape(mark_of(pid, start)) + r"\.cr\.[0-9a-f]+\.ghost\Z")
        for folder in folders:
            with contextlib.suppress(OSError):
                for found in beneath.walk(folder, ()):
                    if ghost.search(found.name) and stat.S_ISREG(found.status.st_mode):
                        os.unlink(found.name, dir_fd=found.folder)


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


def _is_left(path: Path, child: int | None) -> bool:
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        if child is None:
            return _locks(fd)
        record = _read(fd)
        return record is not None and record.child == child
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
    if not inode:
        return None
    for process in procfs.running():
        with contextlib.suppress(OSError):
            path = Path(f"/proc/{process.pid}/ns/net")
            if path.stat().st_ino == inode:
                return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    return None
