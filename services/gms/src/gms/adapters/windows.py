"""Lets every transfer backend move memory that only a device addresses.

A backend knows memory of the host alone. Here each of a few lanes has a window of it and an order
of copies of its own: while one lane's window goes to or comes from the files, another's goes to or
comes from the device.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import replace
from types import TracebackType
from typing import Self, TypeVar

from gms.adapters.posix import digest_in_memory
from gms.domain.transfer import PADDING, ChunkPlan, FilePlan, Piece, runs_of
from gms.ports import (
    Advance,
    Buffers,
    ChunkNotes,
    Copier,
    CopyingBackend,
    DeviceMemory,
    Moved,
    ResumableBackend,
    TransferBackend,
)
from snapshot_shared.artifact import MAX_CHUNK_BYTES, FileEntry
from snapshot_shared.errors import ArtifactCorrupt, InvalidInput

WINDOW = MAX_CHUNK_BYTES
"""The longest file that can be written and the most that is read at a time, in bytes."""

LANES = 2

T = TypeVar("T")
R = TypeVar("R")


class Windowed:
    """A transfer backend for the memory of one layout; the buffers it is handed are not used.

    Besides what the backend takes, it takes `LANES` windows of pinned memory. Use it as a context
    manager: they are given back at the end.
    """

    def __init__(
        self, backend: TransferBackend, memory: DeviceMemory, places: Sequence[int], size: int
    ) -> None:
        """Move with `backend`; `places` are the offsets of the allocations in `memory`.

        `size` are the bytes of `memory`, allocations on whole pages: no file is longer.
        """
        # Memory takes long to pin, and a small layout needs little of it.
        self._window = min(WINDOW, size)
        self._backend = backend
        self._memory = memory
        self._places = places
        self._idle: list[_Lane] = []
        self._lanes: list[_Lane] = []

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
        """Go on with a save where the backend can; elsewhere write all of it."""
        if not isinstance(self._backend, ResumableBackend):
            return self.write_files(directory, plans, buffers, threads=threads, advance=advance)
        write = functools.partial(self._backend.write_missing, notes=notes)
        return self._write(write, directory, plans, threads, advance)

    def take_from(self, prefix: str, files: Sequence[FileEntry]) -> None:
        """Have the backend copy what is the same, where it can."""
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
        lanes, each = _share(threads)
        for plan in plans:
            if plan.size > self._window:
                raise InvalidInput(
                    f"{plan.name} would have {plan.size} bytes, a window has {self._window}",
                    next_step="make shards no longer than a window",
                )

        def write(plan: FilePlan) -> Moved:
            with self._lane() as lane:
                view = lane.fetch(plan.chunks)
                windowed = replace(plan, chunks=_in_one(plan.chunks))
                return write_files(directory, [windowed], [view], threads=each, advance=advance)

        found = _in_lanes(write, plans, lanes)
        return self._moved(found, [entry for moved in found for entry in moved.files])

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
        lanes, each = _share(threads)

        def read(item: tuple[FilePlan, FileEntry, Sequence[ChunkPlan]]) -> Moved:
            plan, entry, chunks = item
            with self._lane() as lane:
                view = lane.cleared(sum(chunk.size for chunk in chunks))
                windowed = replace(plan, chunks=_in_one(chunks))
                moved = self._backend.read_files(
                    directory, [windowed], [entry], [view], threads=each, advance=advance
                )
                lane.bring(chunks)
                return moved

        items = [
            (plan, entry, run)
            for plan, entry in zip(plans, entries, strict=True)
            for run in runs_of(plan.chunks, self._window)
        ]
        for plan, _, (chunk, *_) in items:
            if chunk.size > self._window:
                raise ArtifactCorrupt(
                    f"chunk {chunk.index} of {plan.name} is longer than all of the memory",
                    file=plan.name,
                    chunk=chunk.index,
                )
        return self._moved(_in_lanes(read, items, lanes), [])

    def digest_of(self, chunk: ChunkPlan) -> str:
        """Give the digest that a chunk has when it is written."""
        with self._lane() as lane:
            (windowed,) = _in_one([chunk])
            return digest_in_memory(windowed, [lane.fetch([chunk])])

    @contextlib.contextmanager
    def _lane(self) -> Iterator[_Lane]:
        # A thread holds one at most, so that there are never more of them than threads.
        try:
            lane = self._idle.pop()
        except IndexError:
            lane = _Lane(self._memory.copier(self._window), self._places)
            self._lanes.append(lane)
        try:
            yield lane
        finally:
            # Whatever failed: nothing may be copied from or to a window that is used again.
            lane.copier.flush()
            self._idle.append(lane)

    def _moved(self, found: Sequence[Moved], files: list[FileEntry]) -> Moved:
        # A backend that has to take a simpler way for one file says so.
        ways = {moved.backend for moved in found if moved.bytes} or {m.backend for m in found}
        return Moved(
            backend="+".join(sorted(ways)), bytes=sum(moved.bytes for moved in found), files=files
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for lane in self._lanes:
            lane.copier.close()


class _Lane:
    """A window, and what is copied between it and the device."""

    def __init__(self, copier: Copier, places: Sequence[int]) -> None:
        self.copier = copier
        self._places = places

    def fetch(self, chunks: Sequence[ChunkPlan]) -> memoryview:
        """Copy chunks out of the device, one after another, with zeros for padding."""
        size = sum(chunk.size for chunk in chunks)
        view = self.copier.window[:size]
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

    def cleared(self, size: int) -> memoryview:
        """Give zeros, as a backend expects of what it fills."""
        view = self.copier.window[:size]
        _clear(view)
        return view

    def bring(self, chunks: Sequence[ChunkPlan]) -> None:
        """Copy chunks that stand one after another in the window into the device."""
        at = 0
        for piece in (piece for chunk in chunks for piece in chunk.pieces):
            if piece.allocation != PADDING:
                part = self.copier.window[at : at + piece.size]
                self.copier.write(self._places[piece.allocation] + piece.offset, part)
            at += piece.size
        self.copier.flush()


def _clear(view: memoryview) -> None:
    ctypes.memset(ctypes.addressof(ctypes.c_ubyte.from_buffer(view)), 0, len(view))


def _share(threads: int) -> tuple[int, int]:
    """Give how many lanes there are, and the threads that a backend may take in each."""
    lanes = min(LANES, threads)
    return lanes, threads // lanes


def _in_one(chunks: Sequence[ChunkPlan]) -> tuple[ChunkPlan, ...]:
    """Give the same chunks, whose bytes stand one after another in a single buffer."""
    first = chunks[0].offset if chunks else 0
    return tuple(
        replace(chunk, pieces=(Piece(0, chunk.offset - first, chunk.size),)) for chunk in chunks
    )


def _in_lanes(work: Callable[[T], R], items: Sequence[T], lanes: int) -> list[R]:
    """Do all work in threads; the first failure stops what has not begun."""
    with ThreadPoolExecutor(lanes, thread_name_prefix="lane") as pool:
        running = [pool.submit(work, item) for item in items]
        try:
            wait(running, return_when=FIRST_EXCEPTION)
        finally:
            for future in running:
                future.cancel()
    failed = [f for f in running if not f.cancelled() and f.exception() is not None]
    return [future.result() for future in failed or running]
