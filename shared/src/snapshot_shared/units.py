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
