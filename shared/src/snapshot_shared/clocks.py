"""Time and the identity of this boot, as values that are handed in."""

from __future__ import annotations

from collections.abc import Callable

import msgspec


class Clocks(msgspec.Struct, frozen=True):
    """The clocks of a machine, as functions, so that tests can set them.

    `monotonic` and `wall` return seconds; `monotonic` counts from an instant of the boot `boot_id`.
    """

    monotonic: Callable[[], float]
    wall: Callable[[], float]
    boot_id: str
