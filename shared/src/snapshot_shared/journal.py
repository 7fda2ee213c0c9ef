"""The journal file: what is written at once is one line of JSON, a record or a list of them.

Each line has its checksum and is fsynced before it counts. A torn last line is what a crash leaves
and is cut off: it has no end, or holds blocks of zeros. A line that is damaged in another way, or
before the last, is `JournalCorrupt`: the service refuses to start rather than guess what it had
promised. So it does, with `UnsupportedVersion`, when a newer build has left a record that this one
does not know; fields that it does not know are ignored.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import threading
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import ClassVar

import msgspec

from snapshot_shared import instruments
from snapshot_shared.errors import (
    AlreadyExists,
    Internal,
    NoSpace,
    SnapbackError,
    StorageFailed,
    UnsupportedVersion,
)
from snapshot_shared.files import (
    make_folder,
    open_root,
    opened,
    read_file,
    take_lock,
    translated,
    write_all,
    write_replacing,
)
from snapshot_shared.finished import FinishedOrders, Row
from snapshot_shared.ids import OrderId, owner_of, verb_of
from snapshot_shared.ledger import Entry, Ledger, Record, Reported, Tombstoned, entry_of
from snapshot_shared.metrics import OFF, Metrics
from snapshot_shared.orders import CLEANING, TERMINAL
from snapshot_shared.reserve import Reserve

log = logging.getLogger(__name__)

KEEP_S = 14 * 86400.0
"""How long the highest attempt and result of each finished order are kept, in seconds."""

FRESH_S = 1200.0
"""How long the end of a worker is published again and again, in seconds.

No order asks for it: a stream may be lost before the operator has read it.
"""

RESERVE_BYTES = 64 * 1024
"""Some dozens of orders that clean up, with all of their records."""

MIN_BYTES = 1024 * 1024
"""The fold of so much takes some 3 MiB of memory."""

_DECODER: msgspec.json.Decoder[Record | list[Record]] = msgspec.json.Decoder(Record | list[Record])
_ENCODER = msgspec.json.Encoder()


class JournalCorrupt(SnapbackError):
    """A line does not match its checksum and is not torn; `values`: file and line number."""

    default_next_step: ClassVar[str] = (
        "move the journal aside after checking that no worker of this node is frozen"
    )


class _Group:
    """Records that are written all or none, and the future of who handed them over."""

    def __init__(self, records: Sequence[Record]) -> None:
        self.records = records
        self.bodies = [*map(_body, records)]
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def accept(self) -> None:
        if not self.done.done():
            self.done.set_result(None)

    def refuse(self, error: BaseException) -> None:
        if not self.done.done():
            self.done.set_exception(error)


class Journal:
    """An open journal and its fold. One process at a time: the folder is locked."""

    def __init__(
        self,
        folder: Path,
        lock: int,
        wall: Callable[[], float],
        min_bytes: int,
        metrics: Metrics,
    ) -> None:
        """Use `Journal.open`."""
        self._folder = folder
        self._lock = lock
        self._wall = wall
        self._min_bytes = min_bytes
        self._finished = FinishedOrders(folder)
        self._reserve = Reserve(folder / "reserve", RESERVE_BYTES)
        self.ledger = self._compacted()
        self._fd = _open(folder)
        self._in_use = threading.Lock()
        self._waiting: list[_Group] = []
        self._later: list[_Group] = []
        self._writer: asyncio.Task[None] | None = None
        self._broken: StorageFailed | None = None
        self._breaks = asyncio.Event()
        self._size = os.fstat(self._fd).st_size
        self._compact_at = max(2 * self._size, min_bytes)
        self._reserve.keep()
        self._metrics = metrics
        metrics.observe(instruments.JOURNAL_SIZE, lambda: {(): float(self._size)})

    @classmethod
    def open(
        cls,
        folder: Path,
        *,
        wall: Callable[[], float],
        min_bytes: int = MIN_BYTES,
        metrics: Metrics = OFF,
    ) -> Journal:
        """Read, repair the torn tail, compact and open for appending.

        `wall` gives seconds since the epoch. A journal of `min_bytes` or more moves its finished
        orders to `finished.sqlite`, now and each time its size has doubled. AlreadyExists when
        another process holds the folder, JournalCorrupt and StorageFailed when the journal or the
        other file is damaged, and UnsupportedVersion when a newer build wrote the journal.
        """
        make_folder(folder)
        lock = take_lock(folder / "lock")
        if lock is None:
            raise AlreadyExists(
                f"another process works with the journal in {folder}",
                next_step="stop it, or give this one a state folder of its own",
            )
        return cls(folder, lock, wall, min_bytes, metrics)

    async def entries_of(self, verb: str) -> list[Entry]:
        """Return every order with a verb, in memory or not. JournalCorrupt, StorageFailed."""
        known = {
            e.order: e for e in self.ledger.entries.values() if verb_of(OrderId(e.order)) == verb
        }
        over = await asyncio.to_thread(lambda: [*map(_entry_in, self._finished.of_verb(verb))])
        return list(({entry.order: entry for entry in over} | known).values())

    async def append(self, *records: Record) -> None:
        """Write records, wait until they are on disk, then fold them.

        What a cancelled caller handed over is written and folded all the same. NoSpace when the
        disk is full: nothing is written then, and it may be tried again. StorageFailed when the
        disk is broken: what it holds is unknown, and no more is written.
        """
        await self.write(*records)

    def write(self, *records: Record) -> asyncio.Future[None]:
        """Hand records over; the future ends as `append` does.

        What is handed over while the disk is busy shares the next write and its fsync. Records
        lie in the journal in the order of the calls.
        """
        group = _Group(records)
        self._waiting.append(group)
        if self._writer is None:
            self._writer = asyncio.ensure_future(self._write_waiting())
        return group.done

    def write_later(self, *records: Record) -> None:
        """Hand over records about what is written already, and that a crash may take.

        They are written with whatever comes next, before it; `settled` has them written, too.
        """
        group = _Group(records)
        group.done.add_done_callback(_retrieve)
        self._later.append(group)

    async def settled(self) -> None:
        """Wait until everything that was handed over is written, or refused."""
        if self._later:
            self.write()
        if self._writer is not None:
            await asyncio.shield(self._writer)

    async def _write_waiting(self) -> None:
        groups: Sequence[_Group] = ()
        try:
            while self._waiting:
                groups = [*self._later, *self._waiting]
                self._later, self._waiting = [], []
                await self._write_groups(groups)
                if self._size >= self._compact_at and self._broken is None:
                    await self._compact()
        except BaseException as error:
            # Whatever it is, it belongs to those who wait for it.
            for group in (*groups, *self._later, *self._waiting):
                group.refuse(error)
            self._later, self._waiting = [], []
            raise
        finally:
            self._writer = None

    async def _write_groups(self, groups: Sequence[_Group]) -> None:
        try:
            await self._write_as_one(groups)
        except NoSpace as error:
            if len(groups) == 1:
                cleans = any(map(_cleans, groups[0].records))
                if cleans and await asyncio.to_thread(self._reserve.give_up):
                    await self._write_groups(groups)
                else:
                    groups[0].refuse(error)
                return
            # There may be room for some, where there is none for all of them.
            for group in groups:
                await self._write_groups([group])

    async def _write_as_one(self, groups: Sequence[_Group]) -> None:
        """Write groups with one fsync and end their futures. NoSpace: nothing was written."""
        bodies = [body for group in groups for body in group.bodies]
        if self._broken is None and bodies:
            data = _line(bodies)
            try:
                with self._metrics.timed(instruments.JOURNAL_DURATION):
                    await asyncio.to_thread(self._write, data)
            except OSError as error:
                self._break(f"the journal cannot be written: {error}", error)
            else:
                self._size += len(data)
        for group in groups:
            if self._broken is not None:
                group.refuse(self._broken)
                continue
            for record in group.records:
                self.ledger.apply(record)
            group.accept()
        records = (record for group in groups for record in group.records)
        if not self._reserve.is_kept and any(map(_is_deleted, records)):
            await asyncio.to_thread(self._reserve.keep)

    def _break(self, message: str, cause: Exception) -> None:
        number = cause.errno if isinstance(cause, OSError) else None
        self._broken = StorageFailed(message, errno=number)
        self._broken.__cause__ = cause
        self._breaks.set()

    async def _compact(self) -> None:
        """Make the file and the ledger smaller. It has doubled since, so that this is rare."""
        try:
            # Whatever is handed over meanwhile waits, so the ledger stays as it is.
            self.ledger = await asyncio.to_thread(self._rewritten)
        except (OSError, SnapbackError) as error:
            self._break(f"the journal cannot be compacted: {error}", error)
            return
        self._size = os.fstat(self._fd).st_size
        self._compact_at = max(2 * self._size, self._min_bytes)

    def _rewritten(self) -> Ledger:
        with self._in_use:
            if self._fd < 0:
                return self.ledger
            rest = self._without_finished(self.ledger, is_large=True)
            _replace(self._folder, rest, self._size)
            replaced, self._fd = self._fd, _open(self._folder)
            os.close(replaced)
            return rest

    def _compacted(self) -> Ledger:
        """Write the file anew without what is too old or has moved, and return its fold."""
        ledger, size = Ledger(self._find), 0
        for records, end in _lines(self._folder / "journal"):
            size = end
            for record in records:
                ledger.apply(record)
        rest = self._without_finished(ledger, is_large=size >= self._min_bytes)
        _replace(self._folder, rest, size)
        return rest

    def _find(self, order: str) -> Entry | None:
        line = self._finished.find(order)
        return None if line is None else _entry_in(line)

    def _without_finished(self, ledger: Ledger, *, is_large: bool) -> Ledger:
        """Move the finished orders out of a large journal; return what stays in it.

        Orders accepted more than `KEEP_S` ago go for good. Orders of workers that ended less than
        `FRESH_S` ago stay. On a full disk all stay.
        """
        oldest, fresh = self._wall() - KEEP_S, self._wall() - FRESH_S
        finished = [
            entry
            for entry in ledger.entries.values()
            if not entry.is_live
            and not _has_exited_since(entry, fresh)
            and (is_large or entry.accepted.wall < oldest)
        ]
        rows = [_row(entry) for entry in finished if entry.accepted.wall >= oldest]
        try:
            owners = self._finished.put(rows, older_than=oldest)
        except NoSpace as error:
            log.warning("the finished orders stay in the journal: %s", error)
            return ledger
        return ledger.without({entry.order for entry in finished}, owners)

    async def until_broken(self) -> None:
        """Wait until the disk fails and raise StorageFailed: the service has to end then."""
        await self._breaks.wait()
        if self._broken is not None:
            raise self._broken

    def _write(self, data: bytes) -> None:
        with self._in_use:
            if self._fd < 0:
                raise OSError(errno.EBADF, "the journal is closed")
            size = os.fstat(self._fd).st_size
            try:
                write_all(self._fd, data)
                try:
                    os.fdatasync(self._fd)
                except OSError as error:
                    raise translated(error, "the journal") from error
            except NoSpace:
                # A half line would make the next whole line look corrupt.
                os.ftruncate(self._fd, size)
                raise

    def close(self) -> None:
        """Close the file and free the folder. Await `settled` first, or this waits for the disk."""
        with self._in_use:
            os.close(self._fd)
            self._fd = -1
            self._finished.close()
            os.close(self._lock)


def _has_exited_since(entry: Entry, wall: float) -> bool:
    return any(each.kind == "exited" and each.at >= wall for each in entry.reports)


def _cleans(record: Record) -> bool:
    """Whether a record is about work that cleans up, for which a full disk has the reserve."""
    match record:
        case Tombstoned():
            return True
        case Reported(report=report):
            return verb_of(OrderId(report.order)) in CLEANING
        case _:
            return verb_of(OrderId(record.order)) in CLEANING


def _is_deleted(record: Record) -> bool:
    return isinstance(record, Reported) and record.report.kind == TERMINAL["delete"]


def read_records(path: Path) -> list[Record]:
    """Read a journal; an absent file is empty, a torn last line is dropped.

    JournalCorrupt, UnsupportedVersion.
    """
    return [record for records, _ in _lines(path) for record in records]


def _lines(path: Path) -> Iterator[tuple[list[Record], int]]:
    """Yield what each line of a journal holds, and the offset of its end.

    One at a time: the records of a whole journal take many times the memory of its file.
    """
    try:
        data = read_file(path)
    except FileNotFoundError:
        return
    start = number = 0
    while (end := data.find(b"\n", start)) >= 0:
        number += 1
        line, start = data[start:end], end + 1
        body = _checked(line)
        if body is None:
            if start == len(data) and b"\0" in line:
                return
            raise JournalCorrupt(f"{path} is damaged at line {number}", file=str(path), line=number)
        yield _records(body, f"line {number} of {path}"), start


def _row(entry: Entry) -> Row:
    records = _line([*map(_body, entry.records())])
    return Row(entry.order, owner_of(OrderId(entry.order)), entry.accepted.wall, records)


def _entry_in(line: bytes) -> Entry:
    """Return the order of a line that `_row` wrote. JournalCorrupt, UnsupportedVersion."""
    if (body := _checked(line.rstrip(b"\n"))) is None:
        raise JournalCorrupt("an order in finished.sqlite is damaged", file="finished.sqlite")
    return entry_of(_records(body, "an order of finished.sqlite"))


def _records(body: bytes, place: str) -> list[Record]:
    """Return the records that a line has written at once. UnsupportedVersion."""
    try:
        found = _DECODER.decode(body)
    except (ValueError, msgspec.MsgspecError) as error:
        raise UnsupportedVersion(
            f"{place} has a record that this build does not know: {error}",
            next_step="start the build that wrote it, or a newer one",
            place=place,
        ) from error
    return found if isinstance(found, list) else [found]


def _replace(folder: Path, ledger: Ledger, size: int) -> None:
    """Replace a journal, whose whole lines have `size` bytes, by one of the same fold.

    On a full disk it stays as it is, without its torn end: what makes room has to be journalled.
    """
    data = b"".join(_line([_body(record)]) for record in ledger.records())
    try:
        with opened(open_root(folder)) as directory:
            write_replacing(directory, "journal", data)
    except NoSpace as error:
        log.warning("the journal stays as large as it is: %s", error)
        with opened(_open(folder)) as fd:
            os.ftruncate(fd, size)
            os.fdatasync(fd)


def _open(folder: Path) -> int:
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
    return os.open(folder / "journal", flags, 0o600)


def _body(record: Record) -> bytes:
    body = _ENCODER.encode(record)
    if b"\n" in body:
        raise Internal("a journal record must be one line")
    return body


def _line(bodies: Sequence[bytes]) -> bytes:
    body = bodies[0] if len(bodies) == 1 else b"[%s]" % b",".join(bodies)
    return b"%08x %s\n" % (zlib.crc32(body), body)


def _checked(line: bytes) -> bytes | None:
    """Return what a line holds; None when it is damaged."""
    checksum, _, body = line.partition(b" ")
    if checksum != b"%08x" % zlib.crc32(body):
        return None
    return body


def _retrieve(done: asyncio.Future[None]) -> None:
    """Take notice of an exception, which asyncio would log otherwise."""
    if not done.cancelled():
        done.exception()
