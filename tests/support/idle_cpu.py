"""Measure what an idle local cluster costs: CPU-seconds a minute of all its processes.

    .venv/bin/python tests/support/idle_cpu.py [SECONDS]

Starts a cluster of two nodes of its own, lets it settle, measures, ends it. Exits 1 at one
CPU-second a minute or more.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

LIMIT = 1.0
SETTLE_S = 10.0
TICKS = os.sysconf("SC_CLK_TCK")
SNAPSHOTCTL = Path(sys.executable).with_name("snapshotctl")
NAME = "idle"


def processes(state: Path) -> dict[int, str]:
    """Find the processes of the cluster by what they were started with."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                environment = (entry / "environ").read_bytes()
                command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            except OSError:
                continue
            if os.fsencode(state) in environment or str(state) in command:
                found[int(entry.name)] = command.strip()[-50:]
    return found


def cpu_s(pid: int) -> float:
    """Give the CPU time that a process has used, in seconds."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


def main() -> int:
    """Measure and say."""
    seconds = float(sys.argv[1]) if len(sys.argv) > 1 else 60.0
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "XDG_STATE_HOME": folder}
        up = [str(SNAPSHOTCTL), "up", "--nodes", "2", "--name", NAME]
        down = [str(SNAPSHOTCTL), "down", "--name", NAME, "--purge"]
        subprocess.run(up, env=environment, check=True)
        try:
            mine = processes(Path(folder))
            time.sleep(SETTLE_S)
            before = {pid: cpu_s(pid) for pid in mine}
            time.sleep(seconds)
            used = {pid: (cpu_s(pid) - before[pid]) * 60 / seconds for pid in mine}
        finally:
            subprocess.run(down, env=environment, check=True)
    for pid, value in used.items():
        print(f"{value:6.2f}  {mine[pid]}")
    total = sum(used.values())
    print(f"{total:6.2f}  CPU-seconds a minute in all (limit {LIMIT})")
    return 0 if mine and total < LIMIT else 1


if __name__ == "__main__":
    sys.exit(main())
