"""Saves and loads of GPU memory beside what the disk can do and beside what others do."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import mmap
import os
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import xxhash

from gms.adapters.backends import find_backend
from gms.adapters.buffers import buffer_pages
from gms.adapters.encrypted import Ciphers, Encrypted
from gms.domain.tasks import LOAD_THREADS, SaveTask, TransferDone
from gms.domain.transfer import CHUNK_BYTES, FilePlan, plan_files
from gms.ports import TransferBackend
from gms.transfer_child.save import ciphers_of, write_part
from snapshot_shared.artifact import PartManifest
from snapshot_shared.codec import decode_json
from snapshot_shared.files import open_root, opened
from snapshot_shared.keys import ArtifactKeys
from tests.bench import disk, goals
from tests.bench.common import MIB, Rows, rotated, say
from tests.bench.machine import Watch, highest_bytes, recycle, reported_bytes
from tests.bench.peers import LOADERS, SAVERS, Peer, tried
from tests.bench.regions import CHUNKS, Memory, Region
from tests.support.artifact_keys import put_encryption
from tests.support.builders import UID, layout, save_task

OTHER = f"{UID[:-1]}2"
ENCRYPTED = "posix-direct, encrypted"
OURS = ("posix-direct", "posix-buffered", ENCRYPTED)
LOOKED_AT = (goals.SHAPES[0], goals.PAGES[1])
THREADS: int = next(x.default for x in msgspec.structs.fields(SaveTask) if x.name == "threads")
PROBES = sorted({4, 8, 16, THREADS, LOAD_THREADS})
"""Threads of a raw probe."""

SMALL = 2000
OTHERS = {"fio", *(peer.name for peer in (*SAVERS, *LOADERS))}
"""Those without which a run goes on."""

LARGE_ALONE = {"tensorizer"}
"""It digests with SHA-256: 2,000 small allocations would take a tenth of a whole run."""

FILES = 10
"""As many files with all bytes are on the disk at the same time."""


def _nothing(_: Region) -> None:
    pass


@dataclass(frozen=True)
class Turn:
    """One contender of a row, in memory that it is given; `ready` is not timed.

    `region` is None for new memory in ordinary pages. `call` may return seconds by its own clock.
    `copies` says how often it may need the memory that its bytes take: for the page cache, and for
    a copy of its own. Another turn of the same contender may come right after, with the files in
    the page cache.
    """

    row: str
    name: str
    region: Region | None
    call: Callable[[Region], float | None]
    ready: Callable[[Region], None] = _nothing
    copies: int = 0
    loads: bool = False
    cached: Turn | None = None


class Bench:
    """One run: contenders take turns in a folder of the disk that is measured."""

    def __init__(self, folder: Path, size: int, rounds: int, *, in_huge_pages: bool) -> None:
        self.folder, self.rounds = folder, rounds
        # Whole pages for every one of many allocations.
        self.size = size - size % (SMALL * mmap.PAGESIZE)
        self.seconds: Rows = {}
        self.cpu: Rows = {}
        kinds = [pages for pages in goals.PAGES if in_huge_pages or pages != "huge"]
        self.memories = [Memory(self.size, in_huge_pages=pages == "huge") for pages in kinds]
        self.regions = {
            (pages, shape): Region(memory, count)
            for pages, memory in zip(kinds, self.memories, strict=True)
            for shape, count in zip(goals.SHAPES, (1, SMALL), strict=True)
        }
        self.pages = kinds
        self.keys = put_encryption(folder / "keys").parent
        self.staging = [buffer_pages(CHUNK_BYTES) for _ in range(CHUNKS)]
        self.absent: dict[str, str] = {}
        self.wanted: dict[int, bytes] = {}
        self.begin = self.said = 0.0

    def close(self) -> None:
        """Release the memory; views keep it."""
        gc.unfreeze()
        for memory in self.memories:
            memory.close()

    def run(self) -> goals.Transfers:
        say(f"{goals.size_text(self.size)}: fill memory, try each peer")
        for memory in self.memories:
            memory.fill()
        for at, pages in enumerate(self.staging):
            part = self.memories[0].bytes[at * CHUNK_BYTES :][:CHUNK_BYTES]
            pages[: len(part)] = part
        for region in self.regions.values():
            self.wanted[len(region.infos)] = region.looked_at()
        self.absent = tried(self.folder, SAVERS, LOADERS)
        if shutil.which("fio") is None:
            self.absent["fio"] = "not installed"
        for name, why in self.absent.items():
            say(f"{name} is left out: {why}")
        # What is imported by now stays, and need not be looked at before each turn.
        gc.freeze()
        groups = [group(shape) for shape in goals.SHAPES for group in (self._saves, self._loads)]
        orders = [
            [
                turn
                for turns in groups
                for some in (turns, _with_limits(turns) * (goals.TURNS_WITH_LIMITS - 1))
                for turn in rotated(some, number, self.rounds)
            ]
            for number in range(self.rounds)
        ]
        watch, reported, self.begin = Watch(), reported_bytes(), time.monotonic()
        total, done = sum(map(len, orders)), 0
        for number, turns in enumerate(orders):
            for turn in turns:
                self._say(number, turn, done / total)
                disk.drop(self.folder)
                self._take(turn)
                done += 1
        others, now = watch.others(), reported_bytes()
        again, extra = self._counted()
        return goals.Transfers(
            size=self.size,
            seconds=self.seconds,
            cpu=self.cpu,
            absent=self.absent,
            others=others,
            reported=None if now is None or reported is None else now - reported,
            written_again=again,
            extra_bytes=extra,
            extra_limit=THREADS * CHUNK_BYTES + 32 * MIB,
            threads={"save": THREADS, "load": LOAD_THREADS},
        )

    def _say(self, number: int, turn: Turn, share: float) -> None:
        """Say at the beginning, and then every ten seconds, how far the run is."""
        now = time.monotonic()
        if share and now < self.said + 10:
            return
        self.said = now
        text = f"{goals.size_text(self.size)}: round {number + 1} of {self.rounds}, {share:.0%}"
        if share:
            text += f", about {(now - self.begin) * (1 / share - 1):.0f} s left"
        say(f"{text}: {turn.row}, {turn.name}")

    def _take(self, turn: Turn) -> None:
        """Let a contender have its turn, on memory that is there."""
        if turn.name in self.absent:
            return
        with contextlib.ExitStack() as stack:
            region = turn.region
            if region is None:
                region = Region(stack.enter_context(contextlib.closing(Memory(self.size))), 1)
            turn.ready(region)
            if turn.loads and turn.region:
                region.spoil()
            gc.collect()
            room = min(512 * MIB, 4 * self.size)
            recycle((turn.copies + (turn.region is None)) * self.size + room)
            for memory in self.memories:
                memory.touch()
            try:
                self._timed(turn, region)
                if turn.loads and region.looked_at() != self.wanted[len(region.infos)]:
                    raise RuntimeError(f"{turn.row}: {turn.name} brought other bytes")
            except Exception as error:
                if turn.name not in OTHERS:
                    raise
                self._leave_out(turn.name, f"{type(error).__name__}: {error}")
                region.memory.fill()
        if turn.cached:
            self._take(turn.cached)

    def _leave_out(self, name: str, why: str) -> None:
        """Go on without one that failed: what it has done so far compares with nothing."""
        say(f"{name} is left out: {why}")
        self.absent[name] = why.partition("\n")[0]
        for rows in (self.seconds, self.cpu):
            for row in rows.values():
                row.pop(name, None)

    def _timed(self, turn: Turn, region: Region) -> None:
        begin, before = time.perf_counter(), os.times()
        own = turn.call(region)
        taken, after = time.perf_counter() - begin, os.times()
        row = self.seconds.setdefault(turn.row, {})
        row.setdefault(turn.name, []).append(taken if own is None else own)
        if own is None:
            used = after.user - before.user + after.system - before.system
            self.cpu.setdefault(turn.row, {}).setdefault(turn.name, []).append(used)

    def _saves(self, shape: str) -> list[Turn]:
        row = goals.saving(shape)
        turns = self._limits(row, os.pwritev, "write")
        for pages in self.pages:
            region, key = self.regions[pages, shape], goals.in_pages(row, pages)
            calls = {
                name: (partial(self._saved, name), name, copies)
                for name, copies in _ours(shape, pages).items()
            }
            calls |= {x.name: (self._by(x), x.file, x.copies) for x in self._present(SAVERS, shape)}
            for name, (call, file, copies) in calls.items():
                turns.append(Turn(key, name, region, call, self._gone(file), copies))
        return turns

    def _loads(self, shape: str) -> list[Turn]:
        row = goals.loading(shape)
        turns = self._limits(row, os.preadv, "read")
        for pages in self.pages:
            region, cached = self.regions[pages, shape], goals.in_pages(goals.CACHED, pages)
            peers = self._present(LOADERS, shape)
            found = self._loaders(goals.in_pages(row, pages), region, _ours(shape, pages), peers)
            if shape == goals.SHAPES[0]:
                found = [self._and_cached(turn, cached) for turn in found]
                found.append(Turn(cached, goals.MEMCPY, region, self._memcpy, loads=True))
            turns += found
        if shape == goals.SHAPES[0]:
            # New memory costs each the same, and the slowest one the run most.
            peers = self._present(LOADERS, goals.SHAPES[1])
            turns += self._loaders(
                goals.in_pages(goals.FRESH, goals.PAGES[1]), None, {OURS[0]: 1}, peers
            )
        return turns

    def _and_cached(self, turn: Turn, row: str) -> Turn:
        """Let another turn follow with the file in the page cache, where it has its memory."""
        ready, copies = self._warm(turn.name), turn.copies - 1
        return replace(turn, cached=replace(turn, row=row, ready=ready, copies=copies))

    def _loaders(
        self, row: str, region: Region | None, ours: Mapping[str, int], peers: Sequence[Peer]
    ) -> list[Turn]:
        calls = {name: (partial(self.load, name), copies) for name, copies in ours.items()}
        calls |= {peer.name: (self._by(peer), peer.copies) for peer in peers}
        return [
            Turn(row, name, region, call, copies=copies, loads=True)
            for name, (call, copies) in calls.items()
        ]

    def _present(self, peers: Sequence[Peer], shape: str) -> list[Peer]:
        left_out = {*self.absent, *(LARGE_ALONE if shape != goals.SHAPES[0] else ())}
        return [peer for peer in peers if peer.name not in left_out]

    def _limits(self, row: str, call: Callable[..., int], verb: str) -> list[Turn]:
        """Return the probes that take turns with a row, and once a round the profile."""
        files, key = disk.files_of(self.size), goals.limit_of(row)
        # The memory is that of the probe.
        region = self.regions[self.pages[0], goals.SHAPES[0]]

        def probe(threads: int, work: disk.Work | None, _: Region) -> None:
            path = self.folder / "raw"
            disk.raw_transfer(
                path, self.staging, self.size, call, threads=threads, files=files, work=work
            )

        def fio(_: Region) -> float:
            return disk.fio_seconds(self.folder, self.size, verb, files)

        gone = self._gone(*(f"raw-{n}" for n in range(files)), "raw")
        ready = gone if verb == "write" else _nothing
        turns = [
            Turn(key, goals.probe_of(threads), region, partial(probe, threads, None), ready)
            for threads in PROBES
        ]
        if "fio" not in self.absent:
            turns.append(Turn(key, "fio", region, fio))
        if goals.SHAPES[0] in row:
            threads = THREADS if verb == "write" else LOAD_THREADS
            works: list[disk.Work] = [_digest, self._digest_and_copy]
            profile = goals.profile_of("save" if verb == "write" else "load")
            for name, work in zip(goals.STEPS, works, strict=True):
                turns.append(Turn(profile, name, region, partial(probe, threads, work), ready))
        return turns

    def _digest_and_copy(self, chunk: memoryview, at: int) -> None:
        """Do what a transfer does for ordinary pages. The region keeps its bytes."""
        _digest(chunk, at)
        _move(_address(self.memories[-1].map) + at, chunk)

    def _memcpy(self, region: Region) -> None:
        """Copy in one thread, and look at nothing."""
        to = _address(region.memory.map)
        for at in range(0, self.size, CHUNK_BYTES):
            whole = memoryview(self.staging[at // CHUNK_BYTES % CHUNKS])
            _move(to + at, whole[: self.size - at])

    def _gone(self, *names: str) -> Callable[[Region], None]:
        return lambda _: disk.removed(self.folder, *names)

    def _by(self, peer: Peer) -> Callable[[Region], None]:
        return lambda region: peer.call(self.folder, region.arrays, region.memory.array)

    def _saved(self, name: str, region: Region) -> None:
        self.save(name, region)

    def save(self, name: str, region: Region, *, uid: str = UID) -> TransferDone:
        """Save as GMS does, in a part of its own."""
        task = self._task(name, uid)
        ciphers = ciphers_of(task)
        backend = _backend(task, region, ciphers)
        with opened(open_root(task.root, create=True)) as root:
            return write_part(
                root,
                task,
                region.infos,
                [],
                region.views,
                lambda _: None,
                backend=backend,
                ciphers=ciphers,
            )

    def load(self, name: str, region: Region) -> None:
        """Read what `save` wrote into a region, every digest compared."""
        path, task, ciphers = self._part(name), self._task(name), None
        manifest = manifest_of(path)
        if manifest.encryption:
            ciphers = Ciphers(ArtifactKeys(self.keys), task)
            ciphers.open(manifest)
        plans, backend = plans_of(manifest), _backend(task, region, ciphers)
        with opened(open_root(path)) as directory:
            backend.read_files(
                directory, plans, manifest.files, region.views, threads=LOAD_THREADS, advance=abs
            )

    def _task(self, name: str, uid: str = UID) -> SaveTask:
        return save_task(
            root=str(self.folder / name),
            content_uid=uid,
            layout=layout(bytes=self.size),
            backend=OURS[0] if name == ENCRYPTED else name,
            encrypt=name == ENCRYPTED,
            artifact_keys=str(self.keys),
        )

    def _part(self, backend: str) -> Path:
        return self.folder / backend / "default" / UID / "gen-1" / "gpu-0"

    def _warm(self, name: str) -> Callable[[Region], None]:
        """Return what brings the files that a contender reads into the page cache."""

        def warm(_: Region) -> None:
            files = {peer.name: self.folder / peer.file for peer in LOADERS}
            disk.warm(files.get(name) or self._part(name))

        return warm

    def _counted(self) -> tuple[float, dict[str, int]]:
        backend, region = OURS[0], self.regions[self.pages[0], goals.SHAPES[1]]
        disk.removed(self.folder, backend)
        with highest_bytes() as of_save:
            done = self.save(backend, region)
        with highest_bytes() as of_load:
            self.load(backend, region)
        (self._part(backend).parent / "root.json").write_text("{}")
        again = self.save(backend, region, uid=OTHER)
        return again.moved / done.moved, {"save": of_save[0], "load": of_load[0]}


def manifest_of(part: Path) -> PartManifest:
    return decode_json((part / "part.json").read_bytes(), PartManifest, limit=2**30)


def plans_of(manifest: PartManifest) -> list[FilePlan]:
    """Return how the files of a part are read."""
    assert manifest.layout is not None
    sizes = [entry.size for entry in manifest.files]
    chunks = [entry.chunk_bytes for entry in manifest.files]
    return plan_files(manifest.layout.allocations, sizes, chunk_bytes=chunks)


def _ours(shape: str, pages: str) -> dict[str, int]:
    """Return what of ours takes part in a row, and how many copies of the bytes each may need.

    The second is for file systems that know no direct I/O, and looked at once.
    """
    return dict(zip(OURS, (1, 2, 1), strict=True)) if (shape, pages) == LOOKED_AT else {OURS[0]: 1}


def _with_limits(turns: Sequence[Turn]) -> list[Turn]:
    """Return the turns of which there are more in a round, without those that follow them."""
    names = {*map(goals.probe_of, PROBES), "fio", *goals.STEPS, OURS[0]}
    return [replace(turn, cached=None) for turn in turns if turn.name in names and turn.region]


def _backend(task: SaveTask, region: Region, ciphers: Ciphers | None) -> TransferBackend:
    found = find_backend(task.backend, in_place=region.memory.in_huge_pages)
    return Encrypted(found, ciphers) if ciphers else found


def _digest(chunk: memoryview, _: int) -> None:
    xxhash.xxh3_128_digest(chunk)


def _move(to: int, chunk: memoryview) -> None:
    ctypes.memmove(to, _address(chunk), len(chunk))


def _address(memory: Any) -> int:
    return ctypes.addressof(ctypes.c_ubyte.from_buffer(memory))
