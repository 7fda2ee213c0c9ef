"""Ranges of addresses: where mappings may stand, and where a range begins."""

from __future__ import annotations

import contextlib
import mmap

import pytest

from snapback_client.errors import LayoutError
from snapback_client.mappings import AddressTaken, Mappings, neighbours
from snapback_client.reservation import HUGE_PAGE, Reservation

PAGE = mmap.PAGESIZE


@pytest.mark.parametrize("first", [0, 3 * PAGE])
def test_places_may_be_used_again_in_any_order(first: int) -> None:
    mappings = Mappings(16 * PAGE)
    for at, pages in ((first, 2), (6 * PAGE, 1), (9 * PAGE, 3)):
        mappings.add(at, pages * PAGE)
    assert [at for at, _ in mappings.within(0, 16 * PAGE)] == [first, 6 * PAGE, 9 * PAGE]
    mappings.remove(6 * PAGE)
    mappings.add(5 * PAGE, 4 * PAGE)
    with pytest.raises(LayoutError):
        mappings.within(6 * PAGE, PAGE)
    assert mappings.within(12 * PAGE, 4 * PAGE) == []


@pytest.mark.parametrize("pages", [1, 512, 513])
def test_a_reservation_for_a_simulated_device_begins_at_a_huge_page(pages: int) -> None:
    size = pages * PAGE
    with contextlib.ExitStack() as stack:
        found = [Reservation(size) for _ in range(3)]
        for each in found:
            stack.callback(each.release)
        assert [each.address % HUGE_PAGE for each in found] == [0, 0, 0]
        # The addresses are taken.
        for each in found:
            with pytest.raises(AddressTaken):
                Reservation(PAGE, address=each.address + size - PAGE)


@pytest.mark.parametrize(
    ("places", "joined"),
    [
        ([], []),
        ([(4, 4)], [(4, 4)]),
        ([(8, 2), (0, 4), (4, 4)], [(0, 10)]),
        ([(0, 4), (5, 1), (6, 2), (9, 1)], [(0, 4), (5, 3), (9, 1)]),
    ],
)
def test_places_that_touch_are_joined(
    places: list[tuple[int, int]], joined: list[tuple[int, int]]
) -> None:
    assert neighbours(places) == joined
