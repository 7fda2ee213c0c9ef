"""Memory that a library reserves in a pool, takes and gives back, without PyTorch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

import snapback_client as client
from snapback_client.errors import OutOfDeviceMemory, SnapbackError
from snapback_client.torch import SegmentAllocator

MIB = 1024 * 1024


@pytest.fixture
def pool(service: Any) -> Iterator[client.MemoryPool]:
    with client.connect(lock="RW") as found:
        yield found


def test_what_is_reserved_is_handed_out_without_a_call(pool: client.MemoryPool) -> None:
    allocator = SegmentAllocator(pool)
    allocator.reserve(10 * MIB)
    # Whatever asks the service from here on fails.
    pool._held.close()
    start = allocator.take(6 * MIB)
    assert allocator.take(100) == start + 6 * MIB
    assert allocator.take(3 * MIB) == start + 6 * MIB + 512
    allocator.give(start)
    with pytest.raises(SnapbackError):
        allocator.take(2 * MIB)
    assert allocator.malloc(2 * MIB, 0, None) is None
    assert isinstance(allocator.failure, SnapbackError)


def test_a_reserve_grows_where_it_ends_by_what_is_missing(
    service: Any, pool: client.MemoryPool
) -> None:
    allocator = SegmentAllocator(pool)
    start = allocator.take(100)
    assert allocator.take(3 * MIB) == start + 512
    assert service.device().used == 4 * MIB
    pool.allocate("between", 1, "u1")
    apart = allocator.take(4 * MIB)
    assert apart > start + 4 * MIB, "not across another array"
    whole = pool["segment-000000"], pool["segment-000001"]
    assert sum(array.nbytes for array in whole) == 4 * MIB


def test_what_no_range_touches_is_freed_and_the_reserve_is_kept(
    service: Any, pool: client.MemoryPool
) -> None:
    allocator = SegmentAllocator(pool)
    allocator.reserve(12 * MIB)
    first, second, third = (allocator.take(3 * MIB) for _ in range(3))
    assert service.device().used == 12 * MIB
    allocator.give(second)
    allocator.trim()
    assert service.device().used == 10 * MIB, "the first touches the granule from 2 to 4"
    allocator.give(first)
    allocator.trim()
    assert service.device().used == 6 * MIB, "6 to 9 are in use, 9 to 12 are the reserve"
    allocator.trim([(third + MIB, 1)])
    assert service.device().used == 2 * MIB
    assert [segment.name for segment in allocator.segments] == ["segment-000003"]
    assert allocator.take(MIB) == third + 6 * MIB, "behind what was reserved"


def test_a_reserve_that_does_not_fit_is_refused_whole(
    service: Any, pool: client.MemoryPool
) -> None:
    allocator = SegmentAllocator(pool)
    with pytest.raises(OutOfDeviceMemory):
        allocator.reserve(66 * MIB)
    assert service.device().used == 0
    assert allocator.segments == []
    assert allocator.take(64 * MIB)


def test_what_was_reserved_is_there_again_after_a_sleep(service: Any) -> None:
    with client.connect(lock="RW", domain="kv") as cache:
        allocator = SegmentAllocator(cache)
        allocator.reserve(6 * MIB)
        place = allocator.take(MIB)
        assert cache.imported_bytes == 6 * MIB
        cache.sleep()
        assert (service.device().used, cache.imported_bytes) == (0, 0)
        cache.wake()
        assert (service.device().used, cache.imported_bytes) == (6 * MIB, 6 * MIB)
        assert allocator.take(MIB) == place + MIB
        assert service.device().used == 6 * MIB
