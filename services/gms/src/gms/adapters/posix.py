"""The transfer backends of every machine: part files of a POSIX file system, in a few threads.

`posix-direct` moves bytes past the page cache, through one buffer a thread; memory in huge pages
needs none. A file system that knows no direct I/O gets buffered requests, as with `posix-buffered`.
Each chunk is digested as it passes. A chunk of zeros is a hole: its digest is that of zeros, and
nothing moves.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager

import xxhash

from gms.adapters.buffers import ChunkMemory, Pages, digest_in_memory, is_zero, update_digest
from gms.adapters.parallel import for_all
from gms.adapters.syscalls import (
    bypass_cache,
    is_resident,
    read_at,
    resident_bytes,
    write_at,
)
from gms.domain.transfer import ChunkPlan, FilePlan, all_chunks, cut_chunk, longest_chunk
from gms.ports import Advance, Buffers, ChunkNotes, Moved
from snapshot_shared.artifact import FileEntry
from snapshot_shared.errors import ArtifactCorrupt, DeviceError, SnapbackError
from snapshot_shared.files import create_file, open_regular, translated
from snapshot_shared.holes import preallocate, punch_hole
from snapshot_shared.object_storage import zeros_digest

_REQUEST_BYTES = 4 * 1024 * 1024
"""What goes through a buffer in one request. Shorter than a chunk, so that more threads, which are
what makes a transfer faster, need no more memory; no shorter, because each request waits for a busy
processor."""


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

    def _name_of(self, bypassing: set[int], descriptors: Sequence[int]) -> str:
        is_direct = self._direct and len(bypassing) == len(descriptors)
        return self._name if is_direct or self._pages else "posix-buffered"

    def _requests(self, plans: Sequence[FilePlan]) -> int:
        """Return how many bytes are moved at a time. What is in place needs no buffer."""
        longest = longest_chunk(plans)
        return longest if self._in_place else min(longest, _REQUEST_BYTES)

    def _memory(self, buffers: Buffers, longest: int) -> ChunkMemory:
        return ChunkMemory(buffers, longest, self._pages, in_place=self._in_place)

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
        limit = self._requests(plans)
        writing = _Writing(directory, plans, self._memory(buffers, limit), limit, notes)
        try:
            writing.open(direct=self._direct)

            def write(item: tuple[int, ChunkPlan]) -> int:
                size = writing.write(item)
                advance(item[1].size)
                return size

            moved = for_all(all_chunks(plans), write, threads)
            for_all(range(len(plans)), writing.finish, threads)
        except OSError as error:
            raise translated(error, "a part file") from error
        finally:
            writing.close()
        name = self._name_of(writing.bypassing, writing.descriptors)
        return Moved(backend=name, bytes=moved, files=writing.entries())

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
        limit = self._requests(plans)
        memory = self._memory(buffers, limit)
        bypassing: set[int] = set()

        def read(item: tuple[int, ChunkPlan]) -> int:
            file, chunk = item
            wanted = entries[file].chunks[chunk.index]
            is_zero = wanted == zeros_digest(chunk.size)
            if not is_zero:
                descriptor = cached[file]
                # A direct read would go to the disk even for what the page cache has.
                if bypassing and not (is_cached[file] and is_resident(descriptor, chunk)):
                    descriptor = direct[file]
                requests = list(cut_chunk(chunk, limit))

                def place(request: ChunkPlan) -> AbstractContextManager[list[memoryview]]:
                    return memory.incoming(request, direct=descriptor in bypassing)

                if _digest_read(descriptor, requests, bypassing, place) != wanted:
                    # The memory may be that of a pod, which can write to it between the two.
                    found = _digest_read(descriptor, requests, bypassing, memory.scratch)
                    raise _differs(plans[file].name, chunk.index, wanted, found)
            advance(chunk.size)
            return 0 if is_zero else chunk.size

        try:
            for plan in plans:
                cached.append(open_regular(directory, plan.name, size=plan.size, shared=True))
                if self._direct:
                    direct.append(open_regular(directory, plan.name, size=plan.size, shared=True))
            bypassing.update(fd for fd in direct if bypass_cache(fd))
            # Mostly the cache has nothing of a file, and then no chunk of it is looked for there.
            is_cached = [
                resident_bytes(fd, 0, plan.size) > 0 for fd, plan in zip(cached, plans, strict=True)
            ]
            moved = for_all(all_chunks(plans), read, threads)
        finally:
            for descriptor in [*cached, *direct]:
                os.close(descriptor)
        return Moved(backend=self._name_of(bypassing, cached), bytes=moved)


def _digest_read(
    descriptor: int,
    requests: Iterable[ChunkPlan],
    bypassing: set[int],
    place: Callable[[ChunkPlan], AbstractContextManager[list[memoryview]]],
) -> str:
    """Read requests, each to the memory that `place` yields, and return the digest of them all."""
    state = xxhash.xxh3_128()
    for request in requests:
        with place(request) as pieces:
            read_at(descriptor, pieces, request, bypassing)
            update_digest(state, pieces, request.size)
    return state.hexdigest()


def _differs(file: str, chunk: int, wanted: str, found: str) -> SnapbackError:
    """Return what is wrong where a chunk in memory has another digest; `found` is in the file."""
    if found == wanted:
        return DeviceError(
            f"chunk {chunk} of {file} is not in the device as it is in the file",
            next_step="look at what else writes to the memory, as the containers of the pod do; "
            "the artifact is not in doubt",
            file=file,
            chunk=chunk,
        )
    return ArtifactCorrupt(
        f"chunk {chunk} of {file} is damaged",
        file=file,
        chunk=chunk,
        expected=wanted,
        found=found,
    )


class _Writing:
    """The files that are being written, and what an earlier process has noted about them."""

    def __init__(
        self,
        directory: int,
        plans: Sequence[FilePlan],
        memory: ChunkMemory,
        limit: int,
        notes: ChunkNotes | None,
    ) -> None:
        self._directory = directory
        self._plans = plans
        self._memory = memory
        self._limit = limit
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
            # Sparse at first: a chunk of zeros is not written.
            os.ftruncate(descriptor, plan.size)
        if direct:
            self.bypassing.update(fd for fd in self.descriptors if bypass_cache(fd))
        preallocate(self.bypassing.intersection(new))

    def write(self, item: tuple[int, ChunkPlan]) -> int:
        """Write a chunk that is not there yet. Return the bytes that went to the file."""
        file, chunk = item
        descriptor = self.descriptors[file]
        noted = self._noted[file].get(chunk.index)
        if noted is not None and self._stands(descriptor, chunk, noted):
            self._digests[file][chunk.index] = noted
            return 0
        # Where another process was killed there may be bytes in place of a hole.
        is_hole = not self._noted[file] and is_zero(chunk, self._memory.buffers)
        if is_hole:
            found = zeros_digest(chunk.size)
            if descriptor in self.bypassing:
                punch_hole(descriptor, chunk.offset, chunk.size)
        else:
            found = self._written(descriptor, chunk)
        self._digests[file][chunk.index] = found
        if self._batches:
            self._batches.add(descriptor, self._plans[file].name, chunk, found)
        return 0 if is_hole else chunk.size

    def _written(self, descriptor: int, chunk: ChunkPlan) -> str:
        """Write a chunk and return its digest."""
        state, is_direct = xxhash.xxh3_128(), descriptor in self.bypassing
        for request in cut_chunk(chunk, self._limit):
            with self._memory.outgoing(request, direct=is_direct) as pieces:
                update_digest(state, pieces, request.size)
                write_at(descriptor, pieces, request.offset, self.bypassing)
        return state.hexdigest()

    def _stands(self, descriptor: int, chunk: ChunkPlan, noted: str) -> bool:
        if digest_in_memory(chunk, self._memory.buffers) != noted:
            return False
        requests = cut_chunk(chunk, self._limit)
        try:
            found = _digest_read(descriptor, requests, self.bypassing, self._memory.scratch)
        except ArtifactCorrupt:
            return False
        return found == noted

    def finish(self, file: int) -> int:
        # The last page of a direct request is whole; the file ends where its bytes do.
        os.ftruncate(self.descriptors[file], self._plans[file].size)
        os.fsync(self.descriptors[file])
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
    """Notes chunks once they are on the disk, in batches.

    One thread at a time waits for the disk, and the others continue. When they have filled another
    batch before it is done, they wait too; so a crash loses at most two batches.
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
                os.fsync(each)
            self._notes.note([row for _, row in rows])
