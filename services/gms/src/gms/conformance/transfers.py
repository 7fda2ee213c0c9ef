"""What a transfer backend promises, as tests that a package with a backend of its own runs.

A package that brings a backend names it in an entry point of the group `snapback.transfer_backends`
and tests it with a subclass of `FileBackendContract`, whose fixture `backend` returns it:

    class TestMyBackend(FileBackendContract):
        @pytest.fixture(scope="module")
        def backend(self) -> TransferBackend:
            return MyBackend()

A backend that keeps its bytes in no files has a subclass of `TransferBackendContract`, with a
fixture `bodies` as well. `pip install snapback-gms[testing]` brings pytest and Hypothesis.
"""

from __future__ import annotations

import contextlib
import dataclasses
import mmap
import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random

import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from gms.adapters import buffers
from gms.domain.transfer import PAGE, FilePlan, place, plan_files
from gms.ports import Moved, ResumableBackend, TransferBackend
from snapback_client.frames import AllocationInfo
from snapshot_shared.errors import ArtifactCorrupt, ArtifactExists, ArtifactMissing
from snapshot_shared.files import open_root, opened

MIB = 1024 * 1024
CHUNK = 2 * PAGE
SIZES = [PAGE + 5, 1, 3 * PAGE + 5, 4 * PAGE, PAGE - 1, 9 * PAGE]
"""Allocations that begin and end within pages, chunks and shards."""


class Bodies:
    """The bytes of a part as a backend leaves them, in files, for a test to read and to damage."""

    def read(self, folder: Path, plan: FilePlan, moved: Moved) -> bytes:
        return (folder / plan.name).read_bytes()

    def flip(self, folder: Path, plan: FilePlan, where: int) -> None:
        with (folder / plan.name).open("r+b") as shard:
            shard.seek(where)
            byte = shard.read(1)[0]
            shard.seek(where)
            shard.write(bytes([byte ^ 4]))

    def resize(self, folder: Path, plan: FilePlan, change: int) -> None:
        os.truncate(folder / plan.name, plan.size + change)

    def remove(self, folder: Path, plan: FilePlan) -> None:
        (folder / plan.name).unlink()

    def swap(self, folder: Path, one: FilePlan, other: FilePlan) -> None:
        aside = folder / "aside"
        (folder / one.name).rename(aside)
        (folder / other.name).rename(folder / one.name)
        aside.rename(folder / other.name)


class Memory:
    """Allocations side by side in mapped memory, `shift` bytes past the beginning of a page."""

    def __init__(self, sizes: Sequence[int], *, shift: int = 0) -> None:
        self.sizes = sizes
        starts, end = [], shift
        for size in sizes:
            starts.append(end)
            end += -(-size // PAGE) * PAGE
        self.map = mmap.mmap(-1, end + PAGE)
        self.views = [
            memoryview(self.map)[at : at + size] for at, size in zip(starts, sizes, strict=True)
        ]

    def fill(self, seed: int) -> Memory:
        rng = Random(seed)
        for view in self.views:
            view[:] = rng.randbytes(len(view))
        return self

    def bytes(self) -> list[bytes]:
        return [bytes(view) for view in self.views]


def plans_of(sizes: Sequence[int], *, shard: int = 4 * PAGE, chunk: int = CHUNK) -> list[FilePlan]:
    """Plan files of `shard` bytes at most, in chunks of `chunk` bytes, for allocations."""
    infos = [
        AllocationInfo(id=f"a{slot}", size=size, aligned=size, tag="", slot=slot)
        for slot, size in enumerate(sizes)
    ]
    entries, lengths = place(infos, shard_bytes=shard)
    return plan_files(entries, lengths, chunk_bytes=[chunk] * len(lengths))


def ignored(_: int) -> None:
    """Take what a backend reports of its progress."""


def write(
    backend: TransferBackend, folder: int, plans: list[FilePlan], memory: Memory, threads: int = 1
) -> Moved:
    """Write allocations and return what the backend says of it."""
    return backend.write_files(folder, plans, memory.views, threads=threads, advance=ignored)


def read(
    backend: TransferBackend, folder: int, plans: list[FilePlan], moved: Moved, memory: Memory
) -> Moved:
    """Read allocations and return what the backend says of it."""
    return backend.read_files(folder, plans, moved.files, memory.views, threads=2, advance=ignored)


def open_files() -> set[str]:
    """Return the open files, without connections, which a client keeps for the next request."""
    found = set()
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            found.add(f"{entry.name} {entry.readlink()}")
    return {each for each in found if " socket:" not in each and "/proc/" not in each}


def private_bytes() -> int:
    """Return the bytes of memory that no other process shares."""
    lines = Path("/proc/self/status").read_text().splitlines()
    (line,) = [line for line in lines if line.startswith("RssAnon:")]
    return int(line.split()[1]) * 1024


class Notes:
    """What a killed process has noted, and what is noted now."""

    every_bytes = CHUNK

    def __init__(self, known: dict[str, dict[int, str]] | None = None) -> None:
        self.known = known or {}
        self.new: dict[str, dict[int, str]] = {}

    def written(self, name: str) -> dict[int, str]:
        return self.known.get(name, {})

    def tags(self, name: str) -> dict[int, bytes]:
        return {}

    def note(self, chunks: Sequence[tuple[str, int, str]], tags: Sequence[bytes] = ()) -> None:
        for name, index, found in chunks:
            self.new.setdefault(name, {})[index] = found


class TransferBackendContract:
    """The promises of every backend. A subclass gives `backend`."""

    @pytest.fixture(scope="module")
    def backend(self) -> TransferBackend:
        """Return the backend that is tested."""
        raise NotImplementedError("return a transfer backend from the fixture `backend`")

    @pytest.fixture(scope="module")
    def bodies(self) -> Bodies:
        """Return what reads and damages the bytes that the backend has written."""
        return Bodies()

    @pytest.fixture(scope="module")
    def in_place(self) -> bool:
        """Return whether the backend moves bytes without buffers of its own."""
        return False

    @pytest.fixture
    def folder(self, tmp_path: Path) -> Iterator[int]:
        """Open the folder of a part."""
        with opened(open_root(tmp_path)) as fd:
            yield fd

    @given(
        sizes=st.lists(st.integers(1, 9 * PAGE), min_size=1, max_size=8),
        shard=st.integers(1, 6),
        chunk=st.integers(1, 5),
        threads=st.integers(1, 4),
        shift=st.sampled_from([0, 0, 1, 512]),
        zeros=st.booleans(),
    )
    @settings(max_examples=15, deadline=None)
    def test_what_is_written_is_read_again_byte_for_byte(
        self,
        backend: TransferBackend,
        bodies: Bodies,
        sizes: list[int],
        shard: int,
        chunk: int,
        threads: int,
        shift: int,
        zeros: bool,
    ) -> None:
        plans = plans_of(sizes, shard=shard * PAGE, chunk=chunk * PAGE)
        memory = Memory(sizes, shift=shift).fill(len(sizes))
        if zeros:
            memory.views[-1][:] = bytes(sizes[-1])
        before = memory.bytes()
        with tempfile.TemporaryDirectory() as path, opened(open_root(path)) as folder:
            moved = write(backend, folder, plans, memory, threads)
            assert memory.bytes() == before
            for plan, entry in zip(plans, moved.files, strict=True):
                data = bodies.read(Path(path), plan, moved)
                assert (entry.name, entry.size, len(data)) == (plan.name, plan.size, plan.size)
                starts = range(0, plan.size, plan.chunk_bytes)
                pieces = [data[at : at + plan.chunk_bytes] for at in starts]
                assert [xxhash.xxh3_128_hexdigest(piece) for piece in pieces] == entry.chunks
            again = Memory(sizes, shift=shift)
            read(backend, folder, plans, moved, again)
        assert again.bytes() == before

    @pytest.mark.parametrize("damaged", [False, True])
    def test_a_long_chunk_comes_whole_into_memory_that_is_not_mapped_yet(
        self, backend: TransferBackend, bodies: Bodies, folder: int, tmp_path: Path, damaged: bool
    ) -> None:
        sizes = [9 * MIB + 5, 3 * MIB, 5 * MIB + 1]
        plans = plans_of(sizes, shard=32 * MIB, chunk=16 * MIB)
        memory = Memory(sizes).fill(14)
        moved = write(backend, folder, plans, memory)
        if damaged:
            bodies.flip(tmp_path, plans[0], 7 * MIB)
        if (tmp_path / plans[0].name).exists():
            with opened(os.open(tmp_path / plans[0].name, os.O_RDWR)) as shard:
                os.fsync(shard)
                os.posix_fadvise(shard, 0, 0, os.POSIX_FADV_DONTNEED)
        again = Memory(sizes)
        if damaged:
            with pytest.raises(ArtifactCorrupt, match="chunk 0"):
                read(backend, folder, plans, moved, again)
            return
        read(backend, folder, plans, moved, again)
        assert again.bytes() == memory.bytes()

    def test_every_byte_is_reported_once(self, backend: TransferBackend, folder: int) -> None:
        plans = plans_of(SIZES)
        done: list[int] = []
        memory = Memory(SIZES).fill(1)
        moved = backend.write_files(folder, plans, memory.views, threads=3, advance=done.append)
        assert sum(done) == sum(plan.size for plan in plans)
        done.clear()
        again = Memory(SIZES)
        backend.read_files(folder, plans, moved.files, again.views, threads=3, advance=done.append)
        assert sum(done) == sum(plan.size for plan in plans)

    @pytest.mark.parametrize("where", [0, PAGE + 4, PAGE + 6, CHUNK - 1, CHUNK])
    def test_a_flipped_bit_is_found_with_its_file_and_chunk(
        self, backend: TransferBackend, bodies: Bodies, folder: int, tmp_path: Path, where: int
    ) -> None:
        plans = plans_of(SIZES)
        moved = write(backend, folder, plans, Memory(SIZES).fill(2))
        bodies.flip(tmp_path, plans[0], where)
        with pytest.raises(ArtifactCorrupt) as caught:
            read(backend, folder, plans, moved, Memory(SIZES))
        assert caught.value.values["file"] == plans[0].name
        assert caught.value.values["chunk"] == where // CHUNK

    @pytest.mark.parametrize("change", [-1, 1, -PAGE])
    def test_a_file_of_another_length_is_refused(
        self, backend: TransferBackend, bodies: Bodies, folder: int, tmp_path: Path, change: int
    ) -> None:
        plans = plans_of(SIZES)
        moved = write(backend, folder, plans, Memory(SIZES).fill(3))
        bodies.resize(tmp_path, plans[1], change)
        with pytest.raises(ArtifactCorrupt):
            read(backend, folder, plans, moved, Memory(SIZES))

    def test_a_missing_file_is_refused_as_missing(
        self, backend: TransferBackend, bodies: Bodies, folder: int, tmp_path: Path
    ) -> None:
        plans = plans_of(SIZES)
        moved = write(backend, folder, plans, Memory(SIZES).fill(4))
        bodies.remove(tmp_path, plans[1])
        with pytest.raises(ArtifactMissing, match=plans[1].name):
            read(backend, folder, plans, moved, Memory(SIZES))

    def test_bodies_that_changed_places_are_found(
        self, backend: TransferBackend, bodies: Bodies, folder: int, tmp_path: Path
    ) -> None:
        plans = plans_of(SIZES)
        assert plans[0].size == plans[1].size
        moved = write(backend, folder, plans, Memory(SIZES).fill(4))
        bodies.swap(tmp_path, plans[0], plans[1])
        with pytest.raises(ArtifactCorrupt, match="damaged"):
            read(backend, folder, plans, moved, Memory(SIZES))

    @pytest.mark.parametrize("threads", [1, 4])
    def test_what_advance_raises_ends_a_transfer_and_leaves_nothing_open(
        self, backend: TransferBackend, folder: int, tmp_path: Path, threads: int
    ) -> None:
        plans = plans_of(SIZES * 20)
        memory = Memory(SIZES * 20).fill(6)
        reported: list[int] = []

        class Cancelled(Exception):
            pass

        def stop(size: int) -> None:
            reported.append(size)
            raise Cancelled

        backend.write_files(folder, plans, memory.views, threads=threads, advance=ignored)
        for plan in plans:
            (tmp_path / plan.name).unlink(missing_ok=True)
        before = open_files()
        with pytest.raises(Cancelled):
            backend.write_files(folder, plans, memory.views, threads=threads, advance=stop)
        for plan in plans:
            (tmp_path / plan.name).unlink(missing_ok=True)
        moved = write(backend, folder, plans, memory, threads)
        with pytest.raises(Cancelled):
            backend.read_files(
                folder, plans, moved.files, Memory(SIZES * 20).views, threads=threads, advance=stop
            )
        assert open_files() <= before
        assert len(reported) < sum(len(plan.chunks) for plan in plans)

    def test_memory_for_a_transfer_is_bounded(
        self, backend: TransferBackend, in_place: bool, folder: int
    ) -> None:
        chunk, threads = MIB, 4
        sizes = [3 * MIB + 5] * 30
        fd = os.memfd_create("region")
        os.ftruncate(fd, 4 * MIB * len(sizes))
        region = memoryview(mmap.mmap(fd, 0))
        views = [region[i * 4 * MIB :][: sizes[i]] for i in range(len(sizes))]
        for i, view in enumerate(views):
            view[:] = bytes([i + 1]) * len(view)
        plans = plans_of(sizes, shard=64 * MIB, chunk=chunk)
        highest, before = 0, private_bytes()

        def look(_: int) -> None:
            nonlocal highest
            highest = max(highest, private_bytes())

        moved = backend.write_files(folder, plans, views, threads=threads, advance=look)
        region[:] = bytes(len(region))
        backend.read_files(folder, plans, moved.files, views, threads=threads, advance=look)
        os.close(fd)
        assert highest - before <= (2 * MIB if in_place else threads * chunk + 32 * MIB)
        assert all(view[-1] == i + 1 for i, view in enumerate(views))

    @given(
        sizes=st.lists(st.integers(1, 9 * PAGE), min_size=1, max_size=6),
        chunk=st.integers(1, 3),
        threads=st.integers(1, 3),
        seed=st.integers(0, 2**16),
    )
    @settings(max_examples=40, deadline=None)
    def test_a_backend_that_goes_on_writes_what_was_not_proven_to_be_there(
        self, backend: TransferBackend, sizes: list[int], chunk: int, threads: int, seed: int
    ) -> None:
        if not isinstance(backend, ResumableBackend):
            pytest.skip("it cannot go on with what a killed process has left")
        chance = Random(seed)
        plans = plans_of(sizes, chunk=chunk * PAGE)
        memory = Memory(sizes).fill(len(sizes))
        with tempfile.TemporaryDirectory() as path, opened(open_root(path)) as folder:

            def write_missing(notes: Notes) -> Moved:
                assert isinstance(backend, ResumableBackend)
                return backend.write_missing(
                    folder, plans, memory.views, threads=threads, advance=ignored, notes=notes
                )

            first = Notes()
            moved = write_missing(first)
            entries = {entry.name: entry for entry in moved.files}
            for name, chunks in first.new.items():
                assert all(entries[name].chunks[index] == found for index, found in chunks.items())
            # Memory may have become another, even empty, where no fence held it.
            for view in memory.views:
                if chance.random() < 0.3:
                    view[:] = (
                        bytes(len(view)) if chance.random() < 0.5 else chance.randbytes(len(view))
                    )
            known: dict[str, dict[int, str]] = {}
            missing = 0
            for plan in plans:
                file = Path(path) / plan.name
                digests = dict(enumerate(entries[plan.name].chunks))
                kept = {i: d for i, d in digests.items() if chance.random() < 0.7}
                if not kept:
                    file.unlink()
                else:
                    known[plan.name] = kept
                    if chance.random() < 0.3:
                        os.truncate(file, chance.randrange(plan.size + 1))
                # What was cut off is zeros when the file has its size again.
                data = (file.read_bytes() if kept else b"").ljust(plan.size, b"\0")
                for piece in plan.chunks:
                    wanted = buffers.digest_in_memory(piece, memory.views)
                    there = data[piece.offset : piece.offset + piece.size]
                    stands = kept.get(piece.index) == wanted == xxhash.xxh3_128_hexdigest(there)
                    is_hole = not kept and wanted == xxhash.xxh3_128_hexdigest(bytes(piece.size))
                    missing += 0 if stands or is_hole else piece.size
            again = write_missing(Notes(known))
            assert again.bytes == missing
            read_again = Memory(sizes)
            read(backend, folder, plans, again, read_again)
            assert read_again.bytes() == memory.bytes()

    def test_some_chunks_of_a_file_are_read_without_the_others(
        self, backend: TransferBackend, folder: int
    ) -> None:
        sizes = [3 * CHUNK + 100]
        plans = plans_of(sizes, shard=8 * PAGE)
        moved = write(backend, folder, plans, Memory(sizes).fill(1))
        (plan,) = plans
        some = dataclasses.replace(plan, chunks=plan.chunks[1:3])
        found = Memory(sizes)
        backend.read_files(folder, [some], moved.files, found.views, threads=2, advance=ignored)
        whole = Memory(sizes).fill(1).bytes()[0]
        wanted = bytes(CHUNK) + whole[CHUNK : 3 * CHUNK] + bytes(100)
        assert found.bytes() == [wanted]


class FileBackendContract(TransferBackendContract):
    """The promises of a backend whose bytes are in the files of its plans."""

    def test_a_link_is_not_followed_and_a_file_is_not_written_over(
        self, backend: TransferBackend, folder: int, tmp_path: Path
    ) -> None:
        plans = plans_of(SIZES)
        (tmp_path / plans[1].name).write_bytes(b"mine")
        with pytest.raises(ArtifactExists):
            write(backend, folder, plans, Memory(SIZES).fill(5))
        assert (tmp_path / plans[1].name).read_bytes() == b"mine"
        (tmp_path / plans[0].name).unlink()
        (tmp_path / plans[0].name).symlink_to(plans[1].name)
        with pytest.raises((ArtifactCorrupt, ArtifactExists)):
            write(backend, folder, plans, Memory(SIZES).fill(5))
        assert (tmp_path / plans[1].name).read_bytes() == b"mine"
