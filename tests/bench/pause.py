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
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import msgspec

from gms.domain.tasks import LOAD_THREADS
from gms.domain.transfer import CHUNK_BYTES
from snapback_client.reservation import HUGE_PAGE
from snapshot_shared.files import opened
from snapshot_shared.objects.kinds import AnyObject
from snapshot_shared.objects.kubernetes import Pod
from snapshot_shared.objects.meta import is_true
from snapshot_shared.objects.snapback import restore_name
from snapshot_shared.spans import SpanRecord
from snapshotctl.adapters import worker_socket
from tests.bench import output
from tests.bench.disk import huge_pages, raw_transfer
from tests.bench.machine import describe, huge_bytes_free, new_memory
from tests.bench.results import NOISE, Judged, Verdict, spread
from tests.support.live_cluster import LiveCluster, Session, find, pod, worker_pod

MIB = 2**20
SOURCE, TARGET = "source", "target"
PAUSE_S = 0.15
"""The goal for the pause, beside what the worker's own state takes to write."""
RESTORE_S = 0.5
"""The goal for a restore, beside what its bytes take to read."""
WAIT_S = 900.0
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
                    output.say(f"round {number} of {self.rounds}")
                    # Whoever is first finds another machine than who comes after it.
                    for worker in workers if number % 2 else reversed(workers):
                        turns[worker.size].append(await self._turn(session, worker, number))
        finally:
            await self.cluster.down()
        machine["load average at the end"] = f"{os.getloadavg()[0]:.1f}"
        return Results(machine=machine, in_huge_pages=self.in_huge_pages, turns=turns)

    async def _worker(self, session: Session, size: int) -> Worker:
        name = f"worker-{size // MIB}"
        output.say(f"starting a worker with {size // MIB} MiB")
        await session.apply(_pod(name, SOURCE, size))
        await until(session, "Pod", name, is_ready)
        found = find(await session.objects(), "Pod", name)
        return Worker(name, size, found.metadata.uid)

    async def _turn(self, session: Session, worker: Worker, number: int) -> Turn:
        name = f"{worker.name}-{number}"
        answer = await self._answered(SOURCE, worker.uid)
        write_limit, read_limit = self._limits(worker.size)
        await session.apply(_snapshot(name, worker.name))
        snapshot = await until(session, "Snapshot", name, is_ready)
        content = find(
            await session.objects(), "SnapshotContent", snapshot.status.bound_snapshot_content_name
        )
        spans = await _spans(session, content.status.traceparent, {*STEPS, "write", "write-root"})
        self.cluster.drop_cache()
        begin = time.monotonic()
        await session.apply(_pod(f"{name}-restored", TARGET, worker.size, name))
        restored = await until(session, "Pod", f"{name}-restored", lambda _: True)
        await self._answered(TARGET, restored.metadata.uid)
        restore = time.monotonic() - begin
        restored = await until(session, "Pod", f"{name}-restored", is_ready)
        name_of_restore = restore_name(restored.metadata.uid)
        made = find(await session.objects(), "SnapshotRestore", name_of_restore)
        later = await _spans(session, made.status.traceparent, set(RESTORE_STEPS))
        await self._remove(session, name)
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
        conversation = await asyncio.wait_for(worker_socket.connect(sockets, uid), WAIT_S)
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

    async def _remove(self, session: Session, name: str) -> None:
        """Remove what a turn has made: the next save would share an artifact that is there."""
        for kind, each in (("Pod", f"{name}-restored"), ("Snapshot", name)):
            await session.delete(kind, each)
            await session.until(
                lambda values, kind=kind, each=each: find(values, kind, each) is None,
                f"{kind} {each} is removed",
                WAIT_S,
            )


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
            list(
                pool.map(lambda start: ctypes.memset(at + start, 1, touched), range(0, size, step))
            )
            del view
        return time.monotonic() - begin


async def _spans(session: Session, traceparent: str, wanted: set[str]) -> list[SpanRecord]:
    """Wait for a trace until it has all spans of these names."""
    trace = traceparent.split("-")[1]
    async with asyncio.timeout(WAIT_S), session.client.spans_arriving(trace) as changes:
        while True:
            spans = await session.client.spans(trace)
            if wanted <= {span.name for span in spans}:
                return spans
            await changes.wait()


async def until(session: Session, kind: str, name: str, holds: Any) -> Any:
    def found(values: list[AnyObject]) -> Any:
        value = find(values, kind, name)
        if value is not None and (why := _failure(value)):
            raise RuntimeError(f"{kind} {name} failed: {why}")
        return value is not None and holds(value)

    return find(await session.until(found, f"{kind} {name}", WAIT_S), kind, name)


def _failure(value: Any) -> str:
    failed = isinstance(value, Pod) and value.status.phase == "Failed"
    return next((c.message for c in value.status.conditions if c.type == "Failed"), "") or (
        value.status.message if failed else ""
    )


def is_ready(value: Any) -> bool:
    return is_true(value.status.conditions, "Ready")


def _pod(name: str, node: str, size: int, source: str | None = None) -> dict[str, Any]:
    found = pod(name, node, source)
    found["spec"] = worker_pod(node)
    for value in found["spec"]["containers"][0]["env"]:
        if value["name"] == "SIZE_MIB":
            value["value"] = str(size // MIB)
    return found


def _snapshot(name: str, source: str) -> dict[str, Any]:
    return {
        "apiVersion": "nvidia.com/v1alpha1",
        "kind": "Snapshot",
        "metadata": {"name": name},
        "spec": {"source": {"podRef": {"name": source}}, "sourcePolicy": "Resume"},
    }


def judged(results: Results) -> list[Judged]:
    """Compare with every goal. A missed one is inconclusive where the machine is too noisy."""
    rows = []
    for size, turns in results.turns.items():
        over = [t.pause - t.own_bytes / t.write_limit for t in turns]
        rows.append(
            _judged(
                size,
                "pause beyond own state ÷ write limit",
                PAUSE_S,
                over,
                [t.pause for t in turns],
            )
        )
        over = [t.restore - size / t.read_limit for t in turns]
        times = [t.restore for t in turns]
        rows.append(
            _judged(size, "apply → first answer beyond bytes ÷ read limit", RESTORE_S, over, times)
        )
        over = [t.restore - size / t.read_limit - t.touch for t in turns]
        rows.append(_judged(size, "the same beyond new memory", RESTORE_S, over, times))
        over = [t.restore - size / t.read_limit - t.touch - t.answer for t in turns]
        what = "the same beyond what one answer takes, too"
        rows.append(_judged(size, what, RESTORE_S, over, times))
    small, large = min(results.turns), max(results.turns)
    if small != large:
        few = [turn.pause for turn in results.turns[small]]
        many = [turn.pause for turn in results.turns[large]]
        apart = median(many) - median(few)
        noise = max(_half_width(few), _half_width(many))
        rows.append(
            Judged(
                TITLE,
                f"{small / MIB:g} and {large / MIB:g} MiB",
                "how much longer the pause is",
                f"≤ {noise * 1000:.0f} ms (noise)",
                f"{apart * 1000:.0f} ms ({median(many) / median(few):.2f} x)",
                "met" if apart <= noise else "missed",
            )
        )
        pages = median(t.unmap for t in results.turns[large]) - median(
            t.unmap for t in results.turns[small]
        )
        rows.append(
            Judged(
                TITLE,
                f"{small / MIB:g} and {large / MIB:g} MiB",
                "the same beyond giving back pages",
                f"≤ {noise * 1000:.0f} ms (noise)",
                f"{(apart - pages) * 1000:.0f} ms",
                "met" if apart - pages <= noise else "missed",
            )
        )
    return rows


def _judged(size: int, what: str, most: float, over: list[float], times: list[float]) -> Judged:
    found = median(over)
    verdict: Verdict = "met" if found <= most else "missed"
    if verdict == "missed" and spread(times) > NOISE:
        verdict = "inconclusive"
    wanted = f"≤ {most * 1000:.0f} ms"
    return Judged(TITLE, f"{size / MIB:g} MiB", what, wanted, f"{found * 1000:.0f} ms", verdict)


def _half_width(samples: list[float]) -> float:
    """Give the width of the middle half of some samples."""
    return spread(samples) * median(samples)


def section(results: Results) -> str:
    """Write the section of the page about a run, in Markdown."""
    return "\n".join(_lines(results)) + "\n"


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
    yield from (f"- {key}: {value}" for key, value in results.machine.items())
    yield "\n| weights | what | goal | found | |\n|---|---|---|---|---|"
    for line in judged(results):
        yield f"| {line.row} | {line.what} | {line.wanted} | {line.found} | {line.verdict} |"
    sizes = list(results.turns)
    yield (
        "\n| ms (median, slowest … fastest) | "
        + " | ".join(f"{s / MIB:g} MiB" for s in sizes)
        + " |"
    )
    yield "|---" * (len(sizes) + 1) + "|"
    rows: dict[str, list[list[float]]] = {
        "pause": [[t.pause for t in results.turns[s]] for s in sizes],
        **{f"of it {p}": [[t.steps[p] for t in results.turns[s]] for s in sizes] for p in STEPS},
        "of it orders and reports": [
            [t.pause - sum(t.steps.values()) for t in results.turns[s]] for s in sizes
        ],
        "to give back pages": [[t.unmap for t in results.turns[s]] for s in sizes],
        "saving after the pause": [[t.saving for t in results.turns[s]] for s in sizes],
        "apply → first answer": [[t.restore for t in results.turns[s]] for s in sizes],
        **{
            f"of it {p}": [[t.restore_steps[p] for t in results.turns[s]] for s in sizes]
            for p in RESTORE_STEPS
        },
        "an answer at any time": [[t.answer for t in results.turns[s]] for s in sizes],
        "to get memory and touch it": [[t.touch for t in results.turns[s]] for s in sizes],
        "bytes ÷ read limit": [[s / t.read_limit for t in results.turns[s]] for s in sizes],
    }
    for name, columns in rows.items():
        yield f"| {name} | " + " | ".join(map(_cell, columns)) + " |"


def _cell(samples: list[float]) -> str:
    low, middle, high = (f(samples) * 1000 for f in (min, median, max))
    return f"{middle:.0f} ({high:.0f} … {low:.0f})"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.pause", description=__doc__)
    parser.add_argument("--size-mib", type=int, nargs="+", default=[64, 512])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, default=Path(), help="on the disk to measure (here)")
    parser.add_argument("--json", type=Path, help="where to write what was found")
    parser.add_argument("--page", type=Path, help="the page with a section about it")
    arguments = parser.parse_args()
    if min(arguments.size_mib) < 4 or arguments.rounds < 1:
        parser.error(
            f"--size-mib is {arguments.size_mib} and --rounds {arguments.rounds}: "
            "a worker has 4 MiB at least, and there is one round"
        )
    if not arguments.folder.is_dir():
        parser.error(f"--folder {arguments.folder}: there is no such folder")
    with tempfile.TemporaryDirectory(prefix=".bench-", dir=arguments.folder.resolve()) as folder:
        sizes = sorted({size * MIB for size in arguments.size_mib})
        results = asyncio.run(Bench(Path(folder), sizes, arguments.rounds).run())
    text = section(results)
    output.write(arguments.json, arguments.page, results, text)
    print(text)
    return 1 if any(line.verdict == "missed" for line in judged(results)) else 0


if __name__ == "__main__":
    output.run(main)
