"""Copies files into a part and out of it, in chunks, each with its xxh3-128 digest.

A cancellation waits for the chunk under way, so that no thread uses a worker's files or a part
after the caller has gone on.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable

import msgspec
import xxhash

from snapshot_agent.adapters.control_dir import workers_own
from snapshot_agent.ports import Progress
from snapshot_shared.artifact import MAX_FILES, PART_MANIFEST, FileEntry, FileName
from snapshot_shared.errors import ArtifactCorrupt, InvalidName
from snapshot_shared.files import create_file, open_regular, translated, write_all
from snapshot_shared.tasks import Threads

CHUNK_BYTES = 8 * 1024 * 1024

ROOT = Threads(16, "artifact-root")
"""Threads for all calls below the artifact root, whose file system may hang. They are apart from
those of the event loop, which the journal needs."""


def listed(directory: int) -> list[tuple[str, int]]:
    """Return the names and sizes of the files of a directory, sorted.

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
        found.append((name, seen.st_size))
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


async def copy_in(source: int, target: int, name: str, counter: ByteCounter) -> FileEntry:
    """Copy one file into a part, durably."""
    async with (
        ROOT.opened(open_regular, source, name) as reading,
        ROOT.opened(create_file, target, name) as sink,
    ):
        entry = await _digested(reading, name, counter, sink)
        await ROOT.run(_sync, sink, name)
    return entry


async def digested(part: int, name: str, counter: ByteCounter) -> FileEntry:
    """Read a file that was written into a part, and make it durable."""
    async with ROOT.opened(open_regular, part, name) as reading:
        entry = await _digested(reading, name, counter, None)
        await ROOT.run(_sync, reading, name)
    return entry


async def _digested(reading: int, name: str, counter: ByteCounter, sink: int | None) -> FileEntry:
    size = os.fstat(reading).st_size
    chunks: list[str] = []
    for offset in range(0, size, CHUNK_BYTES):
        count = min(CHUNK_BYTES, size - offset)
        chunks.append(await ROOT.run(_take_chunk, reading, sink, name, offset, count))
        await counter.add(count)
    return FileEntry(name=name, size=size, chunk_bytes=CHUNK_BYTES, chunks=chunks)


def _take_chunk(reading: int, sink: int | None, name: str, offset: int, count: int) -> str:
    data = _read(reading, name, offset, count)
    if sink is not None:
        write_all(sink, memoryview(data))
    return xxhash.xxh3_128_hexdigest(data)


def _read(fd: int, name: str, offset: int, count: int) -> bytearray:
    data = bytearray(count)
    view = memoryview(data)
    done = 0
    while done < count:
        got = os.preadv(fd, [view[done:]], offset + done)
        if got == 0:
            raise ArtifactCorrupt(
                f"{name} ends at {offset + done} bytes", file=name, found=offset + done
            )
        done += got
    return data


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
) -> None:
    """Read the files of a part, compare every digest, and copy them into `target` if given.

    `shared` allows further links to the files, as incremental saves make them. ArtifactCorrupt
    names the file and the chunk; a chunk that differs is not written.
    """
    for entry in entries:
        async with ROOT.opened(
            open_regular, source, entry.name, size=entry.size, shared=shared
        ) as reading:
            if target is None:
                await _read_entry(reading, entry, counter, None)
            else:
                async with ROOT.opened(_create_workers, target, entry.name) as sink:
                    await _read_entry(reading, entry, counter, sink)


def _create_workers(target: int, name: str) -> int:
    with workers_own():
        return create_file(target, name)


async def _read_entry(
    reading: int, entry: FileEntry, counter: ByteCounter, sink: int | None
) -> None:
    for index, digest in enumerate(entry.chunks):
        offset = index * entry.chunk_bytes
        count = min(entry.chunk_bytes, entry.size - offset)
        await ROOT.run(_check_chunk, reading, entry.name, index, offset, count, digest, sink)
        await counter.add(count)


def _check_chunk(
    reading: int, name: str, index: int, offset: int, count: int, digest: str, sink: int | None
) -> None:
    data = _read(reading, name, offset, count)
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
    if sink is not None:
        write_all(sink, memoryview(data))
