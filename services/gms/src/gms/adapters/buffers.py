"""Where the bytes of a chunk stand while it moves: in place, or in buffers for direct requests."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import mmap
from collections.abc import Callable, Iterable, Iterator

import xxhash

from gms.adapters.syscalls import is_mapped, populate
from gms.domain.transfer import PADDING, PAGE, ChunkPlan, Piece
from gms.ports import Buffers
from snapback_client.frames import aligned
from snapback_client.reservation import HUGE_PAGE
from snapshot_shared.object_storage import zeros_digest

_IN_PLACE_BYTES = 64 * 1024
"""Shorter pieces go through a buffer: a request takes a limited number of places."""

_TOUCHED_BYTES = 64 * 1024
"""Shorter pieces are not worth a call of their own to have their pages mapped."""

Pages = Callable[[int], mmap.mmap]
"""Maps so many bytes for a buffer, at the beginning of a page."""


class ChunkMemory:
    """The memory of a plan: where its allocations are, or buffers for direct requests.

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
        # What is not in place is little and scattered: the kernel would clear a huge page for each.
        self._map = pages or functools.partial(buffer_pages, huge=not in_place)
        self._addresses = [_address(buffer) for buffer in buffers]
        # The memory of a load is mapped all at once, so the first page speaks for all.
        self._is_mapped = all(map(is_mapped, self._addresses[:1]))
        self._size = aligned(longest, HUGE_PAGE)
        self._free: list[mmap.mmap] = []

    @contextlib.contextmanager
    def outgoing(self, chunk: ChunkPlan, *, direct: bool) -> Iterator[list[memoryview]]:
        """Yield the memory to write from; whole pages for a direct request."""
        if not (direct or self._stages_all):
            yield pieces_of(chunk, self.buffers)
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
        """Yield the memory to read to; at the end of the block the bytes are in their place."""
        self._touch(chunk)
        if not (direct or self._stages_all):
            yield pieces_of(chunk, self.buffers)
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
        """Return the memory of a direct request for a chunk: parts of the buffer, or in place.

        The second value are the pieces that go through the buffer, with their offsets in it.
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
        """Return how many bytes of a piece at this place of its chunk need no buffer."""
        if not self._in_place or piece.allocation == PADDING or piece.size < _IN_PLACE_BYTES:
            return 0
        is_aligned = at % PAGE == 0 and self._address_of(piece) % PAGE == 0
        return piece.size - piece.size % PAGE if is_aligned else 0

    def _touch(self, chunk: ChunkPlan) -> None:
        """Map the pages of a chunk many at a time."""
        if self._is_mapped:
            return
        for piece in chunk.pieces:
            if piece.allocation != PADDING and piece.size >= _TOUCHED_BYTES:
                populate(self._address_of(piece), piece.size)

    def _address_of(self, piece: Piece) -> int:
        return self._addresses[piece.allocation] + piece.offset

    @contextlib.contextmanager
    def scratch(self, chunk: ChunkPlan) -> Iterator[list[memoryview]]:
        """Yield memory outside every allocation, as long as the pages of a chunk."""
        with self._pages(chunk) as (view, _):
            yield [view]

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
    """Map `size` bytes of anonymous memory, in huge pages where the kernel has them."""
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    # A kernel may have been built without huge pages.
    with contextlib.suppress(OSError):
        pages.madvise(mmap.MADV_HUGEPAGE if huge else mmap.MADV_NOHUGEPAGE)
    return pages


def pieces_of(chunk: ChunkPlan, buffers: Buffers) -> list[memoryview]:
    """Return the memory of the pieces of a chunk, and zeros for padding."""
    return [
        memoryview(bytearray(piece.size))
        if piece.allocation == PADDING
        else buffers[piece.allocation][piece.offset : piece.offset + piece.size]
        for piece in chunk.pieces
    ]


def _address(view: memoryview) -> int:
    return ctypes.addressof(ctypes.c_ubyte.from_buffer(view))


def digest_of(pieces: Iterable[memoryview], size: int) -> str:
    """Return the digest of the first `size` bytes of pieces. xxh3-128, hex."""
    state = xxhash.xxh3_128()
    update_digest(state, pieces, size)
    return state.hexdigest()


def update_digest(state: xxhash.xxh3_128, pieces: Iterable[memoryview], size: int) -> None:
    """Add the first `size` bytes of pieces to a digest."""
    for piece in pieces:
        state.update(piece[:size])
        size -= len(piece)


def is_zero(chunk: ChunkPlan, buffers: Buffers) -> bool:
    """Whether all bytes of a chunk are 0. Mostly the first ones are enough to know."""
    begin = b"".join(bytes(piece[:PAGE]) for piece in pieces_of(chunk, buffers)[:1])
    return not any(begin) and digest_in_memory(chunk, buffers) == zeros_digest(chunk.size)


def digest_in_memory(chunk: ChunkPlan, buffers: Buffers) -> str:
    """Return the digest that a chunk has when it is written."""
    return digest_of(pieces_of(chunk, buffers), chunk.size)
