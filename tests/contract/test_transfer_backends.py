"""The TransferBackend port: what every backend has to do, ours or of another package."""

from __future__ import annotations

import dataclasses
import errno
import importlib
import mmap
import os
import shutil
import sys
import tempfile
import types
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from random import Random
from typing import NamedTuple

import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from gms.adapters import posix
from gms.adapters.backends import GROUP, find_backend
from gms.domain.transfer import PAGE, FilePlan, place, plan_files
from gms.ports import Moved, TransferBackend
from snapshot_shared import files
from snapshot_shared.errors import (
    ArtifactCorrupt,
    ArtifactExists,
    ArtifactMissing,
    InvalidInput,
    NoSpace,
)
from snapshot_shared.files import open_root, opened
from snapshot_shared.frames import AllocationInfo
from tests.scenario.disk import SimDisk

MIB = 1024 * 1024
CHUNK = 2 * PAGE
POSIX = ("posix-direct", "posix-buffered")
EXAMPLE = Path(__file__).parents[1] / "support" / "example_backend.py"


@pytest.fixture(scope="module")
def site() -> Iterator[Path]:
    """A folder in which the example package is installed, and which Python looks into."""
    with tempfile.TemporaryDirectory(prefix="site-") as folder:
        shutil.copy(EXAMPLE, folder)
        info = Path(folder) / "example_backend-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: example-backend\nVersion: 1\n")
        (info / "entry_points.txt").write_text(
            f"[{GROUP}]\n"
            "example = example_backend:ExampleBackend\n"
            "broken = example_backend:Missing\n"
            "other = example_backend:Moved.__class__\n"
        )
        sys.path.insert(0, folder)
        yield Path(folder)
        sys.path.remove(folder)
        sys.modules.pop("example_backend", None)


class Subject(NamedTuple):
    name: str
    backend: TransferBackend
    module: types.ModuleType


@pytest.fixture(params=[*POSIX, "example"], scope="module")
def subject(request: pytest.FixtureRequest, site: Path) -> Subject:
    backend = find_backend(request.param)
    return Subject(request.param, backend, importlib.import_module(type(backend).__module__))


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
    infos = [
        AllocationInfo(id=f"a{slot}", size=size, aligned=size, tag="", slot=slot)
        for slot, size in enumerate(sizes)
    ]
    entries, lengths = place(infos, shard_bytes=shard)
    return plan_files(entries, lengths, chunk_bytes=[chunk] * len(lengths))


def nobody_asks(_: int) -> None:
    pass


def write(
    subject: Subject, folder: int, plans: list[FilePlan], memory: Memory, threads: int = 1
) -> Moved:
    return subject.backend.write_files(
        folder, plans, memory.views, threads=threads, advance=nobody_asks
    )


def read(
    subject: Subject, folder: int, plans: list[FilePlan], moved: Moved, memory: Memory
) -> Moved:
    return subject.backend.read_files(
        folder, plans, moved.files, memory.views, threads=2, advance=nobody_asks
    )


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[int]:
    with opened(open_root(tmp_path)) as fd:
        yield fd


@pytest.fixture
def disk(subject: Subject, monkeypatch: pytest.MonkeyPatch) -> SimDisk:
    """A simulated disk below the backend."""
    disk = SimDisk()
    for module in (subject.module, files):
        monkeypatch.setattr(module, "os", disk.os)
        if hasattr(module, "fcntl"):
            monkeypatch.setattr(module, "fcntl", disk.fcntl)
    return disk


SIZES = [PAGE + 5, 1, 3 * PAGE + 5, 4 * PAGE, PAGE - 1, 9 * PAGE]


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
    subject: Subject,
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
        moved = write(subject, folder, plans, memory, threads)
        assert memory.bytes() == before
        for plan, entry in zip(plans, moved.files, strict=True):
            data = (Path(path) / plan.name).read_bytes()
            assert (entry.name, entry.size, len(data)) == (plan.name, plan.size, plan.size)
            starts = range(0, plan.size, plan.chunk_bytes)
            pieces = [data[at : at + plan.chunk_bytes] for at in starts]
            assert [xxhash.xxh3_128_hexdigest(piece) for piece in pieces] == entry.chunks
        again = Memory(sizes, shift=shift)
        read(subject, folder, plans, moved, again)
    assert again.bytes() == before


def test_every_byte_is_told_once(subject: Subject, folder: int) -> None:
    plans, told = plans_of(SIZES), []
    memory = Memory(SIZES).fill(1)
    moved = subject.backend.write_files(folder, plans, memory.views, threads=3, advance=told.append)
    assert sum(told) == sum(plan.size for plan in plans)
    told.clear()
    again = Memory(SIZES)
    subject.backend.read_files(
        folder, plans, moved.files, again.views, threads=3, advance=told.append
    )
    assert sum(told) == sum(plan.size for plan in plans)


@pytest.mark.parametrize("where", [0, PAGE + 4, PAGE + 6, CHUNK - 1, CHUNK])
def test_a_flipped_bit_is_found_with_its_file_and_chunk(
    subject: Subject, folder: int, tmp_path: Path, where: int
) -> None:
    plans = plans_of(SIZES)
    moved = write(subject, folder, plans, Memory(SIZES).fill(2))
    with (tmp_path / plans[0].name).open("r+b") as shard:
        shard.seek(where)
        byte = shard.read(1)[0]
        shard.seek(where)
        shard.write(bytes([byte ^ 4]))
    with pytest.raises(ArtifactCorrupt) as caught:
        read(subject, folder, plans, moved, Memory(SIZES))
    assert caught.value.values["file"] == plans[0].name
    assert caught.value.values["chunk"] == where // CHUNK


@pytest.mark.parametrize("change", [-1, 1, -PAGE])
def test_a_file_of_another_length_is_refused(
    subject: Subject, folder: int, tmp_path: Path, change: int
) -> None:
    plans = plans_of(SIZES)
    moved = write(subject, folder, plans, Memory(SIZES).fill(3))
    os.truncate(tmp_path / plans[1].name, plans[1].size + change)
    with pytest.raises(ArtifactCorrupt):
        read(subject, folder, plans, moved, Memory(SIZES))


def test_a_missing_file_is_refused_as_missing(
    subject: Subject, folder: int, tmp_path: Path
) -> None:
    plans = plans_of(SIZES)
    moved = write(subject, folder, plans, Memory(SIZES).fill(4))
    (tmp_path / plans[1].name).unlink()
    with pytest.raises(ArtifactMissing, match=plans[1].name):
        read(subject, folder, plans, moved, Memory(SIZES))


def test_a_link_is_not_followed_and_a_file_is_not_written_over(
    subject: Subject, folder: int, tmp_path: Path
) -> None:
    plans = plans_of(SIZES)
    (tmp_path / plans[1].name).write_bytes(b"mine")
    with pytest.raises(ArtifactExists):
        write(subject, folder, plans, Memory(SIZES).fill(5))
    assert (tmp_path / plans[1].name).read_bytes() == b"mine"
    (tmp_path / plans[0].name).unlink()
    (tmp_path / plans[0].name).symlink_to(plans[1].name)
    with pytest.raises((ArtifactCorrupt, ArtifactExists)):
        write(subject, folder, plans, Memory(SIZES).fill(5))
    assert (tmp_path / plans[1].name).read_bytes() == b"mine"


@pytest.mark.parametrize("threads", [1, 4])
def test_what_advance_raises_ends_a_transfer_and_leaves_nothing_open(
    subject: Subject, folder: int, tmp_path: Path, threads: int
) -> None:
    plans = plans_of(SIZES * 20)
    memory = Memory(SIZES * 20).fill(6)
    told: list[int] = []

    class Cancelled(Exception):
        pass

    def stop(size: int) -> None:
        told.append(size)
        raise Cancelled

    before = set(Path("/proc/self/fd").iterdir())
    with pytest.raises(Cancelled):
        subject.backend.write_files(folder, plans, memory.views, threads=threads, advance=stop)
    for plan in plans:
        (tmp_path / plan.name).unlink(missing_ok=True)
    moved = write(subject, folder, plans, memory, threads)
    with pytest.raises(Cancelled):
        subject.backend.read_files(
            folder, plans, moved.files, Memory(SIZES * 20).views, threads=threads, advance=stop
        )
    assert set(Path("/proc/self/fd").iterdir()) <= before
    assert len(told) < sum(len(plan.chunks) for plan in plans)


def test_a_disk_that_is_full_is_named_and_nothing_stays_open(
    subject: Subject, disk: SimDisk
) -> None:
    plans = plans_of(SIZES)
    with closing(Descriptor(disk)) as folder:
        disk.capacity = sum(plan.size for plan in plans) // 2
        with pytest.raises(NoSpace):
            write(subject, folder.fd, plans, Memory(SIZES).fill(7))
        assert disk.os.open_descriptors() == [folder.fd]


class Descriptor:
    """The root of a simulated disk, open."""

    def __init__(self, disk: SimDisk) -> None:
        self.disk = disk
        self.fd = disk.os.open(disk.mount, os.O_RDONLY | os.O_DIRECTORY)

    def close(self) -> None:
        self.disk.os.close(self.fd)


@pytest.mark.parametrize("size", [1, PAGE, 2 * PAGE, 3 * PAGE + 5])
def test_what_is_written_outlives_a_power_loss_wherever_its_name_does(
    subject: Subject, disk: SimDisk, size: int
) -> None:
    plans = plans_of([size])
    memory = Memory([size]).fill(8)
    with closing(Descriptor(disk)) as folder:
        write(subject, folder.fd, plans, memory)
    left = [dict(state.tree()) for state in disk.legal_states()]
    assert any(left), "a state in which the name is there"
    for tree in left:
        assert all(bytes(data) == memory.bytes()[0] for data in tree.values())


def test_a_failing_fsync_is_no_success(subject: Subject, disk: SimDisk) -> None:
    with closing(Descriptor(disk)) as folder:
        disk.fail("fsync")
        with pytest.raises(OSError, match="Input/output error"):
            write(subject, folder.fd, plans_of([PAGE]), Memory([PAGE]).fill(9))


def test_requests_that_end_early_leave_nothing_out(subject: Subject, disk: SimDisk) -> None:
    plans, memory = plans_of(SIZES), Memory(SIZES).fill(10)
    with closing(Descriptor(disk)) as folder:
        disk.fail("write", 1, 0, times=10_000)
        moved = write(subject, folder.fd, plans, memory)
        again = Memory(SIZES)
        read(subject, folder.fd, plans, moved, again)
    assert again.bytes() == memory.bytes()


def test_memory_for_a_transfer_is_bounded(subject: Subject, folder: int) -> None:
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

    moved = subject.backend.write_files(folder, plans, views, threads=threads, advance=look)
    region[:] = bytes(len(region))
    subject.backend.read_files(folder, plans, moved.files, views, threads=threads, advance=look)
    os.close(fd)
    assert highest - before <= threads * chunk + 32 * MIB
    assert all(view[-1] == i + 1 for i, view in enumerate(views))


def private_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    (line,) = [line for line in lines if line.startswith("RssAnon:")]
    return int(line.split()[1]) * 1024


# What only ours promise.


@pytest.mark.parametrize("name", POSIX)
def test_a_chunk_of_zeros_takes_no_room_and_is_not_read(
    name: str, folder: int, tmp_path: Path
) -> None:
    backend = find_backend(name)
    sizes = [4 * MIB, 4 * MIB]
    memory = Memory(sizes)
    memory.views[1][:] = Random(1).randbytes(4 * MIB)
    plans = plans_of(sizes, shard=16 * MIB, chunk=MIB)
    moved = backend.write_files(folder, plans, memory.views, threads=2, advance=nobody_asks)
    assert moved.bytes == 4 * MIB
    assert moved.files[0].chunks[:4] == [xxhash.xxh3_128_hexdigest(bytes(MIB))] * 4
    found = (tmp_path / plans[0].name).stat()
    assert (found.st_size, found.st_blocks * 512 < 5 * MIB) == (8 * MIB, True)
    again = Memory(sizes)
    loaded = backend.read_files(
        folder, plans, moved.files, again.views, threads=2, advance=nobody_asks
    )
    assert loaded.bytes == 4 * MIB
    assert again.bytes() == memory.bytes()


@pytest.mark.parametrize("subject", ["posix-direct"], indirect=True)
def test_a_file_system_without_direct_io_gets_buffered_requests_and_it_is_said(
    subject: Subject, disk: SimDisk
) -> None:
    plans, memory = plans_of(SIZES), Memory(SIZES).fill(11)
    with closing(Descriptor(disk)) as folder:
        assert write(subject, folder.fd, plans, memory).backend == "posix-direct"
        for plan in plans:
            disk.os.unlink(plan.name, dir_fd=folder.fd)
        disk.os.takes_direct = False
        moved = write(subject, folder.fd, plans, memory)
        again = Memory(SIZES)
        assert read(subject, folder.fd, plans, moved, again).backend == "posix-buffered"
    assert moved.backend == "posix-buffered"
    assert again.bytes() == memory.bytes()


@pytest.mark.parametrize("subject", ["posix-direct"], indirect=True)
def test_a_refusal_for_another_reason_than_direct_io_is_an_error(
    subject: Subject, disk: SimDisk
) -> None:
    with closing(Descriptor(disk)) as folder:
        disk.fail("write", 1, errno.EIO)
        with pytest.raises(OSError, match="Input/output error"):
            write(subject, folder.fd, plans_of([PAGE]), Memory([PAGE]).fill(12))


@pytest.mark.parametrize("cached", [True, False])
def test_direct_reads_are_for_what_the_page_cache_does_not_hold(
    folder: int, tmp_path: Path, cached: bool
) -> None:
    memory = Memory([4 * MIB]).fill(13)
    plans = plans_of([4 * MIB], shard=16 * MIB, chunk=MIB)
    moved = find_backend("posix-buffered").write_files(
        folder, plans, memory.views, threads=1, advance=nobody_asks
    )
    with opened(os.open(tmp_path / plans[0].name, os.O_RDONLY)) as fd:
        if not cached:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        resident = {posix._is_resident(fd, chunk) for chunk in plans[0].chunks}
    assert resident == {cached}
    again = Memory([4 * MIB])
    find_backend("posix-direct").read_files(
        folder, plans, moved.files, again.views, threads=1, advance=nobody_asks
    )
    assert again.bytes() == memory.bytes()


# How a backend is found.


def test_an_unknown_backend_is_refused_with_those_that_there_are(site: Path) -> None:
    with pytest.raises(InvalidInput, match=r"SNAPBACK_TRANSFER_BACKEND='gds'") as caught:
        find_backend("gds")
    expected = caught.value.values["expected"]
    assert set(expected) >= {"posix-direct", "posix-buffered", "example"}


@pytest.mark.parametrize(("name", "why"), [("broken", "Missing"), ("other", "takes|no transfer")])
def test_a_backend_that_cannot_be_used_is_refused_with_its_entry_point(
    site: Path, name: str, why: str
) -> None:
    with pytest.raises(InvalidInput, match=why) as caught:
        find_backend(name)
    assert "example_backend:" in caught.value.message


def test_some_chunks_of_a_file_are_read_without_the_others(subject: Subject, folder: int) -> None:
    sizes = [3 * CHUNK + 100]
    plans = plans_of(sizes, shard=8 * PAGE)
    moved = write(subject, folder, plans, Memory(sizes).fill(1))
    (plan,) = plans
    some = dataclasses.replace(plan, chunks=plan.chunks[1:3])
    found = Memory(sizes)
    subject.backend.read_files(
        folder, [some], moved.files, found.views, threads=2, advance=nobody_asks
    )
    whole = Memory(sizes).fill(1).bytes()[0]
    wanted = bytes(CHUNK) + whole[CHUNK : 3 * CHUNK] + bytes(100)
    assert found.bytes() == [wanted]
