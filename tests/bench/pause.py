"""How long a worker pauses for a capture, and how soon a restored one answers, by size of weights.

`python -m tests.bench.pause --size-mib 256 4096` starts a local cluster, with a worker of each size
that goes on after its captures, and takes turns between them. The status is 1 when a goal is
missed, and 2 when a request makes no sense.
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import json
import mmap
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import msgspec

from gms.domain.tasks import LOAD_THREADS
from gms.domain.transfer import CHUNK_BYTES
from snapback_client.reservation import HUGE_PAGE
from snapshot_shared.files import opened
from snapshot_shared.objects.snapback import restore_name
from snapshot_shared.spans import SpanRecord
from snapshotctl.adapters import worker_socket
from tests.bench import common
from tests.bench.common import MIB, Benchmark, Judged, goal, spread
from tests.bench.disk import huge_pages, raw_transfer
from tests.bench.machine import describe, huge_bytes_free, new_memory
from tests.support.live_cluster import LONG_S, LiveCluster, Session, find, pod, snapshot, worker_pod

SOURCE, TARGET = "source", "target"
PAUSE_S = 0.15
"""The goal for the pause, beside what the worker's own state takes to write."""
RESTORE_S = 0.5
"""The goal for a restore, beside what its bytes take to read."""
TITLE = "The worker's pause, and restores"
STEPS = ("quiesce", "fence", "facts", "freeze", "copy-state", "thaw", "stage", "signal")
"""What the pause consists of, and between these the ways of orders and reports."""
RESTORE_STEPS = ("spawn", "read", "publish", "fill-state", "await-restored")
"""What a restore consists of; the worker starts while its weights are read."""
ROOM = 64 * MIB
"""What a device has beside the weights."""


class Turn(msgspec.Struct, frozen=True, kw_only=True):
    """One capture and one restore, in seconds, and the raw limits of that moment in bytes/s."""

    pause: float
    steps: dict[str, float]
    saving: float
    """What was still to do on the weights when the worker went on."""
    own_bytes: int
    restore: float
    answer: float
    """What a worker of this size takes for an answer at any time."""
    restore_steps: dict[str, float]
    unmap: float
    """What a process takes to give back pages for so many bytes, as the worker does in `quiesce`.

    A GPU has no pages that a processor gives back.
    """
    touch: float
    """What it takes to get so many bytes of memory from the host, and to touch them.

    A simulated device gets its memory when it is allocated; that of a GPU is there.
    """
    read_limit: float
    write_limit: float


class Results(msgspec.Struct, frozen=True, kw_only=True):
    """All turns, by the bytes of the weights."""

    machine: dict[str, str]
    in_huge_pages: bool = False
    """Whether the memory of the devices is in huge pages that the host has set aside."""
    turns: dict[int, list[Turn]]


class Worker(NamedTuple):
    """A worker that is captured again and again."""

    name: str
    size: int
    uid: str


class Bench:
    """One run in a folder of the disk that is measured."""

    def __init__(self, folder: Path, sizes: Sequence[int], rounds: int) -> None:
        self.folder, self.sizes, self.rounds = folder, sizes, rounds
        self.staging = huge_pages()
        self.cluster = LiveCluster(folder)
        # The weights of every worker and of one that is restored, and one sample beside them.
        needed = sum(sizes) + 2 * max(sizes) + ROOM
        self.in_huge_pages = huge_bytes_free() >= needed
        if self.in_huge_pages:
            self.cluster.environment["SNAPBACK_DEVICE_HUGE_PAGES"] = "1"
            # The host of a virtual machine may never have given them yet.
            with opened(new_memory(needed, in_huge_pages=True)) as fd:
                os.posix_fallocate(fd, 0, needed)

    async def run(self) -> Results:
        """Measure everything."""
        machine = describe(self.folder)
        turns: dict[int, list[Turn]] = {size: [] for size in self.sizes}
        try:
            room = max(self.sizes) + ROOM
            await self.cluster.up(SOURCE, TARGET, gpus=len(self.sizes), mib=room // MIB)
            async with self.cluster.session() as session:
                workers = [await self._worker(session, size) for size in self.sizes]
                for number in range(1, self.rounds + 1):
                    common.say(f"round {number} of {self.rounds}")
                    # Whoever is first finds another machine than who comes after it.
                    for worker in workers if number % 2 else reversed(workers):
                        turns[worker.size].append(await self._turn(session, worker, number))
        finally:
            await self.cluster.down()
        machine["load average at the end"] = f"{os.getloadavg()[0]:.1f}"
        return Results(machine=machine, in_huge_pages=self.in_huge_pages, turns=turns)

    async def _worker(self, session: Session, size: int) -> Worker:
        name = f"worker-{size // MIB}"
        common.say(f"starting a worker with {size // MIB} MiB")
        await session.apply(_pod(name, SOURCE, size))
        found = await session.reaches("Pod", name)
        return Worker(name, size, found.metadata.uid)

    async def _turn(self, session: Session, worker: Worker, number: int) -> Turn:
        name = f"{worker.name}-{number}"
        answer = await self._answered(SOURCE, worker.uid)
        write_limit, read_limit = self._limits(worker.size)
        await session.apply(snapshot(name, worker.name, "Resume"))
        made = await session.reaches("Snapshot", name)
        bound = made.status.bound_snapshot_content_name
        content = find(await session.objects(), "SnapshotContent", bound)
        spans = await _spans(session, content.status.traceparent, {*STEPS, "write", "write-root"})
        self.cluster.drop_cache()
        begin = time.monotonic()
        await session.apply(_pod(f"{name}-restored", TARGET, worker.size, name))
        restored = await session.reaches("Pod", f"{name}-restored", lambda _: True)
        await self._answered(TARGET, restored.metadata.uid)
        restore = time.monotonic() - begin
        restored = await session.reaches("Pod", f"{name}-restored")
        name_of_restore = restore_name(restored.metadata.uid)
        made = find(await session.objects(), "SnapshotRestore", name_of_restore)
        later = await _spans(session, made.status.traceparent, set(RESTORE_STEPS))
        # The next save would share an artifact that is there.
        await session.remove("Pod", f"{name}-restored")
        await session.remove("Snapshot", name)
        own = sum(part.bytes for part in content.status.committed.parts if part.part == "process")
        pause_from, pause_to = pause(spans)
        return Turn(
            pause=(pause_to - pause_from) / 1e9,
            steps={step: _lasted(spans, step) for step in STEPS},
            saving=(max(s.end_ns for s in spans if s.name == "write") - pause_to) / 1e9,
            own_bytes=own,
            restore=restore,
            answer=answer,
            restore_steps={step: _lasted(later, step) for step in RESTORE_STEPS},
            unmap=_unmapping(worker.size, in_huge_pages=self.in_huge_pages),
            touch=_touching(worker.size, in_huge_pages=self.in_huge_pages),
            read_limit=read_limit,
            write_limit=write_limit,
        )

    async def _answered(self, node: str, uid: str) -> float:
        """Wait until a worker serves; give what one answer takes once it listens."""
        sockets = Path(self.cluster.record.socket_dir) / node
        conversation = await asyncio.wait_for(worker_socket.connect(sockets, uid), LONG_S)
        begin = time.monotonic()
        line = await conversation.ask("Who is there?")
        taken = time.monotonic() - begin
        await conversation.close()
        if b"error" in line:
            raise RuntimeError(f"a worker on {node} cannot answer: {json.loads(line)}")
        return taken

    def _limits(self, size: int) -> tuple[float, float]:
        """Give the raw limits of writing and reading in bytes a second, past the page cache."""
        path, speeds = self.folder / "raw", []
        for call in (os.pwritev, os.preadv):
            begin = time.monotonic()
            raw_transfer(path, [self.staging], size, call)
            speeds.append(size / (time.monotonic() - begin))
        path.unlink()
        return speeds[0], speeds[1]


def pause(spans: Sequence[SpanRecord]) -> tuple[int, int]:
    """Give when the worker is asked to be quiet, and when it is let go, in nanoseconds."""
    (quiesce,) = [span for span in spans if span.name == "quiesce"]
    (signal,) = [span for span in spans if span.name == "signal"]
    return quiesce.start_ns, signal.end_ns


def _lasted(spans: Sequence[SpanRecord], name: str) -> float:
    """Give the seconds of the longest span of a name: devices are worked on side by side."""
    return max(span.end_ns - span.start_ns for span in spans if span.name == name) / 1e9


def _unmapping(size: int, *, in_huge_pages: bool) -> float:
    with opened(new_memory(size, in_huge_pages=in_huge_pages)) as fd:
        os.posix_fallocate(fd, 0, size)
        pages = mmap.mmap(fd, size, prot=mmap.PROT_READ)
        for at in range(0, size, mmap.PAGESIZE):
            pages[at]
        begin = time.monotonic()
        pages.close()
        return time.monotonic() - begin


def _touching(size: int, *, in_huge_pages: bool) -> float:
    """Touch every page with the threads of a load."""
    # Nothing more of a huge page than is needed to have it cleared.
    step, touched = (HUGE_PAGE, 1) if in_huge_pages else (CHUNK_BYTES, CHUNK_BYTES)
    with (
        opened(new_memory(size, in_huge_pages=in_huge_pages)) as fd,
        ThreadPoolExecutor(LOAD_THREADS) as pool,
    ):
        begin = time.monotonic()
        with mmap.mmap(fd, size) as pages:
            view = (ctypes.c_ubyte * size).from_buffer(pages)
            at = ctypes.addressof(view)

            def touch(start: int) -> None:
                ctypes.memset(at + start, 1, min(touched, size - start))

            list(pool.map(touch, range(0, size, step)))
            del view
        return time.monotonic() - begin


async def _spans(session: Session, traceparent: str, wanted: set[str]) -> list[SpanRecord]:
    """Wait for a trace until it has all spans of these names."""
    trace = traceparent.split("-")[1]
    async with asyncio.timeout(LONG_S), session.client.spans_arriving(trace) as changes:
        while True:
            spans = await session.client.spans(trace)
            if wanted <= {span.name for span in spans}:
                return spans
            await changes.wait()


def _pod(name: str, node: str, size: int, source: str | None = None) -> dict[str, Any]:
    found = pod(name, node, source)
    found["spec"] = worker_pod(node)
    for value in found["spec"]["containers"][0]["env"]:
        if value["name"] == "SIZE_MIB":
            value["value"] = str(size // MIB)
    return found


def judged(results: Results) -> Iterator[Judged]:
    """Compare with every goal. A missed one is inconclusive if the machine is too noisy."""
    ms = {"wanted": "{:.0f} ms", "found": "{:.0f} ms"}
    for size, turns in results.turns.items():
        of, pauses, times = (
            f"{size / MIB:g} MiB",
            [t.pause for t in turns],
            [t.restore for t in turns],
        )
        over = median(t.pause - t.own_bytes / t.write_limit for t in turns)
        what = "pause beyond own state ÷ write limit"
        yield goal(TITLE, of, what, over * 1000, pauses, most=PAUSE_S * 1000, **ms)
        reads = [t.restore - size / t.read_limit for t in turns]
        memory = [over - t.touch for over, t in zip(reads, turns, strict=True)]
        answers = [over - t.answer for over, t in zip(memory, turns, strict=True)]
        for what, found in {
            "apply → first answer beyond bytes ÷ read limit": reads,
            "the same beyond new memory": memory,
            "the same beyond what one answer takes, too": answers,
        }.items():
            yield goal(TITLE, of, what, median(found) * 1000, times, most=RESTORE_S * 1000, **ms)
    small, large = min(results.turns), max(results.turns)
    if small == large:
        return
    few, many = ([turn.pause for turn in results.turns[size]] for size in (small, large))
    apart = median(many) - median(few)
    noise = max(spread(each) * median(each) for each in (few, many)) * 1000
    pages = median(t.unmap for t in results.turns[large]) - median(
        t.unmap for t in results.turns[small]
    )
    of, wanted = f"{small / MIB:g} and {large / MIB:g} MiB", "{:.0f} ms (noise)"
    shown = f"{{:.0f}} ms ({median(many) / median(few):.2f} x)"
    what = "how much longer the pause is"
    yield goal(TITLE, of, what, apart * 1000, most=noise, wanted=wanted, found=shown)
    what, beyond = "the same beyond giving back pages", (apart - pages) * 1000
    yield goal(TITLE, of, what, beyond, most=noise, wanted=wanted, found="{:.0f} ms")


def _lines(results: Results) -> Iterator[str]:
    rounds = max(map(len, results.turns.values()))
    yield f"## {TITLE}\n"
    yield (
        f"Written by `make bench-pause`: {rounds} rounds in a local cluster, sizes in turn.\n"
        "The pause is from the step `quiesce` to the end of the step `signal`, in the spans\n"
        "of the capture; the worker goes on while its weights are written. A restore is from\n"
        "`apply` to the first answer, on another node, with no file in the page cache.\n"
        + (
            "Medians. The simulated devices are in huge pages that the host has set aside\n"
            "(`vm.nr_hugepages`): like those of a GPU they are there before they are asked for.\n"
            if results.in_huge_pages
            else "Medians. A simulated device is in pages of 4 KiB: a worker gives them back when\n"
            "it becomes quiet, and gets its memory from the host when it is allocated; a GPU does\n"
            "neither, nor does a device in huge pages (`vm.nr_hugepages`: not enough here).\n"
        )
        + "The machine:\n"
    )
    yield from common.listed(results.machine)
    yield from common.goal_table(judged(results), "weights", "what")
    steps = {f"of it {name}": partial(_step, "steps", name) for name in STEPS}
    later = {f"of it {name}": partial(_step, "restore_steps", name) for name in RESTORE_STEPS}
    rows: dict[str, Callable[[int, Turn], float]] = {
        "pause": lambda _, t: t.pause,
        **steps,
        "of it orders and reports": lambda _, t: t.pause - sum(t.steps.values()),
        "to give back pages": lambda _, t: t.unmap,
        "saving after the pause": lambda _, t: t.saving,
        "apply → first answer": lambda _, t: t.restore,
        **later,
        "an answer at any time": lambda _, t: t.answer,
        "to get memory and touch it": lambda _, t: t.touch,
        "bytes ÷ read limit": lambda size, t: size / t.read_limit,
    }

    def cells(of: Callable[[int, Turn], float]) -> Iterator[str]:
        for size, turns in results.turns.items():
            samples = [of(size, turn) for turn in turns]
            yield common.cell(samples, "{:.0f}", 1e3, slowest_first=True)

    head = ("ms (median, slowest … fastest)", *(f"{s / MIB:g} MiB" for s in results.turns))
    yield from common.table(head, ((name, *cells(of)) for name, of in rows.items()))


def _step(table: str, name: str, _size: int, turn: Turn) -> float:
    return float(getattr(turn, table)[name])


def _measured(options: argparse.Namespace, folder: Path) -> Results:
    sizes = sorted({size * MIB for size in options.size_mib})
    return asyncio.run(Bench(folder, sizes, options.rounds).run())


BENCH = Benchmark(
    "pause",
    __doc__,
    {"size-mib": ([64, 512], 4, ""), "rounds": (5, 1, "")},
    _measured,
    _lines,
    judged,
)

if __name__ == "__main__":
    common.run(BENCH.main)
