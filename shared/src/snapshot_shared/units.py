"""Quantities as people read them."""

from __future__ import annotations

from datetime import UTC, datetime


def instant(at: float) -> str:
    """Return seconds since the epoch as RFC 3339 with milliseconds.

    OverflowError, ValueError or OSError where the calendar has no such day.
    """
    return datetime.fromtimestamp(at, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def size(count: float) -> str:
    """Return bytes in binary units with three digits: `512 MiB`, `1.5 GiB`."""
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if value < 1024 or unit == "TiB":
            break
        value /= 1024
    text = f"{value:.0f}" if value >= 100 or value == int(value) else f"{value:.3g}"
    return f"{text} {unit}"


def sizes(first: int, second: int) -> tuple[str, str]:
    """Return two different sizes so that they read as different: in bytes if they have to."""
    shown = size(first), size(second)
    return shown if shown[0] != shown[1] else (f"{first} bytes", f"{second} bytes")


def counted(count: int, noun: str) -> str:
    """Return a count with its noun, whose plural has an s: `1 order`, `2 orders`."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def rate(count: float, seconds: float) -> str:
    """Return bytes a second in decimal units, as disks and links are sold; `-` without a time."""
    if seconds <= 0:
        return "-"
    value = count / seconds
    for unit in ("B/s", "kB/s", "MB/s", "GB/s"):
        if value < 1000 or unit == "GB/s":
            break
        value /= 1000
    return f"{value:.0f} {unit}" if value >= 100 else f"{value:.3g} {unit}"


def span_time(seconds: float) -> str:
    """Return a measured time: `0.4 ms`, `12 ms`, `1.24 s`, `2m 05s`."""
    if seconds < 0.001:
        return f"{seconds * 1000:.1f} ms"
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 100:
        return f"{seconds:.2f} s"
    return f"{int(seconds // 60)}m {int(seconds % 60):02d}s"
