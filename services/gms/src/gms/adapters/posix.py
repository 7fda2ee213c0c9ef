"""The transfer backends of every machine: part files of a POSIX file system, in a few threads.

`posix-direct` moves bytes past the page cache, through one buffer a thread. A file system that
knows no direct I/O gets buffered requests, as with `posix-buffered`. Each chunk is digested as it
passes; a load takes it in windows. A chunk of zeros is a hole: its digest is that of zeros, and
nothing moves.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import functools
import mmap
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import TypeVar

import xxhash

from gms.domain.layout import aligned
from gms.domain.transfer import PADDING, PAGE, ChunkPlan, FilePlan, Piece, windows
from gms.ports import Advance, Buffers, Moved
from snapshot_shared.artifact import FileEntry
from snapshot_shared.errors import ArtifactCorrupt
from snapshot_shared.files import create_file, open_regular, translated

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

_LARGE_PAGE = 2 * 1024 * 1024

_TOUCHED_BYTES = 64 * 1024
"""Shorter pieces are not worth a call of their own to have their pages mapped."""

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class Posix:
    """Reads and writes part files; `direct` past the page cache where the file system can."""

    def __init__(self, *, direct: bool) -> None:
        self._direct = direct

    def _way(self, bypassing: set[int], descriptors: Sequence[int]) -> str:
        is_direct = self._direct and len(bypassing) == len(descriptors)
        return "posix-direct" if is_direct else "posix-buffered"

    def write_files(
        self,
        directory: int,
        plans: Sequence[FilePlan],
        buffers: Buffers,
        *,
        threads: int,
        advance: Advance,
    ) -> Moved:
        descriptors: list[int] = []
        memory = _Memory(buffers, _longest(plans))
        digests: list[list[str]] = [[""] * len(plan.chunks) for plan in plans]
        bypassing: set[int] = set()

        def write(item: tuple[int, ChunkPlan]) -> int:
            file, chunk = item
            descriptor = descriptors[file]
            with memory.outgoing(chunk, direct=descriptor in bypassing) as pieces:
                found = _digest(pieces, chunk.size)
                digests[file][chunk.index] = found
                is_zero = found == _digest_of_zeros(chunk.size)
                if not is_zero:
                    _write(descriptor, pieces, chunk.offset, bypassing)
                elif descriptor in bypassing:
                    _fallocate(descriptor, _PUNCH_HOLE, chunk.offset, chunk.size)
            advance(chunk.size)
            return 0 if is_zero else chunk.size

        def finish(file: int) -> int:
            # The last page of a direct request is whole; the file ends where its bytes do.
            os.ftruncate(descriptors[file], plans[file].size)
            _sync(descriptors[file])
            return 0

        try:
            for plan in plans:
                descriptors.append(create_file(directory, plan.name))
                os.ftruncate(descriptors[-1], plan.size)
            if self._direct:
                bypassing.update(fd for fd in descriptors if _bypass(fd))
            _take_blocks(bypassing)
            moved = _for_all(_chunks(plans), write, threads)
            _for_all(range(len(plans)), finish, threads)
        except OSError as error:
            raise translated(error, "a part file") from error
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        entries = [
            FileEntry(name=plan.name, size=plan.size, chunk_bytes=plan.chunk_bytes, chunks=found)
            for plan, found in zip(plans, digests, strict=True)
        ]
        return Moved(backend=self._way(bypassing, descriptors), bytes=moved, files=entries)

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
        memory = _Memory(buffers, min(_longest(plans), _WINDOW_BYTES))
        bypassing: set[int] = set()

        def read(item: tuple[int, ChunkPlan]) -> int:
            file, chunk = item
            wanted = entries[file].chunks[chunk.index]
            is_zero = wanted == _digest_of_zeros(chunk.size)
            if not is_zero:
                descriptor = cached[file]
                if bypassing and not _is_resident(descriptor, chunk):
                    descriptor = direct[file]
                state = xxhash.xxh3_128()
                for window in windows(chunk, _WINDOW_BYTES):
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


class _Memory:
    """The bytes of a plan: where they stand, or for a moment in buffers for direct requests.

    A disk takes a request for few large pages in fewer pieces than one for many scattered small
    ones; that gains more than the copy costs, and nothing else needs to be aligned.
    """

    def __init__(self, buffers: Buffers, longest: int) -> None:
        self._buffers = buffers
        self._addresses = [_address(buffer) for buffer in buffers]
        # Whoever maps memory for a load has mapped all of it at the same time.
        self._is_mapped = all(map(_is_mapped, self._addresses[:1]))
        self._size = aligned(longest, _LARGE_PAGE)
        self._free: list[mmap.mmap] = []

    @contextlib.contextmanager
    def outgoing(self, chunk: ChunkPlan, *, direct: bool) -> Iterator[list[memoryview]]:
        """Give what is to be written; whole pages for a direct request."""
        if not direct:
            yield _pieces(chunk, self._buffers)
            return
        with self._staging(chunk) as (view, address):
            at = address
            for piece in chunk.pieces:
                if piece.allocation == PADDING:
                    ctypes.memset(at, 0, piece.size)
                else:
                    ctypes.memmove(at, self._address_of(piece), piece.size)
                at += piece.size
            ctypes.memset(at, 0, len(view) - chunk.size)
            yield [view]

    @contextlib.contextmanager
    def incoming(self, chunk: ChunkPlan, *, direct: bool) -> Iterator[list[memoryview]]:
        """Give where to read to; after the block it is where it belongs."""
        self._touch(chunk)
        if not direct:
            yield _pieces(chunk, self._buffers)
            return
        with self._staging(chunk) as (view, address):
            yield [view]
            at = address
            for piece in chunk.pieces:
                if piece.allocation != PADDING:
                    ctypes.memmove(self._address_of(piece), at, piece.size)
                at += piece.size

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
    def _staging(self, chunk: ChunkPlan) -> Iterator[tuple[memoryview, int]]:
        # A thread holds one at most, so that there are never more of them than threads.
        try:
            pages = self._free.pop()
        except IndexError:
            pages = mmap.mmap(-1, self._size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            # A kernel may have been built without large pages.
            with contextlib.suppress(OSError):
                pages.madvise(mmap.MADV_HUGEPAGE)
        try:
            view = memoryview(pages)[: aligned(chunk.size, PAGE)]
            yield view, _address(view)
        finally:
            self._free.append(pages)


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


@functools.cache
def _digest_of_zeros(size: int) -> str:
    return xxhash.xxh3_128_hexdigest(bytes(size))


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
