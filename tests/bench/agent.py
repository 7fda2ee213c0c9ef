"""Dumps and restores of a process by the driver `criu`, beside CRIU alone and the raw disk.

`python -m tests.bench.agent --size-mib 1024` starts a helper, and a worker with a heap of that size
in namespaces of its own, and takes turns between them; it needs root, and CRIU of `make criu`. The
status is 1 when a goal is missed, and 2 when a request makes no sense.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import mmap
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import NamedTuple

import msgspec

from snapshot_agent.adapters import procfs
from snapshot_agent.adapters.copying import SIDE_BY_SIDE
from snapshot_agent.adapters.criu import Criu
from snapshot_agent.domain.control import ContainerPaths
from snapshot_agent.domain.criu_images import frozen_s
from snapshot_agent.domain.criu_plan import DumpPlan, dump_arguments, external_mounts
from snapshot_agent.helper import observe
from snapshot_agent.ports import Dump, Process, RestoreSource, Worker
from snapshot_shared.artifact import FileEntry
from snapshot_shared.files import opened
from snapshot_shared.orders import PodRef
from tests.bench import common
from tests.bench.common import MIB, ROOT, Benchmark, Judged, goal
from tests.bench.disk import drop, huge_pages, raw_transfer, warm
from tests.bench.machine import Watch, describe, new_memory
from tests.support.container import command

TOOLS = ROOT / ".tools"
OURS = "snapback"
WITHIN_S = 300.0
TITLE = "Dumps and restores of processes"
OVER_CRIU = 1.1
"""The goal for a dump: at most this many times as long as CRIU and fsync after it."""
OF_DISK = 0.7
"""The goal for a dump: at least this share of the raw write limit."""
OVER_CRIU_RESTORE = 1.2
"""The goal for a restore: at most this many times as long as CRIU alone."""

Seconds = dict[str, float]


class Turn(msgspec.Struct, frozen=True, kw_only=True):
    """One round, in seconds by contender. `size` is that of all files of the dump in bytes.

    A dump of `criu` ends when CRIU ends, all others when the bytes are on the disk. The restores
    read the dump of `snapback` of the same round, which is in the page cache (`cached`) or not.
    """

    size: int
    dump: Seconds
    frozen: Seconds
    cached: Seconds
    cold: Seconds


class Results(msgspec.Struct, frozen=True, kw_only=True):
    """All turns. `others` is the share of the processors that others took."""

    machine: dict[str, str]
    heap: int
    others: float
    turns: list[Turn]


class Container(NamedTuple):
    """A process in namespaces of its own, with which all others in them end."""

    starter: subprocess.Popen[bytes]
    worker: Worker

    def end(self) -> None:
        """End it, and wait until its memory is given back."""
        os.kill(self.worker.process.pid, signal.SIGKILL)
        self.starter.communicate()


async def ignored(_done: int) -> None:
    pass


class Bench:
    """One run in a folder of the disk that is measured. `layers` is a folder of another one."""

    def __init__(self, folder: Path, layers: Path, heap: int, rounds: int) -> None:
        self.folder, self.layers, self.heap, self.rounds = folder, layers, heap, rounds
        self.criu = TOOLS / "criu" / "criu"
        self.artifacts = folder / "artifacts"
        self.artifacts.mkdir()
        self.socket = folder / "helper.sock"
        self.driver = Criu(self.socket, time.monotonic)
        self.staging = huge_pages()
        self.places = 0
        self.size = 0

    async def run(self) -> Results:
        """Measure everything."""
        machine = {"day": time.strftime("%Y-%m-%d", time.gmtime()), **describe(self.folder)}
        watch = Watch()
        turns = []
        with self._helper():
            heap = str(ROOT / "tests" / "bench" / "heap.py")
            source = self._contained(sys.executable, heap, str(self.heap // MIB))
            try:
                first = self._new_folder(self.artifacts)
                _, made = await self._dump(source.worker, first)
                shutil.rmtree(first)
                written = sum(each.size for each in made.files)
                self.size = written + -written % mmap.PAGESIZE
                for number in range(1, self.rounds + 1):
                    common.say(f"round {number} of {self.rounds}")
                    turns.append(await self._turn(source.worker, number))
            finally:
                source.end()
        return Results(machine=machine, heap=self.heap, others=watch.others(), turns=turns)

    @contextlib.contextmanager
    def _helper(self) -> Iterator[None]:
        settings = {
            "NODE": "bench",
            "STATE_DIR": self.folder / "state",
            "HELPER": self.socket,
            "ARTIFACT_ROOT": self.artifacts,
            "CRIU": self.criu,
            "LOG_LEVEL": "INFO",
        }
        environment = {f"SNAPBACK_{name}": str(value) for name, value in settings.items()}
        command = [sys.executable, "-m", "snapshot_agent.helper"]
        helper = subprocess.Popen(
            command, env={**os.environ, **environment}, stderr=subprocess.PIPE
        )
        try:
            assert helper.stderr is not None
            # It says that it serves.
            helper.stderr.readline()
            yield
        finally:
            helper.terminate()
            helper.wait()

    def _contained(self, *argv: str) -> Container:
        """Start a container whose program is ready when it has written a line."""
        init: Path | None = None
        if argv[0].startswith("/snapback/"):
            init = self._new_folder(self.folder)
            shutil.copy(TOOLS / "snapback-init", init)
        mounts = {str(init): "/snapback"} if init else {}
        starter = subprocess.Popen(
            command(self._new_folder(self.layers), *argv, mounts=mounts),
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        assert starter.stdout is not None
        starter.stdout.readline()
        first = Path(f"/proc/{starter.pid}/task/{starter.pid}/children").read_text()
        seen = procfs.read(int(first))
        assert seen is not None
        pod = PodRef(namespace="bench", name="worker", uid="00000000-0000-0000-0000-000000000001")
        paths = ContainerPaths(self.folder, self.folder, placeholder=init)
        return Container(starter, Worker(pod, Process(*seen.key), paths))

    def _new_folder(self, where: Path) -> Path:
        self.places += 1
        folder = where / f"place-{self.places}"
        folder.mkdir()
        return folder

    async def _turn(self, worker: Worker, number: int) -> Turn:
        dump: Seconds = {}
        frozen: Seconds = {}
        part = self._new_folder(self.artifacts)
        files: Sequence[FileEntry] = ()

        async def snapback() -> None:
            nonlocal files
            dump["snapback"], made = await self._dump(worker, part)
            assert made.frozen_s is not None
            frozen["snapback"] = made.frozen_s
            files = made.files

        async def criu() -> None:
            images = self._new_folder(self.folder)
            times = self._bare_dump(worker.process.pid, images)
            dump["criu"], dump["criu, fsync"], frozen["criu"] = times
            shutil.rmtree(images)

        async def disk() -> None:
            path = self.folder / "raw"
            begin = time.monotonic()
            raw_transfer(path, [self.staging], self.size, os.pwritev)
            dump["disk"] = time.monotonic() - begin
            path.unlink()

        # Whoever is first finds another machine than who comes after it.
        for each in common.rotated((snapback, criu, disk), number % 3, 3):
            self._recycle()
            await each()
        cached = await self._restores(part, files, number, cold=False)
        cold = await self._restores(part, files, number, cold=True)
        shutil.rmtree(part)
        return Turn(size=self.size, dump=dump, frozen=frozen, cached=cached, cold=cold)

    def _recycle(self) -> None:
        """Touch and release as much memory as a contender needs, and the cache of its files.

        The host of a virtual machine may have taken it back, and gives it slowly.
        """
        size = 2 * self.size
        with opened(new_memory(size, in_huge_pages=False)) as fd:
            os.posix_fallocate(fd, 0, size)

    async def _dump(self, worker: Worker, part: Path) -> tuple[float, Dump]:
        begin = time.monotonic()
        with opened(os.open(part, os.O_RDONLY | os.O_DIRECTORY)) as fd:
            made = Dump(worker, 1, begin + WITHIN_S, ignored, fd)
            await self.driver.dump(made)
        return time.monotonic() - begin, made

    def _bare_dump(self, pid: int, images: Path) -> tuple[float, float, float]:
        """Return the seconds of CRIU, those until its files are durable, and those of its stop."""
        seen = observe.tree(*self._key(pid), cgroups=Path("/sys/fs/cgroup"))
        work = self._new_folder(self.folder)
        plan = DumpPlan(
            pid=pid,
            images=str(images),
            work=str(work),
            script="",
            network=seen.root.namespaces["net"],
            external=external_mounts(seen.mounts),
        )
        arguments = dump_arguments(plan)
        at = arguments.index("--action-script")
        del arguments[at : at + 2]
        begin = time.monotonic()
        subprocess.run([self.criu, *arguments], cwd=work, check=True, stdin=subprocess.DEVNULL)
        ended = time.monotonic()
        with ThreadPoolExecutor(SIDE_BY_SIDE) as pool:
            list(pool.map(_sync, (*images.iterdir(), images)))
        durable = time.monotonic()
        stopped = frozen_s((work / "stats-dump").read_bytes())
        return ended - begin, durable - begin, stopped

    def _key(self, pid: int) -> tuple[int, int]:
        seen = procfs.read(pid)
        assert seen is not None
        return seen.key

    async def _restores(
        self, part: Path, files: Sequence[FileEntry], number: int, *, cold: bool
    ) -> Seconds:
        found: Seconds = {}
        names = ["snapback", "criu"]
        for name in names if number % 2 else reversed(names):
            placeholder = self._contained("/snapback/snapback-init")
            try:
                self._recycle()
                (drop if cold else warm)(part)
                if name == "criu":
                    found[name] = self._bare_restore(placeholder.worker.process.pid, part)
                else:
                    found[name] = await self._restore(placeholder.worker, part, files)
            finally:
                placeholder.end()
        return found

    async def _restore(self, worker: Worker, part: Path, files: Sequence[FileEntry]) -> float:
        begin = time.monotonic()
        folder = part.relative_to(self.artifacts).parts
        with opened(os.open(part, os.O_RDONLY | os.O_DIRECTORY)) as fd:
            source = RestoreSource(fd, folder, files, {}, begin + WITHIN_S, ignored)
            await self.driver.restore(worker, source)
        return time.monotonic() - begin

    def _bare_restore(self, pid: int, part: Path) -> float:
        work = self._new_folder(self.folder)
        command = [sys.executable, "-m", "tests.bench.bare_restore"]
        command += [str(self.criu), str(pid), str(part), str(work)]
        done = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True)
        return float(done.stdout)


def _sync(path: Path) -> None:
    with opened(os.open(path, os.O_RDONLY)) as fd:
        os.fsync(fd)


def judged(results: Results) -> Iterator[Judged]:
    """Compare with every goal. A missed goal is inconclusive if the machine is too noisy."""

    def compared(
        row: str, against: str, of: str, theirs: str, most: float = 0.0, least: float | None = None
    ) -> Judged:
        ours, others = (
            [getattr(turn, of)[name] for turn in results.turns] for name in (OURS, theirs)
        )
        ratio = median(ours) / median(others)
        if least is not None:
            # Shown the other way round, as a share of their speed.
            return goal(
                TITLE, row, against, 1 / ratio, ours, others, least=least, others=results.others
            )
        return goal(TITLE, row, against, ratio, ours, others, most=most, others=results.others)

    yield compared("dump", "criu, fsync", "dump", "criu, fsync", OVER_CRIU)
    yield compared("dump", "raw write limit", "dump", "disk", least=OF_DISK)
    yield compared("restore, cached", "criu", "cached", "criu", OVER_CRIU_RESTORE)
    yield compared("restore, cold", "criu", "cold", "criu", OVER_CRIU_RESTORE)


def _lines(results: Results) -> Iterator[str]:
    turns = results.turns
    yield f"## {TITLE}\n"
    yield (
        f"Written by `make bench-agent`: a worker with a heap of {results.heap // MIB} MiB in\n"
        f"namespaces of its own, {len(turns)} rounds, contenders in turn, medians. `snapback` is\n"
        "the driver `criu` with a real helper, from its request until every file has its digests\n"
        "and is on the disk, or until the restored process runs. `criu` is CRIU alone with its\n"
        "options: it checks nothing, leaves out the files of the container, and its dump is not\n"
        "durable; with `criu, fsync` it is. `disk` is the raw write limit for as many bytes: past\n"
        "the page cache, which CRIU cannot do. All restores of a round read the same dump.\n"
        f"Others took {results.others:.0%} of the processors. The machine:\n"
    )
    yield from common.listed(results.machine)
    yield from common.goal_table(judged(results))
    size = median(turn.size for turn in turns)
    head = (f"{size / MIB:.0f} MiB of files", "contender", "ms (median)", "fastest … slowest")
    contenders = (
        ("dump, until durable", "dump", (OURS, "criu, fsync", "disk")),
        ("dump, not durable", "dump", ("criu",)),
        ("worker stopped", "frozen", (OURS, "criu")),
        ("restore, cached", "cached", (OURS, "criu")),
        ("restore, cold", "cold", (OURS, "criu")),
    )
    samples = (
        (row, name, [getattr(turn, of)[name] for turn in turns])
        for row, of, names in contenders
        for name in names
    )
    rows = (
        (row, name, common.middle(s, "{:.0f}", 1e3), common.ends(s, "{:.0f}", 1e3))
        for row, name, s in samples
    )
    yield from common.table(head, rows)


def _measured(options: argparse.Namespace, folder: Path) -> Results:
    with tempfile.TemporaryDirectory(prefix=".bench-", dir="/dev/shm") as layers:
        bench = Bench(folder, Path(layers), options.size_mib * MIB, options.rounds)
        return asyncio.run(bench.run())


def _lacking() -> str:
    if os.geteuid() != 0:
        return "CRIU needs root"
    missing = [name for name in ("criu", "snapback-init") if not (TOOLS / name).exists()]
    return f"{missing[0]} is missing in {TOOLS}: run `make criu init`" if missing else ""


NUMBERS = {"size-mib": (1024, 1, "of the heap (1024)"), "rounds": (5, 1, "")}
BENCH = Benchmark("agent", __doc__, NUMBERS, _measured, _lines, judged, _lacking)

if __name__ == "__main__":
    common.run(BENCH.main)
