"""Copies files into a part and out of it, in chunks, each with its xxh3-128 digest.

A cancellation waits for the chunk under way, so that no thread uses a worker's files or a part
after the caller has gone on. A chunk that is a hole stays one, and is not read: a sparse file takes
in a part, and after a restore, what it took before, to within a chunk at each end of its data.
Encryption has no holes, so an encrypted part takes the length of the file. After a restore from it,
each chunk of zeros is a hole.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import errno
import os
import stat
from collections.abc import Awaitable, Callable, Iterable
from functools import lru_cache
from typing import TypeVar

import msgspec
import xxhash

from snapshot_agent.adapters.control_dir import workers_own
from snapshot_agent.ports import Progress
from snapshot_shared.artifact import MAX_FILES, PART_MANIFEST, FileEntry, FileName
from snapshot_shared.encrypting import PLAIN_BYTES, SEGMENT_BYTES, FileCipher, PartCipher
from snapshot_shared.errors import ArtifactCorrupt, InvalidName
from snapshot_shared.files import create_file, open_regular, opened, translated, write_all
from snapshot_shared.tasks import Threads, over

CHUNK_BYTES = 8 * 1024 * 1024

PIECE_BYTES = 1024 * 1024
"""How much of a chunk is read at a time where it is read for its digest alone: what stays in the
cache of a processor."""

SIDE_BY_SIDE = 4
"""How many files of a part, and chunks of a file, are read at the same time."""

CHUNK_SEGMENTS = CHUNK_BYTES // SEGMENT_BYTES
"""How many segments of an encrypted file a chunk has."""

WRITE_BACK_BYTES = 4 * 1024 * 1024
"""How much of a file that grows is given to the disk at a time, at least."""

T = TypeVar("T")

ROOT = Threads(16, "artifact-root")
"""Threads for all calls below the artifact root, whose file system may hang. They are apart from
those of the event loop, which the journal needs."""


def listed(directory: int) -> list[tuple[str, int]]:
    """Return the names of the files of a directory, sorted, and the bytes that each takes there.

    InvalidName for what a part cannot hold: folders, links, odd names, too many files.
    """
    found: list[tuple[str, int]] = []
    for name in sorted(os.listdir(directory)):
        seen = os.stat(name, dir_fd=directory, follow_symlinks=False)
        if not stat.S_ISREG(seen.st_mode) or not _is_file_name(name):
            raise InvalidName(
                f"{name[:128]!r} cannot be saved: a worker's state consists of plain files with "
                "names of letters, digits, '.', '_' and '-'",
                next_step="write plain files into state/",
                value=name[:128],
            )
        found.append((name, min(seen.st_size, 512 * seen.st_blocks)))
    if len(found) > MAX_FILES:
        raise InvalidName(f"state/ holds {len(found)} files, the limit is {MAX_FILES}")
    return found


def _is_file_name(name: str) -> bool:
    try:
        msgspec.convert(name, FileName)
    except msgspec.ValidationError:
        return False
    return name != PART_MANIFEST


class ByteCounter:
    """Adds up bytes and reports the sum."""

    def __init__(self, progress: Progress) -> None:
        """Report to `progress`."""
        self._progress = progress
        self.done = 0

    async def add(self, count: int) -> None:
        """Add `count` bytes."""
        self.done += count
        await self._progress(self.done)


async def copied(
    source: int, part: int, counter: ByteCounter, cipher: PartCipher | None = None
) -> list[FileEntry]:
    """Copy all files of a directory into a part, durably, and encrypted if there is a cipher."""
    names = [name for name, _ in await ROOT.run(listed, source)]
    found: dict[str, FileEntry] = {}

    async def add(name: str) -> None:
        async with (
            ROOT.opened(open_regular, source, name) as reading,
            ROOT.opened(create_file, part, name) as sink,
        ):
            found[name] = await _copied(
                reading, sink, name, counter, cipher.of(name) if cipher else None
            )
            await ROOT.run(_sync, sink, name)

    await _side_by_side(names, add)
    return [found[name] for name in names]


async def digested(part: int, counter: ByteCounter) -> list[FileEntry]:
    """Read the files that were written into a part, all of them, and make them durable."""
    names = [name for name, _ in await ROOT.run(listed, part)]
    found: dict[str, FileEntry] = {}

    async def add(name: str) -> None:
        async with ROOT.opened(open_regular, part, name) as reading:
            # The disk writes while the bytes are read from memory.
            syncing = ROOT.begin(_sync, reading, name)
            try:
                found[name] = await _entry(reading, name, counter)
            finally:
                await over(syncing)
            syncing.result()

    await _side_by_side(names, add)
    return [found[name] for name in names]


async def _entry(reading: int, name: str, counter: ByteCounter) -> FileEntry:
    size = os.fstat(reading).st_size
    chunks: dict[int, str] = {}

    async def add(offset: int) -> None:
        count = min(CHUNK_BYTES, size - offset)
        chunks[offset] = await ROOT.run(_digest, reading, name, offset, count)
        await counter.add(count)

    offsets = range(0, size, CHUNK_BYTES)
    await _side_by_side(offsets, add)
    in_order = [chunks[offset] for offset in offsets]
    return FileEntry(name=name, size=size, chunk_bytes=CHUNK_BYTES, chunks=in_order)


async def _side_by_side(of: Iterable[T], work: Callable[[T], Awaitable[None]]) -> None:
    """Do work for each of some things, SIDE_BY_SIDE at a time. The first error ends all of it."""
    left = iter(of)

    async def some() -> None:
        for each in left:
            await work(each)

    tasks = [asyncio.ensure_future(some()) for _ in range(SIDE_BY_SIDE)]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await over(*tasks)


class WriteBack:
    """Has the disk write the files of a part while another process still makes them.

    It is no more than a hint, so that little is left for the time when they are made durable.
    """

    def __init__(self, part: int) -> None:
        """Begin with nothing. `part` is a descriptor of the directory."""
        self._part = part
        self._begun: dict[str, int] = {}
        self._under_way: asyncio.Future[None] | None = None

    def go_on(self) -> None:
        """Begin to write what was added since the last call, if that has been given to the disk."""
        if self._under_way is None or self._under_way.done():
            self._under_way = ROOT.begin(_write_back, self._part, self._begun)

    async def over(self) -> None:
        """Wait until nothing uses the directory."""
        if self._under_way is not None:
            await over(self._under_way)


_libc = ctypes.CDLL(None)
_SYNC_FILE_RANGE_WRITE = 2


def _write_back(part: int, begun: dict[str, int]) -> None:
    """Begin to write what files of a directory have beyond `begun`, which is then set."""
    with contextlib.suppress(OSError, ArtifactCorrupt):
        for name in os.listdir(part):
            size = os.stat(name, dir_fd=part, follow_symlinks=False).st_size
            since = begun.get(name, 0)
            if size - since >= WRITE_BACK_BYTES:
                with opened(open_regular(part, name)) as fd:
                    offset, count = ctypes.c_int64(since), ctypes.c_int64(size - since)
                    _libc.sync_file_range(fd, offset, count, _SYNC_FILE_RANGE_WRITE)
                begun[name] = size


async def _copied(
    reading: int, sink: int, name: str, counter: ByteCounter, cipher: FileCipher | None
) -> FileEntry:
    size = os.fstat(reading).st_size
    step = CHUNK_BYTES if cipher is None else CHUNK_SEGMENTS * PLAIN_BYTES
    starts = range(0, size, step)
    if cipher is not None:
        # Also of an empty file: its end is proven.
        starts = starts or range(1)
    chunks: list[str] = []
    written = 0
    for start in starts:
        count = min(step, size - start)
        digest, length = await ROOT.run(
            _copy_chunk, reading, sink, name, start, count, cipher, is_end=start + count == size
        )
        chunks.append(digest)
        written += length
        await counter.add(length)
    await ROOT.run(os.ftruncate, sink, written)
    return FileEntry(name=name, size=written, chunk_bytes=CHUNK_BYTES, chunks=chunks)


def _copy_chunk(
    reading: int,
    sink: int,
    name: str,
    start: int,
    count: int,
    cipher: FileCipher | None,
    *,
    is_end: bool,
) -> tuple[str, int]:
    """Copy some bytes of a file; return the digest and the length of what was written."""
    if cipher is None and _is_hole(reading, start, count):
        os.lseek(sink, count, os.SEEK_CUR)
        return _digest_of_zeros(count), count
    data: bytes | bytearray = bytearray(count)
    _read(reading, name, start, memoryview(data))
    if cipher is not None:
        data = cipher.encrypt(start // PLAIN_BYTES, memoryview(data), is_end=is_end)
    write_all(sink, memoryview(data))
    return xxhash.xxh3_128_hexdigest(data), len(data)


def _is_hole(fd: int, offset: int, count: int) -> bool:
    """Return whether a range of a file is a hole, as far as its file system says so."""
    try:
        return os.lseek(fd, offset, os.SEEK_DATA) >= offset + count
    except OSError as error:
        # There is no data from here on.
        return error.errno == errno.ENXIO and offset + count <= os.fstat(fd).st_size


@lru_cache(maxsize=64)
def _digest_of_zeros(count: int) -> str:
    return xxhash.xxh3_128_hexdigest(bytes(count))


def _digest(reading: int, name: str, offset: int, count: int) -> str:
    if _is_hole(reading, offset, count):
        return _digest_of_zeros(count)
    piece = memoryview(bytearray(min(count, PIECE_BYTES)))
    state = xxhash.xxh3_128()
    end = offset + count
    while offset < end:
        part = piece[: end - offset]
        _read(reading, name, offset, part)
        state.update(part)
        offset += len(part)
    return state.hexdigest()


def _read(fd: int, name: str, offset: int, into: memoryview) -> None:
    done = 0
    while done < len(into):
        got = os.preadv(fd, [into[done:]], offset + done)
        if got == 0:
            raise ArtifactCorrupt(
                f"{name} ends at {offset + done} bytes", file=name, found=offset + done
            )
        done += got


def _sync(fd: int, name: str) -> None:
    try:
        os.fsync(fd)
    except OSError as error:
        raise translated(error, name) from error


async def read_checked(
    source: int,
    entries: Iterable[FileEntry],
    counter: ByteCounter,
    target: int | None = None,
    *,
    shared: bool = False,
    cipher: PartCipher | None = None,
) -> None:
    """Read the files of a part, compare every digest, and copy them into `target` if given.

    The copies are decrypted by `cipher`. `shared` allows further links to the files, as incremental
    saves make them. ArtifactCorrupt names the file and the chunk; a chunk that differs is not
    written.
    """
    for entry in entries:
        async with ROOT.opened(
            open_regular, source, entry.name, size=entry.size, shared=shared
        ) as reading:
            if target is None:
                await _read_entry(reading, entry, counter, None, None)
            else:
                file = _of_segments(entry, cipher) if cipher else None
                async with ROOT.opened(_create_workers, target, entry.name) as sink:
                    await _read_entry(reading, entry, counter, sink, file)


def _of_segments(entry: FileEntry, cipher: PartCipher) -> FileCipher:
    """Return the cipher of a file whose chunks are whole segments. ArtifactCorrupt: it is none."""
    if entry.chunk_bytes % SEGMENT_BYTES or not entry.size:
        raise ArtifactCorrupt(
            f"{entry.name} has {entry.size} bytes in chunks of {entry.chunk_bytes}, which are no "
            f"segments of {SEGMENT_BYTES}",
            file=entry.name,
            found=entry.chunk_bytes,
        )
    return cipher.of(entry.name)


def _create_workers(target: int, name: str) -> int:
    with workers_own():
        return create_file(target, name)


async def _read_entry(
    reading: int,
    entry: FileEntry,
    counter: ByteCounter,
    sink: int | None,
    cipher: FileCipher | None,
) -> None:
    async def check(index: int) -> None:
        offset = index * entry.chunk_bytes
        count = min(entry.chunk_bytes, entry.size - offset)
        await ROOT.run(_check_chunk, reading, entry, index, offset, count, sink, cipher)
        await counter.add(count)

    indices = range(len(entry.chunks))
    if sink is None:
        await _side_by_side(indices, check)
    else:
        for index in indices:
            await check(index)
        # A hole at the end has been passed, and not written.
        await ROOT.run(os.ftruncate, sink, os.lseek(sink, 0, os.SEEK_CUR))


def _check_chunk(
    reading: int,
    entry: FileEntry,
    index: int,
    offset: int,
    count: int,
    sink: int | None,
    cipher: FileCipher | None,
) -> None:
    name, digest = entry.name, entry.chunks[index]
    data: bytes | bytearray = b""
    is_hole = cipher is None and _is_hole(reading, offset, count)
    if sink is None or is_hole:
        found = _digest(reading, name, offset, count)
    else:
        data = bytearray(count)
        _read(reading, name, offset, memoryview(data))
        found = xxhash.xxh3_128_hexdigest(data)
    if found != digest:
        raise ArtifactCorrupt(
            f"{name}: chunk {index} has digest {found}, the manifest says {digest}",
            next_step="restore another snapshot; this one is damaged",
            file=name,
            chunk=index,
            found=found,
            expected=digest,
        )
    if cipher is not None:
        is_end = offset + count == entry.size
        data = cipher.decrypt(offset // SEGMENT_BYTES, memoryview(data), is_end=is_end)
        count = len(data)
        is_hole = data == bytes(count)
    if sink is not None and is_hole:
        os.lseek(sink, count, os.SEEK_CUR)
    elif sink is not None:
        write_all(sink, memoryview(data))
