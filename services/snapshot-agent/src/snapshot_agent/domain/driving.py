"""How far a process driver has come with a worker, and what that takes to let the worker go.

A worker that is only stopped runs again after a signal. One whose devices are locked needs them
back first. Once a step has begun that cannot be undone, the worker can only be ended.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import NamedTuple

from snapshot_shared.artifact import RootManifest
from snapshot_shared.ledger import Entry
from snapshot_shared.orders import DeviceRef


class Phase(StrEnum):
    """What has been done to a worker. SIGNAL: at most signals were sent."""

    SIGNAL = "signal"
    LOCKED = "locked"
    BEGUN = "begun"


PHASE_NOTE = "phase"
"""The note of a dump that has the phase, once it was another than the first."""


class Phases(NamedTuple):
    """The phase while a step runs, and the one that it leaves behind when it has ended."""

    during: Phase = Phase.SIGNAL
    after: Phase = Phase.SIGNAL


AS_BEFORE = Phases()
"""The phases of a step that does nothing but send signals and copy files."""


class Release(NamedTuple):
    """How a worker is let go: a program, and a signal after it.

    `program` is its arguments; it is started with the rights of the starter and killed after
    `within_s` seconds, and without one only the signal is sent. Each process of the worker's
    session then gets SIGCONT, or SIGKILL with `ends`. With `stays` the guard goes on when the
    worker's process ends: the driver is about to start another one.
    """

    program: tuple[str, ...] = ()
    within_s: float = 0.0
    ends: bool = False
    stays: bool = False


def phase_of(dump: Entry | None) -> Phase:
    """Return the phase that a dump has left a worker in, as its journal says."""
    return Phase.SIGNAL if dump is None else Phase(dump.notes.get(PHASE_NOTE, Phase.SIGNAL))


def device_map(root: RootManifest, devices: Sequence[DeviceRef]) -> dict[str, str]:
    """Return the device here that takes the place of each of the source, by UUID."""
    here = {f"gpu-{device.ordinal}": device.uuid for device in devices}
    return {
        row.layout.device: here[row.part]
        for row in root.parts
        if row.layout is not None and row.part in here
    }
