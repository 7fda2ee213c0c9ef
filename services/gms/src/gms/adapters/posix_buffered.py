"""The transfer backend that every machine has: buffered reads and writes in a few threads.

Bytes go straight between the mapped memory and the file; nothing is copied in between but what the
kernel copies. Each chunk is digested as it passes.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import TypeVar

import xxhash

from gms.domain.transfer import PADDING, ChunkPlan, FilePlan
from snapshot_shared.artifact import FileEntry
from snapshot_shared.errors import ArtifactCorrupt
from snapshot_shared.files import create_file, open_regular, translated

Buffers = Sequence[memoryview]
"""The memory of every allocation, by its index in the plan."""

Advance = Callable[[int], None]
"""Told the bytes of each chunk that is done, from any thread."""

T = TypeVar("T")

_IOV_MAX = 512


def write_files(
    directory: int, plans: Sequence[FilePlan], buffers: Buffers, *, threads: int, advance: Advance
) -> list[FileEntry]:
    """Create, fill and fsync every file, and give their entries with digests. NoSpace."""
    descriptors: list[int] = []
    try:
        for plan in plans:
            descriptors.append(create_file(directory, plan.name))
            os.ftruncate(descriptors[-1], plan.size)
        digests: list[list[str]] = [[""] * len(plan.chunks) for plan in plans]

        def write(chunk: ChunkPlan) -> None:
            pieces = _pieces(chunk, buffers)
            _transfer(os.pwritev, descriptors[chunk.file], pieces, chunk.offset)
            digests[chunk.file][chunk.index] = _digest(pieces)
            advance(chunk.size)

        _for_all((chunk for plan in plans for chunk in plan.chunks), write, threads)
        _for_all(descriptors, _sync, threads)
    except OSError as error:
        raise translated(error, "a part file") from error
    finally:
        for descriptor in descriptors:
            os.close(descriptor)
    return [
        FileEntry(name=plan.name, size=plan.size, chunk_bytes=plan.chunk_bytes, chunks=found)
        for plan, found in zip(plans, digests, strict=True)
    ]


def read_files(
    directory: int,
    plans: Sequence[FilePlan],
    entries: Sequence[FileEntry],
    buffers: Buffers,
    *,
    threads: int,
    advance: Advance,
) -> None:
    """Fill every buffer and compare each chunk's digest. ArtifactCorrupt names file and chunk."""
    descriptors: list[int] = []
    try:
        descriptors += [open_regular(directory, plan.name, size=plan.size) for plan in plans]

        def read(chunk: ChunkPlan) -> None:
            pieces = _pieces(chunk, buffers)
            _transfer(os.preadv, descriptors[chunk.file], pieces, chunk.offset)
            wanted = entries[chunk.file].chunks[chunk.index]
            if (found := _digest(pieces)) != wanted:
                raise ArtifactCorrupt(
                    f"chunk {chunk.index} of {plans[chunk.file].name} is damaged",
                    file=plans[chunk.file].name,
                    chunk=chunk.index,
                    expected=wanted,
                    found=found,
                )
            advance(chunk.size)

        _for_all((chunk for plan in plans for chunk in plan.chunks), read, threads)
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def _sync(descriptor: int) -> None:
    os.fsync(descriptor)


def _pieces(chunk: ChunkPlan, buffers: Buffers) -> list[memoryview]:
    return [
        memoryview(bytearray(piece.size))
        if piece.allocation == PADDING
        else buffers[piece.allocation][piece.offset : piece.offset + piece.size]
        for piece in chunk.pieces
    ]


def _digest(pieces: Iterable[memoryview]) -> str:
    state = xxhash.xxh3_128()
    for piece in pieces:
        state.update(piece)
    return state.hexdigest()


def _transfer(
    call: Callable[[int, Sequence[memoryview], int], int],
    descriptor: int,
    pieces: Sequence[memoryview],
    offset: int,
) -> None:
    """Read or write all pieces at an offset, however many calls the kernel makes of it."""
    pending = list(pieces)
    while pending:
        done = call(descriptor, pending[:_IOV_MAX], offset)
        if done <= 0:
            raise ArtifactCorrupt("a part file ends before its manifest says", offset=offset)
        offset += done
        while pending and done >= len(pending[0]):
            done -= len(pending.pop(0))
        if done:
            pending[0] = pending[0][done:]


def _for_all(items: Iterable[T], work: Callable[[T], object], threads: int) -> None:
    """Do all work in threads; the first failure stops what has not begun."""
    if threads == 1:
        for item in items:
            work(item)
        return
    pending = iter(items)
    with ThreadPoolExecutor(threads, thread_name_prefix="transfer") as pool:
        running: set[Future[object]] = set()
        for item in pending:
            running.add(pool.submit(work, item))
            if len(running) < 2 * threads:
                continue
            running = _collect(running)
        while running:
            running = _collect(running)


def _collect(running: set[Future[object]]) -> set[Future[object]]:
    done, left = wait(running, return_when=FIRST_COMPLETED)
    for future in done:
        future.result()
    return left
