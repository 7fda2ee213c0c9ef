"""What a memory table holds, counted for the metrics: numbers by the values of attributes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

from gms.domain.device import DeviceTable
from gms.domain.fence import FencePhase
from gms.domain.layout import Allocation
from gms.domain.memory_table import MemoryTable

Numbers = Mapping[tuple[str, ...], float]


def sessions(table: MemoryTable) -> Numbers:
    """Count sessions by device, domain and access, `lingering` for those that have ended."""
    found: Counter[tuple[str, ...]] = Counter()
    for device in table.devices.values():
        for room in device.rooms.values():
            found.update((device.uuid, room.domain.value, s.access.value) for s in room.sessions)
        gone = device.lingering.values()
        found.update((device.uuid, s.request.domain.value, "lingering") for s in gone)
    return found


def waiting(table: MemoryTable) -> Numbers:
    """Count clients that wait for a lock by device and domain."""
    return {
        (device.uuid, room.domain.value): len(room.queue)
        for device in table.devices.values()
        for room in device.rooms.values()
    }


def memory(table: MemoryTable) -> Numbers:
    """Sum up bytes by device and domain, `hidden` and `retired` apart."""
    found: Counter[tuple[str, ...]] = Counter()
    for device in table.devices.values():
        for where, allocation in _allocations(device):
            found[device.uuid, where] += allocation.aligned
    return found


def allocations(table: MemoryTable) -> Numbers:
    """Count allocations as `memory` sums them up."""
    return Counter(
        (device.uuid, where)
        for device in table.devices.values()
        for where, _ in _allocations(device)
    )


def generations(table: MemoryTable) -> Numbers:
    """Return the newest generation of each device."""
    return {(device.uuid,): device.generation for device in table.devices.values()}


def fences(table: MemoryTable) -> Numbers:
    """Count fences by device and phase."""
    phases = [phase for phase in FencePhase if phase is not FencePhase.ENDED]
    return {
        (uuid, phase.value): float(table.fences.phase(uuid) is phase)
        for uuid in table.devices
        for phase in phases
    }


def _allocations(device: DeviceTable) -> Iterator[tuple[str, Allocation]]:
    """Yield every allocation once, with the name of its place."""
    for room in device.rooms.values():
        layouts = [room.committed, *(session.layout for session in room.sessions)]
        for layout in {id(layout): layout for layout in layouts if layout}.values():
            yield from ((room.domain.value, found) for found in layout.allocations.values())
    for hidden in device.hidden.values():
        yield from (("hidden", found) for found in hidden.layout.allocations.values())
    yield from (("retired", found) for found in device.retired)
