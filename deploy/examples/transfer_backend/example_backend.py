"""A transfer backend in a package of its own: one chunk after another, through copies."""

from __future__ import annotations

import os
from collections.abc import Sequence

import xxhash

from gms.domain.transfer import PADDING, ChunkPlan, FilePlan
from gms.ports import Advance, Buffers, Moved
from snapshot_shared.artifact import FileEntry
from snapshot_shared.errors import ArtifactCorrupt
from snapshot_shared.files import create_file, open_regular, opened, secure, translated


class ExampleBackend:
    """Writes and reads the files of a plan, each from its beginning."""

    def write_files(
        self,
        directory: int,
        plans: Sequence[FilePlan],
        buffers: Buffers,
        *,
        threads: int,
        advance: Advance,
    ) -> Moved:
        files = []
        for plan in plans:
            digests = []
            with opened(create_file(directory, plan.name)) as fd:
                for chunk in plan.chunks:
                    data = _bytes(chunk, buffers)
                    digests.append(xxhash.xxh3_128_hexdigest(data))
                    _write(fd, data, chunk.offset)
                    advance(chunk.size)
                secure(fd, plan.name)
            entry = FileEntry(
                name=plan.name, size=plan.size, chunk_bytes=plan.chunk_bytes, chunks=digests
            )
            files.append(entry)
        return Moved(backend="example", bytes=sum(plan.size for plan in plans), files=files)

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
        for plan, entry in zip(plans, entries, strict=True):
            with opened(open_regular(directory, plan.name, size=plan.size, shared=True)) as fd:
                for chunk in plan.chunks:
                    wanted = entry.chunks[chunk.index]
                    data = os.pread(fd, chunk.size, chunk.offset)
                    if xxhash.xxh3_128_hexdigest(data) != wanted:
                        raise ArtifactCorrupt(
                            f"chunk {chunk.index} of {plan.name} is damaged",
                            file=plan.name,
                            chunk=chunk.index,
                        )
                    _scatter(data, chunk, buffers)
                    advance(chunk.size)
        return Moved(backend="example", bytes=sum(plan.size for plan in plans))


def _bytes(chunk: ChunkPlan, buffers: Buffers) -> bytes:
    return b"".join(
        bytes(piece.size)
        if piece.allocation == PADDING
        else buffers[piece.allocation][piece.offset : piece.offset + piece.size]
        for piece in chunk.pieces
    )


def _write(fd: int, data: bytes, offset: int) -> None:
    try:
        while data:
            done = os.pwrite(fd, data, offset)
            data, offset = data[done:], offset + done
    except OSError as error:
        raise translated(error, "a part file") from error


def _scatter(data: bytes, chunk: ChunkPlan, buffers: Buffers) -> None:
    at = 0
    for piece in chunk.pieces:
        if piece.allocation != PADDING:
            buffer = buffers[piece.allocation]
            buffer[piece.offset : piece.offset + piece.size] = data[at : at + piece.size]
        at += piece.size
