"""The transfer backend `object`: the chunks of a part as objects in S3, GCS, Azure or a folder.

The folder of the part keeps its manifest and a mark that there are objects. Each chunk is digested
in a buffer of its own, of which a thread has one, and is an object of its own; requests of all
threads are under way at a time. A chunk of zeros is not stored. One that an older part has in the
same place is copied by the storage, and read again; so neither part needs the other.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import xxhash

from gms.adapters.buffers import ChunkMemory
from gms.adapters.parallel import for_all
from gms.domain.transfer import ChunkPlan, FilePlan, all_chunks, longest_chunk
from gms.ports import Advance, Buffers, Moved
from snapshot_shared.artifact import FileEntry
from snapshot_shared.errors import SnapbackError
from snapshot_shared.files import names_in
from snapshot_shared.object_storage import (
    MARK,
    ObjectStorage,
    mark_objects,
    object_key,
    read_object,
    stored_chunks,
    zeros_digest,
)


class Objects:
    """Reads and writes the chunks of one part, below a prefix."""

    def __init__(self, storage: ObjectStorage, prefix: str) -> None:
        """Use the objects below `prefix`, which are those of one part."""
        self._storage = storage
        self._prefix = prefix
        self._has_begun = False
        self._beginning = threading.Lock()
        self._older: dict[tuple[str, int, int, str], str] = {}

    def take_from(self, prefix: str, files: Sequence[FileEntry]) -> None:
        """Copy what an older part has below `prefix` already, where it is the same."""
        self._older = {
            (entry.name, index, size, digest): object_key(prefix, entry.name, index)
            for entry in files
            for index, size, digest in stored_chunks(entry)
        }

    def write_files(
        self,
        directory: int,
        plans: Sequence[FilePlan],
        buffers: Buffers,
        *,
        threads: int,
        advance: Advance,
    ) -> Moved:
        memory = ChunkMemory(buffers, longest_chunk(plans))
        digests: list[list[str]] = [[""] * len(plan.chunks) for plan in plans]

        def write(item: tuple[int, ChunkPlan]) -> int:
            file, chunk = item
            with memory.outgoing(chunk, direct=True) as (pages,):
                data = pages[: chunk.size]
                found = digests[file][chunk.index] = xxhash.xxh3_128_hexdigest(data)
                is_there = found == zeros_digest(chunk.size) or self._copied(
                    plans[file].name, chunk, found
                )
                if not is_there:
                    self._storage.put(object_key(self._prefix, plans[file].name, chunk.index), data)
            advance(chunk.size)
            return 0 if is_there else chunk.size

        self._begin(directory)
        moved = for_all(all_chunks(plans), write, threads)
        for plan in plans:
            # Not the whole part: other bounce buffers write other files of it at the same time.
            self._storage.secure(f"{self._prefix}/{plan.name}")
        entries = [
            FileEntry(name=plan.name, size=plan.size, chunk_bytes=plan.chunk_bytes, chunks=found)
            for plan, found in zip(plans, digests, strict=True)
        ]
        return Moved(backend="object", bytes=moved, files=entries)

    def _copied(self, name: str, chunk: ChunkPlan, digest: str) -> bool:
        """Copy a chunk from the older part. False when it has to be written after all."""
        source = self._older.get((name, chunk.index, chunk.size, digest))
        if source is None:
            return False
        key = object_key(self._prefix, name, chunk.index)
        try:
            self._storage.copy(source, key)
            return self._storage.digest(key, chunk.size) == digest
        except (SnapbackError, OSError):
            return False

    def _begin(self, directory: int) -> None:
        """Remove what a killed save has left, and mark the folder as one with objects."""
        with self._beginning:
            if self._has_begun:
                return
            self._storage.remove(self._prefix)
            if MARK not in names_in(directory):
                mark_objects(directory, self._prefix)
            self._has_begun = True

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
        memory = ChunkMemory(buffers, longest_chunk(plans))

        def read(item: tuple[int, ChunkPlan]) -> int:
            file, chunk = item
            wanted = entries[file].chunks[chunk.index]
            is_zero = wanted == zeros_digest(chunk.size)
            if not is_zero:
                name = plans[file].name
                with memory.incoming(chunk, direct=True) as (pages,):
                    data = pages[: chunk.size]
                    read_object(self._storage, self._prefix, name, chunk.index, data, wanted)
            advance(chunk.size)
            return 0 if is_zero else chunk.size

        moved = for_all(all_chunks(plans), read, threads)
        return Moved(backend="object", bytes=moved)
