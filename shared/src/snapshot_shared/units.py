"""Quantities as people read them."""

from __future__ import annotations


def size(count: float) -> str:
    """Return bytes in binary units with three digits: `512 MiB`, `1.5 GiB`."""
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if value < 1024 or unit == "TiB":
            break
        value /= 1024
    text = f"{value:.0f}" if value >= 100 or value == int(value) else f"{value:.3g}"
    return f"{text} {unit}"
