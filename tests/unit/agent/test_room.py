"""How long weights fit that are spread over several file systems."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from snapshot_agent.adapters.artifacts import Room

ROOT = Path("/artifacts")


@pytest.mark.parametrize(
    ("shares", "of", "share", "fits"),
    [(1, 1, 100, 90), (1, 3, 34, 270), (2, 3, 67, 135), (3, 3, 100, 90), (1, 0, 0, 90)],
)
def test_a_file_system_takes_its_shares_of_the_weights(
    shares: int, of: int, share: int, fits: int
) -> None:
    room = Room(ROOT, free=90, shares=shares, of=of)
    assert room.share_of(100) == share
    assert room.for_weights == fits


@given(st.integers(0, 2**50), st.integers(1, 9), st.integers(0, 9))
def test_what_is_said_to_fit_fits_and_a_share_more_does_not(
    free: int, shares: int, others: int
) -> None:
    room = Room(ROOT, free=free, shares=shares, of=shares + others)
    assert room.share_of(room.for_weights) <= free
    assert room.share_of(room.for_weights + room.of) > free
