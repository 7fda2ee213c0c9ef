"""What the command line shows, as text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from gms.domain.parts import Difference, PartDifference
from snapshot_shared.frames import DeviceStatus, DomainStatus, EventRecord, StatusReply

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


class BenchRow(msgspec.Struct, frozen=True, kw_only=True):
    """Times of one kind of call, in microseconds."""

    what: str
    calls: int
    p50_us: float
    p99_us: float


def size_text(count: float) -> str:
    """Write bytes in binary units with three digits."""
    value, units = float(count), iter(_UNITS)
    unit = next(units)
    while value >= 1024 and (larger := next(units, "")):
        value, unit = value / 1024, larger
    text = f"{value:.0f}" if value >= 100 or value == int(value) else f"{value:.3g}"
    return f"{text} {unit}"


def status_text(reply: StatusReply) -> str:
    """Show what a service holds, who waits, and what happened last."""
    lines = [f"node {reply.node}, incarnation {reply.incarnation}"]
    for device in reply.devices:
        lines += ["", *_device_lines(device)]
    if reply.events and reply.now_s:
        lines += ["", "last events (seconds ago)"]
        lines += [_event_line(event, reply.now_s) for event in reply.events]
    return "\n".join(lines)


def difference_text(found: Difference) -> str:
    """Show what differs between two parts."""
    if found.equal:
        return f"equal: {size_text(found.same_bytes)}"
    lines = [
        f"{size_text(found.changed_bytes)} changed, {size_text(found.same_bytes)} the same",
    ]
    for what, names in (
        ("added", found.added),
        ("removed", found.removed),
        ("resized", found.resized),
        ("changed", found.changed),
        ("metadata", found.metadata),
    ):
        if names:
            lines.append(f"{what:>9}: {_some(names)}")
    return "\n".join(lines)


def differences_text(rows: Sequence[PartDifference], first: str, second: str) -> str:
    """Show what differs between two generations; `first` and `second` are their folders."""
    lines = []
    for row in rows:
        if row.difference is None:
            lines.append(f"{row.part}: only in {first if row.is_in_first else second}")
        else:
            lines.append(f"{row.part}: {difference_text(row.difference)}")
    return "\n".join(lines)


def bench_text(rows: Sequence[BenchRow]) -> str:
    """Show the times of a measurement."""
    lines = [f"{'call':<28} {'calls':>7} {'p50':>10} {'p99':>10}"]
    lines += [
        f"{row.what:<28} {row.calls:>7} {row.p50_us:>7.0f} us {row.p99_us:>7.0f} us" for row in rows
    ]
    return "\n".join(lines)


def _device_lines(device: DeviceStatus) -> Iterator[str]:
    yield f"device {device.index}  {device.uuid}  {device.product}"
    yield (
        f"  {size_text(device.used)} of {size_text(device.capacity)} used, "
        f"{size_text(device.free)} free, {size_text(device.retired)} wait for importers"
    )
    if device.capabilities:
        able = ", ".join(f"{name} {value}" for name, value in device.capabilities.items())
        yield f"  {able}"
    if device.fence is not None:
        yield f"  fence {device.fence.phase}, ends in {device.fence.ends_in_s:.0f} s"
    for load in device.loads:
        yield f"  loaded and not published: {load.layout_id}, {size_text(load.bytes)}"
    for domain in device.domains:
        yield from _domain_lines(domain)


def _domain_lines(domain: DomainStatus) -> Iterator[str]:
    yield f"  {domain.domain.value}: {domain.lock}"
    if domain.layout is not None:
        layout = domain.layout
        yield (
            f"    generation {layout.generation}, {size_text(layout.bytes)}, layout "
            f"{layout.layout_id}, structure {layout.structure_hash[:16]}"
        )
    for session in domain.sessions:
        how = "" if session.fence in ("pidfd", msgspec.UNSET) else f", fenced by {session.fence}"
        yield (
            f"    {session.access.value} {session.client or 'unnamed'} (pid {session.pid}), "
            f"{session.state}{how}"
        )
    for number, waiter in enumerate(domain.waiting, start=1):
        why = f": {waiter.why}" if waiter.why else ""
        yield (
            f"    waits, {number} of {len(domain.waiting)}: {waiter.lock.value} "
            f"{waiter.client or 'unnamed'} (pid {waiter.pid}){why}"
        )


def _event_line(event: EventRecord, now: float) -> str:
    who = f" {event.client or 'unnamed'} (pid {event.pid})" if event.session else ""
    what = f" {event.reason}" if event.reason else ""
    generation = f", generation {event.generation}" if event.generation else ""
    return (
        f"  {now - event.at_s:>8.1f}  {event.kind.value:<8}{what}{who}{generation} "
        f"on {event.domain.value} of {event.device}"
    )


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(names[:8])
    return shown if len(names) <= 8 else f"{shown} and {len(names) - 8} more"
