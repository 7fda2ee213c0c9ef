"""What belongs to the process that made it, and to no fork of that process.

A fork has copies of the descriptors and none of the memory of a device; in it CUDA has no driver.
"""

from __future__ import annotations

import os

from snapback_client.errors import NotEligible


def check_owner(owner: int, what: str) -> None:
    """Raise NotEligible in any other process than `owner`, with both pids."""
    if (pid := os.getpid()) != owner:
        raise NotEligible(
            f"{what} belongs to process {owner}, of which this process, {pid}, is a fork",
            next_step="connect in this process itself; close() only closes its descriptors",
            owner=owner,
            pid=pid,
        )
