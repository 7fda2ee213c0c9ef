"""When the stream of orders has too little room, no new work begins.

What has begun goes on, and what cleans up (releases, aborts, stops, drops, deletes) always fits.
"""

from __future__ import annotations

FULL_FROM = 0.8
"""The share of the stream's room from which on nothing new begins."""

REASON = "BusFull"
MESSAGE = f"the stream of orders is more than {FULL_FROM:.0%} full; it begins when there is room"


def is_full(fill: float) -> bool:
    """Judge the share of the room that is taken, from 0 to 1."""
    return fill >= FULL_FROM
