"""The transfer backends of every machine: part files of a POSIX file system, in a few threads.

`posix-direct` moves bytes past the page cache, through one buffer a thread; memory in huge pages
needs none. A file system that knows no direct I/O gets buffered requests, as with `posix-buffered`.
Each chunk is digested as it passes; a load takes it in windows. A chunk of zeros is a hole: its
digest is that of zeros, and nothing moves.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import functools
import mmap
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import TypeVar

import xxhash

from gms.arena import HUGE_PAGE
from gms.domain.layout import aligned
from gms.domain.transfer import PADDING, PAGE, ChunkPlan, FilePlan, Piece, windows
from gms.ports import Advance, Buffers, ChunkNotes, Moved
from snapshot_shared.artifact import FileEntry
from snapshot_shared.errors import ArtifactCorrupt
from snapshot_shared.files import create_file, open_regular, translated
from snapshot_shared.object_storage import zeros_digest

T = TypeVar("T")

_IOV_MAX = 512
_CACHESTAT = 451
_POPULATE_WRITE = 23
"""MADV_POPULATE_WRITE, since Linux 5.14."""

_ENTRY_BYTES = 8
_PRESENT = b"\x80"
"""Of /proc/self/pagemap: an entry, and its last byte when the highest bit of it is set."""

_PUNCH_HOLE = 0x03
"""FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE."""

_WINDOW_BYTES = 4 * 1024 * 1024
"""What a load reads in one request. Shorter than a chunk, so that more threads, which is what makes
a load faster, need no more memory; no shorter, because each request waits for a busy processor."""

_IN_PLACE_BYTES = 64 * 1024
"""Shorter pieces go through a buffer: a request is for a limited number of places."""

_TOUCHED_BYTES = 64 * 1024
"""Shorter pieces are not worth a call of their own to have their pages mapped."""

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


Pages = Callable[[int], mmap.mmap]
"""Maps so many bytes for a buffer, at the beginning of a page."""


class Posix:
    """Reads and writes part files; `direct` past the page cache where the file system can.

    With `pages` every byte goes through buffers of theirs, also where there is no direct I/O.
    `in_place` is for memory in huge pages: no buffer is between it and a disk.
    """

    def __init__(
        self,
        *,
        direct: bool,
        pages: Pages | None = None,
        in_place: bool = False,
        name: str = "posix-direct",
    ) -> None:
        self._direct = direct
        self._pages = pages
        self._in_place = in_place
        self._name = name

    def _way(self, bypassing: set[int], descriptors: Sequence[int]) -> str:
        is_direct = self._direct and len(bypassing) == len(descriptors)
        return self._name if is_direct or self._pages else "posix-buffered"

    def _memory(self, buffers: Buffers, longest: int) -> _Memory:
        return _Memory(buffers, longest, self._pages, in_place=self._in_place)

    def write_files(
        self,
        directory: int,
        plans: Sequence[FilePlan],
        buffers: Buffers,
        *,
        threads: int,
        advance: Advance,
    ) -> Moved:
        return self.write_missing(
            directory, plans, buffers, threads=threads, advance=advance, notes=None
        )

    def write_missing(
        self,
        directory: int,
        plans: Sequence[FilePlan],
        buffers: Buffers,
        *,
        threads: int,
        advance: Advance,
        notes: ChunkNotes | None,
    ) -> Moved:
        memory = self._memory(buffers, _longest(plans))
        writing = _Writing(directory, plans, memory, notes)
        try:
            writing.open(direct=self._direct)

            def write(item: tuple[int, ChunkPlan]) -> int:
                size = writing.write(item)
                advance(item[1].size)
                return size

            moved = _for_all(_chunks(plans), write, threads)
            _for_all(range(len(plans)), writing.finish, threads)
        except OSError as error:
            raise translated(error, "a part file") from error
        finally:
            writing.close()
        way = self._way(writing.bypassing, writing.descriptors)
        return Moved(backend=way, bytes=moved, files=writing.entries())

    def read_files(
        self,
        directory: int,
        plans: Sequence[FilePlan],
        entries: Sequence[FileEntry],
        buffers: Buffers,
        *,
        threads: int,
        advance: Advance,
    ) -> Moved:
        cached: list[int] = []
        direct: list[int] = []
        longest = _longest(plans)
        # What is read in place needs next to no memory, so that there is no reason to cut it.
        limit = longest if self._in_place else min(longest, _WINDOW_BYTES)
        memory = self._memory(buffers, limit)
        bypassing: set[int] = set()

        def read(item: tuple[int, ChunkPlan]) -> int:
            file, chunk = item
            wanted = entries[file].chunks[chunk.index]
            is_zero = wanted == zeros_digest(chunk.size)
            if not is_zero:
                descriptor = cached[file]
                if bypassing and not _is_resident(descriptor, chunk):
                    descriptor = direct[file]
                state = xxhash.xxh3_128()
                for window in windows(chunk, limit):
                    with memory.incoming(window, direct=descriptor in bypassing) as pieces:
                        _read(descriptor, pieces, window, bypassing)
                        _update(state, pieces, window.size)
                if (found := state.hexdigest()) != wanted:
                    raise ArtifactCorrupt(
                        f"chunk {chunk.index} of {plans[file].name} is damaged",
                        file=plans[file].name,
                        chunk=chunk.index,
                        expected=wanted,
                        found=found,
                    )
            advance(chunk.size)
            return 0 if is_zero else chunk.size

        try:
            for plan in plans:
                cached.append(open_regular(directory, plan.name, size=plan.size, shared=True))
                if self._direct:
                    direct.append(open_regular(directory, plan.name, size=plan.size, shared=True))
            bypassing.update(fd for fd in direct if _bypass(fd))
            moved = _for_all(_chunks(plans), read, threads)
        finally:
            for descriptor in [*cached, *direct]:
                os.close(descriptor)
        return Moved(backend=self._way(bypassing, cached), bytes=moved)


def digest_in_memory(chunk: ChunkPlan, buffers: Buffers) -> str:
    """Give the digest that a chunk has when it is written."""
    return _digest(_pieces(chunk, buffers), chunk.size)


class _Writing:
    """The files that are being written, and what an earlier process has noted about them."""

    def __init__(
        self,
        directory: int,
        plans: Sequence[FilePlan],
        memory: _Memory,
        notes: ChunkNotes | None,
    ) -> None:
        self._directory = directory
        self._plans = plans
        self._memory = memory
        self._batches = _Batches(notes) if notes else None
        self._noted = [notes.written(plan.name) if notes else {} for plan in plans]
        self._digests: list[list[str]] = [[""] * len(plan.chunks) for plan in plans]
        self.descriptors: list[int] = []
        self.bypassing: set[int] = set()

    def open(self, *, direct: bool) -> None:
        new: list[int] = []
        for plan, noted in zip(self._plans, self._noted, strict=True):
            if noted:
                descriptor = open_regular(self._directory, plan.name, writable=True)
            else:
                descriptor = create_file(self._directory, plan.name)
                new.append(descriptor)
            self.descriptors.append(descriptor)
            os.ftruncate(descriptor, plan.size)
        if direct:
            self.bypassing.update(fd for fd in self.descriptors if _bypass(fd))
        _take_blocks(self.bypassing.intersection(new))

    def write(self, item: tuple[int, ChunkPlan]) -> int:
        """Write a chunk that is not there yet; give the bytes that went to the file."""
        file, chunk = item
        descriptor = self.descriptors[file]
        noted = self._noted[file].get(chunk.index)
        if noted is not None and self._stands(descriptor, chunk, noted):
            self._digests[file][chunk.index] = noted
            return 0
        with self._memory.outgoing(chunk, direct=descriptor in self.bypassing) as pieces:
            found = _digest(pieces, chunk.size)
            self._digests[file][chunk.index] = found
            # Where another process was killed there may be bytes in place of a hole.
            is_hole = found == zeros_digest(chunk.size) and not self._noted[file]
            if not is_hole:
                _write(descriptor, pieces, chunk.offset, self.bypassing)
            elif descriptor in self.bypassing:
                _fallocate(descriptor, _PUNCH_HOLE, chunk.offset, chunk.size)
        if self._batches:
            self._batches.add(descriptor, self._plans[file].name, chunk, found)
        return 0 if is_hole else chunk.size

    def _stands(self, descriptor: int, chunk: ChunkPlan, noted: str) -> bool:
        if digest_in_memory(chunk, self._memory.buffers) != noted:
            return False
        try:
            with self._memory.scratch(chunk) as view:
                _read(descriptor, [view], chunk, self.bypassing)
                return _digest([view], chunk.size) == noted
        except ArtifactCorrupt:
            return False

    def finish(self, file: int) -> int:
        # The last page of a direct request is whole; the file ends where its bytes do.
        os.ftruncate(self.descriptors[file], self._plans[file].size)
        _sync(self.descriptors[file])
        return 0

    def entries(self) -> list[FileEntry]:
        return [
            FileEntry(name=plan.name, size=plan.size, chunk_bytes=plan.chunk_bytes, chunks=found)
            for plan, found in zip(self._plans, self._digests, strict=True)
        ]

    def close(self) -> None:
        for descriptor in self.descriptors:
            os.close(descriptor)


class _Batches:
    """Notes chunks down once they are on the disk, so many bytes at a time.

    One thread at a time waits for the disk, and the others go on. When they have filled another
    batch before it is done, they wait, too; so no more than two batches can be lost.
    """

    def __init__(self, notes: ChunkNotes) -> None:
        self._notes = notes
        self._adding = threading.Lock()
        self._noting = threading.Lock()
        self._rows: list[tuple[int, tuple[str, int, str]]] = []
        self._bytes = 0

    def add(self, descriptor: int, name: str, chunk: ChunkPlan, digest: str) -> None:
        with self._adding:
            self._rows.append((descriptor, (name, chunk.index, digest)))
            self._bytes += chunk.size
            if self._bytes < self._notes.every_bytes:
                return
        with self._noting:
            with self._adding:
                if self._bytes < self._notes.every_bytes:
                    return
                rows, self._rows, self._bytes = self._rows, [], 0
            for each in sorted({descriptor for descriptor, _ in rows}):
                _sync(each)
            self._notes.note([row for _, row in rows])


class _Memory:
    """The bytes of a plan: where they stand, or for a moment in buffers for direct requests.

    A disk takes a request for few huge pages in fewer pieces than one for many scattered small
    ones; that gains more than the copy costs, and nothing else needs to be aligned. `in_place` is
    for buffers that are in huge pages themselves.
    """

    def __init__(
        self, buffers: Buffers, longest: int, pages: Pages | None = None, *, in_place: bool = False
    ) -> None:
        self.buffers = buffers
        self._in_place = in_place
        self._stages_all = pages is not None
        # What is not in place is little, and spread: the kernel would clear a huge page for each.
        self._map = pages or functools.partial(buffer_pages, huge=not in_place)
        self._addresses = [_address(buffer) for buffer in buffers]
        # Whoever maps memory for a load has mapped all of it at the same time.
        self._is_mapped = all(map(_is_mapped, self._addresses[:1]))
        self._size = aligned(longest, HUGE_PAGE)
        self._free: list[mmap.mmap] = []

    @contextlib.contextmanager
    def outgoing(self, chunk: ChunkPlan, *, direct: bool) -> Iterator[list[memoryview]]:
        """Give what is to be written; whole pages for a direct request."""
        if not (direct or self._stages_all):
            yield _pieces(chunk, self.buffers)
            return
        with self._pages(chunk) as (view, address):
            views, others = self._laid_out(chunk, view)
            for at, piece in others:
                if piece.allocation == PADDING:
                    ctypes.memset(address + at, 0, piece.size)
                else:
                    ctypes.memmove(address + at, self._address_of(piece), piece.size)
            ctypes.memset(address + chunk.size, 0, len(view) - chunk.size)
            yield views

    @contextlib.contextmanager
    def incoming(self, chunk: ChunkPlan, *, direct: bool) -> Iterator[list[memoryview]]:
        """Give where to read to; after the block it is where it belongs."""
        self._touch(chunk)
        if not (direct or self._stages_all):
            yield _pieces(chunk, self.buffers)
            return
        with self._pages(chunk) as (view, address):
            views, others = self._laid_out(chunk, view)
            yield views
            for at, piece in others:
                if piece.allocation != PADDING:
                    ctypes.memmove(self._address_of(piece), address + at, piece.size)

    def _laid_out(
        self, chunk: ChunkPlan, view: memoryview
    ) -> tuple[list[memoryview], list[tuple[int, Piece]]]:
        """Give the memory of a direct request for a chunk: a buffer of ours, or what is in place.

        Beside it come the pieces that go through the buffer, and where they are in it.
        """
        views, others = list[memoryview](), list[tuple[int, Piece]]()
        at = begin = 0
        for piece in chunk.pieces:
            end = at + piece.size
            if whole := self._whole_pages(piece, at):
                if begin < at:
                    views.append(view[begin:at])
                begin = at + whole
                views.append(self.buffers[piece.allocation][piece.offset :][:whole])
            if rest := piece.size - whole:
                others.append((at + whole, Piece(piece.allocation, piece.offset + whole, rest)))
            at = end
        if begin < len(view):
            views.append(view[begin:])
        return views, others

    def _whole_pages(self, piece: Piece, at: int) -> int:
        """Give how many bytes of a piece at this place of its chunk need no buffer of ours."""
        if not self._in_place or piece.allocation == PADDING or piece.size < _IN_PLACE_BYTES:
            return 0
        is_aligned = at % PAGE == 0 and self._address_of(piece) % PAGE == 0
        return piece.size - piece.size % PAGE if is_aligned else 0

    def _touch(self, chunk: ChunkPlan) -> None:
        """Have pages mapped many at a time; what the kernel does not do here, it does later."""
        if self._is_mapped:
            return
        for piece in chunk.pieces:
            if piece.allocation != PADDING and piece.size >= _TOUCHED_BYTES:
                address = self._address_of(piece)
                before = address % mmap.PAGESIZE
                _libc.madvise(address - before, piece.size + before, _POPULATE_WRITE)

    def _address_of(self, piece: Piece) -> int:
        return self._addresses[piece.allocation] + piece.offset

    @contextlib.contextmanager
    def scratch(self, chunk: ChunkPlan) -> Iterator[memoryview]:
        """Give a place that no allocation has, as long as the pages of a chunk."""
        with self._pages(chunk) as (view, _):
            yield view

    @contextlib.contextmanager
    def _pages(self, chunk: ChunkPlan) -> Iterator[tuple[memoryview, int]]:
        # A thread holds one at most, so that there are never more of them than threads.
        try:
            pages = self._free.pop()
        except IndexError:
            pages = self._map(self._size)
        try:
            view = memoryview(pages)[: aligned(chunk.size, PAGE)]
            yield view, _address(view)
        finally:
            self._free.append(pages)


def buffer_pages(size: int, *, huge: bool = True) -> mmap.mmap:
    """Map `size` bytes of memory of our own, in huge pages if they are wanted and there are any."""
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    # A kernel may have been built without huge pages.
    with contextlib.suppress(OSError):
        pages.madvise(mmap.MADV_HUGEPAGE if huge else mmap.MADV_NOHUGEPAGE)
    return pages


def _longest(plans: Sequence[FilePlan]) -> int:
    return max((chunk.size for plan in plans for chunk in plan.chunks), default=0)


def _chunks(plans: Sequence[FilePlan]) -> Iterator[tuple[int, ChunkPlan]]:
    """Give every chunk with the place of its file among these plans."""
    return ((file, chunk) for file, plan in enumerate(plans) for chunk in plan.chunks)


def _pieces(chunk: ChunkPlan, buffers: Buffers) -> list[memoryview]:
    return [
        memoryview(bytearray(piece.size))
        if piece.allocation == PADDING
        else buffers[piece.allocation][piece.offset : piece.offset + piece.size]
        for piece in chunk.pieces
    ]


def _address(view: memoryview) -> int:
    return ctypes.addressof(ctypes.c_ubyte.from_buffer(view))


def _is_mapped(address: int) -> bool:
    """Whether a page of this process is mapped already, and needs no fault."""
    # Opened beside `os`, because these are no files of an artifact.
    with contextlib.suppress(OSError), open("/proc/self/pagemap", "rb", 0) as pages:  # noqa: PTH123 - pathlib costs import time
        pages.seek(address // mmap.PAGESIZE * _ENTRY_BYTES)
        return bool(pages.read(_ENTRY_BYTES)[-1:] >= _PRESENT)
    return False


def _bypass(descriptor: int) -> bool:
    """Ask for direct I/O. False where the file system knows none."""
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | os.O_DIRECT)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
            raise
        return False
    return True


def _write(descriptor: int, pieces: Sequence[memoryview], offset: int, bypassing: set[int]) -> None:
    size = sum(map(len, pieces))
    _transfer(os.pwritev, descriptor, pieces, offset, size, bypassing)


def _read(
    descriptor: int, pieces: Sequence[memoryview], chunk: ChunkPlan, bypassing: set[int]
) -> None:
    _transfer(os.preadv, descriptor, pieces, chunk.offset, chunk.size, bypassing)


def _transfer(
    call: Callable[[int, Sequence[memoryview], int], int],
    descriptor: int,
    pieces: Sequence[memoryview],
    offset: int,
    size: int,
    bypassing: set[int],
) -> None:
    """Read or write `size` bytes at an offset, however many calls the kernel makes of it."""
    pending = list(pieces)
    end = offset + size
    while offset < end:
        try:
            done = call(descriptor, pending[:_IOV_MAX], offset)
        except OSError as error:
            if error.errno != errno.EINVAL or descriptor not in bypassing:
                raise
            # It takes the flag and refuses the request, or a short one before broke the alignment.
            bypassing.discard(descriptor)
            flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
            fcntl.fcntl(descriptor, fcntl.F_SETFL, flags & ~os.O_DIRECT)
            continue
        if done <= 0:
            raise ArtifactCorrupt("a part file ends before its manifest says", offset=offset)
        offset += done
        while pending and done >= len(pending[0]):
            done -= len(pending.pop(0))
        if done:
            pending[0] = pending[0][done:]


class _Range(ctypes.Structure):
    _fields_ = (("offset", ctypes.c_uint64), ("length", ctypes.c_uint64))


def _is_resident(descriptor: int, chunk: ChunkPlan) -> bool:
    """Whether the page cache has all of a chunk; False where the kernel (before 6.5) cannot say."""
    wanted = _Range(chunk.offset, chunk.size)
    counts = (ctypes.c_uint64 * 5)()
    number = ctypes.c_long(_CACHESTAT)
    if _libc.syscall(number, descriptor, ctypes.byref(wanted), ctypes.byref(counts), 0) != 0:
        return False
    return counts[0] * mmap.PAGESIZE >= chunk.size


def _take_blocks(descriptors: Iterable[int]) -> None:
    """Allocate whole files: direct requests to allocated blocks do not wait for one another."""
    for descriptor in descriptors:
        _fallocate(descriptor, 0, 0, os.fstat(descriptor).st_size)


def _fallocate(descriptor: int, mode: int, offset: int, size: int) -> None:
    """Take or give back blocks where the file system can: it only saves time or room. ENOSPC."""
    if _libc.fallocate(descriptor, mode, ctypes.c_long(offset), ctypes.c_long(size)) != 0:
        code = ctypes.get_errno()
        if code in (errno.ENOSPC, errno.EDQUOT):
            raise OSError(code, os.strerror(code))


def _sync(descriptor: int) -> None:
    os.fsync(descriptor)


def _digest(pieces: Iterable[memoryview], size: int) -> str:
    state = xxhash.xxh3_128()
    _update(state, pieces, size)
    return state.hexdigest()


def _update(state: xxhash.xxh3_128, pieces: Iterable[memoryview], size: int) -> None:
    for piece in pieces:
        state.update(piece[:size])
        size -= len(piece)


def _for_all(items: Iterable[T], work: Callable[[T], int], threads: int) -> int:
    """Do all work in threads and add up; the first failure stops what has not begun."""
    if threads == 1:
        return sum(work(item) for item in items)
    total = 0
    with ThreadPoolExecutor(threads, thread_name_prefix="transfer") as pool:
        running: set[Future[int]] = set()
        try:
            for item in items:
                running.add(pool.submit(work, item))
                if len(running) >= 2 * threads:
                    total += _collect(running)
            while running:
                total += _collect(running)
        finally:
            for future in running:
                future.cancel()
    return total


def _collect(running: set[Future[int]]) -> int:
    done, _ = wait(running, return_when=FIRST_COMPLETED)
    running -= done
    return sum(future.result() for future in done)
