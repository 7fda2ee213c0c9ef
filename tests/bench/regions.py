"""Memory that stands for that of a simulated device, and the allocations in it."""

from __future__ import annotations

import mmap
import os

import numpy as np

from gms.domain.transfer import CHUNK_BYTES
from snapback_client.frames import AllocationInfo, aligned
from snapback_client.reservation import HUGE_PAGE
from tests.bench.common import MIB
from tests.bench.machine import new_memory

CHUNKS = 16
"""The random bytes repeat after so many chunks."""

STRIDE = MIB
"""How far the bytes are apart that are looked at after each load."""


class Memory:
    """Memory of a simulated device, in huge pages or in ordinary ones."""

    def __init__(self, size: int, *, in_huge_pages: bool = False) -> None:
        self.in_huge_pages = in_huge_pages
        whole = aligned(size, HUGE_PAGE)
        self.descriptor = new_memory(whole, in_huge_pages=in_huge_pages)
        self.map = mmap.mmap(self.descriptor, whole)
        self.bytes = memoryview(self.map)[:size]
        self.array = np.frombuffer(self.bytes, dtype="u1")

    def fill(self) -> None:
        """Put random bytes everywhere, which also touches every page."""
        rng = np.random.default_rng(1)
        parts = [np.frombuffer(rng.bytes(CHUNK_BYTES), dtype="u1") for _ in range(CHUNKS)]
        for start in range(0, len(self.array), CHUNK_BYTES):
            part = self.array[start : start + CHUNK_BYTES]
            part[:] = parts[start // CHUNK_BYTES % CHUNKS][: len(part)]

    def touch(self) -> None:
        """Read a byte of each page: the host has them all ready then, also those of a pause."""
        self.array[:: mmap.PAGESIZE].max()

    def close(self) -> None:
        """Release the memory; views keep it."""
        os.close(self.descriptor)


class Region:
    """Allocations side by side in memory, each on pages of its own."""

    def __init__(self, memory: Memory, count: int) -> None:
        self.memory = memory
        step = len(memory.bytes) // count
        each = step - (count > 1)
        self.infos = [
            AllocationInfo(id=f"a{slot}", size=each, aligned=step, tag="", slot=slot)
            for slot in range(count)
        ]
        whole = memory.bytes
        self.views = [whole[slot * step : slot * step + each] for slot in range(count)]
        self.arrays = {
            info.id: np.frombuffer(view, dtype="u1")
            for info, view in zip(self.infos, self.views, strict=True)
        }

    def looked_at(self) -> bytes:
        """Return some bytes of each allocation."""
        return b"".join(each[::STRIDE].tobytes() for each in self.arrays.values())

    def spoil(self) -> None:
        """Change the bytes that are looked at."""
        for each in self.arrays.values():
            each[::STRIDE] ^= 0xFF
