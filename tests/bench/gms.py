"""Saves and loads of GPU memory beside what the disk can do and beside what others do."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import mmap
import os
import platform
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from gms.adapters.backends import find_backend
from gms.adapters.transfer_child import write_part
from gms.domain.tasks import SaveTask, TransferDone
from gms.domain.transfer import CHUNK_BYTES, plan_files
from snapshot_shared.artifact import PartManifest
from snapshot_shared.codec import decode_json
from snapshot_shared.files import open_root, opened
from snapshot_shared.frames import AllocationInfo
from snapshot_shared.orders import LayoutRef
from tests.bench.results import SHAPES, Results

MIB = 1024 * 1024
UID = "00000000-0000-4000-8000-00000000000"
OURS = ("posix-direct", "posix-buffered")
THREADS = 4
SMALL = 2000


class Region:
    """Memory of simulated devices, and the allocations in it."""

    def __init__(self, size: int, count: int) -> None:
        each = size // count
        self.descriptor = os.memfd_create("bench")
        step = -(-each // mmap.PAGESIZE) * mmap.PAGESIZE
        os.ftruncate(self.descriptor, step * count)
        self.map = mmap.mmap(self.descriptor, step * count)
        self.infos = [
            AllocationInfo(id=f"a{slot}", size=each, aligned=step, tag="", slot=slot)
            for slot in range(count)
        ]
        whole = memoryview(self.map)
        self.views = [whole[slot * step : slot * step + each] for slot in range(count)]
        self.array = np.frombuffer(self.map, dtype="u1")

    def fill(self) -> None:
        """Put random bytes everywhere, which also touches every page."""
        rng = np.random.default_rng(1)
        for start in range(0, len(self.array), CHUNK_BYTES):
            part = self.array[start : start + CHUNK_BYTES]
            part[:] = np.frombuffer(rng.bytes(len(part)), dtype="u1")

    def close(self) -> None:
        """Give the memory back; whoever has views of it keeps it."""
        os.close(self.descriptor)


class Bench:
    """One run: contenders take turns in a folder of the disk that is measured."""

    def __init__(self, folder: Path, size: int, rounds: int, say: Callable[[str], None]) -> None:
        self.folder, self.size, self.rounds, self.say = folder, size, rounds, say
        self.seconds: dict[str, dict[str, list[float]]] = {}
        self.regions = {shape: Region(size, n) for shape, n in zip(SHAPES, (1, SMALL), strict=True)}
        self.large = _large_pages()
        self.layout = LayoutRef(
            device="GPU-1",
            incarnation="i",
            generation=1,
            layout_id="l",
            structure_hash="h",
            bytes=size,
        )

    def run(self) -> Results:
        """Measure everything."""
        machine = _machine(self.folder)
        for region in self.regions.values():
            region.fill()
        for number in range(1, self.rounds + 1):
            self.say(f"round {number} of {self.rounds}")
            for shape, region in self.regions.items():
                self._saves(shape, region)
                self._loads(shape, region)
        again, extra = self._counted()
        machine["load average at the end"] = f"{os.getloadavg()[0]:.1f}"
        return Results(
            machine=machine,
            size=self.size,
            seconds=self.seconds,
            written_again=again,
            extra_bytes=extra,
            extra_limit=THREADS * CHUNK_BYTES + 32 * MIB,
        )

    @contextlib.contextmanager
    def _timed(self, row: str, contender: str) -> Iterator[None]:
        begin = time.perf_counter()
        yield
        samples = self.seconds.setdefault(row, {}).setdefault(contender, [])
        samples.append(time.perf_counter() - begin)

    def _absent(self, row: str, contender: str) -> None:
        self.seconds.setdefault(row, {}).setdefault(contender, [])

    def _saves(self, shape: str, region: Region) -> None:
        row = f"save, {shape}"
        self._limits(row, region, os.pwritev)
        self._fio(row, "write")
        for backend in OURS:
            shutil.rmtree(self.folder / backend, ignore_errors=True)
            with self._timed(row, backend):
                self.save(backend, region)
        with self._timed(row, "numpy"), (self.folder / "a.npy").open("wb") as file:
            np.save(file, region.array)
            file.flush()
            os.fsync(file.fileno())
        if not importlib.util.find_spec("safetensors"):
            self._absent(row, "safetensors")
            return
        from safetensors.numpy import save_file

        arrays = {
            info.id: np.frombuffer(view, dtype="u1")
            for info, view in zip(region.infos, region.views, strict=True)
        }
        with self._timed(row, "safetensors"):
            save_file(arrays, self.folder / "a.safetensors")
            with opened(os.open(self.folder / "a.safetensors", os.O_RDWR)) as fd:
                os.fsync(fd)

    def _limits(self, row: str, region: Region, call: Callable[..., int]) -> None:
        for name, memory in (("raw", region.map), ("raw, large pages", self.large)):
            with self._timed(row, name):
                _raw(self.folder / "raw", memory, len(region.map), call)

    def _loads(self, shape: str, region: Region) -> None:
        cold = f"load, cold, pooled, {shape}"
        self._limits(cold, region, os.preadv)
        self._fio(cold, "read")
        for backend in OURS:
            self._drop()
            with self._timed(cold, backend):
                self.load(backend, region)
        self._peers(cold, region, is_cold=True)
        if shape != SHAPES[0]:
            return
        cached = f"load, cached, {shape}"
        for backend in OURS:
            self._warm(backend)
            with self._timed(cached, backend):
                self.load(backend, region)
        self._peers(cached, region, is_cold=False)
        fresh = f"load, cold, fresh, {shape}"
        for backend in OURS:
            self._drop()
            with contextlib.closing(Region(self.size, 1)) as new, self._timed(fresh, backend):
                self.load(backend, new)
        self._peers(fresh, None, is_cold=True)

    def _peers(self, row: str, region: Region | None, *, is_cold: bool) -> None:
        for name, read in (("numpy mmap", self._numpy), ("safetensors", self._safetensors)):
            if name == "safetensors" and not importlib.util.find_spec("safetensors"):
                self._absent(row, name)
                continue
            target = region or Region(self.size, 1)
            if is_cold:
                self._drop()
            else:
                read(target)
            with self._timed(row, name):
                read(target)
            if region is None:
                target.close()

    def _numpy(self, region: Region) -> None:
        region.array[:] = np.load(self.folder / "a.npy", mmap_mode="r")[: len(region.array)]

    def _safetensors(self, region: Region) -> None:
        from safetensors.numpy import load_file

        found = load_file(self.folder / "a.safetensors")
        for info, view in zip(region.infos, region.views, strict=True):
            np.frombuffer(view, dtype="u1")[:] = found[info.id]

    def save(self, backend: str, region: Region, *, content: int = 0) -> TransferDone:
        """Save as GMS does, in a part of its own."""
        task = SaveTask(
            socket_dir="/nowhere",
            root=str(self.folder / backend),
            device="GPU-1",
            namespace="default",
            content_uid=f"{UID}{content}",
            generation=1,
            part="gpu-0",
            deadline_s=60.0,
            threads=THREADS,
            backend=backend,
            order=f"save-{UID}{content}-gpu-0",
            fence_token="t",
            layout=self.layout,
        )
        with opened(open_root(task.root, create=True)) as root:
            return write_part(root, task, region.infos, [], region.views, lambda _: None)

    def load(self, backend: str, region: Region, advance: Callable[[int], None] = abs) -> None:
        """Read what `save` wrote into a region, every digest compared."""
        path = self._part(backend)
        manifest = decode_json((path / "part.json").read_bytes(), PartManifest, limit=2**30)
        assert manifest.layout is not None
        plans = plan_files(
            manifest.layout.allocations,
            [entry.size for entry in manifest.files],
            chunk_bytes=[entry.chunk_bytes for entry in manifest.files],
        )
        with opened(open_root(path)) as directory:
            find_backend(backend).read_files(
                directory, plans, manifest.files, region.views, threads=THREADS, advance=advance
            )

    def _part(self, backend: str) -> Path:
        return self.folder / backend / "default" / f"{UID}0" / "gen-1" / "gpu-0"

    def _drop(self) -> None:
        """Take all files of the run out of the page cache; every one of them is on the disk."""
        for path in self.folder.rglob("*"):
            if path.is_file():
                with opened(os.open(path, os.O_RDONLY)) as fd:
                    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)

    def _warm(self, backend: str) -> None:
        for path in self._part(backend).iterdir():
            with path.open("rb") as file:
                while file.read(CHUNK_BYTES):
                    pass

    def _fio(self, row: str, verb: str) -> None:
        if not shutil.which("fio"):
            self._absent(row, "fio")
            return
        command = ["fio", "--name=limit", f"--rw={verb}", "--direct=1", "--bs=8M", "--iodepth=16"]
        command += ["--ioengine=libaio", f"--size={self.size}", "--end_fsync=1"]
        command += [f"--filename={self.folder / 'fio'}", "--output-format=json"]
        found = subprocess.run(command, check=True, capture_output=True, text=True)
        speed = json.loads(found.stdout)["jobs"][0][verb]["bw_bytes"]
        self.seconds.setdefault(row, {}).setdefault("fio", []).append(self.size / speed)

    def _counted(self) -> tuple[float, dict[str, int]]:
        backend, region = OURS[0], self.regions[SHAPES[1]]
        shutil.rmtree(self.folder / backend, ignore_errors=True)
        before = highest = _private_bytes()

        def look(_: object) -> int:
            nonlocal highest
            highest = max(highest, _private_bytes())
            return 0

        extra: dict[str, int] = {}
        task_done = self._watched_save(backend, region, look)
        extra["save"] = highest - before
        before = highest = _private_bytes()
        self.load(backend, region, look)
        extra["load"] = highest - before
        (self._part(backend).parent / "root.json").write_text("{}")
        again = self.save(backend, region, content=1)
        return again.moved / task_done.moved, extra

    def _watched_save(
        self, backend: str, region: Region, look: Callable[[object], int]
    ) -> TransferDone:
        with ThreadPoolExecutor(1) as pool:
            saving = pool.submit(self.save, backend, region)
            while not saving.done():
                look(None)
        return saving.result()


def _private_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon:")) * 1024


def _raw(path: Path, memory: mmap.mmap, size: int, call: Callable[..., int]) -> None:
    """Do the least that moves the bytes: O_DIRECT from several threads, allocated, fsync.

    Memory that is shorter than the file is used again and again.
    """
    view, is_new = memoryview(memory), call is os.pwritev
    flags = os.O_RDWR | os.O_DIRECT | (os.O_CREAT | os.O_TRUNC if is_new else 0)
    with opened(os.open(path, flags, 0o600)) as fd, ThreadPoolExecutor(THREADS) as pool:
        if is_new:
            os.posix_fallocate(fd, 0, size)

        def move(at: int) -> int:
            start = at % len(view)
            return call(fd, [view[start : start + min(CHUNK_BYTES, size - at)]], at)

        assert sum(pool.map(move, range(0, size, CHUNK_BYTES))) == size
        os.fsync(fd)


def _large_pages() -> mmap.mmap:
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    memory = mmap.mmap(-1, 2 * THREADS * CHUNK_BYTES, flags=flags)
    with contextlib.suppress(OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    memory[:] = os.urandom(len(memory))
    return memory


def _machine(folder: Path) -> dict[str, str]:
    models = [x for x in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in x]
    mounts: list[Any] = [line.split() for line in Path("/proc/mounts").read_text().splitlines()]
    inside = [m for m in mounts if folder.resolve().is_relative_to(m[1])]
    return {
        "processor": (models or ["unknown"])[0].partition(": ")[2] or platform.machine(),
        "cores": str(os.cpu_count()),
        "kernel": f"{platform.system()} {platform.release()}",
        "file system": max(inside, key=lambda m: len(m[1]))[2],
        "python": platform.python_version(),
        "load average at the start": f"{os.getloadavg()[0]:.1f}",
    }
