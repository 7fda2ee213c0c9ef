"""How long a restore by CRIU takes that loads weights as well, beside one that does only either.

`python -m tests.bench.beside --weights-mib 1024 --heap-mib 512` starts a local cluster with three
workers (one has the weights, one the heap, one both), captures them, and restores them in turns
with no file in the page cache. It needs root, and CRIU of `make criu init`. The status is 1 when
the goal is missed, and 2 when a request makes no sense.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

from snapshot_api.meta import OrderStatus
from snapshot_api.v1alpha1.restore import SnapshotRestore, restore_name
from tests.bench import common
from tests.bench.common import MIB, ROOT, Benchmark, Judged, Results, goal
from tests.bench.pause import ROOM, SOURCE, TARGET, pod_with
from tests.support.live_cluster import LiveCluster, Session, find, snapshot

TITLE = "Weights beside the process"
GOAL = 1.1
"""A restore of both may take this many times as long as the longer of its parts does alone."""
LEAST_MIB = 4
WEIGHTS, HEAP, BOTH = "weights", "process", "both"
IN_ALL = "in all"
ROWS = ("load", "place", "restore", IN_ALL)
"""The verbs of a restore, and the whole."""
_HELD = """
import os, runpy, sys
held = [os.urandom(1 << 20) for _ in range(int(os.environ["HEAP_MIB"]))]
sys.argv = ["worker.py"]
runpy.run_path("deploy/examples/worker.py", run_name="__main__")
"""


class Bench:
    """One run in a folder of the disk that is measured."""

    def __init__(self, folder: Path, weights: int, heap: int) -> None:
        self.workers = {WEIGHTS: (weights, 0), HEAP: (LEAST_MIB, heap), BOTH: (weights, heap)}
        self.cluster = LiveCluster(folder, tools=ROOT / ".tools")

    async def run(self, rounds: int, found: Results) -> None:
        names = list(self.workers)
        try:
            room = self.workers[BOTH][0] + ROOM // MIB
            await self.cluster.up(SOURCE, TARGET, gpus=len(names), mib=room)
            async with self.cluster.session() as session:
                for name in names:
                    await self._capture(session, name)
                for number in range(rounds):
                    common.say(f"round {number + 1} of {rounds}")
                    for name in common.rotated(names, number % 3, 3):
                        restored = await self._restored(session, name)
                        for row, taken in taken_by(restored).items():
                            found.add(row, name, taken)
        finally:
            await self.cluster.down()

    async def _capture(self, session: Session, name: str) -> None:
        common.say(f"capturing the worker {name}")
        await session.apply(self._pod(name, SOURCE))
        await session.reaches("Pod", name)
        await session.apply(snapshot(name, name, "Terminate", driver="criu"))
        await session.reaches("Snapshot", name)

    async def _restored(self, session: Session, name: str) -> SnapshotRestore:
        self.cluster.drop_cache()
        again = f"{name}-restored"
        await session.apply(self._pod(again, TARGET, name))
        restored = await session.reaches("Pod", again)
        restore = restore_name(restored.metadata.uid)
        made: SnapshotRestore = find(await session.objects(), "SnapshotRestore", restore)
        await session.remove("Pod", again)
        return made

    def _pod(self, name: str, node: str, source: str | None = None) -> dict[str, Any]:
        weights, heap = self.workers[source or name]
        found = pod_with(name, node, source, SIZE_MIB=weights, HEAP_MIB=heap)
        if source is None:
            found["metadata"]["annotations"]["nvidia.com/capture-driver"] = "criu"
        [container] = found["spec"]["containers"]
        container["command"] = ["python3", "-c", _HELD]
        return found


def taken_by(restore: SnapshotRestore) -> dict[str, float]:
    """Return how long a restore took from its first order on, and each of its verbs."""
    orders = restore.status.orders
    begin = min(order.ordered_at for order in orders)
    whole = max(_end(order) for order in orders) - begin.timestamp()
    verbs = {order.verb: _end(order) - order.ordered_at.timestamp() for order in orders}
    return {IN_ALL: whole, **verbs}


def _end(order: OrderStatus) -> float:
    if order.ended_at is None:
        raise RuntimeError(f"{order.order} was not answered")
    return order.ended_at.timestamp()


def judged(found: Results) -> list[Judged]:
    totals = found.samples[IN_ALL]
    longer = max((WEIGHTS, HEAP), key=lambda name: median(totals[name]))
    ratio = median(totals[BOTH]) / median(totals[longer])
    weights, heap = (found.facts[name] / MIB for name in ("weights", "heap"))
    of = f"{weights:g} MiB of weights, {heap:g} MiB of heap"
    what = f"both together against the longer of them ({longer})"
    return [goal(TITLE, of, what, ratio, *totals.values(), most=GOAL)]


def lines(found: Results) -> Iterator[str]:
    yield (
        f"Written by `make bench-beside`: {found.rounds} rounds in a local cluster, workers in\n"
        "turn, with no file in the page cache. From the first order of a restore by CRIU to the\n"
        "last answer: GMS loads the weights while CRIU brings the process back. Both read the\n"
        "same disk and use the same processors here. The machine:\n"
    )
    yield from common.listed(found.machine)
    yield from common.goal_table(judged(found), "worker", "what")
    head = ("s (median, slowest … fastest)", *ROWS)
    yield from common.table(head, ((name, *_cells(found, name)) for name in (WEIGHTS, HEAP, BOTH)))


def _cells(found: Results, name: str) -> Iterator[str]:
    for row in ROWS:
        samples = found.samples.get(row, {}).get(name)
        yield common.cell(samples, "{:.2f}", slowest_first=True) if samples else "-"


async def measure(options: argparse.Namespace, folder: Path) -> Results:
    weights, heap = options.weights_mib, options.heap_mib
    with common.measuring(folder, weights=weights * MIB, heap=heap * MIB) as found:
        await Bench(folder, weights, heap).run(options.rounds, found)
    return found


NUMBERS = {"weights-mib": (1024, LEAST_MIB, ""), "heap-mib": (512, 1, ""), "rounds": (5, 1, "")}
BENCH = Benchmark("beside", TITLE, __doc__, NUMBERS, measure, lines, judged)

if __name__ == "__main__":
    common.run(BENCH.main)
