"""Phases of a dump, and how a worker is let go in each of them."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import NamedTuple

from snapshot_shared.artifact import RootManifest
from snapshot_shared.ledger import Entry
from snapshot_shared.orders import DeviceRef


class Phase(StrEnum):
    """What a driver has done to a worker, which decides how the worker is let go.

    SIGNAL: it was sent signals at most, and runs again after SIGCONT. BEGUN: it is let go by the
    driver's program.
    """

    SIGNAL = "signal"
    BEGUN = "begun"


PHASE_NOTE = "phase"
"""The note of a dump that has its phase; absent while the phase is SIGNAL."""


class Phases(NamedTuple):
    """The phase while a step runs, and after its end."""

    during: Phase = Phase.SIGNAL
    after: Phase = Phase.SIGNAL


AS_BEFORE = Phases()
"""The phases of a step that only sends signals and copies files."""


class Release(NamedTuple):
    """How a worker is let go: a program, and a signal after it.

    `program` has its arguments; it has the rights of its starter and is killed after `within_s`
    seconds. It may be empty. Each process of the worker's session then gets SIGCONT, or SIGKILL
    with `ends`. With `stays` the guard goes on when the worker's process ends, because the driver
    is about to start another one.
    """

    program: tuple[str, ...] = ()
    within_s: float = 0.0
    ends: bool = False
    stays: bool = False


def phase_of(dump: Entry | None) -> Phase:
    """Return the phase of a dump that was interrupted, from its journal entry."""
    return Phase.SIGNAL if dump is None else Phase(dump.notes.get(PHASE_NOTE, Phase.SIGNAL))


def device_map(root: RootManifest, devices: Sequence[DeviceRef]) -> dict[str, str]:
    """Return the UUID of the device here for each device of the source, by UUID."""
    here = {f"gpu-{device.ordinal}": device.uuid for device in devices}
    return {
        row.layout.device: here[row.part]
        for row in root.parts
        if row.layout is not None and row.part in here
    }
