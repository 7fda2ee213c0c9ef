"""Transfers of memory that only a device addresses, through bounce buffers of the host.

Most backends move host memory only. Each of a few streams has a pinned buffer and copies between it
and the device, so that one buffer moves to or from the files while another moves to or from the
device. What a backend has read into the device itself is copied back into these buffers and
compared there (ADR 0033).
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from types import TracebackType
from typing import NoReturn, Self

from gms.adapters.buffers import digest_in_memory
from gms.adapters.parallel import for_all, results_of, share
from gms.domain.transfer import PADDING, ChunkPlan, FilePlan, in_one, runs_of
from gms.ports import (
    Advance,
    Buffers,
    ChunkNotes,
    Copier,
    CopyingBackend,
    DeviceMemory,
    DirectBackend,
    DirectFile,
    Moved,
    ResumableBackend,
    TransferBackend,
)
from snapshot_shared.artifact import MAX_CHUNK_BYTES, FileEntry
from snapshot_shared.errors import ArtifactCorrupt, DeviceError, InvalidInput
from snapshot_shared.files import open_regular, opened
from snapshot_shared.object_storage import zeros_digest

BUFFER_BYTES = MAX_CHUNK_BYTES
"""The longest file that can be written and the most that is read at a time, in bytes."""


class BounceBuffered:
    """A transfer backend for the memory of one layout; it ignores the `buffers` argument.

    Besides what the backend takes, it takes `STREAMS` buffers of pinned memory, which are released
    when the context manager ends.
    """

    def __init__(
        self, backend: TransferBackend, memory: DeviceMemory, places: Sequence[int], size: int
    ) -> None:
        """Move with `backend`; `places` are the offsets of the allocations in `memory`.

        `size` are the bytes of `memory`, allocations on whole pages: no file is longer.
        """
        # Memory takes long to pin, and a small layout needs little of it.
        self._size = min(BUFFER_BYTES, size)
        self._backend = backend
        self._memory = memory
        self._places = places
        self._idle: list[_Stream] = []
        self._streams: list[_Stream] = []

    def write_files(
        self,
        directory: int,
        plans: Sequence[FilePlan],
        buffers: Buffers,
        *,
        threads: int,
        advance: Advance,
    ) -> Moved:
        return self._write(self._backend.write_files, directory, plans, threads, advance)

    def write_missing(
        self,
        directory: int,
        plans: Sequence[FilePlan],
        buffers: Buffers,
        *,
        threads: int,
        advance: Advance,
        notes: ChunkNotes,
    ) -> Moved:
        """Resume a save where the backend can; write all of it elsewhere."""
        if not isinstance(self._backend, ResumableBackend):
            return self.write_files(directory, plans, buffers, threads=threads, advance=advance)
        write = functools.partial(self._backend.write_missing, notes=notes)
        return self._write(write, directory, plans, threads, advance)

    def take_from(self, prefix: str, files: Sequence[FileEntry]) -> None:
        """Let later writes copy equal chunks within the storage, where the backend can."""
        if isinstance(self._backend, CopyingBackend):
            self._backend.take_from(prefix, files)

    def _write(
        self,
        write_files: Callable[..., Moved],
        directory: int,
        plans: Sequence[FilePlan],
        threads: int,
        advance: Advance,
    ) -> Moved:
        streams, each = share(threads)
        for plan in plans:
            if plan.size > self._size:
                raise InvalidInput(
                    f"{plan.name} would have {plan.size} bytes, a buffer has {self._size}",
                    next_step="make shards no longer than a buffer",
                )

        def write(plan: FilePlan) -> Moved:
            with self._stream() as stream:
                view = stream.fetch(plan.chunks)
                single = replace(plan, chunks=in_one(plan.chunks))
                return write_files(directory, [single], [view], threads=each, advance=advance)

        return Moved.of(results_of(plans, write, streams))

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
        streams, each = share(threads)
        direct = self._backend if isinstance(self._backend, DirectBackend) else None

        def read(item: tuple[FilePlan, FileEntry, Sequence[ChunkPlan]]) -> Moved:
            plan, entry, chunks = item
            # What fills no memory is read for its digests alone.
            if direct is not None and any(map(_fills_memory, chunks)):
                part = replace(plan, chunks=tuple(chunks))
                return self._read_direct(direct, directory, part, entry, each, advance)
            with self._stream() as stream:
                view = stream.prepared(chunks, [entry.chunks[chunk.index] for chunk in chunks])
                single = replace(plan, chunks=in_one(chunks))
                moved = self._backend.read_files(
                    directory, [single], [entry], [view], threads=each, advance=advance
                )
                stream.bring(chunks)
                return moved

        items = [
            (plan, entry, run)
            for plan, entry in zip(plans, entries, strict=True)
            for run in runs_of(plan.chunks, self._size)
        ]
        for plan, _, (chunk, *_) in items:
            if chunk.size > self._size:
                raise ArtifactCorrupt(
                    f"chunk {chunk.index} of {plan.name} is longer than all of the memory",
                    file=plan.name,
                    chunk=chunk.index,
                )
        return Moved.of(results_of(items, read, streams))

    def _read_direct(
        self,
        backend: DirectBackend,
        directory: int,
        plan: FilePlan,
        entry: FileEntry,
        threads: int,
        advance: Advance,
    ) -> Moved:
        """Have chunks read into the device, copy them back, and compare their digests."""
        with (
            self._stream() as stream,
            opened(open_regular(directory, plan.name, size=plan.size, shared=True)) as descriptor,
            backend.direct(descriptor) as file,
            # The reads may be on the stream still when an error ends the block.
            _waited_for(stream.copier),
        ):

            def read(chunk: ChunkPlan) -> int:
                is_zero = entry.chunks[chunk.index] == zeros_digest(chunk.size)
                return 0 if is_zero else stream.read_file(file, chunk)

            def compare(pair: tuple[ChunkPlan, ChunkPlan]) -> int:
                chunk, copied = pair
                if digest_in_memory(copied, [view]) != entry.chunks[chunk.index]:
                    self._explain(directory, replace(plan, chunks=(chunk,)), entry)
                advance(chunk.size)
                return 0

            for chunk in plan.chunks:
                stream.clear(chunk, entry.chunks[chunk.index])
            moved = for_all(plan.chunks, read, threads)
            view = stream.fetch(plan.chunks)
            for_all(zip(plan.chunks, in_one(plan.chunks), strict=True), compare, threads)
            return Moved(backend=file.way, bytes=moved)

    def _explain(self, directory: int, plan: FilePlan, entry: FileEntry) -> NoReturn:
        """Say why a chunk that was read into the device has another digest than its file had.

        ArtifactCorrupt when it is the file; else DeviceError.
        """
        (chunk,) = plan.chunks
        single = replace(plan, chunks=in_one(plan.chunks))
        self._backend.read_files(
            directory,
            [single],
            [entry],
            [memoryview(bytearray(chunk.size))],
            threads=1,
            advance=lambda _: None,
        )
        raise DeviceError(
            f"chunk {chunk.index} of {plan.name} is not in the device as it is in the file",
            next_step="set SNAPBACK_TRANSFER_BACKEND=posix-direct, which reads through the host, "
            "and look at what reads into the device",
            file=plan.name,
            chunk=chunk.index,
        )

    def digest_of(
        self, chunk: ChunkPlan, compute: Callable[[ChunkPlan, Buffers], str] = digest_in_memory
    ) -> str:
        """Return the digest that a chunk has when it is written, as `compute` has it."""
        with self._stream() as stream:
            (single,) = in_one([chunk])
            return compute(single, [stream.fetch([chunk])])

    @contextlib.contextmanager
    def _stream(self) -> Iterator[_Stream]:
        # A thread holds one at most, so that there are never more of them than threads.
        try:
            stream = self._idle.pop()
        except IndexError:
            stream = _Stream(self._memory.copier(self._size), self._places)
            self._streams.append(stream)
        try:
            yield stream
        finally:
            # Also after an error: no copy may be in progress in a buffer that is used again.
            stream.copier.flush()
            self._idle.append(stream)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for stream in self._streams:
            stream.copier.close()


class _Stream:
    """A pinned buffer, and the copies between it and the device."""

    def __init__(self, copier: Copier, places: Sequence[int]) -> None:
        self.copier = copier
        self._places = places

    def fetch(self, chunks: Sequence[ChunkPlan]) -> memoryview:
        """Copy chunks out of the device, one after another, with zeros for padding."""
        size = sum(chunk.size for chunk in chunks)
        view = self.copier.buffer[:size]
        at = 0
        for piece in (piece for chunk in chunks for piece in chunk.pieces):
            part = view[at : at + piece.size]
            if piece.allocation == PADDING:
                _clear(part)
            else:
                self.copier.read(self._places[piece.allocation] + piece.offset, part)
            at += piece.size
        self.copier.flush()
        return view

    def prepared(self, chunks: Sequence[ChunkPlan], digests: Sequence[str]) -> memoryview:
        """Return the place of chunks in the buffer: zeros where a backend fills in nothing."""
        at = 0
        for chunk, digest in zip(chunks, digests, strict=True):
            if digest == zeros_digest(chunk.size):
                _clear(self.copier.buffer[at : at + chunk.size])
            at += chunk.size
        return self.copier.buffer[:at]

    def read_file(self, file: DirectFile, chunk: ChunkPlan) -> int:
        """Have the bytes of a chunk read into the device. From any thread."""
        at = chunk.offset
        for piece in chunk.pieces:
            if piece.allocation != PADDING:
                read = functools.partial(file.read, at, piece.size)
                self.copier.lend(self._places[piece.allocation] + piece.offset, read)
            at += piece.size
        return chunk.size

    def clear(self, chunk: ChunkPlan, digest: str) -> None:
        """Fill the memory of a chunk with zeros, if its digest says that it has no others."""
        if digest == zeros_digest(chunk.size):
            self.prepared([chunk], [digest])
            self.bring([chunk])

    def bring(self, chunks: Sequence[ChunkPlan]) -> None:
        """Copy chunks that lie one after another in the buffer into the device."""
        at = 0
        for piece in (piece for chunk in chunks for piece in chunk.pieces):
            if piece.allocation != PADDING:
                part = self.copier.buffer[at : at + piece.size]
                self.copier.write(self._places[piece.allocation] + piece.offset, part)
            at += piece.size
        self.copier.flush()


@contextlib.contextmanager
def _waited_for(copier: Copier) -> Iterator[None]:
    try:
        yield
    finally:
        copier.flush()


def _fills_memory(chunk: ChunkPlan) -> bool:
    return any(piece.allocation != PADDING for piece in chunk.pieces)


def _clear(view: memoryview) -> None:
    ctypes.memset(ctypes.addressof(ctypes.c_ubyte.from_buffer(view)), 0, len(view))
