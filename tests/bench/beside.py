"""How long a restore by CRIU takes that loads weights as well, beside one that does only either.

`python -m tests.bench.beside --weights-mib 1024 --heap-mib 512` starts a local cluster with three
workers (one has the weights, one the heap, one both), captures them, and restores them in turns
with no file in the page cache. It needs root, and CRIU of `make criu init`. The status is 1 when
the goal is missed, and 2 when a request makes no sense.
"""

from __future__ import annotations

import argparse
import asyncio
import os
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import msgspec

from snapshot_shared.objects.meta import OrderStatus
from snapshot_shared.objects.snapback import SnapshotRestore, restore_name
from tests.bench import common
from tests.bench.common import MIB, ROOT, Benchmark, Judged, goal
from tests.bench.machine import describe
from tests.bench.pause import ROOM, SOURCE, TARGET
from tests.support.live_cluster import LiveCluster, Session, find, pod, snapshot, worker_pod

TITLE = "Weights beside the process"
GOAL = 1.1
"""A restore of both may take this many times as long as the longer of its parts does alone."""
LEAST_MIB = 4
WEIGHTS, HEAP, BOTH = "weights", "process", "both"
_HELD = """
import os, runpy, sys
held = [os.urandom(1 << 20) for _ in range(int(os.environ["HEAP_MIB"]))]
sys.argv = ["worker.py"]
runpy.run_path("deploy/examples/worker.py", run_name="__main__")
"""


class Turn(msgspec.Struct, frozen=True, kw_only=True):
    """One restore, in seconds: from its first order on, and what each verb took of it."""

    total: float
    verbs: dict[str, float]


class Results(msgspec.Struct, frozen=True, kw_only=True):
    """All turns, by what the worker has; sizes in bytes."""

    machine: dict[str, str]
    weights: int
    heap: int
    turns: dict[str, list[Turn]]


class Bench:
    """One run in a folder of the disk that is measured."""

    def __init__(self, folder: Path, weights: int, heap: int, rounds: int) -> None:
        self.folder, self.rounds = folder, rounds
        self.weights, self.heap = weights, heap
        self.workers = {WEIGHTS: (weights, 0), HEAP: (LEAST_MIB, heap), BOTH: (weights, heap)}
        self.cluster = LiveCluster(folder, tools=ROOT / ".tools")

    async def run(self) -> Results:
        """Measure everything."""
        machine = describe(self.folder)
        turns: dict[str, list[Turn]] = {name: [] for name in self.workers}
        names = list(self.workers)
        try:
            room = self.weights + ROOM // MIB
            await self.cluster.up(SOURCE, TARGET, gpus=len(names), mib=room)
            async with self.cluster.session() as session:
                for name in names:
                    await self._capture(session, name)
                for number in range(self.rounds):
                    common.say(f"round {number + 1} of {self.rounds}")
                    for name in common.rotated(names, number % 3, 3):
                        turns[name].append(await self._turn(session, name))
        finally:
            await self.cluster.down()
        machine["load average at the end"] = f"{os.getloadavg()[0]:.1f}"
        return Results(
            machine=machine, weights=self.weights * MIB, heap=self.heap * MIB, turns=turns
        )

    async def _capture(self, session: Session, name: str) -> None:
        common.say(f"capturing the worker {name}")
        await session.apply(self._pod(name, SOURCE))
        await session.reaches("Pod", name)
        await session.apply(snapshot(name, name, "Terminate", driver="criu"))
        await session.reaches("Snapshot", name)

    async def _turn(self, session: Session, name: str) -> Turn:
        self.cluster.drop_cache()
        again = f"{name}-restored"
        await session.apply(self._pod(again, TARGET, name))
        restored = await session.reaches("Pod", again)
        made = find(await session.objects(), "SnapshotRestore", restore_name(restored.metadata.uid))
        await session.remove("Pod", again)
        return turn_of(made)

    def _pod(self, name: str, node: str, source: str | None = None) -> dict[str, Any]:
        weights, heap = self.workers[source or name]
        found = pod(name, node, source)
        if source is None:
            found["metadata"]["annotations"]["nvidia.com/capture-driver"] = "criu"
        found["spec"] = worker_pod(node)
        [container] = found["spec"]["containers"]
        container["command"] = ["python3", "-c", _HELD]
        given = {"SIZE_MIB": str(weights), "HEAP_MIB": str(heap)}
        kept = [row for row in container["env"] if row["name"] not in given]
        added = [{"name": each, "value": value} for each, value in given.items()]
        container["env"] = kept + added
        return found


def turn_of(restore: SnapshotRestore) -> Turn:
    """Return how long the orders of a restore took."""
    orders = restore.status.orders
    begin = min(order.ordered_at for order in orders)
    return Turn(
        total=max(_end(order) for order in orders) - begin.timestamp(),
        verbs={order.verb: _end(order) - order.ordered_at.timestamp() for order in orders},
    )


def _end(order: OrderStatus) -> float:
    if order.ended_at is None:
        raise RuntimeError(f"{order.order} was not answered")
    return order.ended_at.timestamp()


def judged(results: Results) -> list[Judged]:
    """Compare with the goal. What a noisy machine may have brought about is inconclusive."""
    totals = {name: [turn.total for turn in turns] for name, turns in results.turns.items()}
    longer = max((WEIGHTS, HEAP), key=lambda name: median(totals[name]))
    ratio = median(totals[BOTH]) / median(totals[longer])
    of = f"{results.weights / MIB:g} MiB of weights, {results.heap / MIB:g} MiB of heap"
    what = f"both together against the longer of them ({longer})"
    return [goal(TITLE, of, what, ratio, *totals.values(), most=GOAL)]


def _lines(results: Results) -> Iterator[str]:
    rounds = max(map(len, results.turns.values()))
    yield f"## {TITLE}\n"
    yield (
        f"Written by `make bench-beside`: {rounds} rounds in a local cluster, workers in turn,\n"
        "with no file in the page cache. From the first order of a restore by CRIU to the last\n"
        "answer: GMS loads the weights while CRIU brings the process back. Both read the same\n"
        "disk and use the same processors here. The machine:\n"
    )
    yield from common.listed(results.machine)
    yield from common.goal_table(judged(results), "worker", "what")
    rows = []
    for name, turns in results.turns.items():
        cells = [_cell([turn.verbs.get(verb, 0.0) for turn in turns]) for verb in _VERBS]
        rows.append((name, *cells, _cell([turn.total for turn in turns])))
    yield from common.table(("s (median, slowest … fastest)", *_VERBS, "in all"), rows)


_VERBS = ("load", "place", "restore")


def _cell(samples: list[float]) -> str:
    return common.cell(samples, "{:.2f}", slowest_first=True) if max(samples) else "-"


def _measured(options: argparse.Namespace, folder: Path) -> Results:
    bench = Bench(folder, options.weights_mib, options.heap_mib, options.rounds)
    return asyncio.run(bench.run())


NUMBERS = {"weights-mib": (1024, LEAST_MIB, ""), "heap-mib": (512, 1, ""), "rounds": (5, 1, "")}
BENCH = Benchmark("beside", __doc__, NUMBERS, _measured, _lines, judged)

if __name__ == "__main__":
    common.run(BENCH.main)
