"""`make soak CAPTURES=1000`: capture and delete one worker many times, and see that nothing grows.

With KEEP=1 no capture is deleted, and the memory of the node's services alone is judged.

A local cluster of one node. What each service uses, the files below the state folder and the
messages of streams and buckets are counted after the first hundred captures and after the last.
Streams that are histories have an age and a size that limit them and are only shown. Exit status 1
when something has grown.

`make idle` measures what a cluster of two nodes costs that nobody uses. Exit status 1 at one
CPU-second a minute or more.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import tempfile
import time
from collections.abc import Collection, Iterator
from pathlib import Path

from snapshot_shared import subjects
from snapshotctl.adapters import processes
from tests.support.live_cluster import LiveCluster, Session, pod, snapshot

NODE, WORKER = "node-0", "worker"
FIRST = 100
SETTLE_S = 10.0
CPU_LIMIT = 1.0
MIB = 2**20
MORE = {"MiB": 8.0, "descriptors": 4.0, "files": 16.0, "messages": 64.0}
"""How much more of each there may be after the last capture than after the hundredth."""
HISTORIES = (
    subjects.REPORTS,
    subjects.SPANS,
    subjects.PROGRESS,
    subjects.DEAD,
    # That a key was removed is kept for an hour.
    subjects.stream_of_bucket(subjects.OBJECTS_BUCKET),
    # The folder of nats-server: its files are blocks of the streams, each of which is counted.
    "nats",
)

Counts = dict[tuple[str, str], float]
"""By what has them and their unit."""


async def capture(session: Session, name: str, *, is_kept: bool) -> None:
    """Capture the worker once; unless it is kept, delete the capture and wait until it is gone."""
    await session.apply(snapshot(name, WORKER, "Resume"))
    await session.reaches("Snapshot", name)
    if not is_kept:
        await session.delete("Snapshot", name)
        await session.until(lambda values: len(values) == 1, f"the end of {name}")


def resident(cluster: LiveCluster) -> Iterator[tuple[str, float]]:
    """Yield the memory of each service in MiB."""
    for service in cluster.record.processes:
        status = Path(f"/proc/{service.pid}/status").read_text()
        line = next(line for line in status.splitlines() if line.startswith("VmRSS"))
        yield service.name, int(line.split()[1]) * 1024 / MIB


async def counted(cluster: LiveCluster, session: Session) -> Counts:
    counts: Counts = {}
    for service in cluster.record.processes:
        descriptors = Path(f"/proc/{service.pid}/fd")
        counts[service.name, "descriptors"] = len(list(descriptors.iterdir()))
    counts |= {(name, "MiB"): mib for name, mib in resident(cluster)}
    state = Path(cluster.record.state_dir)
    for folder in sorted(entry for entry in state.iterdir() if entry.is_dir()):
        counts[folder.name, "files"] = sum(1 for _ in folder.rglob("*"))
    for stream in await session.client.bus.client.jetstream().streams_info():
        counts[str(stream.config.name), "messages"] = stream.state.messages
    return counts


def grown(before: Counts, after: Counts, *, are_kept: bool) -> list[tuple[str, str]]:
    """Name what has grown by more than it may; NATS keeps its own counsel about its memory."""
    is_judged = {owner for owner, _ in after}.difference(HISTORIES, ["nats-server"])
    return [
        (owner, unit)
        for (owner, unit), count in after.items()
        if owner in is_judged
        and count - before.get((owner, unit), 0.0) > MORE[unit]
        # A kept capture is files, messages and objects, which the operator has in memory.
        and (not are_kept or (unit == "MiB" and owner != "operator"))
    ]


def table(before: Counts, after: Counts, bad: Collection[tuple[str, str]]) -> str:
    lines = [f"{'':24} {'':12} {'after 100':>10} {'at the end':>10}"]
    for (owner, unit), count in after.items():
        mark = "GREW" if (owner, unit) in bad else ""
        first = before.get((owner, unit), 0.0)
        lines.append(f"{owner:24} {unit:12} {first:10.0f} {count:10.0f} {mark}".rstrip())
    return "\n".join(lines)


async def soak(home: Path, captures: int, *, are_kept: bool) -> int:
    """Run, print and leave nothing. The exit status."""
    cluster = LiveCluster(home)
    await cluster.up(NODE)
    try:
        async with cluster.session() as session:
            await session.apply(pod(WORKER, NODE))
            await session.reaches("Pod", WORKER)
            before, began = {}, time.monotonic()
            for number in range(1, captures + 1):
                await capture(session, f"soak-{number}", is_kept=are_kept)
                if number == FIRST:
                    before = await counted(cluster, session)
                if number % FIRST == 0:
                    rate = number / (time.monotonic() - began)
                    memory = ", ".join(f"{name} {mib:.0f}" for name, mib in resident(cluster))
                    print(f"{number} of {captures}, {rate:.1f} a second; MiB: {memory}", flush=True)
            after = await counted(cluster, session)
    finally:
        left = await cluster.down()
    bad = grown(before, after, are_kept=are_kept)
    print(table(before, after, bad))
    for line in left:
        print(f"LEFT {line}")
    return 1 if left or bad else 0


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def idle(home: Path, seconds: float) -> int:
    """Print the CPU-seconds a minute of each process of an idle cluster. The exit status."""
    cluster = LiveCluster(home)
    await cluster.up(NODE, "node-1", gpus=2)
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
    print(f"{sum(used):6.2f}  CPU-seconds a minute in all (limit {CPU_LIMIT})")
    return 0 if used and sum(used) < CPU_LIMIT else 1


def main() -> int:
    parser = argparse.ArgumentParser(prog="make soak")
    parser.add_argument("--captures", type=int, default=1000)
    parser.add_argument("--idle", type=float, help="only measure an idle cluster, for so long")
    parser.add_argument("--keep", action="store_true", help="delete no capture")
    given = parser.parse_args()
    if given.captures <= FIRST:
        parser.error(f"--captures {given.captures}: take more than {FIRST}")
    with tempfile.TemporaryDirectory(prefix="soak-") as home:
        if given.idle:
            return asyncio.run(idle(Path(home), given.idle))
        return asyncio.run(soak(Path(home), given.captures, are_kept=given.keep))


if __name__ == "__main__":
    sys.exit(main())
