"""Saves and loads of GPU memory beside what the disk can do and beside what others do."""

from __future__ import annotations

import contextlib
import ctypes
import json
import mmap
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from gms.adapters.backends import find_backend
from gms.adapters.buffers import buffer_pages
from gms.domain.tasks import LOAD_THREADS, SaveTask, TransferDone
from gms.domain.transfer import CHUNK_BYTES, plan_files
from gms.transfer_child.save import write_part
from snapback_client.frames import AllocationInfo, aligned
from snapback_client.reservation import HUGE_PAGE
from snapshot_shared.artifact import PartManifest
from snapshot_shared.codec import decode_json
from snapshot_shared.files import open_root, opened
from snapshot_shared.orders import LayoutRef
from tests.bench.machine import Watch, huge_bytes_free, new_memory
from tests.bench.peers import LOADERS, SAVERS, Peer
from tests.bench.results import SHAPES, STEPS, Rows, Transfers, size_text

MIB = 1024 * 1024
UID = "00000000-0000-4000-8000-00000000000"
OURS = ("posix-direct", "posix-buffered")
THREADS = 4
SMALL = 2000
WINDOW = 4 * MIB
"""What a load reads in one request."""


class Memory:
    """Memory of a simulated device, in huge pages or in ordinary ones."""

    def __init__(self, size: int, *, in_huge_pages: bool = False) -> None:
        self.in_huge_pages = in_huge_pages
        whole = aligned(size, HUGE_PAGE)
        self.descriptor = new_memory(whole, in_huge_pages=in_huge_pages)
        self.map = mmap.mmap(self.descriptor, whole)
        self.bytes = memoryview(self.map)[:size]
        self.array = np.frombuffer(self.bytes, dtype="u1")

    def fill(self) -> None:
        """Put random bytes everywhere, which also touches every page."""
        rng = np.random.default_rng(1)
        for start in range(0, len(self.array), CHUNK_BYTES):
            part = self.array[start : start + CHUNK_BYTES]
            part[:] = np.frombuffer(rng.bytes(len(part)), dtype="u1")

    def close(self) -> None:
        """Release the memory; views keep it."""
        os.close(self.descriptor)


class Region:
    """Allocations side by side in memory, each on pages of its own."""

    def __init__(self, memory: Memory, count: int) -> None:
        self.memory = memory
        step = len(memory.bytes) // count
        each = step - (count > 1)
        self.infos = [
            AllocationInfo(id=f"a{slot}", size=each, aligned=step, tag="", slot=slot)
            for slot in range(count)
        ]
        whole = memory.bytes
        self.views = [whole[slot * step : slot * step + each] for slot in range(count)]
        self.arrays = {
            info.id: np.frombuffer(view, dtype="u1")
            for info, view in zip(self.infos, self.views, strict=True)
        }


class Bench:
    """One run: contenders take turns in a folder of the disk that is measured."""

    def __init__(self, folder: Path, size: int, rounds: int, say: Callable[[str], None]) -> None:
        self.folder, self.rounds, self.say = folder, rounds, say
        # Whole pages for every one of many allocations.
        self.size = size - size % (SMALL * mmap.PAGESIZE)
        self.seconds: Rows = {}
        self.cpu: Rows = {}
        self.memory = Memory(self.size, in_huge_pages=huge_bytes_free() >= self.size + HUGE_PAGE)
        self.regions = {
            shape: Region(self.memory, n) for shape, n in zip(SHAPES, (1, SMALL), strict=True)
        }
        self.staging = [huge_pages() for _ in range(max(2 * THREADS, LOAD_THREADS))]
        self.layout = LayoutRef(
            device="GPU-1",
            incarnation="i",
            generation=1,
            layout_id="l",
            structure_hash="h",
            bytes=self.size,
        )

    def run(self) -> Transfers:
        """Measure everything."""
        self.memory.fill()
        watch = Watch()
        for number in range(1, self.rounds + 1):
            self.say(f"{size_text(self.size)}: round {number} of {self.rounds}")
            for shape, region in self.regions.items():
                self._saves(shape, region)
                self._loads(shape, region)
        others = watch.others()
        again, extra = self._counted()
        return Transfers(
            size=self.size,
            seconds=self.seconds,
            cpu=self.cpu,
            in_huge_pages=self.memory.in_huge_pages,
            others=others,
            written_again=again,
            extra_bytes=extra,
            extra_limit=THREADS * CHUNK_BYTES + 32 * MIB,
        )

    @contextlib.contextmanager
    def _timed(self, row: str, contender: str) -> Iterator[None]:
        begin, before = time.perf_counter(), os.times()
        yield
        taken, after = time.perf_counter() - begin, os.times()
        self.seconds.setdefault(row, {}).setdefault(contender, []).append(taken)
        used = after.user - before.user + after.system - before.system
        self.cpu.setdefault(row, {}).setdefault(contender, []).append(used)

    def _absent(self, row: str, contender: str) -> None:
        self.seconds.setdefault(row, {}).setdefault(contender, [])

    def _saves(self, shape: str, region: Region) -> None:
        row = f"save, {shape}"
        self._limits(row, os.pwritev)
        self._fio(row, "write")
        for backend in OURS:
            shutil.rmtree(self.folder / backend, ignore_errors=True)
            with self._timed(row, backend):
                self.save(backend, region)
        for peer in SAVERS:
            if not peer.is_installed:
                self._absent(row, peer.name)
                continue
            with self._timed(row, peer.name):
                peer.call(self.folder, region.arrays, self.memory.array)

    def _limits(self, row: str, call: Callable[..., int]) -> None:
        whole = self.memory.bytes
        scattered = [whole[at : at + CHUNK_BYTES] for at in range(0, self.size, CHUNK_BYTES)]
        for name, memory in (("raw", scattered), ("raw, huge pages", self.staging)):
            with self._timed(row, name):
                raw_transfer(self.folder / "raw", memory, self.size, call)

    def _loads(self, shape: str, region: Region) -> None:
        cold = f"load, cold, pooled, {shape}"
        self._limits(cold, os.preadv)
        for step, name in enumerate(STEPS):
            with self._timed(cold, name):
                self._windows(digested=step > 0, copied=step > 1)
        self._fio(cold, "read")
        for backend in OURS:
            self._drop()
            with self._timed(cold, backend):
                self.load(backend, region)
        for peer in LOADERS:
            self._peer(cold, peer, region, is_cold=True)
        if shape != SHAPES[0]:
            return
        cached = f"load, cached, {shape}"
        for backend in OURS:
            self._warm(backend)
            with self._timed(cached, backend):
                self.load(backend, region)
        for peer in LOADERS:
            self._peer(cached, peer, region, is_cold=False)
        fresh = f"load, cold, fresh, {shape}"
        for backend in OURS:
            self._fresh(fresh, backend)
        for peer in LOADERS:
            self._fresh(fresh, peer)

    def _fresh(self, row: str, contender: str | Peer) -> None:
        """Load into new memory in ordinary pages, which is gone afterwards; ours a second time."""
        with contextlib.closing(Memory(self.size)) as memory:
            region = Region(memory, 1)
            if isinstance(contender, Peer):
                self._peer(row, contender, region, is_cold=True)
                return
            self._drop()
            with self._timed(row, contender):
                self.load(contender, region)
            if self.memory.in_huge_pages:
                self._drop()
                with self._timed("load, cold, pooled, ordinary pages", contender):
                    self.load(contender, region)

    def _peer(self, row: str, peer: Peer, region: Region, *, is_cold: bool) -> None:
        if not peer.is_installed:
            self._absent(row, peer.name)
            return
        if is_cold:
            self._drop()
        else:
            peer.call(self.folder, region.arrays, region.memory.array)
        with self._timed(row, peer.name):
            peer.call(self.folder, region.arrays, region.memory.array)

    def _windows(self, *, digested: bool, copied: bool) -> None:
        """Read the raw file with the requests and threads of a load, and do some of the rest."""
        free, region = list(self.staging), _address(self.memory.map)
        raw = os.open(self.folder / "raw", os.O_RDONLY | os.O_DIRECT)
        with opened(raw) as fd, ThreadPoolExecutor(LOAD_THREADS) as pool:

            def move(at: int) -> int:
                pages = free.pop()
                view = memoryview(pages)[: min(WINDOW, self.size - at)]
                done = os.preadv(fd, [view], at)
                if digested:
                    xxhash.xxh3_128_digest(view)
                if copied:
                    ctypes.memmove(region + at, _address(pages), len(view))
                view.release()
                free.append(pages)
                return done

            assert sum(pool.map(move, range(0, self.size, WINDOW))) == self.size

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
            found = find_backend(backend, in_place=region.memory.in_huge_pages)
            return write_part(
                root, task, region.infos, [], region.views, lambda _: None, backend=found
            )

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
            find_backend(backend, in_place=region.memory.in_huge_pages).read_files(
                directory,
                plans,
                manifest.files,
                region.views,
                threads=LOAD_THREADS,
                advance=advance,
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
        if verb == "write":
            # What a save writes is new.
            (self.folder / "fio").unlink(missing_ok=True)
        command = ["fio", "--name=limit", f"--rw={verb}", "--direct=1", "--bs=8M", "--iodepth=16"]
        command += ["--ioengine=libaio", f"--size={self.size}", "--end_fsync=1"]
        command += [f"--filename={self.folder / 'fio'}", "--output-format=json"]
        found = subprocess.run(command, check=True, capture_output=True, text=True)
        speed = json.loads(found.stdout)["jobs"][0][verb]["bw_bytes"]
        self.seconds.setdefault(row, {}).setdefault("fio", []).append(self.size / speed)

    def _counted(self) -> tuple[float, dict[str, int]]:
        backend, region = OURS[0], self.regions[SHAPES[1]]
        shutil.rmtree(self.folder / backend, ignore_errors=True)
        before = highest = private_bytes()

        def look(_: object) -> int:
            nonlocal highest
            highest = max(highest, private_bytes())
            return 0

        extra: dict[str, int] = {}
        task_done = self._watched_save(backend, region, look)
        extra["save"] = highest - before
        before = highest = private_bytes()
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


def private_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon:")) * 1024


def raw_transfer(path: Path, memory: Sequence[Any], size: int, call: Callable[..., int]) -> None:
    """Do the least that moves the bytes: O_DIRECT from several threads, allocated, fsync.

    Chunks of memory that are fewer than those of the file are used again and again.
    """
    is_new = call is os.pwritev
    flags = os.O_RDWR | os.O_DIRECT | (os.O_CREAT | os.O_TRUNC if is_new else 0)
    with opened(os.open(path, flags, 0o600)) as fd, ThreadPoolExecutor(THREADS) as pool:
        if is_new:
            os.posix_fallocate(fd, 0, size)

        def move(at: int) -> int:
            chunk = memoryview(memory[at // CHUNK_BYTES % len(memory)])
            return call(fd, [chunk[: min(CHUNK_BYTES, size - at)]], at)

        assert sum(pool.map(move, range(0, size, CHUNK_BYTES))) == size
        os.fsync(fd)


def huge_pages() -> mmap.mmap:
    memory = buffer_pages(CHUNK_BYTES)
    memory[:] = os.urandom(len(memory))
    return memory


def _address(memory: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_ubyte.from_buffer(memory))
