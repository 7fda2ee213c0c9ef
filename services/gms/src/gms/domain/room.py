"""What a device has no room for: the error that says how much is free and who holds the rest."""

from __future__ import annotations

from collections.abc import Mapping

from snapshot_shared.errors import OutOfDeviceMemory
from snapshot_shared.units import size, sizes

_NAMED = 4
"""How many processes a message names."""


def out_of_memory(
    device: str, *, needed: int, free: int, capacity: int, used: int, holders: Mapping[str, int]
) -> OutOfDeviceMemory:
    """Return the error of an allocation that does not fit now; all numbers are bytes.

    `used` is what the service has made, `holders` are other processes by name, as far as they are
    known. What is neither is said to be of others.
    """
    others = max(0, capacity - free - used)
    named = sorted(holders.items(), key=lambda each: -each[1])[:_NAMED]
    who = ", ".join(f"{name} {size(held)}" for name, held in named)
    rest = f", others {size(others)}" + (f": {who}" if who else "") if others else ""
    wanted, there = sizes(needed, free)
    step = "free memory of this device, or replace its layout instead of adding to it"
    if others:
        step = "end the processes that hold it"
    if needed > capacity:
        step = "use smaller arrays, or a device with more memory"
    return OutOfDeviceMemory(
        f"{wanted} are needed on {device}, {there} of {size(capacity)} are free; "
        f"this service holds {size(used)}{rest}",
        next_step=step,
        needed=needed,
        free=free,
        capacity=capacity,
        used=used,
        holders=dict(holders),
    )
