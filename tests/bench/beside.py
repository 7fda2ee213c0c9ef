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
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import median
from typing import Any

import msgspec

from snapshot_shared.objects.meta import OrderStatus
from snapshot_shared.objects.snapback import SnapshotRestore, restore_name
from tests.bench import output
from tests.bench.machine import describe
from tests.bench.pause import ROOM, SOURCE, TARGET, is_ready, until
from tests.bench.results import NOISE, Judged, Verdict, spread
from tests.support.live_cluster import ROOT, LiveCluster, Session, find, pod, worker_pod

MIB = 2**20
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
                    output.say(f"round {number + 1} of {self.rounds}")
                    for name in names[number % 3 :] + names[: number % 3]:
                        turns[name].append(await self._turn(session, name))
        finally:
            await self.cluster.down()
        machine["load average at the end"] = f"{os.getloadavg()[0]:.1f}"
        return Results(
            machine=machine, weights=self.weights * MIB, heap=self.heap * MIB, turns=turns
        )

    async def _capture(self, session: Session, name: str) -> None:
        output.say(f"capturing the worker {name}")
        await session.apply(self._pod(name, SOURCE))
        await until(session, "Pod", name, is_ready)
        spec = {"source": {"podRef": {"name": name}}, "sourcePolicy": "Terminate", "driver": "criu"}
        kind = {"apiVersion": "nvidia.com/v1alpha1", "kind": "Snapshot"}
        await session.apply({**kind, "metadata": {"name": name}, "spec": spec})
        await until(session, "Snapshot", name, is_ready)

    async def _turn(self, session: Session, name: str) -> Turn:
        self.cluster.drop_cache()
        again = f"{name}-restored"
        await session.apply(self._pod(again, TARGET, name))
        restored = await until(session, "Pod", again, is_ready)
        made = find(await session.objects(), "SnapshotRestore", restore_name(restored.metadata.uid))
        await session.delete("Pod", again)
        await session.until(lambda values: find(values, "Pod", again) is None, f"{again} is gone")
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


def judged(results: Results) -> Judged:
    """Compare with the goal. What a noisy machine may have brought about is inconclusive."""
    totals = {name: [turn.total for turn in turns] for name, turns in results.turns.items()}
    longer = max((WEIGHTS, HEAP), key=lambda name: median(totals[name]))
    found = median(totals[BOTH]) / median(totals[longer])
    verdict: Verdict = "met" if found <= GOAL else "missed"
    if verdict == "missed" and max(map(spread, totals.values())) > NOISE:
        verdict = "inconclusive"
    of = f"{results.weights / MIB:g} MiB of weights, {results.heap / MIB:g} MiB of heap"
    what = f"both together against the longer of them ({longer})"
    return Judged(TITLE, of, what, f"≤ {GOAL:g} x", f"{found:.2f} x", verdict)


def section(results: Results) -> str:
    """Write the section of the page about a run, in Markdown."""
    return "\n".join(_lines(results)) + "\n"


def _lines(results: Results) -> Iterator[str]:
    rounds = max(map(len, results.turns.values()))
    yield f"## {TITLE}\n"
    yield (
        f"Written by `make bench-beside`: {rounds} rounds in a local cluster, workers in turn,\n"
        "with no file in the page cache. From the first order of a restore by CRIU to the last\n"
        "answer: GMS loads the weights while CRIU brings the process back. Both read the same\n"
        "disk and use the same processors here. The machine:\n"
    )
    yield from (f"- {key}: {value}" for key, value in results.machine.items())
    line = judged(results)
    yield "\n| worker | what | goal | found | |\n|---|---|---|---|---|"
    yield f"| {line.row} | {line.what} | {line.wanted} | {line.found} | {line.verdict} |"
    yield "\n| s (median, slowest … fastest) | load | place | restore | in all |"
    yield "|---|---|---|---|---|"
    for name, turns in results.turns.items():
        cells = [_cell([turn.verbs.get(verb, 0.0) for turn in turns]) for verb in _VERBS]
        yield f"| {name} | {' | '.join(cells)} | {_cell([turn.total for turn in turns])} |"


_VERBS = ("load", "place", "restore")


def _cell(samples: list[float]) -> str:
    low, middle, high = (f(samples) for f in (min, median, max))
    return f"{middle:.2f} ({high:.2f} … {low:.2f})" if high else "-"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.beside", description=__doc__)
    parser.add_argument("--weights-mib", type=int, default=1024)
    parser.add_argument("--heap-mib", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, default=Path(), help="on the disk to measure (here)")
    parser.add_argument("--json", type=Path, help="where to write what was found")
    parser.add_argument("--page", type=Path, help="the page with a section about it")
    arguments = parser.parse_args()
    least: Mapping[str, int] = {"weights_mib": LEAST_MIB, "heap_mib": 1, "rounds": 1}
    for name, at_least in least.items():
        if (found := getattr(arguments, name)) < at_least:
            parser.error(f"--{name.replace('_', '-')} is {found}, and {at_least} is the least")
    if not arguments.folder.is_dir():
        parser.error(f"--folder {arguments.folder}: there is no such folder")
    with tempfile.TemporaryDirectory(prefix=".bench-", dir=arguments.folder.resolve()) as folder:
        bench = Bench(Path(folder), arguments.weights_mib, arguments.heap_mib, arguments.rounds)
        results = asyncio.run(bench.run())
    text = section(results)
    output.write(arguments.json, arguments.page, results, text)
    print(text)
    return 1 if judged(results).verdict == "missed" else 0


if __name__ == "__main__":
    output.run(main)
