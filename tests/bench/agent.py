"""Dumps and restores of a process by the driver `criu`, beside CRIU alone and the raw disk.

`python -m tests.bench.agent --size-mib 1024` starts a helper, and a worker with a heap of that size
in namespaces of its own, and takes turns between them; it needs root, and CRIU of `make criu`. The
status is 1 when a goal is missed, and 2 when a request makes no sense.
"""

from __future__ import annotations

import argparse
import contextlib
import mmap
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import NamedTuple

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
from tests.bench.common import MIB, ROOT, Benchmark, Judged, Results, goal
from tests.bench.disk import drop, huge_pages, raw_transfer, warm
from tests.bench.machine import recycle
from tests.support.container import command

TOOLS = ROOT / ".tools"
OURS = "snapback"
WITHIN_S = 300.0
DURABLE, DUMPED = "dump, until durable", "dump, not durable"
STOPPED = "worker stopped"
CACHED, COLD = "restore, cached", "restore, cold"
"""The restores read the dump of `snapback` of the same round, in the page cache or not."""
TITLE = "Dumps and restores of processes"
OVER_CRIU = 1.1
"""The goal for a dump: at most this many times as long as CRIU and fsync after it."""
OF_DISK = 0.7
"""The goal for a dump: at least this share of the raw write limit."""
OVER_CRIU_RESTORE = 1.2
"""The goal for a restore: at most this many times as long as CRIU alone."""


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

    def __init__(self, folder: Path, layers: Path, found: Results) -> None:
        self.folder, self.layers, self.found = folder, layers, found
        self.criu = TOOLS / "criu" / "criu"
        self.artifacts = folder / "artifacts"
        self.artifacts.mkdir()
        self.socket = folder / "helper.sock"
        self.driver = Criu(self.socket, time.monotonic)
        self.staging = huge_pages()
        self.places = 0
        self.size = 0

    async def run(self, rounds: int) -> None:
        with self._helper():
            heap = str(ROOT / "tests" / "bench" / "heap.py")
            source = self._contained(sys.executable, heap, str(self.found.facts["heap"] // MIB))
            try:
                first = self._new_folder(self.artifacts)
                made = await self._dump(source.worker, first)
                shutil.rmtree(first)
                written = sum(each.size for each in made.files)
                self.found.facts["size"] = self.size = written + -written % mmap.PAGESIZE
                for number in range(1, rounds + 1):
                    common.say(f"round {number} of {rounds}")
                    await self._turn(source.worker, number)
            finally:
                source.end()

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

    async def _turn(self, worker: Worker, number: int) -> None:
        part = self._new_folder(self.artifacts)
        files: Sequence[FileEntry] = ()

        async def snapback() -> None:
            nonlocal files
            begin = time.monotonic()
            made = await self._dump(worker, part)
            self.found.add(DURABLE, OURS, time.monotonic() - begin)
            assert made.frozen_s is not None
            self.found.add(STOPPED, OURS, made.frozen_s)
            files = made.files

        async def criu() -> None:
            images = self._new_folder(self.folder)
            self._bare_dump(worker.process, images)
            shutil.rmtree(images)

        async def disk() -> None:
            path = self.folder / "raw"
            begin = time.monotonic()
            raw_transfer(path, [self.staging], self.size, os.pwritev)
            self.found.add(DURABLE, "disk", time.monotonic() - begin)
            path.unlink()

        # Whoever is first finds another machine than who comes after it.
        for each in common.rotated((snapback, criu, disk), (number - 1) % 3, 3):
            # What a contender needs, and the cache of its files.
            recycle(2 * self.size)
            await each()
        for row, ready in ((CACHED, warm), (COLD, drop)):
            await self._restores(part, files, number, row, ready)
        shutil.rmtree(part)

    async def _dump(self, worker: Worker, part: Path) -> Dump:
        with opened(os.open(part, os.O_RDONLY | os.O_DIRECTORY)) as fd:
            made = Dump(worker, 1, time.monotonic() + WITHIN_S, ignored, fd)
            await self.driver.dump(made)
        return made

    def _bare_dump(self, process: Process, images: Path) -> None:
        seen = observe.tree(*process, cgroups=Path("/sys/fs/cgroup"))
        work = self._new_folder(self.folder)
        plan = DumpPlan(
            pid=process.pid,
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
        self.found.add(DUMPED, "criu", time.monotonic() - begin)
        with ThreadPoolExecutor(SIDE_BY_SIDE) as pool:
            list(pool.map(_sync, (*images.iterdir(), images)))
        self.found.add(DURABLE, "criu, fsync", time.monotonic() - begin)
        self.found.add(STOPPED, "criu", frozen_s((work / "stats-dump").read_bytes()))

    async def _restores(
        self,
        part: Path,
        files: Sequence[FileEntry],
        number: int,
        row: str,
        ready: Callable[[Path], None],
    ) -> None:
        names = [OURS, "criu"]
        for name in names if number % 2 else reversed(names):
            placeholder = self._contained("/snapback/snapback-init")
            try:
                recycle(2 * self.size)
                ready(part)
                if name == "criu":
                    taken = self._bare_restore(placeholder.worker.process.pid, part)
                else:
                    taken = await self._restore(placeholder.worker, part, files)
                self.found.add(row, name, taken)
            finally:
                placeholder.end()

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


def judged(found: Results) -> Iterator[Judged]:
    for row, rival, most in (
        (DURABLE, "criu, fsync", OVER_CRIU),
        (CACHED, "criu", OVER_CRIU_RESTORE),
        (COLD, "criu", OVER_CRIU_RESTORE),
    ):
        ours, theirs = (found.samples[row][name] for name in (OURS, rival))
        ratio = median(ours) / median(theirs)
        yield goal(TITLE, row, rival, ratio, ours, theirs, most=most, others=found.others)
    ours, disk = (found.samples[DURABLE][name] for name in (OURS, "disk"))
    share, against = median(disk) / median(ours), "raw write limit"
    yield goal(TITLE, DURABLE, against, share, ours, disk, least=OF_DISK, others=found.others)


def lines(found: Results) -> Iterator[str]:
    heap = found.facts["heap"] // MIB
    yield (
        f"Written by `make bench-agent`: a worker with a heap of {heap} MiB in namespaces of its\n"
        f"own, {found.rounds} rounds, contenders in turn, medians. `snapback` is the driver\n"
        "`criu` with a real helper, from its request until every file has its digests and is on\n"
        "the disk, or until the restored process runs. `criu` is CRIU alone with its\n"
        "options: it checks nothing, leaves out the files of the container, and its dump is not\n"
        "durable; with `criu, fsync` it is. `disk` is the raw write limit for as many bytes: past\n"
        "the page cache, which CRIU cannot do. All restores of a round read the same dump.\n"
        f"Others took {found.others:.0%} of the processors. The machine:\n"
    )
    yield from common.listed(found.machine)
    yield from common.goal_table(judged(found))
    of = f"{found.facts['size'] / MIB:.0f} MiB of files"
    head = (of, "contender", "ms (median)", "fastest … slowest")
    yield from common.sample_table(head, found.samples, "{:.0f}", 1e3)


async def measure(options: argparse.Namespace, folder: Path) -> Results:
    with (
        tempfile.TemporaryDirectory(prefix=".bench-", dir="/dev/shm") as layers,
        common.measuring(folder, heap=options.size_mib * MIB) as found,
    ):
        await Bench(folder, Path(layers), found).run(options.rounds)
    return found


def _lacking() -> str:
    if os.geteuid() != 0:
        return "CRIU needs root"
    missing = [name for name in ("criu", "snapback-init") if not (TOOLS / name).exists()]
    return f"{missing[0]} is missing in {TOOLS}: run `make criu init`" if missing else ""


NUMBERS = {"size-mib": (1024, 1, "of the heap (1024)"), "rounds": (5, 1, "")}
BENCH = Benchmark("agent", TITLE, __doc__, NUMBERS, measure, lines, judged, _lacking)

if __name__ == "__main__":
    common.run(BENCH.main)
