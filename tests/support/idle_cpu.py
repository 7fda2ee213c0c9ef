"""Measure what an idle local cluster costs: CPU-seconds a minute of all its processes.

    .venv/bin/python -m tests.support.idle_cpu [SECONDS]

Starts a cluster of two nodes of its own, lets it settle, measures, ends it. Exits 1 at one
CPU-second a minute or more.
"""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
from pathlib import Path

from snapshotctl.adapters import processes
from tests.support.live_cluster import LiveCluster

LIMIT = 1.0
SETTLE_S = 10.0
TICKS = os.sysconf("SC_CLK_TCK")


def cpu_s(pid: int) -> float:
    """Give the CPU time that a process has used, in seconds."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


async def measured(home: Path, seconds: float) -> float:
    """Print what each process takes and return the sum."""
    cluster = LiveCluster(home)
    await cluster.up("node-0", "node-1", gpus=2)
    try:
        await asyncio.sleep(SETTLE_S)
        found = processes.members(cluster.run)
        before = [cpu_s(each.pid) for each in found]
        await asyncio.sleep(seconds)
        used = [(cpu_s(each.pid) - b) * 60 / seconds for each, b in zip(found, before, strict=True)]
    finally:
        await cluster.down()
    for each, value in zip(found, used, strict=True):
        print(f"{value:6.2f}  {each.command[-50:]}")
    assert used
    return sum(used)


def main() -> int:
    """Measure and say."""
    seconds = float(sys.argv[1]) if len(sys.argv) > 1 else 60.0
    with tempfile.TemporaryDirectory() as folder:
        total = asyncio.run(measured(Path(folder), seconds))
    print(f"{total:6.2f}  CPU-seconds a minute in all (limit {LIMIT})")
    return 0 if total < LIMIT else 1


if __name__ == "__main__":
    sys.exit(main())
