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
from tests.bench import output
from tests.bench.disk import huge_pages, raw_transfer
from tests.bench.machine import Watch, describe, new_memory
from tests.bench.results import NOISE, OTHERS, Judged, Verdict, spread

ROOT = Path(__file__).resolve().parents[2]
TOOLS = ROOT / ".tools"
MIB = 2**20
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
                    output.say(f"round {number} of {self.rounds}")
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
        at: list[str] = []
        if argv[0].startswith("/snapback/"):
            init = self._new_folder(self.folder)
            shutil.copy(TOOLS / "snapback-init", init)
            at = ["--at", str(init)]
        command = ["unshare", "--mount", "--pid", "--net", "--uts", "--ipc", "--fork"]
        command += [sys.executable, "-m", "tests.bench.contained"]
        starter = subprocess.Popen(
            [*command, str(self._new_folder(self.layers)), *at, *argv],
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
        contenders = [snapback, criu, disk]
        for each in contenders[number % 3 :] + contenders[: number % 3]:
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
                _cache(part, cold=cold)
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


def _cache(part: Path, *, cold: bool) -> None:
    """Have the files of a dump in the page cache, or not."""
    for path in part.iterdir():
        with path.open("rb", buffering=0) as file:
            if cold:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            else:
                while file.read(MIB):
                    pass


class _Goal(NamedTuple):
    """Seconds of `ours` must be at most `most` times those of `theirs`.

    `as_share` shows the ratio the other way round, as a share of their speed.
    """

    row: str
    against: str
    most: float
    ours: list[float]
    theirs: list[float]
    as_share: bool = False


def judged(results: Results) -> list[Judged]:
    """Compare with every goal. A missed one is inconclusive where the machine is too noisy."""
    turns = results.turns

    def dump(name: str) -> list[float]:
        return [turn.dump[name] for turn in turns]

    goals = [
        _Goal("dump", "criu, fsync", OVER_CRIU, dump("snapback"), dump("criu, fsync")),
        _Goal("dump", "raw write limit", 1 / OF_DISK, dump("snapback"), dump("disk"), True),
    ]
    for row, of in (("restore, cached", "cached"), ("restore, cold", "cold")):
        ours, theirs = (
            [getattr(turn, of)[name] for turn in turns] for name in ("snapback", "criu")
        )
        goals.append(_Goal(row, "criu", OVER_CRIU_RESTORE, ours, theirs))
    return [_judge(goal, results.others) for goal in goals]


def _judge(goal: _Goal, others: float) -> Judged:
    ratio = median(goal.ours) / median(goal.theirs)
    verdict: Verdict = "met" if ratio <= goal.most else "missed"
    is_noisy = others > OTHERS or max(spread(goal.ours), spread(goal.theirs)) > NOISE
    if verdict == "missed" and is_noisy:
        verdict = "inconclusive"
    if goal.as_share:
        wanted, found = f"≥ {1 / goal.most:.2g} x", f"{1 / ratio:.2f} x"
    else:
        wanted, found = f"≤ {goal.most:g} x", f"{ratio:.2f} x"
    return Judged(TITLE, goal.row, goal.against, wanted, found, verdict)


def section(results: Results) -> str:
    """Write the section of the page about a run, in Markdown."""
    return "\n".join(_lines(results)) + "\n"


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
    yield from (f"- {key}: {value}" for key, value in results.machine.items())
    yield "\n| row | against | goal | found | |\n|---|---|---|---|---|"
    for line in judged(results):
        yield f"| {line.row} | {line.what} | {line.wanted} | {line.found} | {line.verdict} |"
    size = median(turn.size for turn in turns)
    yield f"\n| {size / MIB:.0f} MiB of files | contender | ms (median) | fastest … slowest |"
    yield "|---|---|---|---|"
    rows = (
        ("dump, until durable", "dump", ("snapback", "criu, fsync", "disk")),
        ("dump, not durable", "dump", ("criu",)),
        ("worker stopped", "frozen", ("snapback", "criu")),
        ("restore, cached", "cached", ("snapback", "criu")),
        ("restore, cold", "cold", ("snapback", "criu")),
    )
    for row, of, names in rows:
        for name in names:
            low, middle, high = (
                f(getattr(turn, of)[name] for turn in turns) * 1000 for f in (min, median, max)
            )
            yield f"| {row} | {name} | {middle:.0f} | {low:.0f} … {high:.0f} |"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.agent", description=__doc__)
    parser.add_argument("--size-mib", type=int, default=1024, help="of the heap (1024)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, default=Path(), help="on the disk to measure (here)")
    parser.add_argument("--json", type=Path, help="where to write what was found")
    parser.add_argument("--page", type=Path, help="the page with a section about it")
    arguments = parser.parse_args()
    if arguments.size_mib < 1 or arguments.rounds < 1:
        parser.error(
            f"--size-mib is {arguments.size_mib} and --rounds {arguments.rounds}: "
            "a heap has 1 MiB at least, and there is one round"
        )
    if not arguments.folder.is_dir():
        parser.error(f"--folder {arguments.folder}: there is no such folder")
    if os.geteuid() != 0:
        parser.error("CRIU needs root")
    for name, path in (("criu", TOOLS / "criu"), ("init", TOOLS / "snapback-init")):
        if not path.exists():
            parser.error(f"{path} is missing: run `make {name}`")
    with (
        tempfile.TemporaryDirectory(prefix=".bench-", dir=arguments.folder.resolve()) as folder,
        tempfile.TemporaryDirectory(prefix=".bench-", dir="/dev/shm") as layers,
    ):
        bench = Bench(Path(folder), Path(layers), arguments.size_mib * MIB, arguments.rounds)
        results = asyncio.run(bench.run())
    text = section(results)
    output.write(arguments.json, arguments.page, results, text)
    print(text)
    return 1 if any(line.verdict == "missed" for line in judged(results)) else 0


if __name__ == "__main__":
    output.run(main)
