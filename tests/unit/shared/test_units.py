"""Quantities as people read them."""

import pytest

from snapshot_shared.units import counted, size, sizes


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (1023, "1023 B"), (536885240, "512 MiB"), (3 * 2**29, "1.5 GiB")],
)
def test_a_size_has_the_unit_that_fits_it(count: int, text: str) -> None:
    assert size(count) == text


def test_two_sizes_that_would_read_the_same_are_shown_in_bytes() -> None:
    assert sizes(2**30, 2**29) == ("1 GiB", "512 MiB")
    assert sizes(2**30, 2**30 + 1) == ("1073741824 bytes", "1073741825 bytes")


@pytest.mark.parametrize(("count", "text"), [(0, "0 orders"), (1, "1 order"), (2, "2 orders")])
def test_only_one_thing_is_counted_in_the_singular(count: int, text: str) -> None:
    assert counted(count, "order") == text
