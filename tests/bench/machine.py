"""The machine that a benchmark runs on, and what others do on it at the same time."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any

from snapback_client.reservation import HUGE_PAGE


def huge_bytes_free() -> int:
    """Give the bytes of huge pages that the host has set aside and nobody uses or has reserved."""
    lines = [line.split() for line in Path("/proc/meminfo").read_text().splitlines()]
    pages = {name: int(value) for name, value, *_ in lines if name.startswith("HugePages_")}
    return (pages.get("HugePages_Free:", 0) - pages.get("HugePages_Rsvd:", 0)) * HUGE_PAGE


def new_memory(size: int, *, in_huge_pages: bool) -> int:
    """Give the descriptor of memory of which no page is there yet."""
    descriptor = os.memfd_create("bench", os.MFD_HUGETLB if in_huge_pages else 0)
    os.ftruncate(descriptor, size)
    return descriptor


class Watch:
    """Tells how busy others kept the processors since it was made."""

    def __init__(self) -> None:
        self._begin = _times()

    def others(self) -> float:
        """Give their share of the time of all processors, what the host took away included."""
        total, busy, ours = (now - then for now, then in zip(_times(), self._begin, strict=True))
        return max(0.0, busy - ours) / total if total else 0.0


def _times() -> tuple[float, float, float]:
    """All processor-seconds, those that were used, and those that we and our children used."""
    names = ("user", "nice", "system", "idle", "iowait", "irq", "softirq", "steal")
    row = Path("/proc/stat").read_text().splitlines()[0].split()[1:]
    ticks = os.sysconf("SC_CLK_TCK")
    seconds = {name: int(value) / ticks for name, value in zip(names, row, strict=False)}
    total = sum(seconds.values())
    return total, total - seconds["idle"] - seconds["iowait"], sum(os.times()[:4])


def describe(folder: Path) -> dict[str, str]:
    """Say what the machine is; `folder` is on the disk that is measured."""
    models = [x for x in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in x]
    mounts: list[Any] = [line.split() for line in Path("/proc/mounts").read_text().splitlines()]
    inside = [m for m in mounts if folder.resolve().is_relative_to(m[1])]
    return {
        "processor": (models or ["unknown"])[0].partition(": ")[2] or platform.machine(),
        "cores": str(os.cpu_count()),
        "kernel": f"{platform.system()} {platform.release()}",
        "huge pages set aside and free": f"{huge_bytes_free() // 2**20} MiB",
        "file system": max(inside, key=lambda m: len(m[1]))[2],
        "python": platform.python_version(),
        "load average at the start": f"{os.getloadavg()[0]:.1f}",
    }
