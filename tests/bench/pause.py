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
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from gms.domain.tasks import LOAD_THREADS
from gms.domain.transfer import CHUNK_BYTES
from snapback_client.reservation import HUGE_PAGE
from snapshot_api.v1alpha1.restore import restore_name
from snapshot_shared.files import opened
from snapshot_shared.spans import SpanRecord
from snapshotctl.adapters import worker_socket
from tests.bench import common
from tests.bench.common import MIB, Benchmark, Judged, Results, goal, spread
from tests.bench.disk import huge_pages, raw_transfer
from tests.bench.machine import huge_bytes_free, new_memory
from tests.support.live_cluster import LONG_S, LiveCluster, Session, find, pod, snapshot

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

# Rows of the page, in seconds.
PAUSE, RESTORE = "pause", "apply → first answer"
ORDERS = "of it orders and reports"
UNMAP = "to give back pages"
"""For as many bytes, as the worker does in `quiesce`. A GPU has none that a processor clears."""
SAVING = "saving after the pause"
ANSWER = "an answer at any time"
TOUCH = "to get memory and touch it"
"""A simulated device gets its memory when it is allocated; that of a GPU is there."""
READ, WRITE = "bytes ÷ read limit", "own state ÷ write limit"
"""The raw limits of the disk at that moment."""


class Worker(NamedTuple):
    """A worker that is captured again and again."""

    name: str
    size: int
    uid: str


class Bench:
    """One run in a folder of the disk that is measured."""

    def __init__(self, folder: Path, sizes: Sequence[int], found: Results) -> None:
        self.folder, self.sizes, self.found = folder, sizes, found
        self.staging = huge_pages()
        self.cluster = LiveCluster(folder)
        # The weights of every worker and of one that is restored, and one sample beside them.
        needed = sum(sizes) + 2 * max(sizes) + ROOM
        self.in_huge_pages = huge_bytes_free() >= needed
        found.facts["in_huge_pages"] = int(self.in_huge_pages)
        if self.in_huge_pages:
            self.cluster.environment["SNAPBACK_DEVICE_HUGE_PAGES"] = "1"
            # The host of a virtual machine may never have given them yet.
            with opened(new_memory(needed, in_huge_pages=True)) as fd:
                os.posix_fallocate(fd, 0, needed)

    async def run(self, rounds: int) -> None:
        try:
            room = max(self.sizes) + ROOM
            await self.cluster.up(SOURCE, TARGET, gpus=len(self.sizes), mib=room // MIB)
            async with self.cluster.session() as session:
                workers = [await self._worker(session, size) for size in self.sizes]
                for number in range(1, rounds + 1):
                    common.say(f"round {number} of {rounds}")
                    # Whoever is first finds another machine than who comes after it.
                    for worker in workers if number % 2 else reversed(workers):
                        taken = await self._turn(session, worker, number)
                        for row, seconds in taken.items():
                            self.found.add(row, f"{worker.size / MIB:g} MiB", seconds)
        finally:
            await self.cluster.down()

    async def _worker(self, session: Session, size: int) -> Worker:
        name = f"worker-{size // MIB}"
        common.say(f"starting a worker with {size // MIB} MiB")
        await session.apply(pod_with(name, SOURCE, SIZE_MIB=size // MIB))
        found = await session.reaches("Pod", name)
        return Worker(name, size, found.metadata.uid)

    async def _turn(self, session: Session, worker: Worker, number: int) -> dict[str, float]:
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
        mib = worker.size // MIB
        await session.apply(pod_with(f"{name}-restored", TARGET, name, SIZE_MIB=mib))
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
        pause_s = (pause_to - pause_from) / 1e9
        steps = {f"of it {step}": _lasted(spans, step) for step in STEPS}
        return {
            PAUSE: pause_s,
            **steps,
            ORDERS: pause_s - sum(steps.values()),
            UNMAP: _unmapping(worker.size, in_huge_pages=self.in_huge_pages),
            SAVING: (max(s.end_ns for s in spans if s.name == "write") - pause_to) / 1e9,
            WRITE: own / write_limit,
            RESTORE: restore,
            **{f"of it {step}": _lasted(later, step) for step in RESTORE_STEPS},
            ANSWER: answer,
            TOUCH: _touching(worker.size, in_huge_pages=self.in_huge_pages),
            READ: worker.size / read_limit,
        }

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


def pod_with(name: str, node: str, source: str | None = None, **environment: int) -> dict[str, Any]:
    """Give a worker with some variables of its own, cold or restored."""
    found = pod(name, node, source)
    [container] = found["spec"]["containers"]
    kept = [row for row in container["env"] if row["name"] not in environment]
    added = [{"name": key, "value": str(value)} for key, value in environment.items()]
    container["env"] = kept + added
    return found


def judged(found: Results) -> Iterator[Judged]:
    def goal_ms(of: str, what: str, value: float, most: float, *samples: Sequence[float]) -> Judged:
        shown = "{:.0f} ms"
        return goal(TITLE, of, what, value * 1e3, *samples, most=most, wanted=shown, found=shown)

    sizes = list(found.samples[PAUSE])
    for of in sizes:
        rows = {row: contenders[of] for row, contenders in found.samples.items()}
        pauses, times = rows[PAUSE], rows[RESTORE]
        over = _beyond(pauses, rows[WRITE])
        yield goal_ms(of, f"pause beyond {WRITE}", median(over), PAUSE_S * 1e3, pauses)
        reads = _beyond(times, rows[READ])
        memory = _beyond(reads, rows[TOUCH])
        for what, over in (
            (f"{RESTORE} beyond {READ}", reads),
            ("the same beyond new memory", memory),
            ("the same beyond what one answer takes, too", _beyond(memory, rows[ANSWER])),
        ):
            yield goal_ms(of, what, median(over), RESTORE_S * 1e3, times)
    if len(sizes) == 1:
        return
    few, many = (found.samples[PAUSE][size] for size in (sizes[0], sizes[-1]))
    unmaps = found.samples[UNMAP]
    apart = median(many) - median(few)
    noise = max(spread(each) * median(each) for each in (few, many)) * 1e3
    of, what = f"{sizes[0]} and {sizes[-1]}", "how much longer the pause is"
    longer = goal_ms(of, what, apart, noise)
    times_longer = f"{longer.found} ({median(many) / median(few):.2f} x)"
    beyond = apart - median(unmaps[sizes[-1]]) + median(unmaps[sizes[0]])
    pages = goal_ms(of, "the same beyond giving back pages", beyond, noise)
    for line in (longer._replace(found=times_longer), pages):
        yield line._replace(wanted=f"{line.wanted} (noise)")


def _beyond(samples: Sequence[float], limits: Sequence[float]) -> list[float]:
    return [taken - limit for taken, limit in zip(samples, limits, strict=True)]


def lines(found: Results) -> Iterator[str]:
    yield (
        f"Written by `make bench-pause`: {found.rounds} rounds in a local cluster, sizes in turn.\n"
        "The pause is from the step `quiesce` to the end of the step `signal`, in the spans\n"
        "of the capture; the worker goes on while its weights are written. A restore is from\n"
        "`apply` to the first answer, on another node, with no file in the page cache.\n"
        + (
            "Medians. The simulated devices are in huge pages that the host has set aside\n"
            "(`vm.nr_hugepages`): like those of a GPU they are there before they are asked for.\n"
            if found.facts["in_huge_pages"]
            else "Medians. A simulated device is in pages of 4 KiB: a worker gives them back when\n"
            "it becomes quiet, and gets its memory from the host when it is allocated; a GPU does\n"
            "neither, nor does a device in huge pages (`vm.nr_hugepages`: not enough here).\n"
        )
        + "The machine:\n"
    )
    yield from common.listed(found.machine)
    yield from common.goal_table(judged(found), "weights", "what")
    head = ("ms (median, slowest … fastest)", *found.samples[PAUSE])
    cell = partial(common.cell, shown="{:.0f}", scale=1e3, slowest_first=True)
    yield from common.table(
        head, ((row, *map(cell, each.values())) for row, each in found.samples.items())
    )


async def measure(options: argparse.Namespace, folder: Path) -> Results:
    sizes = sorted({size * MIB for size in options.size_mib})
    with common.measuring(folder) as found:
        await Bench(folder, sizes, found).run(options.rounds)
    return found


NUMBERS: common.Numbers = {"size-mib": ([64, 512], 4, ""), "rounds": (5, 1, "")}
BENCH = Benchmark("pause", TITLE, __doc__, NUMBERS, measure, lines, judged)

if __name__ == "__main__":
    common.run(BENCH.main)
