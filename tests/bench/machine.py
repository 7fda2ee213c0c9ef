"""The machine that a benchmark runs on, and what others do on it at the same time."""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from gms.adapters.buffers import buffer_pages
from gms.adapters.syscalls import populate
from snapback_client.frames import aligned
from snapback_client.reservation import HUGE_PAGE

NR_HUGEPAGES = Path("/proc/sys/vm/nr_hugepages")
REPORTED = "/sys/module/page_reporting/parameters/reported_kib"
"""How much free memory the kernel of a virtual machine has reported to its host since the start;
few kernels say so."""

_SCHEDULING = {os.SCHED_OTHER: "SCHED_OTHER", os.SCHED_FIFO: "SCHED_FIFO", os.SCHED_RR: "SCHED_RR"}

_KEPT_BYTES = 2**30
"""Memory that is left to all other programs."""


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


@contextlib.contextmanager
def huge_pages_set_aside(size: int, place: Path = NR_HUGEPAGES) -> Iterator[bool]:
    """Have the host set aside huge pages for so many bytes, and yield whether they are free.

    What was set aside here is given back at the end. Nothing changes where there are enough, or
    where this process may not write to `place`, which is `vm.nr_hugepages`.
    """
    added = 0
    try:
        if (missing := -(-(size - huge_bytes_free()) // HUGE_PAGE)) > 0:
            with contextlib.suppress(OSError):
                before = int(place.read_text())
                # Asked for once more, the kernel finds some that it did not find at once.
                for _ in range(2):
                    place.write_text(f"{before + missing}")
                    added = int(place.read_text()) - before
        yield huge_bytes_free() >= size
    finally:
        if added > 0:
            # Others may have set aside more in the meantime.
            place.write_text(f"{max(0, int(place.read_text()) - added)}")


def recycle(size: int) -> None:
    """Touch and release memory, so that what is allocated next is known to be there.

    A virtual machine may give free pages back to its host. Who gets such a page waits for the host,
    and the processor-seconds of that are charged to whoever happens to be the next. Needs
    Linux 5.14; before, nothing is touched.
    """
    size = min(size, available_bytes() - _KEPT_BYTES)
    if size <= 0:
        return
    with contextlib.closing(buffer_pages(size)) as pages:
        # The view ends at once: a mapping with one cannot be closed.
        begin = ctypes.addressof(ctypes.c_ubyte.from_buffer(pages))
        # The host brings pages to several processors at a time.
        cores = os.cpu_count() or 1
        each = aligned(-(-size // cores), HUGE_PAGE)
        with ThreadPoolExecutor(cores) as pool:
            for at in range(0, size, each):
                # Ctrl-C may unmap the pages meanwhile: this call then fails; a write would kill.
                pool.submit(populate, begin + at, min(each, size - at))


def _kilobytes(path: str, field: str) -> int:
    lines = Path(path).read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{field}:"))


def available_bytes() -> int:
    """Give the bytes that may still be allocated before the kernel has to swap or to kill."""
    return _kilobytes("/proc/meminfo", "MemAvailable") * 1024


def memory_mb(field: str) -> float:
    """Give a field of the status of this process."""
    return _kilobytes("/proc/self/status", field) / 1000


def private_bytes() -> int:
    """Give the private memory of this process."""
    return _kilobytes("/proc/self/status", "RssAnon") * 1024


@contextlib.contextmanager
def highest_bytes() -> Iterator[list[int]]:
    """Yield a list with how far the private memory has been above what there was before."""
    before, extra, done = private_bytes(), [0], threading.Event()

    def watch() -> None:
        while not done.wait(0.005):
            extra[0] = max(extra[0], private_bytes() - before)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield extra
    finally:
        done.set()
        watcher.join()


def reported_bytes() -> int | None:
    """Give the bytes of free memory that were reported to the host; None where nobody counts."""
    try:
        return int(Path(REPORTED).read_text()) * 1024
    except (OSError, ValueError):
        return None


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
        "scheduling": _SCHEDULING.get(os.sched_getscheduler(0), "another"),
        "load average at the start": f"{os.getloadavg()[0]:.1f}",
    }
